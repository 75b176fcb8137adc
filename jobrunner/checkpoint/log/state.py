"""The state that the log's entries give when applied one after another. Pure: no I/O."""

from __future__ import annotations

import datetime as dt
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import or_
from typing import Any, Literal, NamedTuple

import msgspec

from jobrunner.checkpoint.encoding import convert
from jobrunner.checkpoint.log.entries import (
    EPOCH_FIELDS,
    BeginEntry,
    Claim,
    CommitEntry,
    DoneEntry,
    EndEntry,
    Entry,
    GapEntry,
    Holder,
    LogEntry,
    PinEntry,
    RepairEntry,
    RetireEntry,
    RewindEntry,
    RunEntry,
    StateEntry,
    Summary,
    UnpinEntry,
    given_up_by,
    holder_of,
)
from jobrunner.checkpoint.log.epoch_map import EpochMap
from jobrunner.errors import CheckpointCorruptError
from jobrunner.json_output import with_json_positions
from jobrunner.names import format_store_name
from jobrunner.positions import Position, position_from_json

FORMAT = 3
"""Newest format of entries: 3 if they say how a run ended, 2 if they contain positions in the middle
of an epoch, else 1. Readers refuse later ones."""

STATE_INTERVAL = 128
"""The entries whose number is a multiple of it (but not 0) are ``state`` entries."""

_KINDS = {str(kind.__struct_config__.tag): kind for kind in LogEntry.__subclasses__()}
_ANY_KIND: Any = reduce(or_, _KINDS.values())
_HEAD = ("format", "number", "kind", "run", "id", "time")


def make_entry(number: int, kind: str, run: str, body: Mapping[str, Any]) -> LogEntry:
    """Make an entry to append, with a new ``id``."""
    now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    version = 3 if "timing" in body else 2 if _has_position(body) else 1
    epochs = {key: with_json_positions(body[key]) for key in EPOCH_FIELDS.intersection(body)}
    head = (version, number, kind, run, uuid.uuid4().hex, now)
    tree = {**dict(zip(_HEAD, head, strict=True)), **body, **epochs}
    return parse_entry(tree, f"New entry {number}")


def _has_position(body: Mapping[str, Any]) -> bool:
    epochs = [body.get(key) for key in ("epoch", "after", "only")]
    epochs += [*body.get("epochs", ()), *(epoch for epoch, _ in body.get("settled", ()))]
    # Every position that a state contains was claimed.
    claims = body["state"]["claims"] if "state" in body else ()
    return any(isinstance(it, Position) and it.step for it in epochs) or any(
        len(run) > 5 for run in claims
    )


class LaterVersionError(CheckpointCorruptError):
    """A later version wrote the entry, which is whole."""


def parse_entry(tree: object, where: str, advice: str = "") -> LogEntry:
    """Check an entry that was read as JSON; errors begin with `where` and end with `advice`.

    Raises CheckpointCorruptError if a field is missing, unknown or has an invalid value;
    LaterVersionError if a later version wrote the entry.
    """
    expected = _ANY_KIND
    if isinstance(tree, Mapping):
        version, kind = tree.get("format"), tree.get("kind")
        if isinstance(version, int) and version > FORMAT:
            raise LaterVersionError(
                f"{where} has format {version}, and this version of jobrunner reads formats up to "
                f"{FORMAT}. Use a later version."
            )
        if isinstance(kind, str):
            if kind not in _KINDS:
                raise LaterVersionError(
                    f"{where} is of kind {kind!r}, which this version of jobrunner does not know. "
                    f"Use a later version."
                )
            expected = _KINDS[kind]  # msgspec would inspect the whole union for each entry
    found: LogEntry = convert(tree, expected, where, advice=advice)
    return found


def entry_to_json(entry: LogEntry) -> Entry:
    """An entry as a `MetadataHandler` stores it: dicts and lists."""
    tree: dict[str, Any] = dict.fromkeys(_HEAD) | msgspec.to_builtins(entry)
    for name in EPOCH_FIELDS.intersection(tree):
        tree[name] = with_json_positions(getattr(entry, name))
    if isinstance(entry, RepairEntry):
        for commit, record in zip(tree["commits"], entry.commits, strict=True):
            commit["epoch"] = record.epoch.to_json()
    if "state" in tree:
        tree["state"] = {
            key: [list(row) for row in value] if isinstance(value, list) else value
            for key, value in tree["state"].items()
        }
    if "settled" in tree:
        tree["settled"] = tree.pop("settled")  # as the last
    return tree


class Chore(NamedTuple):
    """Stores that are in no recorded checkpoint and may still exist."""

    action: Literal["delete", "hide"]  # hidden stores stay, but no longer open as live ones
    source: int  # number of the entry with their nodes: a ``run`` or a ``commit``


@dataclass(slots=True)
class State:
    """What the log says up to entry `number`; -1 for an empty log."""

    number: int = -1
    last_id: str = field(default="", compare=False)
    """Of entry `number`; empty if that is damaged or there is none."""
    run: Holder | None = None
    """The last run that took the directory."""
    is_ended: bool = True
    """Whether that run has released it."""
    recorded: EpochMap = field(default_factory=EpochMap)
    """Epoch -> position of its ``commit`` among the entries that are no full states, so that epochs
    saved one after another form one progression; see `commit_number`."""
    retries: EpochMap = field(default_factory=EpochMap)
    """Recorded epoch -> which claim on its names it is."""
    claims: EpochMap = field(default_factory=EpochMap)
    """Epoch -> how often its names were claimed."""
    chores: dict[Claim, Chore] = field(default_factory=dict)
    """All claims that are not settled, including saves in progress."""
    done: Position | None = None
    """The epoch after which the job ended."""
    pins: dict[Position, tuple[str, ...]] = field(default_factory=dict)
    """Recorded epoch -> its labels."""

    @property
    def latest(self) -> Position | None:
        """Newest recorded epoch."""
        return self.recorded.last if self.recorded else None

    def commit_number(self, epoch: Position) -> int:
        """Number of the ``commit`` entry of a recorded epoch."""
        return _number(self.recorded[epoch])

    def count_by_entry(self) -> Counter[int]:
        """Number of an entry -> how many epochs it recorded, without a walk over the epochs."""
        found: Counter[int] = Counter()
        for _, _, count, value, value_step, *_ in self.recorded.runs():
            if value_step:
                found.update(map(_number, range(value, value + count * value_step, value_step)))
            else:
                found[_number(value)] += count
        return found

    def after(self, entry: LogEntry) -> State:
        """A copy of this state with `entry` applied."""
        state = replace(
            self,
            recorded=self.recorded.copy(),
            retries=self.retries.copy(),
            claims=self.claims.copy(),
            chores=dict(self.chores),
            pins=dict(self.pins),
        )
        state.apply(entry)
        return state

    def apply(self, entry: LogEntry) -> None:
        """Take in the next entry; raises CheckpointCorruptError if it cannot be the next."""
        number = entry.number
        starts_here = isinstance(entry, RepairEntry) or (
            isinstance(entry, StateEntry) and self.number == -1
        )
        if number != self.number + 1 and not starts_here:
            raise CheckpointCorruptError(
                f"The log has entry {number} where entry {self.number + 1} is expected."
            )
        if isinstance(entry, GapEntry):
            raise CheckpointCorruptError(f"Entry {number} of the log was lost.")
        holder = self.run.run if self.run is not None else None
        if not isinstance(entry, _OPEN) and entry.run != holder:
            raise CheckpointCorruptError(
                f"Entry {number} ({entry.kind}) of the log is by run {entry.run}, but run {holder} "
                f"holds the directory at that point. The metadata handler let a run write after "
                f"it was taken over: test it with jobrunner.testing.contracts."
            )
        try:
            self._take_in(entry)
        except ValueError as error:
            raise CheckpointCorruptError(
                f"Entry {number} ({entry.kind}) of the log contradicts the entries before it: "
                f"{error}."
            ) from error
        self.number, self.last_id = number, entry.id

    def follow(self, entry: LogEntry, *, is_sure: bool) -> None:
        """Take in an entry of a log that has lost others; `chores` become incomplete.

        A ``retire`` has no effect unless all entries before it are there (`is_sure`): a lost pin
        may protect its epochs.
        """
        if is_sure or not isinstance(entry, RetireEntry):
            self._take_in(entry, is_strict=False)
        self.number, self.last_id = entry.number, entry.id

    def restart(self, entry: LogEntry) -> None:
        """Start over at a ``state`` or ``repair`` entry, whatever came before."""
        found = State()
        found.apply(entry)
        self._copy(found)

    def _take_in(self, entry: LogEntry, *, is_strict: bool = True) -> None:
        match entry:
            case RunEntry():
                self.run = holder_of(entry)
                self.is_ended = False
            case BeginEntry():
                self._begin(entry, is_strict)
            case CommitEntry():
                self._commit(entry, is_strict)
            case RewindEntry() | RetireEntry():
                self._give_up_all(entry, is_strict)
            case PinEntry():
                if entry.epoch in self.recorded:
                    self.pins[entry.epoch] = (*self._unpinned(entry), entry.label)
                elif is_strict:
                    raise ValueError(f"epoch {entry.epoch} is not recorded")
            case UnpinEntry():
                left = self._unpinned(entry)
                self.pins.pop(entry.epoch, None)
                if left and entry.label is not None:
                    self.pins[entry.epoch] = left
            case DoneEntry():
                self.done = entry.epoch
            case EndEntry():
                self.is_ended = True
            case RepairEntry():
                self._repair(entry)
            case StateEntry() if self.number < 0:  # later ones repeat what is known
                self._copy(State.from_json(entry.state))
        for claim in entry.settled:
            self.chores.pop(claim, None)

    def _begin(self, entry: BeginEntry, is_strict: bool) -> None:
        claims = self.claims.get(entry.epoch, 0)
        if is_strict:
            if entry.retry < claims:
                raise ValueError(f"claim {entry.retry} on epoch {entry.epoch} was made before")
            if self.run is None:
                raise ValueError("no run holds the directory")
            claim = Claim(entry.epoch, entry.retry)
            self.chores[claim] = Chore("delete", self.run.number)
        self.claims[entry.epoch] = max(claims, entry.retry + 1)

    def _commit(self, entry: CommitEntry, is_strict: bool) -> None:
        epoch, claim = entry.epoch, Claim(entry.epoch, entry.retry)
        if is_strict and claim not in self.chores:
            raise ValueError(f"claim {entry.retry} on epoch {epoch} was never made")
        self.claims[epoch] = max(self.claims.get(epoch, 0), entry.retry + 1)
        if epoch in self.recorded:
            # A pinned epoch is hidden, not deleted.
            self._give_up(epoch, "hide" if epoch in self.pins else "delete")
        self.chores.pop(claim, None)
        self.recorded[epoch] = _position(entry.number)
        self.retries[epoch] = entry.retry
        self.done = None

    def _give_up_all(self, entry: RewindEntry | RetireEntry, is_strict: bool) -> None:
        epochs = given_up_by(entry, self.recorded)
        if is_strict and (unknown := set(entry.epochs) - set(epochs)):
            raise ValueError(f"epochs {[*map(str, sorted(unknown)[:10])]} are not recorded")
        for epoch in dict.fromkeys(epochs):
            if isinstance(entry, RewindEntry):
                self._give_up(epoch, "hide")
            elif epoch not in self.pins:  # it may have been pinned since the policy chose it
                self._give_up(epoch, "delete")

    def _give_up(self, epoch: Position, action: Literal["delete", "hide"]) -> None:
        number = self.commit_number(epoch)
        del self.recorded[epoch]
        self.pins.pop(epoch, None)
        self.chores[Claim(epoch, self.retries.pop(epoch))] = Chore(action, number)
        if self.done == epoch:
            self.done = None

    def _unpinned(self, entry: PinEntry | UnpinEntry) -> tuple[str, ...]:
        return tuple(label for label in self.pins.get(entry.epoch, ()) if label != entry.label)

    def _repair(self, entry: RepairEntry) -> None:
        self._copy(State.from_json(entry.state))
        for commit in entry.commits:
            self.recorded[commit.epoch] = _position(entry.number)
            self.retries[commit.epoch] = commit.retry
        self.run = holder_of(entry)
        self.is_ended = True

    def _copy(self, other: State) -> None:
        for one in fields(other):
            setattr(self, one.name, getattr(other, one.name))

    def to_json(self) -> dict[str, Any]:
        """The body of a ``state`` entry."""
        return {
            "run": msgspec.to_builtins(self.run),
            "is_ended": self.is_ended,
            "recorded": self.recorded.runs(),
            "retries": self.retries.runs(),
            "claims": self.claims.runs(),
            "chores": [
                [epoch.to_json(), retry, *chore] for (epoch, retry), chore in self.chores.items()
            ],
            "done": None if self.done is None else self.done.to_json(),
            "pins": [[epoch.to_json(), *labels] for epoch, labels in self.pins.items()],
        }

    @classmethod
    def from_json(cls, body: Summary) -> State:
        """The state of a ``state`` entry, without its number."""
        pins = {position_from_json(epoch): tuple(map(str, labels)) for epoch, *labels in body.pins}
        *maps, chores = body.parsed
        recorded, retries, claims = (it.copy() for it in maps)
        return cls(
            run=body.run,
            is_ended=body.is_ended,
            recorded=recorded,
            retries=retries,
            claims=claims,
            chores={claim: Chore(*about) for claim, about in chores.items()},
            done=None if body.done is None else Position(body.done),
            pins=pins,
        )


_OPEN = (RunEntry, StateEntry, PinEntry, UnpinEntry, RepairEntry)
"""Entries that need not be by the run that holds the directory."""

RESTARTS = (StateEntry, RepairEntry)
"""Reading can start at these, even if all entries before are lost."""


def _position(number: int) -> int:
    """Position of an entry among those that are no full states."""
    return number - number // STATE_INTERVAL


def _number(position: int) -> int:
    """Number of the entry at a position among those that are no full states."""
    return position + max(0, position - 1) // (STATE_INTERVAL - 1)


def store_names(nodes: Iterable[str], epoch: Position, retry: int) -> dict[str, str]:
    """Node -> name of its store, for one claim on an epoch."""
    return {node: format_store_name(node, epoch, retry) for node in nodes}
