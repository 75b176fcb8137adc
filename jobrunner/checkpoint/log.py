"""The metadata handler: the log of entries that says which epochs exist."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jobrunner.checkpoint.files import PosixFiles
from jobrunner.checkpoint.records import STATE_INTERVAL, Entry, State
from jobrunner.errors import CheckpointCorruptError

logger = logging.getLogger("jobrunner.checkpoint.log")

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
    Entry 7 is ``_log/0000000007.json``, created with ``link``, which succeeds for one of any
    number of writers, and made durable before `append` returns. Each file holds the digest of its
    entry.
    """

    def __init__(self, files: PosixFiles | None = None) -> None:
        self._files = files if files is not None else PosixFiles()
        self._directory = ""
        self.stats: dict[str, dict[str, float]] = {}

    def set_params(self, path: str, node_names: Sequence[str]) -> None:
        """See `MetadataHandler`."""
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
        numbers = set()
        for name in self._files.list_names(self._directory):
            if match := ENTRY_NAME.fullmatch(name):
                numbers.add(int(match[1]))
        last = max(numbers, default=-1)
        if len(numbers) <= last:
            for number in range(last):
                # A listing may miss what is created while it is made.
                if number not in numbers and not self._files.is_taken(self._path(number)):
                    raise CheckpointCorruptError(
                        f"{self._path(number)} is missing: expected all entries from 0 to {last}, "
                        f"the last that is there. {_WAY_OUT}",
                        path=self._path(number),
                    )
        return last

    def entries(self, first: int = 0) -> Iterator[Entry]:
        """See `MetadataHandler`."""
        number = first
        while (data := self._files.read_if_there(self._path(number))) is not None:
            yield decode_entry(data, number, self._path(number))
            number += 1

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


_WAY_OUT = "The log is the only truth about this directory: restore the file from a copy."


def encode_entry(entry: Entry) -> bytes:
    """An entry as the content of a file, its digest included."""
    text = json.dumps(entry, allow_nan=False, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"sha256":"{digest}","entry":{text}}}\n'.encode()


def decode_entry(data: bytes, number: int, path: str) -> Entry:
    """Check a file's content and give its entry.

    Raises
    ------
    CheckpointCorruptError
        Naming `path`, what was expected and what was found.
    """
    start = len('{"sha256":"') + 64 + len('","entry":')
    text = data[start:-2]
    expected = hashlib.sha256(text).hexdigest()
    if data != f'{{"sha256":"{expected}","entry":'.encode() + text + b"}\n":
        found = data[len('{"sha256":"') :][:64].decode("ascii", "replace")
        raise CheckpointCorruptError(
            f"{path} is not what was written: expected the SHA-256 {expected} of its "
            f"{len(data)} bytes in it, found {found!r}. {_WAY_OUT}",
            path=path,
        )
    entry: dict[str, Any] = json.loads(text)
    if entry["number"] != number:
        raise CheckpointCorruptError(
            f"{path} holds entry {entry['number']}: expected {number}. {_WAY_OUT}", path=path
        )
    return entry


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
            state.apply(next(iter(handler.entries(first))))
            break
        except CheckpointCorruptError as error:
            # A state only sums up what other entries say: an earlier one will do.
            logger.warning("Reading the log from further back: %s", error)
            first -= STATE_INTERVAL
    read_on(handler, state)
    if state.number < last:
        raise CheckpointCorruptError(
            f"The log ends at entry {state.number}: expected entries up to {last}, which is "
            f"there. {_WAY_OUT}"
        )
    return state


def read_on(handler: MetadataHandler, state: State) -> list[Entry]:
    """Take in the entries that have been appended since; returns them."""
    found = []
    while True:
        entries = iter(handler.entries(state.number + 1))
        try:
            for entry in entries:
                state.apply(entry)
                found.append(entry)
            return found
        except CheckpointCorruptError:
            number = state.number + 1
            if number % STATE_INTERVAL or not number:
                raise
            state.number = number  # a damaged state is not needed here
