"""Compare checkpoints by what is stored: trees of plain values, and arrays. Runs no code of theirs."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jobrunner.checkpoint import (
    Checkpoint,
    Codec,
    Decoder,
    EncodedBlob,
    StoredValue,
    Tree,
    digest_blob,
    encode_blobs,
)
from jobrunner.errors import CheckpointCorruptError, CheckpointError
from jobrunner.texts import printable, show

Difference = dict[str, Any]
Differences = Iterator[Difference]

_LISTS = ("list", "numbers", "rows", "ragged", "records")
_CLASSES = ("state", "enum", "namedtuple", "dataclass", "codec")
_SCALARS = ("NoneType", "bool", "int", "float", "str", "bytes")
_LONGEST = 40  # characters of a value that is shown


def compare_checkpoints(
    one: Checkpoint, other: Checkpoint, *, is_deep: bool = False
) -> tuple[dict[str, Any], str, bool]:
    """Compare all blobs of all nodes; returns data for JSON, a text, and whether all are equal.

    `is_deep` also reads blobs whose digests are equal. One blob of each checkpoint is in memory at a
    time. ``only_in_a`` and ``only_in_b`` name a node or ``node/blob``; each of ``differences`` has
    ``node``, ``blob``, ``where`` (in the blob), ``what``, and for numbers ``count`` (elements that
    differ), ``size`` (all elements), ``max_abs`` and ``max_rel``.
    """
    for checkpoint in (one, other):
        checkpoint.read_ahead([node for node in one if node in other])
    only_in_a, only_in_b = _only_in(one, other), _only_in(other, one)
    differences: list[Difference] = []
    num_compared = 0
    for node in one:
        for blob in one[node] if node in other else ():
            if blob in other[node]:
                num_compared += 1
                differences += _compare_blob(one, other, node, blob, is_deep)
    num_different = len({(d["node"], d["blob"]) for d in differences})
    num_equal = num_compared - num_different
    is_equal = not (differences or only_in_a or only_in_b)
    data = {
        "is_equal": is_equal,
        "num_equal": num_equal,
        "only_in_a": only_in_a,
        "only_in_b": only_in_b,
        "differences": differences,
    }
    lines = []
    for name, checkpoint in (("A", one), ("B", other)):
        if checkpoint.step:
            lines.append(f"{name} is {checkpoint.record.name}.")
    lines += [f"only in A: {name}" for name in only_in_a]
    lines += [f"only in B: {name}" for name in only_in_b]
    lines += [f"{d['node']}/{d['blob']}{d['where']}: {format_difference(d)}" for d in differences]
    lines.append(count_equal(num_equal, num_different))
    return data, "\n".join(printable(line, kept="") for line in lines), is_equal


def _only_in(one: Checkpoint, other: Checkpoint) -> list[str]:
    names = [node for node in one if node not in other]
    for node in one:
        if node in other:
            names += [f"{node}/{blob}" for blob in one[node] if blob not in other[node]]
    return names


def _compare_blob(
    one: Checkpoint, other: Checkpoint, node: str, blob: str, is_deep: bool
) -> Differences:
    is_same = one[node].digest(blob) == other[node].digest(blob)
    if is_same and not is_deep:
        return
    a, b = one[node].stored(blob), other[node].stored(blob)
    try:
        differences = list(compare_stored(a, b))
    except CheckpointError:
        raise
    except Exception as error:  # the tree is none that jobrunner writes
        raise CheckpointCorruptError(
            f"Blob {blob!r} in {one[node].path} or in {other[node].path} has an invalid value: "
            f"{type(error).__name__}: {error}."
        ) from error
    for difference in differences:
        yield {"node": node, "blob": blob, **difference}


def format_difference(difference: Mapping[str, Any]) -> str:
    """Write a difference as text, without its place."""
    if "count" not in difference:
        return str(difference["what"])
    text = f"{difference['count']} of {difference['size']} elements differ"
    if "max_abs" in difference:
        text += f", by at most {difference['max_abs']:.3g} (relative {difference['max_rel']:.3g})"
    return text


def count_equal(equal: int, different: int) -> str:
    """How many blobs are equal and how many differ, in words."""
    are = "blob is" if equal == 1 else "blobs are"
    return f"{equal} {are} equal, {different} {'differs' if different == 1 else 'differ'}."


# ---- values in memory


def compare_values(one: Any, other: Any, codecs: Sequence[Codec] = ()) -> list[Difference]:
    """All differences between two values in anything that a save records."""
    encoded = [_encode(value, codecs) for value in (one, other)]
    if digest_blob(encoded[0]) == digest_blob(encoded[1]):
        return []
    # One of them may have been loaded, and equal objects may be one object, or pickle otherwise,
    # only after a load.
    saved_again = [_encode(_decode(blob, codecs), codecs) for blob in encoded]
    if digest_blob(saved_again[0]) == digest_blob(saved_again[1]):
        return []
    differences = list(compare_stored(*map(_as_stored, saved_again)))
    return differences or [{"where": "", "what": "content"}]


def digest_value(value: Any, codecs: Sequence[Codec] = ()) -> str:
    """Digest of all that a save records of a value."""
    return digest_blob(_encode(value, codecs))


def _encode(value: Any, codecs: Sequence[Codec]) -> EncodedBlob:
    return encode_blobs("", {"": value}, codecs, allow_pickle=True)[""]


def _as_stored(blob: EncodedBlob) -> StoredValue:
    arrays = []
    for part in blob.parts:
        array = part.data
        if part.order is not None:
            array = array.transpose(np.argsort(part.order))
        arrays.append(array)
    return StoredValue(blob.tree, arrays)


def _decode(blob: EncodedBlob, codecs: Sequence[Codec]) -> Any:
    arrays = _as_stored(blob).arrays
    # Unpickling is safe: this process pickled the value.
    decoder = Decoder(arrays.__getitem__, codecs, allow_pickle=True, classes=blob.classes)
    return decoder.decode(blob.tree)


# ---- trees


def compare_stored(one: StoredValue, other: StoredValue) -> Differences:
    """All differences between two stored values; see `compare_checkpoints`."""
    return _Comparison(one.arrays, other.arrays).compare(one.tree, other.tree, "")


def _kind(tree: Tree) -> str:
    """The kind of a node, or the type of what stands for itself in JSON."""
    if isinstance(tree, dict):
        return str(tree.get("$", "dict"))
    return type(tree).__name__


def _type_name(tree: Tree) -> str:
    kind = _kind(tree)
    if kind in _LISTS:
        return "list"
    if kind in _CLASSES:
        return str(tree["of"][0])
    return "ndarray" if kind == "array" else kind


class _Comparison:
    """Compares trees of two values, of which each has arrays of its own."""

    def __init__(self, one: Sequence[Any], other: Sequence[Any]) -> None:
        self._one, self._other = one, other

    def compare(self, a: Tree, b: Tree, where: str) -> Differences:
        kind = _kind(a)
        type_names = _type_name(a), _type_name(b)
        if type_names[0] != type_names[1]:
            yield {"where": where, "what": "type: " + " and ".join(type_names)}
        elif kind in _LISTS and kind != _kind(b):
            yield {"where": where, "what": "types or number of items"}
        elif kind == "dict":
            yield from self._compare_dicts(a, b, where)
        elif kind in ("array", "numbers"):
            yield from compare_arrays(self._one[a["of"]], self._other[b["of"]], where)
        elif kind == "pickle":
            if _pickle(a, self._one) != _pickle(b, self._other):
                yield {"where": where, "what": "the pickles differ, but their values may be equal"}
        elif kind == "same":
            if a["of"] != b["of"]:
                yield {"where": where, "what": "which object it refers to"}
        elif kind in _CLASSES:
            yield from self.compare(a["of"][-1], b["of"][-1], where)
        elif kind in _SCALARS:
            yield from _compare_scalars(_scalar(a, self._one), _scalar(b, self._other), where)
        elif kind == "list":
            yield from self._compare_items(a, b, where, "")
        elif kind in ("rows", "ragged", "records"):
            yield from self._compare_rows(kind, a["of"], b["of"], where)
        else:
            yield from self.compare(a["of"], b["of"], where)

    def _compare_items(self, a: Tree, b: Tree, where: str, rows: str) -> Differences:
        if len(a) != len(b):
            yield {"where": where, "what": f"length: {len(a)} and {len(b)}"}
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from self.compare(x, y, f"{where}[{rows}{i}]")

    def _compare_rows(self, kind: str, a: Tree, b: Tree, where: str) -> Differences:
        # Rows of one length are stored by columns; else, how many items each has is an array.
        have_other_columns = kind != "ragged" and len(a[1]) != len(b[1])
        if a[0] != b[0] or have_other_columns:
            yield {"where": where, "what": "keys or types of items"}
        elif kind == "ragged":
            yield from compare_arrays(self._one[a[1]], self._other[b[1]], where)
            yield from self.compare(a[2], b[2], f"{where}[:]")
        else:
            yield from self._compare_items(a[1], b[1], where, ":, ")

    def _compare_dicts(self, a: Tree, b: Tree, where: str) -> Differences:
        mine, theirs = self._items(a, self._one), self._items(b, self._other)
        if mine is None or theirs is None:
            if mine is not theirs:
                yield {"where": where, "what": "keys, or types of values"}
                return
            for x, y, part in zip(a["of"], b["of"], (" (keys)", " (values)"), strict=True):
                yield from self.compare(x, y, where + part)
            return
        for name, items, others in (("A", mine, theirs), ("B", theirs, mine)):
            for key in items:
                if key not in others:
                    yield {"where": f"{where}[{key}]", "what": f"only in {name}"}
        for key in mine:
            if key in theirs:
                yield from self.compare(mine[key], theirs[key], f"{where}[{key}]")
        if list(mine) != list(theirs) and mine.keys() == theirs.keys():
            yield {"where": where, "what": "order of the keys"}

    def _items(self, tree: Tree, arrays: Sequence[Any]) -> dict[str, Tree] | None:
        """The values by what is shown of their keys; None if they are packed in arrays."""
        if "$" not in tree:
            return {show(key): value for key, value in tree.items()}
        keys, values = tree["of"]
        if not (isinstance(keys, list) and isinstance(values, list)):
            return None
        return {_show(key, arrays): value for key, value in zip(keys, values, strict=True)}


def _show(tree: Tree, arrays: Sequence[Any]) -> str:
    """What is shown of a key; other keys are shown otherwise."""
    kind = _kind(tree)
    if kind in _SCALARS:
        return show(_scalar(tree, arrays))
    if kind == "list":
        return f"[{', '.join(_show(item, arrays) for item in tree)}]"
    if kind == "tuple":
        return f"({', '.join(_show(item, arrays) for item in tree['of'])})"
    return show(tree)


def _pickle(tree: Tree, arrays: Sequence[Any]) -> list[object]:
    data, buffers, classes = tree["of"]
    return [*(arrays[i].tobytes() for i in (data, *buffers)), classes]


# ---- numbers, texts, arrays


def _scalar(tree: Tree, arrays: Sequence[Any]) -> Any:
    """A number, a text or bytes."""
    if not isinstance(tree, dict):
        return tree
    kind, content = tree["$"], tree["of"]
    if kind == "int":
        return int(content, 16)
    data = bytes.fromhex(content) if isinstance(content, str) else arrays[content].tobytes()
    if kind == "float":
        return struct.unpack(">d", data)[0]
    return data.decode("utf-8", "surrogatepass") if kind == "str" else data


def _compare_scalars(a: Any, b: Any, where: str) -> Differences:
    is_number = isinstance(a, int | float) and not isinstance(a, bool)
    # NaN is equal to NaN, and 0.0 is not to -0.0. No int is written out, which may take long.
    is_equal = a == b if isinstance(a, int | str | bytes) else repr(a) == repr(b)
    if is_equal:
        return
    if is_number:
        yield {"where": where, **_measure(np.asarray([a]), np.asarray([b]), 1)}
    else:
        yield {"where": where, "what": f"value: {_shorten(a)} and {_shorten(b)}"}


def _shorten(value: object) -> str:
    text = show(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def compare_arrays(one: Any, other: Any, where: str) -> Differences:
    """The difference between two arrays, field by field; NaN is equal to NaN, 0.0 is not to -0.0."""
    if one.dtype != other.dtype:
        yield {"where": where, "what": f"dtype: {one.dtype} and {other.dtype}"}
        return
    if one.shape != other.shape:
        yield {"where": where, "what": f"shape: {one.shape} and {other.shape}"}
        return
    if one.dtype.names is not None:
        for name in one.dtype.names:
            yield from compare_arrays(one[name], other[name], f"{where}[{name!r}]")
        return
    differs = np.asarray(one != other)
    if one.dtype.kind in "fcmM":
        both_missing = np.asarray((one != one) & (other != other))
        differs = differs & ~both_missing
        for part in {"f": ("real",), "c": ("real", "imag")}.get(one.dtype.kind, ()):
            signs = np.signbit(getattr(one, part)) != np.signbit(getattr(other, part))
            differs = differs | signs & ~both_missing
    count = int(np.count_nonzero(differs))
    if not count:
        return
    if one.dtype.kind in "biufc":
        yield {"where": where, **_measure(one[differs], other[differs], one.size)}
    else:
        yield {"where": where, "what": "elements", "count": count, "size": int(one.size)}


def _measure(one: Any, other: Any, size: int) -> Difference:
    """How far apart elements are, computed in the widest floats of the machine."""
    kind = np.clongdouble if "c" in (one.dtype.kind, other.dtype.kind) else np.longdouble
    measured: Difference = {"what": "elements", "count": int(one.size), "size": int(size)}
    try:
        a, b = one.astype(kind), other.astype(kind)
    except (OverflowError, TypeError, ValueError):  # numbers too large for these floats
        return measured
    with np.errstate(all="ignore"):
        distance = np.abs(a - b)
        relative = distance / np.maximum(np.abs(a), np.abs(b))
    measured["max_abs"] = float(np.max(distance))
    measured["max_rel"] = float(np.max(np.where(distance == 0, 0.0, relative)))
    return measured
