"""Finds workers for nodes: workers that answer and that can reach each other."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from jobrunner.cluster.members import Members
from jobrunner.cluster.messenger import Messenger, find_silent, send
from jobrunner.cluster.placement import WorkerInfo, place, within_reach
from jobrunner.cluster.scheduler import PING_SECONDS, SchedulerLink
from jobrunner.compile import PlannedNode
from jobrunner.errors import PlacementError
from jobrunner.worker import MOST_PINGS

logger = logging.getLogger(__name__)

PLACE_AGAIN_SECONDS = 0.1


class Candidates:
    """The workers of a cluster that may get nodes. Coroutines run on the client's event loop."""

    def __init__(
        self,
        scheduler: SchedulerLink,
        members: Members,  # the workers that the binding uses, to which this adds
        messenger: Messenger,
        doubted: Collection[str],  # workers that were lost before: they must answer first
        is_cut: bool,  # some workers could not reach each other before: check whether they can
    ) -> None:
        self._scheduler = scheduler
        self._members = members
        self._messenger = messenger
        self._doubted = set(doubted)
        self._silent: set[str] = set()  # doubted ones that did not answer
        self.is_cut = is_cut
        self._cuts: set[frozenset[str]] = set()
        self._checked: frozenset[str] = frozenset()  # the workers that `_cuts` covers

    def place_in_time(
        self,
        nodes: Sequence[PlannedNode],
        stays: Mapping[str, str],
        deadline: float,
        most_workers: float,
    ) -> dict[str, str]:
        """Place nodes, and add their workers to the members; returns the placement.

        Nodes in `stays` stay on these workers if they can. Raises a `PlacementError` if no suitable
        workers are there at monotonic time `deadline`, or once there are `most_workers`.
        """
        has_warned = False
        while True:
            try:
                placed: dict[str, str] = self._messenger.sync(self._place_on_members, nodes, stays)
                return placed
            except PlacementError as error:
                there = len(self._messenger.sync(self._scheduler.workers))
                left = deadline - time.monotonic()
                if there >= most_workers or left <= 0:
                    raise
                if not has_warned:
                    has_warned = True
                    logger.warning("%s Waiting for at most %.0f s.", error, left)
                # Dask does not report when other bindings free workers.
                time.sleep(min(PLACE_AGAIN_SECONDS, left))

    async def count_spread(self, nodes: Sequence[PlannedNode]) -> int:
        """How many workers the nodes would use if they were placed again now."""
        try:
            return len(set(self._place(nodes, await self._find(), {}).values()))
        except PlacementError:
            return 0

    async def _place_on_members(
        self, nodes: Sequence[PlannedNode], stays: Mapping[str, str]
    ) -> dict[str, str]:
        workers = await self._find()
        placed = self._place(nodes, workers, stays)
        used = set(placed.values()) - self._members.workers.keys()
        if used:
            strange = await self._messenger.meet([w for w in workers if w.address in used])
            self._doubted.update(strange)
            for address, answer in strange.items():
                raise PlacementError(
                    f"Worker {address} does not answer jobrunner (found {answer!r}): it is gone "
                    f"or hangs, or has another version of jobrunner or none. Install this version "
                    f"there, or close the worker."
                )
        return placed

    def _place(
        self,
        nodes: Sequence[PlannedNode],
        workers: Sequence[WorkerInfo],
        stays: Mapping[str, str],
    ) -> dict[str, str]:
        """Choose a worker for each node, if possible workers that reach each other."""
        for some in within_reach(workers, self._cuts):
            with suppress(PlacementError):
                return place(nodes, some, stays)
        return place(nodes, workers, stays)

    async def _find(self) -> list[WorkerInfo]:
        """The workers that nodes may be placed on now."""
        there = await self._scheduler.workers()
        workers = [w for w in there if w.address not in self._members.lost]
        doubted = [w.address for w in workers if w.address in self._doubted - self._silent]
        # Dask still lists a worker that hangs, so it would get nodes again and again.
        if doubted:
            self._silent.update(await find_silent(self._scheduler, doubted))
        workers = [w for w in workers if w.address not in self._silent]
        addresses = frozenset(w.address for w in workers)
        if self.is_cut and not addresses <= self._checked:
            self._cuts, self._checked = await self._find_cuts(addresses), addresses
        return workers

    async def _find_cuts(self, addresses: Collection[str]) -> set[frozenset[str]]:
        """Pairs of workers that cannot reach each other, according to those that answer."""
        patience = min(PING_SECONDS, self._scheduler.silence_seconds)
        rounds = math.ceil(len(addresses) / MOST_PINGS)
        message = {"call": "reach", "addresses": list(addresses), "wait_seconds": patience}

        async def ask(address: str) -> Collection[str]:
            sending = send(self._scheduler, message, [address])
            try:
                answers = await asyncio.wait_for(sending, rounds * patience + PING_SECONDS)
            except (TimeoutError, OSError) as error:
                logger.info("%s did not answer which workers it reaches: %r", address, error)
                return ()
            answer = answers[address]
            found: Collection[str] = answer.get("cut", ()) if isinstance(answer, Mapping) else ()
            return found

        cut = await asyncio.gather(*(ask(address) for address in addresses))
        return {
            frozenset((address, other))
            for address, others in zip(addresses, cut, strict=True)
            for other in others
        }
