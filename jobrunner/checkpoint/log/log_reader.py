"""Reads a log, from the newest state that is kept, and reads on."""

from __future__ import annotations

from collections.abc import Iterator

from jobrunner.checkpoint.log.entries import LogEntry, parse_entry
from jobrunner.checkpoint.log.handler import FileMetadataHandler, MetadataHandler, StateCache
from jobrunner.checkpoint.log.state import State
from jobrunner.errors import CheckpointCorruptError
from jobrunner.texts import get_logger

logger = get_logger(__name__)


class ReplacedError(Exception):
    """The entry that was read last is no longer there: the log is another one, or older."""


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
    trees = handler.entries(max(0, state.number))
    if state.number >= 0:
        found_id = next(trees, {}).get("id")
        if found_id != state.last_id:
            raise ReplacedError(found_id)
    for number, tree in enumerate(trees, state.number + 1):
        entry = parse_entry(tree, _name(handler, number))
        state.apply(entry)
        ids.add(entry.id)
    if state.number < last:
        raise CheckpointCorruptError(
            f"{_name(handler, state.number + 1)} is missing, although entry {last} exists."
        )
    return ids


def read_entry(handler: MetadataHandler, number: int) -> LogEntry:
    """Read entry `number`; raises CheckpointCorruptError if it is missing or damaged."""
    if isinstance(handler, FileMetadataHandler):
        tree = handler.entry(number)
    else:
        tree = next(handler.entries(number), None)
    if tree is None:
        raise CheckpointCorruptError(f"{_name(handler, number)} is missing.")
    return parse_entry(tree, _name(handler, number))


def each_entry(
    handler: MetadataHandler, number: int = 0
) -> Iterator[tuple[int, LogEntry | CheckpointCorruptError]]:
    """Iterate over the entries from `number` on with their numbers; yields errors for damaged ones."""
    last = handler.last_number()
    while number <= last:
        try:
            for tree in handler.entries(number):
                yield number, parse_entry(tree, _name(handler, number))
                number += 1
            if number <= last:
                yield number, CheckpointCorruptError(f"{_name(handler, number)} is missing.")
        except CheckpointCorruptError as error:
            yield number, error
        number += 1


def _name(handler: MetadataHandler, number: int) -> str:
    name = f"Entry {number} of the log"
    if isinstance(handler, FileMetadataHandler):
        name += f", {handler.path_of(number)},"
    return name
