"""The metadata handler: the log of entries that says which epochs exist."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from jobrunner.checkpoint.log.entry_file import decode_entry, encode_entry, mend_bit, way_out
from jobrunner.checkpoint.log.state import RESTARTS, STATE_INTERVAL, Entry, State
from jobrunner.checkpoint.storage import PosixFiles, files_of
from jobrunner.errors import CheckpointCorruptError

logger = logging.getLogger(__name__)

LOG_DIRECTORY = "_log"
ENTRY_NAME = re.compile(r"(\d{10,})\.json")
TEMPORARY_NAME = re.compile(r"\.(\d{10,})\.[0-9a-f]+\.tmp")


@runtime_checkable
class MetadataHandler(Protocol):
    """Keeps the entries of one directory's log, and so decides which epochs exist.

    An entry is JSON (a dict) with, among others, the keys ``number`` (0, 1, 2, ...), ``kind`` and
    ``id``. The manager makes entries and knows what they mean; a handler keeps them, in order,
    each forever, and never lets two share a number. `jobrunner.testing.contracts` holds the suite
    that a handler must pass.
    """

    def set_params(self, path: str, node_names: Sequence[str]) -> None:
        """Learn which directory and nodes it is about, before anything else is called.

        Called again, with the same path, when a run begins. Touches no storage.
        """

    def append(self, entry: Entry) -> bool:
        """Keep `entry` under its number, unless that number is taken.

        Returns
        -------
        bool
            False: the number is taken by another entry, which stays as it is. True: the entry
            is durable and seen by all who read from now on.

        Raises
        ------
        Exception
            It is not known whether the entry was kept; the caller reads on to find out.

        Notes
        -----
        *Atomicity*: an entry is seen whole or not at all, and of several appends under one
        number, from any process, exactly one returns True.
        """

    def write(self, epoch: int, record: Entry) -> bool:
        """Keep the one entry that makes `epoch` exist; otherwise as `append`."""

    def last_number(self) -> int:
        """Highest number that is taken; -1 where there are no entries."""

    def entries(self, first: int = 0) -> Iterator[Entry]:
        """All entries from number `first` on, in order, read as they are asked for.

        Raises
        ------
        CheckpointCorruptError
            An entry is missing between others, or not what was written.
        OSError
            Reading failed; nothing there at all is an empty log instead.
        """

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """The newest recorded epoch; or `user_epoch`, if that is recorded; else None."""

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """Take note of how many seconds each node took for an action.

        Parameters
        ----------
        action : str
            ``checkpoint_save``, ``checkpoint_load`` or ``checkpoint_partial_load``.
        stats : mapping of str to float
            Node -> seconds.
        """

    def accessible(self, epoch: int | None = None) -> bool:
        """Whether there is a log, and `epoch`, if given, is recorded in it."""


class FileMetadataHandler:
    """The default handler: one file an entry in ``_log/`` of the checkpoint directory.

    Parameters
    ----------
    files : PosixFiles, optional

    Attributes
    ----------
    stats : dict of str to dict of str to float
        The last report of each action: node -> seconds.

    Notes
    -----
    Entry 7 is ``_log/0000000007.json``, created with ``link``, or a conditional put in an object
    store, which succeeds for one of any number of writers, and made durable before `append` returns. Each file holds the digest of its
    entry.
    """

    def __init__(self, files: PosixFiles | None = None) -> None:
        self._given = files
        self._files = files if files is not None else PosixFiles()
        self._directory = ""
        self.stats: dict[str, dict[str, float]] = {}

    def set_params(self, path: str, node_names: Sequence[str]) -> None:
        """See `MetadataHandler`."""
        self._files = files_of(path, self._given)
        self._directory = os.path.join(path, LOG_DIRECTORY)

    def append(self, entry: Entry) -> bool:
        """See `MetadataHandler`."""
        number = entry["number"]
        if number == 0:
            self._files.make_directories(self._directory)
        temporary = os.path.join(self._directory, f".{number:010d}.{entry['id']}.tmp")
        return self._files.create_whole(self._path(number), encode_entry(entry), temporary)

    def write(self, epoch: int, record: Entry) -> bool:
        """See `MetadataHandler`."""
        return self.append(record)

    def last_number(self) -> int:
        """See `MetadataHandler`."""
        names = self._files.list_names(self._directory)
        matches = (ENTRY_NAME.fullmatch(name) for name in names)
        return max((int(match[1]) for match in matches if match), default=-1)

    def entries(self, first: int = 0) -> Iterator[Entry]:
        """See `MetadataHandler`."""
        for number, data in enumerate(self._read_on(first), first):
            yield self._decode(data, number, self._path(number))

    def entry(self, number: int) -> Entry:
        """One entry, which must exist.

        Raises
        ------
        CheckpointCorruptError
            It is missing, or not what was written.
        OSError
            Reading failed.
        """
        path = self._path(number)
        data = self._files.read_if_there(path)
        if data is None:
            raise CheckpointCorruptError(
                f"Entry {number} of the log is missing: expected {path}. {way_out(path)}",
                path=path,
            )
        return self._decode(data, number, path)

    def _decode(self, data: bytes, number: int, path: str) -> Entry:
        try:
            return decode_entry(data, number, path)
        except CheckpointCorruptError:
            mended = mend_bit(data)
            if mended is None:
                raise
            logger.warning("One bit of %s is wrong; it is read as it was written.", path)
            return decode_entry(mended, number, path)

    def _read_on(self, number: int) -> Iterator[bytes]:
        """The files of entry `number` and those after it; more of them at once, the more there are."""
        count = 1
        while True:
            count = min(2 * count, self._files.lookups)
            paths = [self._path(number + i) for i in range(count)]
            found = list(self._files.each(self._files.read_if_there, paths))
            for i, read in enumerate(found):
                data = read
                if data is None:
                    more = found[i + 1 : i + 2]
                    if not (more[0] is not None if more else self._is_there(number + 1)):
                        return
                    data = self._read_again(number)
                yield data
                number += 1

    def _is_there(self, number: int) -> bool:
        return self._files.is_taken(self._path(number))

    def _read_again(self, number: int) -> bytes:
        """An entry that was not there, unlike the next one: both may have been made since."""
        data = self._files.read_if_there(self._path(number))
        if data is None:
            raise CheckpointCorruptError(
                f"Entry {number} of the log is missing: expected {self._path(number)}, as "
                f"entry {number + 1} is there. {way_out(self._path(number))}",
                path=self._path(number),
            )
        return data

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """See `MetadataHandler`."""
        state = read_state(self)
        if user_epoch is None:
            return state.latest
        return user_epoch if user_epoch in state.recorded else None

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """See `MetadataHandler`."""
        self.stats[action] = dict(stats)
        if stats:
            logger.debug("%s: %d nodes, %.3f s at most", action, len(stats), max(stats.values()))

    def accessible(self, epoch: int | None = None) -> bool:
        """See `MetadataHandler`."""
        state = read_state(self)
        return state.number >= 0 and (epoch is None or epoch in state.recorded)

    def remove_leftovers(self, number: int) -> None:
        """Remove what writers left half-made up to entry `number`, which exists."""
        try:
            for name in self._files.list_names(self._directory):
                match = TEMPORARY_NAME.fullmatch(name)
                if match and int(match[1]) <= number:
                    with contextlib.suppress(FileNotFoundError):
                        self._files.remove_file(os.path.join(self._directory, name))
        except OSError as error:
            logger.warning("Half-made entries are left in %s: %s", self._directory, error)

    def _path(self, number: int) -> str:
        return os.path.join(self._directory, f"{number:010d}.json")


def read_state(handler: MetadataHandler) -> State:
    """Read the log, from the last full state on.

    Parameters
    ----------
    handler : MetadataHandler

    Raises
    ------
    CheckpointCorruptError
        An entry is damaged or missing.
    """
    last = handler.last_number()
    state = State()
    first = last - last % STATE_INTERVAL
    while first > 0:
        try:
            state.restart(read_entry(handler, first))
            break
        except CheckpointCorruptError as error:
            # A state only sums up what other entries say: an earlier one will do.
            logger.warning("Reading the log from further back: %s", error)
            first -= STATE_INTERVAL
    read_on(handler, state)
    while state.number < last:
        missing = state.number + 1
        restart = _find_restart(handler, missing + 1, last)
        if restart is None:
            raise CheckpointCorruptError(
                f"Entry {missing} of the log is missing: expected all entries up to {last}, which "
                f"is there. `jobrunner fsck DIR` tells what can be proven without it, and "
                f"`jobrunner fsck DIR --repair` goes on from that."
            )
        state.restart(restart)
        read_on(handler, state)
    return state


def read_on(handler: MetadataHandler, state: State) -> list[Entry]:
    """Take in the entries that have been appended since; returns them."""
    found = []
    while True:
        try:
            for entry in handler.entries(state.number + 1):
                state.apply(entry)
                found.append(entry)
            return found
        except CheckpointCorruptError:
            number = state.number + 1
            if number and number % STATE_INTERVAL == 0:
                state.number = number  # a damaged state is not needed here
                continue
            restart = _find_restart(handler, number + 1, handler.last_number())
            if restart is None:
                raise
            state.restart(restart)
            found.append(restart)


def _find_restart(handler: MetadataHandler, first: int, last: int) -> Entry | None:
    """The next entry from which the log can be read whatever came before."""
    for number in range(first, last + 1):
        try:
            entry = read_entry(handler, number)
        except CheckpointCorruptError:
            continue
        if entry["kind"] in RESTARTS:
            return entry
    return None


def read_entry(handler: MetadataHandler, number: int) -> Entry:
    """Entry `number`, which must exist.

    Raises
    ------
    CheckpointCorruptError
        It is missing, or not what was written.
    """
    if isinstance(handler, FileMetadataHandler):
        return handler.entry(number)  # `entries` looks ahead
    for entry in handler.entries(number):
        return entry
    raise CheckpointCorruptError(f"Entry {number} of the log is missing.")


def each_entry(handler: MetadataHandler) -> Iterator[tuple[int, Entry | CheckpointCorruptError]]:
    """All entries in order, each under its number; where one cannot be read, why.

    Parameters
    ----------
    handler : MetadataHandler
    """
    number, last = 0, handler.last_number()
    while number <= last:
        try:
            for entry in handler.entries(number):
                yield number, entry
                number += 1
            if number <= last:
                yield number, CheckpointCorruptError(f"Entry {number} of the log is missing.")
        except CheckpointCorruptError as error:
            yield number, error
        number += 1
