"""Compare checkpoints, and runs, by what is stored: trees of plain values, and arrays.

Runs no code of theirs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jobrunner.checkpoint import (
    Checkpoint,
    Codec,
    Decoder,
    Directory,
    EncodedBlob,
    EpochRecord,
    MultiNodeCheckpointManager,
    State,
    StoredValue,
    Tree,
    digest_blob,
    encode_blobs,
    open_record,
    whole_tree,
)
from jobrunner.compile import changes
from jobrunner.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from jobrunner.texts import printable, show

Difference = dict[str, Any]
Differences = Iterator[Difference]

_CLASSES = ("state", "instance", "codec")
_SCALARS = ("NoneType", "bool", "int", "float", "str", "bytes")
_LONGEST = 40  # characters of a value that is shown


def compare_checkpoints(one: Checkpoint, other: Checkpoint) -> tuple[dict[str, Any], str, bool]:
    """Compare all blobs of all nodes; returns data for JSON, a text, and whether all are equal.

    Blobs with equal digests are not read. ``only_in_a`` and ``only_in_b`` name a node or
    ``node/blob``; each of ``differences`` has ``node``, ``blob``, ``where`` (in the blob), ``what``,
    and for arrays and numbers ``count`` (elements that differ), ``size`` (all elements), and mostly
    ``max_abs`` and ``max_rel``.
    """
    common = [node for node in one if node in other]
    for checkpoint in (one, other):
        checkpoint.read_ahead(common)
    only_in_a, only_in_b = _only_in(one, other), _only_in(other, one)
    differences: list[Difference] = []
    num_equal = num_different = 0
    for node in common:
        for blob in one[node]:
            if blob not in other[node]:
                continue
            if one[node].digest(blob) == other[node].digest(blob):
                num_equal += 1
            else:
                num_different += 1
                differences += _compare_blob(one, other, node, blob)
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
    names = []
    for node in one:
        if node not in other:
            names.append(node)
        else:
            names += [f"{node}/{blob}" for blob in one[node] if blob not in other[node]]
    return names


def _compare_blob(one: Checkpoint, other: Checkpoint, node: str, blob: str) -> list[Difference]:
    a, b = one[node].stored(blob), other[node].stored(blob)
    try:
        return [{"node": node, "blob": blob, **it} for it in compare_stored(a, b)]
    except CheckpointError:
        raise
    except Exception as error:  # the tree is none that jobrunner writes
        raise CheckpointCorruptError(
            f"Blob {blob!r} in {one[node].path} or in {other[node].path} has an invalid value: "
            f"{type(error).__name__}: {error}."
        ) from error


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
    again = [_encode(_decode(blob, codecs), codecs) for blob in encoded]
    if digest_blob(again[0]) == digest_blob(again[1]):
        return []
    return compare_stored(*map(_as_stored, again))


def digest_value(value: Any) -> str:
    """Digest of all that a save records of a value."""
    return digest_blob(_encode(value, ()))


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


# ---- stored values


def compare_stored(one: StoredValue, other: StoredValue) -> list[Difference]:
    """The differences between two stored values that are not equal; see `compare_checkpoints`."""
    a = whole_tree(one.tree, one.arrays.__getitem__)
    b = whole_tree(other.tree, other.arrays.__getitem__)
    differences = list(_compare(one, other, a, b, ""))
    return differences or [{"where": "", "what": "content"}]


def _compare(one: StoredValue, other: StoredValue, a: Tree, b: Tree, where: str) -> Differences:
    """The differences between a tree of one value and a tree of the other."""
    kind, type_names = _kind(a), (_type_name(a), _type_name(b))
    if type_names[0] != type_names[1]:
        yield {"where": where, "what": "type: " + " and ".join(type_names)}
    elif kind == "dict":
        yield from _compare_dicts(one, other, a, b, where)
    elif kind == "list":
        if len(a) != len(b):
            yield {"where": where, "what": f"length: {len(a)} and {len(b)}"}
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from _compare(one, other, x, y, f"{where}[{i}]")
    elif kind in _SCALARS:
        yield from _compare_scalars(_scalar(a, one), _scalar(b, other), where)
    elif kind in ("array", "numbers"):
        yield from _compare_arrays(one.arrays[a["of"]], other.arrays[b["of"]], where)
    elif kind == "pickle":
        if _pickle(a, one) != _pickle(b, other):
            yield {"where": where, "what": "the pickles differ, but their values may be equal"}
    elif kind == "same":
        if a["of"] != b["of"]:
            yield {"where": where, "what": "which object it refers to"}
    elif kind in _CLASSES:
        yield from _compare(one, other, a["of"][-1], b["of"][-1], where)
    else:
        yield from _compare(one, other, a["of"], b["of"], where)


def _kind(tree: Tree) -> str:
    """The kind of a node, or the type of what stands for itself in JSON."""
    if isinstance(tree, dict):
        return str(tree.get("$", "dict"))
    return type(tree).__name__


def _type_name(tree: Tree) -> str:
    kind = _kind(tree)
    if kind in _CLASSES:
        return str(tree["of"][0])
    return "ndarray" if kind == "array" else kind


def _compare_dicts(
    one: StoredValue, other: StoredValue, a: Tree, b: Tree, where: str
) -> Differences:
    mine, theirs = _items(a, one), _items(b, other)
    for name, items, others in (("A", mine, theirs), ("B", theirs, mine)):
        for key in items:
            if key not in others:
                yield {"where": f"{where}[{key}]", "what": f"only in {name}"}
    for key in mine:
        if key in theirs:
            yield from _compare(one, other, mine[key], theirs[key], f"{where}[{key}]")
    if list(mine) != list(theirs) and mine.keys() == theirs.keys():
        yield {"where": where, "what": "order of the keys"}


def _items(tree: Tree, value: StoredValue) -> dict[str, Tree]:
    """The values by what is shown of their keys."""
    if "$" not in tree:
        return {show(key): item for key, item in tree.items()}
    keys, items = tree["of"]
    if isinstance(keys, dict):  # numbers
        keys = value.arrays[keys["of"]].tolist()
    return {_show_key(key, value): item for key, item in zip(keys, items, strict=True)}


def _show_key(tree: Tree, value: StoredValue) -> str:
    return show(_scalar(tree, value) if _kind(tree) in _SCALARS else tree)


def _pickle(tree: Tree, value: StoredValue) -> list[object]:
    i, classes = tree["of"]
    return [value.arrays[i].tobytes(), classes]


def _scalar(tree: Tree, value: StoredValue) -> Any:
    """A number, a text or bytes."""
    if not isinstance(tree, dict):
        return tree
    kind, content = tree["$"], tree["of"]
    if kind == "int":
        return int(content, 16)
    is_part = not isinstance(content, str)
    data = value.arrays[content].tobytes() if is_part else bytes.fromhex(content)
    if kind == "float":
        return struct.unpack(">d", data)[0]
    return data.decode("utf-8", "surrogatepass") if kind == "str" else data


def _compare_scalars(a: Any, b: Any, where: str) -> Differences:
    # 0.0 is not equal to -0.0. No int is written out, which may take long.
    is_equal = repr(a) == repr(b) if isinstance(a, float) else a == b
    if is_equal:
        return
    if isinstance(a, int | float) and not isinstance(a, bool):
        yield {"where": where, **_measure(np.asarray([a]), np.asarray([b]), 1)}
    else:
        yield {"where": where, "what": f"value: {_shorten(a)} and {_shorten(b)}"}


def _shorten(value: object) -> str:
    text = show(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _compare_arrays(one: Any, other: Any, where: str) -> Differences:
    for name in ("dtype", "shape"):
        a, b = getattr(one, name), getattr(other, name)
        if a != b:
            yield {"where": where, "what": f"{name}: {a} and {b}"}
            return
    a, b = np.ascontiguousarray(one).reshape(-1), np.ascontiguousarray(other).reshape(-1)
    if a.dtype.kind in "biufcmMV":  # to the bit: NaN is equal to NaN, and 0.0 is not to -0.0
        bits = f"V{a.dtype.itemsize}"
        differs = a.view(bits) != b.view(bits)
    else:
        differs = a != b
    if differs.any():
        yield {"where": where, **_measure(a[differs], b[differs], a.size)}


def _measure(one: Any, other: Any, size: int) -> Difference:
    """How far apart elements are, computed in the widest floats of the machine."""
    measured: Difference = {"what": "elements", "count": int(one.size), "size": int(size)}
    if not {one.dtype.kind, other.dtype.kind} <= set("biufc"):
        return measured
    kind = np.clongdouble if one.dtype.kind == "c" else np.longdouble
    a, b = one.astype(kind), other.astype(kind)
    with np.errstate(all="ignore"):
        distance = np.abs(a - b)
        relative = distance / np.maximum(np.abs(a), np.abs(b))
    measured["max_abs"] = float(np.max(distance))
    measured["max_rel"] = float(np.max(np.where(distance == 0, 0.0, relative)))
    return measured


# ---- runs


def compare_runs(
    one: MultiNodeCheckpointManager, other: MultiNodeCheckpointManager
) -> tuple[dict[str, Any], str]:
    """Tell where two runs part; returns data for JSON, and how the blobs differ, as text.

    Of the data, ``changes`` says how the job of `other` differs from that of `one`, or is None if
    their logs do not say what they were; ``metrics`` are of each epoch that both have recorded, as ``epoch``, ``a`` and ``b``;
    ``metrics_differ_at`` and ``differ_at`` are the first epochs whose metrics, or blobs, differ.
    ``num_compared`` is the number of epochs whose blobs were compared, up to there; ``difference``
    is what `compare_checkpoints` says of it.

    Runs may part and meet again, so epochs are compared one after another, from the first. Of those
    whose digests are equal, nothing but the log is read.
    """
    mine, theirs = one.directory.snapshot(), other.directory.snapshot()
    plans = _last_plan(one.directory, mine), _last_plan(other.directory, theirs)
    metrics = []
    their_metrics = _metrics_of(other)
    for number, values in _metrics_of(one).items():
        if number in their_metrics:
            metrics.append({"epoch": number, "a": values, "b": their_metrics[number]})
    parted = (row["epoch"] for row in metrics if not _are_equal(row["a"], row["b"]))
    data: dict[str, Any] = {
        "changes": changes(*plans) if all(plans) else None,
        "metrics": metrics,
        "metrics_differ_at": next(parted, None),
        "num_compared": 0,
        "differ_at": None,
        "difference": None,
    }
    for epoch in mine.epochs:
        if epoch not in theirs.recorded:
            continue
        a, b = one.directory.record(epoch, mine), other.directory.record(epoch, theirs)
        try:
            difference, text = _compare_epoch(one.directory, a, other.directory, b)
        except CheckpointNotFoundError:  # a run has removed it meanwhile
            continue
        data["num_compared"] += 1
        if difference is not None:
            return {**data, "differ_at": epoch.public, "difference": difference}, text
    return data, ""


def _last_plan(directory: Directory, snapshot: State) -> Mapping[str, Any]:
    if snapshot.latest is None:
        return {}
    record = directory.record(snapshot.latest, snapshot)
    return directory.plan_of(record.run_number) or {}


def _metrics_of(manager: MultiNodeCheckpointManager) -> dict[int, Mapping[str, Any]]:
    return {row["epoch"]: row["metrics"] for row in manager.history() if not row["step"]}


def _are_equal(one: object, other: object) -> bool:
    return one == other or repr(one) == repr(other)  # NaN is equal to NaN


def _compare_epoch(
    one: Directory, a: EpochRecord, other: Directory, b: EpochRecord
) -> tuple[dict[str, Any] | None, str]:
    """What `compare_checkpoints` says of an epoch, and as text; None if its blobs are equal."""
    digests = [{node: store.sha256 for node, store in record.stores.items()} for record in (a, b)]
    if digests[0] == digests[1]:
        return None, ""
    with one.reading(a.at), other.reading(b.at):
        data, text, is_equal = compare_checkpoints(open_record(one, a), open_record(other, b))
    return (None, "") if is_equal else (data, text)
