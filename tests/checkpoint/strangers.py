"""A program that reads stores which a stranger made, one for each case, in every way there is.

``python -m tests.checkpoint.strangers`` prints for each case and each way how it ended, and what
time and memory it took. Digests are right everywhere, as an attacker would have them.
"""

from __future__ import annotations

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
from numcodecs import Zstd

from jobrunner import MultiNodeCheckpointManager
from jobrunner.checkpoint import Directory, copy_epoch
from jobrunner.checkpoint.encoding.dtypes import MOST_FIELDS
from jobrunner.checkpoint.log.handler import decode_entry, encode_entry
from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.checkpoint.store.document import ROOT_DOCUMENT
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
BOMB_BYTES = 8 * GIB
SPARE_BYTES = 4 * GIB
"""What the program may take, so that a failure does not harm the machine."""
MOST_SECONDS = 10
NO_DIGEST = "0" * 32

GROUP = {"node_type": "group", "zarr_format": 3, "attributes": {}}
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
ZSTD = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
TEXTS = {"name": "vlen-utf8"}
STRING = "string"


class Store:
    """The store to be changed: its document, and its files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.document = json.loads((root / ROOT_DOCUMENT).read_bytes())
        self.entry = self.document["attributes"]["/jobrunner"]
        self.described = self.document["consolidated_metadata"]["metadata"]
        self.array = self.entry["blobs"]["w"]["arrays"][0]
        self.own = self.described["w"]["attributes"]["/jobrunner"]
        self.stack = self.entry["stacks"][0]
        self.deep = '"deep"'
        """JSON, in the place of a text in a blob."""
        self.details: dict[str, Any] = {}
        """What is added to the record of the epoch."""

    def describe(
        self,
        path: str,
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
        """Write a file; returns its size and digest."""
        (self.root / path).parent.mkdir(exist_ok=True, parents=True)
        (self.root / path).write_bytes(data)
        return [len(data), xxhash.xxh3_128_hexdigest(data)]

    def put_chunk(self, path: str, data: bytes) -> dict[str, Any]:
        """Write the only chunk of an array that is described; returns the array's files."""
        axes = len(self.described[path]["shape"])
        return {"path": path, "files": [self.put(f"{path}/c{'.0' * axes}", data)]}

    def add_blob(self, tree: Any, **arrays: tuple[bytes, dict[str, Any]]) -> None:
        """Add a blob of this tree and these arrays, each its chunk and its description."""
        self.described["t"] = GROUP
        found = []
        for name, (data, description) in arrays.items():
            self.described[f"t/{name}"] = json.loads(json.dumps(self.described["w"]))
            defaults = {"dtype": "|u1", "shape": [len(data)], "codecs": [BYTES]}
            self.describe(f"t/{name}", **{**defaults, **description})
            found.append(self.put_chunk(f"t/{name}", data))
        self.entry["blobs"]["t"] = {"tree": tree, "arrays": found}

    def write(self) -> str:
        """Write all documents; returns the digest of the root's."""
        for path, document in self.described.items():
            self.put(f"{path}/{ROOT_DOCUMENT}", json.dumps(document).encode())
        content = json.dumps(self.document).replace('"deep"', self.deep).encode()
        self.put(ROOT_DOCUMENT, content)
        return hashlib.sha256(content).hexdigest()


Change = Callable[[Store], object]


def forge(chunk: bytes | None = None, files: Any = None, **description: Any) -> Change:
    """Another array in the place of one that was saved: its description, its only chunk."""

    def change(store: Store) -> None:
        store.describe("w", **description)
        if chunk is not None:
            store.array.update(store.put_chunk("w", chunk))
        if files is not None:
            store.array["files"] = files

    return change


def transpose(order: Any) -> Change:
    codec = {"name": "transpose", "configuration": {"order": order}}
    return lambda store: store.described["w"]["codecs"].insert(0, codec)


def nest(opening: str, closing: str, levels: int) -> Change:
    return lambda store: setattr(store, "deep", opening * levels + closing * levels)


def blob(tree: Any, **arrays: tuple[bytes, dict[str, Any]]) -> Change:
    return lambda store: store.add_blob(tree, **arrays)


def node(kind: str, content: Any) -> dict[str, Any]:
    return {"$": kind, "of": content}


def row(place: Any) -> Change:
    return lambda store: store.entry["blobs"]["row3"].update(arrays=[place])


def zstd_bomb(nbytes_said: int = BOMB_BYTES) -> bytes:
    """Blocks of 128 KiB of zeros, 4 bytes each, after a header that says any size."""
    block = (1 << 20) | 2  # size << 3 | a repeated byte << 1
    blocks = struct.pack("<I", block)[:3] + b"\0"
    last = struct.pack("<I", block | 1)[:3] + b"\0"
    head = b"\x28\xb5\x2f\xfd\xc0\x58" + struct.pack("<Q", nbytes_said)
    return head + blocks * ((BOMB_BYTES >> 17) - 1) + last


def fill_memory(store: Store) -> None:
    """Each array could be in memory, but not all of them."""
    large = {"dtype": "<f8", "codecs": [BYTES, ZSTD]}
    store.add_blob(
        [node("array", i) for i in range(64)], **{f"a{i}": (b"", large) for i in range(64)}
    )
    for i, array in enumerate(store.entry["blobs"]["t"]["arrays"]):
        store.describe(f"t/a{i}", shape=[1 << 28])
        os.truncate(store.root / f"t/a{i}/c.0", 1 << 16)
        array["files"] = [[1 << 16, NO_DIGEST]]


def use_array_again(store: Store) -> None:
    tree = [node("array", i) for i in range(9)]
    store.entry["blobs"]["w"] = {"tree": tree, "arrays": [store.array] * 9}


def use_row_again(store: Store) -> None:
    for i in range(LEAST_ALIKE):
        store.entry["blobs"][f"row{i}"]["arrays"] = [[0, 0]]


def cut_stack(store: Store) -> None:
    store.describe(store.stack["path"], chunk_shape=[LEAST_ALIKE // 2, 4])
    store.stack["files"] = [[LEAST_ALIKE * 16, NO_DIGEST]] * 2


def nested_dtype(levels: int) -> Any:
    dtype: Any = "|u1"
    for _ in range(levels):
        dtype = [["a", dtype]]
    return dtype


def laughs(rows: int = 50) -> list[Any]:
    """Lists of two lists, both the one before: 2**50 in all."""
    # Of the containers, 0 is the outer list, 1 the first row; each other row is three of them.
    numbers = [1, *range(2, 3 * rows, 3)]
    return [[], *([node("same", number), node("same", number)] for number in numbers)]


class Runs:
    """Makes a directory when it is unpickled."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("ran",))


PICKLE = {"name": "numcodecs.pickle", "configuration": {}}
HUGE_INT = node("int", "f" * 1_000_000)
ENDLESS = node("range", [0, 10**15, 1])
ENDLESS_INDEX = node("pandas.Index", {"range": [0, 10**15, 1], "name": None})
ADDRESSES = node("objects", [[1], ["a"]])
TENSOR = {"data": ADDRESSES, "dtype": "int64", "requires_grad": False, "parameter": False}
CATEGORIES = {"values": node("array", 0), "categories": ENDLESS_INDEX, "ordered": False}
ENDLESS_VARIABLE = {"dims": ["x"], "data": ENDLESS, "attrs": {}}
ONE_TEXT = b"\1\0\0\0" + struct.pack("<I", 100) + b"x" * 100

CASES: dict[str, tuple[str, Change]] = {
    # By name: what must be told of it (empty: it may be read), and what makes the store so.
    "codec: runs code": ("unexpected codecs", forge(pickle.dumps(Runs()), codecs=[BYTES, PICKLE])),
    "codec: an order that is a dict": ("does not permute", transpose({"a": "b"})),
    "codec: an order of one axis": ("does not permute 2 axes", transpose([0, 0])),
    "document: of a group": ("no document describes", lambda it: it.described.update(w=GROUP)),
    "path: out of the store": ("leads out", lambda it: it.described.update({"../../e": GROUP})),
    "path: in the parent": ("describes .*'../w'", lambda it: it.array.update(path="../w")),
    "path: none": (r"length >= 1.*path", lambda it: it.array.update(path="")),
    "field: unknown": ("unknown field `more`", lambda it: it.array.update(more=1)),
    "field: missing": ("field `dtype`", lambda it: it.own.pop("dtype")),
    "field: a digest of text": (r"files\[0\]\[1\]", forge(files=[[96, "x"]])),
    "field: an epoch below zero": ("-1", lambda it: it.entry.update(epoch=-1)),
    "field: an array of a tree": ("array", blob(node("array", 9))),
    "row: of a stack below zero": ("-1|>= 0", row([-1, 0])),
    "row: below zero": ("-1|>= 0", row([0, -1])),
    "row: after the last": ("no stack has a row", row([0, LEAST_ALIKE])),
    "row: of no stack": ("no stack has a row", row([9, 0])),
    "row: a text": ("got `str`", row("x")),
    "shape: of text": (r"`int`, got", lambda it: it.described["w"].update(shape=["3", 4])),
    "shape: no items, and long axes": ("", forge(files=[], shape=[1 << 33, 0], chunk_shape=[1, 1])),
    "shape: a product that overflows": (
        "an array of shape .* does not fit into memory",
        forge(files=[], shape=[0, 1 << 62, 1 << 62], chunk_shape=[1, 1, 1]),
    ),
    "shape: compressed, beyond what its file can hold": (
        "a file has .* and its chunk",
        forge(zstd_bomb(100)[:30], shape=[1 << 40], codecs=[BYTES, ZSTD]),
    ),
    "shape: of many compressed arrays": ("this machine has|not fit into memory", fill_memory),
    "chunks: below zero": (r"`int` >= 1", forge(chunk_shape=[-3, 4])),
    "chunks: of one axis": ("has 1 axes", forge(chunk_shape=[12])),
    "chunks: very many": ("8589934592 files, found 1", forge(shape=[1 << 33], chunk_shape=[1])),
    "chunk: too short": ("a file has 8 bytes, and its chunk 96", forge(bytes(8))),
    "chunk: too long": ("a file has 97 bytes", forge(files=[[97, NO_DIGEST]])),
    "chunk: compressed, of another size": (
        "cannot decompress",
        forge(bytes(Zstd(1).encode(bytes(104))), codecs=[BYTES, ZSTD]),
    ),
    "file: longer than it says": (
        "expected 96 bytes, found 1099511627776",
        lambda it: os.truncate(it.root / "w/c.0.0", 1 << 40),
    ),
    "file: shorter than it says, and long": (
        "expected 1099511627776 bytes, found 96|memory",
        forge(bytes(96), files=[[1 << 40, NO_DIGEST]], shape=[1 << 37]),
    ),
    "dtype: zero bytes": ("never of the dtype|`dtype`", forge(b"", dtype="|V0", shape=[1 << 50])),
    "dtype: this platform lacks it": ("whole, but this platform lacks", forge(dtype="<f32")),
    "dtype: two in a string": ("is not the dtype|`dtype`", forge(dtype="i4,f4")),
    "dtype: a subarray of strings": ("dtype", forge(dtype=[["a", STRING, [1]]])),
    "dtype: too many fields": (
        "more than .* fields",
        forge(dtype=[[f"f{i}", "|u1"] for i in range(MOST_FIELDS + 1)]),
    ),
    "dtype: an item larger than any memory": (
        "too large|dtype",
        forge(dtype=[["a", [["b", "<f8", [1 << 20]]], [1 << 29]]]),
    ),
    "dtype: nested deep": ("nested|a file has", forge(dtype=nested_dtype(300))),
    "dtype: an object": ("is not the dtype", forge(dtype="|O8")),
    "dtype: no item axis": ("one chunk|a file has", lambda it: it.own.update(item_axis=True)),
    "twice: an array": ("there twice", use_array_again),
    "twice: a row of a stack": ("there twice", use_row_again),
    "stack: of strings": (
        "does not hold 256 texts",
        lambda it: it.describe(it.stack["path"], dtype=STRING),
    ),
    "stack: of several chunks": ("is not one chunk of rows", cut_stack),
    "record: a blob that its own node borrows": (
        "",
        lambda it: it.details.update(replicated={"x": ["a", "a"]}),
    ),
    "bomb: zstd": ("cannot decompress", forge(zstd_bomb(), codecs=[BYTES, ZSTD])),
    "bomb: zstd, lies": ("cannot decompress", forge(zstd_bomb(96), codecs=[BYTES, ZSTD])),
    "bomb: texts": (
        "does not hold 12 texts",
        forge(zstd_bomb(), dtype=STRING, codecs=[TEXTS, ZSTD]),
    ),
    "bomb: texts, lies": (
        "does not hold 12 texts",
        forge(zstd_bomb(96), dtype=STRING, codecs=[TEXTS, ZSTD]),
    ),
    "nested: 100,000 levels": ("nested too deep", nest("[", "]", 100_000)),
    "nested: lists": ("nested|Invalid|invalid", nest("[", "]", 700)),
    "nested: codecs": ("nested|Invalid|invalid", nest('{"$":"frozenset","of":[', "]}", 300)),
    "nested: JSON in bytes": (
        "nested|no tree",
        blob(node("json", 0), x=(b"[" * 9999 + b"]" * 9999, {})),
    ),
    "memory: bytes of an array of strings": (
        "expected uint8",
        blob(node("bytes", 0), x=(ONE_TEXT, {"dtype": STRING, "shape": [1]})),
    ),
    "memory: a scalar of strings": ("no scalar of", blob(node("scalar", ["string", "00" * 16]))),
    "memory: addresses in a tensor": (
        "cannot make|cannot be imported",
        blob(node("torch.Tensor", TENSOR)),
    ),
    "endless: laughs": ("", blob(laughs())),
    "endless: an int": ("", blob(HUGE_INT)),
    "endless: a seed": (
        "bits",
        blob(node("np.SeedSequence", [HUGE_INT, node("tuple", []), 4, 0])),
    ),
    "endless: a range": ("", blob(ENDLESS)),
    "endless: a set of a range": ("expected list", blob(node("set", ENDLESS))),
    "endless: objects": ("reshape|shape|objects", blob(node("objects", [[10**12], [1]]))),
    "endless: a deque": ("deque", blob(node("deque", [node("int", "1"), 1 << 62]))),
    "endless: an index": ("", blob(ENDLESS_INDEX)),
    "endless: categories": (
        "too long",
        blob(
            node("pandas.api.extensions.ExtensionArray", {"kind": "categorical", **CATEGORIES}),
            x=(b"\0", {"dtype": "|i1"}),
        ),
    ),
    "endless: a variable": (
        "expected an array",
        blob(node("xarray.DataArray", {"name": "x", "data": ENDLESS_VARIABLE, "coords": {}})),
    ),
    "zone: a directory": ("zone|cannot be decoded", blob(node("zone", "Europe"))),
}

# --- running them


def save(path: Path) -> None:
    manager = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
    manager.run.start(["a"], {})
    workspace = Workspace("a")
    workspace.globals.update(
        {
            "w": np.arange(12.0).reshape(3, 4),
            "z": np.zeros((40, 40)),
            "s": ["deep"],
            "t": {"a": [1, (2, np.arange(5))], "b": bytes(2000)},
            **{f"row{i}": np.arange(4.0) + i for i in range(LEAST_ALIKE)},
        }
    )
    compressed = ArrayOptions((ZSTD,), (14, 18))
    save_epoch(manager, Position(0), {"a": workspace}, options={"a": {"z": compressed}})
    manager.run.end()


def record(path: Path, digest: str, details: dict[str, Any]) -> None:
    """Let the log speak of the store as it is now."""
    commit = path / "_log" / "0000000002.json"
    entry = decode_entry(commit.read_bytes(), 2, str(commit))
    [found] = entry["records"]
    found["stores"]["a"]["sha256"] = digest
    found["details"] = {**found.get("details", {}), **details}
    commit.write_bytes(encode_entry(entry))


def run_command(*arguments: object) -> None:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code:
        raise JobRunnerError(result.output)


def read_items(path: Path) -> None:
    """Read some items of each array that is not loaded."""
    for opened in MultiNodeCheckpointManager(path).open(0).values():
        for name in [name for name in opened if not name.startswith("row")]:
            value = opened[name]
            for item in value if isinstance(value, list) else [value]:
                if hasattr(item, "shape") and 0 not in item.shape:
                    is_short = math.prod(item.shape) < 1 << 20
                    item[... if is_short else (0,) * len(item.shape)]


def copy(path: Path) -> None:
    """Copy the epoch to a directory: nothing may be written beside it."""
    copies = path.with_name("copies")
    try:
        copy_epoch(Directory(path, files=FaultyFiles(sync=False)), Position(0), str(copies / "one"))
    finally:
        left = os.listdir(copies) if copies.exists() else []
        shutil.rmtree(copies, ignore_errors=True)
    assert set(left) <= {"one"}, left


def ways(path: Path, digest: str) -> Iterator[tuple[str, Callable[[], object]]]:
    reader = StoreReader(PosixFiles(), str(path), "a.0", digest)
    yield "load", reader.load
    yield "part", lambda: reader.load_slice("w", 0, 1, 2)
    yield "items", lambda: read_items(path)
    yield "info", lambda: run_command("info", path, "latest")
    yield "verify", lambda: run_command("verify", path, "--deep")
    yield "diff", lambda: run_command("diff", path, path)
    yield "copy", lambda: copy(path)


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10


def stop(*_: object) -> None:
    raise TimeoutError


def attempt(call: Callable[[], object]) -> dict[str, Any]:
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before, started = peak_bytes(), time.process_time()
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
    seconds = time.process_time() - started
    return {"told": told, "seconds": round(seconds, 2), "bytes": peak_bytes() - before}


def run() -> dict[str, Any]:
    """Run the cases; returns by name, and by way, how it ended."""
    whole, path = Path("whole").absolute(), Path("k").absolute()
    save(whole)
    digest = hashlib.sha256((whole / "a.0" / ROOT_DOCUMENT).read_bytes()).hexdigest()
    for _, call in ways(whole, digest):
        call()  # imports everything
    with suppress(ImportError):
        importlib.import_module("torch")  # but this, of which no value was saved
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + SPARE_BYTES, -1))
    signal.signal(signal.SIGALRM, stop)
    ends: dict[str, Any] = {}
    for name, (_, change) in CASES.items():
        print(name, file=sys.stderr, flush=True)
        shutil.copytree(whole, path)
        store = Store(path / "a.0")
        change(store)
        digest = store.write()
        record(path, digest, store.details)
        del store
        ends[name] = {way: attempt(call) for way, call in ways(path, digest)}
        ends[name]["ran"] = Path("ran").exists()
        shutil.rmtree(path)
    return ends


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, suppress(BrokenPipeError):
        os.chdir(directory)
        print(json.dumps(run(), indent=1))
