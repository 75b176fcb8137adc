"""A store is read by others as docs/readers.md says, and as plain numbers with attributes."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore
import xarray
import zarr

from jobrunner import Blob, Job, JobRunner, MultiNodeCheckpointManager, Session, Task, epoch_limiter
from jobrunner.testing import assert_identical

# One store with every kind of array

HERE = Path(__file__).parent
GRID = np.arange(6.0).reshape(2, 3)
RECORD = np.dtype([("a", "i1"), ("b", ">f8"), ("c", "<U2")], align=True)
WORDS = np.array([["a", "bcd"], ["", "日本"]])


def _as(*dtypes: Any) -> dict[str, np.ndarray[Any, Any]]:
    arrays = [np.arange(3).astype(it) for it in dtypes]
    return {f"{'big_' if it.dtype.str[0] == '>' else ''}{it.dtype.name}": it for it in arrays}


def _times(kind: str, name: str) -> dict[str, np.ndarray[Any, Any]]:
    units = ("s", "ms", "us", "ns", "D", "h", "m", "M", "25s")
    times = [np.array([7, "NaT"], f"{kind}8[{unit}]") for unit in units]
    times.append(np.array([7, "NaT"], f">{kind}8[ns]"))
    return {f"{name}{i}": array for i, array in enumerate(times)}


ARRAYS: dict[str, dict[str, np.ndarray[Any, Any]]] = {
    "bool, integers, float32, float64": _as(
        *("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8")
    ),
    "the same in big-endian order": _as(">i2", ">u4", ">i8", ">f4", ">f8"),
    "float16": _as("<f2", ">f2"),
    "complex64, complex128": _as("<c8", "<c16", ">c16"),
    "dates": _times("M", "date"),
    "durations": _times("m", "span"),
    "fixed-width strings": {
        "words": WORDS,
        "big_words": WORDS.astype(">U3"),
        "turned_words": WORDS.T,
    },
    "fixed-width bytes": {
        "characters": np.array([b"a", b"bcd"]),
        "raw": np.frombuffer(b"0123456789", "V5"),
    },
    "records": {"records": np.array([(1, 0.5, "x"), (-1, 2.5, "yz")], RECORD)},
    "long doubles": {"long": np.arange(2).astype("g"), "long_pairs": np.arange(2).astype("G")},
    "variable-width strings": {"any_words": WORDS.astype(np.dtypes.StringDType())},
    "no axes, another memory order": {
        "scalar": np.array(7.5),
        "turned": np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0),
        "fortran": np.asfortranarray(GRID),
    },
    "empty": {"none": np.zeros((0, 3))},
    "your own `chunks`": {"chunks": np.arange(35).reshape(5, 7)},
    "zstd": {"zstd": GRID},
    "bfloat16, float8": _as(ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn),
}
"""Kind of array -> blobs that are such arrays."""

OPTIONS: dict[str, Any] = {
    "chunks": {"chunks": (2, 3)},
    "zstd": {"compressors": "zstd"},
}
CONTAINERS: dict[str, Any] = {
    "params": {
        "w": GRID,
        "layers": [np.arange(4), np.array(["2020-01-01", "2020-01-02"], "M8[D]"), "text"],
    },
    "counts": list(range(300)),
    "bytes": bytes(range(256)) * 20,
    "step": 7,
    **{f"row{i}": np.array([i, -i]) for i in range(70)},
    **{f"day{i}": np.array([i], "M8[D]") for i in range(70)},
    **{f"word{i}": np.array([f"word {i:2}"]) for i in range(70)},
}


BLOBS = {name: it for arrays in (*ARRAYS.values(), CONTAINERS) for name, it in arrays.items()}


def numbers(array: np.ndarray[Any, Any]) -> Any:
    """Return what Zarr's core types show of an array, as nested lists; complex numbers as pairs."""
    dtype = array.dtype
    if isinstance(dtype, np.dtypes.StringDType) or dtype.kind in "biuO":
        return array.tolist()
    if dtype.isbuiltin != 2 and dtype.kind in "fc" and dtype.char not in "gG":
        return (np.stack([array.real, array.imag], -1) if dtype.kind == "c" else array).tolist()
    plain = np.ascontiguousarray(array).reshape(array.shape)
    if dtype.kind in "mM":
        return plain.view(f"{dtype.str[0]}i8").tolist()
    if dtype.isbuiltin == 2:
        return plain.view(f"u{dtype.itemsize}").tolist()
    return plain[..., None].view(f"{dtype.str[0]}u4" if dtype.kind == "U" else "u1").tolist()


def expected(store: Path) -> dict[str, Any]:
    """Path of each array in the store -> what is to be read there."""
    found = {name: numbers(it) for arrays in ARRAYS.values() for name, it in arrays.items()}
    found["params/w"] = GRID.tolist()
    found["params/layers/0"] = [0, 1, 2, 3]
    found["params/layers/1"] = [18262, 18263]
    found["counts"] = list(range(300))
    found["bytes"] = list(CONTAINERS["bytes"])
    for document in sorted(store.glob("_stacks/*/zarr.json")):
        names = json.loads(document.read_text())["attributes"]["names"]
        rows = [numbers(CONTAINERS[name]) for name in names]
        found[document.parent.relative_to(store).as_posix()] = rows
    return found


# Readers that are not ours


def by_zarr(store: Path, paths: Collection[str]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the data type of texts is young
        group = zarr.open_group(store, mode="r")
        return {path: _plain(group[path][...]) for path in paths}


def by_xarray(store: Path, paths: Collection[str]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = xarray.open_zarr(store, chunks=None)
        tree = xarray.open_datatree(store, engine="zarr", chunks=None)
        found = {path: (tree if "/" in path else alone)[path].values for path in paths}
    for path, array in found.items():
        if array.dtype.kind in "mM":  # with another unit
            document = json.loads((store / path / "zarr.json").read_text())
            found[path] = array.astype(document["attributes"]["/jobrunner"]["dtype"])
    return {path: _plain(array) for path, array in found.items()}


def by_tensorstore(store: Path, paths: Collection[str]) -> dict[str, Any]:
    def read(path: str) -> Any:
        about = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{store}/{path}/"}}
        return _plain(tensorstore.open(about, read=True).result().read().result())

    return {path: _refusing(read, path) for path in paths}


def by_zarrs(store: Path, paths: Collection[str]) -> dict[str, Any]:
    pytest.importorskip("zarrs")
    # It would give what it cannot read to Zarr-Python.
    options: Any = {
        "codec_pipeline.path": "zarrs.ZarrsCodecPipeline",
        "codec_pipeline.strict": True,
    }
    with zarr.config.set(options):
        return {
            path: _refusing(lambda at: _plain(zarr.open_array(store / at, mode="r")[...]), path)
            for path in paths
        }


def by_zarrita(store: Path, paths: Collection[str]) -> dict[str, Any]:
    directory = os.environ.get("ZARRITA", "")
    if not shutil.which("node") or not Path(directory, "node_modules", "zarrita").is_dir():
        pytest.skip("npm install zarrita, and name the directory by ZARRITA")
    command = ["node", "--input-type=module", "-", str(store), *paths]
    return _run(command, directory, (HERE / "zarrita.mjs").read_text())


def by_gdal(store: Path, paths: Collection[str]) -> dict[str, Any]:
    spec = importlib.util.find_spec("pyogrio")  # importing it would leave a file open
    if spec is None:
        pytest.skip("pip install pyogrio")
    (library,) = Path(spec.origin).parents[1].glob("pyogrio.libs/libgdal*")
    return _run([sys.executable, str(HERE / "gdal.py"), str(library), str(store), *paths], HERE)


READERS: Mapping[str, Callable[[Path, Collection[str]], dict[str, Any]]] = {
    "Zarr-Python": by_zarr,
    "xarray": by_xarray,
    "TensorStore": by_tensorstore,
    "zarrs": by_zarrs,
    "zarrita.js": by_zarrita,
    "GDAL": by_gdal,
}


def _run(command: list[str], directory: str | Path, script: str = "") -> dict[str, Any]:
    done = subprocess.run(
        command, input=script, cwd=directory, capture_output=True, text=True, timeout=100
    )
    if done.returncode:
        raise AssertionError(done.stderr)
    found: dict[str, Any] = json.loads(
        done.stdout, object_hook=lambda it: int(it["int"]) if "int" in it else it
    )
    return found


def _refusing(read: Callable[[str], Any], path: str) -> Any:
    try:
        return read(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _plain(array: Any) -> Any:
    return numbers(np.asarray(array))


def compare(reader: str, store: Path) -> dict[str, str]:
    """Read the whole store; return what is wrong with which arrays."""
    wanted = expected(store)
    found = READERS[reader](store, list(wanted))
    wrong: dict[str, str] = {}
    for path, value in wanted.items():
        if isinstance(found[path], str):
            wrong[path] = found[path]
        elif found[path] != value:
            wrong[path] = f"misreads: {found[path]}"
    return wrong


def cell(kind: str, wrong: Mapping[str, str]) -> str:
    """Return the cell of the table for a kind of array and a reader."""
    whys = [wrong[name] for name in ARRAYS[kind] if name in wrong]
    if not whys:
        return "yes"
    is_refused = len(whys) == len(ARRAYS[kind]) and not any("misreads" in why for why in whys)
    return "no" if is_refused else "not all"


EVERYDAY = ("Zarr-Python", "xarray", "TensorStore")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of a node with all kinds of arrays."""
    with Job("kinds") as job, job.init_group:
        outputs = [Blob(name, **OPTIONS.get(name, {})) for name in BLOBS]
        Task(lambda: list(BLOBS.values()), outputs=outputs, node="n")
    epoch_limiter(job, 1)
    path = tmp_path_factory.mktemp("readers") / "kinds"
    with Session.local(workers=1, processes=False) as session:
        JobRunner(job, MultiNodeCheckpointManager(path)).run(session)
    return path / "n.1"


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, str]]:
    """Kind of array -> reader -> what the documentation says; those that all read have no row."""
    text = (HERE.parents[1] / "docs" / "readers.md").read_text()
    first, _, *others = text.partition("| kind of array")[2].split("\n\n")[0].splitlines()
    lines = [f"| kind of array{first}", *others]
    head, *rows = ([part.strip() for part in line.strip("|").split("|")] for line in lines)
    found = {kind: dict(zip(head[1:], cells, strict=True)) for kind, *cells in rows}
    all_read = text.partition("All of them read ")[2].partition(".")[0].replace("\n", " ")
    for kind in all_read.split("; "):
        found[kind] = dict.fromkeys(head[1:], "yes")
    return found


@pytest.mark.parametrize(
    "reader",
    [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.nightly) for name in READERS],
)
def test_a_reader_reads_what_the_table_says(
    store: Path, table: dict[str, dict[str, str]], reader: str
) -> None:
    wrong = compare(reader, store)
    cells = {kind: cell(kind, wrong) for kind in ARRAYS}
    assert cells == {kind: table[kind][reader] for kind in ARRAYS}
    listed = {name for arrays in ARRAYS.values() for name in arrays}
    assert wrong.keys() <= listed  # containers and rows are read by all


def test_xarray_shows_dates_as_dates_and_all_groups(store: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tree = xarray.open_datatree(store, engine="zarr", chunks=None)
    dates = [tree[f"date{i}"].dtype.kind for i in range(10)]
    assert dates == ["M", "M", "M", "M", "M", "M", "M", "i", "i", "M"]
    spans = [tree[f"span{i}"].dtype.kind for i in range(10)]
    assert spans == ["m", "m", "m", "m", "m", "m", "m", "i", "i", "m"]
    assert tree["span4"].values[0] == np.timedelta64(7, "D")
    assert tree["date0"].encoding["_FillValue"] == -1 << 63
    groups = {"/", "/_stacks", "/params", "/params/layers"}
    assert {group.path for group in tree.subtree} == groups
    assert tree["counts"].shape == (300,)
    assert tree.attrs["step"] == 7


def test_we_open_lazily_what_was_saved(store: Path) -> None:
    checkpoint = MultiNodeCheckpointManager(store.parent).open(1)["n"]
    for name, array in ((name, it) for arrays in ARRAYS.values() for name, it in arrays.items()):
        assert_identical(array, checkpoint.load(name))
        lazy = checkpoint[name]
        assert lazy.shape == array.shape, name
        found = np.asarray(lazy[...])
        if array.dtype.isbuiltin == 2 or found.dtype.kind == "V":
            found = np.frombuffer(found.tobytes(), array.dtype).reshape(array.shape)
        assert found.dtype.kind == array.dtype.kind, name
        assert str(found.tolist()) == str(array.tolist()), name  # NaT is not equal to itself
    for name in ("row3", "day3", "word3"):
        assert_identical(checkpoint.load(name), checkpoint[name][...])
