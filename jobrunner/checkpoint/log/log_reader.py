"""Reads a log, from the newest state that is kept, and reads on."""

from __future__ import annotations

from collections.abc import Iterator

from jobrunner.checkpoint.log.entries import Entry, LogEntry, parse_entry
from jobrunner.checkpoint.log.handler import (
    FileMetadataHandler,
    MetadataHandler,
    StateCache,
    advise,
)
from jobrunner.checkpoint.log.state import State
from jobrunner.errors import CheckpointCorruptError
from jobrunner.texts import get_logger

logger = get_logger(__name__)


class ReplacedError(Exception):
    """The last entry that was read is no longer there: the log is another one, or older."""

    def __init__(self, number: int, found_id: str | None) -> None:
        super().__init__(number, found_id)
        self.number = number
        self.found_id = found_id


def read_state(handler: MetadataHandler) -> State:
    """The state that a handler's log gives.

    Raises CheckpointCorruptError if an entry that is needed is damaged or missing.
    """
    last = handler.last_number()
    if isinstance(handler, StateCache):
        for data in handler.states():
            try:
                state = State.from_bytes(data)
                read_on(handler, state, last)
                return state
            except (ValueError, RecursionError) as error:
                logger.warning("Reading the log without a state of it: %s", error)
            except ReplacedError:
                # The state is of another log that was in this place, or of a part that is gone.
                continue
    state = State()
    read_on(handler, state, last)
    return state


def read_on(handler: MetadataHandler, state: State, last: int = -1) -> set[str]:
    """Apply the entries after `state`, at least up to `last`, and return their ids.

    Raises ReplacedError if the entry that `state` has read last is no longer there. To look for it
    costs nothing: without it, the first request would be for an entry that does not exist.
    """
    ids: set[str] = set()
    first = max(0, state.number)
    trees = handler.entries(first)
    if state.number >= 0:
        found_id = next(trees, {}).get("id")
        if found_id != state.last_id:
            raise ReplacedError(state.number, found_id)
        first += 1
    for number, tree in enumerate(trees, first):
        entry = _parse(handler, number, tree)
        state.apply(entry)
        ids.add(entry.id)
    if state.number < last:
        raise CheckpointCorruptError(
            f"Entry {state.number + 1} of the log is missing: expected all entries up to {last}, "
            f"which exists. Run `jobrunner fsck DIR` to see what can be proven without it and "
            f"`jobrunner fsck DIR --repair` to continue from that."
        )
    return ids


def read_entry(handler: MetadataHandler, number: int) -> LogEntry:
    """Read entry `number`; raises CheckpointCorruptError if it is missing or damaged."""
    advice = ""
    if isinstance(handler, FileMetadataHandler):
        tree = handler.entry(number)  # reads nothing ahead
        advice = advise(handler.path_of(number))
    else:
        tree = next(handler.entries(number), None)
    if tree is None:
        raise CheckpointCorruptError(f"Entry {number} of the log is missing. {advice}")
    return _parse(handler, number, tree)


def each_entry(
    handler: MetadataHandler, number: int = 0
) -> Iterator[tuple[int, LogEntry | CheckpointCorruptError]]:
    """Iterate over the entries from `number` on with their numbers; yields errors for damaged ones."""
    last = handler.last_number()
    while number <= last:
        try:
            for tree in handler.entries(number):
                yield number, _parse(handler, number, tree)
                number += 1
            if number <= last:
                yield number, CheckpointCorruptError(f"Entry {number} of the log is missing.")
        except CheckpointCorruptError as error:
            yield number, error
        number += 1


def _parse(handler: MetadataHandler, number: int, tree: Entry) -> LogEntry:
    if not isinstance(handler, FileMetadataHandler):
        return parse_entry(tree, f"Entry {number} of the log")
    path = handler.path_of(number)
    return parse_entry(tree, f"Entry {number} of the log, {path},", advise(path))
