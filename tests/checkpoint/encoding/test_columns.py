"""Many alike values are saved as columns, and come back as they were: types, bits, ties."""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import enum
import math
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from jobrunner import CheckpointError, DefinitionError
from jobrunner.checkpoint import Codec, Decoder, EncodedBlob, encode_blobs
from jobrunner.checkpoint.encoding import InvalidTreeError, SavedObject, columns
from jobrunner.checkpoint.encoding.encode import Encoder
from tests.checkpoint.encoding.kinds_of_values import VALUES, Plain, Slotted, describe
from tests.sampling import sampled
from tests.stores import write_store


class Point(NamedTuple):
    x: Any
    y: float = 0.0


@dataclass
class Sample:
    x: Any
    y: float = 0.0


@dataclass(frozen=True)
class Key:
    x: Any


class Phase(enum.Enum):
    COLD = 1
    HOT = "hot"


@pytest.fixture
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_LEAST_ITEMS", 1)


def encode(value: Any, **options: Any) -> EncodedBlob:
    return encode_blobs("n", {"x": value}, **options)["x"]


def decode(blob: EncodedBlob, **options: Any) -> Any:
    def array(i: int) -> Any:
        data, order = blob.parts[i].data.copy(), blob.parts[i].order
        return data if order is None else data.transpose(np.argsort(order))

    return Decoder(array, where="the blob", classes=blob.classes, **options).decode(blob.tree)


def kinds(tree: Any) -> set[str]:
    """The kinds of all nodes of a tree."""
    if isinstance(tree, list):
        return set().union(*map(kinds, tree))
    if isinstance(tree, dict):
        return {tree.get("$", "object")}.union(*map(kinds, tree.values()))
    return set()


N = 400
BERLIN = ZoneInfo("Europe/Berlin")
DAY = dt.datetime(2000, 1, 1)
MANY: dict[str, Callable[[], Any]] = {
    "tuples": lambda: [(i, i + 0.5) for i in range(N)],
    "pairs of one type": lambda: tuple([i, -i] for i in range(N)),
    "strings": lambda: [f"name {i} é" * (i % 3) + "\0" for i in range(N)],
    "lone surrogates": lambda: [f"{chr(0xD800 + i)}{chr(0xDC00 + i)}" for i in range(N)],
    "other strings": lambda: [f"name {i} é" * (i % 3) for i in range(N)],
    "few strings": lambda: [("train", "test", "é\ud800")[i % 3] for i in range(N)],
    "bytes": lambda: [bytes([i % 256]) * (i % 5) for i in range(N)],
    "bytes of many lengths": lambda: [b"%d\0" % i * (i % 7 * i) for i in range(N)],
    "numbers": lambda: {f"k{i}": i + 0.5 for i in range(N)},
    "nested dicts": lambda: [{"id": i, "at": [i, i + 0.5], "$": None} for i in range(N)],
    "dicts of other keys": lambda: [{i: i + 1, -i: 2} if i else {} for i in range(N)],
    "equal keys of other types": lambda: [{(1, 1.0, True)[i % 3]: i, 2: 3} for i in range(N)],
    "other order of keys": lambda: [dict(sorted({"a": 1, "b": i}.items())[:: i % 2 * 2 - 1]) for i in range(N)],
    "ordered": lambda: OrderedDict((i, str(i)) for i in range(N)),
    "named tuples": lambda: [Point(i, i + 0.5) for i in range(N)],
    "dataclasses": lambda: {i: Sample([i, str(i)], i + 0.5) for i in range(N)},
    "slots": lambda: [Slotted(i) for i in range(N)],
    "frozen keys": lambda: {Key((i, "x")): Key(None) for i in range(N)},
    "sets": lambda: [set(map(str, range(i % 4))) for i in range(N)],
    "set of tuples": lambda: {(i, str(i)) for i in range(N)},
    "set of pairs of numbers": lambda: frozenset((i % 7, -i) for i in range(N)),
    "set of tuples of any length": lambda: {tuple(range(i % 9, i)) for i in range(N)},
    "sets of numbers": lambda: [{float(-j) for j in range(i % 4)} | {math.inf} for i in range(N)],
    "set of numbers and NaN": lambda: {math.nan, -0.0, *(i + 0.5 for i in range(N))},
    "truths": lambda: [[i % 3 == 0 for i in range(N)], [None, *(i % 3 == 0 for i in range(N))]] * 16,
    "complex": lambda: [[(complex(i, -0.0), complex(math.nan, i))] for i in range(N)],
    "frozen sets": lambda: {frozenset((i, i + 1)) for i in range(N)},
    "ragged": lambda: [[float(j) for j in range(i % 7)] for i in range(N)],
    "ragged tuples": lambda: [tuple(range(i, i + (i % 4 if i % 9 else 70))) for i in range(N)],
    "ragged tuples of pairs": lambda: [tuple((j, -j) for j in range(i % 5)) for i in range(N)],
    "ragged tuples of floats": lambda: {i + 0.5: ((), (i / 3,))[i % 2] for i in range(N)},
    "empty": lambda: {i: ([], (), {}, set())[i % 4] for i in range(N)},
    "deep": lambda: [[[[i], [(i,)]], {"a": {"b": [{"c": i}]}}] for i in range(N)],
    "missing": lambda: [None if i % 3 else i + 0.5 for i in range(N)],
    "missing late": lambda: [(i + 0.5, [i])[i % 2] if i < 300 else None for i in range(N)],
    "few objects": lambda: [*[(Phase.HOT, None), [1], [1], "a", "".join("a")] * 80],
    "mixture": lambda: [(i, i + 0.5, str(i), None, i % 2 == 0, (i,), [i], {"a": i})[i % 8] for i in range(6 * N)],
    "large integers": lambda: [(1 << 70) + i if i % 2 else i for i in range(N)],
    "floats": lambda: [(0.0, -0.0, math.nan, math.inf, 5e-324)[i % 5] for i in range(N)],
    "integers of both sizes": lambda: [(1 << i % 60) - i for i in range(N)],
    "floats and integers": lambda: [(-0.0, 2**53 - 1, math.nan, -(2**53) + 1, 1e300)[i % 5] for i in range(N)],
    "floats and large integers": lambda: [(0.5, 2**53 + 1, -(2**60) - 1)[i % 3] for i in range(N)],
    "a dict of numbers": lambda: {i: (-1) ** i * i / 7 for i in range(N)},
    "a dict of integers": lambda: {i + 0.5: -i for i in range(N)},
    "a dict of numbers, one large": lambda: {i: i if i < N - 1 else 1 << 40 for i in range(N)},
    "a dict of numbers, one bool": lambda: {i + 2: i + 0.5 if i else True for i in reversed(range(N))},
    "a dict of numbers, one list": lambda: {i: i + 0.5 if i < 300 else [i] for i in range(N)},
    "a dict of numbers, one pair as long": lambda: {i: i + 0.5 for i in range(N)} | {"": "gggg"},
    "one string as long as a number": lambda: [[*range(N), ""], [*map(float, range(N)), "gggg"]] * 16,
    "almost floats": lambda: [*map(float, range(N)), np.float64(1), *"ggggggggg", 2.0],
    "almost integers": lambda: [*range(N), True, (1, 2), [3]],
    "bool and int": lambda: [(True, 1, False, 0, 1.0)[i % 5] for i in range(N)],
    "numpy": lambda: [(np.float32(i), np.int8(i % 100), np.bool_(i % 2), np.complex64(i)) for i in range(N)],
    "phases": lambda: [{"phase": Phase.HOT if i % 3 else Phase.COLD, "n": i} for i in range(N)],
    "deque": lambda: deque([{"a": i} for i in range(N)], 2 * N),
    "counter": lambda: Counter({f"k{i}": i for i in range(N)}),
    "default": lambda: defaultdict(list, {i: [i] for i in range(N)}),
    "long": lambda: [[float(i)] * 300 for i in range(20)],
    "days": lambda: [(dt.date(2000, 1, 1) + dt.timedelta(i), dt.timedelta(-i, 5, i)) for i in range(N)],
    "times": lambda: [[DAY + dt.timedelta(i), dt.time(i // 60, i % 60, fold=i % 2)] for i in range(N)],
    "zones": lambda: [(DAY + dt.timedelta(i)).replace(tzinfo=(None, dt.UTC, BERLIN)[i % 3]) for i in range(N)],
    "decimals": lambda: [Decimal(("1.50", "-0", "sNaN5", "1E+400")[i % 4]) for i in range(N)],
    "bytearrays": lambda: [(bytearray(i % 9), bytearray()) for i in range(N)],
    "bytearrays of all bytes": lambda: [bytearray([i % 256] * (i % 5)) for i in range(N + 200)],
    "bytearrays again": lambda: [{"a": [bytearray(b"a")]}, bytearray(b"a")] * N,
    "identifiers": lambda: [(UUID(int=i), Fraction(i, 7), PurePosixPath(f"a/{i}")) for i in range(N)],
}  # fmt: skip


def test_rows_of_complex_numbers_are_columns_that_the_first_version_of_format_4_reads() -> None:
    for kind in (tuple, list):
        of = encode([kind((complex(i), 1j)) for i in range(N)]).tree["of"]
        assert [column["$"] for column in of["columns"]] == ["numbers", "numbers"]


@pytest.mark.parametrize("name", MANY)
@pytest.mark.usefixtures("of_any_size")
def test_many_alike_values_come_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def count(cls: type, method: str) -> None:
        walk = getattr(cls, method)

        def counted(self: Any, value: Any, *trail: Any) -> Any:
            if cls is Encoder or isinstance(value, dict):
                calls.append(value)
            return walk(self, value, *trail)

        monkeypatch.setattr(cls, method, counted)

    value = MANY[name]()
    count(Encoder, "encode")
    blob = encode(value)
    assert len(calls) < 16 or name in ("large integers", "identifiers")
    count(Decoder, "decode")
    assert describe(decode(blob)) == describe(value)
    assert len(calls) < 150 or name in ("large integers", "identifiers")
    assert encode(value).tree == blob.tree
    assert len(repr(blob.tree)) < 1200
    assert "same" not in kinds(blob.tree)


@sampled("every_kth", sample=5, nightly=1)
def test_every_kind_of_value_comes_back_from_rows(of_any_size: None, every_kth: int) -> None:
    for name, make in list(VALUES.items())[::every_kth]:
        if name.endswith("slice"):  # several of them may load as one, as tuples do
            continue
        value = [{"it": make(), "rest": ([make()],)} for _ in range(16)]
        assert describe(decode(encode(value))) == describe(value), name


KEYS = st.text(st.characters(exclude_categories=()), max_size=4) | st.integers() | st.booleans()
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | KEYS | st.binary(max_size=3)
ROWS: st.SearchStrategy[Any] = st.recursive(
    SCALARS | st.decimals() | st.datetimes() | st.sampled_from([*Phase, np.float64(0.5)]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.sets(KEYS, max_size=3)
        | st.builds(Point, inner, st.floats())
        | st.builds(Sample, inner)
        | st.builds(Key, inner)
    ),
    max_leaves=6,
)


@given(st.lists(ROWS, min_size=1, max_size=4), st.data())
def test_any_rows_come_back_with_their_ties(patterns: list[Any], data: st.DataObject) -> None:
    """Rows are copies of a few patterns, or sometimes one object."""
    size = data.draw(st.sampled_from([16, 20, 40]))
    chosen = [data.draw(st.sampled_from(patterns)) for _ in range(size)]
    is_tied = data.draw(st.sampled_from([False, False, True]))
    rows = [it if is_tied and i % 5 == 0 else copy.deepcopy(it) for i, it in enumerate(chosen)]
    value = data.draw(
        st.sampled_from(
            [
                rows,
                tuple(rows),
                deque(rows),
                {str(i): row for i, row in enumerate(rows)},
                [rows, rows[0], (rows[-1], chosen)],
                [chosen[0], tuple((i, row) for i, row in enumerate(rows)), rows[3]],
            ]
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_LEAST_ITEMS", 1)
        found = decode(encode(value))
    assert describe(found) == describe(value)


# --- ties


def test_another_reference_to_a_row_is_one(of_any_size: None) -> None:
    rows = [{"id": i, "at": [i, i + 0.5]} for i in range(40)]
    for value in ([rows, rows[7], rows[9]["at"]], [rows[7], rows], (tuple(rows), [rows[7]])):
        assert describe(decode(encode(value))) == describe(value)
    blob = encode([rows, rows[7]])
    assert blob.tree[1] == {"$": "row", "of": 0, "at": 7}


def test_rows_that_occur_again_are_columns_too(of_any_size: None) -> None:
    shared: Any = {"again": [1, 2], "lr": 0.5}
    rows = [{"id": i, "shared": shared, "mine": [[i]] * 2} for i in range(99)]
    by_id = {row["id"]: row for row in rows[::-1]}
    held = ([1],)
    for value in (
        [[0.5] * 3] * 50,
        [{1}] * 50 + [{i} for i in range(50)],
        [rows, by_id, shared, deque(rows[7:])],
        [rows, by_id[3], [[row] for row in rows]],
        [Sample(i, shared) for i in range(99)],  # type: ignore[arg-type]
        (by_id, tuple(rows)),
        [[(held, i) for i in range(99)], held, (held,)],
    ):
        blob = encode(value)
        assert describe(decode(blob)) == describe(value)
        assert len(repr(blob.tree)) < 2000


def test_rows_that_hold_each_other_are_walked() -> None:
    first = [0]
    rows: list[Any] = [first, *([first, i] for i in range(N))]
    rows_of_rows = [[[i], [[0]]] for i in range(N)]
    rows_of_rows[7][1][0] = rows_of_rows[6]
    for value in (rows, rows_of_rows, tuple(rows)):
        blob = encode(value)
        assert describe(decode(blob)) == describe(value)
        assert "same" in kinds(blob.tree)
    names = [{np.str_("a") if i % 2 else "a": i} for i in range(N)]
    assert describe(decode(encode(names))) == describe(names)


def test_rows_in_two_blobs_are_refused() -> None:
    rows = [{"id": i} for i in range(N)]
    for other in (rows[5], [rows[5]], rows[:60]):
        with pytest.raises(DefinitionError, match="'a' and 'b' contain the same dict object"):
            encode_blobs("n", {"a": rows, "b": other})
        with pytest.raises(DefinitionError, match="'b' and 'a' contain the same dict object"):
            encode_blobs("n", {"b": other, "a": rows})
    held = ({"id": 1},)
    with pytest.raises(DefinitionError, match="contain the same dict object"):
        encode_blobs("n", {"a": [(held, i) for i in range(N)], "b": held})


def test_rows_that_contain_themselves_are_refused() -> None:
    rows: list[Any] = [[i] for i in range(N)]
    rows[7].append(rows[7])
    for loop in (rows, tuple(rows)):
        with pytest.raises(DefinitionError, match="contains itself"):
            encode(loop)
    rows[7][1] = rows
    with pytest.raises(DefinitionError, match="contains itself"):
        encode(rows)


@pytest.mark.parametrize("depth", [144, 147, 148, 149, 150])
def test_the_depth_that_is_refused_is_that_of_a_walk(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for least in (16, 1 << 60):
        monkeypatch.setattr(columns, "_LEAST_ROWS", least)
        value: Any = [({"a": [i]},) for i in range(N)]
        for _ in range(depth):
            value = [value]
        try:
            found.append(describe(decode(encode(value))))
        except DefinitionError as error:
            found.append(str(error))
    assert found[0] == found[1]


def test_rows_may_be_nested_as_deep_as_other_values(of_any_size: None) -> None:
    for make in (lambda it: [it], lambda it: ({"a": it},), lambda it: it):
        rows = []
        for i in range(20):
            row: Any = [i]
            for _ in range(70):
                row = make(row)
            rows.append((row, None if i % 2 else [i]))
        assert describe(decode(encode(rows))) == describe(rows)


# --- what is not alike


def test_what_else_is_among_them_is_saved_as_ever(of_any_size: None) -> None:
    arrays = [{"id": i, "w": np.arange(3) + i} for i in range(20)]
    blob = encode(arrays)
    assert [part.trail for part in blob.parts] == [(str(i), "w") for i in range(20)]
    assert blob.format == 1
    codec = Codec(Sample, lambda it: [it.x], lambda content: Sample(content[0]), "sample")
    tree = encode_blobs("n", {"x": [Sample(1) for _ in range(20)]}, [codec])["x"].tree
    assert tree[0] == {"$": "codec", "name": "sample", "value": [1]}


def test_what_is_pickled_among_them_is_refused_or_stays_shared(of_any_size: None) -> None:
    plain = Plain()
    rows = [Sample(plain if i == 9 else i, [plain] if i == 9 else 0.5) for i in range(20)]
    with pytest.raises(DefinitionError, match="item 9/x: .*Plain cannot be saved"):
        encode(rows)
    found = decode(
        encode([rows, [{"id": i} for i in range(20)]], allow_pickle=True), allow_pickle=True
    )
    assert found[0][9].x is found[0][9].y[0]
    assert found[1] == [{"id": i} for i in range(20)]


class Zone(dt.tzinfo):
    key = "its own"

    def utcoffset(self, when: object) -> None:
        return None


@pytest.mark.parametrize("num_items", [20, 600])
def test_what_columns_numbered_in_vain_is_forgotten(num_items: int) -> None:
    zone, shared = Zone(), [1]
    times = [dt.datetime(2020, 1, 1, i % 24, tzinfo=zone) for i in range(num_items)]
    codec = Codec(Zone, lambda it: [], lambda content: zone, "zone")
    for options in ({"allow_pickle": True}, {"codecs": [codec]}):
        blob = encode([times, shared, shared], **options)
        found = decode(blob, **options)
        assert [it.hour for it in found[0]] == [it.hour for it in times]
        assert found[1] is found[2]
        assert found[1] == shared
    with pytest.raises(DefinitionError, match="item 0/0: .*Zone cannot be saved"):
        encode([times])


def test_arrays_behind_a_number_are_not_copied() -> None:
    value = {"step": 1.0} | {f"w{i}": np.zeros(1 << 20, np.uint8) for i in range(20)}
    tracemalloc.start()
    encode(value)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_few_items_are_json_as_ever() -> None:
    for value in ([(i, 0.5) for i in range(100)], {f"k{i}": i for i in range(200)}, ["x"] * 50):
        blob = encode(value)
        assert (blob.parts, blob.format) == ([], 1)
    assert encode([1.5] * 300).tree == {"$": "list", "at": 0}
    assert encode(tuple(range(300))).format == 1
    assert encode([(i, 0.5) for i in range(300)]).format == 4
    assert encode([bytearray(b"x") for i in range(300)]).format == 6


# --- what others see


def test_other_readers_see_the_columns(tmp_path: Path) -> None:
    points = [{"id": i, "at": [0.5, i + 0.5], "who": f"w{i}"} for i in range(N)]
    reader = write_store(tmp_path, encode_blobs("n", {"points": points}))
    group = zarr.open_group(str(tmp_path / "n.0"), mode="r")["points"]
    assert group["id"][...].tolist() == list(range(N))  # type: ignore[index]
    assert group["at"].shape == (N, 2)  # type: ignore[index,union-attr]
    text = bytes(group["who/texts"][...]).decode()  # type: ignore[index,arg-type]
    assert text.split("\0") == [f"w{i}" for i in range(N)]
    assert reader.load() == {"points": points}


def test_an_outline_says_what_there_is(tmp_path: Path) -> None:
    values = {
        "rows": [{"id": i, "at": (0.5, i), "who": f"w{i}"} for i in range(N)],
        "scores": Counter({f"k{i}": i for i in range(N)}),
        "points": {"all": [Point(i, 0.5) for i in range(N)], "n": 1},
        "ragged": deque([*range(i % 3)] for i in range(N)),
        "pairs": {(i, i): None if i % 2 else str(i) for i in range(N)},
        "set": set(map(str, range(N))),
        "moments": [np.float32(0.5)] * N,
        "phases": [(Phase.HOT if i % 3 else Phase.COLD, b"x", i) for i in range(N)],
    }
    reader = write_store(tmp_path, encode_blobs("n", values))
    manifest = reader.read_document()
    found = {name: repr(reader.peek(manifest, name, outline=True)) for name in values}
    assert found == {
        "rows": "list of 400 x {id: int32, at: (float64, int32), who: str}",
        "scores": "Counter of 400 x str: int32",
        "points": "{'all': list of 400 x Point(x: int32, y: float64), 'n': 1}",
        "ragged": "deque of 400 x [int32, ...]",
        "pairs": "dict of 400 x (2 x int32): None | str",
        "set": "set of 400 x str",
        "moments": "list of 400 x float32",
        "phases": "list of 400 x (Phase, bytes, int32)",
    }
    assert {name: reader.peek(manifest, name) for name in values} == values


# --- what a forger writes


def numbers(*items: Any) -> Any:
    return np.array(items)


ONE, TWO, TEXT = numbers(1), numbers(1, 2), np.frombuffer(b"abc", np.uint8)
FORGED: dict[str, tuple[Any, list[Any]]] = {
    "columns of other lengths": ({"$": "tuples", "columns": [{"$": "numbers", "at": 0}, {"$": "numbers", "at": 1}]}, [ONE, TWO]),
    "no columns": ({"$": "tuples", "columns": []}, []),
    "no data": ({"$": "lists"}, []),
    "lengths of more": ({"$": "lists", "lengths": 0, "items": {"$": "numbers", "at": 1}}, [numbers(1, 2), TWO]),
    "huge lengths": ({"$": "lists", "lengths": 0, "items": {"$": "numbers", "at": 1}}, [numbers(1 << 62, 1 << 62, 1 << 62, 1 << 62, 2), TWO]),
    "negative lengths": ({"$": "tuples", "lengths": 0, "items": {"$": "numbers", "at": 1}}, [numbers(3, -1), TWO]),
    "lengths of floats": ({"$": "tuples", "lengths": 0, "items": {"$": "numbers", "at": 1}}, [numbers(2.0), TWO]),
    "tuples of an array from the end": ({"$": "tuples", "lengths": 0, "items": {"$": "numbers", "at": -1}}, [numbers(2), TWO]),
    "tuples of more": ({"$": "tuples", "lengths": 0, "items": {"$": "numbers", "at": 1, "more": 1}}, [numbers(2), TWO]),
    "lengths of nothing": ({"$": "tuples", "lengths": 0}, [TWO]),
    "numbers of two axes": ({"$": "numbers", "at": 0}, [np.ones((2, 2))]),
    "numbers without axes": ({"$": "numbers", "at": 0}, [np.array(1)]),
    "numbers of strings": ({"$": "numbers", "at": 0}, [np.array(["a"])]),
    "rows of one axis": ({"$": "lists", "at": 0}, [TWO]),
    "rows of no bytes": ({"$": "lists", "at": 0}, [np.ones((1 << 40, 0))]),
    "an array twice": ({"$": "lists", "columns": [{"$": "numbers", "at": 0}, {"$": "numbers", "at": 0}]}, [TWO]),
    "no array": ({"$": "numbers", "at": 7}, []),
    "other strings": ({"$": "texts", "at": 0, "count": 2}, [TEXT]),
    "strings of any count": ({"$": "texts", "at": 0}, [TEXT]),
    "cut strings": ({"$": "texts", "at": 0, "lengths": 1}, [TEXT, numbers(1, 1)]),
    "broken strings": ({"$": "texts", "at": 0, "lengths": 1}, [np.array([255, 254], np.uint8), TWO]),
    "strings of numbers": ({"$": "texts", "at": 0, "lengths": 1}, [TWO, TWO]),
    "kinds of nothing": ({"$": "mixed", "kinds": 0, "values": [None], "columns": []}, [np.array([0, 1], np.uint8)]),
    "kinds of other lengths": ({"$": "mixed", "kinds": 0, "values": [], "columns": [{"$": "numbers", "at": 1}]}, [np.array([0], np.uint8), TWO]),
    "a key twice": ({"$": "dicts", "names": ["a", "a"], "columns": [{"$": "numbers", "at": 0}] * 2}, [ONE]),
    "a key twice in a row": ({"$": "dicts", "lengths": 0, "keys": {"$": "numbers", "at": 1}, "items": {"$": "numbers", "at": 2}}, [numbers(2), numbers(1, 1), TWO]),
    "names without columns": ({"$": "dicts", "names": ["a"], "columns": []}, []),
    "keys that no dict has": ({"$": "dicts", "names": [[]], "columns": [{"$": "numbers", "at": 0}]}, [ONE]),
    "members that no set has": ({"$": "sets", "lengths": 0, "items": {"$": "lists", "at": 1}}, [numbers(1), np.ones((1, 1))]),
    "a column that is none": ({"$": "lists", "columns": [5]}, []),
    "a column of a dict": ({"$": "lists", "columns": [{"a": 1}]}, []),
    "nodes that are none": ({"$": "nodes", "of": {"$": "dicts", "names": ["$"], "columns": [{"$": "texts", "at": 0, "lengths": 1}]}}, [np.frombuffer(b"same", np.uint8), numbers(4)]),
    "nodes of a long text": ({"$": "nodes", "of": {"$": "dicts", "names": ["$", "text"], "columns": [{"$": "mixed", "kinds": 0, "values": ["decimal"], "columns": []}, {"$": "mixed", "kinds": 1, "values": ["1" * 999], "columns": []}]}}, [np.zeros(2, np.uint8), np.zeros(2, np.uint8)]),
    "nodes of other lengths": ({"$": "nodes", "of": {"$": "dicts", "names": ["$", "iso"], "columns": [{"$": "mixed", "kinds": 0, "values": ["date"], "columns": []}, {"$": "texts", "at": 1, "count": 1}]}}, [np.zeros(2, np.uint8), TEXT]),
    "nodes of numbers": ({"$": "nodes", "of": {"$": "dicts", "names": ["$", "iso"], "columns": [{"$": "mixed", "kinds": 0, "values": ["date"], "columns": []}, {"$": "numbers", "at": 1}]}}, [np.zeros(2, np.uint8), TWO]),
    "nodes without fields": ({"$": "nodes", "of": {"$": "dicts", "names": ["$", "iso"], "columns": [{"$": "mixed", "kinds": 0, "values": ["date"], "columns": []}]}}, [np.zeros(2, np.uint8)]),
    "nodes of other dates": ({"$": "nodes", "of": {"$": "dicts", "names": ["$", "iso"], "columns": [{"$": "mixed", "kinds": 0, "values": ["date"], "columns": []}, {"$": "texts", "at": 1, "count": 1}]}}, [np.zeros(1, np.uint8), TEXT]),
    "bytes of huge lengths": ({"$": "buffers", "at": 0, "lengths": 1}, [TEXT, numbers(1 << 62, 1 << 62, 1 << 62, 1 << 62, 3)]),
    "bytearrays of more": ({"$": "bytearrays", "at": 0, "lengths": 1}, [TEXT, numbers(4, 1)]),
    "bytes of negative lengths": ({"$": "buffers", "at": 0, "lengths": 1}, [TEXT, numbers(4, -1)]),
    "a field too many": ({"$": "numbers", "at": 0, "more": 1}, [ONE]),
    "a row that is not there": ({"$": "row", "of": 0, "at": 0}, []),
    "rows again of none": ({"$": "again", "at": 0, "of": {"$": "numbers", "at": 1}}, [np.array([3], np.uint8), TWO]),
    "rows again of themselves": ({"$": "lists", "columns": [{"$": "again", "at": 0, "block": 0}]}, [np.array([0], np.uint8)]),
    "rows again of nothing": ({"$": "again", "at": 0}, [np.array([0], np.uint8)]),
    "a row in itself": ({"$": "lists", "columns": [{"$": "mixed", "kinds": 0, "values": [{"$": "row", "of": 0, "at": 0}], "columns": []}]}, [np.array([0], np.uint8)]),
    "more names than columns": ({"$": "namedtuples", "cls": f"{__name__}:Point", "names": ["x", "y"], "columns": [{"$": "numbers", "at": 0}]}, [ONE]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_column_is_invalid(name: str) -> None:
    column, parts = FORGED[name]
    for tree in ({"$": "list", "of": column}, {"$": "dict", "keys": column, "of": column}):
        for is_outline in (False, True):
            decoder = Decoder(parts.__getitem__, where="the blob", is_outline=is_outline)
            try:
                found = decoder.decode(tree)
            except InvalidTreeError:
                continue
            assert is_outline, found


@pytest.mark.parametrize("how", ["again", "mixed", "same"])
def test_a_forger_cannot_repeat_what_takes_for_ever_to_hash(how: str) -> None:
    column: Any = {"$": "tuples", "lengths": 0}
    item: Any = {"$": "tuple", "items": []}
    lists: Any = [[None]]
    for i in range(1, 61):
        column = {"$": "again", "at": 2 * i, "of": column}
        column = {"$": "tuples", "lengths": 2 * i - 1, "items": column}
        item = {"$": "mixed", "kinds": 2 * i, "values": [item], "columns": []}
        item = {"$": "tuple", "of": item}
        if how == "same":
            lists.append([{"$": "tuple", "of": {"$": "same", "as": i}}] * 2)
    members = {"$": "tuple", "items": [item]} if how == "mixed" else {"$": "tuple", "of": column}
    if how == "same":
        members = {"$": "tuple", "of": {"$": "same", "as": 61}}
    decoder = Decoder(lambda i: np.array([2] if i % 2 else [0, 0], np.uint8), where="the blob")
    with pytest.raises(InvalidTreeError, match="expected a column|is not plain|that can change"):
        decoder.decode([*lists, {"$": "frozenset", "items": members}])


def test_nodes_in_a_column_are_small() -> None:
    rows = encode([{"$": "tuple", "items": [[i] * 8, [i] * 8]} for i in range(N)])
    tree = {"$": "list", "of": {"$": "nodes", "of": rows.tree["of"]}}
    with pytest.raises(InvalidTreeError, match="not that of one plain value"):
        decode(dataclasses.replace(rows, tree=tree))


def test_a_dict_whose_columns_do_not_fit_is_invalid() -> None:
    tree = {"$": "dict", "keys": {"$": "numbers", "at": 0}, "of": {"$": "numbers", "at": 1}}
    for parts in ([ONE, TWO], [TWO, ONE], [numbers(1, 1), TWO]):
        with pytest.raises(InvalidTreeError):
            Decoder(parts.__getitem__, where="the blob").decode(tree)


def test_a_class_that_is_gone_or_another_is_named() -> None:
    blob = encode([Sample(i, 0.5) for i in range(N)])
    tree = blob.tree["of"]
    gone = {**blob.tree, "of": {**tree, "cls": "gone:Sample"}}
    parts = [part.data for part in blob.parts]
    found = Decoder(parts.__getitem__, where="the blob").decode(gone)
    assert found[3] == SavedObject("gone:Sample", {"x": 3, "y": 0.5})
    for change in ({"cls": f"{__name__}:Point"}, {"names": ["x", "z"]}):
        other = {"$": "list", "of": {**tree, **change}}
        with pytest.raises(CheckpointError, match="it was a dataclass|saved with the fields"):
            Decoder(parts.__getitem__, where="the blob").decode(other)


def test_integers_take_32_bits_if_all_can() -> None:
    for number, dtype in ((1 << 31) - 1, "i4"), (-(1 << 31), "i4"), (1 << 31, "i8"):
        for value in ([number] * N, {i: number + i // N for i in range(N)}, {*range(N), number}):
            blob = encode(value)
            assert blob.parts[-1].data.dtype == dtype
            assert decode(blob) == value


def test_what_follows_a_defaultdict_of_many_items_stays_tied() -> None:
    row = [1]
    _, one, other = decode(encode([defaultdict(int, enumerate(range(N))), row, row]))
    assert one is other == row


def test_sets_of_numbers_and_tuples_are_in_the_same_order_everywhere() -> None:
    rows = [(i % 7, f"{i}", i * 0.5) for i in range(N)]
    pairs = [(i % 7, -i) for i in range(N)]
    assert encode(set(pairs)).parts[0].data.tolist() == [[*pair] for pair in sorted(pairs)]
    for items in (rows, pairs, [row[2] for row in rows], [hash(row[1]) for row in rows]):
        trees = [encode(set(order)) for order in (items, items[::-1])]
        for one, other in zip(*(blob.parts for blob in trees), strict=True):
            assert one.data.tobytes() == other.data.tobytes()
    for more in ("", "\0", "a" * 900):  # few strings may be sorted as rows of one length
        texts = {f"{chr(0xD7F0 + 120 * (i % N))}{i % 7}"[: i % 3] for i in range(9 * N)} | {more}
        blob = encode(texts)
        members = decode(dataclasses.replace(blob, tree=blob.tree["items"]))
        assert members == tuple(sorted(texts))
    assert decode(encode({*rows, (math.nan,)})) >= {*rows}
    assert encode([{3, -5, 8}, {1 << 40}, set()] * N).parts[1].data[:4].tolist() == [
        -5,
        3,
        8,
        1 << 40,
    ]


def test_sets_of_strings_are_in_the_same_order_everywhere() -> None:
    texts = {f"name {i}" for i in range(20)} | {"it's", 'a "b"', "a", "a!", "é", "\n"}
    assert encode(texts).tree["items"]["items"] == sorted(texts)
