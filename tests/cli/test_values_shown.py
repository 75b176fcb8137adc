"""`info` shows types, dtypes and shapes of all values; `diff` compares pickled ones by value."""

from __future__ import annotations

import os
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobrunner import MultiNodeCheckpointManager, register_codec
from jobrunner.positions import Position
from tests.checkpoint.encoding.kinds_of_values import Unset
from tests.cli.directories import ask, begin, invoke, save
from tests.saves import save_epoch

RAN = "JOBRUNNER_TEST_RAN"


class Tells:
    """Unpickling it leaves a trace."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __setstate__(self, state: dict[str, Any]) -> None:
        os.environ[RAN] = "1"
        vars(self).update(state)


@pytest.fixture(autouse=True)
def _forget() -> Any:
    os.environ.pop(RAN, None)
    yield
    os.environ.pop(RAN, None)


def record(path: Path, *blobs: dict[str, Any]) -> MultiNodeCheckpointManager:
    manager = begin(path, allow_pickle=True)
    for epoch, values in enumerate(blobs):
        save(manager, epoch, values)
    manager.run.end()
    return manager


def test_info_shows_pickles_and_values_of_codecs_without_running_them(tmp_path: Path) -> None:
    codec = register_codec(
        Fraction, lambda f: [f.numerator, np.full(3, f.denominator)], lambda pair: 1 / 0
    )
    record(tmp_path, {"p": Tells(1), "big": Tells(2**9000), "f": Fraction(1, 2), "in": [Tells(3)]})
    text, found = invoke("info", tmp_path, 0).stdout, ask("info", tmp_path, 0)
    blobs = found["nodes"]["a"]["blobs"]
    assert blobs["p"]["type"] == blobs["big"]["type"] == "pickle"
    assert blobs["big"]["nbytes"] > 1000 > blobs["p"]["nbytes"] > 10
    assert blobs["f"] == {"type": "codec", "codec": codec.name, "value": "[1, int64[3]]"}
    assert blobs["in"]["type"] == "pickle"
    assert "unreadable" not in text
    assert "pickle" in text
    assert codec.name in text
    assert RAN not in os.environ


def test_info_shows_dtype_and_shape_of_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = {"t": torch.zeros(2, 3), "h": torch.ones(4, dtype=torch.bfloat16)}
    record(tmp_path, {**tensors, "model": {"layers": [torch.zeros(5)]}, "none": torch.zeros(0)})
    text, found = invoke("info", tmp_path, 0).stdout, ask("info", tmp_path, 0)
    blobs = found["nodes"]["a"]["blobs"]
    assert blobs["t"] == {"type": "tensor", "shape": [2, 3], "dtype": "float32"}
    assert blobs["h"] == {"type": "tensor", "shape": [4], "dtype": "bfloat16"}
    assert blobs["none"]["shape"] == [0]
    assert "'layers': [torch.Tensor({'data': float32[5]" in blobs["model"]["value"]
    assert ["t", "float32", "tensor", "2", "x", "3"] in [line.split() for line in text.split("\n")]


def test_diff_says_that_pickles_differ_and_unpickles_nothing(tmp_path: Path) -> None:
    record(tmp_path, {"x": Tells(1)}, {"x": Tells(2)})
    result = invoke("diff", f"{tmp_path}@0", "@1")
    assert result.exit_code == 11
    assert "a/x: the pickles differ, but their values may be equal" in result.stdout
    assert RAN not in os.environ


def test_counts_of_blobs_are_in_plain_english(tmp_path: Path) -> None:
    record(tmp_path, {}, {})
    assert "2 blobs are equal, 2 differ." in invoke("diff", f"{tmp_path}@0", "@1").stdout
    manager = MultiNodeCheckpointManager(tmp_path / "one")
    manager.run.start(["a"], {})
    from jobrunner.workspace.workspace import Workspace

    for epoch in range(2):
        workspace = Workspace("a")
        workspace.globals.update(w=np.ones(3))
        save_epoch(manager, Position.of(epoch), {"a": workspace})
    manager.run.end()
    assert "1 blob is equal, 0 differ." in invoke("diff", f"{tmp_path / 'one'}@0", "@1").stdout


def test_values_without_a_repr_are_shown_and_compared(tmp_path: Path) -> None:
    values = {"unset": Unset(), "long": 10**5000, "nan": Decimal("sNaN")}
    record(tmp_path / "k", values, {**values, "long": 10**5001, "nan": Decimal("NaN")})
    blobs = ask("info", tmp_path / "k", 0)["nodes"]["a"]["blobs"]
    assert blobs["unset"]["value"] == "{'y': 1}"  # what is set; no code of the class runs
    assert blobs["long"]["type"] == "int"
    found = ask("diff", f"{tmp_path / 'k'}@0", "@1")
    assert {it["blob"] for it in found["differences"]} - {"step"} == {"long", "nan"}
