"""Codecs of types and of their subclasses, and what `register_codec` and a save refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobrunner import (
    DefinitionError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
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

    __hash__ = None  # type: ignore[assignment]


class Square(Shape):
    pass


class Cube(Square):
    pass


SHAPES = {cls.__name__: cls for cls in (Shape, Square, Cube)}


class TestShapes(CodecContract):
    codec = Codec(
        Shape,
        lambda shape: {"kind": type(shape).__name__, "sides": shape.sides},
        lambda saved: SHAPES[saved["kind"]](saved["sides"]),
        "shape",
        subclasses=True,
    )
    values = (Shape([1, 2]), Square([3]), Cube([4]))


def test_the_codec_of_the_nearest_class_saves_a_subclass() -> None:
    def codec(cls: type, **options: Any) -> Any:
        return register_codec(cls, vars, cls, name=cls.__name__, **options)

    shape, square, odd = codec(Shape, subclasses=True), codec(Square), codec(dict, subclasses=True)
    table = CodecTable([shape, square, odd])
    assert [table.get(cls) for cls in (Shape, Square, Cube)] == [shape, square, shape]
    assert table.get(int) is None
    tree = encode_blobs("n", {"x": [{}, type("Odd", (dict,), {})()]}, [odd])["x"].tree
    assert tree == [{}, {"$": "codec", "of": ["dict", {}]}]


@pytest.mark.parametrize(
    ("arguments", "options", "why"),
    [
        ((3, vars, Shape), {}, "cls must be a class; got 3"),
        ((Shape, "vars", Shape), {}, "encode must be a function of one argument; got 'vars'"),
        ((Shape, vars, None), {}, "decode must be a function of one argument; got None"),
        ((Shape, vars, Shape), {"name": ""}, "name must be printable text; got ''"),
        ((Shape, vars, Shape), {"name": 5}, "name must be printable text; got 5"),
        ((Shape, vars, Shape), {"subclasses": "yes"}, "subclasses must be True or False"),
        ((np.ndarray, vars, Shape), {}, "ndarray is saved exactly without a codec"),
    ],
    ids=lambda it: str(it)[:40],
)
def test_register_codec_checks_what_it_gets(
    arguments: tuple[Any, ...], options: dict[str, Any], why: str
) -> None:
    with pytest.raises(DefinitionError, match=why):
        register_codec(*arguments, **options)


def test_all_blobs_that_cannot_be_saved_are_named_at_once(tmp_path: Path) -> None:
    with Job("refused") as job:
        for i in range(2):
            with Node(f"n{i}"), job.init_group:
                for name in ("first", "second"):
                    Task(lambda: [print, {}.keys()], outputs=name, name=name)
                Task(lambda: 1, outputs="fine")
        epoch_limiter(job, 1)
    manager = MultiNodeCheckpointManager(tmp_path)
    with (
        Session.local(workers=2, processes=False) as session,
        pytest.raises(DefinitionError) as caught,
    ):
        JobRunner(job, manager).run(session)
    lines = str(caught.value).splitlines()
    named = [line.split(", item")[0] for line in lines]
    expected = [
        f"Node {f'n{i}'!r}, blob {name!r}" for i in range(2) for name in ("first", "second")
    ]
    assert sorted(named) == expected
    assert manager.epochs() == []
