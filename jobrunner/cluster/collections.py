"""Blobs of a session's nodes as one Dask collection, from the memory of their workers.

They are taken at once: each worker puts them into Dask's memory, where arrays stay shared with the blobs.
As with scattered data, a collection fails if a worker that holds a part dies; it does not hang.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from jobrunner.cluster.binding import Binding
from jobrunner.cluster.scheduler import SchedulerLink
from jobrunner.dask_internals import adopted_futures
from jobrunner.errors import BlobNotFoundError, ExecutionError
from jobrunner.joined import (
    concatenate_frames,
    cut,
    join_arrays,
    join_frames,
    join_values,
    type_of_array,
    type_of_frame,
)
from jobrunner.texts import listed
from jobrunner.worker import describe_blob, lend_blob

if TYPE_CHECKING:
    from dask.array import Array
    from dask.dataframe import DataFrame

LEND_SECONDS = 60.0
"""How long workers may take to copy data frames."""


class BlobOfNodes:
    """A global blob of some nodes of a binding, by default of all that have it."""

    def __init__(
        self, scheduler: SchedulerLink, binding: Binding, blob: str, nodes: Collection[str] | None
    ) -> None:
        self._scheduler = scheduler
        self._binding = binding
        self._blob = blob
        self._nodes = None if nodes is None else list(nodes)

    def array(self, axis: int | None) -> Array:
        """See `Session.array`."""
        if axis is None and self._blob in self._binding.plan.partitions:
            axis, _ = self._binding.plan.partitions[self._blob]
        types = self._describe(type_of_array)
        chunks = cut(self._blob, types, axis)
        pieces = self._take(chunks, partial(join_values, axis=axis))
        return join_arrays(types, axis, [*zip(chunks, pieces, strict=True)])

    def frame(self) -> DataFrame:
        """See `Session.frame`."""
        types = self._describe(type_of_frame)
        return join_frames(types, self._take(cut(self._blob, types, None), concatenate_frames))

    def _describe(self, describe: Callable[[Any], Any]) -> dict[str, Any]:
        described: dict[str, Any] = {}
        for types in self._binding.apply(partial(describe_blob, describe, self._blob)).values():
            described.update(types)
        nodes = self._nodes
        if nodes is None:
            nodes = [node for node in self._binding.placement if node in described]
        missing = [node for node in nodes if node not in described]
        if missing:
            raise BlobNotFoundError(
                f"No {self._blob!r} of {listed(map(repr, missing))}: the session has it of "
                f"{listed(map(repr, described)) if described else 'no node'}."
            )
        return {node: described[node] for node in nodes}

    def _take(
        self, chunks: Sequence[Sequence[str]], join: Callable[[Sequence[Any]], Any]
    ) -> list[Any]:
        """Let Dask hold the blobs now; returns a `Delayed` for each chunk, joined."""
        from dask.delayed import delayed  # slow to import

        placement = self._binding.placement
        name = f"{self._blob}-{secrets.token_hex(8)}"
        # For each chunk, its nodes on each worker, which hold them under one key.
        keys: dict[str, list[str]] = {}
        parts: list[dict[str, list[str]]] = []
        for chunk in chunks:
            parts.append({})
            for node in chunk:
                key = f"{name}-{len(parts)}-{placement[node]}"
                parts[-1].setdefault(key, []).append(node)
            keys.update(parts[-1])
        addresses = {placement[node] for chunk in chunks for node in chunk}
        run = partial(self._scheduler.run, patience=LEND_SECONDS)
        lent = self._binding.sync(run, lend_blob, addresses, self._binding.name, self._blob, keys)
        for address, sizes in lent.items():
            if not isinstance(sizes, dict):
                raise ExecutionError(
                    f"Worker {address} could not lend blob {self._blob!r} to Dask: "
                    f"{sizes or 'it has restarted'}."
                )
        futures = self._binding.sync(adopted_futures, self._scheduler.client, lent)
        pieces = []
        for chunk, part in zip(chunks, parts, strict=True):
            order = [*chain.from_iterable(part.values())]
            places = [order.index(node) for node in chunk]
            values = [futures[key] for key in part]
            pieces.append(delayed(_join)(values, places, join))
        return pieces


def _join(values: Sequence[Sequence[Any]], places: Sequence[int], join: Callable[..., Any]) -> Any:
    """Join the values of a chunk, which workers hold in lists, in the order of its nodes."""
    flat = [*chain.from_iterable(values)]
    return join([flat[place] for place in places])
