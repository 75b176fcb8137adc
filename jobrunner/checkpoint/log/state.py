"""What the log says: its entries, applied one after another. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jobrunner.checkpoint.log.entries import (
    FORMAT,
    ClaimEntry,
    CommitEntry,
    DoneEntry,
    EndEntry,
    HistoriesName,
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
    StoreKey,
    UnpinEntry,
    from_json,
    given_up_by,
    holder_of,
    to_json,
)
from jobrunner.errors import CheckpointCorruptError
from jobrunner.names import StoreName, format_store_name, parse_store_name
from jobrunner.positions import Position


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may be written after a ``claim``: stores of its run's nodes at positions up to `upto`."""

    number: Natural  # of the ``claim``
    retry: Natural
    after: Position | None  # the positions above it were never claimed before
    upto: Position
    occupied: tuple[Position, ...]  # where others have the plain names
    last: Position | None = None  # the newest that was committed

    def retry_of(self, at: Position) -> int:
        """The retry number in the names of its stores at a position; 0: they have none."""
        # What was claimed before, and came to nothing, may have left stores under the plain names, or
        # a slow worker may still write them. A retry number that no claim had yet makes other names.
        is_new = self.after is None or at > self.after
        if is_new and at not in self.occupied:
            return 0
        return self.retry

    def store_name(self, node: str, at: Position) -> str:
        """The name of a node's store at a position."""
        return format_store_name(node, at, self.retry_of(at))

    def may_write(self, at: Position) -> bool:
        """Whether its stores at a position may still be written and committed."""
        return at <= self.upto and (self.last is None or at > self.last)


class State(msgspec.Struct, forbid_unknown_fields=True):
    """What the log says up to entry `number`; -1 for an empty log.

    Attributes
    ----------
    last_id : str
        Of entry `number`.
    holder : Holder, optional
        The last run that took the directory.
    is_ended : bool
        Whether that run has released it.
    nodes : set
        The nodes that runs have saved.
    recorded : dict
        Epoch -> number of the ``commit`` with its record, in ascending order.
    retries : dict
        Recorded epoch -> the retry number in the names of its stores, if they have one.
    pins : dict
        Recorded epoch -> its labels.
    histories : dict
        The stores of epochs that are recorded or set aside -> where their histories lie, if they
        have any.
    keeps_histories : bool
        Entries were lost once, so nobody knows which directories of histories are in use.
    aside : set
        The stores that a rewind, a later record or a repair set aside. They stay.
    strangers : set
        The stores that were in the directory before any entry claimed their names. They stay.
    done : Position, optional
        The epoch after which the job ended.
    upto : Position, optional
        The highest position that was ever claimed.
    last_retry : int
        The highest retry number of a claim.
    claim : Claim, optional
        That of the holder, which may commit.
    is_unsure : bool
        Entries are lost, and the repair has not ended.
    """

    number: Annotated[int, Meta(ge=-1)] = -1
    last_id: Short = ""
    holder: Holder | None = None
    is_ended: bool = True
    nodes: set[str] = set()
    recorded: dict[Position, int] = {}
    retries: dict[Position, int] = {}
    pins: dict[Position, tuple[str, ...]] = {}
    histories: dict[StoreKey, HistoriesName] = {}
    keeps_histories: bool = False
    aside: set[StoreKey] = set()
    strangers: set[StoreKey] = set()
    done: Position | None = None
    upto: Position | None = None
    last_retry: Natural = 0
    claim: Claim | None = None
    is_unsure: bool = False

    @property
    def epochs(self) -> list[Position]:
        """The recorded epochs in ascending order."""
        return list(self.recorded)

    @property
    def latest(self) -> Position | None:
        """The newest recorded epoch."""
        return next(reversed(self.recorded), None)

    @property
    def is_done(self) -> bool:
        """Whether the job ended, exit group included, after the newest recorded epoch."""
        return self.done is not None and self.done == self.latest

    @property
    def _is_in_repair(self) -> bool:
        return self.holder is not None and self.holder.is_repair

    def _is_by_holder(self, entry: LogEntry) -> bool:
        return self.holder is not None and self.holder.run == entry.run

    # --- what becomes of a store

    def has_claimed(self, key: StoreKey) -> bool:
        """Whether some claim has such names, so that they may have been used."""
        at, retry = key
        if key in self.strangers:
            return False
        if self.claim is not None and retry == self.claim.retry:
            return at <= self.claim.upto
        if retry:
            return retry <= self.last_retry  # of a claim that is over
        return self.upto is not None and at <= self.upto

    def is_recorded(self, key: StoreKey) -> bool:
        """Whether such a store is that of a recorded epoch."""
        at, retry = key
        return at in self.recorded and self.retries.get(at, 0) == retry

    def is_left_over(self, store: StoreName) -> bool:
        """Whether a store counts for nothing, so that the next run deletes it.

        Its name was claimed, and then it came to no commit, or its epoch was retired. The names are
        never used again: whoever finds such a store may delete it at any time.
        """
        is_kept = self.is_recorded(store.key) or store.key in self.aside
        return store.node in self.nodes and self.has_claimed(store.key) and not is_kept

    def strangers_among(self, names: Iterable[str]) -> list[StoreKey]:
        """The stores in a directory that no run may write or delete.

        A repair does not know what lost entries said, so to it these are all but the recorded ones.
        """
        keys = set()
        for store in map(parse_store_name, names):
            if store is None or self.is_recorded(store.key):
                continue
            if self._is_in_repair or not self.has_claimed(store.key):
                keys.add(store.key)
        return sorted(keys)

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
        is_foreign = isinstance(entry, HolderEntry) and not self._is_by_holder(entry)
        if is_foreign:
            holder = self.holder and self.holder.run
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
        if isinstance(entry, ClaimEntry) and entry.retry <= self.last_retry:
            return f"retry number {entry.retry} was used before"
        # Other entries do no harm: what they give up or name may be gone. And without `claim`, the
        # stores were there before.
        if not isinstance(entry, CommitEntry) or entry.claim is None:
            return ""
        claim = self.claim
        if claim is None or claim.number != entry.claim:
            return f"claim {entry.claim} is over, or never began"
        last = claim.last
        for record in entry.records:
            if last is not None and record.at <= last:
                return f"epoch {record.at} follows epoch {last}"
            last = record.at
        if last is not None and last > claim.upto:
            return f"epoch {last} was never claimed"
        return ""

    # --- the next entry

    def apply(self, entry: LogEntry) -> None:
        """Take in the next entry; raises CheckpointCorruptError if it cannot be that."""
        self.check(entry)
        if isinstance(entry, HolderEntry) and not self._is_by_holder(entry):
            # Its ``run`` entry is lost. The repair will take the directory from it.
            self.holder = Holder(entry.number, entry.run)
        match entry:
            case RunEntry():
                self.claim = None
                self.holder = holder_of(entry)
                self.nodes.update(entry.nodes)
                self.is_ended = False
                # If the whole log is lost, there is no `lost` entry.
                self.keeps_histories |= entry.is_repair
            case ClaimEntry():
                self._begin_claim(entry)
            case CommitEntry():
                self._commit(entry)
            case RetireEntry():
                self._retire(entry.epochs)
            case RewindEntry():
                self.claim = None
                for epoch in given_up_by(entry, self.epochs):
                    self._set_aside(epoch)
            case PinEntry():
                self._pin(entry)
            case UnpinEntry():
                self._unpin(entry)
            case DoneEntry():
                self.done = entry.epoch
            case EndEntry():
                self._end(entry)
            case LostEntry():
                self.is_unsure = self.keeps_histories = True
        self.number = entry.number
        self.last_id = entry.id

    def skip_to(self, number: int) -> None:
        """Note that all entries before `number` that have not been applied are lost."""
        self.number = number - 1
        self.is_unsure = self.keeps_histories = True

    def _begin_claim(self, entry: ClaimEntry) -> None:
        self.claim = Claim(
            number=entry.number,
            retry=entry.retry,
            after=self.upto,
            upto=entry.upto,
            occupied=tuple(at for at, retry in entry.strangers if not retry),
        )
        self.last_retry = max(self.last_retry, entry.retry)
        if self._is_in_repair:
            self.aside.update(entry.strangers)
        else:
            self.strangers.update(entry.strangers)
        self.upto = _later(self.upto, entry.upto)

    def _commit(self, entry: CommitEntry) -> None:
        newest = self.latest
        for record in entry.records:
            if record.stores is None:
                continue
            at, retry = record.at, record.retry
            if at in self.recorded:
                # The stores of the record that this one replaces stay, as after a rewind.
                pins = self.pins.get(at)
                self._set_aside(at)
                if pins is not None:
                    self.pins[at] = pins
            self.recorded[at] = entry.number
            if retry:
                self.retries[at] = retry
            if record.histories:
                self.histories[at, retry] = record.histories
            self.aside.discard((at, retry))
            if self.done is not None and at >= self.done:
                self.done = None
            if entry.claim is None or self.is_unsure:
                # These names are in use, whatever entry has claimed them.
                self.upto = _later(self.upto, at)
                self.last_retry = max(self.last_retry, retry)
                self.strangers.discard((at, retry))
        if newest is not None and any(record.at <= newest for record in entry.records):
            # It was restored, or proven by a repair.
            self.recorded = dict(sorted(self.recorded.items()))
        claim = self.claim
        if claim is not None and claim.number == entry.claim:
            last = claim.last
            if entry.records:
                last = entry.records[-1].at
            upto = entry.upto or claim.upto
            self.claim = msgspec.structs.replace(claim, last=last, upto=upto)
            self.upto = _later(self.upto, upto)
        self._retire(entry.retires)

    def _retire(self, epochs: Iterable[Position]) -> None:
        for epoch in epochs:
            # It may have been pinned since the policy chose it.
            if epoch in self.recorded and epoch not in self.pins:
                self._remove(epoch)

    def _set_aside(self, epoch: Position) -> None:
        key = (epoch, self.retries.get(epoch, 0))
        histories = self.histories.get(key)
        self.aside.add(key)
        self._remove(epoch)
        if histories is not None:
            self.histories[key] = histories

    def _remove(self, epoch: Position) -> None:
        del self.recorded[epoch]
        self.histories.pop((epoch, self.retries.get(epoch, 0)), None)
        self.retries.pop(epoch, None)
        self.pins.pop(epoch, None)
        if self.done == epoch:
            self.done = None

    def _end(self, entry: EndEntry) -> None:
        claim, self.claim = self.claim, None
        # A run that claimed epochs up to 1,000 and ends after 7 gives back the names above 7, so that
        # the next run's epoch 8 needs no retry number; but not if other names have been claimed since.
        if claim is not None and entry.upto is not None and self.upto == claim.upto:
            self.upto = _later(claim.after, min(entry.upto, claim.upto))
        self.is_ended = True
        if self._is_in_repair:
            self.is_unsure = False

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
        for name in _MAPPINGS:
            tree[name] = list(tree[name].items())
        for name in ("nodes", "aside", "strangers"):
            tree[name] = sorted(tree[name])
        return msgspec.json.encode(tree, enc_hook=to_json)

    @classmethod
    def from_bytes(cls, data: bytes) -> State:
        """Undo `to_bytes`; raises ValueError for what it does not write."""
        tree = msgspec.json.decode(data, type=dict[str, Any])
        if tree.pop("format", None) != FORMAT:
            raise ValueError("it has another format")
        mappings: dict[str, Any] = {}
        for name, kind in _MAPPINGS.items():
            pairs = msgspec.convert(tree.pop(name, None), kind, dec_hook=from_json)
            mappings[name] = dict(sorted(pairs))
        state = msgspec.convert(tree, cls, dec_hook=from_json)
        state = msgspec.structs.replace(state, **mappings)
        if any(number > state.number for number in state.recorded.values()):
            raise ValueError("it records epochs by later entries")
        return state

    def copy(self) -> State:
        """A state that later entries do not change."""
        facts = {name: copy(getattr(self, name)) for name in self.__struct_fields__}
        return State(**facts)


_MAPPINGS: dict[str, Any] = {
    "recorded": list[tuple[Position, Natural]],
    "retries": list[tuple[Position, Natural]],
    "pins": list[tuple[Position, tuple[str, ...]]],
    "histories": list[tuple[StoreKey, HistoriesName]],
}
"""Fields that are lists of pairs in JSON, where no key of an object is a position."""


def _later(first: Position | None, second: Position | None) -> Position | None:
    return max(filter(None, (first, second)), default=None)


# Two threads that use a class first would crash in msgspec, so it learns all fields here.
msgspec.convert({}, State, dec_hook=from_json)
