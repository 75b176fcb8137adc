"""What the log says: its entries, applied one after another. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jobrunner.checkpoint.log.entries import (
    FORMAT,
    BeginEntry,
    CommitEntry,
    DoneEntry,
    EndEntry,
    Holder,
    HolderEntry,
    LogEntry,
    LostEntry,
    Natural,
    PinEntry,
    RetireEntry,
    RewindEntry,
    RunEntry,
    Short,
    UnpinEntry,
    from_json,
    given_up_by,
    holder_of,
    to_json,
)
from jobrunner.errors import CheckpointCorruptError
from jobrunner.names import format_store_name, parse_store_name
from jobrunner.positions import Position


class Attempt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may be written after a ``begin``: stores of its run's nodes at positions up to `upto`."""

    number: Natural  # of the ``begin``
    run: Natural  # number of the ``run`` entry, which has the nodes
    label: Natural
    after: Position | None  # the positions above it were never claimed before
    upto: Position
    occupied: tuple[Position, ...]  # where other files have the plain names
    last: Position | None = None  # the newest that was committed

    def label_of(self, at: Position) -> int:
        """The label in the names of its stores at a position; 0: they have none."""
        is_new = self.after is None or at > self.after
        return 0 if is_new and at not in self.occupied else self.label

    def store_name(self, node: str, at: Position) -> str:
        """The name of a node's store at a position."""
        return format_store_name(node, at, self.label_of(at))

    def may_have_left(self, at: Position, label: int) -> bool:
        """Whether it may have written stores with such names that it did not commit."""
        is_open = self.last is None or at > self.last
        return is_open and at <= self.upto and label == self.label_of(at)


class GivenUp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A retired epoch, whose stores are to be deleted."""

    number: Natural  # of the entry that retired it
    at: Position
    commit: Natural  # number of the entry with its record


Leftover = GivenUp | Attempt
"""What a run is to delete the stores of."""


class LogFacts(msgspec.Struct, forbid_unknown_fields=True):
    """What the log says up to entry `number`; -1 for an empty log.

    Attributes
    ----------
    last_id : str
        Of entry `number`.
    holder : Holder, optional
        The last run that took the directory.
    is_ended : bool
        Whether that run has released it.
    recorded : dict
        Epoch -> number of the ``commit`` with its record, in ascending order.
    pins : dict
        Recorded epoch -> its labels.
    done : Position, optional
        The epoch after which the job ended.
    upto : Position, optional
        The highest position that an attempt has claimed.
    occupied : set
        Positions up to it where other files have the plain names.
    label : int
        The highest label of an attempt.
    attempt : Attempt, optional
        That of the holder, which may commit.
    attempts : list
        Earlier ones that may have left stores.
    given_up : list
        Retired epochs whose stores may exist.
    is_unsure : bool
        Entries are lost, and the repair has not ended.
    """

    number: Annotated[int, Meta(ge=-1)] = -1
    last_id: Short = ""
    holder: Holder | None = None
    is_ended: bool = True
    recorded: dict[Position, int] = {}
    pins: dict[Position, tuple[str, ...]] = {}
    done: Position | None = None
    upto: Position | None = None
    occupied: set[Position] = set()
    label: Natural = 0
    attempt: Attempt | None = None
    attempts: list[Attempt] = []
    given_up: list[GivenUp] = []
    is_unsure: bool = False

    @property
    def epochs(self) -> list[Position]:
        """The recorded epochs in ascending order."""
        return list(self.recorded)

    @property
    def latest(self) -> Position | None:
        """The newest recorded epoch."""
        return next(reversed(self.recorded), None)

    def after(self, at: Position | None) -> list[Position]:
        """The recorded epochs after `at`, in ascending order; None: all."""
        return [epoch for epoch in self.recorded if at is None or epoch > at]

    @property
    def is_done(self) -> bool:
        """Whether the job ended, exit group included, after the newest recorded epoch."""
        return self.done is not None and self.done == self.latest

    def has_claimed(self, at: Position, label: int) -> bool:
        """Whether an attempt may have used the names of stores at `at` with this label, if any."""
        if self.attempt is not None and label == self.attempt.label:
            return at <= self.attempt.upto
        if label:
            return label <= self.label
        return self.upto is not None and at <= self.upto and at not in self.occupied

    @property
    def chores(self) -> list[Leftover]:
        """What the holder is to delete: all but its own attempts, which may still be written."""
        holder = -1 if self.holder is None else self.holder.number
        return [*self.given_up, *(item for item in self.attempts if item.run != holder)]

    def swept(self, deleted: Collection[Leftover]) -> int:
        """What the holder may say of `swept` in its next entry, having deleted some chores."""
        left = [item.number for item in self.chores if item not in deleted]
        return min(left, default=self.number + 1)


class State(LogFacts):
    """The facts, as they change with each entry."""

    # --- what can be the next entry

    def check(self, entry: LogEntry) -> None:
        """Raise CheckpointCorruptError if `entry` cannot be the next one; changes nothing."""
        if entry.number != self.number + 1:
            raise CheckpointCorruptError(
                f"The log has entry {entry.number} where entry {self.number + 1} is expected."
            )
        if self.is_unsure:
            # An entry that is lost may be the one that this entry follows from.
            return
        holder = None if self.holder is None else self.holder.run
        if isinstance(entry, HolderEntry) and entry.run != holder:
            raise CheckpointCorruptError(
                f"Entry {entry.number} ({entry.kind}) of the log is by run {entry.run}, but run "
                f"{holder} holds the directory at that point. The metadata handler let a run write "
                f"after it was taken over: test it with jobrunner.testing.contracts."
            )
        problem = self._find_problem(entry)
        if problem:
            raise CheckpointCorruptError(
                f"Entry {entry.number} ({entry.kind}) of the log contradicts the entries before "
                f"it: {problem}."
            )

    def _find_problem(self, entry: LogEntry) -> str:
        epochs: set[Position] = set()
        match entry:
            case BeginEntry() if entry.label <= self.label:
                return f"label {entry.label} was used before"
            case CommitEntry():
                epochs = {*entry.retires} - {record.at for record in entry.records}
                problem = self._find_problem_of(entry)
                if problem:
                    return problem
            case RetireEntry():
                epochs = {*entry.epochs}
            case RewindEntry() if entry.only is not None:
                epochs = {entry.only}
            case PinEntry():
                epochs = {entry.epoch}
            case EndEntry() if entry.upto is not None:
                last = None if self.attempt is None else self.attempt.last
                if self.attempt is None or (last is not None and entry.upto < last):
                    return f"the names up to {entry.upto} are not all that are in use"
        unknown = [str(epoch) for epoch in sorted(epochs) if epoch not in self.recorded]
        if unknown:
            return f"epochs {', '.join(unknown[:10])} are not recorded"
        if isinstance(entry, HolderEntry) and entry.swept > entry.number:
            return f"entry {entry.swept} is a later one"
        return ""

    def _find_problem_of(self, entry: CommitEntry) -> str:
        # Without `begin`, the stores were there: no attempt has written them.
        attempt = None if entry.begin is None else self.attempt
        if entry.begin is not None and (attempt is None or attempt.number != entry.begin):
            return f"attempt {entry.begin} is over, or never began"
        before = None if attempt is None else attempt.last
        for record in entry.records:
            if before is not None and record.at <= before:
                return f"epoch {record.at} follows epoch {before}"
            before = record.at
        if attempt is not None and before is not None and before > attempt.upto:
            return f"epoch {before} was never claimed"
        if entry.upto is not None and (attempt is None or entry.upto < attempt.upto):
            return f"epochs up to {entry.upto} are not all that are claimed"
        return ""

    # --- the next entry

    def apply(self, entry: LogEntry) -> None:
        """Take in the next entry; raises CheckpointCorruptError if it cannot be that."""
        self.check(entry)
        if isinstance(entry, HolderEntry):
            if self.holder is None or entry.run != self.holder.run:
                # Its ``run`` entry is lost. The repair will take the directory from it.
                self.holder = Holder(entry.number, entry.run)
            self._sweep(entry.swept, self.holder)
        match entry:
            case RunEntry():
                self._close_attempt()
                self.holder = holder_of(entry)
                self.is_ended = False
            case BeginEntry():
                self._begin(entry)
            case CommitEntry():
                self._commit(entry)
            case RetireEntry():
                self._retire(entry, entry.epochs)
            case RewindEntry():
                self._close_attempt()
                for epoch in given_up_by(entry, self.epochs):
                    self._remove(epoch)
            case PinEntry():
                self._pin(entry)
            case UnpinEntry():
                self._unpin(entry)
            case DoneEntry():
                self.done = entry.epoch
            case EndEntry():
                self._end(entry)
            case LostEntry():
                self.is_unsure = True
        self.number = entry.number
        self.last_id = entry.id

    def skip_to(self, number: int) -> None:
        """Note that all entries before `number` that have not been applied are lost."""
        self.number = number - 1
        self.is_unsure = True

    def _sweep(self, swept: int, holder: Holder) -> None:
        if not swept:
            return
        self.given_up = [epoch for epoch in self.given_up if epoch.number >= swept]
        # A worker that was slow when its run abandoned an attempt may still write, and does not
        # look into the log. So what this run has abandoned stays on the list until a later run,
        # whose workers are others, has swept it.
        self.attempts = [
            attempt
            for attempt in self.attempts
            if attempt.number >= swept or attempt.run == holder.number
        ]

    def _begin(self, entry: BeginEntry) -> None:
        self._close_attempt()
        assert self.holder is not None
        self.attempt = Attempt(
            number=entry.number,
            run=self.holder.number,
            label=entry.label,
            after=self.upto,
            upto=entry.upto,
            occupied=tuple(entry.occupied),
        )
        self.label = max(self.label, entry.label)
        self.occupied.update(entry.occupied)
        self.upto = _later(self.upto, entry.upto)

    def _close_attempt(self) -> None:
        attempt, self.attempt = self.attempt, None
        if attempt is not None and (attempt.last is None or attempt.last < attempt.upto):
            self.attempts.append(attempt)

    def _commit(self, entry: CommitEntry) -> None:
        newest = self.latest
        for record in entry.records:
            if record.stores is None:
                continue
            if record.at in self.recorded:
                # The stores of the record that this one replaces stay, as after a rewind.
                self._remove(record.at)
            self.recorded[record.at] = entry.number
            self.done = None
            if entry.begin is None or self.is_unsure:
                self._claim(record.at, (store.name for store in record.stores.values()))
        if newest is not None and any(record.at <= newest for record in entry.records):
            # It was restored, or proven by a repair.
            self.recorded = dict(sorted(self.recorded.items()))
        attempt = self.attempt
        if attempt is not None and attempt.number == entry.begin:
            last = entry.records[-1].at if entry.records else attempt.last
            upto = entry.upto or attempt.upto
            self.attempt = msgspec.structs.replace(attempt, last=last, upto=upto)
            self.upto = _later(self.upto, upto)
        self._retire(entry, entry.retires)

    def _claim(self, at: Position, names: Iterable[str]) -> None:
        """Take in that these names are in use, whatever entry had claimed them."""
        self.upto = _later(self.upto, at)
        self.occupied.discard(at)
        for name in names:
            store = parse_store_name(name)
            if store is not None:
                self.label = max(self.label, store.retry)

    def _retire(self, entry: LogEntry, epochs: Iterable[Position]) -> None:
        for epoch in epochs:
            # It may have been pinned since the policy chose it.
            if epoch in self.recorded and epoch not in self.pins:
                self.given_up.append(GivenUp(entry.number, epoch, self.recorded[epoch]))
                self._remove(epoch)

    def _remove(self, epoch: Position) -> None:
        del self.recorded[epoch]
        self.pins.pop(epoch, None)
        if self.done == epoch:
            self.done = None

    def _end(self, entry: EndEntry) -> None:
        attempt = self.attempt
        if attempt is not None and entry.upto is not None and entry.upto < attempt.upto:
            if self.upto == attempt.upto:
                self.upto = _later(attempt.after, entry.upto)
            self.attempt = msgspec.structs.replace(attempt, upto=entry.upto)
        self._close_attempt()
        self.is_ended = True
        if self.holder is not None and self.holder.is_repair:
            # What a lost entry said of these is not known: nothing is deleted that somebody may
            # still want.
            self.is_unsure = False
            self.attempts = []
            self.given_up = []

    def _pin(self, entry: PinEntry) -> None:
        labels = self.pins.get(entry.epoch, ())
        if entry.epoch in self.recorded and entry.label not in labels:
            self.pins[entry.epoch] = (*labels, entry.label)

    def _unpin(self, entry: UnpinEntry) -> None:
        labels = self.pins.pop(entry.epoch, ())
        kept = tuple(label for label in labels if label != entry.label)
        if kept and entry.label is not None:
            self.pins[entry.epoch] = kept

    # --- as a cache

    def to_bytes(self) -> bytes:
        """The state as JSON."""
        tree = {"format": FORMAT, **msgspec.structs.asdict(self)}
        tree["recorded"] = list(self.recorded.items())  # no key of an object is a position
        tree["pins"] = list(self.pins.items())
        return msgspec.json.encode(tree, enc_hook=to_json)

    @classmethod
    def from_bytes(cls, data: bytes) -> State:
        """Undo `to_bytes`; raises ValueError for what it does not write."""
        tree = msgspec.json.decode(data, type=dict[str, Any])
        if tree.pop("format", None) != FORMAT:
            raise ValueError("it has another format")
        recorded = _pairs(tree.pop("recorded", None), Natural)
        pins = _pairs(tree.pop("pins", None), tuple[str, ...])
        state = msgspec.convert(tree, cls, dec_hook=from_json)
        state.recorded = dict(sorted(recorded))
        state.pins = dict(pins)
        if any(number > state.number for number in state.recorded.values()):
            raise ValueError("it records epochs by later entries")
        return state


def _pairs(tree: object, kind: Any) -> Any:
    return msgspec.convert(tree, list[tuple[Position, kind]], dec_hook=from_json)


def _later(first: Position | None, second: Position | None) -> Position | None:
    return max(filter(None, (first, second)), default=None)


# Two threads that use a class first would crash in msgspec, so it learns all fields here.
msgspec.convert({}, State, dec_hook=from_json)
