"""Finds damage in the files of a store, and says what is wrong with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from jobrunner.checkpoint.storage import Files, join_path
from jobrunner.checkpoint.store.array_document import File
from jobrunner.errors import CheckpointCorruptError, CheckpointError
from jobrunner.names import ROOT_DOCUMENT

_ADVICE = (
    "Use another epoch (a resume with 'latest' passes over damaged ones), or restore the file from a "
    "copy."
)


def damaged_file(path: str, problem: str) -> CheckpointCorruptError:
    """The error for a file that is not as it should be; `problem` follows its path."""
    return CheckpointCorruptError(f"{path} {problem}.", path=path).advise(_ADVICE)


def changed_file(path: str, problem: str) -> CheckpointCorruptError:
    """The error for a file that is not what was written."""
    return damaged_file(path, f"is not what was written: {problem}")


def missing_file(path: str) -> CheckpointCorruptError:
    """The error for a file that is not there."""
    return damaged_file(path, "is missing: expected a file that the checkpoint lists")


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn errors about a file into checkpoint errors."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        # Also if a file has the name of its directory, or the other way round.
        raise missing_file(path) from None
    except CheckpointError:
        raise
    except MemoryError as error:
        raise CheckpointError(
            f"{path} does not fit into memory. Read it where there is more."
        ) from error
    except OSError as error:
        # A disk or a network that fails for a while must not make a run fall back to an older epoch.
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {error}. This does not "
            f"mean that the file is damaged: repair the storage and read again."
        ) from error


@dataclass(frozen=True, slots=True)
class VerifiedFiles:
    """Reads files of the store at `root` whose sizes and digests are known.

    All methods raise `CheckpointCorruptError` if a file is missing or is not what was written, and
    `CheckpointError` if it cannot be read.
    """

    files: Files
    root: str

    def path(self, name: str) -> str:
        """Path of a file."""
        return join_path(self.root, name)

    def read(self, name: str, file: File) -> bytes:
        """Read a file."""
        data = self.read_document(name, file[0])
        self._compare(name, file, (len(data), xxhash.xxh3_128_hexdigest(data)))
        return data

    def read_into(self, name: str, target: memoryview, file: File) -> None:
        """Read a file, of which memory gets the first bytes, and verify it."""
        path = self.path(name)
        with reading(path):
            present = self.files.read_into(path, target, file[0])
        self._compare(name, file, present)

    def verify(self, name: str, file: File) -> None:
        """Read a file only to verify it."""
        self.read_into(name, memoryview(b""), file)

    def _compare(self, name: str, expected: File, present: File) -> None:
        if present[0] != expected[0]:
            raise changed_file(self.path(name), f"expected {expected[0]} bytes, found {present[0]}")
        if present[1] != expected[1]:
            problem = f"expected xxh3_128 {expected[1]}, found {present[1]}"
            raise changed_file(self.path(name), problem)

    def read_document(self, name: str, most: int) -> bytes:
        """Read a file whose digest is elsewhere."""
        path = self.path(name)
        with reading(path):
            data = self.files.read(path, most)
        if data is None:
            raise missing_file(path)
        return data

    def verify_document(self, path: str, expected: bytes) -> None:
        """Compare a Zarr document with its copy in the root document."""
        if self.read_document(path, len(expected)) != expected:
            problem = f"expected what {ROOT_DOCUMENT} of the store repeats, found other content"
            raise changed_file(self.path(path), problem)
