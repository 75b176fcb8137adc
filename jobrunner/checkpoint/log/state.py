"""The state that the log's entries give when applied one after another. Pure: no I/O."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from jobrunner.checkpoint.log.entries import (
    FORMAT,
    BeginEntry,
    CommitEntry,
    DoneEntry,
    EndEntry,
    EpochJson,
    EpochKey,
    Holder,
    HolderEntry,
    LogEntry,
    LostEntry,
    Natural,
    PinEntry,
    Positive,
    RetireEntry,
    RewindEntry,
    RunEntry,
    Short,
    UnpinEntry,
    given_up_by,
    holder_of,
    read_positions,
    to_json,
)
from jobrunner.errors import CheckpointCorruptError
from jobrunner.names import format_store_name, parse_store_name
from jobrunner.positions import Position, position_from_json


class Attempt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may be written after a ``begin``: stores of its run's nodes at positions up to `upto`."""

    number: Natural  # of the ``begin``
    run: Natural  # number of the ``run`` entry, which has the nodes
    label: Natural
    after: EpochKey | None  # the positions above it were never claimed before
    upto: EpochKey
    taken: tuple[EpochKey, ...]  # where other files have the plain names
    last: EpochKey | None = None  # the newest that was committed

    def __post_init__(self) -> None:
        read_positions(self)

    def label_of(self, at: Position) -> int:
        """The label in the names of its stores at a position; 0: they have none."""
        is_new = self.after is None or at > self.after
        return 0 if is_new and at not in self.taken else self.label

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
    at: EpochKey
    commit: Natural  # number of the entry with its record

    def __post_init__(self) -> None:
        read_positions(self)


Leftover = GivenUp | Attempt
"""What a run is to delete the stores of."""


class State:
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
        Epoch -> number of the ``commit`` with its record.
    pins : dict
        Recorded epoch -> its labels.
    done : Position, optional
        The epoch after which the job ended.
    upto : Position, optional
        The highest position that an attempt has claimed.
    taken : set
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

    def __init__(self) -> None:
        self.number = -1
        self.last_id = ""
        self.holder: Holder | None = None
        self.is_ended = True
        self.recorded: dict[Position, int] = {}
        self.pins: dict[Position, tuple[str, ...]] = {}
        self.done: Position | None = None
        self.upto: Position | None = None
        self.taken: set[Position] = set()
        self.label = 0
        self.attempt: Attempt | None = None
        self.attempts: list[Attempt] = []
        self.given_up: list[GivenUp] = []
        self.is_unsure = False
        self._epochs: list[Position] = []

    @property
    def epochs(self) -> list[Position]:
        """The recorded epochs in ascending order."""
        return list(self._epochs)

    @property
    def latest(self) -> Position | None:
        """The newest recorded epoch."""
        return self._epochs[-1] if self._epochs else None

    def after(self, at: Position | None) -> list[Position]:
        """The recorded epochs after `at`, in ascending order; None: all."""
        if at is None:
            return self.epochs
        return self._epochs[bisect_right(self._epochs, at) :]

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
        return self.upto is not None and at <= self.upto and at not in self.taken

    @property
    def leftovers(self) -> list[Leftover]:
        """What the holder is to delete: all but its own attempts, which may still be written."""
        holder = -1 if self.holder is None else self.holder.number
        return [*self.given_up, *(item for item in self.attempts if item.run != holder)]

    def swept(self, deleted: Collection[Leftover]) -> int:
        """What the holder may say of `swept` in its next entry, having deleted some leftovers."""
        left = [item.number for item in self.leftovers if item not in deleted]
        return min(left, default=self.number + 1)

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
        try:
            self._check_content(entry)
        except ValueError as error:
            raise CheckpointCorruptError(
                f"Entry {entry.number} ({entry.kind}) of the log contradicts the entries before "
                f"it: {error}."
            ) from error

    def _check_content(self, entry: LogEntry) -> None:
        match entry:
            case BeginEntry() if entry.label <= self.label:
                raise ValueError(f"label {entry.label} was used before")
            case CommitEntry():
                self._check_commit(entry)
            case RetireEntry():
                self._check_recorded(entry.epochs)
            case RewindEntry() if isinstance(entry.only, Position):
                self._check_recorded([entry.only])
            case PinEntry():
                self._check_recorded([entry.epoch])
            case EndEntry() if entry.upto is not None:
                last = None if self.attempt is None else self.attempt.last
                if self.attempt is None or (last is not None and entry.upto < last):
                    raise ValueError(f"the names up to {entry.upto} are not all that are in use")
        if isinstance(entry, HolderEntry) and entry.swept > entry.number:
            raise ValueError(f"entry {entry.swept} is a later one")

    def _check_commit(self, entry: CommitEntry) -> None:
        # Without `begin`, the stores were there: no attempt has written them.
        attempt = None if entry.begin is None else self.attempt
        if entry.begin is not None and (attempt is None or attempt.number != entry.begin):
            raise ValueError(f"attempt {entry.begin} is over, or never began")
        before = None if attempt is None else attempt.last
        committed = set()
        for record in entry.records:
            if before is not None and record.at <= before:
                raise ValueError(f"epoch {record.at} follows epoch {before}")
            if record.contents is not None and record.contents > entry.number:
                raise ValueError(f"the contents of epoch {record.at} are in a later entry")
            before = record.at
            if record.stores is not None:
                committed.add(record.at)
        if attempt is not None and before is not None and before > attempt.upto:
            raise ValueError(f"epoch {before} was never claimed")
        if entry.upto is not None:
            if attempt is None:
                raise ValueError("there is no attempt that could claim more")
            if entry.upto < attempt.upto:
                raise ValueError(f"epochs up to {attempt.upto} are claimed")
        self._check_recorded(at for at in entry.retires if at not in committed)

    def _check_recorded(self, epochs: Iterable[Position]) -> None:
        unknown = [str(epoch) for epoch in epochs if epoch not in self.recorded]
        if unknown:
            raise ValueError(f"epochs {', '.join(unknown[:10])} are not recorded")

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
                self._rewind(entry)
            case PinEntry():
                self._pin(entry, entry.label)
            case UnpinEntry():
                self._pin(entry)
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
            taken=tuple(entry.taken),
        )
        self.label = max(self.label, entry.label)
        self.taken.update(entry.taken)
        self.upto = _later(self.upto, entry.upto)

    def _close_attempt(self) -> None:
        attempt, self.attempt = self.attempt, None
        if attempt is not None and (attempt.last is None or attempt.last < attempt.upto):
            self.attempts.append(attempt)

    def _commit(self, entry: CommitEntry) -> None:
        for record in entry.records:
            if record.stores is None:
                continue
            if record.at in self.recorded:
                # The stores of the record that this one replaces stay, as after a rewind.
                self._remove(record.at)
            self.recorded[record.at] = entry.number
            insort(self._epochs, record.at)
            self.done = None
            if entry.begin is None or self.is_unsure:
                self._claim(record.at, (store.name for store in record.stores.values()))
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
        self.taken.discard(at)
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

    def _rewind(self, entry: RewindEntry) -> None:
        for epoch in given_up_by(entry, self.epochs):
            self._remove(epoch)

    def _remove(self, epoch: Position) -> None:
        del self.recorded[epoch]
        del self._epochs[bisect_left(self._epochs, epoch)]
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

    def _pin(self, entry: PinEntry | UnpinEntry, *labels: str) -> None:
        """Put `labels` in the place of those that the entry names (None: all)."""
        former = () if entry.label is None else self.pins.pop(entry.epoch, ())
        kept = tuple(label for label in former if label != entry.label) + labels
        self.pins.pop(entry.epoch, None)
        if kept and entry.epoch in self.recorded:
            self.pins[entry.epoch] = kept

    # --- as a cache

    def to_bytes(self) -> bytes:
        """The state as JSON."""
        tree: dict[str, Any] = {"format": FORMAT, "id": self.last_id}
        for name in _FIELDS:
            tree[name] = to_json(getattr(self, name))
        return msgspec.json.encode(tree)

    @classmethod
    def from_bytes(cls, data: bytes) -> State:
        """Undo `to_bytes`; raises ValueError for what it does not write."""
        document = _decoder.decode(data)
        if document.format != FORMAT:
            raise ValueError(f"it has format {document.format}")
        state = cls()
        state.last_id = document.id
        for name in _FIELDS:
            setattr(state, name, getattr(document, name))
        state.recorded = {position_from_json(at): number for at, number in document.recorded}
        state.pins = {position_from_json(at): tuple(labels) for at, labels in document.pins}
        state.taken = set(document.taken)
        state._epochs = sorted(state.recorded)
        if any(number > state.number for number in state.recorded.values()):
            raise ValueError("it records epochs by later entries")
        return state


def _later(first: Position | None, second: Position | None) -> Position | None:
    return max(filter(None, (first, second)), default=None)


class _StateDocument(msgspec.Struct, forbid_unknown_fields=True):
    """A state as JSON. Its fields are attributes of `State`, but for the first two."""

    format: Positive
    id: Short
    number: Natural
    holder: Holder | None
    is_ended: bool
    recorded: list[tuple[EpochJson, Natural]]
    pins: list[tuple[EpochJson, list[str]]]
    done: EpochKey | None
    upto: EpochKey | None
    taken: list[EpochKey]
    label: Natural
    attempt: Attempt | None
    attempts: list[Attempt]
    given_up: list[GivenUp]
    is_unsure: bool

    def __post_init__(self) -> None:
        read_positions(self)


_FIELDS = _StateDocument.__struct_fields__[2:]
_decoder = msgspec.json.Decoder(_StateDocument)
