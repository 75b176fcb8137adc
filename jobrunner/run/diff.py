"""Compare checkpoints, and runs, by what is stored. Runs no code of theirs."""

from __future__ import annotations

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
    State,
    StoredValue,
    Unmade,
    digest_blob,
    encode_blobs,
    open_record,
    read_past_epochs,
    show_outline,
    whole_tree,
)
from jobrunner.compile import changes
from jobrunner.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from jobrunner.texts import clip, printable, show

Difference = dict[str, Any]
Differences = Iterator[Difference]

_LONGEST = 40  # characters of a value that is shown


def compare_checkpoints(first: Checkpoint, second: Checkpoint) -> tuple[dict[str, Any], str]:
    """Compare all blobs of all nodes; returns data for JSON, and a text.

    Blobs with equal digests are not read. ``only_in_a`` and ``only_in_b`` name a node or
    ``node/blob``; each of ``differences`` has ``node``, ``blob``, ``where`` (in the blob), ``what``,
    and for numbers ``max_abs``.
    """
    common = [node for node in first if node in second]
    for checkpoint in (first, second):
        checkpoint.read_ahead(common)
    only_in_a, only_in_b = _only_in(first, second), _only_in(second, first)
    differences: list[Difference] = []
    num_equal = num_different = 0
    for node in common:
        for blob in first[node]:
            if blob not in second[node]:
                continue
            if first[node].digest(blob) == second[node].digest(blob):
                num_equal += 1
            else:
                num_different += 1
                differences += _compare_blob(first, second, node, blob)
    data = {
        "is_equal": not (differences or only_in_a or only_in_b),
        "num_equal": num_equal,
        "only_in_a": only_in_a,
        "only_in_b": only_in_b,
        "differences": differences,
    }
    lines = [f"only in A: {name}" for name in only_in_a]
    lines += [f"only in B: {name}" for name in only_in_b]
    for difference in differences:
        where = f"{difference['node']}/{difference['blob']}{difference['where']}"
        lines.append(f"{where}: {difference['what']}")
    lines.append(count_equal(num_equal, num_different))
    return data, "\n".join(printable(line, kept="") for line in lines)


def _only_in(first: Checkpoint, second: Checkpoint) -> list[str]:
    names = []
    for node in first:
        if node not in second:
            names.append(node)
        else:
            names += [f"{node}/{blob}" for blob in first[node] if blob not in second[node]]
    return names


def _compare_blob(first: Checkpoint, second: Checkpoint, node: str, blob: str) -> list[Difference]:
    a, b = first[node].stored(blob), second[node].stored(blob)
    try:
        differences = compare_stored(a, b)
    except CheckpointError:
        raise
    except Exception as error:  # the tree is none that jobrunner writes
        raise CheckpointCorruptError(
            f"Blob {blob!r} in {first[node].path} or in {second[node].path} has an invalid value: "
            f"{type(error).__name__}: {error}."
        ) from error
    return [{"node": node, "blob": blob, **difference} for difference in differences]


def count_equal(equal: int, different: int) -> str:
    """How many blobs are equal and how many differ, in words."""
    are, differ = "blobs are", "differ"
    if equal == 1:
        are = "blob is"
    if different == 1:
        differ = "differs"
    return f"{equal} {are} equal, {different} {differ}."


# ---- values in memory


def compare_values(first: Any, second: Any, codecs: Sequence[Codec] = ()) -> list[Difference]:
    """All differences between two values in anything that a save records."""
    encoded = [_encode(value, codecs) for value in (first, second)]
    if digest_blob(encoded[0]) == digest_blob(encoded[1]):
        return []
    # One of them may have been loaded, and equal objects may be one object, or pickle otherwise,
    # only after a load.
    reloaded = [_encode(_decode(blob, codecs), codecs) for blob in encoded]
    if digest_blob(reloaded[0]) == digest_blob(reloaded[1]):
        return []
    return compare_stored(*map(_as_stored, reloaded))


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


def compare_stored(first: StoredValue, second: StoredValue) -> list[Difference]:
    """The differences between two stored values that are not equal; see `compare_checkpoints`."""
    differences = list(_compare(_outline(first), _outline(second), ""))
    if not differences:
        # An outline does not show all: neither the order of keys, nor what a pickle holds.
        problem = "the pickles or the order of keys differ, and the values may be equal"
        differences.append({"where": "", "what": problem})
    return differences


def _outline(value: StoredValue) -> Any:
    arrays = value.arrays.__getitem__
    return show_outline(whole_tree(value.tree, arrays), arrays)


def _compare(a: Any, b: Any, where: str) -> Differences:
    """The differences between two outlines."""
    names = _name_type(a), _name_type(b)
    if names[0] != names[1]:
        yield {"where": where, "what": "type: " + " and ".join(names)}
    elif names[0] == "dict":
        mine, theirs = _items(a), _items(b)
        for key in {**mine, **theirs}:
            place = f"{where}[{key}]"
            if key not in theirs:
                yield {"where": place, "what": "only in A"}
            elif key not in mine:
                yield {"where": place, "what": "only in B"}
            else:
                yield from _compare(mine[key], theirs[key], place)
    elif isinstance(a, Unmade):
        yield from _compare(a.parts, b.parts, where)
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            yield {"where": where, "what": f"length: {len(a)} and {len(b)}"}
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from _compare(x, y, f"{where}[{i}]")
    elif isinstance(a, np.ndarray):
        yield from _compare_arrays(a, b, where)
    elif not _is_equal(a, b):
        texts = [clip(show(value), _LONGEST) for value in (a, b)]
        yield {"where": where, "what": "value: " + " and ".join(texts)}


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, float):  # to the bit: NaN is equal to NaN, and 0.0 is not to -0.0
        return repr(a) == repr(b)
    return bool(a == b)


def _name_type(value: Any) -> str:
    if isinstance(value, Unmade):
        return value.kind
    return type(value).__name__


def _items(value: Any) -> dict[str, Any]:
    """The items of a dictionary by what is shown of their keys."""
    if isinstance(value, dict):
        return {show(key): item for key, item in value.items()}
    keys, items = value.parts
    if isinstance(keys, Unmade):  # numbers
        keys = keys.parts.tolist()
    return {show(key): item for key, item in zip(keys, items, strict=True)}


def _compare_arrays(first: Any, second: Any, where: str) -> Differences:
    for name in ("dtype", "shape"):
        a, b = getattr(first, name), getattr(second, name)
        if a != b:
            yield {"where": where, "what": f"{name}: {a} and {b}"}
            return
    a, b = np.ascontiguousarray(first).reshape(-1), np.ascontiguousarray(second).reshape(-1)
    if a.dtype.kind in "biufcmMV":  # to the bit: NaN is equal to NaN, and 0.0 is not to -0.0
        bits = f"V{a.dtype.itemsize}"
        differs = a.view(bits) != b.view(bits)
    else:
        differs = a != b
    if not differs.any():
        return
    a, b = a[differs], b[differs]
    difference: Difference = {"where": where, "what": f"{a.size} of {differs.size} elements differ"}
    if a.dtype.kind in "biufc":
        kind: type = np.longdouble
        if a.dtype.kind == "c":
            kind = np.clongdouble
        with np.errstate(all="ignore"):
            largest = float(np.max(np.abs(a.astype(kind) - b.astype(kind))))
        difference["max_abs"] = largest
        difference["what"] += f", by at most {largest:.3g}"
    yield difference


# ---- runs


def compare_runs(first: Directory, second: Directory) -> tuple[dict[str, Any], str]:
    """Tell where two runs part; returns data for JSON, and how the blobs differ, as text.

    Of the data, ``changes`` says how the job of `second` differs from that of `first`, or is None if
    their logs do not say what they were; ``metrics`` are those of the first epoch at which they
    differ, as ``epoch``, ``a`` and ``b``; ``differ_at`` is the first epoch whose blobs differ, and
    ``num_compared`` the number of epochs compared up to there; ``difference`` is what
    `compare_checkpoints` says of it.

    Runs may part and meet again, so epochs are compared one after another, from the first. Of those
    whose digests are equal, nothing but the log is read.
    """
    mine, theirs = first.snapshot(), second.snapshot()
    plans = _last_plan(first, mine), _last_plan(second, theirs)
    data: dict[str, Any] = {
        "changes": changes(*plans) if all(plans) else None,
        "metrics": None,
        "num_compared": 0,
        "differ_at": None,
        "difference": None,
    }
    their_metrics = _metrics_of(second)
    for epoch, values in _metrics_of(first).items():
        # NaN is equal to NaN.
        if epoch in their_metrics and repr(values) != repr(their_metrics[epoch]):
            data["metrics"] = {"epoch": epoch, "a": values, "b": their_metrics[epoch]}
            break
    for at in mine.epochs:
        if at not in theirs.recorded:
            continue
        a, b = first.record(at, mine), second.record(at, theirs)
        data["num_compared"] += 1
        if _digests_of(a) == _digests_of(b):
            continue
        try:
            with first.reading(at), second.reading(at):
                checkpoints = open_record(first, a), open_record(second, b)
                difference, text = compare_checkpoints(*checkpoints)
        except CheckpointNotFoundError:  # a run has removed it meanwhile
            data["num_compared"] -= 1
            continue
        if not difference["is_equal"]:
            return {**data, "differ_at": at.public, "difference": difference}, text
    return data, ""


def _digests_of(record: EpochRecord) -> dict[str, str]:
    return {node: store.sha256 for node, store in record.stores.items()}


def _last_plan(directory: Directory, snapshot: State) -> Mapping[str, Any]:
    if snapshot.latest is None:
        return {}
    record = directory.record(snapshot.latest, snapshot)
    return directory.plan_of(record.run_number) or {}


def _metrics_of(directory: Directory) -> dict[int, Mapping[str, Any]]:
    rows = read_past_epochs(directory.log.read_entries())
    return {row["epoch"]: row["metrics"] for row in rows if not row["step"]}
