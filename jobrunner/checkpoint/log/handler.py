"""The default metadata handler, whose entries are files, and reading a log."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jobrunner.checkpoint.encoding import parse
from jobrunner.checkpoint.log.entries import (
    HEAD_BYTES,
    MOST_BYTES,
    Entry,
    LogEntry,
    RepairEntry,
    frame,
    split_file,
    too_large,
)
from jobrunner.checkpoint.log.mending import MOST_TRIED_BYTES, mend_bit
from jobrunner.checkpoint.log.protocol import MetadataHandler
from jobrunner.checkpoint.log.state import RESTARTS, STATE_INTERVAL, State, parse_entry
from jobrunner.checkpoint.storage import FILES, Files, PosixFiles, files_of
from jobrunner.compile import gc_paused
from jobrunner.define import checked
from jobrunner.errors import CheckpointCorruptError, CheckpointWriteError
from jobrunner.names import LOG_DIRECTORY
from jobrunner.positions import Position, PublicPosition
from jobrunner.texts import get_logger

logger = get_logger(__name__)

ENTRY_NAME = re.compile(r"([0-9]{10}|[1-9][0-9]{10,})\.json")
TEMPORARY_NAME = re.compile(r"\.([0-9]{10}|[1-9][0-9]{10,})\.json\.[0-9a-f]+\.tmp")
_MOST_LOST = 2_000
_LONG_BYTES, _MOST_DAMAGED_BYTES = 64 << 10, 64 << 20


class FileMetadataHandler:
    """The default handler: one file per entry, in ``_log/`` of the checkpoint directory.

    Parameters
    ----------
    files : Files, optional

    Attributes
    ----------
    stats : dict of str to dict of str to float
        The last report of each action: node -> seconds.

    Notes
    -----
    Entry 7 is ``_log/0000000007.json``. It is created with ``link``, or with a conditional put in
    an object store. Either succeeds for exactly one writer. The file is durable before `append`
    returns, and contains the digest of its entry.
    """

    @checked(files=FILES)
    def __init__(self, files: Files | None = None) -> None:
        self._given = files
        self._files = files if files is not None else PosixFiles()
        self._directory = ""
        self.stats: dict[str, dict[str, float]] = {}
        self.mended: set[int] = set()  # entries read with one wrong bit, which was corrected
        self._tries = MOST_TRIED_BYTES**2  # of that, so that much damage does not take hours
        self._damaged_bytes = 0  # of long entries, which can be holes in files
        self._decoded: tuple[bytes, Entry] = (b"", {})  # the last, which is often read again

    def set_params(self, path: str, node_names: Sequence[str]) -> None:
        """See `MetadataHandler`."""
        self._files = files_of(path, self._given)
        self._directory = os.path.join(path, LOG_DIRECTORY)

    def append(self, entry: Entry) -> bool:
        """See `MetadataHandler`."""
        number = entry["number"]
        if number == 0:
            self._files.make_directories(self._directory)
        return self._files.create(self.path_of(number), encode_entry(entry))

    def write(self, epoch: PublicPosition, record: Entry) -> bool:
        """See `MetadataHandler`."""
        return self.append(record)

    def last_number(self) -> int:
        """See `MetadataHandler`."""
        path, files = self._directory, self._files
        names = files.list_names(path)
        if not names and files.is_taken(path) and not files.is_directory(path):
            why = f"{path} is a file; expected a directory. Restore the log from a copy."
            raise CheckpointCorruptError(why, path=path)
        found = [int(match[1]) for name in names if (match := ENTRY_NAME.fullmatch(name))]
        last = max(found, default=-1)
        if last > _MOST_LOST + 10 * len(found):  # else a file could make a command run for ever
            raise CheckpointCorruptError(
                f"{(path := self.path_of(last))} is no entry of the log, or nearly all others are "
                f"lost: expected entries without gaps, found {len(found)}. Restore the others from "
                f"a copy. If there were none, move this file out of the directory.",
                path=path,
            )
        return last

    def entries(self, first: int = 0) -> Iterator[Entry]:
        """See `MetadataHandler`."""
        number, count = first, 1
        if (last := self._last_read(first)) is not None:
            yield last
            number += 1
        while True:
            # Read twice as many at once each time, so that few needless ones are read.
            count = min(2 * count, self._files.lookups)
            paths = [self.path_of(number + i) for i in range(count)]
            found = [*self._files.each(self.read_file, paths)]
            for i, data in enumerate(found):
                if data is None:
                    is_last = not any(found[i + 1 : i + 2])
                    if is_last and not self._files.is_taken(self.path_of(number + 1)):
                        return
                    yield self.entry(number, f", because entry {number + 1} exists")
                else:
                    yield self._decode(data, number)
                number += 1

    def _last_read(self, number: int) -> Entry | None:
        """An entry, if it was read last and is too long to be read again: its digest tells."""
        data, entry = self._decoded  # once: other threads read entries, too
        if len(data) < _LONG_BYTES or entry["number"] != number:
            return None
        with contextlib.suppress(OSError):  # reading all of it tells more
            size, head = self._files.read_span(self.path_of(number), 0, HEAD_BYTES)
            return entry if size == len(data) and head == data[:HEAD_BYTES] else None
        return None

    def read_file(self, path: str) -> bytes | CheckpointCorruptError | None:
        """The content of an entry's file, or why it is damaged; None if there is none."""
        if self._damaged_bytes > _MOST_DAMAGED_BYTES:
            return CheckpointCorruptError(
                f"{path} was not read, because damaged entries of {self._damaged_bytes:,} bytes "
                f"were read before it. {advise(path)}",
                path=path,
            )
        try:
            return self._files.read(path, MOST_BYTES)
        except CheckpointCorruptError as error:
            return error
        except IsADirectoryError:
            return CheckpointCorruptError(f"{path} is a directory. {advise(path)}", path=path)

    def entry(self, number: int, why: str = "") -> Entry:
        """One entry; `why` says why it must exist.

        Raises CheckpointCorruptError if it is missing or damaged, OSError if it cannot be read.
        """
        path = self.path_of(number)
        data = self.read_file(path)
        if data is None:
            raise CheckpointCorruptError(
                f"Entry {number} of the log is missing: expected {path}{why}. {advise(path)}",
                path=path,
            )
        return self._decode(data, number)

    def _decode(self, data: bytes | CheckpointCorruptError, number: int) -> Entry:
        if isinstance(data, CheckpointCorruptError):
            raise data
        path = self.path_of(number)
        content, entry = self._decoded
        if data and data == content and entry["number"] == number:
            return entry
        try:
            entry = decode_entry(data, number, path)
            self._decoded = (data, entry)
            return entry
        except CheckpointCorruptError:
            if len(data) > _LONG_BYTES:
                self._damaged_bytes += len(data)
            mended = mend_bit(data, math.isqrt(self._tries))
            if mended is None:
                self._tries -= min(self._tries, len(data) ** 2)
                raise
            self.mended.add(number)
            logger.warning("One bit of %s is wrong; corrected it while reading.", path)
            return decode_entry(mended, number, path)

    def last_epoch(self, user_epoch: PublicPosition | None = None) -> PublicPosition | None:
        """See `MetadataHandler`."""
        state = read_state(self)
        if user_epoch is None:
            return None if state.latest is None else state.latest.public
        return user_epoch if Position.of(user_epoch) in state.recorded else None

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """See `MetadataHandler`."""
        self.stats[action] = dict(stats)
        if stats:
            logger.debug("%s: %d nodes, %.3f s at most", action, len(stats), max(stats.values()))

    def accessible(self, epoch: PublicPosition | None = None) -> bool:
        """See `MetadataHandler`."""
        state = read_state(self)
        return state.number >= 0 and (epoch is None or Position.of(epoch) in state.recorded)

    def remove_leftovers(self, number: int) -> None:
        """Remove the temporary files of entries up to `number`, which must exist."""
        try:
            for name in self._files.list_names(self._directory):
                match = TEMPORARY_NAME.fullmatch(name)
                if match and int(match[1]) <= number:
                    with contextlib.suppress(FileNotFoundError):
                        self._files.remove_file(os.path.join(self._directory, name))
        except OSError as error:
            logger.warning("Cannot remove temporary files in %s: %s", self._directory, error)

    def path_of(self, number: int) -> str:
        """Path of an entry's file."""
        return os.path.join(self._directory, f"{number:010d}.json")


def encode_entry(entry: Entry) -> bytes:
    """The content of an entry's file."""
    text = json.dumps(entry, allow_nan=False, separators=(",", ":")).encode()
    if why := too_large(text):
        raise CheckpointWriteError(
            f"Entry {entry['number']} ({entry['kind']}) of the log would be too large: {why}. Use "
            f"another directory: `jobrunner copy` takes the epochs there that you need."
        )
    return frame(text, hashlib.sha256(text).hexdigest())


def decode_entry(data: bytes, number: int, path: str) -> dict[str, Any]:
    """The entry in a file; raises CheckpointCorruptError if it is damaged or another entry."""
    around, text = split_file(data)
    digest = hashlib.sha256(text).hexdigest()
    if around != frame(b"", digest):
        if not data:
            what = "is empty"
        elif not data.endswith(b"}\n"):
            what = f"is cut or overwritten: its {len(data)} bytes do not end as an entry does"
        else:
            named = data[11:75].decode("ascii", "replace")
            what = f"has changed since it was written: expected SHA-256 {named!r}, found {digest}"
        raise CheckpointCorruptError(
            f"Entry {number} of the log, {path}, {what}. {advise(path)}", path=path
        )
    if why := too_large(text):
        raise CheckpointCorruptError(
            f"{path} is no entry of the log: {why}. {advise(path)}", path=path
        )
    entry: dict[str, Any] = parse(text, path, advice=advise(path))
    found = entry.get("number") if isinstance(entry, dict) else None
    if found != number:
        raise CheckpointCorruptError(
            f"{path} contains entry {found}; expected entry {number}. {advise(path)}", path=path
        )
    return entry


def read_content(data: bytes) -> dict[str, Any] | None:
    """The entry in a file, with any number; None if it is damaged."""
    around, text = split_file(data)
    with contextlib.suppress(CheckpointCorruptError):
        is_whole = around == frame(b"", hashlib.sha256(text).hexdigest()) and not too_large(text)
        entry = parse(text, "", advice="") if is_whole else None
        return entry if isinstance(entry, dict) else None
    return None


def advise(path: str) -> str:
    """What to do about a damaged or missing entry, for messages."""
    directory = os.path.dirname(os.path.dirname(path))
    return (
        f"Restore the file from a copy, or run `jobrunner fsck {directory}` to see what can be "
        f"proven without it and `jobrunner fsck {directory} --repair` to continue from that."
    )


@gc_paused()  # nothing that is read is garbage
def read_state(handler: MetadataHandler) -> State:
    """Read the log from the last full state on; raises CheckpointCorruptError if it cannot."""
    last = handler.last_number()
    state = State()
    for first in range(last - last % STATE_INTERVAL, 0, -STATE_INTERVAL):
        try:
            state.restart(read_entry(handler, first))
            break
        except CheckpointCorruptError as error:
            # A full state only repeats what other entries say: an earlier one will do.
            logger.warning("Reading the log from an earlier full state: %s", error)
    read_on(handler, state, last)
    _check_shared(handler, state)
    return state


def _check_shared(handler: MetadataHandler, state: State) -> None:
    """Raise CheckpointCorruptError if the log records several epochs by an entry that does not."""
    for number, count in state.count_by_entry().items():
        if count > 1:
            entry = read_entry(handler, number)
            if not isinstance(entry, RepairEntry) or count > len(entry.by_epoch):
                raise CheckpointCorruptError(
                    f"`recorded` of the last full state or repair of the log is wrong: it says "
                    f"that entry {number}, a {entry.kind}, records {count:,} epochs. Run "
                    f"`jobrunner fsck DIR --repair` to continue from what can be proven."
                )


def read_on(
    handler: MetadataHandler, state: State, last: int = -1, *, checks: bool = False
) -> set[str]:
    """Apply the entries after `state`, at least up to `last`, and return their ids.

    `checks` whether the last entry of `state` is still there, which costs no more file operations;
    raises ReplacedError if not.
    """
    found: set[str] = set()
    while True:
        try:
            checks = checks and bool(state.last_id)
            trees = handler.entries(state.number + (not checks))
            if checks and (found_id := next(trees, {}).get("id")) != state.last_id:
                raise ReplacedError(state.number, found_id)
            checks = False
            for number, tree in enumerate(trees, state.number + 1):
                entry = _check(handler, number, tree)
                state.apply(entry)
                found.add(entry.id)
            if state.number < last:
                raise CheckpointCorruptError(
                    f"Entry {state.number + 1} of the log is missing: expected all entries up to "
                    f"{last}, which exists. Run `jobrunner fsck DIR` to see what can be proven "
                    f"without it and `jobrunner fsck DIR --repair` to continue from that."
                )
            return found
        except CheckpointCorruptError:
            number = state.number + 1
            if number and number % STATE_INTERVAL == 0:
                # It is a full state, which is not needed here.
                state.number, state.last_id = number, ""
                continue
            later = (entry for _, entry in each_entry(handler, number + 1))
            restart = next((entry for entry in later if isinstance(entry, RESTARTS)), None)
            if restart is None:
                raise
            state.restart(restart)
            found.add(restart.id)


class ReplacedError(Exception):
    """The last entry that was read is no longer there: the log is another one, or older."""

    def __init__(self, number: int, found: str | None) -> None:
        super().__init__(number, found)
        self.number, self.found = number, found


def read_entry(handler: MetadataHandler, number: int) -> LogEntry:
    """Read entry `number`; raises CheckpointCorruptError if it is missing or damaged."""
    if isinstance(handler, FileMetadataHandler):
        return _check(handler, number, handler.entry(number))  # `entries` looks ahead
    for entry in _typed(handler, number):
        return entry
    raise CheckpointCorruptError(f"Entry {number} of the log is missing.")


def each_entry(
    handler: MetadataHandler, number: int = 0
) -> Iterator[tuple[int, LogEntry | CheckpointCorruptError]]:
    """Iterate over the entries from `number` on with their numbers; yields errors for damaged ones."""
    last, take = handler.last_number(), gc_paused()(next)
    while number <= last:
        entries = _typed(handler, number)
        try:
            while (entry := take(entries, None)) is not None:
                yield number, entry
                number += 1
            if number <= last:
                yield number, CheckpointCorruptError(f"Entry {number} of the log is missing.")
        except CheckpointCorruptError as error:
            yield number, error
        number += 1


def _typed(handler: MetadataHandler, first: int) -> Iterator[LogEntry]:
    for number, tree in enumerate(handler.entries(first), first):
        yield _check(handler, number, tree)


def _check(handler: MetadataHandler, number: int, tree: Entry) -> LogEntry:
    try:
        return parse_entry(tree, f"Entry {number} of the log")
    except CheckpointCorruptError:
        if not isinstance(handler, FileMetadataHandler):
            raise
    path = handler.path_of(number)
    return parse_entry(tree, f"Entry {number} of the log, {path},", advise(path))
