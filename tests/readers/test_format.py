"""docs/format.md suffices to read a checkpoint directory: `independent.py` does."""

from __future__ import annotations

import datetime as dt
import shutil
import struct
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from jobrunner import (
    Blob,
    Job,
    JobRunner,
    KeepLast,
    MultiNodeCheckpointManager,
    Node,
    Session,
    Task,
    epoch_limiter,
)
from jobrunner.cli import main
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles, assert_identical
from tests.checkpoint.encoding.kinds_of_values import describe
from tests.golden.make import blobs
from tests.jobs import counter
from tests.readers.independent import RefusedError, read

GOLDEN = Path(__file__).parents[1] / "golden"


class Point(NamedTuple):
    x: int
    y: list[int]


@dataclass
class Layer:
    weight: Any
    name: str = "first"


def make() -> dict[str, Any]:
    table = np.arange(24.0).reshape(2, 3, 4)
    record = np.dtype([("a", "<i2"), ("b", ">f8", (2,)), ("c", "<U2")])
    shared, weights = [1, 2], np.arange(5, dtype="f4")
    rows = [(i, i / 2, f"k{i}") for i in range(300)]
    dicts = [{"i": i, "f": f, "s": s} for i, f, s in rows]
    nan = struct.unpack(">d", b"\xff\xf8" + bytes(5) + b"\1")[0]
    return {
        "columns last": np.asfortranarray(table),
        "turned": table.transpose(1, 2, 0).copy().transpose(2, 0, 1),
        "big-endian": np.array([[-2, 3], [1 << 40, 5]], ">i8"),
        "small": [np.array([0.5, -3], ml_dtypes.bfloat16), np.array([2], ml_dtypes.float8_e5m2)],
        "dates": np.array(["2020-01-01", "NaT"], "M8[D]"),
        "words": np.array(["a", "länger"], ">U6"),
        "texts": np.array([["", "länger", "a\0"]], np.dtypes.StringDType()),
        "records": np.array([(1, [2, 3], "x"), (-1, [np.inf, 0], "yz")], record),
        "scalar": np.array(7),
        "nothing": np.zeros((0, 3)),
        "many": {f"p{i}": np.full((2, 2), i, ">i2") for i in range(70)},  # stacked
        "numbers": [list(range(300)), [i / 3 for i in range(300)], [True, False] * 150],
        "specials": [float("nan"), nan] * 150,
        "mixed": [i if i % 3 else i / 7 for i in range(300)],
        "rows": rows,
        "many texts": [f"text {i}" for i in range(9000)],
        "dicts": dicts,
        "plain": [2**53, -(2**53) - 1, 2**200, 1.0, 1, True, -0.0, float("-inf"), nan, None],
        "bytes": [b"\0a", bytes(2000), "x" * 5000, "\ud800", "line\n"],
        "keys": [{3: "c", None: "n", (1, 2): "t"}, {"$": "tuple", "of": []}],
        "sets": [{3, 1}, frozenset("ab"), deque([shared], 4), bytearray(b"ab")],
        "days": [dt.date(2020, 1, 2), dt.timedelta(1, 2, 3), np.float32(1.5), 1 + 2j],
        "tied": [shared, (shared, weights), dicts[299], {"again": weights}],
    }


CUT = np.asfortranarray(np.arange(70.0).reshape(10, 7))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Epochs 0, 1 and 3 are retired, 2 is pinned; once 3 was set aside, and saved anew."""
    directory: Path = tmp_path_factory.mktemp("saved")
    manager = MultiNodeCheckpointManager(directory, keep=KeepLast(2), files=FaultyFiles(sync=False))
    with Session.local(workers=1, processes=False) as session:
        for limit, resumed in ((3, "latest"), (5, 2)):
            with Job("made") as job, Node("a"):
                with job.init_group:
                    Task(make, outputs="values")
                    Task(lambda: (Point(1, [2]), Layer("w")), outputs="classes", name="classes")
                    Task(lambda: CUT, outputs=Blob("cut", chunks=(4, 3), compressors="zstd"))
                    Task(int, outputs="n")
                Task(lambda n: n + 1, outputs="n")
            epoch_limiter(job, limit)
            JobRunner(job, manager, resume_from_epoch=resumed).run(session)
            if limit == 3:
                manager.pin(2, "paper")
    return directory


def test_a_run_is_read_as_it_was_saved(saved: Path) -> None:
    found = read(saved)
    assert found.pins == {2: {"paper"}, 4: set(), 5: set()}
    blobs = found.nodes["a"]
    assert (found.epoch, blobs["n"]) == (5, 5)
    assert_identical(CUT, blobs["cut"])
    for name, value in make().items():
        assert describe(blobs["values"][name]) == describe(value), name
        if isinstance(value, np.ndarray):
            order = [np.argsort(array.strides).tolist() for array in (blobs["values"][name], value)]
            assert order[0] == order[1], name
    module = Point.__module__
    point = ("instance", [f"{module}:Point", ["x", "y"], {"x": 1, "y": [2]}])
    layer = ("instance", [f"{module}:Layer", ["weight", "name"], {"weight": "w", "name": "first"}])
    assert blobs["classes"] == (point, layer)
    assert read(saved, 2).nodes["a"]["n"] == 2
    with pytest.raises(RefusedError, match="there is no epoch 3"):
        read(saved, 3)


def test_a_long_log_is_read_after_a_repair(tmp_path: Path) -> None:
    files = FaultyFiles(sync=False)
    manager = MultiNodeCheckpointManager(tmp_path, files=files, keep=KeepLast(40))
    with Session.local(workers=1, processes=False) as session:
        JobRunner(counter(66), manager).run(session)
    manager.pin(27, "paper")
    assert list(read(tmp_path).pins) == list(range(27, 67))
    commits = manager.directory.snapshot().recorded
    numbers = (commits[Position(30)], commits[Position(66)])
    first, second = (tmp_path / "_log" / f"{number:010}.json" for number in numbers)
    first.unlink()
    second.write_bytes(b"damaged")
    assert CliRunner().invoke(main, ["fsck", str(tmp_path), "--repair"]).exit_code == 0
    found = read(tmp_path, 30)
    assert list(found.pins) == MultiNodeCheckpointManager(tmp_path).epochs()
    assert found.nodes == {"a": {"n": 30}}
    assert read(tmp_path).nodes == {"a": {"n": 66}}


def test_golden_directories_are_read() -> None:
    found = read(GOLDEN / "format_1")
    assert_identical(blobs(), found.nodes["a"])
    found = read(GOLDEN / "log_1")
    assert (list(found.pins), found.nodes) == ([0, 2], {"a": {"n": 2}})


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("a.0/table/c.0.0", "table/c.0.0 does not have its XXH3"),
        ("a.0/zarr.json", "a.0/zarr.json does not have its SHA-256"),
        ("_log/0000000001.json", r"0000000001.json does not have its SHA-256"),
    ],
)
def test_a_changed_byte_is_refused(tmp_path: Path, file: str, message: str) -> None:
    path = shutil.copytree(GOLDEN / "format_1", tmp_path / "d") / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RefusedError, match=message):
        read(tmp_path / "d")
