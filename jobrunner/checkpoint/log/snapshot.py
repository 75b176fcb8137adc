"""The log as readers get it: read once, and passed down; and the records in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jobrunner.checkpoint.log.details import Details, loose_json, read_details
from jobrunner.checkpoint.log.entries import (
    CommitEntry,
    LogEntry,
    NodeContents,
    RunEntry,
    Store,
    record_in,
)
from jobrunner.checkpoint.log.state import LogFacts
from jobrunner.errors import CheckpointCorruptError
from jobrunner.positions import Position, PublicPosition, name_step
from jobrunner.texts import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """A recorded epoch, or a position within one.

    Attributes
    ----------
    at : Position
        What it contains.
    number : int
        Of the log entry that recorded it.
    time : str
        When it was recorded, in ISO 8601, UTC.
    run : str
        The name of the run that recorded it.
    run_number : int or None
        Of the log entry with which that run began; None if it is unknown.
    stores : mapping of str to Store
        Node -> ``name``, ``sha256`` (of its document), ``nbytes`` and ``seconds``.
    details : Details
        What the run said of it: ``metrics``, ``metadata``, ``stopped_by`` and more.
    """

    at: Position
    number: int
    time: str
    run: str
    run_number: int | None
    stores: Mapping[str, Store]
    details: Details
    contents_number: int
    """Of the log entry that says what the stores have in them."""
    contents: Mapping[str, NodeContents] | None = None
    """That, by node, once it was read."""

    @property
    def epoch(self) -> PublicPosition:
        """An int after a whole epoch, else a `Position`."""
        return self.at.public

    @property
    def nbytes(self) -> int:
        """The size of all stores."""
        return sum(store.nbytes for store in self.stores.values())

    @property
    def seconds(self) -> float:
        """How long the save took. Nodes save at the same time, so the slowest one counts."""
        return max((store.seconds for store in self.stores.values()), default=0.0)

    @property
    def name(self) -> str:
        """The epoch, and the step if it was saved within one, for a message."""
        at = self.at
        if not at.step:
            return f"epoch {at}"
        noun = "epoch" if at.epoch == 1 else "epochs"
        step = name_step(at.step, self.details.steps_per_epoch)
        return f"epoch {at} ({at.epoch} whole {noun} and {step})"


class Snapshot(LogFacts, frozen=True, kw_only=True):  # type: ignore[misc]  # msgspec can
    """What the log said when it was read; later entries do not change it."""

    path: str  # of the directory
    entry: Callable[[int], LogEntry]  # reads one by its number

    def record(self, at: Position) -> EpochRecord:
        """Read the record of an epoch, which must be recorded.

        Raises CheckpointCorruptError if an entry that has a part of it is missing or damaged.
        """
        return read_record(self.path, self.entry, at, self.recorded[at])

    def info(self, run_number: int | None) -> Mapping[str, Any]:
        """What a run logged when it began; empty if its entry, of that number, is lost."""
        return read_info(self.path, self.entry, run_number)


def read_record(
    path: str, read_entry: Callable[[int], LogEntry], at: Position, number: int
) -> EpochRecord:
    """Read the record of an epoch from entry `number` of the log; raises CheckpointCorruptError."""
    commit = read_entry(number)
    try:
        record = record_in(commit, at)
        assert isinstance(commit, CommitEntry)
        details = read_details(record.details)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(
            f"{path}: entry {number} of the log is not a valid record of epoch {at}: {error}. "
            f"Restore the entry from a copy, or run `jobrunner fsck {path} --repair` to rebuild "
            f"the record."
        ) from error
    return EpochRecord(
        at,
        number,
        commit.time,
        commit.run,
        commit.run_number,
        record.stores or {},
        details,
        number if record.contents is None else record.contents,
    )


def read_contents(
    read_entry: Callable[[int], LogEntry], record: EpochRecord
) -> dict[str, NodeContents] | None:
    """What the stores of a record have in them, by node; None if the entry that says so is lost."""
    try:
        source = read_entry(record.contents_number)
    except CheckpointCorruptError:
        return None
    if not isinstance(source, CommitEntry):
        return None
    return {node: source.contents.get(node) or NodeContents() for node in record.stores}


def read_info(
    path: str, read_entry: Callable[[int], LogEntry], run_number: int | None
) -> Mapping[str, Any]:
    """What a run logged in its entry of that number; empty, with a warning, if that is lost."""
    try:
        entry = None if run_number is None else read_entry(run_number)
        info: Mapping[str, Any] = loose_json(entry.info) if isinstance(entry, RunEntry) else {}
        return info
    except (CheckpointCorruptError, ValueError, RecursionError) as error:
        logger.warning("%s: the info of a run is lost: %s", path, error)
        return {}
