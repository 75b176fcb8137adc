"""Files in a POSIX file system: the checkpoint package accesses files only through this module."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial

from crc32c import crc32c

from jobrunner.checkpoint.storage import system
from jobrunner.checkpoint.storage.protocol import DOCUMENT_BYTES, Item, Result, Rights
from jobrunner.checkpoint.storage.system import (
    DIRECTORY,
    PASSAGE,
    Opener,
    directories_in,
    explain_link,
    read_bytes,
    scan,
    too_long,
    within,
)

BLOCK_BYTES = 1 << 20
"""Size of a block that is digested and written together, while it is in a core's cache."""

_WRITTEN_BACK_BYTES = 128 << 10  # for less, the call costs more than it saves
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_ZEROS = bytes(BLOCK_BYTES)
_NOTHING_THERE = (FileNotFoundError, NotADirectoryError)
_NO_LINK = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EOPNOTSUPP),
    *(errno.EMLINK, errno.EXDEV, errno.EACCES, errno.ENOSYS),
)


def join_path(root: str, path: str) -> str:
    """Path of a file in a store, as its manifest names it."""
    return f"{root}/{path}"


def crc32c_of_zeros(nbytes: int, before: int) -> int:
    """The crc32c of `nbytes` zero bytes, appended to bytes whose crc32c is `before`."""
    while nbytes > 0:
        block = memoryview(_ZEROS)[:nbytes]
        before = crc32c(block, before)
        nbytes -= len(block)
    return before


class PosixFiles:
    """A POSIX file system; see `Files`.

    Below the directories named by `bind`, no link is followed and only regular files are opened;
    the path of such a directory itself may contain links.
    `durable` calls ``syncfs`` once where that reports errors (Linux 5.8 or later), else ``fsync``.
    """

    threads = 2
    removals = 4
    lookups = 1
    linked_bytes = 64 << 10
    poll_seconds = 0.0

    def __init__(self) -> None:
        self.opener = Opener()
        self.mode: int | None = None
        """Rights of new files; None: those of the process's umask."""

    def reaches(self, path: str) -> bool:
        return "://" not in path

    def bind(self, directory: str, mode: int | None = None) -> None:
        """Follow no link below a checkpoint directory, and give new files the rights `mode`."""
        self.opener.bind(directory)
        self.mode = mode

    def before(self, operation: str, path: str) -> None:
        pass

    def each(
        self, call: Callable[[Item], Result], items: Iterable[Item], at_once: int | None = None
    ) -> Iterator[Result]:
        return map(call, items)

    # --- writing

    def make_directory(self, path: str, inside: Collection[str] = ()) -> None:
        self.before("mkdir", path)
        descriptor = self.opener.at(path, self._make_directory)
        with within(descriptor, path):
            for name in inside:
                below = f"{path}/{name}"
                self.before("mkdir", below)
                if "/" in name or self.mode is not None:
                    os.close(self.opener.at(below, self._make_directory))
                else:
                    os.mkdir(name, dir_fd=descriptor)

    def _make_directory(self, name: str, at: int | None) -> int:
        os.mkdir(name, dir_fd=at)
        descriptor = os.open(name, PASSAGE if self.mode is None else DIRECTORY, dir_fd=at)
        if self.mode is not None:
            kept = os.fstat(descriptor).st_mode & stat.S_ISGID
            try:
                os.fchmod(descriptor, kept | self.mode | (self.mode & 0o444) >> 2)
            except OSError:  # a file system without rights
                os.close(descriptor)
                raise
        return descriptor

    def make_directories(self, path: str) -> None:
        if self.is_directory(path):
            return
        if (parent := os.path.dirname(path)) != path:
            self.make_directories(parent)
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # somebody removes it already
            self.make_directory(path)
        self.sync_path(parent)

    def write(
        self,
        path: str,
        buffers: Sequence[bytes | memoryview],
        padding_bytes: int = 0,
        digest: Callable[[memoryview, int], int] = crc32c,
    ) -> int:
        self.before("create", path)
        descriptor = self.opener.open(path, _NEW)
        found = position = 0
        try:
            if self.mode is not None:
                os.fchmod(descriptor, self.mode)
            for buffer in buffers:
                view = memoryview(buffer)
                if view.nbytes:
                    view = view.cast("B")
                    for start in range(0, len(view), BLOCK_BYTES):
                        block = view[start : start + BLOCK_BYTES]
                        found = digest(block, found)
                        self._write_block(descriptor, path, block)
                        if len(block) >= _WRITTEN_BACK_BYTES:
                            # The disk writes while the next block is copied.
                            system.start_writing_back(descriptor, position, len(block), path)
                        position += len(block)
            while padding_bytes > 0:
                block = memoryview(_ZEROS)[:padding_bytes]
                found = crc32c(block, found)
                self._write_block(descriptor, path, block)
                padding_bytes -= len(block)
        finally:
            os.close(descriptor)  # some network file systems report a full disk only here
        return found

    def _write_block(self, descriptor: int, path: str, block: memoryview) -> None:
        while True:
            self.before("write", path)
            written = os.write(descriptor, block)
            if written == len(block):
                return
            block = block[written:]

    def link(self, source: str, target: str, nbytes: int) -> bool:
        try:
            self.before("link", target)
            linked = self._link(source, target)
        except OSError as error:
            if error.errno in _NO_LINK:
                return False
            raise
        if linked.st_size == nbytes and stat.S_ISREG(linked.st_mode):
            return True
        self.remove_file(target)
        return False

    def _link(self, source: str, target: str) -> os.stat_result:
        """Give a file, even if it is a symbolic link, a second name; returns its attributes."""

        def link(name: str, at: int | None, new: str, there: int | None) -> os.stat_result:
            os.link(name, new, src_dir_fd=at, dst_dir_fd=there, follow_symlinks=False)
            return os.stat(new, dir_fd=there, follow_symlinks=False)

        return self.opener.at(source, lambda *its: self.opener.at(target, partial(link, *its)))

    def overwrite(self, path: str, data: bytes) -> None:
        self.before("write", path)
        descriptor, found = self.opener.open_file(path, os.O_WRONLY | os.O_CREAT)
        try:
            if found.st_nlink > 1:  # as in a snapshot, whose file stays as it is
                self.remove_file(path)
                self.write(path, [data])
                return
            if self.mode is not None and not found.st_size:
                os.fchmod(descriptor, self.mode)
            os.pwrite(descriptor, data, 0)
        finally:
            os.close(descriptor)

    def create_whole(self, path: str, data: bytes, temporary: str) -> bool:
        try:
            self.write(temporary, [data])
            try:
                self.sync_path(temporary)
            except FileNotFoundError:
                if not self.is_taken(path):
                    raise
                return False  # the writer that won has removed it
            try:
                self.before("link", path)
                self._link(temporary, path)
            except OSError as error:
                # A network file system may fail, or find the name taken, after it has linked.
                found = self.read_if_there(path)
                if found is None:
                    raise explain_link(error, path) from error
                if found != data:
                    return False
        finally:
            with contextlib.suppress(OSError):
                self.remove_file(temporary)
        self.sync_path(os.path.dirname(path))
        return True

    def prove_creation(self, directory: str) -> None:
        pass  # without hard links, `create_whole` itself fails

    def rename(self, source: str, target: str) -> None:
        self.before("rename", source)

        def rename(name: str, at: int | None) -> None:
            new = os.path.join(os.path.dirname(name), os.path.basename(target))
            os.rename(name, new, src_dir_fd=at, dst_dir_fd=at)

        self.opener.at(source, rename)

    def remove_file(self, path: str) -> None:
        self.before("unlink", path)
        self.opener.at(path, lambda name, at: os.unlink(name, dir_fd=at))

    def remove_tree(self, path: str) -> None:
        self.before("list", path)
        with contextlib.suppress(FileNotFoundError):
            self._remove_content(path, self.opener.open(path, DIRECTORY), 0)
            self.before("rmdir", path)
            self.opener.at(path, lambda name, at: os.rmdir(name, dir_fd=at))

    def _remove_content(self, path: str, descriptor: int, depth: int) -> None:
        """Remove all that is in a directory, and close its descriptor."""
        with within(descriptor, path):
            for entry in scan(descriptor, path, depth):
                inside = f"{path}/{entry.name}"
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        self.before("list", inside)
                        below = os.open(entry.name, DIRECTORY, dir_fd=descriptor)
                        self._remove_content(inside, below, depth + 1)
                        self.before("rmdir", inside)
                        os.rmdir(entry.name, dir_fd=descriptor)
                    else:
                        self.before("unlink", inside)
                        os.unlink(entry.name, dir_fd=descriptor)

    # --- durability

    def sync_path(self, path: str) -> None:
        self.before("fsync", path)
        descriptor = self.opener.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def durable(
        self, path: str, names: Sequence[str], changed: Collection[str] | None = None
    ) -> Iterator[None]:
        # Opened first: syncfs reports all failures since then, also in the background.
        descriptor = self.opener.open(path, DIRECTORY)
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
                root = os.path.join(path, name)
                for member, _ in self.opener.walk(root):
                    self.sync_path(os.path.join(root, member))
                self.sync_path(root)
            for directory in (path,) if changed is None else changed:
                self.sync_path(directory)
        finally:
            os.close(descriptor)

    @property
    def has_syncfs(self) -> bool:
        """Whether one call makes a whole file system durable and reports errors."""
        return system.has_syncfs

    def _sync_file_system(self, descriptor: int) -> int:
        return system.sync_file_system(descriptor)

    # --- reading

    def read(self, path: str, most: int = DOCUMENT_BYTES) -> bytes:
        self.before("open", path)
        descriptor, found = self.opener.open_file(path)
        try:
            if found.st_size > most:
                raise too_long(path, found.st_size, most)
            return read_bytes(descriptor, found.st_size)
        finally:
            os.close(descriptor)

    def read_if_there(self, path: str, most: int = DOCUMENT_BYTES) -> bytes | None:
        try:
            return self.read(path, most)
        except _NOTHING_THERE:
            return None

    def read_into(self, path: str, target: memoryview | None, nbytes: int) -> tuple[int, int]:
        self.before("open", path)
        descriptor, found = self.opener.open_file(path)
        try:
            size = found.st_size
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
                if not count:  # cut while it was read
                    return position, 0
                digest = crc32c(block[:count], digest)
                position += count
            return size, digest
        finally:
            os.close(descriptor)

    def read_span(self, path: str, start: int, nbytes: int) -> tuple[int, bytes]:
        self.before("open", path)
        descriptor, found = self.opener.open_file(path)
        try:
            size = found.st_size
            if not 0 <= start < size:
                return size, b""
            os.lseek(descriptor, start, os.SEEK_SET)
            return size, read_bytes(descriptor, max(0, min(nbytes, size - start)))
        finally:
            os.close(descriptor)

    def list_names(self, path: str, names: Callable[[int], list[str]] = os.listdir) -> list[str]:
        self.before("list", path)
        try:
            descriptor = self.opener.open(path, DIRECTORY)
        except _NOTHING_THERE:
            return []
        with within(descriptor, path):
            return names(descriptor)

    def list_directories(self, path: str) -> list[str]:
        return self.list_names(path, directories_in)

    def is_taken(self, path: str) -> bool:
        try:
            self.opener.stat(path)
        except _NOTHING_THERE:
            return False
        return True

    def is_directory(self, path: str) -> bool:
        try:
            os.close(self.opener.open(path, PASSAGE))
        except OSError:
            return False
        return True

    def walk(self, path: str) -> Iterator[tuple[str, int]]:
        for name, found in self.opener.walk(path):
            if found is not None:
                yield name, found.st_size if stat.S_ISREG(found.st_mode) else -1

    def rights(self, path: str) -> Rights | None:
        return self.opener.rights(path)

    def modified_seconds(self, path: str) -> float:
        return self.opener.stat(path).st_mtime
