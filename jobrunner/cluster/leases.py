"""Finds workers for a binding's nodes, and reserves them by leases."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from distributed import wait

from jobrunner.cluster.exchange import FIRST_WAIT_SECONDS
from jobrunner.cluster.messenger import Messenger
from jobrunner.cluster.placement import WorkerInfo, place, within_reach
from jobrunner.cluster.scheduler import SILENT, describe_unfit
from jobrunner.compile import PlannedNode
from jobrunner.errors import PlacementError
from jobrunner.texts import clip, get_logger, listed
from jobrunner.worker import MOST_PINGS, PING_SECONDS, find_cut, lease_key, run_lease

logger = get_logger(__name__)

PLACE_AGAIN_SECONDS = 0.1


class Leases:
    """The workers of one binding, reserved: each runs a Dask task, its lease.

    Nodes get workers that answer and that can reach each other. Coroutines run on the client's
    event loop.
    """

    def __init__(
        self,
        messenger: Messenger,
        doubted: Collection[str],  # workers that were lost before: they must answer first
        is_cut: bool,  # some workers could not reach each other before: check whether they can
    ) -> None:
        self._scheduler = messenger.scheduler
        self._members = messenger.members
        self._messenger = messenger
        self.doubted = set(doubted)
        self._silent: set[str] = set()  # workers that did not answer
        self._unfit: Mapping[str, str] = {}  # workers that cannot run nodes: address -> reason
        self.is_cut = is_cut
        self._cuts: set[frozenset[str]] = set()
        self._checked: frozenset[str] = frozenset()  # the workers that `_cuts` covers

    def take(
        self,
        nodes: Sequence[PlannedNode],
        stays: Mapping[str, str],
        wait_seconds: float,
        most_workers: float,
        details: Mapping[str, Any],
    ) -> dict[str, str]:
        """Place nodes on workers, which then host the binding; returns the placement.

        Nodes in `stays` stay on these workers if they can. `details` describe the binding. Raises a
        `PlacementError` if no suitable workers are there and idle within `wait_seconds`, or once
        there are `most_workers`.
        """
        deadline = time.monotonic() + wait_seconds
        placed = self._place_in_time(nodes, stays, deadline, most_workers)
        needs: dict[str, dict[str, float]] = {address: {} for address in placed.values()}
        for node in nodes:
            need = needs[placed[node.name]]
            for resource, amount in (node.resources or {}).items():
                need[resource] = need.get(resource, 0) + amount
        hosted: dict[str, list[str]] = {address: [] for address in needs}
        for name, address in placed.items():
            hosted[address].append(name)
        job = details["job"] or "session"
        titles = {address: f"{job}: {listed(names, 3)}" for address, names in hosted.items()}
        late = self._messenger.sync(self._bind, self._submit(needs, titles), deadline, details)
        if late:
            workers = self._members.workers
            for address in late:
                workers[address].leases.pop().release()
            offers = "; ".join(
                f"{address} offers {dict(workers[address].info.resources) or 'none'}, requested: "
                f"{needs[address] or 'none'}"
                for address in late
            )
            raise PlacementError(
                f"Workers did not start this session's lease tasks in time. They are paused or "
                f"closing, or other sessions or tasks use their resources: {offers}. Close these, "
                f"start more workers, or wait longer."
            )
        return placed

    def release(self, wait_seconds: float) -> None:
        """End all leases."""
        workers = self._members.workers
        alive = [lease for a in self._members.alive for lease in workers[a].leases]
        pending = [lease for lease in alive if lease.status == "pending"]
        if pending and self._scheduler.client.status == "running":
            # Otherwise a worker that closes soon warns of an interrupted task.
            with suppress(Exception):
                wait(pending, timeout=wait_seconds)
        for worker in workers.values():
            for lease in worker.leases:
                lease.release()
            worker.leases.clear()

    async def count_spread(self, nodes: Sequence[PlannedNode]) -> int:
        """How many workers the nodes would use if they were placed again now."""
        try:
            return len(set(self._place(nodes, await self._find(), {}).values()))
        except PlacementError:
            return 0

    # ---- placing

    def _place_in_time(
        self,
        nodes: Sequence[PlannedNode],
        stays: Mapping[str, str],
        deadline: float,
        most_workers: float,
    ) -> dict[str, str]:
        has_warned = False
        while True:
            try:
                return self._messenger.sync(self._place_on_members, nodes, stays)
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

    async def _place_on_members(
        self, nodes: Sequence[PlannedNode], stays: Mapping[str, str]
    ) -> dict[str, str]:
        """Place nodes, and add their workers to the members."""
        workers = await self._find()
        placed = self._place(nodes, workers, stays)
        used = set(placed.values()) - self._members.workers.keys()
        if used:
            strange = await self._messenger.meet([w for w in workers if w.address in used])
            self.doubted.update(strange)
            self._scheduler.forget(strange)
            for address, answer in strange.items():
                raise PlacementError(
                    f"Worker {address} could not host nodes (found {answer!r}): it is gone or "
                    f"hangs, or has another version of jobrunner. Install this version there, or "
                    f"close the worker."
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
        try:
            return place(nodes, workers, stays)
        except PlacementError as error:
            if not self._unfit:
                raise
            if workers:
                raise PlacementError(f"{error} {describe_unfit(self._unfit)}") from None
            raise PlacementError(
                f"Cannot place {len(nodes)} nodes: no worker of the cluster can run them. "
                f"{describe_unfit(self._unfit)}"
            ) from None

    async def _find(self) -> list[WorkerInfo]:
        """The workers that nodes may be placed on now."""
        there = await self._scheduler.workers()
        workers = [w for w in there if w.address not in self._members.lost]
        doubted = [w.address for w in workers if w.address in self.doubted - self._silent]
        # Dask still lists a worker that hangs, so it would get nodes again and again.
        self._silent.update(await self._scheduler.find_silent(doubted))
        asked = [w.address for w in workers if w.address not in self._silent]
        unfit = await self._scheduler.unfit(asked)
        # Only this binding does without those that answer too late.
        late = {address for address, why in unfit.items() if why == SILENT}
        self._scheduler.forget(late)
        self._silent |= late
        workers = [w for w in workers if w.address not in self._silent | unfit.keys()]
        self._unfit = dict.fromkeys(self._silent, SILENT) | unfit
        addresses = frozenset(w.address for w in workers)
        if self.is_cut and not addresses <= self._checked:
            self._cuts, self._checked = await self._find_cuts(addresses), addresses
        return workers

    async def _find_cuts(self, addresses: Collection[str]) -> set[frozenset[str]]:
        """Pairs of workers that cannot reach each other, according to those that answer."""
        patience = min(PING_SECONDS, self._scheduler.silence_seconds)
        rounds = math.ceil(len(addresses) / MOST_PINGS)
        answers = await self._scheduler.run_each(
            find_cut,
            addresses,
            list(addresses),
            patience,
            patience=rounds * patience + PING_SECONDS,
        )
        return {
            frozenset((address, other))
            for address, answer in answers.items()
            if isinstance(answer, list)
            for other in addresses
            if other in answer
        }

    # ---- reserving

    def _submit(
        self, needs: Mapping[str, Mapping[str, float]], titles: Mapping[str, str]
    ) -> dict[str, str]:
        """Submit the lease tasks, under titles for Dask's pages; returns address -> key."""
        keys: dict[str, str] = {}
        for address, need in needs.items():
            worker = self._members.workers[address]
            if worker.leases and not need:
                continue  # another lease is needed only for more resources
            lease = self._messenger.name, worker.incarnation, len(worker.leases)
            key = keys[address] = lease_key(*lease, clip(titles[address], 80))
            worker.leases.append(
                self._scheduler.client.submit(
                    run_lease,
                    key,
                    key=key,
                    workers=[address],
                    allow_other_workers=False,
                    resources=need,
                    pure=False,
                )
            )
        return keys

    async def _bind(
        self, keys: dict[str, str], deadline: float, details: Mapping[str, Any]
    ) -> list[str]:
        """Wait until lease tasks run and their workers host the binding; returns the late ones."""
        waiting = list(keys)
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            wait_seconds = float(min(FIRST_WAIT_SECONDS, left))
            replies = await self._messenger.query(
                "bind", waiting, leases=keys, wait_seconds=wait_seconds, **details
            )
            for reply in replies.values():
                if "failure" in reply:
                    raise reply["failure"].exception()
            waiting = [address for address in waiting if replies[address]["status"] != "done"]
            if not left:
                break
        return waiting
