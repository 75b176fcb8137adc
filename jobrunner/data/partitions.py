"""Readers of Dask collections, partition by partition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from jobrunner.data.blocks import Blocks
from jobrunner.data.indexed import Indexed
from jobrunner.data.reader import DataReader, reader_of
from jobrunner.data.sources import is_of
from jobrunner.define import Rule, checked
from jobrunner.errors import DefinitionError


def _are_lengths(it: object) -> bool:
    return isinstance(it, list | tuple) and all(
        isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in it
    )


_LENGTHS = Rule("a list of ints >= 0", _are_lengths)


@checked
def from_dask(
    collection: Any,
    *,
    lengths: Annotated[Sequence[int], _LENGTHS] | None = None,
    scheduler: Literal["threads", "synchronous", "processes"] = "threads",
) -> DataReader:
    """A reader of a Dask array, dataframe or bag, which computes one partition at a time.

    Parameters
    ----------
    collection : dask.array.Array, dask.dataframe.DataFrame or Series, or dask.bag.Bag
        Of an array, a partition is a row of chunks.
    lengths : sequence of int, optional
        Rows of each partition of a dataframe or bag. Without them, all partitions are computed once
        when the reader is made, to count theirs.
    scheduler : str
        Which of Dask's local schedulers computes: "threads", "synchronous" or "processes".

    Raises
    ------
    DefinitionError
        If it is no such collection, is persisted on a cluster, or `lengths` has not one item for
        each partition.

    Notes
    -----
    Tasks run on Dask workers, and one that waits for others there could block its worker. So
    partitions are computed in the process that reads. The last two stay in memory. Each partition is
    computed again in each pass: save what is expensive to files first, or, if it fits the memory of
    that process, persist it there: ``from_dask(collection.persist(scheduler="threads"))``.
    """
    if not hasattr(type(collection), "__dask_graph__"):
        raise _refusal(collection)
    _check_is_local(collection)
    if hasattr(collection, "blocks"):
        kind, counts = "blocks", _chunks(collection)
    elif hasattr(collection, "partitions"):
        kind, counts = "partitions", lengths or ()
        if lengths is None:
            counts = list(_compute(collection.map_partitions(len), scheduler))
    elif hasattr(collection, "to_delayed") and hasattr(collection, "npartitions"):
        kind, counts = "bag", lengths or ()
        if lengths is None:
            counts = list(_compute(collection.map_partitions(_count), scheduler))
    else:
        raise _refusal(collection)
    expected = len(counts) if kind == "blocks" else collection.npartitions
    if lengths is not None and (kind == "blocks" or len(lengths) != expected):
        raise DefinitionError(
            f"from_dask: lengths must have one item for each of the {expected} partitions of a "
            f"dataframe or bag, and is not for arrays, which know theirs; got {len(lengths)} items."
        )
    # Of a bag, each `to_delayed` would optimize the graph of all partitions.
    parts = collection.to_delayed() if kind == "bag" else collection
    load = _Parts(parts, kind, scheduler, type(collection).__name__)
    return reader_of(Indexed, Blocks([int(each) for each in counts], load))


def _chunks(array: Any) -> Sequence[Any]:
    """Rows of each row of chunks."""
    counts: Sequence[Any] = array.chunks[0] if array.ndim else ()
    if not counts or any(each != each for each in counts):  # unknown ones are NaN
        raise DefinitionError(
            "from_dask: the array's chunks along the first axis must be of known length; call its "
            "compute_chunk_sizes() first."
        )
    return counts


def _refusal(collection: object) -> DefinitionError:
    return DefinitionError(
        f"from_dask: collection must be a Dask array, dataframe, series or bag; got "
        f"{collection!r:.200}."
    )


def _check_is_local(collection: Any) -> None:
    if hasattr(collection, "expr"):  # a dataframe
        graphs = [collection.partitions[0].optimize().__dask_graph__()]
    else:
        layers = getattr(collection.__dask_graph__(), "layers", {}).values()
        graphs = [layer for layer in layers if layer.is_materialized()]
    if any(is_of(value, "distributed") for graph in graphs for value in graph.values()):
        raise DefinitionError(
            f"from_dask: the {type(collection).__name__} is persisted on a cluster, or made of "
            f"futures; expected one that can be computed in the process that reads. Persist it "
            f"there, collection.persist(scheduler='threads'), or save it to files and read these."
        )


def _compute(collection: Any, scheduler: str) -> Any:
    from dask.base import named_schedulers

    # By its function: of a name, older versions of Dask warn while there is a client.
    return collection.compute(scheduler=named_schedulers[scheduler])


def _count(partition: Iterable[Any]) -> list[int]:
    return [sum(1 for _ in partition)]


class _Parts(NamedTuple):
    """Computes partitions."""

    parts: Any
    kind: str
    scheduler: str
    name: str  # of the collection's class

    def __call__(self, number: int) -> Any:
        if self.kind == "bag":
            return list(_compute(self.parts[number], self.scheduler))
        return _compute(getattr(self.parts, self.kind)[number], self.scheduler)

    def where(self, number: int) -> str:
        return f"partition {number} of {self.name}"
