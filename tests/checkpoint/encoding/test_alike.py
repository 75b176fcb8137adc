"""Many alike items are encoded together, to the trees that a walk to each of them would return."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from jobrunner.checkpoint.encoding import Decoder, encode
from jobrunner.checkpoint.encoding.codecs import Codec, CodecTable, UnsupportedValueError
from jobrunner.checkpoint.encoding.encode import Encoder
from jobrunner.testing import assert_identical


class Point(NamedTuple):
    x: Any
    y: float = 0.0


@dataclass
class Sample:
    x: Any
    y: float = 0.0


@dataclass(slots=True)
class Small:
    x: Any


ROWS: dict[str, Callable[[Any], Any]] = {
    "scalar": lambda x: x,
    "tuple": lambda x: (x, 1),
    "list": lambda x: [x, 1],
    "dict": lambda x: {"x": x, "y": 1},
    "named tuple": lambda x: Point(x, 0.5),
    "dataclass": lambda x: Sample(x, 0.5),
    "slots": Small,
    "empty": lambda x: (),
}
SCALARS = [1, True, None, 0.5, -0.0, "a", "é", 2**53, -(2**53)]
ODD = [2**53 + 1, math.nan, math.inf, "\ud800", "x" * 4097, b"x", 1j, [1], {"$": 1}, {1: 2}]
SHARED = [1, 2]


def described(value: object, monkeypatch: pytest.MonkeyPatch, *, least: int) -> tuple[Any, ...]:
    monkeypatch.setattr(encode, "_LEAST_ALIKE", least)
    encoder = Encoder(None, False)
    try:
        tree = encoder.encode(value)
    except UnsupportedValueError as error:
        return error.trail, error.cls, error.why
    parts = [(part.trail, part.data.dtype, part.data.tolist()) for part in encoder.parts]
    names = (encoder.classes, encoder.is_new)
    return repr(tree), repr(parts), names, list(encoder.identities), encoder._numbers


def made(row: Callable[[Any], Any], seed: int) -> list[Any]:
    rng = random.Random(seed)
    items = [row(rng.choice(SCALARS)) for _ in range(rng.choice([1, 7, 8, 30, 300]))]
    if rng.random() < 0.5:
        others = [*map(row, ODD), row(object()), SHARED, (0,) * 256, {"$": 1}, {1: 2}, Sample(1)]
        items.insert(rng.randrange(len(items)), rng.choice(others))
    if rng.random() < 0.3:
        items.append(items[0])
    return items


@pytest.mark.parametrize("kind", ROWS)
def test_trees_are_those_of_a_walk(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(40):
        items = made(ROWS[kind], seed)
        for value in (items, tuple(items), {str(i): it for i, it in enumerate(items)}):
            both = [SHARED, value, items]  # some have numbers already
            together = described(both, monkeypatch, least=8)
            assert together == described(both, monkeypatch, least=1 << 60), seed


@pytest.mark.parametrize("depth", [147, 148, 149, 150])
@pytest.mark.parametrize("kind", ROWS)
def test_the_depth_that_is_refused_is_the_same(
    kind: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    value: Any = [ROWS[kind](1) for _ in range(10)]
    for _ in range(depth):
        value = [value]
    together = described(value, monkeypatch, least=8)
    assert together == described(value, monkeypatch, least=1 << 60)


@pytest.mark.parametrize("kind", sorted({*ROWS} - {"slots"}))
def test_long_lists_take_few_calls(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    walk = Encoder.encode

    def counted(self: Encoder, value: Any, trail: Any = ()) -> Any:
        calls.append(value)
        return walk(self, value, trail)

    monkeypatch.setattr(Encoder, "encode", counted)
    items = [ROWS[kind](x) for x in [*SCALARS] * 100]
    encoder = Encoder(None, False)
    tree = encoder.encode(items)
    assert len(calls) == 1
    back = Decoder(lambda i: encoder.parts[i].data, classes=encoder.classes).decode(tree)
    assert_identical(back, items, "the list")


def test_a_codec_comes_first() -> None:
    codec = Codec(Sample, lambda it: [it.x], lambda content: Sample(content[0]), "sample")
    tree = Encoder(CodecTable([codec]), False).encode([Sample(1) for _ in range(20)])
    assert tree[0] == {"$": "codec", "name": "sample", "value": [1]}


def test_sets_of_text_are_in_the_same_order_everywhere() -> None:
    texts = {f"name {i}" for i in range(20)} | {"it's", 'a "b"', "a", "a!", "é", "\n"}
    tree: Any = Encoder(None, False).encode(texts)
    assert tree["items"]["items"] == sorted(texts, key=repr)
