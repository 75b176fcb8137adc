"""Everyday types: what is refused of a forged tree, and how pickled parts of them stay shared."""

from __future__ import annotations

import collections
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobrunner import CheckpointError, DefinitionError
from jobrunner.checkpoint import Decoder, encode_blobs
from jobrunner.checkpoint.encoding import InvalidTreeError, show_outline
from tests.checkpoint.encoding.kinds_of_values import Frozen, Plain, Row, State


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
    "scalar of no digits": node("scalar", ["|V1", "zz"]),
    "unknown factory": node("defaultdict", ["eval", {}]),
    "unhashable member": node("set", [[1]]),
    "members that are no list": node("set", "abc"),
    "negative length": node("deque", [[], -1]),
    "date": node("date", "2020-13-01"),
    "random state": node("random", node("tuple", [3, 1, None])),
    "pool": node("np.SeedSequence", [1, node("tuple", []), 1 << 40, 0]),
    "unknown bits": node("np.BitGenerator", {"state": {"bit_generator": "Popen"}, "seeds": None}),
    "field": {"$": "date", "of": "2020-01-01", "more": 1},
    "no content": {"$": "date"},
    "kind that is no text": {"$": [], "of": 1},
    "part that is no number": node("array", "0"),
    "object before the first": node("same", -1),
    "object that comes later": [node("same", 2), []],
    "items of another kind": node("tuple", node("set", [1])),
    "keys without values": node("dict", [["a", "b"], [1]]),
    "fields that are no texts": node("instance", ["gone:X", [1], {}]),
    "array twice": [node("array", 0), node("array", 0)],
    "array before the first": node("array", -1),
    "numbers of another dtype": node("numbers", 0),
    "list in itself": [node("same", 0)],
    "tree in an array": node("json", 0),
}
TOLD = {
    "array twice": "that of another node",
    "array before the first": "no array -1",
    "numbers of another dtype": "is complex128",
    "list in itself": "contains itself",
    "tree in an array": "no tree",
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_node_is_invalid(name: str) -> None:
    arrays = [np.arange(3, dtype=np.complex128)]
    with pytest.raises(InvalidTreeError, match=TOLD.get(name)):
        Decoder(arrays.__getitem__).decode(FORGED[name])


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
    unmade = decode(node("instance", ["never_imported:State", *fields]))
    assert (unmade.kind, unmade.parts) == ("never_imported:State", {"x": 1})
    assert "never_imported" not in sys.modules
    module = Plain.__module__
    for name in ("State.__init__", "describe"):
        unmade = decode(node("instance", [f"{module}:{name}", *fields]))
        assert unmade.kind == f"{module}:{name}"
    for name in ("Plain", "Odd", "Reduced"):
        for content in (fields, [[], {}]):
            with pytest.raises(CheckpointError, match="has changed: it"):
                decode(node("instance", [f"{module}:{name}", *content]))
    with pytest.raises(CheckpointError, match="was saved with the fields"):
        decode(node("instance", [f"{module}:State", *fields]))


def test_objects_that_are_pickled_stay_shared_inside_an_everyday_value() -> None:
    shared = Plain()
    for value in (State(1, shared, [shared]), collections.deque([shared, [shared]])):
        with pytest.raises(DefinitionError, match="Plain cannot be saved"):
            encode_blobs("n", {"x": value})
        blob = encode_blobs("n", {"x": value}, allow_pickle=True)["x"]
        arrays = [part.data for part in blob.parts]
        decoder = Decoder(arrays.__getitem__, allow_pickle=True, classes=blob.classes)
        loaded = decoder.decode(blob.tree)
        first, others = (loaded.w, loaded.notes) if type(loaded) is State else loaded
        assert type(first) is Plain
        assert others[0] is first


def test_an_outline_reads_no_arrays_and_makes_nothing_of_them() -> None:
    value = [[0.5] * 300, {"same": {1}}, (1, "x"), {1: "one"}, State(1, [2])]
    value.append(value[1])
    tree = encode_blobs("n", {"x": value})["x"].tree
    numbers, plain, both, keyed, state, same = show_outline(tree, "part {}".format)
    assert (repr(numbers), repr(same)) == ("numbers('part 0')", "same(2)")
    assert (repr(plain), both) == ("{'same': set([1])}", (1, "x"))
    assert repr(keyed) == "dict([[1], ['one']])"
    assert state.parts == {"step": 1, "w": [2], "notes": []}


def without_classes(value: Any) -> Any:
    """Decode a value as a program does that lacks its classes."""
    blob = encode_blobs("n", {"x": value})["x"]
    text = json.dumps(blob.tree).replace(f'"{State.__module__}:', '"gone:')
    return decode(json.loads(text), blob.parts)


def test_what_stands_for_a_value_of_a_lost_class_may_be_a_member_or_a_key() -> None:
    rows, frozen = {Row(str(i), (i, 1)) for i in range(3)}, {Frozen(i): i for i in range(3)}
    found_rows, found_frozen = without_classes([rows, frozen])
    assert len(found_rows) == len(found_frozen) == 3
    assert repr(next(iter(found_frozen))) == "gone:Frozen({'x': 0})"
