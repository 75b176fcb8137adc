"""What stores the log of entries that says which epochs exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from jobrunner.checkpoint.log.entries import Entry
from jobrunner.positions import PublicPosition


@runtime_checkable
class MetadataHandler(Protocol):
    """Stores the entries of one directory's log, and so decides which epochs exist.

    An entry is JSON (a dict) with, among others, the keys ``number`` (0, 1, 2, ...), ``kind`` and
    ``id``. The manager makes and interprets entries. A handler stores them for ever, in order, and
    never lets two share a number. A handler must pass the tests in `jobrunner.testing.contracts`.
    """

    def set_params(self, path: str, node_names: Sequence[str]) -> None:
        """Set the directory and its nodes. Accesses no storage.

        Called before all other methods, and again, with the same path, when a run begins.
        """

    def append(self, entry: Entry) -> bool:
        """Store `entry` under its number, unless that number is taken.

        Returns
        -------
        bool
            True: the entry is durable, and every later read returns it. False: another entry has
            the number and stays unchanged.

        Raises
        ------
        Exception
            The entry may or may not be stored; the caller reads the log to find out.

        Notes
        -----
        *Atomicity*: readers see the whole entry or none. Of several appends under one number, from
        any process, exactly one returns True.
        """

    def write(self, epoch: PublicPosition, record: Entry) -> bool:
        """Store the entry that makes `epoch`, an int or a `Position`, exist; else like `append`."""

    def last_number(self) -> int:
        """Highest number that is taken; -1 for an empty log."""

    def entries(self, first: int = 0) -> Iterator[Entry]:
        """Iterate over all entries from number `first` on, in order; none if the log is empty.

        Raises
        ------
        CheckpointCorruptError
            An entry is damaged, or missing although a later one exists.
        OSError
            Reading failed.
        """

    def last_epoch(self, user_epoch: PublicPosition | None = None) -> PublicPosition | None:
        """The newest recorded epoch, or `user_epoch` if given and recorded; None otherwise."""

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """Receive how many seconds each node took for an action.

        Parameters
        ----------
        action : str
            ``checkpoint_save``, ``checkpoint_load`` or ``checkpoint_partial_load``.
        stats : mapping of str to float
            Node -> seconds.
        """

    def accessible(self, epoch: PublicPosition | None = None) -> bool:
        """Whether there is a log, and it records `epoch`, if given."""
