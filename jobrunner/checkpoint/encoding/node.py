"""Encode the blobs of a node, and refuse memory and objects that two share. Pure: no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jobrunner.checkpoint.encoding import classes, everyday
from jobrunner.checkpoint.encoding.codecs import (
    Codec,
    CodecTable,
    UnsupportedValueError,
    needs_no_codec,
)
from jobrunner.checkpoint.encoding.dtypes import Array, ArrayPart, Trail, Tree
from jobrunner.checkpoint.encoding.encode import Encoder
from jobrunner.checkpoint.encoding.libraries import find_type
from jobrunner.checkpoint.encoding.stateful import has_state
from jobrunner.define import DEFAULT_ARRAY_OPTIONS, ArrayOptions
from jobrunner.errors import DefinitionError
from jobrunner.texts import counted, listed


@dataclass(frozen=True, slots=True)
class EncodedBlob:
    """A blob as a tree and the arrays that it refers to."""

    tree: Tree
    parts: Sequence[ArrayPart]
    has_state: bool = False  # contains objects saved by their ``state_dict()``
    options: ArrayOptions = DEFAULT_ARRAY_OPTIONS
    classes: Mapping[str, type] = field(default_factory=dict)  # that the tree names
    format: int = 1  # the oldest whose readers know the tree


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
    beside: Mapping[str, Array] | None = None,
    done: Mapping[str, EncodedBlob] | None = None,
) -> dict[str, EncodedBlob]:
    """Encode the blobs of a node; write them before the values, whose memory they share, change.

    `beside` are the node's other blobs: arrays that own their memory and need no encoding; `done`
    blobs that are encoded already, and share nothing. Raises `DefinitionError`, with a line for
    each blob that cannot be encoded, and for two that share an object or memory, and would load
    as two.
    """
    table = CodecTable(codecs) if codecs else None
    refused: dict[str, UnsupportedValueError] = {}
    shared: dict[tuple[str, str], str] = {}
    encoded: dict[str, EncodedBlob] = {}
    memory: list[_View] = []
    owners: dict[int, tuple[str, object]] = {}
    for name, value in blobs.items():
        if done and name in done:
            encoded[name] = done[name]
            continue
        encoder = Encoder(table, allow_pickle)
        try:
            tree = encoder.encode(value)
        except UnsupportedValueError as error:
            refused[name] = error
            continue
        encoded[name] = EncodedBlob(
            tree,
            encoder.parts,
            encoder.has_state,
            classes=encoder.classes,
            format=max(encoder.formats),
        )
        memory += [_View(name, trail, array) for trail, array in encoder.memory]
        for identity, held in encoder.identities.items():
            other, _ = owners.setdefault(identity, (name, held))
            if other != name:
                shared[other, name] = (
                    f"Node {node!r}: the blobs {other!r} and {name!r} contain the same "
                    f"{type(held).__name__} object, and would contain two after a resume. "
                    f"Copy one of them, or put both in one blob (a dict or a list)."
                )
    lines = [*shared.values()] or [*_find_shared_memory(node, memory, beside or {})]
    if refused or lines:
        causes = (error.__cause__ for error in refused.values())
        of_node = {(node, name): error for name, error in refused.items()}
        raised = RefusedBlobsError("\n".join([*_explain(of_node), *lines]))
        raised.refused, raised.others = of_node, lines
        raise raised from next(filter(None, causes), None)
    return encoded


def refuse_classes(made: Mapping[tuple[str, str], type], codecs: Sequence[Codec]) -> None:
    """Refuse blobs (node and name) that will be objects of these classes, if none can be saved.

    The classes have no ``__new__``, so none of their code runs here.
    """
    table = CodecTable(codecs)
    refused = {}
    for (node, name), cls in made.items():
        blank: Any = object.__new__(cls)
        by_class = table.get(cls) or everyday.ENCODERS.get(cls) or classes.find_encoder(blank)
        if not (by_class or find_type(blank) or has_state(blank)):
            error = UnsupportedValueError((), cls, "there is no codec for its type")
            refused[node, name] = error
    if refused:
        raise DefinitionError("\n".join(_explain(refused)))


def with_options(
    node: str, name: str, blob: EncodedBlob, options: ArrayOptions | None, default: ArrayOptions
) -> EncodedBlob:
    """Add the storage options of its arrays to a blob."""
    if options is None:
        return blob if default.compressors is None else replace(blob, options=default)
    if options.compressors is None:
        options = replace(options, compressors=default.compressors)
    if options.chunks is not None and blob.parts:
        _check_axes(node, name, blob, f"chunks={options.chunks}", len(options.chunks))
    if options.dims is not None:
        _check_axes(node, name, blob, f"dims={options.dims}", len(options.dims))
    return replace(blob, options=options)


def _check_axes(node: str, name: str, blob: EncodedBlob, what: str, count: int) -> None:
    """Check that a blob is an array of `count` axes, as its option `what` says."""
    one = blob.parts[0] if len(blob.parts) == 1 else None
    if one is None or one.trail or one.data.ndim != count:
        found = f"{len(blob.parts)} arrays"
        if one is not None:
            found = f"an array of {one.data.ndim} axes{' inside a container' if one.trail else ''}"
        option = what.partition("=")[0]
        raise DefinitionError(
            f"Node {node!r}, blob {name!r}: {what} expect an array of {count} axes, but the blob is "
            f"made of {found}. Give one for each axis of a blob that is one array, or remove "
            f"{option}."
        )


def check_dimensions(node: str, blobs: Mapping[str, EncodedBlob]) -> None:
    """Check that axes of the same name have the same length in all blobs of a node."""
    known: dict[str, tuple[str, int]] = {}
    for name, blob in blobs.items():
        if blob.options.dims:
            part = blob.parts[0]
            order = part.order or range(part.data.ndim)
            for axis, length in zip(order, part.data.shape, strict=True):
                dimension = blob.options.dims[axis]
                other, expected = known.setdefault(dimension, (name, length))
                if length != expected:
                    raise DefinitionError(
                        f"Node {node!r}: the dimension {dimension!r} has {expected} items in the blob "
                        f"{other!r} and {length} in {name!r}. Give them the same length, or "
                        f"different names in dims."
                    )


class RefusedBlobsError(DefinitionError):
    """What is wrong with blobs: those that cannot be saved, by node and name, and other lines.

    These stay on the worker, see `join_refusals`; the message alone is sent.
    """

    refused: Mapping[tuple[str, str], UnsupportedValueError] = MappingProxyType({})
    others: Sequence[str] = ()


def join_refusals(errors: Sequence[DefinitionError]) -> DefinitionError:
    """One error for what is wrong on several nodes."""
    refused: dict[tuple[str, str], UnsupportedValueError] = {}
    others: list[str] = []
    for error in errors:
        if isinstance(error, RefusedBlobsError):
            refused |= error.refused
            others += error.others
        else:
            others.append(str(error))
    return DefinitionError("\n".join([*_explain(refused), *others]))


def _explain(refused: Mapping[tuple[str, str], UnsupportedValueError]) -> Iterator[str]:
    """Yield a line for each blob, with its nodes, then one with the names of those that are left.

    What to do is said once, so that many lines stay readable.
    """
    alike: dict[tuple[str, str, type, str, str], list[str]] = {}
    for (node, blob), error in refused.items():
        trail = (re.sub(r"^_(\d+)_key$", r"key \1", part) for part in error.trail)
        item = f", item {'/'.join(trail)}" if error.trail else ""
        alike.setdefault((blob, item, error.cls, error.why, error.remedy), []).append(node)
    told: set[str] = set()
    num_characters = 0
    left: dict[str, list[str]] = {}
    for (blob, item, cls, why, own_remedy), nodes in alike.items():
        if num_characters > _MOST_CHARACTERS:
            left.setdefault(blob, []).extend(nodes)
            continue
        name = cls.__qualname__
        if cls.__module__ != "builtins":
            name = f"{cls.__module__}.{name}"
        ending = "s" if len(nodes) > 1 else ""
        where = f"Node{ending} {listed(map(repr, nodes), 3)}, blob {blob!r}{item}"
        line = f"{where}: {name} cannot be saved: {why}."
        # A codec for such a type would be refused.
        remedy = own_remedy or (_CONVERT if needs_no_codec(cls) else _REGISTER)
        if remedy not in told:
            told.add(remedy)
            pickle = "" if own_remedy else _PICKLE
            exclude = (
                f"; or exclude the blob from checkpoints, outputs=Blob({blob!r}, transient=True)."
            )
            line += f" {remedy.format(cls.__name__)}{pickle}{exclude}"
        num_characters += len(line)
        yield line
    if left:
        names = (f"{blob!r} of {counted(len(nodes), 'node')}" for blob, nodes in left.items())
        yield f"{counted(len(left), 'more blob')} cannot be saved: {listed(names, _MOST_NAMES)}."


_MOST_CHARACTERS = 13_000  # of the lines that say what is wrong; longer messages are cut
_MOST_NAMES = 200
_REGISTER = "Register a codec for it, register_codec({}, encode, decode)"
_PICKLE = "; or pickle it, allow_pickle=True for the checkpoint manager (--allow-pickle)"
_CONVERT = "Convert it to a type that can be saved, such as an array of numbers or a list"


# --- shared memory


def _find_shared_memory(
    node: str, memory: Sequence[_View], beside: Mapping[str, Array]
) -> Iterator[str]:
    arrays = [*(view.array for view in memory), *beside.values()]
    is_once = len(set(map(id, arrays))) == len(arrays)
    if is_once and all(view.array.flags.owndata for view in memory):
        return  # arrays that own their memory share none
    memory = [*memory, *(_View(name, (), array) for name, array in beside.items())]
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
        reaching = [(end, other) for end, other in reaching if end > low]
        for _, other in reaching:
            pair = (min(index, other), max(index, other))
            if (not named or pair < named) and _overlap(*(memory[i].array for i in pair)):
                named = pair
        reaching.append((high, index))
    if named:
        first, second = ("/".join((memory[i].blob, *memory[i].trail)) for i in named)
        yield (
            f"Node {node!r}: the blobs {first!r} and {second!r} share memory, but would "
            f"not share it after a resume. Copy one of them (array.copy()), or save only "
            f"one and derive the other from it."
        )


def _is_constant(array: Array) -> bool:
    """Whether its memory is that of `bytes`, so that nobody can tell who shares it."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, bytes)


def _overlap(one: Array, other: Array) -> bool:
    try:
        return np.shares_memory(one, other, max_work=1_000_000)  # type: ignore[arg-type]  # any int is allowed
    except np.exceptions.TooHardError:
        return True
