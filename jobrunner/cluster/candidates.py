"""4 run: the workers that a binding may place nodes on: they answer, and they reach each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from jobrunner.cluster.placement import WorkerInfo, place, within_reach
from jobrunner.cluster.workers import Cluster
from jobrunner.compile import PlannedNode
from jobrunner.errors import PlacementError


class Candidates:
    """Workers of a cluster, without those that are not to be trusted with nodes.

    Parameters
    ----------
    cluster : Cluster
    lost : collection of str
        Addresses of workers that the binding has lost; its own, which grows.
    doubted : collection of str
        Addresses of workers that were lost before: they take no nodes unless they answer.
    is_cut : bool
        Workers could not reach each other before: those that still can't take no nodes together.
    """

    def __init__(
        self, cluster: Cluster, lost: Collection[str], doubted: Collection[str], is_cut: bool
    ) -> None:
        self._cluster = cluster
        self._lost = lost
        self._doubted = set(doubted)
        self._silent: set[str] = set()  # of those, the ones that did not answer
        self.is_cut = is_cut
        self._cuts: set[frozenset[str]] = set()
        self._asked: frozenset[str] = frozenset()  # who they were looked for among

    async def find(self) -> list[WorkerInfo]:
        """The workers that there are now. Runs on the client's event loop."""
        there = await self._cluster.workers()
        workers = [w for w in there if w.address not in self._lost]
        doubted = [w.address for w in workers if w.address in self._doubted - self._silent]
        # One that hangs is among Dask's workers still, and would be given nodes for ever.
        if doubted:
            self._silent.update(await self._cluster.find_silent(doubted))
        workers = [w for w in workers if w.address not in self._silent]
        addresses = frozenset(w.address for w in workers)
        if self.is_cut and not addresses <= self._asked:
            self._cuts, self._asked = await self._cluster.find_cuts(addresses), addresses
        return workers

    def place(
        self,
        nodes: Sequence[PlannedNode],
        workers: Sequence[WorkerInfo],
        previous: Mapping[str, str],
    ) -> dict[str, str]:
        """Place nodes on workers that reach each other, where such suit them."""
        for some in within_reach(workers, self._cuts):
            with suppress(PlacementError):
                return place(nodes, some, previous)
        return place(nodes, workers, previous)

    def doubt(self, addresses: Collection[str]) -> None:
        """Give these no nodes any more unless they answer."""
        self._doubted.update(addresses)
