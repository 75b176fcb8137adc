"""More than 300 kinds of value, and a description of all that must stay the same of each."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import functools
import pathlib
import random
import struct
import typing
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


Point = collections.namedtuple("Point", "x y")  # noqa: PYI024  # the older way, too


class Row(typing.NamedTuple):
    name: str
    data: Any = None


@dataclasses.dataclass
class State:
    step: int
    w: Any
    notes: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: float = 0.5


@dataclasses.dataclass(slots=True)
class Open:
    x: Any


@dataclasses.dataclass
class Unset:
    x: int = dataclasses.field(init=False)
    y: int = 1


class Plain:
    pass


@dataclasses.dataclass
class Odd(dict[Any, Any]):
    x: int = 1


@dataclasses.dataclass
class Reduced:
    x: int = 1

    def __reduce__(self) -> Any:
        return Reduced, (2,)


def nan(bits: int) -> float:
    value: float = struct.unpack(">d", struct.pack(">Q", bits))[0]
    return value


DTYPES = (
    *("?", "b", "B", "<i2", ">i2", "<u2", ">u2", "<i4", ">i4", "<u4", ">u4", "<i8", ">i8"),
    *("<u8", ">u8", "<f2", ">f2", "<f4", ">f4", "<f8", ">f8", "<c8", ">c8", "<c16", ">c16"),
    *("S3", "<U2", ">U2", "V3", "<M8[ns]", ">M8[D]", "<M8[25s]", "<m8[us]", ">m8[h]"),
)
CUBE = np.arange(24).reshape(2, 3, 4)
LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "C order": lambda a: a,
    "Fortran order": np.asfortranarray,
    "transposed": lambda a: a.transpose(2, 0, 1),
    "no axes": lambda a: np.array(a[0, 0, 0], a.dtype),
    "empty": lambda a: a[:, :0].copy(),
    "with steps": lambda a: a[:, ::-1, ::2],
}


def filled(dtype: str) -> Array:
    kind = np.dtype(dtype)
    if kind.kind in "?b":
        return (CUBE % 2).astype(kind)
    if kind.kind in "U":
        return (CUBE % 7).astype(kind)
    noise = np.random.default_rng(0).integers(0, 256, 24 * kind.itemsize, np.uint8)
    return noise.view(kind).reshape(2, 3, 4)


def tied(make: Callable[[], Any]) -> Any:
    one = make()
    return [one, {"again": one}, (one,)]


def nested(wrap: Callable[[Any], Any], depth: int) -> Any:
    value = None
    for _ in range(depth):
        value = wrap(value)
    return value


def started(rng: Any) -> Any:
    rng.standard_normal(3)  # an odd number, of which a legacy generator keeps one
    if isinstance(rng, np.random.Generator):
        rng.integers(0, 9, 3, dtype=np.uint32)
    return rng


def spawned() -> Any:
    sequence = np.random.SeedSequence([1, 2], spawn_key=(3,))
    sequence.spawn(2)
    return np.random.default_rng(sequence)


def shared_bits() -> Any:
    bits = np.random.PCG64(4)
    return [np.random.Generator(bits), np.random.Generator(bits)]


def noted(value: Any) -> Any:
    value.extra = "x"
    return value


ZONE = zoneinfo.ZoneInfo("Europe/Berlin")
EAST = dt.timezone(dt.timedelta(hours=5, minutes=30))
RECORDS = np.array([(1, 2.5, "a"), (2, -0.0, "b")], [("n", ">i4"), ("x", "f8"), ("s", "U3")])
VALUES: dict[str, Callable[[], Any]] = {
    **{
        f"{dtype} {name}": functools.partial(
            lambda dtype, change: change(filled(dtype)), dtype, change
        )
        for dtype in DTYPES
        for name, change in LAYOUTS.items()
    },
    **{
        f"{dtype} scalar": functools.partial(lambda dtype: filled(dtype)[1, 1, 1], dtype)
        for dtype in DTYPES
        if dtype[0] not in ">V"
    },
}
PLAIN_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**53, 2**53 + 1, -(2**64), 10**5000),
    *(0.0, -0.0, 5e-324, float("inf"), -float("inf"), nan(0x7FF8000000000000)),
    *(nan(0x7FF800000000BEEF), nan(0xFFF8000000000001), 1 + 2j, complex(-0.0, float("nan"))),
    *("", "text", "\ud800", "é\0\n\"\\", "x" * 99999, b"", b"\0\xff", bytes(9999), bytearray(b"x")),
    *([], (), {}, set(), frozenset(), [[]], ((),), {"": {}}, {"$": "set", "items": []}),
    *({True: "b", 0: "i", "0": "s", 0.5: "f", None: "n", (1, "x"): "t", b"0": "y"},),
    *({1: "int"}, {True: "bool"}, {1.0: "float"}, [1, True, 1.0], [0, False, -0.0]),
    *([1.5] * 500, list(range(500)), [True] * 500, (1,) * 500, [2**80] * 300, list("ab") * 300),
    *([nan(0x7FF8000000000001), 0.0] * 200, [2**70, *range(999), 0.5], [[i, str(i)] for i in range(9999)]),
    *({1, 2, 3}, {"b", "a"}, {1, "a", None, 2.5, (1, 2), b"x"}, set(range(1000)), {nan(1), 1j}),
    {str(i) for i in range(2000)} | {dt.date(2020, 1, i) for i in range(1, 20)},
    {frozenset(map(str, range(i))) for i in range(9)},
    *(frozenset({1, frozenset({2})}), {frozenset({"x", "y"}), frozenset()}, {-0.0}, {True, 2}),
    *(collections.deque([1, [2]]), collections.deque([1, 2], 5), collections.deque(maxlen=0)),
    *(collections.deque([0.5] * 300), collections.deque([np.arange(3), {"a": {1}}])),
    *(collections.defaultdict(int, {"a": 1}), collections.defaultdict(list, {1: [2]})),
    *(collections.defaultdict(None, x=1), collections.defaultdict(set, {"s": {1}})),
    *(collections.Counter("abca"), collections.Counter({"a": -1, 2: 0.5}), collections.OrderedDict(b=1, a=2)),
    *(range(5), range(10, -3, -2), range(0, 2**70, 3)),
    *(dt.date(1, 1, 1), dt.date(9999, 12, 31), dt.time(1, 2, 3, 4), dt.time(0, tzinfo=dt.UTC)),
    *(dt.time(2, 30, fold=1), dt.datetime(2020, 1, 2), dt.datetime.max, dt.datetime.min),
    *(dt.datetime(2020, 1, 2, 3, 4, 5, 6, dt.UTC), dt.datetime(2020, 1, 2, tzinfo=EAST)),
    *(dt.datetime(2024, 10, 27, 2, 30, tzinfo=ZONE, fold=1), dt.datetime(2024, 7, 1, tzinfo=ZONE)),
    *(dt.timedelta(), dt.timedelta.max, dt.timedelta.min, dt.timedelta(-1, 5, 7), dt.UTC, EAST, ZONE),
    *(dt.timezone(dt.timedelta(seconds=-30), "odd"), dt.timezone(dt.timedelta(0), "UTC")),
    *map(decimal.Decimal, ("0", "-0", "1E+5", "1.10", "NaN", "-sNaN123", "Infinity", "1e-6143")),
    *(uuid.UUID(int=5), pathlib.Path("a/b"), pathlib.Path("/x\udcff"), pathlib.PurePosixPath("/a b")),
    pathlib.PureWindowsPath("c:/x"),
    *(Point(1, [2]), Point(np.ones(2), x := np.zeros(2)), Row("a"), Row("b", {"d": Point(1, 2)})),
    *(np.longdouble("0.1"), np.clongdouble(1 - 2j), np.str_("\ud800"), np.str_(""), np.bytes_(b"")),
    *(np.datetime64("NaT"), np.datetime64("2020-01-01", "D"), np.timedelta64(3, "25s")),
    *(np.array([1, 2, 3], np.longdouble), RECORDS, np.zeros((2, 0), "S0")),
    *(np.array(["a", "", "é"], np.dtypes.StringDType()), np.array(["a", "\0"], object)),
    *(np.array([1, "a", None, (2.5, "x")], object), np.array([], object)),
    *(np.zeros(2, [("a", "f4", (2, 2)), ("b", [("c", ">i2")])]), np.array(["lone \ud800"], object)),
    np.broadcast_to(1.5, (2, 3)),
    *({"a": {"b": ({1}, [Point(1, collections.deque([dt.UTC]))])}}, [{"x": range(3)}, (None,)]),
    {3: np.ones(1), "3": np.zeros(1), ("a",): np.ones(2), "A": np.ones(1), "a": np.zeros(2)},
    {name: np.ones(1) for name in ("a/b", ".", "", "x" * 300, "c", "zarr.json", "__x", "\ud800")},
    np.zeros(2, [(("title", "a"), "<i4")]),
    np.ones(2, np.dtype({"names": ["a"], "formats": ["<i4"], "offsets": [3], "itemsize": 11})),
]  # fmt: skip
MADE: dict[str, Callable[[], Any]] = {
    "generator": lambda: started(np.random.default_rng(7)),
    "generator of PCG64DXSM": lambda: started(np.random.Generator(np.random.PCG64DXSM(7))),
    "generator of MT19937": lambda: started(np.random.Generator(np.random.MT19937(7))),
    "generator of Philox": lambda: started(np.random.Generator(np.random.Philox(7))),
    "generator of SFC64": lambda: started(np.random.Generator(np.random.SFC64(7))),
    "generator of a spawned seed": spawned,
    "generators that share their bits": shared_bits,
    "bit generator": lambda: np.random.Philox(1),
    "seed sequence": lambda: np.random.SeedSequence(2**100),
    "legacy random state": lambda: started(np.random.RandomState(3)),
    "random state of other bits": lambda: np.random.RandomState(np.random.PCG64(5)),
    "Python's random": lambda: random.Random(5),
    "dataclass": lambda: State(1, np.ones(3), ["a"]),
    "dataclass with more attributes": lambda: noted(State(1, np.ones(2))),
    "ordered dict with attributes": lambda: noted(collections.OrderedDict(a=1)),
    "frozen dataclass": lambda: Frozen({"a": 1}),
    "slotted dataclass": lambda: Slotted([1]),
    "open slotted dataclass": lambda: Open(1.5),
    "dataclass with an unset slot": lambda: unset_slot(),
    "dataclass with an unset field": Unset,
    "dataclasses in a dataclass": lambda: State(1, Frozen(Slotted({2})), [State(2, 3)]),
    "set of frozen dataclasses": lambda: {Frozen(1), Frozen(2)},
    "lists nested as deep as can be": lambda: nested(lambda inner: [inner], 150),
    "dicts nested as deep as can be": lambda: nested(lambda inner: {"a": inner}, 150),
    "tuples nested as deep as can be": lambda: nested(lambda inner: (inner,), 150),
    "dataclasses nested as deep as can be": lambda: nested(Frozen, 75),
    **{
        f"tied {name}": functools.partial(tied, make)
        for name, make in {
            "array": lambda: np.arange(3),
            "list": lambda: [1],
            "set": lambda: {1},
            "deque": lambda: collections.deque([1]),
            "dataclass": lambda: State(1, 2),
            "counter": lambda: collections.Counter("a"),
            "defaultdict": lambda: collections.defaultdict(list),
            "generator": lambda: np.random.default_rng(1),
            "bytearray": lambda: bytearray(b"x"),
            "list in tuples": lambda: ([1],),
            "array in a dataclass": lambda: Frozen(np.ones(2)),
        }.items()
    },
}
VALUES |= {
    f"{i} {type(value).__name__}": functools.partial(lambda value: value, value)
    for i, value in enumerate(PLAIN_VALUES)
}
VALUES |= MADE


def unset_slot() -> Any:
    value = Open(1)
    del value.x
    return value


def describe(value: Any, seen: dict[int, tuple[int, Any]] | None = None) -> Any:
    """All that must stay the same of a value: types, bits, orders, and which objects are one."""
    seen = {} if seen is None else seen
    cls = type(value)
    name = f"{cls.__module__}.{cls.__qualname__}"
    inner = functools.partial(describe, seen=seen)
    if callable(value):
        return name, repr(value)
    if cls in (bool, int, str, bytes, type(None)):
        return name, value
    if cls is float:
        return name, struct.pack("d", value)
    if cls.__hash__ in (None, object.__hash__):  # it can be told from one that is equal
        if id(value) in seen:
            return "same", seen[id(value)][0]
        seen[id(value)] = len(seen), value  # no other object may get its `id`
    if isinstance(value, np.generic):
        return name, describe(np.asarray(value))[1:]
    if isinstance(value, np.ndarray):
        plain = np.asarray(value)
        texts = plain.dtype.hasobject or plain.dtype.char in "TgG"
        texts = texts or plain.dtype.names is not None  # with padding between the fields
        bits = repr(plain.tolist()) if texts else plain.tobytes()
        return name, str(plain.dtype), plain.dtype.byteorder, plain.shape, bits
    if cls in (set, frozenset):
        return name, sorted(map(repr, map(describe, value)))
    if cls in (tuple, list):
        return name, [inner(item) for item in value]
    if cls is dict:
        return name, [(inner(key), inner(item)) for key, item in value.items()]
    if isinstance(value, np.random.RandomState):  # whose seed is no part of it
        return name, inner(value.get_state(legacy=False))
    reduced = value.__reduce_ex__(
        4
    )  # what makes it, of what, its state, and iterators of its items
    items = [inner(list(part)) for part in reduced[3:] if part is not None]
    return name, [inner(part) for part in reduced[:3]], items


def is_same(expected: Any, found: Any) -> bool:
    """Whether a value is what it was; an array that is contiguous in no order may become so."""
    if isinstance(expected, np.ndarray):
        for order in ("c_contiguous", "f_contiguous"):
            if getattr(expected.flags, order) and not getattr(found.flags, order):
                return False
    return bool(describe(expected) == describe(found))
