"""A program that reads stores which a stranger made, one for each case, in every way there is.

``python -m tests.checkpoint.strangers [NAME...]`` prints for each case and each way how it ended, and
what time and memory it took. Digests are right everywhere, as an attacker would have them.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import math
import os
import pickle
import re
import resource
import shutil
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
import xxhash
from click.testing import CliRunner

from jobrunner import MultiNodeCheckpointManager
from jobrunner.checkpoint import Directory, copy_epoch
from jobrunner.checkpoint.encoding.dtypes import MOST_FIELDS
from jobrunner.checkpoint.log.handler import decode_entry, encode_entry
from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.checkpoint.store.document import LONE_ARRAY, ROOT_DOCUMENT
from jobrunner.checkpoint.store.layout import LEAST_ALIKE
from jobrunner.checkpoint.store.store_reader import StoreReader
from jobrunner.cli import main
from jobrunner.define.array_options import ArrayOptions
from jobrunner.errors import JobRunnerError
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.workspace import Workspace
from tests.saves import save_epoch

GIB = 1 << 30
MOST_SECONDS = 10
SPARE_BYTES = 4 * GIB
"""What the program may take, so that a failure does not harm the machine."""

ZSTD = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
STRING = "string"
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}

Store = Any
Case = Callable[[Store], object]
CASES: dict[str, tuple[str, Case]] = {}
"""By name: what must be told of it (empty: it may be read), and what makes the store so."""


class _Store:
    """The store to be changed: its document, and its files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.document = json.loads((root / ROOT_DOCUMENT).read_bytes())
        self.entry = self.document["attributes"]["/jobrunner"]
        self.described = self.document["consolidated_metadata"]["metadata"]

    def array(self, blob: str, i: int = 0) -> dict[str, Any]:
        entry: dict[str, Any] = self.entry["blobs"][blob]["arrays"][i]
        return entry

    def describe(
        self,
        path: str,
        *,
        dtype: Any = None,
        shape: list[int] | None = None,
        chunk_shape: list[int] | None = None,
        codecs: list[Any] | None = None,
    ) -> None:
        """Change the description of an array; by default, it has one chunk."""
        document = self.described[path]
        if dtype is not None:
            document["attributes"]["/jobrunner"]["dtype"] = dtype
        if shape is not None:
            document["shape"] = shape
            document["dimension_names"] = [None] * len(shape)
        if shape is not None or chunk_shape is not None:
            document["chunk_grid"]["configuration"]["chunk_shape"] = chunk_shape or shape
        if codecs is not None:
            document["codecs"] = codecs

    def put(self, path: str, data: bytes) -> list[Any]:
        (self.root / path).parent.mkdir(exist_ok=True, parents=True)
        (self.root / path).write_bytes(data)
        return [len(data), xxhash.xxh3_128_hexdigest(data)]

    def make_array(
        self, path: str, data: bytes, dtype: Any = "|u1", shape: Any = None, codecs: Any = None
    ) -> dict[str, Any]:
        """Add the files of an array of one chunk; return its entry."""
        shape = [len(data)] if shape is None else shape
        self.described[path] = copy.deepcopy(self.described["w"])
        self.described[path]["attributes"]["/jobrunner"].pop("item_axis", None)
        self.describe(path, dtype=dtype, shape=shape, codecs=codecs or [BYTES])
        name = ".".join(["c", *("0" for _ in shape)])
        return {"path": path, "files": [self.put(f"{path}/{name}", data)]}

    def write(self) -> bytes:
        """Write all documents; return the root's."""
        for path, document in self.described.items():
            self.put(
                f"{path}/{ROOT_DOCUMENT}", json.dumps(document, separators=(",", ":")).encode()
            )
        content = json.dumps(self.document, separators=(",", ":"))
        if self.text is not None:
            content = content.replace(json.dumps(self.entry, separators=(",", ":")), self.text)
        self.put(ROOT_DOCUMENT, content.encode())
        return content.encode()

    def set_value(self, tree: Any, **arrays: Any) -> None:
        """Make a blob of this tree and these arrays, each bytes and the fields of its entry."""
        entries = [
            self.make_array(f"t/{name}", data, **about) for name, (data, about) in arrays.items()
        ]
        self.described.setdefault("t", {"node_type": "group", "zarr_format": 3, "attributes": {}})
        self.entry["blobs"]["t"] = {"tree": tree, "arrays": entries}


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


@case("compressor: another", "unexpected codecs")
def _(store: Store) -> None:
    content = pickle.dumps(_Runs())
    store.describe("w", codecs=[BYTES, {"name": "numcodecs.pickle", "configuration": {}}])
    store.array("w")["files"] = [store.put("w/c.0.0", content)]


@case("compressor: a setting names another", "cannot decompress")
def _(store: Store) -> None:
    content = pickle.dumps(_Runs())
    store.describe("w", codecs=[BYTES, {"name": "zstd", "configuration": {"id": "pickle"}}])
    store.array("w")["files"] = [store.put("w/c.0.0", content)]


@case("codecs: an order of another type", "does not permute|unexpected|invalid|expected")
def _(store: Store) -> None:
    turn = {"name": "transpose", "configuration": {"order": {"a": "b"}}}
    store.describe("w", codecs=[turn, BYTES])


@case("document: of an array that is a group", "no document describes")
def _(store: Store) -> None:
    store.described["w"] = {"node_type": "group", "zarr_format": 3, "attributes": {}}


@case("path: out of the store", "leads out of the store")
def _(store: Store) -> None:
    store.described["../../elsewhere"] = copy.deepcopy(store.described["w"])


@case("path: of an array in the parent directory", "no document describes an array '../w'")
def _(store: Store) -> None:
    store.array("w")["path"] = "../w"


# --- fields


def _field(name: str, told: str, change: Case) -> None:
    """Add a case of a field of the store's document that does not fit."""
    CASES[f"field: {name}"] = (f"a.0/{ROOT_DOCUMENT} .*({told})", change)


def _turn(store: Store, order: list[int]) -> None:
    turn = {"name": "transpose", "configuration": {"order": order}}
    store.described["w"]["codecs"].insert(0, turn)


def _own(store: Store, path: str) -> Any:
    return store.described[path]["attributes"]["/jobrunner"]


for _name, (_told, _change) in {
    "chunks below zero": (r"`int` >= 1", lambda it: it.describe("w", chunk_shape=[-3, 4])),
    "chunks of one axis": ("has 1 axes", lambda it: it.describe("w", chunk_shape=[12])),
    "shape of text": (r"`int`, got", lambda it: it.described["w"].update(shape=["3", 4])),
    "order of one axis": ("does not permute 2 axes", lambda it: _turn(it, [0, 0])),
    "no path": (r"length >= 1.*path", lambda it: it.array("w").update(path="")),
    "digest of text": (r"files\[0\]\[1\]", lambda it: it.array("w").update(files=[[96, "x"]])),
    "chunk too long": ("97 bytes", lambda it: it.array("w").update(files=[[97, "0" * 32]])),
    "unknown": ("unknown field `more`", lambda it: it.array("w").update(more=1)),
    "no dtype": ("field `dtype`", lambda it: _own(it, "w").pop("dtype")),
    "epoch below zero": ("epoch|position|-1", lambda it: it.entry.update(epoch=-1)),
    "array not there": ("array", lambda it: it.set_value({"$": "array", "of": 9})),
}.items():
    _field(_name, _told, _change)
for _place in ([0, -1], [-1, 0], [0, LEAST_ALIKE], [9, 0], [0], "x"):
    _field(
        f"row at {_place}",
        "",
        lambda store, place=_place: store.entry["blobs"]["row3"].update(arrays=[place]),
    )


# --- sizes


@case("chunk: shorter than its array", "a file has 8 bytes, and its chunk 96")
def _(store: Store) -> None:
    store.array("w")["files"] = [store.put("w/c.0.0", bytes(8))]


@case("chunk: compressed, of another size", "cannot decompress")
def _(store: Store) -> None:
    from numcodecs import Zstd

    store.describe("w", codecs=[BYTES, ZSTD])
    store.array("w")["files"] = [store.put("w/c.0.0", bytes(Zstd(1).encode(bytes(104))))]


@case("file: longer than it says", "expected 96 bytes, found 1099511627776")
def _(store: Store) -> None:
    os.truncate(store.root / "w/c.0.0", 1 << 40)


@case("file: shorter than it says, and long", "expected 1099511627776 bytes, found 96|memory")
def _(store: Store) -> None:
    store.describe("w", shape=[1 << 37])
    store.array("w")["files"] = [[1 << 40, "0" * 32]]
    store.put("w/c.0", bytes(96))


@case("shape: no items, and long axes", "")
def _(store: Store) -> None:
    store.describe("w", shape=[1 << 33, 0], chunk_shape=[1, 1])
    store.array("w")["files"] = []


@case("shape: a product that overflows", "an array of shape .* does not fit into memory")
def _(store: Store) -> None:
    store.describe("w", shape=[0, 1 << 62, 1 << 62], chunk_shape=[1, 1, 1])
    store.array("w")["files"] = []


@case("shape: chunks of 1", "expected 8589934592 files, found 1")
def _(store: Store) -> None:
    store.describe("w", shape=[1 << 33], chunk_shape=[1])


@case("shape: of a compressed array, beyond what its file can hold", "a file has .* and its chunk")
def _(store: Store) -> None:
    store.describe("w", shape=[1 << 40], codecs=[BYTES, ZSTD])
    store.array("w")["files"] = [store.put("w/c.0", _zstd_bomb(100)[:30])]


@case("shape: of many compressed arrays, beyond the memory", "this machine has|not fit into memory")
def _(store: Store) -> None:
    entries = []
    for i in range(64):
        codecs = [BYTES, ZSTD]
        entry = store.make_array(f"t/{i}", b"", dtype="<f8", shape=[1 << 28], codecs=codecs)
        os.truncate(store.root / f"t/{i}/c.0", 1 << 16)
        entries.append({**entry, "files": [[1 << 16, "0" * 32]]})
    tree = [{"$": "array", "of": i} for i in range(64)]
    store.entry["blobs"]["t"] = {"tree": tree, "arrays": entries}


@case("dtype: zero bytes", "never of the dtype|`dtype`")
def _(store: Store) -> None:
    store.describe("w", dtype="|V0", shape=[1 << 50])
    store.array("w")["files"] = [store.put("w/c.0", b"")]


@case("dtype: one that this platform lacks", "is whole, but this platform lacks its dtype")
def _(store: Store) -> None:
    store.describe("w", dtype="<f32")


@case("dtype: more than one in a string", "is not the dtype|`dtype`")
def _(store: Store) -> None:
    store.describe("w", dtype="i4,f4")


@case("item axis: there is none", "one chunk|a file has")
def _(store: Store) -> None:
    store.describe("w", chunk_shape=[3, 2])
    store.described["w"]["attributes"]["/jobrunner"]["item_axis"] = True


@case("dtype: a subarray of strings", "dtype")
def _(store: Store) -> None:
    store.describe("w", dtype=[["a", STRING, [1]]])


@case("dtype: too many fields", "more than .* fields")
def _(store: Store) -> None:
    store.describe("w", dtype=[[f"f{i}", "|u1"] for i in range(MOST_FIELDS + 1)])


@case("dtype: an item larger than any memory", "too large|dtype")
def _(store: Store) -> None:
    store.describe("w", dtype=[["a", [["b", "<f8", [1 << 20]]], [1 << 29]]])


@case("dtype: nested deep", "nested|a file has")
def _(store: Store) -> None:
    dtype: Any = "|u1"
    for _ in range(300):
        dtype = [["a", dtype]]
    store.describe("w", dtype=dtype)


@case("dtype: an object", "is not the dtype")
def _(store: Store) -> None:
    store.describe("w", dtype="|O8")


@case("twice: an array", "there twice")
def _(store: Store) -> None:
    entry = store.array("w")
    tree = [{"$": "array", "of": i} for i in range(9)]
    store.entry["blobs"]["w"] = {"tree": tree, "arrays": [entry] * 9}


@case("twice: a row of a stack", "there twice")
def _(store: Store) -> None:
    for i in range(LEAST_ALIKE):
        store.entry["blobs"][f"row{i}"]["arrays"] = [[0, 0]]


@case("stack: of strings", "does not hold 256 texts")
def _(store: Store) -> None:
    store.describe(store.entry["stacks"][0]["path"], dtype=STRING)


@case("stack: of several chunks", "is not one chunk of rows")
def _(store: Store) -> None:
    path = store.entry["stacks"][0]["path"]
    store.describe(path, chunk_shape=[LEAST_ALIKE // 2, 4])
    store.entry["stacks"][0]["files"] *= 2
    half = [LEAST_ALIKE * 16, "0" * 32]
    store.entry["stacks"][0]["files"] = [half, half]


@case("record: a blob that its own node borrows", "")
def _(store: Store) -> None:
    store.details["replicated"] = {"x": ["a", "a"]}


# --- bombs

BOMB_BYTES = 8 * GIB


def _zstd_bomb(says: int = BOMB_BYTES) -> bytes:
    """Blocks of 128 KiB of zeros, 4 bytes each, after a header that says any size."""
    block = (1 << 20) | 2  # size << 3 | a repeated byte << 1
    blocks = struct.pack("<I", block)[:3] + b"\0"
    last = struct.pack("<I", block | 1)[:3] + b"\0"
    head = b"\x28\xb5\x2f\xfd\xc0\x58" + struct.pack("<Q", says)
    return head + blocks * ((BOMB_BYTES >> 17) - 1) + last


for _name, _says in {"": BOMB_BYTES, ", lies": 96}.items():

    @case(f"bomb: zstd{_name}", "cannot decompress")
    def _(store: Store, says: int = _says) -> None:
        store.describe("w", codecs=[BYTES, ZSTD])
        store.array("w")["files"] = [store.put("w/c.0.0", _zstd_bomb(says))]

    @case(f"bomb: texts, zstd{_name}", "does not hold 3 texts")
    def _(store: Store, says: int = _says) -> None:
        codecs = [{"name": "vlen-utf8"}, ZSTD]
        entry = store.make_array("w", _zstd_bomb(says), dtype=STRING, shape=[3], codecs=codecs)
        store.entry["blobs"]["w"] = {"tree": LONE_ARRAY, "arrays": [entry]}


@case("bomb: nested 100,000 levels deep", "nested too deep")
def _(store: Store) -> None:
    store.text = json.dumps(store.entry).replace('"deep"', "[" * 100_000 + "]" * 100_000)


# --- values

TEXT = b"\1\0\0\0" + struct.pack("<I", 100) + b"x" * 100
OF_STRINGS = {"dtype": STRING, "shape": [1]}
HUGE = "f" * 1_000_000


def _node(kind: str, content: Any) -> dict[str, Any]:
    return {"$": kind, "of": content}


ARRAY = _node("array", 0)
ADDRESSES = _node("objects", [[1], ["a"]])
ENDLESS = _node("range", [0, 10**15, 1])


def _endless() -> dict[str, Any]:
    return _node("pandas.Index", {"range": [0, 10**15, 1], "name": None})


def _laughs(rows: int = 50) -> list[Any]:
    """Lists of two lists, both the one before: 2**50 in all."""
    # Of the containers, 0 is the outer list, 1 the first row; each other row is three of them.
    numbers = [1, *range(2, 3 * rows, 3)]
    return [[], *([_node("same", number), _node("same", number)] for number in numbers)]


def _extension(**parts: Any) -> dict[str, Any]:
    return _node("pandas.api.extensions.ExtensionArray", parts)


value(
    "memory: bytes of an array of strings",
    "expected uint8",
    _node("bytes", 0),
    x=(TEXT, OF_STRINGS),
)
value("memory: a scalar of strings", "no scalar of", _node("scalar", ["string", "00" * 16]))
value(
    "memory: addresses in a tensor",
    "cannot make|cannot be imported",
    _node(
        "torch.Tensor",
        {"data": ADDRESSES, "dtype": "int64", "requires_grad": False, "parameter": False},
    ),
)
value(
    "tree: deep",
    "nested|no tree",
    _node("json", 0),
    x=(b"[" * 9999 + b"]" * 9999, {"dtype": "|u1", "shape": [19998]}),
)
value("same: laughs", "", _laughs)
value("deep: lists", "nested|Invalid|invalid", lambda: json.loads("[" * 700 + "]" * 700))
value(
    "deep: codecs",
    "nested|Invalid|invalid",
    lambda: json.loads('{"$":"frozenset","of":[' * 300 + "]}" * 300),
)
value("long: an int", "", _node("int", HUGE))
value(
    "long: a seed",
    "bits",
    _node("np.SeedSequence", [_node("int", HUGE), _node("tuple", []), 4, 0]),
)
value("endless: a set of a range", "expected list", _node("set", ENDLESS))
value("endless: objects", "reshape|shape|objects", _node("objects", [[10**12], [1]]))
value("endless: a range", "", ENDLESS)
value("endless: a deque's maxlen", "deque", _node("deque", [_node("int", "1"), 1 << 62]))
value("zone: a directory", "zone|cannot be decoded", _node("zone", "Europe"))
value("endless: an index", "", _endless)
value(
    "endless: categories",
    "too long",
    lambda: _extension(kind="categorical", values=ARRAY, categories=_endless(), ordered=False),
    x=(b"\0", {"dtype": "|i1"}),
)
value(
    "endless: a variable",
    "expected an array",
    _node(
        "xarray.DataArray",
        {"name": "x", "data": {"dims": ["x"], "data": ENDLESS, "attrs": {}}, "coords": {}},
    ),
)

# --- running them


def _save(path: Path) -> None:
    manager = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
    manager.run.start(["a"], {})
    workspace = Workspace("a")
    compressed = ArrayOptions((ZSTD,), (14, 18))
    workspace.globals.update(
        {
            "w": np.arange(12.0).reshape(3, 4),
            "z": np.zeros((40, 40)),
            "s": ["deep"],
            "t": {"a": [1, (2, np.arange(5))], "b": bytes(2000)},
            **{f"row{i}": np.arange(4.0) + i for i in range(LEAST_ALIKE)},
        }
    )
    save_epoch(manager, Position(0), {"a": workspace}, options={"a": {"z": compressed}})
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
    yield "diff", command("diff", str(path), str(path))
    yield "lazy", lazy
    yield "part", lambda: reader.load_slice("w", 0, 1, 2)
    yield "copy", lambda: _copy(path)


def _copy(path: Path) -> None:
    """Copy the epoch to a directory: nothing may be written beside it."""
    copies = path.with_name("copies")
    try:
        copy_epoch(Directory(path, files=PosixFiles()), Position(0), str(copies / "one"))
    finally:
        left = os.listdir(copies) if copies.exists() else []
        shutil.rmtree(copies, ignore_errors=True)
    assert set(left) <= {"one"}, left


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10


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

    pickles.ALLOW_UNSAFE_PICKLE_DECODE = True  # as older versions do
    path = Path("k").absolute()
    _save(path)
    for _, call in _ways(
        path, hashlib.sha256((path / "a.0" / ROOT_DOCUMENT).read_bytes()).hexdigest()
    ):
        call()  # imports everything
    with suppress(ImportError):
        importlib.import_module("torch")  # but this, of which no value was saved
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + SPARE_BYTES, -1))
    commit = path / "_log" / "0000000002.json"
    before = {it: it.read_bytes() for it in path.glob("**/*") if it.is_file()}
    found: dict[str, Any] = {}
    signal.signal(signal.SIGALRM, _end)
    for name in names:
        print(name, file=sys.stderr, flush=True)
        store: Any = _Store(path / "a.0")
        store.text, store.details = None, {}
        CASES[name][1](store)
        data = store.write()
        entry = decode_entry(before[commit], 2, str(commit))
        digest = hashlib.sha256(data).hexdigest()
        record = entry["records"][0]
        record["stores"]["a"]["sha256"] = digest
        record["details"] = {**record.get("details", {}), **store.details}
        commit.write_bytes(encode_entry(entry))
        del data, store
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
