"""What checkpoints need from storage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar, runtime_checkable

from jobrunner.errors import CheckpointCorruptError

Item = TypeVar("Item")
Result = TypeVar("Result")

Buffers = Sequence[bytes | memoryview]
"""The content of a file, in parts; views are flat, of single bytes."""

DOCUMENT_BYTES = 64 << 20
"""Longest log entry, heartbeat or Zarr document that is read."""


@runtime_checkable
class Files(Protocol):
    """Bytes under paths. `PosixFiles` and `ObjectFiles` implement it.

    Runs on client and workers; instances are picklable and keep no file open. All methods raise
    OSError.
    """

    threads: int
    """Threads that write or read at once, including the calling one; more are not faster."""
    lookups: int
    """Calls that `each` makes at once."""
    linked_bytes: int
    """Shorter unchanged chunks are written again: `link` would cost more."""
    appended_bytes: int
    """A file to which `write_at` appends should not be longer: it may be written anew each time."""

    def reaches(self, path: str) -> bool:
        """Whether `path` is in this storage."""

    def before(self, operation: str, path: str) -> None:
        """Called before each primitive step, so that a subclass can inject faults.

        Operations on files: ``mkdir``, ``create``, ``write``, ``fsync``, ``syncfs``, ``link``,
        ``rename``, ``unlink``, ``rmdir``, ``open``, ``list``. On objects: ``put``, ``create``,
        ``copy``, ``delete``, ``get``, ``head``, ``list``.
        """

    def each(self, call: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Iterate over the results of `call`, which accesses little, for each item, in order.

        Remote storage makes up to `lookups` calls in threads, ahead of the iteration.
        """

    # --- writing

    def make_directory(self, path: str) -> None:
        """Create a directory, which must not exist; its parent must exist."""

    def make_directories(self, path: str) -> None:
        """Create a directory and its parents durably, unless they exist."""

    def write(self, path: str, buffers: Buffers) -> str:
        """Create a file; durable only once synced.

        A file must not exist; an object is replaced. Returns the xxh3_128 of the content in hex.
        """

    def write_at(self, path: str, start: int, buffers: Buffers, nbytes: int) -> None:
        """Write a part of a file, which is then `nbytes` long and sparse where nothing was written.

        Durable only once synced. Only one thread writes a file. What is before `start` must be there.
        """

    def link(self, source: str, target: str, nbytes: int) -> bool:
        """Give a file of `nbytes` bytes a second name (copy an object).

        False if the file is gone, has another size or cannot be linked: write it instead.
        """

    def create(self, path: str, data: bytes) -> bool:
        """Create a file atomically and durably; False if another writer's file exists.

        `data` must differ from any other writer's, because it tells whose file it is. Safe to retry
        with the same `data`.
        """

    def prove_creation(self, directory: str) -> None:
        """Check that `create` has one winner in `directory`; raises OSError if not."""

    def prove_appending(self, directory: str) -> None:
        """Check that `write_at` keeps what others wrote in `directory`; raises OSError if not."""

    def put(self, path: str, data: bytes, *, durable: bool = False) -> None:
        """Create a file, or replace it atomically; durable only if asked for."""

    def remove_file(self, path: str) -> None:
        """Remove a file."""

    def remove_tree(self, path: str) -> None:
        """Remove a directory and its content, unless they are gone."""

    # --- durability

    def sync_path(self, path: str) -> None:
        """Make the content of a file, or the names in a directory, durable."""

    def making_durable(
        self, path: str, names: Collection[str], changed: Collection[str] | None = None
    ) -> AbstractContextManager[None]:
        """On exit, make durable what the ``with`` block wrote below ``path/name``.

        `changed` are the directories in which names changed; by default `path`. Both are read on exit.
        """

    # --- reading

    def is_writable(self, path: str) -> bool:
        """Whether this process may make files in a directory; True where only trying would tell."""

    def read(self, path: str, most: int = DOCUMENT_BYTES) -> bytes | None:
        """The content of a file; None if it does not exist.

        Raises a `CheckpointCorruptError` if it is longer than `most`.
        """

    def read_into(self, path: str, target: memoryview, nbytes: int) -> tuple[int, str]:
        """Read a file of `nbytes` bytes, of which `target` gets the first ones, and digest it.

        Returns the file's size and its xxh3_128 in hex, which is empty if the size is not `nbytes`:
        a file of another size is not read.
        """

    def list_names(self, path: str) -> list[str]:
        """Names in a directory; none if it does not exist."""

    def list_directories(self, path: str) -> list[str]:
        """Names of the directories in a directory, which are no links; none if it does not exist."""

    def is_taken(self, path: str) -> bool:
        """Whether the name exists, even as a dangling link."""

    def is_directory(self, path: str) -> bool:
        """Whether a directory exists."""

    def walk(self, path: str) -> Iterator[tuple[str, int]]:
        """All files below a directory, as relative paths with ``/``, and their sizes.

        Skips files that disappear meanwhile. What is no file (a link, a pipe) has size -1.
        """


class ForeignFileError(CheckpointCorruptError, OSError):
    """A name in a checkpoint directory is not a file or directory that jobrunner makes."""


def refuse(path: str, problem: str) -> ForeignFileError:
    """The error for something that jobrunner has not made."""
    return ForeignFileError(
        f"{path} is {problem}. jobrunner makes no such thing, and uses only what it makes, because a "
        f"checkpoint directory may come from a stranger. Put the file or directory itself there, or "
        f"remove it.",
        path=path,
    )


def too_long(path: str, nbytes: int, most: int) -> ForeignFileError:
    """The error for a document that is not read."""
    return refuse(path, f"too long: it has {nbytes:,} bytes, expected {most:,} at most")
