"""A reader of checkpoint directories, written from docs/format.md: it imports nothing of jobrunner."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import re
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numcodecs
import numpy as np
import xxhash

OTHER_ENTRIES = ("run", "claim", "done", "end", "lost")
AS_STORED = (
    *("state", "codec", "instance", "pickle", "time", "datetime", "decimal", "defaultdict"),
    *("OrderedDict", "Counter", "range", "timezone", "zone", "uuid", "PurePosixPath"),
    *("PureWindowsPath", "PosixPath", "WindowsPath", "random", "objects", "np.str_", "np.bytes_"),
    *("np.Generator", "np.BitGenerator", "np.SeedSequence", "np.RandomState"),
)
"""Kinds of values that this reader shows as they are stored."""


class RefusedError(Exception):
    """The directory is not as its format says."""


@dataclass
class Found:
    """What is in a directory, and the blobs of one epoch."""

    pins: dict[Any, set[str]]
    """By recorded epoch, in their order."""
    epoch: Any
    nodes: dict[str, dict[str, Any]]


def read(directory: Path, epoch: Any = None) -> Found:
    """Read an epoch, or the newest."""
    recorded = replay(read_log(directory))
    epochs = sorted(recorded, key=position)
    need(bool(epochs), "there is no epoch")
    epoch = epochs[-1] if epoch is None else epoch
    need(epoch in recorded, f"there is no epoch {epoch}")
    nodes = {
        node: read_store(directory, node, reference)
        for node, reference in recorded[epoch].stores.items()
    }
    return Found({at: recorded[at].pins for at in epochs}, epoch, nodes)


def need(condition: bool, message: str) -> None:
    """Refuse the directory unless the condition holds."""
    if not condition:
        raise RefusedError(message)


def parse(text: bytes) -> Any:
    """Parse JSON, of which no object has a key twice."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(pairs)) == len(pairs), "an object has a key twice")
        return dict(pairs)

    return json.loads(text.decode(), object_pairs_hook=distinct)


# The log


def read_log(directory: Path) -> list[Any]:
    names = [file.name for file in (directory / "_log").iterdir()]
    names = sorted(
        (n for n in names if re.fullmatch(r"[0-9]{10,}\.json", n)), key=lambda n: int(n[:-5])
    )
    entries = []
    for number, name in enumerate(names):
        content = (directory / "_log" / name).read_bytes()
        text = content[85:-2]
        digest = hashlib.sha256(text).hexdigest()
        need(name == f"{number:010}.json", f"the log lacks entry {number}")
        frame = b'{"sha256":"%s","entry":%s}\n' % (digest.encode(), text)
        need(content == frame, f"{name} does not have its SHA-256")
        entry = parse(text)
        need((entry["format"], entry["number"]) == (1, number), f"{name} is another entry")
        entries.append(entry)
    return entries


def position(epoch: Any) -> tuple[int, int]:
    """Steps after whole epochs."""
    whole, _, steps = str(epoch).partition(".s")
    return int(whole), int(steps or 0)


@dataclass
class Recorded:
    """An epoch that counts."""

    stores: dict[str, Any]
    pins: set[str]


def replay(entries: Sequence[Any]) -> dict[Any, Recorded]:
    """What all entries of a log say together."""
    recorded: dict[Any, Recorded] = {}
    is_lost = is_repair = False

    def retire(epochs: Sequence[Any]) -> None:
        for epoch in epochs:
            if epoch in recorded and not recorded[epoch].pins:
                del recorded[epoch]

    for entry in entries:
        kind = entry["kind"]
        if kind == "commit":
            for record in entry["records"]:
                if record["stores"] is not None:
                    before = recorded.get(record["at"], Recorded({}, set()))
                    recorded[record["at"]] = Recorded(record["stores"], before.pins)
            retire(entry.get("retires") or ())
        elif kind == "retire":
            retire(entry["epochs"])
        elif kind == "rewind" and "only" in entry:
            recorded.pop(entry["only"], None)
        elif kind == "rewind":
            after = entry.get("after")
            kept = (-1, 0) if after is None else position(after)
            recorded = {at: one for at, one in recorded.items() if position(at) <= kept}
        elif kind in ("pin", "unpin") and entry["epoch"] in recorded:
            pins = recorded[entry["epoch"]].pins
            changed = set(pins) if entry["label"] is None else {entry["label"]}
            (pins.update if kind == "pin" else pins.difference_update)(changed)
        else:
            need(kind in ("pin", "unpin", *OTHER_ENTRIES), f"the kind of entry {kind} is unknown")
        if kind == "run":
            is_repair = entry.get("is_repair") is True
        is_lost = kind == "lost" or (is_lost and not (kind == "end" and is_repair))
    need(not is_lost, "entries of the log were lost, and no run has repaired it")
    return recorded


# Stores and arrays


def read_store(directory: Path, node: str, reference: Any) -> dict[str, Any]:
    store = directory / reference["name"]
    content = (store / "zarr.json").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    need(digest == reference["sha256"], f"{store.name}/zarr.json does not have its SHA-256")
    document = parse(content)
    entry = document["attributes"]["/jobrunner"]
    need((entry["format"], entry["node"]) == (1, node), f"{store.name} is another store")
    own = entry["sha256"].encode()
    own_digest = hashlib.sha256(content.replace(own, b"0" * 64)).hexdigest()
    need(own_digest == entry["sha256"], f"{store.name}/zarr.json does not have its own SHA-256")
    documents = document["consolidated_metadata"]["metadata"]

    def array(item: Any) -> Any:
        if isinstance(item, dict):
            return read_array(store, documents[item["path"]], item)
        stack, row = item
        return array(entry["stacks"][stack])[row]

    return {
        name: Tree(lambda i, blob=blob: array(blob["arrays"][i])).whole(blob["tree"])  # type: ignore[misc]
        for name, blob in entry["blobs"].items()
    }


def read_array(store: Path, document: Any, item: Any) -> Any:
    about = document["attributes"]["/jobrunner"]
    codecs = {codec["name"]: codec.get("configuration") for codec in document["codecs"]}
    need(codecs.keys() <= {"transpose", "bytes", "vlen-utf8", "zstd"}, "a codec is unknown")
    shape, chunk = document["shape"], document["chunk_grid"]["configuration"]["chunk_shape"]
    axes = codecs["transpose"]["order"] if "transpose" in codecs else list(range(len(shape)))
    if about.get("item_axis"):
        shape, chunk, axes = shape[:-1], chunk[:-1], axes[:-1]
    dtype = dtype_of(about["dtype"])
    # From here on, axes are in their order in memory.
    lengths, steps = [shape[axis] for axis in axes], [chunk[axis] for axis in axes]
    data = np.empty(lengths, dtype)
    grid = product(*(range(0, length, step) for length, step in zip(lengths, steps, strict=True)))
    for corner, (size, digest) in zip(grid, item["files"], strict=True):
        places = [corner[axes.index(axis)] // chunk[axis] for axis in range(len(axes))]
        places += [0] if about.get("item_axis") else []
        name = ".".join(map(str, ["c", *places]))
        content = (store / item["path"] / name).read_bytes()
        is_whole = (len(content), xxhash.xxh3_128_hexdigest(content)) == (size, digest)
        need(is_whole, f"{item['path']}/{name} does not have its XXH3")
        raw = numcodecs.Zstd().decode(content) if "zstd" in codecs else content
        items = texts(raw) if about["dtype"] == "string" else np.frombuffer(raw, dtype)
        region = tuple(
            slice(start, start + step) for start, step in zip(corner, steps, strict=True)
        )
        inside = tuple(map(slice, data[region].shape))
        data[region] = items.reshape(steps)[inside]
    return data.transpose(np.argsort(axes)) if axes else data


def dtype_of(text: Any) -> Any:
    """A dtype of NumPy, from its text or the list of its fields."""
    if text == "string":
        return np.dtypes.StringDType()
    if isinstance(text, str):
        return np.dtype(getattr(ml_dtypes, text, text))
    fields = []
    for name, part, *more in text:
        inner = part if isinstance(part, str) else np.lib.format.dtype_to_descr(dtype_of(part))
        fields.append((tuple(name) if isinstance(name, list) else name, inner, *map(tuple, more)))
    return np.lib.format.descr_to_dtype(fields)


def texts(raw: bytes) -> Any:
    """The strings of a chunk, each after its length."""
    (count,), at = struct.unpack_from("<I", raw), 4
    items = []
    for _ in range(count):
        (length,) = struct.unpack_from("<I", raw, at)
        items.append(raw[at + 4 : at + 4 + length].decode())
        at += 4 + length
    need(at == len(raw), "a chunk of strings has more bytes")
    return np.array(items, np.dtypes.StringDType())


# Trees


class Tree:
    """Makes the value of a blob; numbers lists and objects in the order in which they begin."""

    def __init__(self, array: Callable[[int], Any]) -> None:
        self.array = array
        self.values: dict[int, Any] = {}
        self.count = 0

    def whole(self, tree: Any) -> Any:
        """The value of the whole tree of a blob."""
        if isinstance(tree, dict) and tree.get("$") == "json":
            tree = parse(self.array(tree["of"]).tobytes())
        return self.value(tree)

    def value(self, tree: Any) -> Any:
        """The value of a part of a tree."""
        if not isinstance(tree, list | dict):
            return tree
        number = self.count
        self.count += 1
        value: Any
        if isinstance(tree, list):
            value = [self.value(item) for item in tree]
        else:
            value = {key: self.value(item) for key, item in tree.items()}
            if "$" in value:
                need(value.keys() == {"$", "of"}, "a node has other fields beside `$` and `of`")
                value = self.special(value["$"], value["of"])
        self.values[number] = value
        return value

    def special(self, kind: str, of: Any) -> Any:
        """What JSON lacks."""
        match kind:
            case "array":
                return self.array(of)
            case "same":
                return self.values[of]
            case "numbers":
                return self.array(of).tolist()
            case "tuple":
                return tuple(of)
            case "dict":
                return dict(zip(*of, strict=True))
            case "int":
                return int(of, 16)
            case "float":
                return struct.unpack(">d", bytes.fromhex(of))[0]
            case "str":
                return bytes.fromhex(of).decode(errors="surrogatepass")
            case "bytes":
                return bytes.fromhex(of) if isinstance(of, str) else self.array(of).tobytes()
            case "set" | "frozenset":
                return {"set": set, "frozenset": frozenset}[kind](of)
            case "deque":
                return deque(*of)
            case "bytearray":
                return bytearray(of)
            case "date":
                return dt.date.fromisoformat(of)
            case "timedelta":
                return dt.timedelta(*of)
            case "complex":
                return complex(*of)
            case "scalar":
                return np.frombuffer(bytes.fromhex(of[1]), dtype_of(of[0]))[0]
        is_known = kind in AS_STORED or kind.split(".")[0] in [
            "torch",
            "scipy",
            "pandas",
            "xarray",
            "jax",
        ]
        need(is_known, f"the kind of value {kind} is unknown")
        return kind, of
