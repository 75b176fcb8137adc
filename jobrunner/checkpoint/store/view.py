"""Open a recorded checkpoint, without a cluster, the job or its code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Self

import msgspec
import numpy as np
from dask.utils import format_bytes

from jobrunner.checkpoint.encoding import Array
from jobrunner.checkpoint.storage import Result
from jobrunner.checkpoint.store.manifest import ADVICE, Row
from jobrunner.checkpoint.store.position import name_position, steps_in
from jobrunner.checkpoint.store.reader import StoreReader
from jobrunner.define import TEXT, checked
from jobrunner.errors import (
    BlobNotFoundError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    JobRunnerError,
)
from jobrunner.texts import (
    Html,
    card,
    counted,
    folded,
    format_metrics,
    format_seconds,
    format_time,
    listed,
    pairs,
    printable,
    show,
    table,
)

MOST_ROWS = 100
MOST_LETTERS = 100
"""Shown in a notebook."""


class NodeCheckpoint(Mapping[str, Any]):
    """The blobs of one node at one epoch, by name, in the order in which they were saved.

    Arrays are lazy: `zarr.Array` objects, alone or inside their containers. Each chunk that is read
    through them is verified, and damage raises `CheckpointCorruptError`; `load` verifies the whole
    blob and its documents.
    """

    def __init__(
        self,
        node: str,
        reader: StoreReader,
        borrowed: Mapping[str, Callable[[], NodeCheckpoint]],
    ) -> None:
        self.node = node
        self.path = reader.root
        self._reader = reader
        self._manifest = reader.read_manifest()
        self._borrowed = borrowed  # replicated blobs, which are in other stores

    def __getitem__(self, blob: str) -> Any:
        own = self._owner(blob)
        return own._reader.peek(own._manifest, blob)

    def load(self, blob: str) -> Any:
        """Read a blob and verify every byte.

        Raises
        ------
        CheckpointCorruptError
            A file is not what was written.
        BlobNotFoundError
            There is no such blob.
        """
        own = self._owner(blob)
        return own._reader.load([blob], manifest=own._manifest)[blob]

    def outline(self, blob: str) -> Any:
        """Return the blob with an `ArrayOutline`, shape and dtype, in place of each array."""
        own = self._owner(blob)
        return own._reader.peek(own._manifest, blob, outline=True)

    def digest(self, blob: str) -> str:
        """Return a SHA-256 of a blob's values, types and shapes.

        Equal digests mean equal blobs, unless the CRC-32C of their chunks collide.
        """
        found = self._owner(blob)._manifest.blob(blob)
        entries = [array.alone() if isinstance(array, Row) else array for array in found.arrays]
        # The same for a row of a stack as for an array of its own.
        arrays = [{**msgspec.to_builtins(it), "path": None, "within": None} for it in entries]
        try:
            text = json.dumps([found.tree, arrays], sort_keys=True)
        except RecursionError as error:
            raise CheckpointCorruptError(
                f"{self.path}: the value of the blob {blob!r} is nested too deep. {ADVICE}"
            ) from error
        return hashlib.sha256(text.encode()).hexdigest()

    def _owner(self, blob: str) -> NodeCheckpoint:
        """Return the checkpoint of the node that saved the blob."""
        own = self._borrowed[blob]() if blob in self._borrowed else self
        return own._saved(blob)

    def _saved(self, blob: str) -> NodeCheckpoint:
        if blob not in self._manifest.blobs:
            there = ", ".join(map(repr, self)) or "none"
            raise BlobNotFoundError(f"{self.path} has no blob {blob!r}. Its blobs are: {there}.")
        return self

    def __iter__(self) -> Iterator[str]:
        return iter([*self._manifest.blobs, *self._borrowed])

    def __len__(self) -> int:
        return len(self._manifest.blobs) + len(self._borrowed)

    def __contains__(self, blob: object) -> bool:
        return blob in self._manifest.blobs or blob in self._borrowed

    def __repr__(self) -> str:
        return printable(f"<NodeCheckpoint {self.path}: {listed(self, 12)}>", kept="")

    def _repr_html_(self) -> Html:
        rows = [(blob, self._sketch(blob)) for blob in islice(self, MOST_ROWS)]
        title = f"{counted(len(self), 'blob')} of node {self.node}"
        return card("NodeCheckpoint", title, table(("blob", "value"), rows, left=(0, 1)))

    def _sketch(self, blob: str) -> str:
        try:
            return show(self.outline(blob))[:MOST_LETTERS]
        except JobRunnerError as error:  # damaged, or of a later version
            return f"{type(error).__name__}: {error}"[:MOST_LETTERS]


class Checkpoint(Mapping[str, NodeCheckpoint]):
    """A recorded epoch: node -> its blobs.

    Attributes
    ----------
    epoch : int
    step : int
        How many steps of the epoch it contains; 0: all.
    record : mapping
        Its entry in the log.

    Examples
    --------
    >>> with manager.open(5) as checkpoint:
    ...     checkpoint["server"]["centroids"][:2]
    array([0., 0.])
    """

    def __init__(
        self,
        epoch: int,
        record: Mapping[str, Any],
        readers: Mapping[str, StoreReader],
        release: Callable[[], object] | None = None,
    ) -> None:
        self.epoch = epoch
        self.step = steps_in(record)
        self.record = record
        self._readers = readers
        self._release = release
        self._open: dict[str, NodeCheckpoint] = {}

    def close(self) -> None:
        """Remove the pin of ``open(epoch, pin=True)``; may be called again."""
        release, self._release = self._release, None
        if release is not None:
            with contextlib.suppress(CheckpointNotFoundError):  # the epoch, and its pin, are gone
                release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def read_ahead(self, nodes: Collection[str]) -> None:
        """Read the manifests of nodes, many at once on slow storage."""
        list(self._each(self.__getitem__, nodes))

    def _each(self, call: Callable[[str], Result], nodes: Collection[str]) -> Iterator[Result]:
        for reader in self._readers.values():
            return reader.files.each(call, nodes)
        return map(call, nodes)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that were saved."""
        return tuple(self._readers)

    def __getitem__(self, node: str) -> NodeCheckpoint:
        if node not in self._readers:
            there = ", ".join(map(repr, self)) or "none"
            raise BlobNotFoundError(f"Epoch {self.epoch} has no node {node!r}. It has {there}.")
        if node not in self._open:
            replicated = self.record["details"].get("replicated", {})
            self._open[node] = NodeCheckpoint(
                node,
                self._readers[node],
                {
                    name: partial(self.__getitem__, owner)
                    for name, (owner, *others) in replicated.items()
                    if node in others and owner in self._readers
                },
            )
        return self._open[node]

    @checked(blob=TEXT)
    def array(self, blob: str) -> PartitionedArray:
        """Return all parts of a partitioned blob as one lazy array.

        Parameters
        ----------
        blob : str
            Declared with ``Blob(..., partition=axis)``.

        Raises
        ------
        BlobNotFoundError
            No such blob was declared.
        """
        partitions = self.record["details"].get("partitions", {})
        if blob not in partitions:
            there = ", ".join(map(repr, partitions)) or "none"
            raise BlobNotFoundError(
                f"Epoch {self.epoch} has no partitioned blob {blob!r}. It has {there}."
            )
        about = partitions[blob]
        parts = list(self._each(lambda node: self[node][blob], about["nodes"]))
        try:
            return PartitionedArray(blob, about["axis"], parts)
        except CheckpointError as error:
            raise CheckpointError(f"{self[about['nodes'][0]].path}: {error}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, node: object) -> bool:
        return node in self._readers

    def __repr__(self) -> str:
        about = f"{name_position(self.record)}: {listed(self._readers, 12)}"
        return printable(f"<Checkpoint of {about}>", kept="")

    def _repr_html_(self) -> Html:
        record, stores = self.record, self.record["stores"]
        about = {
            "saved": format_time(record["time"]),
            "size": format_bytes(sum(store["nbytes"] for store in stores.values())),
        }
        if metrics := record["details"].get("metrics", {}):
            about["metrics"] = listed(format_metrics(metrics, len(metrics)), 12)
        rows = [
            (node, format_bytes(stores[node]["nbytes"]), format_seconds(stores[node]["seconds"]))
            for node in islice(self, MOST_ROWS)
        ]
        nodes = table(("node", "written", "in"), rows, left=(0,))
        fold = folded(counted(len(self), "node"), nodes)
        return card("Checkpoint", name_position(record), pairs(about), fold)


class PartitionedArray:
    """The parts of an array that nodes saved, concatenated along an axis.

    Indexing it with ints, slices and ``...`` reads only the chunks that hold the items requested.

    Parameters
    ----------
    name : str
    axis : int
    parts : sequence of array
        Lazy arrays, in order, that differ only in their length along `axis`.
    """

    def __init__(self, name: str, axis: int, parts: Sequence[Any]) -> None:
        fit = {_describe_but(part, axis) for part in parts}
        if len(fit) != 1 or None in fit:
            found = ", ".join(map(_describe, parts))
            raise CheckpointError(
                f"The parts of {name!r} do not fit together along axis {axis}: {found}. Parts must "
                f"be arrays with that axis, and differ only in their length along it."
            )
        self.name = name
        self.axis = axis
        self.parts = tuple(parts)
        self.dtype: np.dtype[Any] = parts[0].dtype
        ends = np.cumsum([part.shape[axis] for part in parts]).tolist()
        self._starts = [0, *ends[:-1]]
        first = list(parts[0].shape)
        first[axis] = ends[-1]
        self.shape: tuple[int, ...] = tuple(first)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        index: list[range] = []  # of each axis, forward
        finish: list[int | slice] = []  # drops axes given by an int, and flips others
        for item, length in zip(self._full(key), self.shape, strict=True):
            try:
                places = range(length)[item]
            except IndexError:
                raise IndexError(
                    f"index {item} is out of range for an axis of {self.name!r} of length {length}"
                ) from None
            if isinstance(places, int):
                places = range(places, places + 1)
                finish.append(0)
            else:
                finish.append(slice(None, None, -1 if places.step < 0 else 1))
            index.append(places if places.step > 0 else places[::-1])
        along = index[self.axis]
        pieces = []
        for part, start in zip(self.parts, self._starts, strict=True):
            stop = start + part.shape[self.axis]
            low, high = (max(0, -(-(end - along.start) // along.step)) for end in (start, stop))
            if inside := along[low:high]:
                index[self.axis] = range(inside.start - start, inside.stop - start, inside.step)
                pieces.append(_read(part, index))
        if not pieces:
            index[self.axis] = range(0)
            pieces = [_read(self.parts[0], index)]
        return np.concatenate(pieces, self.axis)[tuple(finish)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[...], dtype)

    def to_dask(self) -> Any:
        """Return it as a `dask.array.Array`, a block for each file on disk."""
        import dask.array

        return dask.array.concatenate(
            [dask.array.from_array(part, part.shards or part.chunks) for part in self.parts],
            self.axis,
        )

    def _full(self, key: Any) -> list[Any]:
        """Return an index of every axis."""
        items = list(key) if isinstance(key, tuple) else [key]
        for item in items:
            if item is not Ellipsis and not isinstance(item, slice):
                operator.index(item)
        if Ellipsis not in items:
            items.append(Ellipsis)
        if len(items) - 1 > self.ndim:
            raise IndexError(f"{len(items) - 1} indices for {self.ndim} axes of {self.name!r}")
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (self.ndim - len(items) + 1)
        return items

    def __repr__(self) -> str:
        return f"<PartitionedArray {self.name!r} {self.dtype}{list(self.shape)}, {len(self.parts)} parts>"

    def _repr_html_(self) -> Html:
        parts = f"{len(self.parts)} along axis {self.axis}"
        about = {"shape": self.shape, "data type": self.dtype, "parts": parts}
        return card("PartitionedArray", self.name, pairs(about))


def _read(part: Any, index: Sequence[range]) -> Array:
    # An empty range may start anywhere.
    ends = ((it.start, it.stop, it.step) if it else (0, 0) for it in index)
    return np.asarray(part[tuple(slice(*end) for end in ends)])


def _describe_but(part: Any, axis: int) -> tuple[Any, ...] | None:
    """Return dtype and shape without an axis; None if there is no such axis."""
    shape = getattr(part, "shape", ())
    return (part.dtype, *shape[:axis], *shape[axis + 1 :]) if axis < len(shape) else None


def _describe(part: Any) -> str:
    is_array = hasattr(part, "shape") and hasattr(part, "dtype")
    return f"{part.dtype}{list(part.shape)}" if is_array else type(part).__name__
