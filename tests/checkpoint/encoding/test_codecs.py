"""Codecs of types and of their subclasses, what `register_codec` refuses, and the codec contract."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobrunner import (
    DefinitionError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Session,
    Task,
    epoch_limiter,
    register_codec,
)
from jobrunner.checkpoint import Codec, CodecTable, encode_blobs
from jobrunner.testing.codec_contract import CodecContract


class Shape:
    def __init__(self, sides: list[int]) -> None:
        self.sides = sides

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None


class Square(Shape):
    pass


class Cube(Square):
    pass


SHAPES = {cls.__name__: cls for cls in (Shape, Square, Cube)}


class TestShapes(CodecContract):
    codec = Codec(
        Shape,
        lambda shape: {"kind": type(shape).__name__, "sides": np.array(shape.sides)},
        lambda saved: SHAPES[saved["kind"]](saved["sides"].tolist()),
        "shape",
        subclasses=True,
    )
    values = (Shape([1, 2]), Square([3]), Cube([4]))


class Broken(CodecContract):
    values = (Shape([1, 2]),)


BROKEN = {
    "test_values_have_exactly_its_type": Codec(Fraction, str, Fraction, "other"),
    "test_a_saved_value_loads_unchanged": Codec(
        Shape, lambda shape: shape.sides[:1], lambda sides: Shape(list(sides)), "loses"
    ),
    "test_encoding_changes_nothing": Codec(
        Shape, lambda shape: (shape.sides.append(0), list(shape.sides))[1], Shape, "changes"
    ),
    "test_workers_can_use_it": Codec(Shape, vars, lambda sides: None, "gives none"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_codec_fails_the_contract(name: str) -> None:
    broken = Broken()
    broken.codec = BROKEN[name]
    with pytest.raises(AssertionError):
        getattr(broken, name)()


def test_the_codec_of_the_nearest_class_saves_a_subclass() -> None:
    def codec(cls: type, **options: Any) -> Any:
        return register_codec(cls, vars, cls, name=cls.__name__, **options)

    shape, square, odd = codec(Shape, subclasses=True), codec(Square), codec(dict, subclasses=True)
    table = CodecTable([shape, square, odd])
    assert [table.get(cls) for cls in (Shape, Square, Cube)] == [shape, square, shape]
    assert table.get(int) is None
    tree = encode_blobs("n", {"x": [{}, type("Odd", (dict,), {})()]}, [odd])["x"].tree
    assert tree == [{}, {"$": "codec", "of": ["dict", {}]}]


def test_register_codec_checks_what_it_gets() -> None:
    for cls, decode, why in (
        (3, Shape, "cls must be a class; got 3"),
        (Shape, None, "decode must be a function of one argument; got None"),
        (np.ndarray, Shape, "ndarray is saved exactly without a codec"),
    ):
        with pytest.raises(DefinitionError, match=why):
            register_codec(cls, vars, decode)


def test_all_blobs_that_cannot_be_saved_are_named_at_once(
    inproc_session: Session, tmp_path: Path
) -> None:
    names = [(f"n{i}", blob) for i in range(2) for blob in ("first", "second")]
    with Job("refused") as job, job.init_group:
        for node, blob in names:
            Task(lambda: [print, {}.keys()], outputs=blob, node=node, name=blob)
        epoch_limiter(job, 1)
    manager = MultiNodeCheckpointManager(tmp_path)
    with pytest.raises(DefinitionError) as caught:
        JobRunner(job, manager).run(inproc_session)
    told = sorted(line.split(", item")[0] for line in str(caught.value).splitlines())
    assert told == [f"Node {node!r}, blob {blob!r}" for node, blob in names]
    assert manager.epochs() == []
