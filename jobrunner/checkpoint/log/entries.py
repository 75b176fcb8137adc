"""The entries of the log, one class per kind, and the frame of their files. Pure: no I/O.

A process that does not hold the directory may append only ``pin`` and ``unpin``; a ``repair``
requires a directory that no run holds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType, structs

from jobrunner.checkpoint.encoding import EpochKey, described
from jobrunner.checkpoint.log.epoch_map import EpochMap
from jobrunner.checkpoint.log.timing import Seconds, Timing
from jobrunner.positions import Position, position_from_json
from jobrunner.texts import printable

_MOST = 1 << 62  # no number of an honest log comes near it
MOST_BYTES = 16 << 20
"""The size of an entry's file, at most."""
MOST_VALUES = 1_000_000
"""The values of an entry, at most; a string counts as three."""
MOST_REBUILT = MOST_VALUES // 28
"""Records that repairs rebuild, at most: more than an entry can hold, whose records have 28 values."""

Natural = Annotated[int, Meta(ge=0, le=_MOST)]
Positive = Annotated[int, Meta(ge=1, le=_MOST)]
Value = Annotated[int, Meta(ge=-_MOST, le=_MOST)]
Text = Annotated[str, Meta(min_length=1)]
Short = Annotated[str, Meta(max_length=1000)]
RunName = Annotated[
    str, Meta(pattern=r"^[^./\x00-\x1f\ud800-\udfff][^/\x00-\x1f\ud800-\udfff]{0,63}\Z")
]

_NODES = re.compile(r"([^/\x00-\x1f\ud800-\udfff]{1,128}\n)*")

Entry = Mapping[str, Any]
"""An entry as JSON, as a `MetadataHandler` stores it."""


def _check_nodes(names: Iterable[str], field: str) -> None:
    """Raise ValueError unless all can name nodes, and so stores."""
    if not _NODES.fullmatch("\n".join((*names, ""))):  # much faster than one by one
        raise ValueError(f"`{field}` contains a text that cannot name a node")


def _check_count(field: str, count: int, most: int) -> None:
    """Raise ValueError if so few entries cannot name so many epochs."""
    if count > most:
        raise ValueError(f"`{field}` has {count} items; the entries so far allow {most}")


class Claim(NamedTuple):
    """The store names of one attempt to save an epoch."""

    epoch: EpochKey
    retry: Natural


class Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identifies a process on any machine, as far as its system tells."""

    host: Short | None = None
    boot: Short | None = None
    namespace: Short | None = None
    pid: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)] | None = None
    started: Short | None = None


class StoreRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One node's store in a ``commit``."""

    store: Text
    manifest: Text  # SHA-256 of the manifest, in hex
    nbytes: Natural
    seconds: Seconds  # until the worker's stores were durable
    states: list[str] = []  # blobs that contain objects saved by their state


class RebuiltRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ``commit`` that a repair derived from the stores."""

    epoch: EpochKey
    retry: Natural
    run: RunName
    run_number: Natural | None
    time: Short
    stores: dict[str, StoreRecord]
    details: dict[str, Any]

    def __post_init__(self) -> None:
        structs.force_setattr(self, "epoch", _read_positions(self.epoch))
        _check_nodes(self.stores, "stores")


class Holder(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A ``run`` or ``repair`` without its long fields."""

    format: Positive
    number: Natural
    kind: Literal["run", "repair"]
    run: RunName
    id: Short
    time: Short
    process: Process | None = None
    heartbeat_seconds: Seconds = 0

    def __str__(self) -> str:
        process = self.process or Process()
        text = f"process {process.pid} on {process.host}, since {self.time}"
        return printable(text, kept="")


Progression = Annotated[tuple[Value, ...], Meta(min_length=5, max_length=6)]
"""See `EpochMap`."""


class Summary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A whole `State` as JSON."""

    run: Holder | None
    is_ended: bool
    recorded: list[Progression]
    retries: list[Progression]
    claims: list[Progression]
    chores: list[tuple[EpochKey, Natural, Literal["delete", "hide"], Natural]]
    done: Natural | None
    pins: list[list[int | str]] = []  # states written before there were pins have none

    @cached_property
    def parsed(self) -> tuple[EpochMap, EpochMap, EpochMap, dict[Claim, tuple[Any, ...]]]:
        """`recorded`, `retries`, `claims`, and `chores` by claim; raises ValueError."""

        def read(name: str) -> EpochMap:
            try:
                return EpochMap(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"`{name}`: {error}") from None

        chores = {_read_positions(Claim(*row[:2])): row[2:] for row in self.chores}
        return read("recorded"), read("retries"), read("claims"), chores

    def check(self, number: int) -> None:
        """Raise ValueError if entry `number` cannot contain it.

        An entry records one epoch, a repair several: few entries cannot name very many.
        """
        _check_count("claims", len(self.claims), number + MOST_REBUILT)
        _check_count("chores", len(self.chores), number + MOST_REBUILT)
        _check_count("pins", sum(map(len, self.pins)), 2 * number)
        recorded, retries, *_ = self.parsed
        total = sum(row[2] for row in self.recorded)
        for _, _, count, value, value_step, *_ in self.recorded:
            last = value + (count - 1) * value_step
            if not (0 <= value <= number >= last >= 0) or total > number + MOST_REBUILT:
                raise ValueError(
                    f"`recorded`: {total} epochs cannot be recorded by the entries before {number}"
                )
        if not recorded.has_keys_of(retries):
            raise ValueError("`recorded` and `retries` are of different epochs")
        for row in self.pins:
            try:
                _read_positions(row[0])
                is_pin = all(isinstance(label, str) for label in row[1:])
            except (IndexError, ValueError):
                is_pin = False
            if not is_pin:
                raise ValueError("`pins`: expected an epoch and its labels in each row")


EPOCH_FIELDS = {"epoch", "epochs", "after", "only", "settled"}
"""The fields of entries that contain epochs."""


def _read_positions(value: Any) -> Any:
    """What such a field contains, with positions for their JSON; raises ValueError."""
    if isinstance(value, int | str):
        return position_from_json(value)
    if isinstance(value, Claim):
        return Claim(_read_positions(value.epoch), value.retry)
    if isinstance(value, list):
        return [_read_positions(item) for item in value]
    return value


class LogEntry(
    msgspec.Struct,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="kind",
):
    """The fields that entries of all kinds have."""

    format: Positive
    number: Natural
    run: RunName  # which appended it
    id: Short  # unique
    time: Short
    settled: list[Claim] = []  # stores that are now deleted or hidden

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name in EPOCH_FIELDS:
                value = getattr(self, name)
                if isinstance(value, list):
                    _check_count(name, len(value), self.number + MOST_REBUILT)
                setattr(self, name, _read_positions(value))

    @property
    def kind(self) -> str:
        """The tag of the class."""
        return str(self.__struct_config__.tag)


class RunEntry(LogEntry, tag="run"):
    """A run took the directory: earlier runs must stop writing there."""

    nodes: list[str]
    info: dict[str, Any]
    process: Process | None = None
    heartbeat_seconds: Seconds = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_nodes(self.nodes, "nodes")


class BeginEntry(LogEntry, tag="begin"):
    """An attempt to save an epoch claimed the names of its stores."""

    epoch: EpochKey
    retry: Natural


class CommitEntry(LogEntry, tag="commit"):
    """The epoch exists, with these stores."""

    epoch: EpochKey
    retry: Natural
    run_number: Natural | None
    stores: dict[str, StoreRecord]
    details: dict[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_nodes(self.stores, "stores")


class RewindEntry(LogEntry, tag="rewind"):
    """Epochs are set aside: those `after` one (None: all), or `only` one."""

    after: EpochKey | UnsetType | None = UNSET
    only: EpochKey | UnsetType = UNSET
    reason: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.after is UNSET) == (self.only is UNSET):
            raise ValueError("A rewind has either `after` or `only`")

    @property
    def epochs(self) -> list[Position]:
        """The epochs listed one by one."""
        return [self.only] if isinstance(self.only, Position) else []


class RetireEntry(LogEntry, tag="retire"):
    """The retention policy gave epochs up; pinned ones stay."""

    epochs: list[EpochKey]


class DoneEntry(LogEntry, tag="done"):
    """The job ended after this epoch, exit group included."""

    epoch: EpochKey


class EndEntry(LogEntry, tag="end"):
    """The run released the directory; another may take it at once."""

    outcome: Literal["finished", "stopped", "failed"] | None = None  # None: not recorded
    timing: Timing | None = None


class PinEntry(LogEntry, tag="pin"):
    """A label protects an epoch from the retention policy."""

    epoch: EpochKey
    label: Text


class UnpinEntry(LogEntry, tag="unpin"):
    """One label of an epoch was removed, or all (None)."""

    epoch: EpochKey
    label: str | None


class StateEntry(LogEntry, tag="state"):
    """A summary of all entries before; reading can start here."""

    state: Summary

    def __post_init__(self) -> None:
        super().__post_init__()
        self.state.check(self.number)


class RepairEntry(LogEntry, tag="repair", dict=True):
    """What could be proven after entries were lost; reading restarts here."""

    state: Summary
    commits: list[RebuiltRecord]
    lost: list[Natural] = []
    process: Process | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.state.check(self.number)
        _check_count("commits", len(self.commits), MOST_REBUILT)
        _check_count("lost", len(self.lost), self.number)

    @cached_property
    def by_epoch(self) -> dict[Position, RebuiltRecord]:
        """The records by epoch."""
        return {commit.epoch: commit for commit in reversed(self.commits)}


class GapEntry(LogEntry, tag="gap"):
    """The entry with this number was lost; the number stays taken."""


def holder_of(entry: RunEntry | RepairEntry) -> Holder:
    """The run that an entry gives the directory to; after a repair no run has it."""
    return msgspec.convert(entry, described(Holder), from_attributes=True)


def commits_in(entry: LogEntry) -> list[CommitEntry]:
    """The records of epochs in an entry: a ``commit`` itself, or those that a ``repair`` rebuilt."""
    if isinstance(entry, RepairEntry):
        return [commit_in(entry, epoch) for epoch in entry.by_epoch]
    return [entry] if isinstance(entry, CommitEntry) else []


def commit_in(entry: LogEntry, epoch: Position) -> CommitEntry:
    """The record of an epoch in an entry; raises ValueError if there is none."""
    if isinstance(entry, RepairEntry) and (found := entry.by_epoch.get(epoch)):
        head: dict[str, Any] = {"format": entry.format, "number": entry.number, "id": entry.id}
        return CommitEntry(**head, **structs.asdict(found))
    if isinstance(entry, CommitEntry) and entry.epoch == epoch:
        return entry
    raise ValueError(f"it is a {entry.kind} of epoch {getattr(entry, 'epoch', None)}")


def given_up_by(entry: RetireEntry | RewindEntry, epochs: Collection[Position]) -> list[Position]:
    """Which of `epochs`, a fast container, a ``rewind`` or ``retire`` gives up."""
    if isinstance(entry, RewindEntry) and entry.only is UNSET:
        after = entry.after if isinstance(entry.after, Position) else None
        if isinstance(epochs, EpochMap):
            return epochs.after(after)
        return [epoch for epoch in epochs if after is None or epoch > after]
    return [epoch for epoch in entry.epochs if epoch in epochs]


HEAD_BYTES = len('{"sha256":"","entry":') + 64
"""Of an entry's file, before its text: its digest."""


def split_file(data: bytes) -> tuple[bytes, bytes]:
    """Split an entry's file: what is around the entry's text, and the text."""
    text = data[HEAD_BYTES:-2]
    return data[:HEAD_BYTES] + data[HEAD_BYTES + len(text) :], text


def frame(text: bytes, digest: str) -> bytes:
    """The content of an entry's file."""
    return f'{{"sha256":"{digest}","entry":'.encode() + text + b"}\n"


def too_large(text: bytes) -> str:
    """Why no entry has this text, found before anything is made of it; empty if one may."""
    if len(text) + HEAD_BYTES + 2 > MOST_BYTES:
        return f"it has more than {MOST_BYTES:,} bytes"
    count = sum(map(text.count, (b",", b"[", b"{", b'"')))
    return f"it has more than {MOST_VALUES:,} values" if count > MOST_VALUES else ""
