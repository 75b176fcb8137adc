"""Files in a POSIX file system: the checkpoint package accesses files only through this module."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from crc32c import crc32c

from jobrunner.checkpoint.storage.protocol import Item, Result

BLOCK_BYTES = 1 << 20
"""Size of a block that is digested and written together, while it is in a core's cache."""

_WRITTEN_BACK_BYTES = 128 << 10  # for less, the call costs more than it saves
_ZEROS = bytes(BLOCK_BYTES)
_NOTHING_THERE = (FileNotFoundError, NotADirectoryError)
_SYNC_FILE_RANGE_WRITE = 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EPERM, errno.EOPNOTSUPP)
_NO_LINK = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EOPNOTSUPP),
    *(errno.EMLINK, errno.EXDEV, errno.EACCES, errno.ENOSYS),
)


def real_path(path: str) -> str:
    """The path with its links resolved, as far as it exists."""
    return os.path.realpath(path)


def join_path(root: str, path: str) -> str:
    """Path of a file in a store, whose manifest has ``/`` on every system."""
    return f"{root}/{path}" if os.sep == "/" else os.path.join(root, *path.split("/"))


def crc32c_of_zeros(nbytes: int, before: int) -> int:
    """The crc32c of `nbytes` zero bytes, appended to bytes whose crc32c is `before`."""
    while nbytes > 0:
        block = memoryview(_ZEROS)[:nbytes]
        before = crc32c(block, before)
        nbytes -= len(block)
    return before


class PosixFiles:
    """A POSIX file system; see `Files`.

    `durable` calls ``syncfs`` once where that reports errors (Linux 5.8 or later); otherwise
    ``fsync`` for each file and directory.
    """

    threads = 2
    removals = 4
    lookups = 1
    linked_bytes = 64 << 10
    poll_seconds = 0.0

    def reaches(self, path: str) -> bool:
        return "://" not in path

    def before(self, operation: str, path: str) -> None:
        pass

    def each(
        self, call: Callable[[Item], Result], items: Iterable[Item], at_once: int | None = None
    ) -> Iterator[Result]:
        return map(call, items)

    # --- writing

    def make_directory(self, path: str) -> None:
        self.before("mkdir", path)
        os.mkdir(path)

    def make_directories(self, path: str) -> None:
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        if parent != path:
            self.make_directories(parent)
        self.before("mkdir", path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        self.sync_path(parent)

    def write(
        self,
        path: str,
        buffers: Sequence[bytes | memoryview],
        padding_bytes: int = 0,
        digest: Callable[[memoryview, int], int] = crc32c,
    ) -> int:
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
                            # The disk writes while the next block is copied.
                            start_writing_back(descriptor, position, len(block), path)
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
        while block:
            self.before("write", path)
            block = block[os.write(descriptor, block) :]

    def link(self, source: str, target: str, nbytes: int) -> bool:
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
        self.before("write", path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
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
                os.link(temporary, path)
            except OSError as error:
                # A network file system may fail, or find the name taken, after it has linked.
                found = self.read_if_there(path)
                if found is None:
                    raise _explain_link(error) from error
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
        os.rename(source, target)

    def remove_file(self, path: str) -> None:
        self.before("unlink", path)
        os.unlink(path)

    def remove_tree(self, path: str) -> None:
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

    def sync_path(self, path: str) -> None:
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
        # Opened first: syncfs reports all failures since then, also in the background.
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
                        self.sync_path(os.path.join(directory, member))
                    self.sync_path(directory)
            for directory in (path,) if changed is None else changed:
                self.sync_path(directory)
        finally:
            os.close(descriptor)

    @property
    def has_syncfs(self) -> bool:
        """Whether one call makes a whole file system durable and reports errors."""
        return _syncfs is not None

    def _sync_file_system(self, descriptor: int) -> int:
        return 0 if _syncfs(descriptor) == 0 else ctypes.get_errno()

    # --- reading

    def read(self, path: str) -> bytes:
        self.before("open", path)
        with io.FileIO(path) as file:
            return file.readall()

    def read_if_there(self, path: str) -> bytes | None:
        try:
            return self.read(path)
        except _NOTHING_THERE:
            return None

    def read_into(self, path: str, target: memoryview | None, nbytes: int) -> tuple[int, int]:
        self.before("open", path)
        with io.FileIO(path) as file:
            size = os.fstat(file.fileno()).st_size
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
                count = file.readinto(block)
                if not count:  # cut while it was read
                    return position, 0
                digest = crc32c(block[:count], digest)
                position += count
            return size, digest

    def read_span(self, path: str, start: int, nbytes: int) -> tuple[int, bytes]:
        self.before("open", path)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(start)
            return size, file.read(min(nbytes, max(0, size - start)))

    def list_names(self, path: str) -> list[str]:
        self.before("list", path)
        try:
            return os.listdir(path)
        except _NOTHING_THERE:
            return []

    def is_taken(self, path: str) -> bool:
        try:
            os.lstat(path)
        except _NOTHING_THERE:
            return False
        return True

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(path)

    def walk(self, path: str) -> Iterator[tuple[str, int]]:
        for directory, _, names in os.walk(path, onerror=_raise_unless_gone):
            for name in names:
                full = os.path.join(directory, name)
                with contextlib.suppress(FileNotFoundError):
                    size = os.lstat(full).st_size
                    yield os.path.relpath(full, path).replace(os.sep, "/"), size

    def modified_seconds(self, path: str) -> float:
        return os.lstat(path).st_mtime

    def locate(self, path: str) -> tuple[Any, str]:
        return None, path


def _raise(error: OSError) -> None:
    """For `os.walk`, which ignores errors by default."""
    raise error


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, _NOTHING_THERE):
        raise error


def _explain_link(error: OSError) -> OSError:
    if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
        return OSError(
            error.errno,
            "this file system has no hard links, which the log needs to create its entries "
            "atomically; use a directory on another file system",
            error.filename2 or error.filename,
        )
    return error


def start_writing_back(descriptor: int, start: int, nbytes: int, path: str) -> None:
    """Let Linux start writing a part of a file; raises OSError if the disk is full or broken."""
    if _sync_file_range is None:
        return
    if _sync_file_range(descriptor, start, nbytes, _SYNC_FILE_RANGE_WRITE) != 0:
        number = ctypes.get_errno()
        if number not in _UNSUPPORTED:
            raise OSError(number, os.strerror(number), path)


def _find(name: str, since: tuple[int, int], *arguments: Any) -> Any:
    """A function of Linux's C library, from a version of Linux on, if there is one."""
    if sys.platform != "linux":
        return None
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < since:
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes = arguments
    return function


_syncfs = _find("syncfs", (5, 8), ctypes.c_int)  # reports errors from 5.8 on
_sync_file_range = _find(
    "sync_file_range", (2, 6), ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
)
