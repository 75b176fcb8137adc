"""The log's meaning: any history, read from anywhere, gives one state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
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

SETTINGS = settings(max_examples=examples(50), phases=[Phase.generate])
"""To find a shorter history that fails would take minutes."""

EVERYWHERE = [Position(epoch, step) for epoch in range(2) for step in range(2)]
AT = st.sampled_from(EVERYWHERE)


def step(kind: type[LogEntry], **fields: Any) -> Any:
    return st.tuples(st.just(kind), st.fixed_dictionaries(fields))


COMMIT = {"records": st.sets(AT).map(sorted), "retires": st.lists(AT, max_size=2), "upto": AT}
STEPS = st.one_of(
    *[step(CommitEntry, **COMMIT) for _ in range(6)],
    *[step(PinEntry, epoch=AT, label=st.sampled_from("xy")) for _ in range(3)],
    step(UnpinEntry, epoch=AT, label=st.sampled_from([None, "x", "y"])),
    step(RetireEntry, epochs=st.lists(AT, max_size=2)),
    step(RewindEntry, after=AT),
    step(RewindEntry, only=AT),
    step(DoneEntry, epoch=AT),
    step(EndEntry),
    step(RunEntry, nodes=st.just(["a"]), info=st.just({})),
)


def fold(entries: Iterable[LogEntry]) -> State:
    """The state that `entries` give."""
    state = State()
    for entry in entries:
        state.apply(entry)
    return state


@st.composite
def histories(draw: Any) -> list[LogEntry]:
    """Entries that runs may append, one after the other."""
    entries: list[LogEntry] = []
    state = State()

    def append(kind: type[LogEntry], run: str, **body: Any) -> None:
        entries.append(make_entry(kind, len(entries), run, **body))
        state.apply(entries[-1])

    append(RunEntry, "run 0", nodes=["a"], info={})
    for kind, body in draw(st.lists(STEPS, min_size=10, max_size=20)):
        run = f"run {len(entries)}" if kind is RunEntry else state.holder.run
        if kind is CommitEntry:
            if state.claim is None:
                append(ClaimEntry, run, upto=body["upto"], retry=state.last_retry + 1)
            claim = state.claim
            free = filter(claim.may_write, body["records"])
            body["records"] = [Record(at, draw(st.sampled_from([{}, {}, None]))) for at in free]
            body["upto"] = max(body["upto"], claim.upto)
            body["claim"] = claim.number
        append(kind, run, **body)
    return entries


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
        elif isinstance(entry, PinEntry) and entry.epoch in found:
            found[entry.epoch][1].add(entry.label)
        elif isinstance(entry, UnpinEntry) and entry.epoch in found:
            pins = found[entry.epoch][1]
            pins -= {entry.label} if entry.label else set(pins)
        for at in gone:
            found.pop(at, None)
    return found


@SETTINGS
@given(histories(), st.data())
def test_a_state_says_what_entries_mean_and_reading_on_from_a_kept_one_gives_the_same(
    entries: list[LogEntry], data: st.DataObject
) -> None:
    state, expected = fold(entries), plain_meaning(entries)
    assert state.recorded == {at: number for at, (number, _) in expected.items()}
    assert state.epochs == sorted(expected)
    assert state.latest == max(expected, default=None)
    pins = {at: set(labels) for at, labels in state.pins.items()}
    assert pins == {at: labels for at, (_, labels) in expected.items() if labels}
    for at, number in state.recorded.items():
        assert record_in(entries[number], at).at == at
    start = data.draw(st.integers(1, len(entries)))
    kept = State.from_bytes(fold(entries[:start]).to_bytes())
    for entry in entries[start:]:
        kept.apply(entry)
    assert kept.to_bytes() == state.to_bytes()


@SETTINGS
@given(histories())
def test_no_two_claims_may_write_a_store_of_one_name(entries: list[LogEntry]) -> None:
    state = State()
    writers: dict[str, int] = {}
    for entry in entries:
        state.apply(entry)
        claim = state.claim
        for at in EVERYWHERE:
            if claim is not None and claim.may_write(at):
                name = claim.store_name("a", at)
                assert writers.setdefault(name, claim.number) == claim.number, name


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


@SETTINGS
@given(histories(), st.data())
def test_every_flipped_bit_and_every_cut_of_an_entry_is_found(
    entries: list[LogEntry], data: st.DataObject
) -> None:
    entry = entry_to_json(data.draw(st.sampled_from(entries)))
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
