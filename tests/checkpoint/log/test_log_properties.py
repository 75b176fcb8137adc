"""The log's meaning: any history, read from anywhere, gives one state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobrunner import CheckpointCorruptError
from jobrunner.checkpoint.log.details import loose_json, strict_json
from jobrunner.checkpoint.log.entries import (
    ClaimEntry,
    CommitEntry,
    DoneEntry,
    EndEntry,
    LogEntry,
    PinEntry,
    Record,
    RetireEntry,
    RewindEntry,
    RunEntry,
    Store,
    UnpinEntry,
    entry_to_json,
    record_in,
)
from jobrunner.checkpoint.log.handler import decode_entry, encode_entry
from jobrunner.checkpoint.log.log_writer import make_entry
from jobrunner.checkpoint.log.state import State
from jobrunner.names import parse_store_name
from jobrunner.positions import Position
from tests.sampling import examples

POSITIONS = st.builds(Position, st.integers(0, 6), st.integers(0, 2))
EVERYWHERE = [Position(epoch, step) for epoch in range(8) for step in range(3)]


def fold(entries: Iterable[LogEntry]) -> State:
    """The state that `entries` give."""
    state = State()
    for entry in entries:
        state.apply(entry)
    return state


class History:
    """Draws entries that runs may append, and the state after each."""

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []
        self.state = State()
        self.run = ""
        self.names: dict[str, int] = {}
        """Name of a store that may have been written -> number of its ``claim``."""

    def append(self, kind: type[LogEntry], **body: Any) -> None:
        self.entries.append(make_entry(kind, len(self.entries), self.run, **body))
        self.state.apply(self.entries[-1])

    def step(self, draw: Any) -> None:
        kinds = ["run"]
        if self.run:
            kinds += ["claim", "rewind", "done", "end"]
        if self.state.claim is not None:
            kinds += ["commit"] * 4
        if self.state.recorded:
            kinds += ["only", "retire", "pin", "unpin"]
        getattr(self, f"_{draw(st.sampled_from(kinds))}")(draw)
        self._check_names()

    def _check_names(self) -> None:
        """By no two claims may anybody write a store of one name."""
        claim = self.state.claim
        for at in EVERYWHERE:
            if claim is not None and claim.may_write(at):
                name = claim.store_name("a", at)
                assert self.names.setdefault(name, claim.number) == claim.number, name

    def _recorded(self, draw: Any) -> Position:
        at: Position = draw(st.sampled_from(self.state.epochs))
        return at

    def _run(self, draw: Any) -> None:
        self.run = f"run {len(self.entries)}"
        self.append(RunEntry, nodes=["a"], info={"long": "x"})

    def _claim(self, draw: Any) -> None:
        retry = self.state.last_retry + draw(st.integers(1, 2))
        self.append(ClaimEntry, upto=draw(POSITIONS), retry=retry)

    def _commit(self, draw: Any) -> None:
        claim = self.state.claim
        free = [at for at in EVERYWHERE if claim.may_write(at)]
        group = sorted(draw(st.lists(st.sampled_from(free), unique=True))) if free else []
        records = [Record(at, {} if draw(st.booleans()) else None) for at in group]
        retires = draw(st.lists(st.sampled_from(self.state.epochs or [Position(9)]), unique=True))
        upto = draw(st.none() | POSITIONS.filter(lambda at: at >= claim.upto))
        number = claim.number
        self.append(CommitEntry, claim=number, records=records, retires=retires, upto=upto)

    def _rewind(self, draw: Any) -> None:
        self.append(RewindEntry, after=draw(st.none() | POSITIONS))

    def _only(self, draw: Any) -> None:
        self.append(RewindEntry, only=self._recorded(draw))

    def _retire(self, draw: Any) -> None:
        self.append(RetireEntry, epochs=[self._recorded(draw), draw(POSITIONS)])

    def _pin(self, draw: Any) -> None:
        self.append(PinEntry, epoch=self._recorded(draw), label=draw(st.sampled_from("xy")))

    def _unpin(self, draw: Any) -> None:
        label = draw(st.sampled_from([None, "x", "y"]))
        self.append(UnpinEntry, epoch=self._recorded(draw), label=label)

    def _done(self, draw: Any) -> None:
        self.append(DoneEntry, epoch=draw(POSITIONS))

    def _end(self, draw: Any) -> None:
        self.append(EndEntry)


@st.composite
def histories(draw: Any) -> History:
    history = History()
    for _ in range(draw(st.integers(1, 20))):
        history.step(draw)
    return history


def plain_meaning(entries: Iterable[LogEntry]) -> dict[Position, tuple[int, set[str]]]:
    """Recorded epoch -> number of its commit, and its pins: each entry says which come and go."""
    found: dict[Position, tuple[int, set[str]]] = {}
    for entry in entries:
        gone: list[Position] = []
        if isinstance(entry, CommitEntry):
            for record in entry.records:
                if record.stores is not None:
                    _, pins = found.get(record.at, (0, set()))
                    found[record.at] = entry.number, pins
        if isinstance(entry, CommitEntry | RetireEntry):
            retired = entry.epochs if isinstance(entry, RetireEntry) else entry.retires
            gone = [at for at in retired if at in found and not found[at][1]]
        elif isinstance(entry, RewindEntry):
            is_above = [at for at in found if entry.after is None or at > entry.after]
            gone = is_above if entry.only is None else [entry.only]
        elif isinstance(entry, PinEntry):
            found[entry.epoch][1].add(entry.label)
        elif isinstance(entry, UnpinEntry):
            pins = found[entry.epoch][1]
            pins -= {entry.label} if entry.label else set(pins)
        for at in gone:
            found.pop(at, None)
    return found


@settings(max_examples=examples(50))
@given(histories(), st.data())
def test_a_state_says_what_entries_mean_and_reading_on_from_a_kept_one_gives_the_same(
    history: History, data: st.DataObject
) -> None:
    state, expected = history.state, plain_meaning(history.entries)
    assert state.recorded == {at: number for at, (number, _) in expected.items()}
    assert state.epochs == sorted(expected)
    assert state.latest == max(expected, default=None)
    pins = {at: set(labels) for at, labels in state.pins.items()}
    assert pins == {at: labels for at, (_, labels) in expected.items() if labels}
    for at, number in state.recorded.items():
        assert record_in(history.entries[number], at).at == at
    assert state.holder.run == history.run
    start = data.draw(st.integers(1, len(history.entries)))
    kept = State.from_bytes(fold(history.entries[:start]).to_bytes())
    for entry in history.entries[start:]:
        kept.apply(entry)
    assert kept.to_bytes() == state.to_bytes()


def commit_of(epoch: int) -> dict[str, Any]:
    return {"claim": 1, "records": [Record(Position(epoch), {})]}


def first_state() -> State:
    """Epoch 1 is recorded."""
    return fold(
        [
            make_entry(RunEntry, 0, "r", nodes=["a"], info={}),
            make_entry(ClaimEntry, 1, "r", upto=Position(3), retry=2),
            make_entry(CommitEntry, 2, "r", **commit_of(1)),
        ]
    )


@pytest.mark.parametrize(
    ("kind", "number", "run", "body", "told"),
    [
        (EndEntry, 2, "r", {}, "is expected"),
        (EndEntry, 4, "r", {}, "is expected"),
        (EndEntry, 3, "another", {}, "taken over"),
        (ClaimEntry, 3, "r", {"upto": Position(9), "retry": 2}, "retry number 2 was used before"),
        (CommitEntry, 3, "r", {"claim": 0, "records": []}, "claim 0 is over, or never began"),
        (CommitEntry, 3, "r", commit_of(1), "1 follows epoch 1"),
        (CommitEntry, 3, "r", commit_of(4), "4 was never claimed"),
    ],
)
def test_an_entry_that_contradicts_those_before_is_corrupt(
    kind: type[LogEntry], number: int, run: str, body: dict[str, Any], told: str
) -> None:
    state = first_state()
    before = state.to_bytes()
    with pytest.raises(CheckpointCorruptError, match=told):
        state.apply(make_entry(kind, number, run, **body))
    assert state.to_bytes() == before


@settings(max_examples=examples(50))
@given(histories(), st.data())
def test_every_flipped_bit_and_every_cut_of_an_entry_is_found(
    history: History, data: st.DataObject
) -> None:
    entry = entry_to_json(data.draw(st.sampled_from(history.entries)))
    content = encode_entry(entry)
    assert decode_entry(content, entry["number"], "p") == entry
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    cut = content[: data.draw(st.integers(0, len(content) - 1))]
    for damaged in (bytes(flipped), cut, content + b"x", content[1:]):
        with pytest.raises(CheckpointCorruptError, match="Entry .* of the log, p,"):
            decode_entry(damaged, entry["number"], "p")
    with pytest.raises(CheckpointCorruptError, match="p contains entry"):
        decode_entry(content, entry["number"] + 1, "p")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.sampled_from(["$float", "$plain"]), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(JSON)
def test_details_survive_with_nan_and_infinities(value: Any) -> None:
    assert repr(loose_json(strict_json(value))) == repr(value)


def test_what_the_log_claims_and_keeps_no_record_of_is_left_over() -> None:
    state = first_state()
    others = [(Position(5), 0), (Position(2), 7)]
    state.apply(make_entry(ClaimEntry, 3, "r", upto=Position(9), retry=8, strangers=others))

    def left_over() -> list[str]:
        names = ["a.1", "a.2", "a.2.r7", "a.2.r8", "a.5", "a.9", "a.9.r8", "a.10", "b.2"]
        stores = {name: parse_store_name(name) for name in names}
        return [name for name, store in stores.items() if store and state.is_left_over(store)]

    assert left_over() == ["a.2", "a.2.r8", "a.9", "a.9.r8"]
    state.apply(make_entry(RewindEntry, 4, "r", after=None, reason="afresh"))
    assert state.epochs == []
    assert "a.1" not in left_over()  # a rewind deletes nothing
    restored = Record(Position(1), {"a": Store("a.1", "0", 0)})
    state.apply(make_entry(CommitEntry, 5, "r", claim=None, records=[restored]))
    state.apply(make_entry(RetireEntry, 6, "r", epochs=[Position(1)]))
    assert "a.1" in left_over()
    state.apply(make_entry(EndEntry, 7, "r"))
    repair = make_entry(RunEntry, 8, "s", nodes=[], info={}, is_repair=True)
    state.apply(repair)
    kept = state.strangers_among(["a.2", "a.9.r8", "notes"])
    state.apply(make_entry(ClaimEntry, 9, "s", upto=Position(9), retry=9, strangers=kept))
    assert left_over() == ["a.1", "a.2.r8", "a.9"]


def test_an_epoch_that_was_pinned_before_the_entry_that_retires_it_stays() -> None:
    state = first_state()
    epoch = min(state.recorded)
    state.apply(make_entry(PinEntry, 3, "r", epoch=epoch, label="best"))
    state.apply(make_entry(RetireEntry, 4, "r", epochs=[epoch]))
    assert epoch in state.recorded
    state.apply(make_entry(UnpinEntry, 5, "r", epoch=epoch, label="best"))
    state.apply(make_entry(RetireEntry, 6, "r", epochs=[epoch]))
    assert epoch not in state.recorded
