"""Compare checkpoints and values: which blobs differ, and by how much."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np

from jobrunner.checkpoint import (
    Checkpoint,
    Codec,
    Decoder,
    EncodedBlob,
    NodeCheckpoint,
    Unmade,
    digest_blob,
    encode_blobs,
    library_parts,
)
from jobrunner.errors import DefinitionError
from jobrunner.run.replay.objects import are_same_class, compare_objects, identical
from jobrunner.texts import printable

Difference = dict[str, Any]
_Seen = dict[tuple[int, int], tuple[Any, Any]]
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)

_NOT_COMPARED = (
    "the pickles differ, but their values may be equal. To compare the values, pass "
    "--allow-pickle, which runs code from the checkpoints"
)


def compare_checkpoints(
    one: Checkpoint, other: Checkpoint, *, is_deep: bool = False
) -> tuple[dict[str, Any], str, bool]:
    """Compare all blobs of all nodes; returns data for JSON, a text, and whether all are equal.

    `is_deep` also reads and compares blobs whose digests are equal. One blob of each checkpoint is
    in memory at a time. ``only_in_a`` and ``only_in_b`` name a node or ``node/blob``; each of
    ``differences`` has ``node``, ``blob``, ``where`` (in the blob), ``what``, and for numbers
    ``count`` (elements that differ), ``size`` (all elements), ``max_abs`` and ``max_rel``.
    """
    for checkpoint in (one, other):
        checkpoint.read_ahead([node for node in one if node in other])
    only_in = [
        [node for node in mine if node not in theirs]
        for mine, theirs in ((one, other), (other, one))
    ]
    differences: list[dict[str, Any]] = []
    num_equal = 0
    for node in one:
        if node not in other:
            continue
        a, b = one[node], other[node]
        only_in[0] += [f"{node}/{blob}" for blob in a if blob not in b]
        only_in[1] += [f"{node}/{blob}" for blob in b if blob not in a]
        for blob in a:
            if blob in b:
                found = list(_compare_blob(a, b, blob, is_deep))
                differences += ({"node": node, "blob": blob, **about} for about in found)
                num_equal += not found
    is_equal = not differences and not any(only_in)
    data = {
        "is_equal": is_equal,
        "num_equal": num_equal,
        "only_in_a": only_in[0],
        "only_in_b": only_in[1],
        "differences": differences,
    }
    lines = [
        f"{which} is {checkpoint.record.name}."
        for which, checkpoint in (("A", one), ("B", other))
        if checkpoint.step
    ]
    lines += [f"only in A: {name}" for name in only_in[0]]
    lines += [f"only in B: {name}" for name in only_in[1]]
    lines += [f"{d['node']}/{d['blob']}{d['where']}: {format_difference(d)}" for d in differences]
    lines.append(count_equal(num_equal, len({(d["node"], d["blob"]) for d in differences})))
    return data, "\n".join(printable(line, kept="") for line in lines), is_equal


def _compare_blob(
    one: NodeCheckpoint, other: NodeCheckpoint, blob: str, is_deep: bool
) -> Iterator[dict[str, Any]]:
    is_same_digest = one.digest(blob) == other.digest(blob)
    if is_same_digest and not is_deep:
        return
    try:
        yield from compare_values(one.load(blob), other.load(blob))
    except DefinitionError as error:  # pickled, or its codec is not registered
        if not is_same_digest:
            yield {"where": "", "what": f"{_NOT_COMPARED if 'pickle' in str(error) else error}"}
    except RecursionError:
        if not is_same_digest:
            yield {"where": "", "what": "content, nested too deeply to be compared"}


def compare_values(one: Any, other: Any, where: str = "") -> Iterator[dict[str, Any]]:
    """All differences between two decoded values, as in `compare_checkpoints`.

    `where` is the place of the values in the blob, for example ``['layers'][0]``.
    """
    return _compare(one, other, where, {})


def _compare(one: Any, other: Any, where: str, seen: _Seen) -> Iterator[Difference]:
    """Compare; of a pair of objects that is `seen` again, by `id`, nothing more is said."""
    cls, pair = type(one), (id(one), id(other))
    if not are_same_class(cls, type(other)):
        names = f"{cls.__name__} and {type(other).__name__}"
        yield {"where": where, "what": f"type: {names}"}
        return
    if pair in seen or (are_identical := identical(one, other)):
        return
    if not isinstance(one, _PLAIN):
        seen[pair] = (one, other)  # alive, so that no `id` is used twice
    found = False
    for difference in _compare_parts(one, other, where, seen):
        found = True
        yield difference
    if are_identical is False and not found:
        yield {"where": where, "what": "content"}


def _compare_parts(one: Any, other: Any, where: str, seen: _Seen) -> Iterator[Difference]:
    if (parts := _parts_of_libraries(one, other)) is not None:
        yield from _compare(*parts, where, seen)
    elif isinstance(one, Mapping):
        for which, mine, theirs in (("A", one, other), ("B", other, one)):
            for key in mine:
                if key not in theirs:
                    yield {"where": f"{where}[{key!r}]", "what": f"only in {which}"}
        for key in one:
            if key in other:
                yield from _compare(one[key], other[key], f"{where}[{key!r}]", seen)
        if list(one) != list(other) and set(one) == set(other):
            yield {"where": where, "what": "order of the keys"}
    elif isinstance(one, Unmade):
        if one.kind != other.kind:
            yield {"where": where, "what": f"type: {one.kind} and {other.kind}"}
        else:
            yield from _compare(one.parts, other.parts, where, seen)
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            yield {"where": where, "what": f"length: {len(one)} and {len(other)}"}
        for i, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from _compare(a, b, f"{where}[{i}]", seen)
    elif hasattr(one, "__array__"):
        yield from _compare_arrays(_to_array(one), _to_array(other), where)
    elif isinstance(one, numbers.Number) and not isinstance(one, bool):
        if not _are_same_scalars(one, other):
            yield {"where": where, **_measure(np.asarray([one]), np.asarray([other]), 1)}
    else:
        compare = partial(_compare, seen=seen)
        yield from compare_objects(one, other, where, compare)


def _parts_of_libraries(one: Any, other: Any) -> tuple[Any, Any] | None:
    """What pandas objects and the like are made of, which is more than the array they give."""
    if (a := library_parts(one)) is None or (b := library_parts(other)) is None:
        return None
    has_numbers = a.kind == "jax.Array" and "key" not in a.parts and "key" not in b.parts
    return None if has_numbers or a.kind != b.kind else (a.parts, b.parts)


def _to_array(value: Any) -> np.ndarray[Any, Any]:
    detach = getattr(value, "detach", None)  # of a tensor with gradients
    return np.asarray(value if detach is None else detach())


def _compare_arrays(
    one: np.ndarray[Any, Any], other: np.ndarray[Any, Any], where: str
) -> Iterator[dict[str, Any]]:
    for what in ("dtype", "shape"):
        a, b = getattr(one, what), getattr(other, what)
        if a != b:
            yield {"where": where, "what": f"{what}: {a} and {b}"}
            return
    if one.dtype.names is not None:
        for name in one.dtype.names:
            yield from _compare_arrays(one[name], other[name], f"{where}[{name!r}]")
        return
    differs = np.asarray(one != other)
    if one.dtype.kind in "fcmM":
        # For NumPy, NaN differs from itself, and 0.0 equals -0.0; here it is the other way round.
        both_missing = np.asarray((one != one) & (other != other))
        differs = differs & ~both_missing
        for part in {"f": ("real",), "c": ("real", "imag")}.get(one.dtype.kind, ()):
            a, b = np.signbit(getattr(one, part)), np.signbit(getattr(other, part))
            differs = differs | (a != b) & ~both_missing
    count = int(np.count_nonzero(differs))
    if not count:
        return
    if one.dtype.kind in "biufc":
        yield {"where": where, **_measure(one[differs], other[differs], one.size)}
    else:
        yield {"where": where, "what": "elements", "count": count, "size": int(one.size)}


def _measure(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any], size: int) -> dict[str, Any]:
    """How far apart elements are, computed in the widest floats of the machine."""
    kind = np.clongdouble if "c" in (one.dtype.kind, other.dtype.kind) else np.longdouble
    about: dict[str, Any] = {"what": "elements", "count": int(one.size), "size": int(size)}
    try:
        a, b = one.astype(kind), other.astype(kind)
    except (OverflowError, TypeError, ValueError):  # numbers too large for these floats
        return about
    with np.errstate(all="ignore"):
        apart = np.abs(a - b)
        relative = apart / np.maximum(np.abs(a), np.abs(b))
    about["max_abs"] = float(np.max(apart))
    about["max_rel"] = float(np.max(np.where(apart == 0, 0.0, relative)))
    return about


def _are_same_scalars(one: object, other: object) -> bool:
    if isinstance(one, float | complex | Decimal):
        return repr(one) == repr(other)
    return bool(one == other)


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


# ---- to the bit


def compare_bits(
    node: str, blob: str, recorded: Any, replayed: Any, codecs: Sequence[Codec] = ()
) -> Iterator[dict[str, Any]]:
    """All differences between a loaded value and a task's, in anything that a save records."""
    loaded, made = (_encode(value, codecs, node, blob) for value in (recorded, replayed))
    if digest_blob(loaded) == digest_blob(made):
        return
    # The loaded value was encoded and decoded once already; do the same with the task's.
    one, other = (_decode(encoded, codecs) for encoded in (loaded, made))
    if digest_value(one, codecs) == digest_value(other, codecs):
        return
    differences = list(compare_values(one, other))
    if not differences and _digest_but_pickles(loaded) == _digest_but_pickles(made):
        return  # the same value may have several pickles
    yield from differences or [{"where": "", "what": "content"}]


def _digest_but_pickles(blob: EncodedBlob) -> str:
    left_out: set[int] = set()

    def blank(tree: Any) -> Any:
        if isinstance(tree, list):
            return [blank(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if tree.get("$") == "pickle":
            data, buffers, _ = tree["of"]
            left_out.update([data, *buffers])
            return {"$": "pickle"}
        return {key: blank(item) for key, item in tree.items()}

    tree = blank(blob.tree)
    parts = [part for i, part in enumerate(blob.parts) if i not in left_out]
    return digest_blob(replace(blob, tree=tree, parts=parts))


def digest_value(value: Any, codecs: Sequence[Codec] = ()) -> str:
    """Digest of all that a save records of a value."""
    return digest_blob(_encode(value, codecs))


def _encode(value: Any, codecs: Sequence[Codec], node: str = "", blob: str = "") -> EncodedBlob:
    return encode_blobs(node, {blob: value}, codecs, allow_pickle=True)[blob]


def _decode(blob: EncodedBlob, codecs: Sequence[Codec]) -> Any:
    def array(part: int) -> np.ndarray[Any, Any]:
        data, order = blob.parts[part].data, blob.parts[part].order
        return data if order is None else data.transpose(np.argsort(order))

    # Unpickling is safe: this process pickled the value.
    return Decoder(array, codecs, allow_pickle=True, classes=blob.classes).decode(blob.tree)
