"""Encode the blobs of a node, and refuse memory and objects that two share. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
import numpy as np

from jobrunner.checkpoint.encoding.codecs import (
    Codec,
    CodecTable,
    RefusedValueError,
    UnsuitableError,
    needs_no_codec,
)
from jobrunner.checkpoint.encoding.decode import LONE_ARRAY
from jobrunner.checkpoint.encoding.dtypes import Array, ArrayPart, Trail, Tree
from jobrunner.checkpoint.encoding.encode import Encoder
from jobrunner.checkpoint.encoding.stateful import name_class
from jobrunner.define import DEFAULT_ARRAY_OPTIONS, ArrayOptions, is_of_dask
from jobrunner.errors import DefinitionError
from jobrunner.texts import counted


@dataclass(slots=True)
class EncodedBlob:
    """A blob as a tree and the arrays that it refers to."""

    tree: Tree
    parts: Sequence[ArrayPart]
    has_state: bool = False  # contains objects saved by their ``state_dict()``
    options: ArrayOptions = DEFAULT_ARRAY_OPTIONS
    classes: Mapping[str, type] = field(default_factory=dict)  # that the tree names


TREE_BYTES = 64 << 10
"""A tree with longer JSON is an array of bytes, or each epoch's document would repeat it."""


class _View(NamedTuple):
    blob: str
    trail: Trail
    array: Array


def encode_blobs(
    node: str,
    blobs: Mapping[str, object],
    codecs: Sequence[Codec] = (),
    *,
    allow_pickle: bool = False,
    done: Mapping[str, EncodedBlob] | None = None,
) -> dict[str, EncodedBlob]:
    """Encode the blobs of a node; write them before the values, whose memory they share, change.

    `done` has blobs that have not changed since they were encoded, which are taken over. Raises
    `DefinitionError`, with a line for each blob that cannot be encoded, and for two that share an
    object or memory, and would load as two.
    """
    table = CodecTable(codecs)
    encoded: dict[str, EncodedBlob] = {}
    refused: dict[str, RefusedValueError] = {}
    shared: dict[tuple[str, str], str] = {}  # two blobs -> what is wrong with them
    memory: list[_View] = []
    owners: dict[int, tuple[str, object]] = {}  # of objects, by `id`, which are kept alive
    for name, value in blobs.items():
        if done and name in done:
            encoded[name] = done[name]
            continue
        if type(value) is np.ndarray and _is_plain(value):
            # Most blobs of large nodes are such arrays, by the thousand: all else takes as long.
            encoded[name] = EncodedBlob(LONE_ARRAY, (ArrayPart(value, None, (), "ndarray"),))
            memory.append(_View(name, (), value))
            continue
        try:
            encoder, tree = _encode(value, table, allow_pickle)
        except RefusedValueError as error:
            refused[name] = error
            continue
        text = msgspec.json.encode(tree)
        if len(text) > TREE_BYTES:
            tree = {"$": "json", "of": len(encoder.parts)}
            part = ArrayPart(np.frombuffer(text, np.uint8), None, ("_tree",), "JSON")
            encoder.parts.append(part)
        encoded[name] = EncodedBlob(tree, encoder.parts, encoder.has_state, classes=encoder.classes)
        memory += [_View(name, trail, array) for trail, array in encoder.memory]
        for identity, item in encoder.objects.items():
            owner, _ = owners.setdefault(identity, (name, item))
            if owner != name:
                shared[owner, name] = (
                    f"Node {node!r}: the blobs {owner!r} and {name!r} contain the same "
                    f"{type(item).__name__} object, and would contain two after a resume. Copy "
                    f"one of them, or put both in one blob (a dict or a list)."
                )
    lines = [*_explain(node, refused), *shared.values()]
    if not shared:
        lines += _find_shared_memory(node, memory)
    if lines:
        causes = (error.__cause__ for error in refused.values())
        raise _join_lines(lines) from next(filter(None, causes), None)
    return encoded


def _is_plain(array: Array) -> bool:
    """Whether an array of numbers is stored just as it lies in memory."""
    dtype = array.dtype
    is_of_numbers = dtype.kind in "biufc" and dtype.isbuiltin == 1 and dtype.metadata is None
    return is_of_numbers and array.size > 0 and array.flags.c_contiguous


def _encode(value: object, codecs: CodecTable[Codec], allow_pickle: bool) -> tuple[Encoder, Tree]:
    """Encode a blob; return its tree, and the encoder, which has all else.

    The limit of levels is for a thread that has most of its stack left: a task may have called a
    save from deep inside, and some codecs of users go deep themselves.
    """
    encoder = Encoder(codecs)
    try:
        return encoder, encoder.encode_blob(value)
    except RecursionError:
        reason = "its containers are nested too deep for Python's stack"
        problem = UnsuitableError(reason, "Store it less deep")
        raise RefusedValueError((), type(value), problem) from None
    except RefusedValueError as error:
        if not allow_pickle or error.remedy:
            raise
    # What needs a pickle is pickled with all that it lies in, so that objects stay shared.
    encoder = Encoder(codecs)
    return encoder, encoder.pickle(value)


def check_part(node: str, name: str, value: object, blob: EncodedBlob, axis: int) -> None:
    """Refuse a partitioned blob that another number of nodes could neither cut nor join.

    They cut arrays along the axis, and join the states of objects.
    """
    if blob.has_state:
        return
    shape = ""
    if blob.tree == LONE_ARRAY:
        num_axes = blob.parts[0].data.ndim
        if num_axes > axis:
            return
        shape = f" with {num_axes} axes"
    raise DefinitionError(
        f"Node {node!r}, blob {name!r}: partition={axis} expects an array of numbers, texts or "
        f"records with an axis {axis}, which another number of nodes can cut, or objects with a "
        f"state_dict(); found {name_class(value)}{shape}. Hold the data in such an array, for "
        f"example np.asarray(...), or declare the blob without partition={axis}."
    )


def with_options(
    node: str, name: str, blob: EncodedBlob, options: ArrayOptions | None, default: ArrayOptions
) -> EncodedBlob:
    """Add the storage options of its arrays to a blob, of which some are for one array alone."""
    options = options or default
    if options.compressors is None:
        options = replace(options, compressors=default.compressors)
    shape = f"{len(blob.parts)} arrays"
    num_axes = -1
    if len(blob.parts) == 1:
        (part,) = blob.parts
        shape = f"an array of {part.data.ndim} axes"
        if part.trail:
            shape += " inside a container"
        else:
            num_axes = part.data.ndim
    for option, axes in (("chunks", options.chunks), ("dims", options.dims)):
        if axes is not None and len(axes) != num_axes:
            raise DefinitionError(
                f"Node {node!r}, blob {name!r}: {option}={axes} expect an array of {len(axes)} "
                f"axes, but the blob is made of {shape}. Give one for each axis of a blob that is "
                f"one array, or remove {option}."
            )
    return replace(blob, options=options)


def check_dimensions(node: str, blobs: Mapping[str, EncodedBlob]) -> None:
    """Check that axes of the same name have the same length in all blobs of a node."""
    lengths: dict[str, tuple[str, int]] = {}
    for name, blob in blobs.items():
        if not blob.options.dims:
            continue
        part = blob.parts[0]
        order = part.order or range(part.data.ndim)
        for axis, length in zip(order, part.data.shape, strict=True):
            dimension = blob.options.dims[axis]
            second, expected = lengths.setdefault(dimension, (name, length))
            if length != expected:
                raise DefinitionError(
                    f"Node {node!r}: the dimension {dimension!r} has {expected} items in the blob "
                    f"{second!r} and {length} in {name!r}. Give them the same length, or "
                    f"different names in dims."
                )


def _join_lines(lines: Sequence[str]) -> DefinitionError:
    """One error for all that is wrong with blobs: a line each, of which the first are shown."""
    text = "\n".join(lines[:_MOST_LINES])
    num_left = len(lines) - _MOST_LINES
    if num_left > 0:
        text += f"\n{counted(num_left, 'more blob')} cannot be saved."
    return DefinitionError(text)


def _explain(node: str, refused: Mapping[str, RefusedValueError]) -> Iterator[str]:
    """Yield a line for each blob; what to do is said once."""
    remedies = set()
    for blob, error in refused.items():
        place = f"Node {node!r}, blob {blob!r}"
        if error.trail:
            place += ", item " + "/".join(error.trail).replace("_keys/", "key ")
        name = error.cls.__qualname__
        if error.cls.__module__ != "builtins":
            name = f"{error.cls.__module__}.{name}"
        line = f"{place}: {name} cannot be saved: {error}."
        remedy = _choose_remedy(error)
        if remedy not in remedies:
            remedies.add(remedy)
            line += (
                f" {remedy.format(error.cls.__name__)}; or exclude the blob from checkpoints, "
                f"outputs=Blob({blob!r}, transient=True)."
            )
        yield line


def _choose_remedy(error: RefusedValueError) -> str:
    if is_of_dask(error.cls):
        return _COMPUTE
    if error.remedy:
        return error.remedy
    if needs_no_codec(error.cls):
        return _CONVERT + _PICKLE
    return _REGISTER + _PICKLE


_MOST_LINES = 50
_COMPUTE = "Return what its compute() returns: only keyword arguments of init tasks are computed"
_CONVERT = "Convert it to a type that can be saved, such as an array of numbers or a list"
_REGISTER = "Register a codec for it, register_codec({}, encode, decode)"
_PICKLE = "; or pickle it, allow_pickle=True for the checkpoint manager (--allow-pickle)"


# --- shared memory


def _find_shared_memory(node: str, memory: Sequence[_View]) -> Iterator[str]:
    """Yield a line if two arrays share memory, but are not the same part of a blob."""
    arrays = [view.array for view in memory]
    is_once = len(set(map(id, arrays))) == len(arrays)
    if is_once and all(array.flags.owndata for array in arrays):
        return  # arrays that own their memory share none
    # Only neighbours may overlap: in the order of their addresses, each array is compared with those
    # before it that reach so far.
    spans = sorted(
        (*np.lib.array_utils.byte_bounds(array), index)
        for index, array in enumerate(arrays)
        if not _is_constant(array)
    )
    reaching: list[tuple[int, int]] = []  # (end, index) of spans that the next one may overlap
    for low, high, index in spans:
        reaching = [(end, second) for end, second in reaching if end > low]
        for _, second in reaching:
            if _overlap(arrays[index], arrays[second]):
                views = memory[min(index, second)], memory[max(index, second)]
                first_path, second_path = ("/".join((view.blob, *view.trail)) for view in views)
                yield (
                    f"Node {node!r}: the blobs {first_path!r} and {second_path!r} share memory, "
                    f"but would not share it after a resume. Copy one of them (array.copy()), or "
                    f"save only one and derive the other from it."
                )
                return
        reaching.append((high, index))


def _is_constant(array: Array) -> bool:
    """Whether its memory is that of `bytes`, which no change ever shows in."""
    owner: object = array
    while isinstance(owner, np.ndarray | memoryview):
        if isinstance(owner, np.ndarray):
            owner = owner.base
        else:
            owner = owner.obj
    return isinstance(owner, bytes)


def _overlap(array: Array, second: Array) -> bool:
    # Two views that interleave, as of even and odd columns, overlap in no item. To find out takes long
    # for views of many axes: then they count as if they did.
    try:
        return np.shares_memory(array, second, max_work=1_000_000)  # type: ignore[arg-type]  # any int is allowed
    except np.exceptions.TooHardError:
        return True
