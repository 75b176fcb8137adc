"""Encode the blobs of a node, and refuse memory and objects that two share. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jobrunner.checkpoint.encoding.codecs import (
    Codec,
    CodecTable,
    RefusedValueError,
    needs_no_codec,
)
from jobrunner.checkpoint.encoding.decode import LONE_ARRAY
from jobrunner.checkpoint.encoding.dtypes import Array, ArrayPart, Trail, Tree
from jobrunner.checkpoint.encoding.encode import OWN_CODECS, Encoder
from jobrunner.checkpoint.encoding.job_classes import kind_of
from jobrunner.checkpoint.encoding.libraries import type_of
from jobrunner.checkpoint.encoding.stateful import has_state, name_class
from jobrunner.define import DEFAULT_ARRAY_OPTIONS, ArrayOptions
from jobrunner.errors import DefinitionError
from jobrunner.texts import counted, listed


@dataclass(slots=True)
class EncodedBlob:
    """A blob as a tree and the arrays that it refers to."""

    tree: Tree
    parts: Sequence[ArrayPart]
    has_state: bool = False  # contains objects saved by their ``state_dict()``
    options: ArrayOptions = DEFAULT_ARRAY_OPTIONS
    classes: Mapping[str, type] = field(default_factory=dict)  # that the tree names


class _View(NamedTuple):
    blob: str
    trail: Trail
    array: Array


class _Node:
    """The blobs of a node that are encoded, and what they hold."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.encoded: dict[str, EncodedBlob] = {}
        self.refused: dict[str, RefusedValueError] = {}
        self.memory: list[_View] = []
        self._owners: dict[int, str] = {}  # of objects, by `id`
        self._kept: list[object] = []  # no `id` is used twice
        self._shared: dict[tuple[str, str], str] = {}

    def add(
        self, name: str, value: object, codecs: CodecTable[Codec] | None, allow_pickle: bool
    ) -> None:
        if type(value) is np.ndarray and _is_plain(value):
            # Most blobs of large nodes are such arrays, by the thousand: all else takes as long.
            self.encoded[name] = EncodedBlob(LONE_ARRAY, (ArrayPart(value, None, (), "ndarray"),))
            self.memory.append(_View(name, (), value))
            return
        try:
            encoder, tree = _encode(value, codecs, allow_pickle)
        except RefusedValueError as error:
            self.refused[name] = error
            return
        self.encoded[name] = EncodedBlob(
            tree, encoder.parts, encoder.has_state, classes=encoder.classes
        )
        self.memory += [_View(name, trail, array) for trail, array in encoder.memory]
        for identity, value_inside in encoder.objects.items():
            owner = self._owners.setdefault(identity, name)
            if owner != name:
                self._shared[owner, name] = (
                    f"Node {self.name!r}: the blobs {owner!r} and {name!r} contain the same "
                    f"{type(value_inside).__name__} object, and would contain two after a resume. "
                    f"Copy one of them, or put both in one blob (a dict or a list)."
                )
        self._kept.append(encoder.objects)

    def sharing(self) -> list[str]:
        """A line for each pair of blobs that share an object, or else for one that shares memory."""
        return [*self._shared.values()] or [*_find_shared_memory(self.name, self.memory)]


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
    table = CodecTable(codecs) if codecs else None
    encoded = _Node(node)
    for name, value in blobs.items():
        if done and name in done:
            encoded.encoded[name] = done[name]
        else:
            encoded.add(name, value, table, allow_pickle)
    lines = encoded.sharing()
    if encoded.refused or lines:
        of_node = {(node, name): error for name, error in encoded.refused.items()}
        raised = RefusedBlobsError("\n".join([*_explain(of_node), *lines]))
        raised.refused, raised.lines = of_node, lines
        causes = [error.__cause__ for error in of_node.values() if error.__cause__ is not None]
        raise raised from (causes[0] if causes else None)
    return encoded.encoded


def _is_plain(array: Array) -> bool:
    """Whether an array of numbers is stored just as it lies in memory."""
    dtype = array.dtype
    is_of_numbers = dtype.kind in "biufc" and dtype.isbuiltin == 1 and dtype.metadata is None
    return is_of_numbers and array.size > 0 and array.flags.c_contiguous


def _encode(
    value: object, codecs: CodecTable[Codec] | None, allow_pickle: bool
) -> tuple[Encoder, Tree]:
    """Encode a blob; return its tree, and the encoder, which has all else.

    The limit of levels is for a thread that has most of its stack left: a task may have called a
    save from deep inside, and some codecs of users go deep themselves.
    """
    encoder = Encoder(codecs)
    try:
        return encoder, encoder.encode(value)
    except RecursionError:
        reason = "its containers are nested too deep for Python's stack"
        raise RefusedValueError((), type(value), reason, "Store it less deep") from None
    except RefusedValueError as error:
        if not allow_pickle or error.remedy:
            raise
    # What needs a pickle is pickled with all that it lies in, so that objects stay shared.
    encoder = Encoder(codecs)
    return encoder, encoder.pickle(value)


def refuse_classes(planned: Mapping[tuple[str, str], type], codecs: Sequence[Codec]) -> None:
    """Refuse blobs (node and name) that will be objects of these classes, if none can be saved."""
    table = CodecTable(codecs)
    refused = {}
    for (node, name), cls in planned.items():
        by_codec = table.get(cls) or OWN_CODECS.get(cls)
        if not (by_codec or type_of(cls) or has_state(cls) or kind_of(cls)):
            error = RefusedValueError((), cls, "there is no codec for its type")
            refused[node, name] = error
    if refused:
        raise DefinitionError("\n".join(_explain(refused)))


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
    """Add the storage options of its arrays to a blob."""
    options = options or default
    if options.compressors is None:
        options = replace(options, compressors=default.compressors)
    if blob.parts:
        _check_axes(node, name, blob, "chunks", options.chunks)
    _check_axes(node, name, blob, "dims", options.dims)
    return replace(blob, options=options)


def _check_axes(
    node: str, name: str, blob: EncodedBlob, option: str, axes: Sequence[object] | None
) -> None:
    """Check that a blob is one array with as many axes as its option is for."""
    if axes is None:
        return
    actual = f"{len(blob.parts)} arrays"
    if len(blob.parts) == 1:
        (part,) = blob.parts
        if not part.trail and part.data.ndim == len(axes):
            return
        inside = " inside a container" if part.trail else ""
        actual = f"an array of {part.data.ndim} axes{inside}"
    raise DefinitionError(
        f"Node {node!r}, blob {name!r}: {option}={axes} expect an array of {len(axes)} axes, but "
        f"the blob is made of {actual}. Give one for each axis of a blob that is one array, or "
        f"remove {option}."
    )


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


class RefusedBlobsError(DefinitionError):
    """What is wrong with blobs: those that cannot be saved, by node and name, and other lines.

    These stay on the worker, see `join_refusals`; the message alone is sent.
    """

    refused: Mapping[tuple[str, str], RefusedValueError] = MappingProxyType({})
    lines: Sequence[str] = ()


def join_refusals(errors: Sequence[DefinitionError]) -> DefinitionError:
    """One error for what is wrong on several nodes."""
    refused: dict[tuple[str, str], RefusedValueError] = {}
    lines: list[str] = []
    for error in errors:
        if isinstance(error, RefusedBlobsError):
            refused |= error.refused
            lines += error.lines
        else:
            lines.append(str(error))
    return DefinitionError("\n".join([*_explain(refused), *lines]))


def _explain(refused: Mapping[tuple[str, str], RefusedValueError]) -> Iterator[str]:
    """Yield a line for each blob, with its nodes, then one with the names of those that are left.

    What to do is said once, so that many lines stay readable.
    """
    nodes_of: dict[tuple[str, str, type, str, str], list[str]] = {}
    for (node, blob), error in refused.items():
        trail = "/".join(error.trail).replace("_keys/", "key ")
        same = (blob, trail, error.cls, error.reason, error.remedy)
        nodes_of.setdefault(same, []).append(node)
    remedies: set[str] = set()
    num_characters = 0
    unsaid: dict[str, list[str]] = {}
    for (blob, trail, cls, reason, own_remedy), nodes in nodes_of.items():
        if num_characters > _MOST_CHARACTERS:
            unsaid.setdefault(blob, []).extend(nodes)
            continue
        ending = "s" if len(nodes) > 1 else ""
        item = f", item {trail}" if trail else ""
        name = cls.__qualname__
        if cls.__module__ != "builtins":
            name = f"{cls.__module__}.{name}"
        line = (
            f"Node{ending} {listed(map(repr, nodes), 3)}, blob {blob!r}{item}: {name} cannot be "
            f"saved: {reason}."
        )
        # A codec for such a type would be refused.
        remedy = own_remedy or (_CONVERT if needs_no_codec(cls) else _REGISTER)
        if remedy not in remedies:
            remedies.add(remedy)
            pickle = "" if own_remedy else _PICKLE
            exclude = f"outputs=Blob({blob!r}, transient=True)"
            line += (
                f" {remedy.format(cls.__name__)}{pickle}; or exclude the blob from checkpoints, "
            )
            line += f"{exclude}."
        num_characters += len(line)
        yield line
    if unsaid:
        names = (f"{blob!r} of {counted(len(nodes), 'node')}" for blob, nodes in unsaid.items())
        yield f"{counted(len(unsaid), 'more blob')} cannot be saved: {listed(names, _MOST_NAMES)}."


_MOST_CHARACTERS = 13_000  # of the lines that say what is wrong; longer messages are cut
_MOST_NAMES = 200
_REGISTER = "Register a codec for it, register_codec({}, encode, decode)"
_PICKLE = "; or pickle it, allow_pickle=True for the checkpoint manager (--allow-pickle)"
_CONVERT = "Convert it to a type that can be saved, such as an array of numbers or a list"


# --- shared memory


def _find_shared_memory(node: str, memory: Sequence[_View]) -> Iterator[str]:
    arrays = [view.array for view in memory]
    is_once = len(set(map(id, arrays))) == len(arrays)
    if is_once and all(array.flags.owndata for array in arrays):
        return  # arrays that own their memory share none
    spans = sorted(
        (
            (*np.lib.array_utils.byte_bounds(array), index)
            for index, (_, _, array) in enumerate(memory)
            if array.size and array.itemsize and not _is_constant(array)
        )
    )
    reaching: list[tuple[int, int]] = []  # (end, index) of spans that the next one may overlap
    named: tuple[int, ...] = ()  # the first pair in the order of the blobs, wherever in memory
    for low, high, index in spans:
        reaching = [(end, second) for end, second in reaching if end > low]
        for _, second in reaching:
            pair = (min(index, second), max(index, second))
            if (not named or pair < named) and _overlap(*(memory[i].array for i in pair)):
                named = pair
        reaching.append((high, index))
    if named:
        first_path, second_path = ("/".join((memory[i].blob, *memory[i].trail)) for i in named)
        yield (
            f"Node {node!r}: the blobs {first_path!r} and {second_path!r} share memory, but would "
            f"not share it after a resume. Copy one of them (array.copy()), or save only "
            f"one and derive the other from it."
        )


def _is_constant(array: Array) -> bool:
    """Whether its memory is that of `bytes`, so that nobody can tell who shares it."""
    owner: object = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return isinstance(owner, bytes)


def _overlap(array: Array, second: Array) -> bool:
    try:
        return np.shares_memory(array, second, max_work=1_000_000)  # type: ignore[arg-type]  # any int is allowed
    except np.exceptions.TooHardError:
        return True
