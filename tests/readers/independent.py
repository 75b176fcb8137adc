"""Reads checkpoint directories as docs/format.md describes them, with nothing but NumPy and xxhash."""

import hashlib
import itertools
import json
import re
import struct
from pathlib import Path

import numpy as np
import xxhash

OBJECTS = {"array", "bytearray", "dict", "numbers", "ragged", "records", "rows"}
ROWS = {"list": list, "tuple": tuple, "set": set}
"""Kinds of values with an identity, of those that this reader knows."""


def recorded(directory):
    """Epoch -> its record."""
    log = Path(directory, "_log")
    records, pins = {}, {}
    is_lost = False
    for number in range(len(list(log.glob("[0-9]*.json")))):
        entry = read_entry(log, number)
        given_up = []
        match entry:
            case {"kind": "commit"}:
                for record in entry["records"]:
                    if record["stores"] is not None:
                        records[record["at"]] = record
                        pins.pop(record["at"], None)
                given_up = [epoch for epoch in entry.get("retires", ()) if not pins.get(epoch)]
            case {"kind": "retire", "epochs": epochs}:
                given_up = [epoch for epoch in epochs if not pins.get(epoch)]
            case {"kind": "rewind", "only": epoch}:
                given_up = [epoch]
            case {"kind": "rewind"}:
                last = entry.get("after")
                given_up = [it for it in records if last is None or place(it) > place(last)]
            case {"kind": "pin", "epoch": epoch, "label": label} if epoch in records:
                pins.setdefault(epoch, set()).add(label)
            case {"kind": "unpin", "epoch": epoch, "label": label}:
                pins[epoch] = pins.get(epoch, set()) - {label} if label is not None else set()
            case {"kind": "lost"}:
                is_lost = True
            case {"kind": "end"}:
                is_lost = False
        for epoch in given_up:
            records.pop(epoch, None)
            pins.pop(epoch, None)
    if is_lost:
        raise ValueError("the log is being repaired")
    return records


def read_entry(log, number):
    text = (log / f"{number:010}.json").read_bytes()
    entry = json.loads(text)["entry"]
    assert hashlib.sha256(text[85:-2]).hexdigest() == text[11:75].decode(), number
    assert entry["number"] == number
    if entry["format"] > 1:
        raise ValueError(f"this reader does not know entry {number}")
    return entry


def place(epoch):
    """Where an epoch is among others: ``4 < "4.s200" < 5``."""
    numbers = [int(digits) for digits in re.findall(r"\d+", str(epoch))]
    return numbers + [0] * (2 - len(numbers))


def load(directory, epoch=None):
    """Node -> blob -> value, of one epoch or the newest."""
    records = recorded(directory)
    stores = records[max(records, key=place) if epoch is None else epoch]["stores"]
    return {
        node: Store(Path(directory, it["name"]), it["sha256"]).load() for node, it in stores.items()
    }


class Store:
    def __init__(self, path, digest):
        text = (path / "zarr.json").read_bytes()
        assert hashlib.sha256(text).hexdigest() == digest, path
        root = json.loads(text)
        self.path, self.described = path, root["consolidated_metadata"]["metadata"]
        self.entry = root["attributes"]["/jobrunner"]
        assert self.entry["format"] == 1
        before = text.replace(self.entry["sha256"].encode(), b"0" * 64)
        assert hashlib.sha256(before).hexdigest() == self.entry["sha256"]

    def load(self):
        return {name: self.blob(entry) for name, entry in self.entry["blobs"].items()}

    def blob(self, entry):
        self.objects = []
        self.arrays = entry["arrays"]
        return self.value(entry["tree"])

    def array(self, at):
        entry = self.arrays[at]
        if isinstance(entry, list):
            return self.read(self.entry["stacks"][entry[0]])[entry[1], ...]
        return self.read(entry)

    def read(self, entry):
        """An array, with its own order of axes."""
        path = entry["path"]
        zarr = self.described[path]
        assert json.loads((self.path / path / "zarr.json").read_bytes()) == zarr
        own = zarr["attributes"]["/jobrunner"]
        codecs = [codec["name"] for codec in zarr["codecs"]]
        if codecs[-1] != "bytes" or "string" in own["dtype"]:
            raise ValueError(f"this reader does not know the array {path}")
        dtype, shape = dtype_of(own["dtype"]), zarr["shape"]
        chunk = zarr["chunk_grid"]["configuration"]["chunk_shape"]
        has_order = codecs[0] == "transpose"
        order = list(range(len(shape)))
        order = zarr["codecs"][0]["configuration"]["order"] if has_order else order
        if own.get("item_axis"):  # the last, in memory too
            shape, chunk, order = shape[:-1], chunk[:-1], order[:-1]
        found = np.empty([shape[axis] for axis in order], dtype)  # axes in memory order
        block = [chunk[axis] for axis in order]
        corners = starts([0] * len(shape), block, found.shape)
        for start, (size, digest) in zip(corners, entry["files"], strict=True):
            at = dict(zip(order, map(int.__floordiv__, start, block), strict=True))
            key = ["c", *(str(at[axis]) for axis in range(len(shape)))]
            data = (
                self.path / path / ".".join(key + ["0"] * own.get("item_axis", False))
            ).read_bytes()
            assert [len(data), xxhash.xxh3_128_hexdigest(data)] == [size, digest], path
            whole = np.frombuffer(data, dtype).reshape(block)
            target = found[(*map(slice, start, map(int.__add__, start, block)), ...)]
            target[...] = whole[(*map(slice, target.shape), ...)]
        return found.transpose([order.index(axis) for axis in range(len(shape))])

    def value(self, tree):
        if not isinstance(tree, list | dict):
            return tree
        number = len(self.objects)
        is_object = isinstance(tree, list) or tree.get("$", "dict") in OBJECTS
        if is_object:
            self.objects.append(None)  # before those inside
        value = self.node(tree)
        if is_object:
            self.objects[number] = value
        return value

    def node(self, tree):
        match tree:
            case list():
                return [self.value(it) for it in tree]
            case {"$": "same", "of": number}:
                return self.objects[number]
            case {"$": "array", "of": i}:
                return self.array(i)
            case {"$": "int", "of": digits}:
                return int(digits, 16)
            case {"$": "float", "of": digits}:
                return struct.unpack(">d", bytes.fromhex(digits))[0]
            case {"$": "str", "of": content}:
                return self.data(content).decode("utf-8", "surrogatepass")
            case {"$": "bytes", "of": content}:
                return self.data(content)
            case {"$": "bytearray", "of": content}:
                return bytearray(self.value(content))
            case {"$": "scalar", "of": parts}:
                dtype, digits = self.value(parts)
                return np.frombuffer(bytes.fromhex(digits), dtype_of(dtype))[0]
            case {"$": "dict", "of": [keys, values]}:
                return dict(zip(self.items(keys), self.items(values), strict=True))
            case {"$": "tuple", "of": items}:
                return tuple(self.items(items))
            case {"$": "numbers" | "rows" | "ragged" | "records"}:
                return self.items(tree)
            case {"$": kind}:
                raise ValueError(f"this reader does not know the kind {kind}")
            case _:
                return {name: self.value(item) for name, item in tree.items()}

    def items(self, tree):
        match tree:
            case list():
                return [self.value(item) for item in tree]
            case {"$": "numbers", "of": i}:
                return self.array(i).tolist()
            case {"$": "rows", "of": [kind, columns]}:
                return self.rows(kind, zip(*map(self.items, columns), strict=True))
            case {"$": "records", "of": [keys, columns]}:
                rows = zip(*map(self.items, columns), strict=True)
                records = [dict(zip(keys, row, strict=True)) for row in rows]
                self.objects += records
                return records
            case {"$": "ragged", "of": [kind, i, content]}:
                lengths, remaining = self.array(i).tolist(), iter(self.items(content))
                return self.rows(kind, (itertools.islice(remaining, it) for it in lengths))
        raise ValueError(f"this reader does not know the items {tree}")

    def rows(self, kind, contents):
        rows = list(map(ROWS[kind], contents))
        if kind != "tuple":
            self.objects += rows
        return rows

    def data(self, content):
        return bytes.fromhex(content) if isinstance(content, str) else self.array(content).tobytes()


def dtype_of(spec):
    if isinstance(spec, str):
        return np.dtype(spec)
    fields = []
    for name, inner, *shape in spec:
        key = tuple(name) if isinstance(name, list) else name
        fields.append((key, dtype_of(inner), *map(tuple, shape)))
    return np.dtype(fields)


def starts(first, step, end):
    """Where blocks of the lengths `step` begin, the last axis fastest."""
    return itertools.product(*map(range, first, end, step))
