"""The files of one store, read as what the manifest says they are, or an error that names them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from jobrunner.checkpoint.storage import PosixFiles, join_path
from jobrunner.checkpoint.store.layout import MANIFEST
from jobrunner.errors import CheckpointCorruptError, CheckpointError

WAY_OUT = "Resume with 'latest' to fall back to the epoch before, or restore the file from a copy."
"""What the user can do where a file is damaged."""


@dataclass(frozen=True, slots=True)
class VerifiedFiles:
    """Files below one directory, each of a size and a crc32c that are known.

    Parameters
    ----------
    files : PosixFiles
    root : str
        Path of the store.

    Raises
    ------
    CheckpointCorruptError
        By all its methods: a file is missing, or is not what was written.
    CheckpointError
        It cannot be read.
    """

    files: PosixFiles
    root: str

    def path(self, name: str) -> str:
        """Where a file of the store is, by what the manifest calls it."""
        pieces = name.split("/")
        if any(piece in ("", ".", "..") for piece in pieces) or (os.sep != "/" and os.sep in name):
            raise CheckpointCorruptError(
                f"{join_path(self.root, MANIFEST)} names the file {name!r}, which does not "
                f"lie in the store. {WAY_OUT}",
                path=join_path(self.root, MANIFEST),
            )
        return join_path(self.root, name)

    def read(self, name: str, size: int, digest: int) -> bytes:
        """Content of a file."""
        path = self.path(name)
        with self.reading(path):
            data = self.files.read(path)
        _compare(path, size, digest, len(data), self.files.digest(data))
        return data

    def read_into(self, name: str, target: memoryview | None, size: int, digest: int) -> None:
        """Read a file into memory; None: only verify it."""
        path = self.path(name)
        with self.reading(path):
            found_size, found = self.files.read_into(path, target, size)
        _compare(path, size, digest, found_size, found)

    def read_span(self, name: str, size: int, start: int, length: int, digest: int) -> bytes:
        """Part of a file of `size` bytes; `digest` is that of the part."""
        path = self.path(name)
        with self.reading(path):
            found_size, data = self.files.read_span(path, start, length)
        if found_size != size:
            _compare(path, size, digest, found_size, 0)
        _compare(path, length, digest, len(data), self.files.digest(data))
        return data

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Raise as checkpoint errors what the system says of a file."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise CheckpointCorruptError(
                f"{path} is missing: expected the file that the checkpoint's record names, found "
                f"{error.strerror}. {WAY_OUT}",
                path=path,
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {type(error).__name__}: {error}. That is not the same "
                f"as damage: mend the storage and read again."
            ) from error


def _compare(path: str, size: int, digest: int, found_size: int, found: int) -> None:
    if found_size != size:
        problem = f"expected {size} bytes, found {found_size}"
    elif found != digest:
        problem = f"expected crc32c {digest:08x}, found {found:08x}"
    else:
        return
    raise CheckpointCorruptError(f"{path} is not what was written: {problem}. {WAY_OUT}", path=path)
