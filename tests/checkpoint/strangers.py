"""A program that reads stores which a stranger made, one for each case, in every way there is.

``python -m tests.checkpoint.strangers [NAME...]`` prints for each case and each way how it ended, and
what time and memory it took. Digests are right everywhere, as an attacker would have them.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import math
import os
import pickle
import re
import resource
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner
from crc32c import crc32c

from jobrunner import MultiNodeCheckpointManager
from jobrunner.checkpoint.log.handler import encode_entry, read_content
from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.checkpoint.store.layout import MANIFEST
from jobrunner.checkpoint.store.reader import StoreReader
from jobrunner.checkpoint.store.stacks import LEAST_ALIKE
from jobrunner.cli import main
from jobrunner.define.array_options import ArrayOptions
from jobrunner.errors import JobRunnerError
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.workspace import Workspace
from tests.checkpoint.test_manager import run_group

GIB = 1 << 30
MOST_SECONDS = 10
SPARE_BYTES = 4 * GIB
"""What the program may take, so that a failure does not harm the machine."""

ZSTD = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
GZIP = {"name": "gzip", "configuration": {"level": 5}}
BLOSC = {
    "name": "blosc",
    "configuration": {
        "cname": "lz4",
        "clevel": 5,
        "shuffle": "shuffle",
        "typesize": 8,
        "blocksize": 0,
    },
}

Store = Any
Case = Callable[[Store], object]
CASES: dict[str, tuple[str, Case]] = {}
"""By name: what must be told of it (empty: it may be read), and what makes the store so."""


class _Store:
    """The store to be changed: its manifest, and its files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest = json.loads((root / MANIFEST).read_bytes())["attributes"]

    def array(self, blob: str, i: int = 0) -> dict[str, Any]:
        entry: dict[str, Any] = self.manifest["blobs"][blob]["arrays"][i]
        return entry

    def put(self, path: str, data: bytes) -> list[int]:
        (self.root / path).parent.mkdir(exist_ok=True, parents=True)
        (self.root / path).write_bytes(data)
        return [len(data), crc32c(data)]

    def make_array(self, path: str, data: bytes, **entry: Any) -> dict[str, Any]:
        """Add the files of an array of one chunk; return its entry."""
        document = json.dumps({"attributes": {}, "dimension_names": []}).encode()
        self.manifest["documents"][f"{path}/zarr.json"] = self.put(f"{path}/zarr.json", document)
        shape = entry.setdefault("shape", [len(data)])
        entry = {"dtype": "|u1", "order": None, "chunk_shape": shape, **entry, "path": path}
        name = ".".join(["c", *("0" for _ in shape)])
        return {**entry, "files": [self.put(f"{path}/{name}", data)]}

    def set_value(self, tree: Any, **arrays: Any) -> None:
        """Make a blob of this tree and these arrays, each bytes and the fields of its entry."""
        entries = [
            self.make_array(f"t/{name}", data, **about) for name, (data, about) in arrays.items()
        ]
        self.manifest["documents"]["t/zarr.json"] = self.put("t/zarr.json", b"{}")
        self.manifest["blobs"]["t"] = {"value": tree, "arrays": entries}


def case(name: str, told: str) -> Callable[[Case], Case]:
    def add(make: Case) -> Case:
        CASES[name] = (told, make)
        return make

    return add


def value(name: str, told: str, tree: Any, **arrays: Any) -> None:
    """Add a case of a value that is forged."""
    CASES[name] = (
        told,
        lambda store: store.set_value(tree() if callable(tree) else tree, **arrays),
    )


# --- code


class _Runs:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("ran",))


@case("compressor: a setting names another", "unknown field `id`")
def _(store: Store) -> None:
    content = pickle.dumps(_Runs())
    about = {"name": "zstd", "configuration": {"id": "pickle"}}
    store.array("w")["compressors"] = [about]
    store.array("w")["files"] = [store.put("w/c.0.0", content)]


@case("compressor: its settings are out of range", "clevel")
def _(store: Store) -> None:
    about = {**BLOSC, "configuration": {**BLOSC["configuration"], "clevel": 99}}
    store.array("w")["compressors"] = [about]
    store.array("w")["files"] = [store.put("w/c.0.0", bytes(96))]


@case("document: other codecs, shape and type", "")
def _(store: Store) -> None:
    document = json.loads((store.root / "w/zarr.json").read_bytes())
    document["codecs"] = [{"name": "numcodecs.pickle", "configuration": {"id": "pickle"}}]
    document["shape"], document["data_type"] = [1 << 40, 1 << 20], "object"
    document["storage_transformers"] = [{"name": "x"}]
    content = json.dumps(document).encode()
    store.manifest["documents"]["w/zarr.json"] = store.put("w/zarr.json", content)


# --- sizes


@case("chunk: shorter than its array", "size of a file")
def _(store: Store) -> None:
    store.array("w")["files"] = [store.put("w/c.0.0", bytes(8))]


@case("chunk: two, and the second is short", "size of a file")
def _(store: Store) -> None:
    store.array("w").update(chunk_shape=[2, 4])
    store.array("w")["files"] = [store.put("w/c.0.0", bytes(64)), store.put("w/c.1.0", bytes(32))]


@case("chunk: compressed, of another size", "holds more|bytes, expected")
def _(store: Store) -> None:
    from numcodecs import Zstd

    store.array("w")["compressors"] = [ZSTD]
    store.array("w")["files"] = [store.put("w/c.0.0", bytes(Zstd(1).encode(bytes(88))))]


@case("file: longer than it says", "expected 96 bytes, found 1099511627776")
def _(store: Store) -> None:
    os.truncate(store.root / "w/c.0.0", 1 << 40)


@case("file: longer than it says, compressed", "expected .* bytes, found 1099511627776")
def _(store: Store) -> None:
    os.truncate(store.root / "z/c.0.0", 1 << 40)


@case("file: shorter than it says, and long", "expected 1099511627776 bytes, found 96")
def _(store: Store) -> None:
    store.array("w").update(shape=[1 << 37], chunk_shape=[1 << 37], order=None)
    store.array("w")["files"] = [[1 << 40, 0]]
    store.put("w/c.0", bytes(96))


@case("shape: no items, and long axes", "")
def _(store: Store) -> None:
    store.array("w").update(shape=[1 << 33, 0], chunk_shape=[1, 1], files=[])


@case("shape: a product that overflows", "does not fit into memory")
def _(store: Store) -> None:
    store.array("w").update(shape=[0, 1 << 62, 1 << 62], chunk_shape=[1, 1, 1], files=[])


@case("shape: beyond 64 bits", "shape")
def _(store: Store) -> None:
    store.array("w").update(shape=[1 << 70, 0], chunk_shape=[1, 1], files=[])


@case("shape: chunks of 1", "expected 8589934592 files, found 1")
def _(store: Store) -> None:
    store.array("w").update(shape=[1 << 33], chunk_shape=[1])


@case("shape: of a compressed array, beyond what its file can hold", "size of a file")
def _(store: Store) -> None:
    store.array("w").update(shape=[1 << 40], chunk_shape=[1 << 40], compressors=[GZIP])
    store.array("w")["files"] = [store.put("w/c.0", gzip.compress(bytes(100)))]


@case("shape: of many compressed arrays, beyond the memory", "this machine has|not fit into memory")
def _(store: Store) -> None:
    entries = []
    for i in range(64):
        entry = store.make_array(f"t/{i}", b"", dtype="<f8", shape=[1 << 28], compressors=[ZSTD])
        os.truncate(store.root / f"t/{i}/c.0", 1 << 16)
        entries.append({**entry, "files": [[1 << 16, 0]]})
    store.manifest["documents"]["t/zarr.json"] = store.put("t/zarr.json", b"{}")
    tree = [{"$": "array", "at": i} for i in range(len(entries))]
    store.manifest["blobs"]["t"] = {"value": tree, "arrays": entries}


@case("shape: of texts, beyond what their file can hold", "size of a file")
def _(store: Store) -> None:
    data = b"\xff\xff\xff\xff"
    entry = store.make_array(
        "w", data, dtype={"string": None, "coerce": True}, shape=[(1 << 32) - 1]
    )
    store.manifest["blobs"]["w"] = {"value": {"$": "array", "at": 0}, "arrays": [entry]}


@case("pieces: most of them beyond the array", "expected 35184372088932 bytes, found")
def _(store: Store) -> None:
    store.array("z").update(shape=[2, 2], chunk_shape=[1 << 40, 2], piece_shape=[1, 1])
    store.array("z").update(files=[[4 * 24 + 4 + (16 << 41), 0]], pieces=[[[24, 0]] * 4], sums=None)


@case("dtype: zero bytes", "never of the dtype")
def _(store: Store) -> None:
    store.array("w").update(dtype="|V0", shape=[1 << 50], chunk_shape=[1 << 50], files=[[0, 0]])
    store.put("w/c.0", b"")


@case("dtype: a subarray", "never of the dtype")
def _(store: Store) -> None:
    store.array("w").update(
        dtype={"base": "<f8", "shape": [4]}, shape=[3], chunk_shape=[3], order=None
    )
    store.put("w/c.0", bytes(96))


@case("dtype: a subarray of strings", "dtype")
def _(store: Store) -> None:
    base = {"string": None, "coerce": True}
    store.array("w").update(dtype={"base": base, "shape": [1]}, shape=[3, 4], chunk_shape=[3, 4])


@case("dtype: a record of strings", "dtype")
def _(store: Store) -> None:
    fields = [["a", {"string": None, "coerce": True}, 0, None]]
    store.array("w").update(dtype={"fields": fields, "itemsize": 16, "aligned": False})


@case("dtype: a million fields", "fields")
def _(store: Store) -> None:
    fields = [[f"f{i}", "|u1", 0, None] for i in range(1_000_000)]
    store.array("w").update(dtype={"fields": fields, "itemsize": 8, "aligned": False})


@case("dtype: more than one in a string", "is not the dtype")
def _(store: Store) -> None:
    store.array("w").update(dtype="i4,f4", shape=[3, 4], chunk_shape=[3, 4])


@case("twice: an array", "there twice")
def _(store: Store) -> None:
    entry = store.array("w")
    store.manifest["blobs"]["w"] = {
        "value": [{"$": "array", "at": i} for i in range(9)],
        "arrays": [entry] * 9,
    }


@case("twice: a row of a stack", "there twice")
def _(store: Store) -> None:
    for i in range(LEAST_ALIKE):
        store.manifest["blobs"][f"row{i}"] = [0, 0]


@case("stack: of strings", "does not hold 256 texts")
def _(store: Store) -> None:
    store.manifest["stacks"][0]["dtype"] = {"string": None, "coerce": True}


@case("record: a blob that its own node borrows", "")
def _(store: Store) -> None:
    store.details["replicated"] = {"x": ["a", "a"]}


# --- bombs

BOMB_BYTES = 8 * GIB


def _gzip_bomb() -> bytes:
    """8 MB that become 8 GiB of zeros: one block of deflate after another, all the same."""
    import zlib

    stream = zlib.compressobj(9, zlib.DEFLATED, -15)
    body = stream.compress(bytes(1 << 20)) + stream.flush(zlib.Z_FULL_FLUSH)
    body = stream.compress(bytes(1 << 20)) + stream.flush(zlib.Z_FULL_FLUSH)
    head = gzip.compress(b"")[:10]
    return head + body * (BOMB_BYTES >> 20) + b"\x03\x00" + bytes(8)


def _zstd_bomb(says: int = BOMB_BYTES) -> bytes:
    """Blocks of 128 KiB of zeros, 4 bytes each, after a header that says any size."""
    block = (1 << 20) | 2  # size << 3 | a repeated byte << 1
    blocks = struct.pack("<I", block)[:3] + b"\0"
    last = struct.pack("<I", block | 1)[:3] + b"\0"
    head = b"\x28\xb5\x2f\xfd\xc0\x58" + struct.pack("<Q", says)
    return head + blocks * ((BOMB_BYTES >> 17) - 1) + last


def _blosc_bomb() -> bytes:
    from numcodecs import Blosc

    data = bytearray(Blosc("zstd", clevel=9, shuffle=0).encode(bytes(1 << 20)))
    data[4:8] = struct.pack("<I", (1 << 31) - 1)
    return bytes(data)


_BOMBS: list[tuple[str, Any, Callable[[], bytes]]] = [
    ("gzip", GZIP, _gzip_bomb),
    ("zstd", ZSTD, _zstd_bomb),
    ("zstd that lies", ZSTD, lambda: _zstd_bomb(96)),
    ("blosc", BLOSC, _blosc_bomb),
]
for _name, _about, _make in _BOMBS:

    @case(f"bomb: {_name}", "holds more than|cannot decompress")
    def _(store: Store, about: Any = _about, make: Any = _make) -> None:
        store.array("w")["compressors"] = [about]
        store.array("w")["files"] = [store.put("w/c.0.0", make())]

    @case(f"bomb: texts, {_name}", "holds more than|cannot decompress|does not hold 3 texts")
    def _(store: Store, about: Any = _about, make: Any = _make) -> None:
        dtype = {"string": None, "coerce": True}
        entry = store.make_array("w", make(), dtype=dtype, shape=[3], compressors=[about])
        store.manifest["blobs"]["w"] = {"value": {"$": "array", "at": 0}, "arrays": [entry]}


@case("bomb: gzip twice", "holds more than|cannot decompress")
def _(store: Store) -> None:
    store.array("w")["compressors"] = [GZIP, GZIP]
    store.array("w")["files"] = [store.put("w/c.0.0", gzip.compress(_gzip_bomb()))]


@case("bomb: blosc that reads beyond its end", "header does not fit")
def _(store: Store) -> None:
    from numcodecs import Blosc

    data = bytearray(Blosc("lz4", clevel=0).encode(bytes(96)))
    data[12:16] = struct.pack("<I", 1 << 20)
    store.array("w")["compressors"] = [BLOSC]
    store.array("w")["files"] = [store.put("w/c.0.0", bytes(data))]


@case("bomb: nested 100,000 levels deep", "nested too deep")
def _(store: Store) -> None:
    store.text = json.dumps(store.manifest).replace('"deep"', "[" * 100_000 + "]" * 100_000)


# --- values

STRING = {"string": None, "coerce": True}
TEXT = b"\1\0\0\0" + struct.pack("<I", 100) + b"x" * 100
OF_STRINGS = {"dtype": STRING, "shape": [1]}
HUGE = "f" * 1_000_000


def _library(of: str, **parts: Any) -> dict[str, Any]:
    return {"$": "library", "of": of, "value": parts}


def _endless() -> dict[str, Any]:
    return _library("pandas.Index", range=[0, 10**15, 1], name=None)


def _laughs(rows: int = 50) -> list[Any]:
    """Lists of two lists, both the one before: 2**50 in all."""
    # Object 0 is the outer list; each row is the next object.
    return [[], *([{"$": "same", "as": number}] * 2 for number in range(1, rows))]


value(
    "memory: bytes of an array of strings",
    "expected uint8",
    {"$": "bytes", "at": 0},
    x=(TEXT, OF_STRINGS),
)
value(
    "memory: a string of an array of strings",
    "expected uint8",
    {"$": "str", "at": 0},
    x=(TEXT, OF_STRINGS),
)
value(
    "memory: a scalar of strings",
    "no scalar of",
    {"$": "scalar", "dtype": STRING, "hex": "00" * 16},
)
value(
    "memory: addresses in an array.array",
    "items of type",
    {"$": "array.array", "typecode": "q", "items": {"$": "objects", "items": ["a"], "shape": [1]}},
)
value(
    "memory: addresses in a memoryview",
    "addresses",
    {"$": "memoryview", "array": {"$": "objects", "items": ["a"], "shape": [1]}, "readonly": True},
)
value(
    "hollow: with items",
    "does not have zero bytes",
    {"$": "hollow", "dtype": "<f8", "shape": [1000]},
)
value(
    "hollow: of strings",
    "does not have zero bytes",
    {"$": "hollow", "dtype": STRING, "shape": [1 << 50]},
)
value(
    "hollow: very many",
    "does not have zero bytes",
    {"$": "hollow", "dtype": "|V0", "shape": [10**15]},
)
value(
    "gaps: of a wide dtype",
    "gaps",
    {"$": "gaps", "dtype": "<U100000000", "at": 0, "missing": 1},
    x=(TEXT, OF_STRINGS),
    y=(b"\0", {"dtype": "|b1"}),
)
value(
    "gaps: of another shape",
    "does not fit",
    {"$": "gaps", "dtype": {"string": "nan", "coerce": True}, "at": 0, "missing": 1},
    x=(TEXT, OF_STRINGS),
    y=(b"\0\0", {"dtype": "|b1"}),
)
value(
    "twice: an array in many lists",
    "another node",
    [{"$": "list", "at": 0}] * 1000,
    x=(bytes(1 << 20), {}),
)
value("twice: bytes", "another node", [{"$": "bytes", "at": 0}] * 1000, x=(bytes(1 << 20), {}))
value("same: in itself", "contains itself", [[{"$": "same", "as": 1}]])
value("same: laughs", "", _laughs)
value("deep: lists", "nested|Invalid|invalid", lambda: json.loads("[" * 700 + "]" * 700))
value(
    "deep: tuples",
    "nested|Invalid|invalid",
    lambda: json.loads('{"$":"tuple","items":[' * 300 + "]}" * 300),
)
value("long: an int", "", {"$": "int", "hex": HUGE})
value(
    "long: a fraction",
    "bits",
    {
        "$": "fraction",
        "ratio": {
            "$": "tuple",
            "items": [{"$": "int", "hex": HUGE}, {"$": "int", "hex": HUGE[:-1] + "1"}],
        },
    },
)
value(
    "long: a seed",
    "bits",
    {
        "$": "np.SeedSequence",
        "entropy": {"$": "int", "hex": HUGE},
        "spawn_key": {"$": "tuple", "items": []},
        "pool_size": 4,
        "spawned": 0,
    },
)
value("long: a decimal", "", {"$": "decimal", "text": "1E+999999999"})
value(
    "endless: a deque of a range",
    "expected tuple",
    {
        "$": "deque",
        "maxlen": None,
        "items": {"$": "range", "bounds": {"$": "tuple", "items": [0, 10**15, 1]}},
    },
)
value("endless: a range", "", {"$": "range", "bounds": {"$": "tuple", "items": [0, 10**15, 1]}})
value(
    "endless: a deque's maxlen",
    "deque",
    {"$": "deque", "maxlen": 1 << 62, "items": {"$": "int", "hex": "1"}},
)
value("zone: a directory", "zone|cannot be decoded", {"$": "zone", "key": "Europe"})
value("endless: an index", "", _endless)
value(
    "endless: categories",
    "too long",
    lambda: _library(
        "pandas.api.extensions.ExtensionArray",
        kind="categorical",
        values={"$": "array", "at": 0},
        categories=_endless(),
        ordered=False,
    ),
    x=(b"\0", {"dtype": "|i1"}),
)
value(
    "endless: levels",
    "too long",
    lambda: _library(
        "pandas.Index",
        levels=[_endless()],
        codes=[{"$": "array", "at": 0}],
        names=["a"],
        sortorder=None,
    ),
    x=(b"\0", {"dtype": "|i1"}),
)
value(
    "endless: an interval",
    "too long",
    lambda: _library(
        "pandas.api.extensions.ExtensionArray",
        kind="interval",
        left=_endless(),
        right={"$": "same", "as": 2},
        closed="left",
    ),
)
value(
    "endless: a variable",
    "expected an array",
    _library(
        "xarray.Variable",
        dims=["x"],
        data={
            "kind": "value",
            "value": {"$": "range", "bounds": {"$": "tuple", "items": [0, 10**15, 1]}},
        },
        attrs={},
        encoding={},
    ),
)
value(
    "sparse: indices beyond the shape",
    "do not fit",
    _library(
        "scipy.sparse.sparray",
        format="csr",
        shape=[1, 1],
        data={"$": "array", "at": 0},
        indices={"$": "array", "at": 1},
        indptr={"$": "array", "at": 2},
    ),
    x=(bytes(8), {"dtype": "<f8", "shape": [1]}),
    y=(b"\xff\xff\xff\x0f", {"dtype": "<i4", "shape": [1]}),
    z=(struct.pack("<2i", 0, 1), {"dtype": "<i4", "shape": [2]}),
)
value(
    "arrow: data that are addresses",
    "expected an array",
    lambda: _library(
        "pyarrow.Array",
        type=_arrow_type(),
        length=1,
        offsets={"$": "array", "at": 0},
        data={"$": "objects", "items": ["a"], "shape": [1]},
    ),
    x=(struct.pack("<2i", 0, 8), {"dtype": "<i4", "shape": [2]}),
)
value(
    "arrow: offsets beyond the data",
    "cannot make",
    lambda: _library(
        "pyarrow.Array",
        type=_arrow_type(),
        length=1,
        offsets={"$": "array", "at": 0},
        data={"$": "array", "at": 1},
    ),
    x=(struct.pack("<2i", 0, 1 << 30), {"dtype": "<i4", "shape": [2]}),
    y=(b"abc", {}),
)


def _arrow_type() -> dict[str, Any]:
    import pyarrow as pa

    return {"$": "bytes", "hex": bytes(pa.schema([("", pa.string())]).serialize()).hex()}


# --- running them


def _save(path: Path) -> None:
    manager = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
    manager.run.start(["a"], {})
    workspace = Workspace("a")
    compressed = ArrayOptions((ZSTD,), (7, 9), (14, 18))
    workspace.globals.update(
        {
            "w": np.arange(12.0).reshape(3, 4),
            "z": np.zeros((40, 40)),
            "s": ["deep"],
            "t": {"a": [1, (2, np.arange(5))], "b": bytes(2000)},
            **{f"row{i}": np.arange(4.0) + i for i in range(LEAST_ALIKE)},
        }
    )
    save = manager.commits.begin(0, array_options={"a": {"z": compressed}})
    manager.commits.commit(save, save.write({"a": workspace}), {})
    manager.run.end()


def _ways(path: Path, digest: str) -> Iterator[tuple[str, Callable[[], object]]]:
    reader = StoreReader(PosixFiles(), str(path), "a.0", digest)
    manager = MultiNodeCheckpointManager(path)

    def command(*arguments: str) -> Callable[[], object]:
        def run() -> None:
            result = CliRunner().invoke(main, arguments)
            if result.exception and not isinstance(result.exception, SystemExit):
                raise result.exception
            if result.exit_code:
                raise JobRunnerError(result.output)

        return run

    def lazy() -> None:
        for node in manager.open(0).values():
            for name in [name for name in node if not name.startswith("row")]:
                found = node[name]
                for item in found if isinstance(found, list) else [found]:
                    if hasattr(item, "shape") and 0 not in item.shape:
                        is_short = math.prod(item.shape) < 1 << 20
                        item[... if is_short else (0,) * len(item.shape)]

    yield "load", reader.load
    yield "info", command("info", str(path), "latest")
    yield "verify", command("verify", str(path), "--deep")
    yield "diff", command("diff", str(path), str(path), "--deep")
    yield "lazy", lazy
    yield "resume", lambda: run_group(manager.load(0), {"a": Workspace("a")})
    yield "part", lambda: reader.load_slice("w", 0, 1, 2)


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10  # type: ignore[index]


def _end(*_: object) -> None:
    raise TimeoutError


def _try(call: Callable[[], object]) -> dict[str, Any]:
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before, started = _peak_bytes(), time.process_time()
    told: Any = None
    signal.alarm(MOST_SECONDS)
    try:
        call()
    except JobRunnerError as error:
        told = str(error)
    except BaseException as error:
        told = {"bad": f"{type(error).__name__}: {error}"[:300]}
    finally:
        signal.alarm(0)
    return {
        "told": told,
        "seconds": round(time.process_time() - started, 2),
        "bytes": _peak_bytes() - before,
    }


def run(names: list[str]) -> dict[str, Any]:
    """Run cases; returns by name, and by way, how it ended."""
    from numcodecs import pickles

    pickles.ALLOW_UNSAFE_PICKLE_DECODE = True  # type: ignore[attr-defined]  # as older versions do
    path = Path("k").absolute()
    _save(path)
    for _, call in _ways(path, hashlib.sha256((path / "a.0" / MANIFEST).read_bytes()).hexdigest()):
        call()  # imports everything
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + SPARE_BYTES, -1))
    commit = next(
        it
        for it in (path / "_log").iterdir()
        if (read_content(it.read_bytes()) or {})["kind"] == "commit"
    )
    before = {it: it.read_bytes() for it in path.glob("**/*") if it.is_file()}
    found: dict[str, Any] = {}
    signal.signal(signal.SIGALRM, _end)
    for name in names:
        print(name, file=sys.stderr, flush=True)
        store: Any = _Store(path / "a.0")
        store.text, store.details = None, {}
        CASES[name][1](store)
        document = json.loads(before[path / "a.0" / MANIFEST])
        document["attributes"] = store.manifest
        content = json.dumps(document)
        if store.text is not None:
            content = content.replace(json.dumps(store.manifest), store.text)
        data = content.encode()
        (path / "a.0" / MANIFEST).write_bytes(data)
        entry = copy.deepcopy(dict(read_content(before[commit]) or {}))
        digest = hashlib.sha256(data).hexdigest()
        entry["stores"]["a"]["manifest"] = digest
        entry["details"] |= store.details
        commit.write_bytes(encode_entry(entry))
        del document, content, data, store
        found[name] = {way: _try(call) for way, call in _ways(path, digest)}
        found[name]["ran"] = Path("ran").exists()
        for file in [it for it in path.glob("**/*") if it.is_file()]:
            if file not in before:
                file.unlink()
        for file, was in before.items():
            if file.stat().st_size != len(was) or file.read_bytes() != was:
                file.write_bytes(was)
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, suppress(BrokenPipeError):
        os.chdir(directory)
        print(json.dumps(run(sys.argv[1:] or list(CASES)), indent=1))
