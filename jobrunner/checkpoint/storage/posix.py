"""Files in a POSIX file system: the checkpoint package accesses local files only through this module.

A checkpoint directory may come from a stranger. A link in it could lead a run, or a command such as
`jobrunner prune`, to any file of this user; a pipe would make a reader wait for ever. So each part of
a path below the directory is looked at before the path is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import xxhash

from jobrunner.checkpoint.storage.protocol import (
    DOCUMENT_BYTES,
    Buffers,
    Item,
    Result,
    refuse,
    too_long,
)

BLOCK_BYTES = 1 << 20
"""Size of a block that is digested and written together, while it is in a core's cache."""

_MOST_LEVELS = 100
_NEW_FILE_RIGHTS = 0o666  # less the umask
_GONE = (FileNotFoundError, NotADirectoryError)
_WITHOUT_SYNCFS = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)
_WITHOUT_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)
_NO_LINK = (
    *_WITHOUT_LINKS,
    *(errno.ENOENT, errno.ENOTDIR, errno.EXDEV, errno.EACCES, errno.ENOSYS),
)
_FOREIGN_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def join_path(root: str, path: str) -> str:
    """Path of a file in a store, as its document names it."""
    return f"{root}/{path}"


class PosixFiles:
    """A POSIX file system; see `Files`.

    Below the directories named by `bind`, no link is followed and only regular files are opened;
    the path of such a directory itself may contain links.
    `making_durable` calls ``syncfs`` once where that reports errors (Linux 5.8 or later), else ``fsync``.
    """

    threads = 2
    lookups = 1
    linked_bytes = 64 << 10
    appended_bytes = 4 << 20  # sparse until it is full

    def __init__(self) -> None:
        self._roots: tuple[str, ...] = ()
        # Directories that were made, so that no link leads to them: for the save under way.
        self._made: set[str] = set()

    def reaches(self, path: str) -> bool:
        return "://" not in path

    def bind(self, directory: str) -> None:
        """Follow no link below a checkpoint directory."""
        root = f"{directory.rstrip('/')}/"
        # The longest first: of a directory within another one, its own path may be a link.
        self._roots = tuple(sorted({*self._roots, root}, key=len, reverse=True))

    def _check(self, path: str) -> str:
        """Return a path; raises `ForeignFileError` for a link, pipe or device on the way or there."""
        if path in self._made:
            return path
        for root in self._roots:
            if f"{path}/".startswith(root):
                _check_below(root, path)
                break
        return path

    def _check_way(self, path: str) -> str:
        """Return a path, whose last name is not followed, once no link leads to its directory."""
        self._check(os.path.dirname(path))
        return path

    def before(self, operation: str, path: str) -> None:
        pass

    def each(self, call: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        return map(call, items)

    # --- writing

    def make_directory(self, path: str) -> None:
        self.before("mkdir", path)
        os.mkdir(self._check_way(path))
        self._made.add(path)

    def make_directories(self, path: str) -> None:
        if self.is_directory(path):
            return
        parent = os.path.dirname(path)
        if parent != path:
            self.make_directories(parent)
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # somebody removes it already
            self.make_directory(path)
        self.sync_path(parent)

    def write(self, path: str, buffers: Buffers) -> str:
        self.before("create", path)
        digest = xxhash.xxh3_128()
        position = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(self._check_way(path), flags, _NEW_FILE_RIGHTS)
        try:
            for buffer in buffers:
                for start in range(0, len(buffer), BLOCK_BYTES):
                    block = buffer[start : start + BLOCK_BYTES]
                    digest.update(block)
                    self._write_all(path, descriptor, block)
                    if len(block) == BLOCK_BYTES:
                        _start_writing_back(descriptor, position)
                    position += len(block)
        finally:
            os.close(descriptor)  # some network file systems report a full disk only here
        return digest.hexdigest()

    def _write_all(self, path: str, descriptor: int, data: bytes | memoryview) -> None:
        """Write data, of which the system may take only a part at a time."""
        while data:
            self.before("write", path)
            data = data[os.write(descriptor, data) :]

    def write_at(self, path: str, start: int, buffers: Buffers, nbytes: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        descriptor = os.open(self._check_way(path), flags, _NEW_FILE_RIGHTS)
        try:
            if os.fstat(descriptor).st_size != nbytes:
                self.before("create", path)
                os.ftruncate(descriptor, nbytes)
            os.lseek(descriptor, start, os.SEEK_SET)
            self._write_all(path, descriptor, b"".join(buffers))
        finally:
            os.close(descriptor)

    def link(self, source: str, target: str, nbytes: int) -> bool:
        try:
            self.before("link", target)
            self._link(source, target)
        except OSError as error:
            if error.errno in _NO_LINK:
                return False
            raise
        linked = os.lstat(target)
        if linked.st_size == nbytes and stat.S_ISREG(linked.st_mode):
            return True
        self.remove_file(target)
        return False

    def _link(self, source: str, target: str) -> None:
        """Give a file, even if it is a symbolic link, a second name."""
        os.link(self._check_way(source), self._check_way(target), follow_symlinks=False)

    def create(self, path: str, data: bytes) -> bool:
        # Whoever links first has created the file. Two runs may write the same entry of a log: each
        # writes a file of its own, makes it durable, and links it to the name. The kernel lets one
        # link succeed; before that, nobody can see half an entry. A server whose answer is lost
        # links again and then says that the name is taken, or fails. So not the error but the
        # content, which no other writer has, tells who won.
        temporary = _name_temporary(path)
        try:
            self.write(temporary, [data])
            try:
                self.sync_path(temporary)  # fails if a writer that won has removed it
                self.before("link", path)
                self._link(temporary, path)
            except OSError as error:
                present = self.read(path)
                if present is None:
                    if error.errno in _WITHOUT_LINKS:
                        raise _need_links(error.errno, path) from error
                    raise
                if present != data:
                    return False
        finally:
            with contextlib.suppress(OSError):
                self.remove_file(temporary)
        self.sync_path(os.path.dirname(path))
        return True

    def prove_creation(self, directory: str) -> None:
        pass  # without hard links, `create` itself fails

    def prove_appending(self, directory: str) -> None:
        pass

    def put(self, path: str, data: bytes, *, durable: bool = False) -> None:
        temporary = _name_temporary(path)
        try:
            self.write(temporary, [data])
            if durable:
                # Before the rename: after a power loss, the name must not lead to an empty file.
                self.sync_path(temporary)
            self.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove_file(temporary)
            raise
        if durable:
            self.sync_path(os.path.dirname(path))

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, in place of the file that had it."""
        self.before("rename", source)
        os.rename(self._check_way(source), self._check_way(target))

    def remove_file(self, path: str) -> None:
        self.before("unlink", path)
        os.unlink(self._check_way(path))

    def remove_tree(self, path: str) -> None:
        # By open directories: if somebody puts a link there meanwhile, the link is removed, and
        # nothing that it leads to.
        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):  # meanwhile
                raise error

        with contextlib.suppress(FileNotFoundError):
            members = os.fwalk(self._check(path), topdown=False, onerror=fail)
            for place, directories, files, descriptor in members:
                if place.count("/") - path.count("/") > _MOST_LEVELS:
                    raise _refuse_depth(place)
                for name in [*files, *directories]:
                    self._remove(os.path.join(place, name), name, descriptor)
            self.before("rmdir", path)
            os.rmdir(path)

    def _remove(self, path: str, name: str, directory: int) -> None:
        """Remove a name of an open directory: a file, a link or an empty directory."""
        try:
            mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                self.before("rmdir", path)
                os.rmdir(name, dir_fd=directory)
            else:
                self.before("unlink", path)
                os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            pass  # meanwhile
        except OSError as error:
            error.filename = path
            raise

    # --- durability

    def sync_path(self, path: str) -> None:
        self.before("fsync", path)
        descriptor = os.open(self._check(path), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def making_durable(
        self, path: str, names: Collection[str], changed: Collection[str] | None = None
    ) -> Iterator[None]:
        # Opened first: syncfs reports all failures since then, also in the background.
        descriptor = os.open(self._check(path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield
            if self.has_syncfs:
                self.before("syncfs", path)
                number = self._sync_file_system(descriptor)
                if number == 0:
                    return
                if number not in _WITHOUT_SYNCFS:
                    raise OSError(number, os.strerror(number), path)
        finally:
            self._made.clear()
            os.close(descriptor)
        for name in names:
            root = join_path(path, name)
            for entry in self._walk(root):
                self.sync_path(entry.path)
            self.sync_path(root)
        if changed is None:
            changed = [path]
        for directory in changed:
            self.sync_path(directory)

    @property
    def has_syncfs(self) -> bool:
        """Whether one call makes a whole file system durable and reports errors."""
        return _syncfs is not None

    def _sync_file_system(self, descriptor: int) -> int:
        """Make a whole file system durable; returns an errno, 0 if it is."""
        if _syncfs(descriptor) == 0:
            return 0
        return ctypes.get_errno()

    # --- reading

    def is_writable(self, path: str) -> bool:
        return os.access(self._check(path), os.W_OK | os.X_OK)

    def _open(self, path: str) -> int:
        self.before("open", path)
        # Without waiting: between the look and this, somebody may put a pipe or a link there.
        return os.open(self._check(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)

    def read(self, path: str, most: int = DOCUMENT_BYTES) -> bytes | None:
        try:
            descriptor = self._open(path)
        except _GONE:
            return None
        try:
            size = os.fstat(descriptor).st_size
            if size > most:
                raise too_long(path, size, most)
            data = os.read(descriptor, size)
            while len(data) < size:
                more = os.read(descriptor, size - len(data))
                if not more:  # cut while it was read
                    break
                data += more
            return data
        finally:
            os.close(descriptor)

    def read_into(self, path: str, target: memoryview, nbytes: int) -> tuple[int, str]:
        descriptor = self._open(path)
        try:
            size = os.fstat(descriptor).st_size
            if size != nbytes:
                return size, ""
            digest = xxhash.xxh3_128()
            spare = memoryview(bytearray(min(BLOCK_BYTES, max(0, nbytes - len(target)))))
            position = 0
            while position < nbytes:
                if position < len(target):
                    block = target[position : position + BLOCK_BYTES]
                else:
                    block = spare[: nbytes - position]
                count = os.readv(descriptor, [block])
                if not count:  # cut while it was read
                    return position, ""
                digest.update(block[:count])
                position += count
            return size, digest.hexdigest()
        finally:
            os.close(descriptor)

    def list_names(self, path: str) -> list[str]:
        return [entry.name for entry in self._list(path)]

    def list_directories(self, path: str) -> list[str]:
        return [entry.name for entry in self._list(path) if entry.is_dir(follow_symlinks=False)]

    def _list(self, path: str) -> list[os.DirEntry[str]]:
        with contextlib.suppress(*_GONE):
            return self._scan(path)
        return []

    def _scan(self, path: str) -> list[os.DirEntry[str]]:
        self.before("list", path)
        with os.scandir(self._check(path)) as entries:
            return list(entries)

    def is_taken(self, path: str) -> bool:
        try:
            os.lstat(self._check_way(path))
        except _GONE:
            return False
        return True

    def is_directory(self, path: str) -> bool:
        with contextlib.suppress(OSError):
            return os.path.isdir(self._check(path))
        return False

    def walk(self, path: str) -> Iterator[tuple[str, int]]:
        with contextlib.suppress(*_GONE):
            for entry in self._walk(path):
                if entry.is_dir(follow_symlinks=False):
                    continue
                try:
                    attributes = entry.stat(follow_symlinks=False)
                except _GONE:  # meanwhile
                    continue
                size = -1
                if stat.S_ISREG(attributes.st_mode):
                    size = attributes.st_size
                yield entry.path[len(path) + 1 :], size

    def _walk(self, path: str, level: int = 0) -> Iterator[os.DirEntry[str]]:
        """All that is below a directory, each directory after its content."""
        if level > _MOST_LEVELS:
            raise _refuse_depth(path)
        for entry in self._scan(path):
            if entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(*_GONE):  # meanwhile
                    yield from self._walk(entry.path, level + 1)
            yield entry


def _check_below(root: str, path: str) -> None:
    """Refuse a link, pipe or device between a directory, given with its slash, and a path."""
    place = root
    for name in path[len(root) :].split("/"):
        if name == "..":
            raise refuse(path, "outside of its directory")
        place = os.path.join(place, name)  # with a slash, if it is the directory itself
        try:
            mode = os.lstat(place).st_mode
        except _GONE:
            return  # whatever is done there says so
        kind = _FOREIGN_KINDS.get(stat.S_IFMT(mode))
        if kind is not None:
            raise refuse(place, kind)


def _refuse_depth(path: str) -> OSError:
    return refuse(path, f"nested in more than {_MOST_LEVELS} directories")


def others_may_write(path: str) -> bool:
    """Whether everybody may write to a local directory."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    return bool(mode & stat.S_IWOTH) and not stat.S_ISLNK(mode)


def _name_temporary(path: str) -> str:
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.{secrets.token_hex(8)}.tmp")


def _need_links(number: int, path: str) -> OSError:
    return OSError(
        number,
        "this file system has no hard links, which the log needs to create its entries atomically; "
        "use a directory on another file system",
        path,
    )


def _start_writing_back(descriptor: int, start: int) -> None:
    """Let the disk write a block while the next one is copied, where the system can."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, start, BLOCK_BYTES, os.POSIX_FADV_DONTNEED)


def _find_syncfs() -> Any:
    """Linux's ``syncfs``, which reports errors from version 5.8 on; Python does not have it."""
    if sys.platform != "linux":
        return None
    major, minor = re.findall(r"\d+", os.uname().release)[:2]
    if (int(major), int(minor)) < (5, 8):
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)


_syncfs = _find_syncfs()
