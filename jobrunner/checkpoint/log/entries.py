"""The entries of the log, one class for each kind. Pure: no I/O.

An entry is appended by the run that holds the directory, with two exceptions: anyone may append
``pin`` and ``unpin``, and a repair puts ``lost`` in the place of an entry that cannot be read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jobrunner.checkpoint.log.details import MOST, Natural, Seconds, Timing
from jobrunner.errors import CheckpointCorruptError
from jobrunner.names import format_store_name
from jobrunner.positions import Position, position_from_json
from jobrunner.texts import printable

FORMAT = 1
"""Of entries and states; readers refuse later ones."""

_RETRY_DIGITS = 18

Positive = Annotated[int, Meta(ge=1, le=MOST)]
Retry = Annotated[int, Meta(ge=1, lt=10**18)]
Text = Annotated[str, Meta(min_length=1)]
Short = Annotated[str, Meta(max_length=1000)]
NodeName = Annotated[str, Meta(pattern=r"^[^/\x00-\x1f\ud800-\udfff]{1,128}\Z")]
RunName = Annotated[
    str, Meta(pattern=r"^[^./\x00-\x1f\ud800-\udfff][^/\x00-\x1f\ud800-\udfff]{0,63}\Z")
]

_HISTORIES_NAME = r"[0-9]{1,18}\.[0-9]{1,9}"

HistoriesName = Annotated[str, Meta(pattern=rf"^({_HISTORIES_NAME})?\Z")]
"""The name of a directory of histories: the number of the ``run`` entry that made it, and a count."""

StoreKey = tuple[Position, Annotated[int, Meta(ge=0, lt=10**18)]]
"""The position and the retry number in the name of a store, whatever its node; 0 if it has none."""

Entry = Mapping[str, Any]
"""An entry as JSON, as a `MetadataHandler` stores it."""


class Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Identifies a process on any machine, as far as its system tells."""

    host: Short = ""
    boot: Short = ""
    namespace: Short = ""
    pid: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 0
    started: Short = ""


class Store(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One node's store in a `Record`."""

    name: Text
    sha256: Short  # of its document, in hex
    nbytes: Natural
    seconds: Seconds = 0  # until the worker's stores were durable


class NodeContents(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a node's store has in it, as far as a load is planned by it."""

    blobs: list[str] = []
    states: list[str] = []  # blobs that contain objects saved by their state
    classes: dict[str, list[str]] = {}  # of the job, by blob


class Record(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One epoch, or a position within one, in a ``commit``."""

    at: Position
    stores: dict[NodeName, Store] | None  # None: passed over, so only `past_epochs` has it
    histories: HistoriesName = ""  # in which directory its histories lie
    contents: Natural | None = None  # number of the ``commit`` that says what the stores have
    details: dict[str, Any] = {}  # `Details` as strict JSON

    def __post_init__(self) -> None:
        retry = self.retry
        for node, store in self.all_stores.items():
            # A store that is named otherwise would be a path to somewhere else.
            if store.name != format_store_name(node, self.at, retry):
                raise ValueError(
                    f"{store.name!r:.80} is not the name of a store of {node!r} at {self.at}"
                )

    @property
    def all_stores(self) -> Mapping[str, Store]:
        """Its stores by node; none if the position was passed over."""
        return self.stores or {}

    @property
    def retry(self) -> int:
        """The retry number in the names of all its stores; 0: they have none."""
        for store in self.all_stores.values():
            _, _, retry = store.name.rpartition(".r")
            # Of another name, whatever this returns, `__post_init__` refuses the record.
            if retry.isdecimal() and len(retry) <= _RETRY_DIGITS:
                return int(retry)
            break
        return 0


class LogEntry(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="kind"
):
    """The fields that entries of all kinds have."""

    format: Positive
    number: Natural
    run: RunName  # which appended it
    id: Short  # unique
    time: Short

    @property
    def kind(self) -> str:
        """The tag of the class."""
        return str(self.__struct_config__.tag)


class HolderEntry(LogEntry, kw_only=True):
    """What only the run that holds the directory appends."""


class RunEntry(LogEntry, tag="run"):
    """A run took the directory: earlier runs must stop writing there."""

    nodes: list[NodeName]
    info: dict[str, Any]
    process: Process = Process()
    heartbeat_seconds: Seconds = 0
    is_repair: bool = False


class ClaimEntry(HolderEntry, tag="claim"):
    """A run claims names of stores: by them, it may write stores of all positions up to `upto`.

    A store is called ``node.at`` if no entry before has claimed `at` and nothing had that name,
    else ``node.at.r<retry>``. No other claim has the retry number, so names are never used twice.
    `strangers` are the stores, by position and retry number, that were in the directory though no
    entry has claimed their names. They are not ours and stay.
    """

    upto: Position
    retry: Retry
    strangers: list[StoreKey] = []


class CommitEntry(HolderEntry, tag="commit"):
    """Epochs exist, with these stores; and others are retired.

    `claim` is the number of the ``claim`` by which the stores were written; None: they were there
    before (restored, proven).
    """

    claim: Natural | None
    records: list[Record]
    run_number: Natural | None = None  # of the ``run`` entry with their plan
    contents: dict[str, NodeContents] = {}  # by node, where it differs from the entry before
    retires: list[Position] = []
    upto: Position | None = None  # up to where the claim goes from now on


class RetireEntry(HolderEntry, tag="retire"):
    """The retention policy gave epochs up; pinned ones stay."""

    epochs: list[Position]


class RewindEntry(HolderEntry, tag="rewind"):
    """Epochs are set aside, with their stores: `only` one, or else those `after` one (None: all)."""

    after: Position | None = None
    only: Position | None = None
    reason: str = ""


class DoneEntry(HolderEntry, tag="done"):
    """The job ended after this epoch, exit group included."""

    epoch: Position


class EndEntry(HolderEntry, tag="end"):
    """The run released the directory; another may take it at once.

    `upto` gives back the names of later positions, which no worker was told to write.
    """

    outcome: Literal["finished", "stopped", "failed"] | None = None  # None: a command, not a run
    timing: Timing | None = None
    upto: Position | None = None


class PinEntry(LogEntry, tag="pin"):
    """A label protects an epoch from the retention policy."""

    epoch: Position
    label: Text


class UnpinEntry(LogEntry, tag="unpin"):
    """One label of an epoch was removed, or all (None)."""

    epoch: Position
    label: str | None


class LostEntry(LogEntry, tag="lost"):
    """A repair put this in the place of an entry that was damaged or missing."""


AnyEntry = (
    RunEntry
    | ClaimEntry
    | CommitEntry
    | RetireEntry
    | RewindEntry
    | DoneEntry
    | EndEntry
    | PinEntry
    | UnpinEntry
    | LostEntry
)

_KINDS = {str(kind.__struct_config__.tag) for kind in AnyEntry.__args__}


class LaterVersionError(CheckpointCorruptError):
    """A later version of jobrunner wrote the entry, so it is not damaged."""


def parse_entry(tree: object, subject: str) -> LogEntry:
    """Check an entry that was read as JSON; errors begin with `subject`.

    Raises CheckpointCorruptError if a field is missing, unknown or has an invalid value, and
    LaterVersionError if a later version wrote the entry.
    """
    if isinstance(tree, Mapping):
        version, kind = tree.get("format"), tree.get("kind")
        if isinstance(version, int) and version > FORMAT:
            raise LaterVersionError(
                f"{subject} has format {version}, and this version of jobrunner reads formats up "
                f"to {FORMAT}. Use a later version."
            )
        if isinstance(kind, str) and kind not in _KINDS:
            raise LaterVersionError(
                f"{subject} is of kind {kind!r:.80}, which this version of jobrunner does not "
                f"know. Use a later version."
            )
    try:
        entry: LogEntry = msgspec.convert(tree, AnyEntry, dec_hook=from_json)
    except (ValueError, RecursionError) as error:  # also of a key with a lone surrogate
        raise CheckpointCorruptError(f"{subject} has an invalid field: {error}.") from None
    return entry


def entry_to_json(entry: LogEntry) -> dict[str, Any]:
    """An entry as a `MetadataHandler` stores it: dicts and lists."""
    tree: dict[str, Any] = msgspec.to_builtins(entry, enc_hook=to_json)
    return tree


def is_histories_name(text: str) -> bool:
    """Whether it is the name of a directory of histories."""
    return re.fullmatch(_HISTORIES_NAME, text) is not None


def to_json(value: object) -> int | str:
    """What JSON has in the place of a position."""
    if isinstance(value, Position):
        return value.to_json()
    raise NotImplementedError(f"{type(value).__name__} is not JSON")


def from_json(kind: type, value: object) -> Position:
    """Undo `to_json`; raises ValueError for anything else."""
    if kind is Position and type(value) in (int, str):
        return position_from_json(value)  # type: ignore[arg-type]
    raise ValueError(f"{value!r:.80} is no position")


# Two threads that use a class first would crash in msgspec, so it learns all fields here.
msgspec.convert({}, dict[str, AnyEntry], dec_hook=from_json)


def record_in(entry: LogEntry, at: Position) -> Record:
    """The record of an epoch in an entry; raises ValueError if there is none with stores."""
    if isinstance(entry, CommitEntry):
        for record in entry.records:
            if record.at == at and record.stores is not None:
                return record
    raise ValueError(f"entry {entry.number}, a {entry.kind}, has no record of epoch {at}")


def given_up_by(entry: LogEntry, epochs: Collection[Position]) -> list[Position]:
    """Which of `epochs`, of which none is pinned, an entry retires or sets aside."""
    if isinstance(entry, RewindEntry):
        if entry.only is not None:
            return [epoch for epoch in epochs if epoch == entry.only]
        return [epoch for epoch in epochs if entry.after is None or epoch > entry.after]
    if isinstance(entry, RetireEntry):
        return [epoch for epoch in entry.epochs if epoch in epochs]
    if isinstance(entry, CommitEntry):
        return [epoch for epoch in entry.retires if epoch in epochs]
    return []


class Holder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The run that took the directory last: its ``run`` entry without the long fields."""

    number: Natural
    run: RunName
    time: Short = "an unknown time"
    process: Process = Process()
    heartbeat_seconds: Seconds = 0
    is_repair: bool = False

    def __str__(self) -> str:
        process = self.process
        host = process.host or "an unknown host"
        text = f"process {process.pid or None} on {host}, since {self.time}"
        return printable(text, kept="")


def holder_of(entry: RunEntry) -> Holder:
    """The run that an entry gives the directory to."""
    return msgspec.convert(entry, Holder, from_attributes=True)
