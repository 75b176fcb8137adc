"""docs/format.md suffices to read a checkpoint directory in JavaScript: independent.mjs does."""

from __future__ import annotations

import datetime as dt
import json
import os
import shutil
import struct
import subprocess
from collections import deque
from dataclasses import dataclass, fields
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
from jobrunner.testing import FaultyFiles
from tests.jobs import counter

_HERE = Path(__file__).parent
_GOLDEN = sorted(path.parent for path in _HERE.parent.glob("golden/*/_log"))
_PACKAGES = ("fzstd", "hash-wasm")


def _missing() -> str:
    """What the reader needs and this machine lacks."""
    if shutil.which("node") is None:
        return "node is not installed"
    directory = os.environ.get("NODE_PACKAGES", "")
    if directory and all(Path(directory, "node_modules", name).is_dir() for name in _PACKAGES):
        return ""
    return f"npm install {' '.join(_PACKAGES)}, and name the directory by NODE_PACKAGES"


pytestmark = pytest.mark.skipif(bool(_missing()), reason=_missing())


def read(directory: Path, *epoch: str) -> dict[str, Any]:
    command = ["node", str(_HERE / "independent.mjs"), str(directory), *epoch]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise ValueError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class Point(NamedTuple):
    x: int
    y: list[int]


@dataclass
class Layer:
    weight: Any
    name: str = "first"


def make() -> dict[str, Any]:
    table = np.arange(24.0).reshape(2, 3, 4)
    record = np.dtype([("a", "<i2"), ("b", ">f8", (2,)), ("c", "<U2")], align=True)
    shared, weights = [1, 2], np.arange(5, dtype="f4")
    rows = [(i, i / 2, f"k{i}") for i in range(300)]
    return {
        "columns last": np.asfortranarray(table),
        "turned": table.transpose(1, 2, 0).copy().transpose(2, 0, 1),
        "big-endian": np.array([[-2, 3], [1 << 40, 5]], ">i8"),
        "unsigned": np.array([2**64 - 1], "u8"),
        "half": np.array([1.5, -(2.0**-24), np.inf, 65504], "f2"),
        "single": np.array([0.1, -0.0, np.nan], ">f4"),
        "small": [np.array([0.5, -3], ml_dtypes.bfloat16), np.array([2], ml_dtypes.float8_e5m2)],
        "complex": np.array([1 + 2j, 1j], "c8"),
        "bools": np.array([[True, False]]),
        "dates": np.array(["2020-01-01", "NaT"], "M8[D]"),
        "words": np.array(["a", "länger"], ">U6"),
        "texts": np.array([["", "länger", "a\0"]], np.dtypes.StringDType()),
        "raw": np.array([b"ab", b"c"], "S3"),
        "records": np.array([(1, [2, 3], "x"), (-1, [np.inf, 0], "yz")], record),
        "long": np.array([1, 2], np.longdouble),
        "scalar": np.array(7),
        "nothing": np.zeros((0, 3)),
        "zeros": np.zeros((70, 100)),
        "many": {f"p{i}": np.full((2, 2), i, ">i2") for i in range(70)},  # stacked
        "numbers": [list(range(300)), [i / 3 for i in range(300)], [True, False] * 150],
        "specials": [float("nan"), struct.unpack(">d", b"\xff\xf8" + bytes(5) + b"\1")[0]] * 150,
        "mixed": [i if i % 3 else i / 7 for i in range(300)],
        "rows": rows,
        "many texts": [f"text {i}" for i in range(9000)],
        "dicts": (dicts := [{"i": i, "f": f, "s": s} for i, f, s in rows]),
        "huge": [2**53, -(2**53) - 1, 2**200],
        "floats": [1.0, 1, True, -0.0, 1e300, 5e-324, 1e16, float("-inf")],
        "bytes": [b"\0a", bytes(2000), "x" * 5000, "\ud800", "line\n"],
        "order": {"2": 0, "1": 1, "__proto__": 2},
        "keys": {3: "c", None: "n", (1, 2): "t"},
        "dollar": {"$": "tuple", "of": []},
        "sets": [{3, 1}, frozenset("ab"), deque([shared], 4), bytearray(b"ab")],
        "days": [dt.date(2020, 1, 2), dt.timedelta(1, 2, 3), np.float32(1.5), 1 + 2j],
        "classes": (Point(1, shared), Layer(np.ones(2))),
        "tied": [shared, (shared, weights), dicts[299], {"again": weights}],
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Epochs 0, 1 and 3 are retired, 2 is pinned; once 3 was set aside, and saved anew."""
    directory: Path = tmp_path_factory.mktemp("saved")
    manager = MultiNodeCheckpointManager(directory, keep=KeepLast(2), files=FaultyFiles(sync=False))
    cut = np.asfortranarray(np.arange(70.0).reshape(10, 7))
    with Session.local(workers=1, processes=False) as session:
        for limit, resumed in ((3, "latest"), (5, 2)):
            with Job("made") as job, Node("a"):
                with job.init_group:
                    Task(make, outputs="values")
                    Task(lambda: cut, outputs=Blob("cut", chunks=(4, 3), compressors="zstd"))
                    Task(int, outputs="n")
                Task(lambda n: n + 1, outputs="n")
            epoch_limiter(job, limit)
            JobRunner(job, manager, resume_from_epoch=resumed).run(session)
            if limit == 3:
                manager.pin(2, "paper")
    return directory


def test_a_run_is_read_as_it_was_saved(saved: Path) -> None:
    found = read(saved)
    assert found["epochs"] == [2, 4, 5]
    assert found["pins"] == {"2": ["paper"], "4": [], "5": []}
    blobs = found["nodes"]["a"]
    assert (found["epoch"], blobs["n"]) == (5, 5)
    cut = blobs["cut"]["of"]
    assert (cut["order"], cut["data"]) == ([1, 0], [float(i) for i in range(70)])
    wanted = Plain()(make())
    assert list(blobs["values"]) == list(wanted)
    for name, value in wanted.items():
        assert json.dumps(blobs["values"][name]) == json.dumps(value), name
    assert read(saved, "2")["nodes"]["a"]["n"] == 2
    with pytest.raises(ValueError, match="refused: .* has no epoch 3"):
        read(saved, "3")


def test_a_long_log_is_read_after_a_repair(tmp_path: Path) -> None:
    files = FaultyFiles(sync=False)
    manager = MultiNodeCheckpointManager(tmp_path, files=files, keep=KeepLast(40))
    with Session.local(workers=1, processes=False) as session:
        JobRunner(counter(66), manager).run(session)
    manager.pin(27, "paper")
    assert read(tmp_path)["epochs"] == list(range(27, 67))
    commits = manager.directory.snapshot().recorded
    numbers = {at: commits[at] for at in (Position(30), Position(66))}
    first, second = (tmp_path / "_log" / f"{number:010}.json" for number in numbers.values())
    first.unlink()
    second.write_bytes(b"damaged")
    assert CliRunner().invoke(main, ["fsck", str(tmp_path), "--repair"]).exit_code == 0
    found = read(tmp_path, "30")
    assert found["epochs"] == MultiNodeCheckpointManager(tmp_path).epochs()
    assert found["nodes"] == {"a": {"n": 30}}
    assert read(tmp_path)["nodes"] == {"a": {"n": 66}}


@pytest.mark.parametrize("directory", _GOLDEN, ids=lambda path: path.name)
def test_golden_directories_are_read(directory: Path) -> None:
    found = read(directory)
    manager = MultiNodeCheckpointManager(directory)
    assert found["epochs"] == manager.epochs()
    checkpoint = manager.open(found["epoch"])
    for node, blobs in found["nodes"].items():
        for name, value in blobs.items():
            assert json.dumps(value) == json.dumps(Plain()(checkpoint[node].load(name)))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("a.0/table/c.0.0", "table/c.0.0 does not have its XXH3"),
        ("a.0/zarr.json", "a.0/zarr.json does not have its SHA-256"),
        ("_log/0000000001.json", "_log/0000000001.json does not have its SHA-256"),
    ],
)
def test_a_changed_byte_is_refused(tmp_path: Path, file: str, message: str) -> None:
    path = shutil.copytree(_HERE.parent / "golden" / "format_1", tmp_path / "d") / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"refused: {message}"):
        read(tmp_path / "d")


class Plain:
    """Converts one blob to what the reader prints."""

    def __init__(self) -> None:
        self._places: dict[int, str] = {}
        self._kept: list[object] = []

    def __call__(self, value: Any, at: str = "") -> Any:
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float) and not isinstance(value, np.generic):
            return _float(value)
        is_constant = isinstance(value, tuple | bytes | frozenset | dt.date | dt.timedelta)
        if not is_constant and not isinstance(value, complex | np.generic):
            if id(value) in self._places:
                return {"$": "same", "of": self._places[id(value)]}
            self._places[id(value)] = at
            self._kept.append(value)
        if isinstance(value, list):
            return self._list(value, at)
        if isinstance(value, dict) and set(map(type, value)) == {str} and "$" not in value:
            return {key: self(item, f"{at}/{key}") for key, item in value.items()}
        kind, of = self._special(value, f"{at}/of")
        return {"$": kind, "of": of}

    def _list(self, items: Any, at: str) -> list[Any]:
        return [self(item, f"{at}/{i}") for i, item in enumerate(items)]

    def _special(self, value: Any, at: str) -> tuple[str, Any]:
        match value:
            case np.ndarray():
                order = sorted(range(value.ndim), key=lambda axis: -value.strides[axis])
                spec: Any = value.dtype.str if value.dtype.names is None else value.dtype.descr
                named = {"T": "string", "bfloat16": "bfloat16", "float8_e5m2": "float8_e5m2"}
                spec = named.get(value.dtype.kind, named.get(value.dtype.name, spec))
                about = {"dtype": spec, "shape": value.shape, "order": order}
                return "array", about | {"data": _items(value)}
            case dict():
                return "dict", self._list(map(list, value.items()), at)
            case bytes():
                return "bytes", value.hex()
            case bytearray():
                return "bytearray", self(bytes(value), at)
            case set() | frozenset():
                return type(value).__name__, self(sorted(value), at)
            case deque():
                return "deque", self([list(value), value.maxlen], at)
            case dt.date():
                return "date", value.isoformat()
            case dt.timedelta():
                return "timedelta", [value.days, value.seconds, value.microseconds]
            case np.float32():
                return "scalar", ["<f4", value.tobytes().hex()]
            case complex():
                return "complex", [value.real, value.imag]
            case Point():
                state = value._asdict()
                return self._instance(value, list(state), state, at)
            case tuple():
                return "tuple", self._list(value, at)
            case Layer():
                names = [field.name for field in fields(value)]
                return self._instance(value, names, dict(vars(value)), at)
        raise TypeError(type(value))

    def _instance(
        self, value: object, names: list[str], state: dict[str, Any], at: str
    ) -> tuple[str, Any]:
        name = f"{type(value).__module__}:{type(value).__qualname__}"
        return "instance", [name, names, self(state, f"{at}/2")]


def _float(value: float) -> Any:
    if value - value == 0:
        return value
    return {"$": "float", "of": struct.pack(">d", value).hex()}


def _items(array: Any) -> list[Any]:
    """The items of an array, in a flat list."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    flat = np.ascontiguousarray(array).reshape(-1)
    if array.dtype.name == "bfloat16":
        return _items(array.astype("f4"))
    if array.dtype.names is not None:
        columns = [flat[name] for name in array.dtype.names]
        lists = [
            [_items(it) for it in column] if column.ndim > 1 else _items(column)
            for column in columns
        ]
        return list(map(list, zip(*lists, strict=True)))
    if array.dtype.name == "float8_e5m2" or kind == "S" or (size > 8 and kind == "f"):
        return [flat[i : i + 1].tobytes().hex() for i in range(flat.size)]
    if kind in "mM":
        return flat.view("i8").tolist()
    if kind == "c":
        return [[it.real, it.imag] for it in flat.tolist()]
    return [_float(it) for it in flat.tolist()] if kind == "f" else flat.tolist()
