"""Recorded epochs as an axis: a blob of many epochs as one Dask array, and a run as an xarray Dataset.

Opening reads the log, and one document of each node. The tasks that read the other epochs check that
their values are alike. Only a value of 8 MiB or more costs a document of each epoch: its digest names
the task that reads it, so that Dask reads equal values once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from jobrunner.checkpoint.directory import Directory, EpochRecord
from jobrunner.checkpoint.load_plan import blobs_of, with_contents
from jobrunner.checkpoint.store import StoreDocument, StoreReader
from jobrunner.errors import BlobNotFoundError, CheckpointError, DefinitionError
from jobrunner.joined import CHUNK_BYTES, ValueType, cut, join_values, type_of_array
from jobrunner.positions import EpochLike, PublicPosition, format_ranges
from jobrunner.texts import listed

if TYPE_CHECKING:
    from dask.array import Array
    from xarray import Dataset, DataTree

_SMALL_BYTES = 8 << 20
"""Several shorter values make a chunk."""

_AXES = ("epoch", "node", "step")
"""Coordinates of a Dataset, so no blob or metric has such a name there."""


def find_type(reader: StoreReader, document: StoreDocument, blob: str) -> ValueType | None:
    """The type of an array or a number; None of anything else."""
    if blob not in document.blobs:
        return None  # a history
    array = reader.array_reader(document, blob)
    if array is not None:
        return ValueType(tuple(array.shape), array.dtype)
    if document.blobs[blob].arrays:
        return None
    return type_of_array(reader.load([blob], document=document)[blob])


@dataclass(frozen=True, slots=True)
class EpochValue:
    """The value of a node at an epoch, and what it must be."""

    epoch: PublicPosition
    node: str
    reader: StoreReader
    type: ValueType


class EpochChunk:
    """Reads a blob of some nodes at some epochs; picklable, and needs nothing else of the job.

    `axis` is that along which the values of the nodes are joined; None: along a new one.
    """

    # Not a dataclass: Dask would search all its fields for collections.
    def __init__(self, blob: str, rows: Sequence[Sequence[EpochValue]], axis: int | None) -> None:
        self.blob = blob
        self.rows = rows  # one an epoch
        self.axis = axis

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what it reads."""
        shapes = [part.type.shape for part in self.rows[0]]
        if self.axis is None:
            return (len(self.rows), len(shapes), *shapes[0])
        joined = list(shapes[0])
        joined[self.axis] = sum(shape[self.axis] for shape in shapes)
        return (len(self.rows), *joined)

    def read(self) -> Any:
        """Read and verify the values, and stack the epochs; of equal values, only one is read."""
        values: dict[str, Any] = {}
        joined = []
        for row, documents in zip(self.rows, self.read_documents(), strict=True):
            arrays = []
            for part, document in zip(row, documents, strict=True):
                digest = part.reader.digest(document, self.blob)
                if digest not in values:
                    values[digest] = part.reader.load([self.blob], document=document)[self.blob]
                arrays.append(values[digest])
            joined.append(join_values(arrays, self.axis))
        return np.stack(joined)

    def read_documents(self) -> list[list[StoreDocument]]:
        """Read the documents of all parts, in the form of `rows`.

        Raises CheckpointError if the values are not alike.
        """
        parts = [part for row in self.rows for part in row]
        files = parts[0].reader.files
        documents = list(files.each(lambda part: part.reader.read_document(), parts))
        by_problem: dict[str, list[PublicPosition]] = {}
        for part, document in zip(parts, documents, strict=True):
            actual = find_type(part.reader, document, self.blob)
            if actual != part.type:
                problem = f"node {part.node!r} has {actual or 'no array'} instead of {part.type}"
                by_problem.setdefault(problem, []).append(part.epoch)
        if by_problem:
            problems = [
                f"at epochs {format_ranges(epochs)}, {name}" for name, epochs in by_problem.items()
            ]
            raise CheckpointError(
                f"The values of the blob {self.blob!r} in {parts[0].reader.directory} have not all "
                f"the same shape and dtype: {listed(problems)}. Leave these epochs or nodes out."
            )
        width = len(self.rows[0])
        return [documents[i : i + width] for i in range(0, len(documents), width)]


class EpochAxis:
    """Some recorded epochs of a directory, by default all whole ones.

    Raises CheckpointNotFoundError if one that is named is not recorded, or if there are none.
    """

    def __init__(self, directory: Directory, epochs: Collection[EpochLike] | None) -> None:
        self._directory = directory
        snapshot = directory.snapshot()
        if epochs is None:
            positions = [at for at in snapshot.epochs if not at.step]
        elif len(epochs) == 0:
            raise DefinitionError("epochs must name at least one epoch; got none.")
        else:
            positions = [directory.resolve(epoch, snapshot) for epoch in epochs]
        if not positions:
            positions = [directory.resolve("latest", snapshot)]
        self.records: list[EpochRecord] = []
        by_contents: dict[Any, EpochRecord] = {}  # most epochs share an entry of the log
        for _, record in directory.records(positions, snapshot):
            if isinstance(record, CheckpointError):
                raise record
            key = (record.contents_number, *record.stores)
            if key not in by_contents:
                by_contents[key] = with_contents(directory, record)
            self.records.append(replace(record, contents=by_contents[key].contents))
        self._newest_first = sorted(self.records, key=lambda record: record.at, reverse=True)
        self._with_contents = list(by_contents.values())  # one record for all that have the same
        self.newest = self._newest_first[0]
        """The epoch whose values all others must be like."""
        self._documents: dict[str, StoreDocument] = {}  # of stores

    def find_reader(self, record: EpochRecord, node: str, blob: str) -> StoreReader | None:
        """The store that has a blob of a node, if any; it makes plain values only."""
        owner = record.details.replicated.get(blob, [node])[0]
        store = record.stores.get(owner)
        if store is None or blob not in (record.contents or {})[owner].blobs:
            return None
        return StoreReader(self._directory.files, self._directory.path, store.name, store.sha256)

    def document(self, reader: StoreReader) -> StoreDocument:
        """The document of a store; each is read once."""
        if reader.store not in self._documents:
            self._documents[reader.store] = reader.read_document()
        return self._documents[reader.store]

    def nodes_of(self, blob: str) -> list[str]:
        """The nodes that have a blob at the newest epoch; of a replicated one, the first."""
        details = self.newest.details
        if blob in details.partitions:
            return list(details.partitions[blob].nodes)
        if blob in details.replicated:
            return details.replicated[blob][:1]
        return [node for node in self.newest.stores if self.find_reader(self.newest, node, blob)]

    def _last_with(self, node: str, blob: str) -> EpochRecord:
        """The newest epoch that has a blob of a node, or else the newest."""
        for record in self._newest_first:
            if self.find_reader(record, node, blob) is not None:
                return record
        return self.newest

    def missing(self, blob: str, nodes: Collection[str]) -> str | None:
        """Which epochs lack a blob of nodes, in words; None if all have it."""
        for node in nodes:
            epochs = []
            for record in self.records:
                if self.find_reader(record, node, blob) is None:
                    epochs.append(record.at.public)
            if epochs:
                return f"node {node!r} has no blob {blob!r} at epochs {format_ranges(epochs)}"
        return None

    def array(self, blob: str, nodes: Collection[str] | None = None) -> Array:
        """See `MultiNodeCheckpointManager.array`."""
        if nodes is None:
            nodes = self.nodes_of(blob)
        nodes = list(dict.fromkeys(nodes))
        if not nodes:
            present = sorted(set(chain(*blobs_of(self.newest).values())))
            raise BlobNotFoundError(
                f"No node has a blob {blob!r} at epoch {self.newest.at} of {self._directory.path}. "
                f"The blobs there are {listed(present)}. If earlier epochs have it, name these and "
                f"its nodes: epochs=[...], nodes=[...]."
            )
        problem = self.missing(blob, nodes)
        if problem:
            raise BlobNotFoundError(
                f"{self._directory.path}: {problem}. Name nodes and epochs that have it."
            )
        return self._join(blob, nodes, self.records)

    def _join(self, blob: str, nodes: Sequence[str], records: Sequence[EpochRecord]) -> Array:
        """The values of nodes at epochs that all have them."""
        types: dict[str, ValueType | None] = {}
        for node in nodes:
            if self._is_history(node, blob):
                raise DefinitionError(
                    f"Blob {blob!r} of node {node!r} is a history, whose rows are one array "
                    f"already: manager.history_of({blob!r})."
                )
            types[node], _ = self._describe(node, blob)
        partition = self._last_with(nodes[0], blob).details.partitions.get(blob)
        axis = None if partition is None else partition.axis
        chunks = cut(blob, types, axis)  # refuses None
        rows = []
        for record in records:
            row = {}
            for node in nodes:
                reader = self.find_reader(record, node, blob)
                assert reader is not None
                row[node] = EpochValue(record.at.public, node, reader, types[node])  # type: ignore[arg-type]
            rows.append(row)
        array = _join_chunks(blob, rows, chunks, axis)
        if axis is None and len(nodes) == 1:
            array = array[:, 0]
        return array

    def _filled(self, blob: str, node: str) -> Array:
        """The values of a node, with NaN or NaT where epochs lack them."""
        import dask.array  # slow to import

        value_type, _ = self._describe(node, blob)
        assert value_type is not None
        dtype = _dtype_with_gaps(value_type.dtype)
        assert dtype is not None
        fill = np.array("NaT", dtype) if dtype.kind in "mM" else np.nan
        pieces = []
        for is_there, part in groupby(
            self.records, lambda record: self.find_reader(record, node, blob) is not None
        ):
            records = list(part)
            if is_there:
                pieces.append(self._join(blob, [node], records).astype(dtype))
            else:
                shape = (len(records), *value_type.shape)
                pieces.append(dask.array.full(shape, fill, dtype=dtype))
        array: Array = dask.array.concatenate(pieces)
        return array

    # --- as a Dataset

    def dataset(
        self, nodes: Collection[str] | None = None, blobs: Collection[str] | None = None
    ) -> Dataset | DataTree:
        """See `MultiNodeCheckpointManager.to_xarray`."""
        try:
            import xarray  # only users of this need it
        except ImportError as error:
            raise DefinitionError(
                f"to_xarray needs xarray, which cannot be imported here: {error}. Install it with "
                f"`pip install xarray`."
            ) from error
        nodes = list(self.newest.contents or {}) if nodes is None else list(nodes)
        by_node: dict[str, dict[str, Any]] = {node: {} for node in nodes}
        left_out = []
        for node in nodes:
            for blob in self._blobs_of(node):
                if blobs is not None and blob not in blobs:
                    continue
                value_type, dims = self._describe(node, blob)
                obstacle = self._find_obstacle(node, blob, value_type)
                if obstacle and blobs is None:
                    left_out.append(obstacle)
                else:
                    by_node[node][blob] = (value_type, dims)
        for blob in blobs or ():
            if not any(blob in described for described in by_node.values()):
                self.array(blob, nodes)  # raises
        epochs = self._add_epochs(xarray.Dataset(attrs={"left_out": left_out}))
        first = next(iter(by_node.values()), {})
        if all(described == first for described in by_node.values()):
            return self._add_blobs(epochs, first, nodes)
        tree = {"/": epochs}
        for node in nodes:
            tree[node] = self._add_blobs(xarray.Dataset(), by_node[node], [node])
        return xarray.DataTree.from_dict(tree)

    def _blobs_of(self, node: str) -> list[str]:
        """The blobs in the stores of a node, at any of the epochs; first those of the newest."""
        blobs: dict[str, None] = {}
        for record in (self.newest, *self._with_contents):
            contents = (record.contents or {}).get(node)
            if contents is not None:
                blobs.update(dict.fromkeys(contents.blobs))
        return list(blobs)

    def _find_obstacle(self, node: str, blob: str, value_type: ValueType | None) -> str | None:
        """Why some epoch has no value of a blob, and gets none, in words; None if each has one."""
        if self._is_history(node, blob):
            return f"blob {blob!r} of node {node!r} is a history: see history_of({blob!r})"
        if value_type is None:
            return f"blob {blob!r} of node {node!r} is no array or number"
        if self._can_be_filled(node, blob, value_type):
            return None
        return self.missing(blob, [node])

    def _can_be_filled(self, node: str, blob: str, value_type: ValueType) -> bool:
        """Whether there is a value for epochs that lack a blob."""
        is_part = blob in self._last_with(node, blob).details.partitions
        return _dtype_with_gaps(value_type.dtype) is not None and not is_part

    def _is_history(self, node: str, blob: str) -> bool:
        reader = self.find_reader(self._last_with(node, blob), node, blob)
        return reader is not None and blob in self.document(reader).entry.histories

    def _describe(self, node: str, blob: str) -> tuple[ValueType | None, list[str]]:
        """The type of a blob, and the names of its axes."""
        reader = self.find_reader(self._last_with(node, blob), node, blob)
        assert reader is not None
        document = self.document(reader)
        value_type = find_type(reader, document, blob)
        dims = []
        if value_type is not None and value_type.shape:
            array = reader.array_reader(document, blob)
            assert array is not None
            names = array.array.document.dimension_names
            for axis in range(len(value_type.shape)):
                name = names[axis] or "_dim_"
                is_free = not name.startswith("_dim_") and name not in _AXES
                dims.append(name if is_free else f"{blob}_{axis}")
        return value_type, dims

    def _add_epochs(self, dataset: Dataset) -> Dataset:
        """Add the epochs and their metrics."""
        from pandas import DataFrame  # xarray imports it, too

        positions = [record.at for record in self.records]
        dataset = dataset.assign_coords(epoch=[at.epoch for at in positions])
        if any(at.step for at in positions):
            dataset = dataset.assign_coords(step=("epoch", [at.step for at in positions]))
        metrics = DataFrame([record.details.metrics for record in self.records])
        for name in metrics:
            variable = f"metric_{name}" if name in _AXES else name
            dataset[variable] = "epoch", metrics[name].to_numpy()
        return dataset

    def _add_blobs(
        self, dataset: Dataset, described: Mapping[str, Any], nodes: list[str]
    ) -> Dataset:
        """Add blobs; a metric of the same name is called ``metric_...`` then."""
        import dask.array  # slow to import

        both = {name: f"metric_{name}" for name in described if name in dataset.data_vars}
        dataset = dataset.rename(both)
        for blob, (value_type, dims) in described.items():
            problem = self.missing(blob, nodes)
            attributes = {}
            if problem is not None:
                attributes["missing"] = problem
            if problem is None or not self._can_be_filled(nodes[0], blob, value_type):
                array = self.array(blob, nodes)
            elif len(nodes) == 1:
                array = self._filled(blob, nodes[0])
            else:
                array = dask.array.stack([self._filled(blob, node) for node in nodes], 1)
            axes = ["epoch", *dims]
            if array.ndim > len(axes):
                axes.insert(1, "node")
                dataset = dataset.assign_coords(node=nodes)
            variable = blob
            if blob in (*_AXES, *dims):
                variable = f"blob_{blob}"  # under its own name, it would have to be an axis' labels
            dataset[variable] = axes, array, attributes
        return dataset


def _dtype_with_gaps(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """The dtype of values if some are missing, as in pandas; None if it has no missing value."""
    if dtype.kind in "fcmM":
        return dtype
    return np.dtype(float) if dtype.kind in "biu" else None


def _join_chunks(
    blob: str,
    rows: Sequence[Mapping[str, EpochValue]],  # by epoch and node
    chunks: Sequence[Sequence[str]],  # nodes that lie in one chunk, if their values are small
    axis: int | None,
) -> Array:
    """Cut epochs into chunks, too, and return all as one array."""
    import dask.array  # slow to import
    from dask.base import tokenize
    from dask.delayed import delayed

    nbytes = {node: part.type.nbytes for node, part in rows[0].items()}
    is_small = max(nbytes.values()) < _SMALL_BYTES
    epochs_at_once = 1
    documents: list[list[StoreDocument]] = []  # of large values, by epoch and node
    if is_small:
        longest = max(sum(nbytes[node] for node in chunk) for chunk in chunks)
        epochs_at_once = max(1, CHUNK_BYTES // max(1, longest))
    else:
        chunks = [[node] for node in nbytes]
        parts = [list(row.values()) for row in rows]
        documents = EpochChunk(blob, parts, axis).read_documents()
    columns = []
    for i in range(0, len(rows), epochs_at_once):
        pieces = []
        for j, nodes in enumerate(chunks):
            cut_rows = [[row[node] for node in nodes] for row in rows[i : i + epochs_at_once]]
            chunk = EpochChunk(blob, cut_rows, axis)
            # What a chunk contains names the task that reads it: a large value that several epochs
            # have is one task then.
            content: list[Any] = [part.reader.identity for row in cut_rows for part in row]
            if not is_small:
                content = [cut_rows[0][0].reader.digest(documents[i][j], blob)]
            name = f"{blob}-{tokenize(content, axis)}"
            read = delayed(EpochChunk.read)(chunk, dask_key_name=name)
            dtype = cut_rows[0][0].type.dtype
            pieces.append(dask.array.from_delayed(read, chunk.shape, dtype))
        columns.append(dask.array.concatenate(pieces, 1 if axis is None else axis + 1))
    array: Array = dask.array.concatenate(columns)
    return array
