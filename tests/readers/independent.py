"""Reads checkpoint directories as docs/format.md describes them, with nothing but NumPy."""

import hashlib
import itertools
import json
import math
import re
import struct
from pathlib import Path

import numpy as np

OBJECTS = {"array", "bytearray", "dict", "list"}
"""Kinds of values with an identity, of those that this reader knows."""


def recorded(directory):
    """Epoch -> its record."""
    commits, pins = {}, {}
    for number, path in enumerate(sorted(Path(directory, "_log").glob("[0-9]*.json"))):
        text = path.read_bytes()
        entry = json.loads(text)["entry"]
        assert entry["number"] == number == int(path.stem), path
        assert hashlib.sha256(text[85:-2]).hexdigest() == text[11:75].decode(), path
        if entry["format"] > 3 or entry["kind"] in ("repair", "gap"):
            raise ValueError(f"this reader does not know {path}")
        match entry:
            case {"kind": "commit", "epoch": epoch}:
                commits[epoch] = entry
                pins.pop(epoch, None)
            case {"kind": "retire", "epochs": epochs}:
                given_up = {epoch for epoch in epochs if not pins.get(epoch)}
                commits = {epoch: it for epoch, it in commits.items() if epoch not in given_up}
            case {"kind": "rewind", "only": epoch}:
                commits.pop(epoch, None)
            case {"kind": "rewind", "after": None}:
                commits = {}
            case {"kind": "rewind", "after": last}:
                commits = {
                    epoch: it for epoch, it in commits.items() if place(epoch) <= place(last)
                }
            case {"kind": "pin", "epoch": epoch, "label": label}:
                pins.setdefault(epoch, set()).add(label)
            case {"kind": "unpin", "epoch": epoch, "label": label}:
                pins[epoch] = pins.get(epoch, set()) - {label} if label is not None else set()
    return commits


def place(epoch):
    """Where an epoch is among others: ``4 < "4.s200" < 5``."""
    numbers = [int(digits) for digits in re.findall(r"\d+", str(epoch))]
    return numbers + [0] * (2 - len(numbers))


def load(directory, epoch=None):
    """Node -> blob -> value, of one epoch or the newest."""
    commits = recorded(directory)
    stores = commits[max(commits, key=place) if epoch is None else epoch]["stores"]
    return {
        node: Store(Path(directory, it["store"]), it["manifest"]).load()
        for node, it in stores.items()
    }


class Store:
    def __init__(self, path, digest):
        text = (path / "_manifest" / "zarr.json").read_bytes()
        assert hashlib.sha256(text).hexdigest() == digest, path
        self.path, self.manifest = path, json.loads(text)["attributes"]
        assert self.manifest["format"] <= 6

    def load(self):
        return {name: self.blob(entry) for name, entry in self.manifest["blobs"].items()}

    def blob(self, entry):
        self.objects = []
        self.arrays = [entry] if isinstance(entry, list) else entry["arrays"]
        return self.value({"$": "array", "at": 0} if isinstance(entry, list) else entry["value"])

    def array(self, at):
        entry = self.arrays[at]
        if isinstance(entry, list):
            return self.read(self.manifest["stacks"][entry[0]])[entry[1], ...]
        return self.read(entry)

    def read(self, entry):
        """An array, with its own order of axes."""
        if entry.get("compressors") or not isinstance(entry["dtype"], str):
            raise ValueError(f"this reader does not know the array {entry['path']}")
        dtype, shape, chunk = np.dtype(entry["dtype"]), entry["shape"], entry["chunk_shape"]
        order, block = entry["order"] or list(range(len(shape))), entry.get("piece_shape") or chunk
        own = [order.index(axis) for axis in range(len(shape))]
        found = np.empty(shape, dtype)  # axes in memory order
        for corner, (size, digest) in zip(
            starts([0] * len(shape), chunk, shape), entry["files"], strict=True
        ):
            key = [
                "c",
                *(str(corner[axis] // chunk[axis]) for axis in own),
                *["0"] * entry.get("item_axis", False),
            ]
            data = (self.path / entry["path"] / ".".join(key)).read_bytes()
            assert [len(data), crc32c(data)] == [size, digest], entry["path"]
            ends = list(map(min, map(int.__add__, corner, chunk), shape))
            count = math.prod(block)
            for number, start in enumerate(starts(corner, block, ends)):
                whole = np.frombuffer(data, dtype, count, number * count * dtype.itemsize)
                target = found[(*map(slice, start, map(int.__add__, start, block)), ...)]
                target[...] = whole.reshape(block)[(*map(slice, target.shape), ...)]
        return found.transpose(own)

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
            case {"$": "same", "as": number}:
                return self.objects[number]
            case {"$": "array", "at": at}:
                return self.array(at)
            case {"$": "int", "hex": digits}:
                return int(digits, 16)
            case {"$": "float"}:
                return struct.unpack(">d", self.data(tree))[0]
            case {"$": "str"}:
                return self.data(tree).decode("utf-8", "surrogatepass")
            case {"$": "bytes"}:
                return self.data(tree)
            case {"$": "bytearray"}:
                return bytearray(self.data(tree))
            case {"$": "scalar", "dtype": dtype, "hex": digits}:
                return np.frombuffer(bytes.fromhex(digits), dtype)[0]
            case {"$": "dict", "items": items}:
                return {self.value(key): self.value(it) for key, it in items}
            case {"$": "dict", "keys": keys, "of": items}:
                return dict(zip(self.value(keys), self.value(items), strict=True))
            case {"$": "list" | "tuple" as kind, **fields}:
                items = (
                    map(self.value, fields["items"]) if "items" in fields else self.column(fields)
                )
                return list(items) if kind == "list" else tuple(items)
            case {"$": "numbers" | "texts" | "tuples"}:
                return self.column({"of": tree})
            case {"$": kind}:
                raise ValueError(f"this reader does not know the kind {kind}")
            case _:
                return {name: self.value(it) for name, it in tree.items()}

    def column(self, fields):
        match fields:
            case {"at": at} | {"of": {"$": "numbers", "at": at}}:
                return self.array(at).tolist()
            case {"of": {"$": "texts", "at": at, "count": _}}:
                return self.array(at).tobytes().decode("utf-8", "surrogatepass").split("\0")
            case {"of": {"$": "tuples", "columns": columns}}:
                return list(zip(*(self.column({"of": it}) for it in columns), strict=True))
            case {"of": {"$": "tuples", "at": at}}:
                return [tuple(row) for row in self.array(at).tolist()]
        raise ValueError(f"this reader does not know the column {fields}")

    def data(self, tree):
        return bytes.fromhex(tree["hex"]) if "hex" in tree else self.array(tree["at"]).tobytes()


def starts(first, step, end):
    """Where blocks of the lengths `step` begin, the last axis fastest."""
    return itertools.product(*map(range, first, end, step))


def crc32c(data):
    crc = 0xFFFF_FFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFF_FFFF


def _of_byte(crc):
    for _ in range(8):
        crc = crc >> 1 ^ 0x82F6_3B78 * (crc & 1)
    return crc


TABLE = [_of_byte(byte) for byte in range(256)]
