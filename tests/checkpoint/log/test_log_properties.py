"""The log's meaning: any history, read from anywhere, gives one state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner import CheckpointCorruptError
from jobrunner.checkpoint.log.details import loose_json, strict_json
from jobrunner.checkpoint.log.entries import (
    BeginEntry,
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

POSITIONS = st.builds(Position, st.integers(0, 6), st.integers(0, 2))


def fold(entries: Iterable[LogEntry]) -> State:
    """The state that `entries` give."""
    state = State()
    for entry in entries:
        state.apply(entry)
    return state


class History:
    """Draws entries that a run may append, and keeps a plain model of what they mean."""

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []
        self.run = ""
        self.recorded: dict[Position, int] = {}
        self.pins: dict[Position, list[str]] = {}
        self.aside: set[tuple[Position, int]] = set()
        self.names: dict[str, int] = {}
        """Name of a store that an attempt may have written -> number of its ``begin``."""
        self.label = 0
        self.upto: Position | None = None
        self.open: Position | None = None
        """The highest position that the open attempt may write; None: there is none."""
        self.last: Position | None = None
        self.done: Position | None = None

    def append(self, kind: type[LogEntry], **body: Any) -> None:
        self.entries.append(make_entry(kind, len(self.entries), self.run, **body))

    def step(self, draw: Any) -> None:
        choices = ["run", "begin", "rewind", "done", "end"]
        if self.open is not None:
            choices += ["commit"] * 4
        if self.recorded:
            choices += ["only", "retire", "pin", "unpin"]
        kind = draw(st.sampled_from(choices if self.run else ["run"]))
        getattr(self, f"_{kind}")(draw)

    def _run(self, draw: Any) -> None:
        self.run = f"run {len(self.entries)}"
        self.open = None
        self.append(RunEntry, nodes=["a"], info={"long": "x"})

    def _begin(self, draw: Any) -> None:
        self.label += draw(st.integers(1, 2))
        self.open = draw(POSITIONS)
        self.last = None
        self.append(BeginEntry, upto=self.open, label=self.label)
        self._claim(self.open)

    def _claim(self, upto: Position) -> None:
        attempt = fold(self.entries).attempt
        assert attempt is not None
        for epoch in range(8):
            for step in range(3):
                at = Position(epoch, step)
                if at <= upto and (self.last is None or at > self.last):
                    name = attempt.store_name("a", at)
                    assert self.names.setdefault(name, attempt.number) == attempt.number, name
        self.upto = upto if self.upto is None else max(upto, self.upto)

    def _commit(self, draw: Any) -> None:
        assert self.open is not None
        free = [Position(epoch, step) for epoch in range(8) for step in range(3)]
        free = [at for at in free if at <= self.open and (self.last is None or at > self.last)]
        group = sorted(draw(st.lists(st.sampled_from(free), unique=True))) if free else []
        records = [Record(at, {} if draw(st.booleans()) else None) for at in group]
        retires = []
        if self.recorded:
            retires = draw(st.lists(st.sampled_from(sorted(self.recorded)), unique=True))
        upto = draw(st.none() | POSITIONS.filter(lambda at: at >= self.open))
        state = fold(self.entries)
        assert state.attempt is not None
        self.append(
            CommitEntry, begin=state.attempt.number, records=records, retires=retires, upto=upto
        )
        for record in records:
            if record.stores is not None:
                self._set_aside(record.at)
                self.recorded[record.at] = self.entries[-1].number
                self.aside.discard((record.at, 0))
                self.done = None
        self.last = group[-1] if group else self.last
        self._give_up(retires)
        if upto is not None:
            self.open = upto
            self._claim(upto)

    def _drop(self, at: Position) -> None:
        if self.recorded.pop(at, None) is not None:
            self.done = None if self.done == at else self.done
            self.pins.pop(at, None)

    def _give_up(self, epochs: Iterable[Position]) -> None:
        for at in epochs:
            if at in self.recorded and at not in self.pins:
                self._drop(at)

    def _set_aside(self, at: Position) -> None:
        if at in self.recorded:
            self.aside.add((at, 0))
            self._drop(at)

    def _rewind(self, draw: Any) -> None:
        after = draw(st.none() | POSITIONS)
        self.open = None
        for at in [at for at in self.recorded if after is None or at > after]:
            self._set_aside(at)
        self.append(RewindEntry, after=after)

    def _only(self, draw: Any) -> None:
        at = draw(st.sampled_from(sorted(self.recorded)))
        self.open = None
        self._set_aside(at)
        self.append(RewindEntry, only=at)

    def _retire(self, draw: Any) -> None:
        epochs = draw(st.lists(st.sampled_from(sorted(self.recorded)), unique=True))
        self._give_up(epochs)
        self.append(RetireEntry, epochs=epochs)

    def _pin(self, draw: Any) -> None:
        at, label = draw(st.sampled_from(sorted(self.recorded))), draw(st.sampled_from("xy"))
        labels = self.pins.setdefault(at, [])
        self.pins[at] = [other for other in labels if other != label] + [label]
        self.append(PinEntry, epoch=at, label=label)

    def _unpin(self, draw: Any) -> None:
        at = draw(st.sampled_from(sorted(self.recorded)))
        label = draw(st.sampled_from([None, "x", "y"]))
        left = [other for other in self.pins.pop(at, []) if label not in (None, other)]
        if left:
            self.pins[at] = left
        self.append(UnpinEntry, epoch=at, label=label)

    def _done(self, draw: Any) -> None:
        self.done = draw(POSITIONS)
        self.append(DoneEntry, epoch=self.done)

    def _end(self, draw: Any) -> None:
        self.open = None
        self.append(EndEntry)


@st.composite
def histories(draw: Any) -> History:
    history = History()
    for _ in range(draw(st.integers(1, 20))):
        history.step(draw)
    return history


@given(histories())
def test_a_state_matches_a_plain_model(history: History) -> None:
    state = fold(history.entries)
    assert state.recorded == history.recorded
    assert state.epochs == sorted(history.recorded)
    assert state.latest == max(history.recorded, default=None)
    assert {at: list(labels) for at, labels in state.pins.items()} == history.pins
    assert state.aside == history.aside
    assert state.done == history.done
    assert (state.upto, state.label) == (history.upto, history.label)
    for at, number in state.recorded.items():
        assert record_in(history.entries[number], at).at == at
    assert state.holder is not None
    assert state.holder.run == history.run


@given(histories(), st.data())
def test_reading_from_a_kept_state_gives_what_reading_everything_gives(
    history: History, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(history.entries)))
    state = State.from_bytes(fold(history.entries[:start]).to_bytes()) if start else State()
    for entry in history.entries[start:]:
        state.apply(entry)
    assert state.to_bytes() == fold(history.entries).to_bytes()


@given(histories(), st.data())
def test_an_entry_out_of_place_is_corrupt(history: History, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(history.entries) - 1))
    state = fold(history.entries[:number])
    before = state.to_bytes()
    off = data.draw(st.sampled_from([-1, 1, 2]))
    if number + off >= 0:
        wrong = msgspec.structs.replace(history.entries[number], number=number + off)
        with pytest.raises(CheckpointCorruptError, match="is expected"):
            state.apply(wrong)
        assert state.to_bytes() == before


BODIES: dict[type[LogEntry], dict[str, Any]] = {
    BeginEntry: {"upto": Position(0), "label": 99},
    CommitEntry: {"begin": None, "records": []},
    RewindEntry: {"only": Position(0)},
    RetireEntry: {"epochs": [Position(0)]},
    DoneEntry: {"epoch": Position(0)},
    EndEntry: {},
}


@given(histories(), st.sampled_from(list(BODIES)))
def test_an_entry_of_a_run_that_was_taken_over_is_corrupt(
    history: History, kind: type[LogEntry]
) -> None:
    state = fold(history.entries)
    late = make_entry(kind, state.number + 1, "another", **BODIES[kind])
    with pytest.raises(CheckpointCorruptError, match="taken over"):
        state.apply(late)


FIRST: list[tuple[type[LogEntry], dict[str, Any]]] = [
    (RunEntry, {"nodes": ["a"], "info": {}}),
    (BeginEntry, {"upto": Position(3), "label": 2}),
    (CommitEntry, {"begin": 1, "records": [Record(Position(1), {})]}),
]


@pytest.mark.parametrize(
    ("kind", "body", "told"),
    [
        (BeginEntry, {"upto": Position(9), "label": 2}, "label 2 was used before"),
        (CommitEntry, {"begin": 0, "records": []}, "attempt 0 is over, or never began"),
        (CommitEntry, {"begin": 1, "records": [Record(Position(1), {})]}, "1 follows epoch 1"),
        (CommitEntry, {"begin": 1, "records": [Record(Position(4), {})]}, "4 was never claimed"),
    ],
)
def test_an_entry_that_contradicts_those_before_is_corrupt(
    kind: type[LogEntry], body: dict[str, Any], told: str
) -> None:
    state = fold(make_entry(of, i, "r", **fields) for i, (of, fields) in enumerate(FIRST))
    before = state.to_bytes()
    with pytest.raises(CheckpointCorruptError, match=f"contradicts .*{told}"):
        state.apply(make_entry(kind, 3, "r", **body))
    assert state.to_bytes() == before


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (RetireEntry, {"epochs": [Position(2)]}),
        (RewindEntry, {"only": Position(2)}),
        (PinEntry, {"epoch": Position(2), "label": "x"}),
        (UnpinEntry, {"epoch": Position(2), "label": None}),
    ],
)
def test_what_is_not_recorded_can_be_given_up(kind: type[LogEntry], body: dict[str, Any]) -> None:
    state = fold(make_entry(of, i, "r", **fields) for i, (of, fields) in enumerate(FIRST))
    state.apply(make_entry(kind, 3, "r", **body))
    assert (state.epochs, state.pins) == ([Position(1)], {})


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
    state = fold(make_entry(of, i, "r", **fields) for i, (of, fields) in enumerate(FIRST))
    others = [(Position(5), 0), (Position(2), 7)]
    state.apply(make_entry(BeginEntry, 3, "r", upto=Position(9), label=8, strangers=others))

    def left_over() -> list[str]:
        names = ["a.1", "a.2", "a.2.r7", "a.2.r8", "a.5", "a.9", "a.9.r8", "a.10", "b.2"]
        stores = [parse_store_name(name) for name in names]
        assert None not in stores
        return [str(name) for name, store in zip(names, stores, strict=True) if is_left(store)]

    def is_left(store: Any) -> bool:
        return state.is_left_over(store)

    assert left_over() == ["a.2", "a.2.r8", "a.9", "a.9.r8"]
    state.apply(make_entry(RewindEntry, 4, "r", after=None, reason="afresh"))
    assert state.epochs == []
    assert "a.1" not in left_over()  # a rewind deletes nothing
    restored = Record(Position(1), {"a": Store("a.1", "0", 0)})
    state.apply(make_entry(CommitEntry, 5, "r", begin=None, records=[restored]))
    state.apply(make_entry(RetireEntry, 6, "r", epochs=[Position(1)]))
    assert "a.1" in left_over()
    state.apply(make_entry(EndEntry, 7, "r"))
    repair = make_entry(RunEntry, 8, "s", nodes=[], info={}, is_repair=True)
    state.apply(repair)
    kept = state.strangers_among(["a.2", "a.9.r8", "notes"])
    state.apply(make_entry(BeginEntry, 9, "s", upto=Position(9), label=9, strangers=kept))
    assert left_over() == ["a.1", "a.2.r8", "a.9"]


def test_an_epoch_that_was_pinned_before_the_entry_that_retires_it_stays() -> None:
    state = fold(make_entry(of, i, "r", **fields) for i, (of, fields) in enumerate(FIRST))
    epoch = min(state.recorded)
    state.apply(make_entry(PinEntry, 3, "r", epoch=epoch, label="best"))
    state.apply(make_entry(RetireEntry, 4, "r", epochs=[epoch]))
    assert epoch in state.recorded
    state.apply(make_entry(UnpinEntry, 5, "r", epoch=epoch, label="best"))
    state.apply(make_entry(RetireEntry, 6, "r", epochs=[epoch]))
    assert epoch not in state.recorded
