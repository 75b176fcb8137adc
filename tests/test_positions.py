"""Positions order between epochs, and have one textual form."""

import copy
import pickle
import random

import numpy as np
import pytest

from jobrunner import DefinitionError, Position
from jobrunner.json_output import to_json
from jobrunner.names import parse_store_name
from jobrunner.positions import parse_position, position_from_json, read_position

AT = Position(4, 200)


def test_a_position_lies_between_its_whole_epochs_and_the_next():
    order = [Position(0), Position(0, 9), Position(4), Position(4, 20), AT, Position(5)]
    assert sorted(random.Random(1).sample(order, 6)) == order
    assert hash(AT) == hash(Position(4, 200))


def test_a_position_is_no_int_and_users_get_an_int_for_a_whole_epoch():
    assert Position(4) != 4
    with pytest.raises(TypeError):
        sorted([AT, 5])
    assert (Position(4).public, AT.public) == (4, AT)
    assert type(Position(np.int64(4)).public) is int


def test_it_is_copied_pickled_and_written():
    for other in (copy.deepcopy(AT), pickle.loads(pickle.dumps(AT))):
        assert other == AT
    assert f"{AT} {Position(4)} {AT!r} {Position(4)!r}" == "4.s200 4 Position(4, 200) Position(4)"
    assert to_json({AT: [AT, Position(4), (AT, "x")]}) == {"4.s200": ["4.s200", 4, ["4.s200", "x"]]}
    for position in (AT, Position(4)):
        assert position_from_json(position.to_json()) == position
    for forged in ("4", "4.s0", -1):
        with pytest.raises(ValueError, match="no "):
            position_from_json(forged)


@pytest.mark.parametrize("text", ["4.s0", "04.s1", "4.s", "4.s01", "-1.s1", "4.S2", "4.s2 ", "s2"])
def test_other_texts_are_none(text):
    assert parse_position(text) is None
    assert parse_store_name(f"a.{text}") is None


def test_it_is_read_from_texts_and_pairs():
    for value in (AT, (4, 200), "4.s200"):
        assert Position.of(value) == AT
    for value in (4, (4, 0), Position(4)):
        assert Position.of(value) == Position(4)
    assert [read_position(value) for value in ("4", (4,), (4, -1), 4.0, True, None)] == [None] * 6
    with pytest.raises(DefinitionError, match=r"Expected an epoch .*; got 'x'"):
        Position.of("x")
