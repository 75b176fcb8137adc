"""Everyday types: what is refused of a forged tree, and how pickled parts of them stay shared."""

from __future__ import annotations

import collections
import dataclasses
import enum
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jobrunner import CheckpointError, DefinitionError
from jobrunner.checkpoint import Decoder, SavedObject, encode_blobs
from jobrunner.checkpoint.encoding import InvalidTreeError
from jobrunner.run.replay.compare import compare_values
from tests.checkpoint.encoding.kinds_of_values import VALUES, Frozen, Plain, State, describe


def bits(cls: type, change: Callable[[Any], object]) -> Any:
    value = cls(1)
    state = value.state
    change(state)
    tree = encode_blobs("n", {"x": [value, state]})["x"].tree
    (known, changed), parts = tree, encode_blobs("n", {"x": [value, state]})["x"].parts
    return {**known, "state": changed}, parts


def decode(tree: Any, parts: Any = ()) -> Any:
    return Decoder(lambda i: parts[i].data.copy(), where="the blob").decode(tree)


FORGED = {
    "void of numbers": {"$": "np.void", "dtype": "<f8", "hex": "00" * 8, "record": False},
    "void of too few bytes": {"$": "np.void", "dtype": "|V9", "hex": "00", "record": False},
    "void of no bytes": {"$": "np.void", "dtype": "|V1", "hex": "zz", "record": True},
    "unknown type": {"$": "type", "name": "os.system"},
    "unknown factory": {"$": "defaultdict", "factory": "eval", "items": {}},
    "unknown constant": {"$": "constant", "name": "x"},
    "unhashable member": {"$": "set", "items": {"$": "tuple", "items": [[1]]}},
    "members that are no tuple": {"$": "set", "items": "abc"},
    "negative length": {"$": "deque", "items": {"$": "tuple", "items": []}, "maxlen": -1},
    "date": {"$": "date", "iso": "2020-13-01"},
    "zero": {"$": "fraction", "ratio": {"$": "tuple", "items": [1, 0]}},
    "path": {"$": "path", "cls": "Popen", "text": "x"},
    "random state": {"$": "random", "state": {"$": "tuple", "items": [3, 1, None]}},
    "mask": {"$": "np.MaskedArray", "data": [1], "mask": None, "fill": None, "hard": False},
    "typecode": {"$": "array.array", "typecode": "Z", "items": ""},
    "view of a list": {"$": "memoryview", "array": [1], "readonly": True},
    "pool": {
        "$": "np.SeedSequence",
        "entropy": 1,
        "spawn_key": {"$": "tuple", "items": []},
        "pool_size": 1 << 40,
        "spawned": 0,
    },
    "unknown bits": {
        "$": "np.BitGenerator",
        "state": {"bit_generator": "Popen"},
        "seeds": None,
    },
    "field": {"$": "date", "iso": "2020-01-01", "more": 1},
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_node_is_invalid(name: str) -> None:
    with pytest.raises(InvalidTreeError):
        decode(FORGED[name])


@pytest.mark.parametrize("position", [-1, 625, 1 << 30])
def test_a_bit_generator_never_reads_outside_its_buffer(position: int) -> None:
    for cls, change in (
        (np.random.MT19937, lambda state: state["state"].update(pos=position)),
        (np.random.Philox, lambda state: state.update(buffer_pos=position)),
    ):
        with pytest.raises(InvalidTreeError, match="is not between 0 and"):
            decode(*bits(cls, change))


def test_a_name_in_a_checkpoint_imports_nothing_and_calls_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "never_imported.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    fields = [["x", 1]]
    found = decode({"$": "dataclass", "cls": "never_imported:State", "fields": fields})
    assert found.fields == {"x": 1}
    assert "never_imported" not in sys.modules
    module = Plain.__module__
    for name in ("Plain", "Odd", "Reduced", "State.__init__", "describe", "MyList"):
        tree = {"$": "dataclass", "cls": f"{module}:{name}", "fields": fields}
        if name in ("State.__init__", "describe"):
            assert decode(tree).cls == f"{module}:{name}"
        else:
            with pytest.raises(CheckpointError, match="it was a dataclass, and no longer is"):
                decode(tree)
    with pytest.raises(CheckpointError, match="was saved with the fields"):
        decode({"$": "dataclass", "cls": f"{module}:State", "fields": fields})


def test_objects_that_are_pickled_stay_shared_inside_an_everyday_value() -> None:
    shared = Plain()
    shared.array = np.ones(3)  # type: ignore[attr-defined]
    for value in (State(1, shared, [shared]), collections.deque([shared, [shared]])):
        with pytest.raises(DefinitionError, match="Plain cannot be saved"):
            encode_blobs("n", {"x": value})
        one = encode_blobs("n", {"x": [value, 1], "y": {2}}, allow_pickle=True)
        loaded = Decoder(
            lambda i, parts=one["x"].parts: parts[i].data,  # type: ignore[misc]
            allow_pickle=True,
            classes=one["x"].classes,
        ).decode(one["x"].tree)[0]
        first, second = (
            (loaded.w, loaded.notes[0])
            if type(loaded) is State
            else (
                loaded[0],
                loaded[1][0],
            )
        )
        assert first is second
        assert type(first) is Plain


def test_equal_sets_are_encoded_alike() -> None:
    assert list({0, 8}) != list({8, 0})
    for make in (set, frozenset):
        trees = [encode_blobs("n", {"x": make(it)})["x"].tree for it in ([0, 8, "a"], ["a", 8, 0])]
        assert trees[0] == trees[1]


def test_an_outline_reads_no_arrays() -> None:
    value = [np.ma.MaskedArray(np.zeros((2, 3)), True), memoryview(np.zeros(4)), {"same": []}]
    value.append(value[2])
    tree = encode_blobs("n", {"x": value})["x"].tree
    parts: list[int] = []
    outline = Decoder(parts.__getitem__, leaf=lambda i: f"part {i}", is_outline=True).decode(tree)  # type: ignore[arg-type]
    assert [str(it) for it in outline[:2]] == ["masked array 'part 0'", "memoryview 'part 2'"]
    assert repr(outline[2:]) == "[{'same': []}, (as before)]"


def test_a_dataclass_is_made_without_its_init() -> None:
    made = decode(encode_blobs("n", {"x": Frozen(1)})["x"].tree)
    assert describe(made) == describe(Frozen(1))
    assert dataclasses.replace(made, x=2) == Frozen(2)
    assert len(VALUES) > 300


def test_records_of_earlier_versions_are_read() -> None:
    fields = {"fields": [["a", "<i4", 0, None]], "itemsize": 4, "aligned": False}
    scalar = {"$": "scalar", "dtype": fields, "hex": "05000000"}
    numbered = [{"$": "np.record", "scalar": scalar}, scalar, [], {"$": "same", "as": 1}]
    record, void, one, again = decode(numbered)
    assert (type(record), record.a, type(void), void["a"]) == (np.record, 5, np.void, 5)
    assert one is again


class Place(NamedTuple):
    x: int
    y: Any


class Mood(enum.Enum):
    CALM = 1
    MAD = "mad"


@dataclasses.dataclass(frozen=True)
class Pair:
    a: Any
    b: Any


@dataclasses.dataclass(eq=False)
class Each:
    seen: list[int]


def without_classes(value: Any) -> Any:
    """Decode a value as a program does that lacks its classes."""
    blob = encode_blobs("n", {"x": value})["x"]
    text = json.dumps(blob.tree).replace(f'"{__name__}:', '"gone:')
    return decode(json.loads(text), blob.parts)


@pytest.mark.parametrize("count", [3, 300])
def test_what_stands_for_a_lost_class_may_be_a_member_or_a_key(count: int) -> None:
    value = {
        "places": {Place(i, (i, Mood.MAD)) for i in range(count)},
        "moods": collections.Counter({Mood.CALM: 2, Mood.MAD: 1}),
        "pairs": {Pair(i, Mood.CALM): i for i in range(count)},
        "frozen": frozenset({Pair(1, 2)}),
        "each": {Each([1]), Each([1])},
    }
    found = without_classes(value)
    calm, mad = (SavedObject("gone:Mood", {"name": it.name, "value": it.value}) for it in Mood)
    assert found["moods"] == {calm: 2, mad: 1}
    assert SavedObject("gone:Place", {"x": 2, "y": (2, mad)}) in found["places"]
    assert found["pairs"][SavedObject("gone:Pair", {"a": 2, "b": calm})] == 2
    assert SavedObject("gone:Pair", {"a": 2, "b": 1}) not in found["frozen"]
    assert (len(found["places"]), len(found["each"])) == (count, 2)
    del value["each"]  # which are not equal with their classes either
    other = without_classes({**value, "moods": collections.Counter({Mood.MAD: 1})})
    (difference,) = compare_values(without_classes(value), other)
    assert difference["where"].startswith("['moods'][SavedObject(")


@pytest.mark.parametrize("end", [1, [1]], ids=["fixed", "changing"])
def test_forged_objects_that_hold_each_other_twice_are_read_and_compared_soon(end: Any) -> None:
    def chain(number: int) -> Any:
        tree: Any = end
        for level in range(60):
            same = {"$": "same", "as": number + 60 - level}
            fields = [["a", tree], ["b", same if level else 1]]
            tree = {"$": "dataclass", "cls": "gone:Pair", "fields": fields}
        return tree

    members = {"$": "tuple", "items": [chain(1), chain(61 + isinstance(end, list))]}
    found = [decode({"$": "set", "items": members}) for _ in range(2)]
    assert len(found[0]) == (1 if end == 1 else 2)
    one, other = (max(it, key=id) for it in found)
    assert list(compare_values(one, other)) == []
