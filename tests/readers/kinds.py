"""One store with every kind of array, for readers that are not ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jobrunner import Blob, Job, JobRunner, MultiNodeCheckpointManager, Session, Task, epoch_limiter

TABLE = np.arange(6.0).reshape(2, 3)
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
        "fortran": np.asfortranarray(TABLE),
    },
    "empty": {"none": np.zeros((0, 3))},
    "your own `chunks`": {"chunks": np.arange(35).reshape(5, 7)},
    "zstd": {"zstd": TABLE},
    "bfloat16, float8": _as(ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn),
}
"""Kind of array -> blobs that are such arrays."""

OPTIONS: dict[str, Any] = {
    "chunks": {"chunks": (2, 3)},
    "zstd": {"compressors": "zstd"},
}
CONTAINERS: dict[str, Any] = {
    "params": {
        "w": TABLE,
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


def save(path: Path) -> Path:
    """Save one node with all of them; return its store."""
    with Job("kinds") as job, job.init_group:
        outputs = [Blob(name, **OPTIONS.get(name, {})) for name in BLOBS]
        Task(lambda: list(BLOBS.values()), outputs=outputs, node="n")
    epoch_limiter(job, 1)
    manager = MultiNodeCheckpointManager(path)
    with Session.local(workers=1, processes=False) as session:
        JobRunner(job, manager).run(session)
    return path / "n.1"


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
    found["params/w"] = TABLE.tolist()
    found["params/layers/0"] = [0, 1, 2, 3]
    found["params/layers/1"] = [18262, 18263]
    found["counts"] = list(range(300))
    found["bytes"] = list(CONTAINERS["bytes"])
    for document in sorted(store.glob("_stacks/*/zarr.json")):
        names = json.loads(document.read_text())["attributes"]["names"]
        rows = [numbers(CONTAINERS[name]) for name in names]
        found[document.parent.relative_to(store).as_posix()] = rows
    return found
