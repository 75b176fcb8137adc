"""What the checkpoint package asks of a file system, one method an operation.

Everything that touches the disk goes through `PosixFiles`, so that another backend can take its
place and tests can hand in one that fails, or kills its process, at the k-th operation: every
primitive step first calls `before`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from crc32c import crc32c

from jobrunner.checkpoint.storage import linux
from jobrunner.checkpoint.storage.paths import is_url

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

BLOCK_BYTES = 1 << 20
"""Digested and written (or read and digested) at once: small enough to stay in a core's cache."""

_WRITTEN_BACK_BYTES = 128 << 10  # for less, the call costs more than it saves
_ZEROS = bytes(BLOCK_BYTES)
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR)
_NO_LINK = (
    *_NOTHING_THERE,
    *(errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV, errno.EACCES, errno.ENOSYS),
)


class PosixFiles:
    """A POSIX file system, as the checkpoint package uses it.

    Notes
    -----
    Runs on client and workers; instances are picklable and hold no state. All methods raise the
    OSError they meet; who calls them knows what it means. Another backend, such as `ObjectFiles`,
    has all methods that touch storage of its own.

    Attributes
    ----------
    threads : int
        That write or read at once: more of them are not faster. The calling one is among them.
    removals : int
        Trees that are removed at once, where that takes long: a file system may wait for its disk,
        or a server, at each file.
    lookups : int
        That `each` makes at once.
    linked_bytes : int
        A shorter chunk that has not changed is written again: that costs no more than `link`.
    poll_seconds : float
        From one look for a file that somebody may have put there to the next, at least.
    """

    threads = 2
    removals = 4
    lookups = 1
    linked_bytes = 64 << 10
    poll_seconds = 0.0

    def reaches(self, path: str) -> bool:
        """Whether `path`, of a checkpoint directory or in one, is of this backend."""
        return not is_url(path)

    def before(self, operation: str, path: str) -> None:
        """Run before every primitive step; here for subclasses that inject faults.

        Parameters
        ----------
        operation : str
            ``mkdir``, ``create``, ``write``, ``fsync``, ``syncfs``, ``link``, ``rename``,
            ``unlink``, ``rmdir``, ``open`` or ``list``.
        path : str
        """

    def each(
        self,
        call: Callable[[Item], Result],
        items: Iterable[Item],
        at_once: int | None = None,
    ) -> Iterator[Result]:
        """What `call` gives for each item, in order, as it is asked for.

        Parameters
        ----------
        call : callable
            Reads or writes little: whether there is a file of some name, say. Where the storage is
            far away, it is called from several threads, and for more than was asked for.
        items : iterable
        at_once : int, optional
            So many calls at most; by default `lookups`. Fewer are for calls that have threads of
            their own.
        """
        return map(call, items)

    # --- writing

    def make_directory(self, path: str) -> None:
        """Create a directory that must not exist, in one that must."""
        self.before("mkdir", path)
        os.mkdir(path)

    def make_directories(self, path: str) -> None:
        """Create a directory, and those above it, durably, where they do not exist."""
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            parent = os.path.dirname(path)
            if parent == path:
                break
            path = parent
        for directory in reversed(missing):
            self.before("mkdir", directory)
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
            self.sync_directory(os.path.dirname(directory))

    def write(
        self,
        path: str,
        buffers: Sequence[bytes | memoryview],
        padding_bytes: int = 0,
        digest: Callable[[memoryview, int], int] = crc32c,
    ) -> int:
        """Create a file that must not exist; durable only once synced.

        Parameters
        ----------
        path : str
        buffers : sequence of bytes or C-contiguous memoryview
            Written one after the other.
        padding_bytes : int
            So many zero bytes follow.
        digest : callable, optional
            Given a block of the buffers, which lies in the core's cache then, and what it gave
            for the block before, or 0; by default the crc32c of all blocks so far.

        Returns
        -------
        int
            What `digest` gave for the last block; the padding is added by crc32c.
        """
        self.before("create", path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        found = position = 0
        try:
            for buffer in buffers:
                view = memoryview(buffer)
                if view.nbytes:
                    view = view.cast("B")
                    for start in range(0, len(view), BLOCK_BYTES):
                        block = view[start : start + BLOCK_BYTES]
                        found = digest(block, found)
                        self._write_block(descriptor, path, block)
                        if len(block) >= _WRITTEN_BACK_BYTES:
                            # The disk works while the next block is copied, not after them all.
                            self._start_writing_back(descriptor, path, position, len(block))
                        position += len(block)
            while padding_bytes > 0:
                block = memoryview(_ZEROS)[:padding_bytes]
                found = crc32c(block, found)
                self._write_block(descriptor, path, block)
                padding_bytes -= len(block)
        except BaseException:
            os.close(descriptor)
            raise
        # Closing is where some network file systems report that there is no room.
        os.close(descriptor)
        return found

    def _write_block(self, descriptor: int, path: str, block: memoryview) -> None:
        while block:
            self.before("write", path)
            block = block[os.write(descriptor, block) :]

    def _start_writing_back(self, descriptor: int, path: str, start: int, nbytes: int) -> None:
        try:
            linux.start_writing_back(descriptor, start, nbytes)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error

    def digest(self, data: bytes | memoryview, before: int = 0) -> int:
        """The crc32c of `data`, as `write` and `read_into` give it; `before` is what it follows."""
        return int(crc32c(data, before))

    def digest_zeros(self, nbytes: int, before: int) -> int:
        """The crc32c of what has the digest `before` and so many zero bytes after it."""
        while nbytes > 0:
            block = memoryview(_ZEROS)[:nbytes]
            before = int(crc32c(block, before))
            nbytes -= len(block)
        return before

    def link(self, source: str, target: str, nbytes: int) -> bool:
        """Give a file a second name, in another directory, provided it is `nbytes` long.

        Returns
        -------
        bool
            False where it is gone or of another size, or cannot be linked: write it then.
        """
        try:
            self.before("link", target)
            os.link(source, target)
        except OSError as error:
            if error.errno in _NO_LINK:
                return False
            raise
        if os.lstat(target).st_size == nbytes:
            return True
        self.remove_file(target)
        return False

    def overwrite(self, path: str, data: bytes) -> None:
        """Write `data` over the start of a file, creating it; neither atomic nor durable."""
        self.before("write", path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.pwrite(descriptor, data, 0)
        finally:
            os.close(descriptor)

    def create_whole(self, path: str, data: bytes, temporary: str) -> bool:
        """Create a file atomically and durably, unless it exists.

        Parameters
        ----------
        path : str
        data : bytes
            Distinct from what anybody else would write there: it settles whose file it is.
        temporary : str
            A path in the same directory that nobody else uses.

        Returns
        -------
        bool
            False if another's file is there already.

        Notes
        -----
        *Atomicity*: the file is there whole, or not at all; it is durable once this returns
        True. *Safe to retry*: yes, with the same `data`.
        """
        try:
            self.write(temporary, [data])
            try:
                self.sync_file(temporary)
            except FileNotFoundError:
                if not self.is_taken(path):
                    raise
                return False  # whoever was first has cleaned it up
            try:
                self.before("link", path)
                os.link(temporary, path)
            except OSError as error:
                # A network file system may fail, or find the name taken, after its own success.
                found = self.read_if_there(path)
                if found is None:
                    raise _explain_link(error) from error
                if found != data:
                    return False
        finally:
            with contextlib.suppress(OSError):
                self.remove_file(temporary)
        self.sync_directory(os.path.dirname(path))
        return True

    def prove_creation(self, directory: str) -> None:
        """See that `create_whole` has one winner in this directory, before any relies on it.

        Nothing on a file system: where it has no links, `create_whole` itself fails.
        """

    def rename(self, source: str, target: str) -> None:
        """Give a file another name in the same directory."""
        self.before("rename", source)
        os.rename(source, target)

    def remove_file(self, path: str) -> None:
        """Remove a file."""
        self.before("unlink", path)
        os.unlink(path)

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all in it; what is not there any more counts as removed."""
        self.before("list", path)
        try:
            with os.scandir(path) as found:
                entries = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in found]
        except FileNotFoundError:
            return
        for entry, is_directory in entries:
            if is_directory:
                self.remove_tree(entry)
            else:
                with contextlib.suppress(FileNotFoundError):
                    self.remove_file(entry)
        self.before("rmdir", path)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(path)

    # --- durability

    def sync_file(self, path: str) -> None:
        """Make a file's content durable."""
        self._sync_path(path)

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable."""
        self._sync_path(path)

    def _sync_path(self, path: str) -> None:
        self.before("fsync", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def durable(
        self, path: str, names: Sequence[str], changed: Collection[str] | None = None
    ) -> Iterator[None]:
        """Make durable, at the end, all that the block wrote below `names` in directory `path`.

        Parameters
        ----------
        path : str
        names : sequence of str
        changed : collection of str, optional
            Directories in which names have changed; read at the end. By default `path`.

        Notes
        -----
        One ``syncfs`` where the system has one that reports errors (Linux 5.8 on); else an fsync
        of each file and directory.
        """
        # Opened first: syncfs reports what failed since then, in the background as well.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield
            if self.has_syncfs:
                self.before("syncfs", path)
                number = self._sync_file_system(descriptor)
                if number == 0:
                    return
                if number not in (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP):
                    raise OSError(number, os.strerror(number), path)
            for name in names:
                for directory, _, members in os.walk(os.path.join(path, name), onerror=_raise):
                    for member in members:
                        self.sync_file(os.path.join(directory, member))
                    self.sync_directory(directory)
            for directory in (path,) if changed is None else changed:
                self.sync_directory(directory)
        finally:
            os.close(descriptor)

    @property
    def has_syncfs(self) -> bool:
        """Whether one call makes a whole file system durable, and tells what failed."""
        return linux.HAS_SYNCFS

    def _sync_file_system(self, descriptor: int) -> int:
        """0, or the errno of what failed."""
        return linux.sync_file_system(descriptor)

    # --- reading

    def read(self, path: str) -> bytes:
        """Whole content of a file."""
        self.before("open", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            pieces = []
            nbytes = os.fstat(descriptor).st_size + 1  # one read finds the end, too
            while piece := os.read(descriptor, nbytes):
                pieces.append(piece)
            return b"".join(pieces)
        finally:
            os.close(descriptor)

    def read_if_there(self, path: str) -> bytes | None:
        """Whole content of a file; None where there is none."""
        try:
            return self.read(path)
        except OSError as error:
            if error.errno in _NOTHING_THERE:
                return None
            raise

    def read_into(self, path: str, target: memoryview | None, nbytes: int) -> tuple[int, int]:
        """Read a file into memory and digest it.

        Parameters
        ----------
        path : str
        target : memoryview of bytes or None
            Takes the first ``len(target)`` bytes; the rest, or all if None, is only digested.
        nbytes : int
            The size that is expected; a file of another size is not read.

        Returns
        -------
        size, digest : int
            Of the file; the digest is a crc32c, and 0 where the size is not `nbytes`.
        """
        self.before("open", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            if size != nbytes:
                return size, 0
            digest, position, spare = 0, 0, memoryview(b"")
            wanted = len(target) if target is not None else 0
            while position < nbytes:
                if target is not None and position < wanted:
                    block = target[position : min(wanted, position + BLOCK_BYTES)]
                else:
                    if not spare:
                        spare = memoryview(bytearray(min(BLOCK_BYTES, nbytes - position)))
                    block = spare[: nbytes - position]
                count = os.readv(descriptor, [block])
                if count == 0:  # cut while it was read
                    return position, 0
                digest = crc32c(block[:count], digest)
                position += count
            return size, digest
        finally:
            os.close(descriptor)

    def read_span(self, path: str, start: int, nbytes: int) -> tuple[int, bytes]:
        """Part of a file, and the size of all of it."""
        self.before("open", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            pieces = []
            while nbytes > 0 and (data := os.pread(descriptor, nbytes, start)):
                pieces.append(data)
                start += len(data)
                nbytes -= len(data)
            return size, b"".join(pieces)
        finally:
            os.close(descriptor)

    def list_names(self, path: str) -> list[str]:
        """Names in a directory; none where there is no such directory."""
        self.before("list", path)
        try:
            return os.listdir(path)
        except OSError as error:
            if error.errno in _NOTHING_THERE:
                return []
            raise

    def is_taken(self, path: str) -> bool:
        """Whether anything has this name, a dangling link included."""
        try:
            os.lstat(path)
        except OSError as error:
            if error.errno in _NOTHING_THERE:
                return False
            raise
        return True

    def is_directory(self, path: str) -> bool:
        """Whether this is a directory."""
        return os.path.isdir(path)

    def walk(self, path: str) -> Iterator[tuple[str, int]]:
        """All files in a directory and those in it: path within, with ``/``, and size in bytes.

        None of what is not there, or goes meanwhile.
        """
        for directory, _, names in os.walk(path, onerror=_raise_unless_gone):
            for name in names:
                full = os.path.join(directory, name)
                with contextlib.suppress(FileNotFoundError):
                    size = os.lstat(full).st_size
                    yield os.path.relpath(full, path).replace(os.sep, "/"), size

    def modified_seconds(self, path: str) -> float:
        """When a file was last written, in seconds since 1970, by whatever clock it has."""
        return os.lstat(path).st_mtime

    def locate(self, path: str) -> tuple[Any, str]:
        """Where a Zarr reader finds an array: an obstore store and a path in it; None: a file's.

        Raises
        ------
        OSError
            The array is not there.
        """
        return None, path


def _raise(error: OSError) -> None:
    """For `os.walk`, which keeps to itself what it cannot list."""
    raise error


def _raise_unless_gone(error: OSError) -> None:
    if error.errno not in _NOTHING_THERE:
        raise error


def _explain_link(error: OSError) -> OSError:
    if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
        return OSError(
            error.errno,
            "this file system cannot make hard links, which the log needs to create its entries "
            "atomically; use a directory on another file system",
            error.filename2 or error.filename,
        )
    return error
