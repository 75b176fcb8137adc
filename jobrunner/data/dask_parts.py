"""Readers of Dask collections, partition by partition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from jobrunner.data.reader import DataReader
from jobrunner.data.record_reader import RecordReader
from jobrunner.data.rows import Blocks, is_of
from jobrunner.define import Natural, checked
from jobrunner.errors import DefinitionError


@checked
def from_dask(collection: Any, *, lengths: Sequence[Natural] | None = None) -> DataReader:
    """A reader of a Dask array, dataframe or bag, which computes one partition at a time.

    Parameters
    ----------
    collection : dask.array.Array, dask.dataframe.DataFrame or Series, or dask.bag.Bag
        Of an array, a partition is a row of chunks.
    lengths : sequence of int, optional
        Rows of each partition of a dataframe or bag. Without them, all partitions are computed once
        when the reader is made, to count theirs.

    Raises
    ------
    DefinitionError
        If it is no such collection, is persisted on a cluster, or `lengths` has not one item for
        each partition.

    Notes
    -----
    Tasks run on Dask workers, and one that waits for others there could block its worker. So
    partitions are computed in the thread that reads. The last two stay in memory. Each partition is
    computed again in each pass: save what is expensive to files first, or, if it fits the memory of
    that process, persist it there: ``from_dask(collection.persist(scheduler="threads"))``.
    """
    is_array, is_bag = hasattr(collection, "blocks"), hasattr(collection, "to_textfiles")
    is_collection = hasattr(type(collection), "__dask_graph__")
    if not is_collection or not (is_array or is_bag or hasattr(collection, "partitions")):
        raise DefinitionError(
            f"from_dask: collection must be a Dask array, dataframe, series or bag; got "
            f"{collection!r:.200}."
        )
    _check_is_local(collection)
    expected = len(_chunks(collection)) if is_array else collection.npartitions
    if lengths is not None and (is_array or len(lengths) != expected):
        raise DefinitionError(
            f"from_dask: lengths must have one item for each of the {expected} partitions of a "
            f"dataframe or bag, and is not for arrays, which know theirs; got {len(lengths)} items."
        )
    if is_array:
        lengths, parts = _chunks(collection), collection.blocks
    elif is_bag:
        lengths = lengths or _compute(collection.map_partitions(_count))
        # Each of them apart would optimize the graph of all partitions again.
        parts = collection.to_delayed()
    else:
        lengths = lengths or _compute(collection.map_partitions(len))
        parts = collection.partitions

    def load(number: int) -> Any:
        part = _compute(parts[number])
        return list(part) if is_bag else part

    def describe(number: int) -> str:
        return f"partition {number} of {type(collection).__name__}"

    return RecordReader(Blocks([int(length) for length in lengths], load, describe))


def _chunks(array: Any) -> Sequence[Any]:
    """Rows of each row of chunks."""
    counts: Sequence[Any] = array.chunks[0] if array.ndim else ()
    if not counts or any(count != count for count in counts):  # unknown ones are NaN
        raise DefinitionError(
            "from_dask: the array's chunks along the first axis must be of known length; call its "
            "compute_chunk_sizes() first."
        )
    return counts


def _check_is_local(collection: Any) -> None:
    """Raise `DefinitionError` if the graph has futures, which no local scheduler can compute."""
    if hasattr(collection, "expr"):  # a dataframe
        graphs = [collection.partitions[0].optimize().__dask_graph__()]
    else:
        layers = getattr(collection.__dask_graph__(), "layers", {}).values()
        graphs = [layer for layer in layers if layer.is_materialized()]
    for value in chain.from_iterable(graph.values() for graph in graphs):
        if is_of(value, "distributed"):
            raise DefinitionError(
                f"from_dask: the {type(collection).__name__} is persisted on a cluster, or made of "
                f"futures; expected one that can be computed in the process that reads. Persist it "
                f"there, collection.persist(scheduler='threads'), or save it to files and read "
                f"these."
            )


def _compute(collection: Any) -> Any:
    return collection.compute(scheduler="synchronous")


def _count(partition: Iterable[Any]) -> list[int]:
    return [sum(1 for _ in partition)]
