"""What is saved of nodes at the end of an epoch: their blobs, encoded. Runs on workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jobrunner.checkpoint.encoding import (
    Codec,
    EncodedBlob,
    check_dimensions,
    check_part,
    encode_blobs,
    with_options,
)
from jobrunner.checkpoint.history_writer import RowCount
from jobrunner.checkpoint.log import NodeContents
from jobrunner.checkpoint.store import digest_blob
from jobrunner.define import DEFAULT_ARRAY_OPTIONS, ArrayOptions
from jobrunner.errors import DefinitionError
from jobrunner.gc_pause import gc_paused
from jobrunner.names import BlobKey
from jobrunner.workspace import Rows, Workspace


class Constant(NamedTuple):
    """A blob without arrays, which is encoded once until a task sets it."""

    version: int
    encoded: EncodedBlob


Constants = dict[BlobKey, Constant]


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the global blobs of nodes are encoded, except transient ones; the same for a whole run."""

    nodes: Sequence[str] = ()
    """The nodes that are saved."""
    codecs: Sequence[Codec] = ()
    allow_pickle: bool = False
    initial: Mapping[str, Collection[str]] | None = None
    """Node -> the blobs that its init tasks make; only these may contain objects with a state."""
    options: Mapping[str, Mapping[str, ArrayOptions]] = field(default_factory=dict)
    """Node -> blob -> how its arrays are stored."""
    default: ArrayOptions = DEFAULT_ARRAY_OPTIONS
    """The same for blobs without options."""
    replicated: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Name of a blob -> the nodes that have it. The first one saves it."""
    partitions: Mapping[str, tuple[int, Sequence[str]]] = field(default_factory=dict)
    """Name of a blob -> its axis, and the nodes that have its parts."""
    busy: frozenset[str] = frozenset()
    """The nodes that have tasks in every epoch."""
    histories: Sequence[str] = ()
    """The names of blobs that are histories."""
    puts: int | None = None
    """How many values a whole run puts in a history, if that is known."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What is told of a node at one position; it refers to no array."""

    versions: Mapping[str, int]
    """Of the blobs."""
    contents: NodeContents
    """What the log says of the store; also of a replica that another node saves."""
    replicas: Mapping[str, str]
    """Replicated blobs -> digests, which all nodes must share."""
    parts: Mapping[str, str]
    """Partitioned blobs -> dtype and shape, but for the length along the axis."""


@dataclass(frozen=True, slots=True)
class NodeCapture:
    """What is saved of a node at one position."""

    blobs: Mapping[str, EncodedBlob]
    """Their arrays are those of the workspace: before a task runs, those that are not at rest must
    be written or copied."""
    at_rest: Collection[int]
    """The `id` of each array that lies in a blob: nothing changes it as long as this refers to it."""
    histories: Mapping[str, RowCount]
    facts: NodeFacts


@gc_paused()  # of thousands of blobs, none of what is made here is garbage
def capture_nodes(
    encoding: Encoding, workspaces: Mapping[str, Workspace], constants: Constants
) -> dict[str, NodeCapture]:
    """Encode the blobs of a worker's nodes, by node.

    Raises DefinitionError, which names all blobs of a node that cannot be encoded.
    """
    encoded: dict[str, dict[str, EncodedBlob]] = {}
    for node in encoding.nodes:
        if node in workspaces:
            encoded[node] = encode_node(encoding, node, workspaces[node], constants)
    replicas: dict[str, dict[str, str]] = defaultdict(dict)  # by node and blob
    for name, owners in encoding.replicated.items():
        for node in owners:
            if name in encoded.get(node, ()):
                replicas[node][name] = digest_blob(encoded[node][name])
    parts: dict[str, dict[str, str]] = defaultdict(dict)  # by node and blob
    for name, (axis, owners) in encoding.partitions.items():
        for node in owners:
            if name in encoded.get(node, ()):
                value = workspaces[node].value(name)
                check_part(node, name, value, encoded[node][name], axis)
                parts[node][name] = _describe_part(value, axis)
    captures = {}
    for node, blobs in encoded.items():
        workspace = workspaces[node]
        versions = {name: workspace.versions[name] for name in blobs}
        histories = _count_rows(encoding, workspace)
        contents = _describe_contents(encoding, node, blobs, histories)
        facts = NodeFacts(versions, contents, replicas[node], parts[node])
        for name in replicas[node]:
            if node != encoding.replicated[name][0]:
                del blobs[name]
        captures[node] = NodeCapture(blobs, _find_at_rest(workspace, blobs), histories, facts)
    return captures


def encode_node(
    encoding: Encoding, node: str, workspace: Workspace, constants: Constants
) -> dict[str, EncodedBlob]:
    """Encode the blobs of a node, but for constants, which are taken over and added to."""
    unchanged: dict[str, EncodedBlob] = {}
    values: dict[str, Any] = {}
    for name in workspace.globals:
        if name in workspace.transient or workspace.has_rows(name):
            continue
        constant = constants.get((node, name))
        if constant is not None and constant.version == workspace.versions[name]:
            unchanged[name] = constant.encoded
            values[name] = None  # keeps its place in the order of blobs
        else:
            values[name] = workspace.value(name)
    blobs = encode_blobs(
        node, values, encoding.codecs, allow_pickle=encoding.allow_pickle, done=unchanged
    )
    for name, value in values.items():
        if type(value) is np.ndarray or name in unchanged:
            continue
        if workspace.is_provable(name) and not workspace.holds_arrays(name):
            tree = msgspec.Raw(msgspec.json.encode(blobs[name].tree))
            blobs[name] = replace(blobs[name], tree=tree)
            constants[node, name] = Constant(workspace.versions[name], blobs[name])
    options = encoding.options.get(node, {})
    if options or encoding.default.compressors:
        for name, blob in blobs.items():
            blobs[name] = with_options(node, name, blob, options.get(name), encoding.default)
        check_dimensions(node, blobs)
    return blobs


def _describe_contents(
    encoding: Encoding, node: str, blobs: Mapping[str, EncodedBlob], histories: Collection[str]
) -> NodeContents:
    """What the log says of blobs; raises DefinitionError for a state that no resume could load."""
    contents = NodeContents([*blobs, *histories])
    for name, blob in blobs.items():
        if blob.classes:
            contents.classes[name] = sorted(blob.classes)
        if not blob.has_state:
            continue
        contents.states.append(name)
        if encoding.initial is not None and name not in encoding.initial.get(node, ()):
            raise DefinitionError(
                f"Node {node!r}, blob {name!r}: it contains an object that is saved by its "
                f"state_dict(), but no task of the init group makes the blob, so a resume "
                f"would have no object to load the state into. Make the blob in the init "
                f"group, or store the object's state_dict() in it, or exclude it from "
                f"checkpoints: outputs=Blob({name!r}, transient=True)."
            )
    return contents


def _find_at_rest(workspace: Workspace, blobs: Mapping[str, EncodedBlob]) -> set[int]:
    """The `id` of each array of encoded blobs that lies in its blob as it is."""
    at_rest = set()
    for name, blob in blobs.items():
        is_provable = bool(blob.parts) and workspace.is_provable(name)
        for part in blob.parts:
            if is_provable or workspace.has_at_rest(name, part.data):
                at_rest.add(id(part.data))
    return at_rest


def _count_rows(encoding: Encoding, workspace: Workspace) -> dict[str, RowCount]:
    """How far the histories of a node have come."""
    counts = {}
    for name, rows in workspace.histories.items():
        if workspace.has_rows(name):
            dims = _find_dims(encoding, workspace.node, rows)
            counts[name] = RowCount(rows.count, rows.last or 0, rows.holds, dims)
    return counts


def _find_dims(encoding: Encoding, node: str, rows: Rows) -> tuple[str, ...]:
    """The names of the axes of a history's values; raises DefinitionError if they do not fit."""
    options = encoding.options.get(node, {}).get(rows.name)
    if options is None or options.dims is None:
        return ()
    axes = len(rows.shape) + rows.extends
    if len(options.dims) != axes:
        raise DefinitionError(
            f"Node {node!r}, blob {rows.name!r}: dims={options.dims} expect values of "
            f"{len(options.dims)} axes, but those of the history have {axes}. Give one for each axis."
        )
    return options.dims


def _describe_part(value: object, axis: int) -> str:
    """What the parts of a partitioned array have in common; of another value, its type."""
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        return type(value).__name__
    dtype = str(value.dtype)
    if value.dtype.kind in "SU":
        dtype = value.dtype.str[:2]  # strings of different widths can be joined
    shape = list(map(str, value.shape))
    shape[axis] = ":"
    return f"{dtype}[{', '.join(shape)}]"
