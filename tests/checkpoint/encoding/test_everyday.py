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
from jobrunner.checkpoint import Decoder, StoredValue, encode_blobs
from jobrunner.checkpoint.encoding import InvalidTreeError, show_outline
from jobrunner.run.diff import compare_stored, compare_values
from tests.checkpoint.encoding.kinds_of_values import VALUES, Frozen, Plain, State, describe


def bits(cls: type, change: Callable[[Any], object]) -> Any:
    value = cls(1)
    state = value.state
    change(state)
    blob = encode_blobs("n", {"x": [value, state]})["x"]
    known, changed = blob.tree
    return {"$": known["$"], "of": {**known["of"], "state": changed}}, blob.parts


def decode(tree: Any, parts: Any = ()) -> Any:
    return Decoder(lambda i: parts[i].data.copy(), where="the blob").decode(tree)


def node(kind: str, content: Any) -> Any:
    return {"$": kind, "of": content}


FORGED = {
    "scalar of too few bytes": node("scalar", ["|V9", "00"]),
    "void of no bytes": node("void", ["|V1", "zz"]),
    "unknown type": node("builtin", "os.system"),
    "unknown factory": node("defaultdict", ["eval", {}]),
    "unhashable member": node("set", [[1]]),
    "members that are no list": node("set", "abc"),
    "negative length": node("deque", [[], -1]),
    "date": node("date", "2020-13-01"),
    "zero": node("fraction", [1, 0]),
    "path": node("path", ["Popen", "x"]),
    "random state": node("random", node("tuple", [3, 1, None])),
    "mask": node("np.MaskedArray", {"data": [1], "mask": None, "fill": None, "hard": False}),
    "typecode": node("array.array", ["Z", ""]),
    "pool": node("np.SeedSequence", [1, node("tuple", []), 1 << 40, 0]),
    "unknown bits": node("np.BitGenerator", {"state": {"bit_generator": "Popen"}, "seeds": None}),
    "field": {"$": "date", "of": "2020-01-01", "more": 1},
    "no content": {"$": "date"},
    "kind that is no text": {"$": [], "of": 1},
    "part that is no number": node("array", "0"),
    "part before the first": node("array", -1),
    "object before the first": node("same", -1),
    "items of another kind": node("tuple", node("set", [1])),
    "keys without values": node("dict", [["a", "b"], [1]]),
    "records without keys": node("records", [[], []]),
    "records with a number as key": node("records", [[1], [[1]]]),
    "rows of different lengths": node("rows", ["tuple", [[1], [1, 2]]]),
    "rows that are no containers": node("rows", ["str", [[1]]]),
    "sets of lists": node("rows", ["set", [[[1]]]]),
    "fields that are no texts": node("namedtuple", ["gone:X", [1], {}]),
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
        with pytest.raises(InvalidTreeError, match="not between 0 and"):
            decode(*bits(cls, change))


def test_a_name_in_a_checkpoint_imports_nothing_and_calls_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "never_imported.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    fields = [["x"], {"x": 1}]
    unmade = decode(node("dataclass", ["never_imported:State", *fields]))
    assert (unmade.kind, unmade.parts) == ("never_imported:State", {"x": 1})
    assert "never_imported" not in sys.modules
    module = Plain.__module__
    for name in ("Plain", "Odd", "Reduced", "State.__init__", "describe", "MyList"):
        tree = node("dataclass", [f"{module}:{name}", *fields])
        if name in ("State.__init__", "describe"):
            assert decode(tree).kind == f"{module}:{name}"
        else:
            with pytest.raises(CheckpointError, match="it was a dataclass, and no longer is"):
                decode(tree)
    with pytest.raises(CheckpointError, match="was saved with the fields"):
        decode(node("dataclass", [f"{module}:State", *fields]))


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


def test_an_outline_reads_no_arrays_and_makes_nothing_of_them() -> None:
    value = [
        np.ma.MaskedArray(np.zeros((2, 3)), True),
        [0.5] * 300,
        {"same": {1}},
        [{"a": 1, "b": "x"}] * 1,
        [{"a": i, str(i): 0.5} for i in range(300)],
        [(i, 0.5) for i in range(300)],
        [{"a": i, "b": 0.5 * i} for i in range(300)],
        {i: str(i) for i in range(300)},
        10**5000,
    ]
    value.append(value[2])
    tree = encode_blobs("n", {"x": value})["x"].tree
    shown = show_outline(tree, "part {}".format)
    masked, numbers, plain, few, walked, rows, records, texts, long, same = shown
    assert (masked.kind, masked.parts["data"]) == ("np.MaskedArray", "part 0")
    assert repr(numbers) == "numbers('part 2')"
    assert (plain, few, len(walked)) == ({"same": {1}}, [{"a": 1, "b": "x"}], 300)
    assert repr(rows) == "rows(['tuple', [numbers('part 3'), numbers('part 4')]])"
    assert repr(records) == "records([['a', 'b'], [numbers('part 5'), numbers('part 6')]])"
    assert texts.kind == "dict"
    assert repr([long, same]) == "[int('4155 digits'), same(6)]"


def test_a_dataclass_is_made_without_its_init() -> None:
    made = decode(encode_blobs("n", {"x": Frozen(1)})["x"].tree)
    assert describe(made) == describe(Frozen(1))
    assert dataclasses.replace(made, x=2) == Frozen(2)
    assert len(VALUES) > 300


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
def test_what_stands_for_a_value_of_a_lost_class_may_be_a_member_or_a_key(count: int) -> None:
    value = {
        "places": {Place(i, (i, Mood.MAD)) for i in range(count)},
        "moods": collections.Counter({Mood.CALM: 2, Mood.MAD: 1}),
        "pairs": {Pair(i, Mood.CALM): i for i in range(count)},
        "each": [Each([1]), Each([1])],
    }
    unmade = without_classes(value)
    assert len(unmade["places"]) == len(unmade["pairs"]) == count
    (calm, _), (mad, _) = unmade["moods"].items()
    assert (calm.kind, calm.parts) == ("gone:Mood", {"name": "CALM", "value": 1})
    assert repr(mad) == "gone:Mood({'name': 'MAD', 'value': 'mad'})"
    different = {"each": [Each([1]), Each([2])]}
    (difference,) = compare_values({"each": value["each"]}, different)
    assert difference["where"] == "['each'][1]['seen'][0]"


@pytest.mark.parametrize("end", [1, [1]], ids=["fixed", "changing"])
def test_forged_objects_that_hold_each_other_twice_are_read_and_compared_soon(end: Any) -> None:
    def chain() -> Any:
        # The object at each level is the second field of the one around it, too.
        tree: Any = end
        for level in range(60):
            fields = {"a": tree, "b": node("same", 2 * (60 - level)) if level else 1}
            tree = node("dataclass", ["gone:Pair", ["a", "b"], fields])
        return tree

    decode(chain())
    one, other = StoredValue(chain(), []), StoredValue(chain(), [])
    assert compare_stored(one, other) == [{"where": "", "what": "content"}]


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ([{"$": "array", "of": 0}, {"$": "array", "of": 0}], "that of another node"),
        ({"$": "array", "of": -1}, "no array -1"),
        ({"$": "numbers", "of": 0}, "is complex128"),
        ([{"$": "same", "of": 0}], "contains itself"),
    ],
)
def test_an_array_or_object_that_no_encoder_refers_to_is_refused(tree: Any, told: str) -> None:
    arrays = [np.arange(3, dtype=np.complex128)]
    with pytest.raises(InvalidTreeError, match=told):
        Decoder(arrays.__getitem__).decode(tree)
