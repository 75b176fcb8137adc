"""Positions order between epochs, and have one textual form."""

from __future__ import annotations

import copy
import pickle
import random
import time

import numpy as np
import pytest

from jobrunner import DefinitionError, Position
from jobrunner.checkpoint.log.epoch_map import EpochMap
from jobrunner.checkpoint.log.state import State, make_entry, parse_entry
from jobrunner.errors import CheckpointCorruptError
from jobrunner.json_output import with_json_positions
from jobrunner.names import format_store_name, parse_store_name
from jobrunner.positions import parse_position, position_from_json, read_position
from jobrunner.run.saver import _Failures

AT = Position(4, 200)


def test_a_position_lies_between_its_whole_epochs_and_the_next() -> None:
    order = [Position(0), Position(0, 9), Position(4), Position(4, 20), AT, Position(5)]
    assert sorted(random.Random(1).sample(order, 6)) == order
    assert {Position(4): "epoch", AT: "position"}[Position(4, 200)] == "position"
    assert (AT.epoch, AT.step) == (4, 200)


def test_a_position_is_no_int_and_users_get_an_int_for_a_whole_epoch() -> None:
    assert Position(4) != 4
    with pytest.raises(TypeError):
        AT + 1  # type: ignore[operator]
    with pytest.raises(TypeError):
        sorted([AT, 5])  # type: ignore[type-var]
    assert (Position(4).public, AT.public) == (4, AT)
    assert type(Position(np.int64(4)).public) is int  # type: ignore[arg-type]


def test_it_is_copied_pickled_and_written() -> None:
    for other in (copy.copy(AT), copy.deepcopy(AT), pickle.loads(pickle.dumps(AT))):
        assert other == AT
    assert f"{AT} {Position(4)} {AT!r} {Position(4)!r}" == "4.s200 4 Position(4, 200) Position(4)"
    assert with_json_positions({AT: [AT, Position(4), (AT, "x")]}) == {
        "4.s200": ["4.s200", 4, ["4.s200", "x"]]
    }
    for position in (AT, Position(4)):
        assert position_from_json(position.to_json()) == position
    for forged in ("4", "4.s0", -1):
        with pytest.raises(ValueError, match="no "):
            position_from_json(forged)


@pytest.mark.parametrize("text", ["4.s0", "04.s1", "4.s", "4.s01", "-1.s1", "4.S2", "4.s2 ", "s2"])
def test_other_texts_are_none(text: str) -> None:
    assert parse_position(text) is None
    assert parse_store_name(f"a.{text}") is None


def test_it_is_read_from_texts_and_pairs() -> None:
    for value in (AT, (4, 200), "4.s200"):
        assert Position.of(value) == AT
    for value in (4, (4, 0), Position(4)):
        assert Position.of(value) == Position(4)
    assert [read_position(it) for it in ("4", (4,), (4, -1), 4.0, True, None)] == [None] * 6
    for name in (format_store_name("a.4", AT), format_store_name("a", AT, 2)):
        found = parse_store_name(name)
        assert found is not None
        assert format_store_name(*found) == name
    assert parse_store_name("a.4.s200.r2") == ("a", AT, 2)
    with pytest.raises(DefinitionError, match="step must be an int >= 0; got -1"):
        Position(4, -1)
    with pytest.raises(DefinitionError, match=r"Expected an epoch .*; got 'x'"):
        Position.of("x")


def test_a_map_of_epochs_and_positions_is_a_sorted_dict() -> None:
    chance = random.Random(0)
    found = EpochMap()
    expected: dict[Position, int] = {}
    for number in range(2000):
        epoch, step = chance.randrange(30), chance.choice([0, 0, 1, 2, 50])
        key = Position(epoch, step)
        if chance.random() < 0.3 and key in expected:
            del found[key], expected[key]
        else:
            found[key] = expected[key] = number
        assert len(found) == len(expected)
        assert not expected or found.last == max(expected)
        if not number % 50:
            assert found.after(AT) == sorted(it for it in expected if it > AT)
    assert list(found.items()) == sorted(expected.items())
    assert list(found.public_in_order()) == [key.public for key in sorted(expected)]
    again = EpochMap(found.runs())
    assert again == found
    assert again.has_keys_of(found)
    del again[max(expected)]
    assert again != found
    assert not again.has_keys_of(found)


def test_a_history_of_the_same_steps_takes_no_more_space_than_one_epoch() -> None:
    found = EpochMap()
    for number in range(10_000):
        found[Position(*divmod(number, 10))] = number
    assert len(found.runs()) == 10


def test_many_positions_of_different_steps_are_listed_fast() -> None:
    rows = [[i % 100, 1, 1, 0, 0, i + 1] for i in range(100_000)]
    started = time.process_time()
    found = EpochMap(rows)
    assert (found.last, list(found)[-1]) == (Position(99, 100_000), Position(99, 100_000))
    for step in range(100_000, 99_000, -100):  # each rewind of a log asks for both
        assert found.after(Position(99, step - 100)) == [found.last]
        del found[found.last]
    assert time.process_time() - started < 2


def test_the_log_says_which_version_reads_it_and_refuses_forged_positions() -> None:
    state = State()
    state.apply(make_entry(0, "run", "r", {"nodes": ["a"], "info": {}}))
    begin = make_entry(1, "begin", "r", {"epoch": AT, "retry": 0})
    assert (begin.format, make_entry(1, "begin", "r", {"epoch": 4, "retry": 0}).format) == (2, 1)
    state.apply(begin)
    entry = make_entry(2, "state", "r", {"state": state.to_json()})
    assert entry.format == 2
    assert State.from_json(entry.state).claims == {AT: 1}  # type: ignore[attr-defined]
    head = {
        "format": 2,
        "number": 1,
        "kind": "begin",
        "run": "r",
        "id": "x",
        "time": "t",
        "retry": 0,
    }
    for forged in ("4.s0", "04.s1", "4", "", "9" * 30 + ".s1", [4, 2], "4.s200\n"):
        with pytest.raises(CheckpointCorruptError, match=r"a\.json.*(\$\.epoch|no position)"):
            parse_entry({**head, "epoch": forged}, "a.json")
    runs = {**state.to_json(), "claims": [[4, 1, 1, 0, 0, 0]]}
    with pytest.raises(CheckpointCorruptError, match="`claims`"):
        make_entry(2, "state", "r", {"state": runs})


def test_saves_that_fail_for_the_same_reason_are_counted_wherever_they_are() -> None:
    warnings: list[str] = []
    failures = _Failures(warnings.append)
    for epoch in (Position(3), Position(3, 1), Position(3, 2), Position(4)):
        failures.add(epoch, OSError(f"the save of epoch {epoch} could not be begun"))
    failures.close()
    assert len(warnings) == 2
    assert warnings[1].startswith("3 epochs, 3.s1 to 4, were not saved either")
