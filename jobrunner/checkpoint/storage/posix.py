"""Files in a POSIX file system: the checkpoint package accesses files only through this module."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pwd
import re
import secrets
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from jobrunner.checkpoint.storage.protocol import (
    DOCUMENT_BYTES,
    Buffers,
    Item,
    Result,
)
from jobrunner.checkpoint.storage.unlinked import (
    DIRECTORY,
    GONE,
    PASSAGE,
    Below,
    Place,
    name_path,
    opened,
    refuse,
    too_long,
)

BLOCK_BYTES = 1 << 20
"""Size of a block that is digested and written together, while it is in a core's cache."""

_MOST_LEVELS = 100
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_WITHOUT_SYNCFS = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)
_WITHOUT_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)
_NO_LINK = (
    *_WITHOUT_LINKS,
    *(errno.ENOENT, errno.ENOTDIR, errno.EXDEV, errno.EACCES, errno.ENOSYS),
)


def join_path(root: str, path: str) -> str:
    """Path of a file in a store, as its document names it."""
    return f"{root}/{path}"


class PosixFiles:
    """A POSIX file system; see `Files`.

    Below the directories named by `bind`, no link is followed and only regular files are opened;
    the path of such a directory itself may contain links.
    `durable` calls ``syncfs`` once where that reports errors (Linux 5.8 or later), else ``fsync``.
    """

    threads = 2
    lookups = 1
    linked_bytes = 64 << 10

    def __init__(self) -> None:
        self.below = Below()

    def reaches(self, path: str) -> bool:
        return "://" not in path

    def bind(self, directory: str) -> None:
        """Follow no link below a checkpoint directory."""
        self.below.bind(directory)

    def before(self, operation: str, path: str) -> None:
        pass

    def each(self, call: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        return map(call, items)

    # --- writing

    def make_directory(self, path: str) -> None:
        self.before("mkdir", path)
        with self.below.parent(path) as place:
            os.mkdir(place.name, dir_fd=place.directory)
        self.below.made.add(path)

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
        descriptor = self.below.open(path, _NEW)
        try:
            for buffer in buffers:
                for start in range(0, len(buffer), BLOCK_BYTES):
                    block = buffer[start : start + BLOCK_BYTES]
                    digest.update(block)
                    self.before("write", path)
                    written = os.write(descriptor, block)
                    while written < len(block):
                        self.before("write", path)
                        written += os.write(descriptor, block[written:])
                    if len(block) == BLOCK_BYTES:
                        # The disk writes while the next block is copied.
                        start_writing_back(descriptor, position, len(block), path)
                    position += len(block)
        finally:
            os.close(descriptor)  # some network file systems report a full disk only here
        return digest.hexdigest()

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
        with self.below.parent(target) as new, self.below.parent(source) as old:
            os.link(
                old.name,
                new.name,
                src_dir_fd=old.directory,
                dst_dir_fd=new.directory,
                follow_symlinks=False,
            )
            return new.attributes()

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
                self.sync_path(temporary)
            except FileNotFoundError:
                if not self.is_taken(path):
                    raise
                return False  # the writer that won has removed it
            try:
                self.before("link", path)
                self._link(temporary, path)
            except OSError as error:
                present = self.read(path)
                if present is None:
                    raise _explain_link(error, path) from error
                if present != data:
                    return False
        finally:
            with contextlib.suppress(OSError):
                self.remove_file(temporary)
        self.sync_path(os.path.dirname(path))
        return True

    def prove_creation(self, directory: str) -> None:
        pass  # without hard links, `create` itself fails

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
        with self.below.parent(source) as old, self.below.parent(target) as new:
            os.rename(old.name, new.name, src_dir_fd=old.directory, dst_dir_fd=new.directory)

    def remove_file(self, path: str) -> None:
        self.before("unlink", path)
        with self.below.parent(path) as place:
            os.unlink(place.name, dir_fd=place.directory)

    def remove_tree(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            for member in self._walk(path):
                with contextlib.suppress(FileNotFoundError):
                    self._remove(member)
            self.before("rmdir", path)
            with self.below.parent(path) as place:
                os.rmdir(place.name, dir_fd=place.directory)

    def _remove(self, member: _Member) -> None:
        operation, remove = ("rmdir", os.rmdir) if member.is_directory else ("unlink", os.unlink)
        self.before(operation, member.path)
        try:
            remove(member.entry.name, dir_fd=member.directory)
        except OSError as error:
            name_path(error, member.path)
            raise

    # --- durability

    def sync_path(self, path: str) -> None:
        self.before("fsync", path)
        descriptor = self.below.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def durable(
        self, path: str, names: Collection[str], changed: Collection[str] | None = None
    ) -> Iterator[None]:
        # Opened first: syncfs reports all failures since then, also in the background.
        with opened(self.below.open(path, DIRECTORY), path) as descriptor:
            try:
                yield
            finally:
                self.below.made.clear()
            if self.has_syncfs:
                self.before("syncfs", path)
                number = self._sync_file_system(descriptor)
                if number == 0:
                    return
                if number not in _WITHOUT_SYNCFS:
                    raise OSError(number, os.strerror(number), path)
        for name in names:
            root = join_path(path, name)
            for member in self._walk(root):
                self.sync_path(member.path)
            self.sync_path(root)
        for directory in (path,) if changed is None else changed:
            self.sync_path(directory)

    @property
    def has_syncfs(self) -> bool:
        """Whether one call makes a whole file system durable and reports errors."""
        return _syncfs is not None

    def _sync_file_system(self, descriptor: int) -> int:
        """Make a whole file system durable; returns an errno, 0 if it is."""
        return 0 if _syncfs(descriptor) == 0 else ctypes.get_errno()

    # --- reading

    def read(self, path: str, most: int = DOCUMENT_BYTES) -> bytes | None:
        self.before("open", path)
        try:
            descriptor, size = self.below.open_file(path)
        except GONE:
            return None
        try:
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
        self.before("open", path)
        descriptor, size = self.below.open_file(path)
        try:
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
        return [entry.name for entry, _ in self._list(path)]

    def list_directories(self, path: str) -> list[str]:
        return [entry.name for entry, is_directory in self._list(path) if is_directory]

    def _list(self, path: str) -> list[tuple[os.DirEntry[str], bool]]:
        """What is in a directory, and whether it is a directory, too."""
        self.before("list", path)
        try:
            descriptor = self.below.open(path, DIRECTORY)
        except GONE:
            return []
        with opened(descriptor, path), os.scandir(descriptor) as entries:
            return [(entry, entry.is_dir(follow_symlinks=False)) for entry in entries]

    def is_taken(self, path: str) -> bool:
        try:
            self.below.attributes(path)
        except GONE:
            return False
        return True

    def is_directory(self, path: str) -> bool:
        try:
            os.close(self.below.open(path, PASSAGE))
        except OSError:
            return False
        return True

    def walk(self, path: str) -> Iterator[tuple[str, int]]:
        with contextlib.suppress(*GONE):
            for member in self._walk(path):
                if member.is_directory:
                    continue
                try:
                    attributes = member.entry.stat(follow_symlinks=False)
                except GONE:  # meanwhile
                    continue
                size = attributes.st_size if stat.S_ISREG(attributes.st_mode) else -1
                yield member.path[len(path) + 1 :], size

    def _walk(self, path: str) -> Iterator[_Member]:
        """All that is below a directory, each directory after its content."""
        self.before("list", path)
        return self._walk_opened(path, self.below.open(path, DIRECTORY), 0)

    def _walk_opened(self, path: str, descriptor: int, level: int) -> Iterator[_Member]:
        with opened(descriptor, path):
            if level > _MOST_LEVELS:
                raise refuse(path, f"nested in more than {_MOST_LEVELS} directories")
            with os.scandir(descriptor) as scanned:
                entries = list(scanned)
            for entry in entries:
                member = _Member(join_path(path, entry.name), descriptor, entry)
                if member.is_directory:
                    self.before("list", member.path)
                    try:
                        place = Place(member.path, entry.name, descriptor)
                        inner = place.open(DIRECTORY)
                    except GONE:  # meanwhile
                        continue
                    yield from self._walk_opened(member.path, inner, level + 1)
                yield member


def others_may_write(path: str) -> str:
    """Owner and rights of a local directory that everybody may write to; else empty."""
    try:
        attributes = os.lstat(path)
    except OSError:
        return ""
    if not attributes.st_mode & stat.S_IWOTH or stat.S_ISLNK(attributes.st_mode):
        return ""
    owner = str(attributes.st_uid)
    with contextlib.suppress(KeyError):
        owner = pwd.getpwuid(attributes.st_uid).pw_name
    return f"owner {owner}, rights {stat.filemode(attributes.st_mode)}"


@dataclass(frozen=True, slots=True)
class _Member:
    """A file or directory below another one; `directory` is open only while it is looked at."""

    path: str
    directory: int
    entry: os.DirEntry[str]

    @property
    def is_directory(self) -> bool:
        """Whether it is one itself, and no link to one."""
        return self.entry.is_dir(follow_symlinks=False)


def _name_temporary(path: str) -> str:
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.{secrets.token_hex(8)}.tmp")


def _explain_link(error: OSError, path: str) -> OSError:
    """The error to raise if an entry of the log cannot be linked."""
    if error.errno in _WITHOUT_LINKS:
        return OSError(
            error.errno,
            "this file system has no hard links, which the log needs to create its entries "
            "atomically; use a directory on another file system",
            path,
        )
    return error


# --- system calls of Linux that Python does not have

_SYNC_FILE_RANGE_WRITE = 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EPERM, errno.EOPNOTSUPP)


def _find(name: str, since: tuple[int, int], *arguments: Any) -> Any:
    """A function of Linux's C library, from a version of Linux on, if there is one."""
    if sys.platform != "linux":
        return None
    release = re.findall(r"\d+", os.uname().release)
    if (int(release[0]), int(release[1])) < since:
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes = arguments
    return function


_syncfs = _find("syncfs", (5, 8), ctypes.c_int)  # reports errors from 5.8 on
_sync_file_range = _find(
    "sync_file_range", (2, 6), ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
)


def start_writing_back(descriptor: int, start: int, nbytes: int, path: str) -> None:
    """Let Linux start writing a part of a file; raises OSError if the disk is full or broken."""
    if _sync_file_range is None:
        return
    if _sync_file_range(descriptor, start, nbytes, _SYNC_FILE_RANGE_WRITE) != 0:
        number = ctypes.get_errno()
        if number not in _UNSUPPORTED:
            raise OSError(number, os.strerror(number), path)
