"""The log's meaning: any history, read from anywhere, gives one state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from jobrunner import CheckpointCorruptError
from jobrunner.checkpoint.log.entries import CommitEntry, LogEntry, StateEntry
from jobrunner.checkpoint.log.epoch_map import EpochMap
from jobrunner.checkpoint.log.handler import decode_entry, encode_entry
from jobrunner.checkpoint.log.mending import mend_bit
from jobrunner.checkpoint.log.state import (
    STATE_INTERVAL,
    Claim,
    State,
    entry_to_json,
    make_entry,
    parse_entry,
)
from jobrunner.checkpoint.log.writer import loose_json, strict_json
from jobrunner.positions import Position

EPOCHS = st.integers(0, 12)
COMMIT = {"run_number": 0, "stores": {}, "details": {}}


POSITIONS = st.builds(Position, EPOCHS, st.integers(0, 3))


@given(st.lists(st.tuples(POSITIONS, st.integers(-1, 5))))
def test_an_epoch_map_is_a_sorted_dict(changes: list[tuple[Position, int]]) -> None:
    epochs, model = EpochMap(), {}
    for key, value in changes:
        if value < 0:
            assert epochs.pop(key, None) == model.pop(key, None)
        else:
            epochs[key] = model[key] = value
        assert dict(epochs) == model
        assert list(epochs) == sorted(model)
        assert len(epochs) == len(model)
        assert not model or epochs.last == max(model)
    assert dict(EpochMap(epochs.runs())) == model
    assert dict(epochs.only(list(model)[::2])) == {key: model[key] for key in list(model)[::2]}
    assert epochs.after(None) == sorted(model)
    for before in (Position(3), Position(3, 2), Position(99)):
        assert epochs.after(before) == [key for key in sorted(model) if key > before]
    keys = epochs.public_in_order()
    public = [key.public for key in sorted(model)]
    for part in (
        slice(None),
        slice(2, None),
        slice(None, -2),
        slice(-3, None),
        slice(None, None, 2),
    ):
        assert list(keys[part]) == public[part]
    assert [keys[i] for i in range(-len(model), len(model))] == public * 2


@given(st.dictionaries(POSITIONS, st.integers(0, 2)), st.data())
def test_epoch_maps_are_equal_however_they_are_divided(
    items: dict[Position, int], data: st.DataObject
) -> None:
    one, two = (EpochMap(), EpochMap())
    for epochs in (one, two):
        for key in data.draw(st.permutations(list(items))):
            epochs[key] = items[key]
    assert one == two == one.copy()
    if items:
        key = data.draw(st.sampled_from(list(items)))
        two[key] += 1
        assert one != two
        assert one.has_keys_of(two)
        del two[key]
        assert not one.has_keys_of(two)
        two[Position(20, 1)] = 0
        assert not one.has_keys_of(two)


def test_endless_epoch_maps_are_compared_at_once() -> None:
    count = 10**15
    whole = EpochMap([[0, 1, count, 1, 0]])
    assert whole == EpochMap([[0, 1, 5, 1, 0], [5, 7, 1, 1, 9], [6, 1, count - 6, 1, 0]])
    assert whole != EpochMap([[0, 1, 5, 1, 0], [5, 1, count - 5, 1, 1]])
    assert whole != EpochMap([[0, 2, count, 1, 0]])


@given(st.integers(1, 7), st.integers(1, 5), st.integers(3, 300))
def test_evenly_growing_epochs_take_the_space_of_one(step: int, by: int, count: int) -> None:
    epochs = EpochMap()
    for i in range(count):
        epochs[Position(i * step)] = 10 + i * by
    assert epochs.runs() == [(0, step, count, 10, by)]


def test_a_state_of_many_epochs_is_as_small_as_one_of_few() -> None:
    state = State()
    state.apply(make_entry(0, "run", "r", {"nodes": [], "info": {}}))
    numbers = {}
    for epoch in range(1000):
        for kind in ("begin", "commit"):
            if (state.number + 1) % STATE_INTERVAL == 0:
                body = {"state": state.to_json()}
                state.apply(make_entry(state.number + 1, "state", "r", body))
            claim = {"epoch": epoch, "retry": 0}
            body = {**claim, **COMMIT} if kind == "commit" else claim
            state.apply(make_entry(state.number + 1, kind, "r", body))
        numbers[Position(epoch)] = state.number
    assert {epoch: state.commit_number(epoch) for epoch in state.recorded} == numbers
    found = state.to_json()
    assert [len(found[name]) for name in ("recorded", "retries", "claims", "chores")] == [
        1,
        1,
        1,
        0,
    ]


def test_an_epoch_map_of_a_hundred_thousand_epochs_is_read_from_both_ends_at_once() -> None:
    keys = EpochMap([[0, 1, 100_000, 2, 2]]).public_in_order()
    assert (keys[-1], len(keys), list(keys[99_998:])) == (99_999, 100_000, [99_998, 99_999])


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
        self.claims: dict[Position, int] = {}
        self.open: set[Claim] = set()
        self.given_up: set[Claim] = set()
        self.done: Position | None = None
        self.pins: dict[Position, list[str]] = {}

    def append(self, kind: str, **body: Any) -> None:
        self.entries.append(make_entry(len(self.entries), kind, self.run, body))

    def step(self, draw: Any) -> None:
        choices = ["run", "begin", "rewind", "done", "end", "state", "settle"]
        choices += ["commit"] * 3 * bool(self.open) + ["only", "retire", "pin", "unpin"] * bool(
            self.recorded
        )
        kind = draw(st.sampled_from(choices if self.run else ["run"]))
        getattr(self, f"_{kind}")(draw)

    def _run(self, draw: Any) -> None:
        self.run = f"run {len(self.entries)}"
        self.given_up |= self.open
        self.open = set()
        self.append("run", nodes=["a"], info={"long": "x"}, process={})

    def _begin(self, draw: Any) -> None:
        epoch = draw(POSITIONS)
        retry = self.claims.get(epoch, 0) + draw(st.integers(0, 1))
        self.claims[epoch] = retry + 1
        self.open.add(Claim(epoch, retry))
        self.append("begin", epoch=epoch, retry=retry)

    def _commit(self, draw: Any) -> None:
        claim = draw(st.sampled_from(sorted(self.open)))
        self.open.discard(claim)
        self._drop(claim.epoch)
        self.recorded[claim.epoch] = claim.retry
        self.done = None
        self.append("commit", epoch=claim.epoch, retry=claim.retry, **COMMIT)

    def _drop(self, epoch: Position) -> None:
        if epoch in self.recorded:
            self.given_up.add(Claim(epoch, self.recorded.pop(epoch)))
            self.done = None if self.done == epoch else self.done
            self.pins.pop(epoch, None)

    def _rewind(self, draw: Any) -> None:
        after = draw(st.none() | POSITIONS)
        for epoch in [e for e in self.recorded if after is None or e > after]:
            self._drop(epoch)
        self.append("rewind", after=after)

    def _only(self, draw: Any) -> None:
        epoch = draw(st.sampled_from(sorted(self.recorded)))
        self._drop(epoch)
        self.append("rewind", only=epoch)

    def _retire(self, draw: Any) -> None:
        epochs = draw(st.lists(st.sampled_from(sorted(self.recorded)), unique=True))
        for epoch in epochs:
            if epoch not in self.pins:
                self._drop(epoch)
        self.append("retire", epochs=epochs)

    def _pin(self, draw: Any) -> None:
        epoch, label = draw(st.sampled_from(sorted(self.recorded))), draw(st.sampled_from("xy"))
        labels = self.pins.setdefault(epoch, [])
        self.pins[epoch] = [one for one in labels if one != label] + [label]
        self.append("pin", epoch=epoch, label=label)

    def _unpin(self, draw: Any) -> None:
        epoch = draw(st.sampled_from(sorted(self.recorded)))
        label = draw(st.sampled_from([None, "x", "y"]))
        left = [one for one in self.pins.pop(epoch, []) if label not in (None, one)]
        if left:
            self.pins[epoch] = left
        self.append("unpin", epoch=epoch, label=label)

    def _done(self, draw: Any) -> None:
        self.done = draw(EPOCHS.map(Position))
        self.append("done", epoch=self.done)

    def _end(self, draw: Any) -> None:
        self.append("end")

    def _settle(self, draw: Any) -> None:
        if self.given_up:
            some = draw(st.lists(st.sampled_from(sorted(self.given_up)), unique=True))
            self.given_up -= set(some)
            self.append("end", settled=[list(claim) for claim in some])

    def _state(self, draw: Any) -> None:
        self.append("state", state=fold(self.entries).to_json())


@st.composite
def histories(draw: Any) -> History:
    history = History()
    for _ in range(draw(st.integers(1, 25))):
        history.step(draw)
    return history


@given(histories())
def test_a_state_matches_a_plain_model(history: History) -> None:
    state = fold(history.entries)
    assert {e: state.retries[e] for e in state.recorded} == history.recorded
    assert dict(state.claims) == history.claims
    assert set(state.chores) == history.given_up | history.open
    assert state.done == history.done
    assert {epoch: list(labels) for epoch, labels in state.pins.items()} == history.pins
    assert state.latest == max(history.recorded, default=None)
    for epoch in state.recorded:
        number = state.commit_number(epoch)
        assert isinstance(history.entries[number], CommitEntry)
        assert history.entries[number].epoch == epoch
    assert state.run is not None
    assert state.run.run == history.run


@given(histories(), st.data())
def test_reading_from_a_full_state_gives_what_reading_everything_gives(
    history: History, data: st.DataObject
) -> None:
    whole = fold(history.entries)
    at = data.draw(st.integers(1, len(history.entries)))
    before = fold(history.entries[:at])
    # A state entry takes a number of its own, so what follows is renumbered.
    after = [replace(entry, number=entry.number + 1) for entry in history.entries[at:]]
    start = make_entry(at, "state", history.run, {"state": before.to_json()})
    found = fold([start, *after])
    assert found.number == whole.number + 1
    ours, theirs = found.to_json(), whole.to_json()
    for part in ("claims", "retries", "is_ended", "done", "pins"):
        assert ours[part] == theirs[part]
    assert list(found.recorded) == list(whole.recorded)
    assert set(found.chores) == set(whole.chores)


@given(histories())
def test_a_state_survives_json_and_after_does_not_change_it(history: History) -> None:
    state = fold(history.entries[:-1])
    before = state.to_json()
    after = state.after(history.entries[-1])
    assert state.to_json() == before
    assert after.to_json() == fold(history.entries).to_json()
    number = state.number + 1
    entry = entry_to_json(make_entry(number, "state", "r", {"state": before}))
    found = parse_entry(decode_entry(encode_entry(entry), number, "p"), "p")
    assert isinstance(found, StateEntry)
    assert State.from_json(found.state).to_json() == before


@given(histories(), st.data())
def test_an_entry_out_of_place_is_corrupt(history: History, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(history.entries) - 1))
    state = fold(history.entries[:at])
    off = data.draw(st.sampled_from([-1, 1, 2]))
    wrong = replace(history.entries[at], number=at + off)
    if wrong.kind != "state" or at:
        with pytest.raises(CheckpointCorruptError, match="is expected"):
            state.apply(wrong)


BODIES: dict[str, Any] = {
    "begin": {"epoch": 0, "retry": 99},
    "commit": {"epoch": 0, "retry": 99, **COMMIT},
    "rewind": {"only": 0},
    "retire": {"epochs": [0]},
    "done": {"epoch": 0},
    "end": {},
}


@given(histories(), st.sampled_from(list(BODIES)))
def test_an_entry_of_a_run_that_was_taken_over_is_corrupt(history: History, kind: str) -> None:
    state = fold(history.entries)
    late = make_entry(state.number + 1, kind, "another", BODIES[kind])
    with pytest.raises(CheckpointCorruptError, match="taken over"):
        state.apply(late)


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


@given(histories(), st.data())
def test_a_flipped_bit_of_an_entry_is_mended_and_nothing_else_is(
    history: History, data: st.DataObject
) -> None:
    content = encode_entry(entry_to_json(data.draw(st.sampled_from(history.entries))))
    bits = st.integers(0, 8 * len(content) - 1)
    one, other = data.draw(st.lists(bits, min_size=2, max_size=2, unique=True))
    damaged = bytearray(content)
    damaged[one // 8] ^= 1 << one % 8
    assert mend_bit(bytes(damaged)) == content
    damaged[other // 8] ^= 1 << other % 8
    assert mend_bit(bytes(damaged)) is None
    assert mend_bit(content[:-1]) is None
    assert mend_bit(b"") is None


@given(histories(), st.data())
def test_a_byte_that_json_escapes_shows_where_the_flipped_bit_is(
    history: History, data: st.DataObject
) -> None:
    entry = entry_to_json(data.draw(st.sampled_from(history.entries)))
    content = encode_entry({**entry, "padding": "x" * (20 << 10)})  # every bit would take too long
    start, stop = content.index(b'"entry":') + 8, len(content) - 2
    at = data.draw(st.integers(start, stop - 1))
    damaged = bytearray(content)
    damaged[at] ^= 128
    with count_hashes() as count:
        assert mend_bit(bytes(damaged)) == content
    assert count() <= 10
    # As a block that was never written is.
    damaged[at : at + 2] = bytes(2)
    with count_hashes() as count:
        assert mend_bit(bytes(damaged)) is None
    assert count() <= 2


@contextmanager
def count_hashes() -> Iterator[Callable[[], int]]:
    """How many digests were made within, in this thread."""
    found = 0

    def note(frame: object, event: str, arg: Any) -> None:
        nonlocal found
        found += event == "c_call" and arg.__name__ in ("digest", "hexdigest")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield lambda: found
    finally:
        sys.setprofile(before)


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
