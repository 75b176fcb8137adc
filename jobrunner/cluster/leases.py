"""Finds workers for a binding's nodes, and reserves them by leases."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from distributed import wait

from jobrunner.cluster.exchange import Member
from jobrunner.cluster.messenger import Messenger
from jobrunner.cluster.placement import Near, WorkerInfo, place, within_reach
from jobrunner.cluster.scheduler import SILENT, describe_unfit
from jobrunner.cluster.wish import Joins, Wish
from jobrunner.compile import PlannedNode
from jobrunner.dask_internals import EVERY_WORKER, WorkerNews
from jobrunner.errors import PlacementError
from jobrunner.texts import get_logger
from jobrunner.worker import (
    MOST_PINGS,
    PING_SECONDS,
    BindingOptions,
    find_cut,
    lease_key,
    run_lease,
)

logger = get_logger(__name__)

PLACE_AGAIN_SECONDS = 0.1


class Spread(NamedTuple):
    """Where nodes would be if they were placed anew, and how many threads each worker has."""

    placement: dict[str, str]
    threads: dict[str, int]


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
        near: Near,
    ) -> None:
        self._near = near
        self._scheduler = messenger.scheduler
        self._members = messenger.members
        self._messenger = messenger
        self.doubted = frozenset(doubted)
        self.is_cut = is_cut
        self._asked: set[str] = set()  # workers that were asked whether they can run nodes
        self._unfit: dict[str, str] = {}  # those of them that cannot, and why
        self._cuts: set[frozenset[str]] = set()
        self._checked: frozenset[str] = frozenset()  # the workers that `_cuts` covers
        self._num_workers = 0  # of the cluster, when it was looked at last
        self._joins = Joins()
        self._wish = Wish(self._scheduler.client)
        self._wanted_workers = 0
        self._needs: dict[str, dict[str, float]] = {}  # of what is placed last, by worker
        self._scheduler.watch([EVERY_WORKER], self._hear)

    def take(
        self,
        nodes: Sequence[PlannedNode],
        stays: Mapping[str, str],
        options: BindingOptions,
        deadline: float,
        wanted_workers: int = 0,  # ask a cluster that adapts for so many
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Place nodes on workers, and begin leases there; returns the placement, and these by worker.

        Nodes in `stays` stay on these workers if they can. Raises a `PlacementError` if no suitable
        workers are there in time. Workers host the binding as soon as their leases run.
        """
        self._wanted_workers = min(wanted_workers, len(nodes))
        # Later bindings are moves and recoveries, for which the run waits.
        placed = self._place_in_time(nodes, stays, deadline, is_first=options.attempt == 0)
        self._needs = _needs(nodes, placed)
        keys = self._submit(options)
        used = len(set(self._members.placement.values()).union(placed.values()))
        lacks = used < self._wanted_workers and self._num_workers < self._scheduler.most_workers
        if lacks and options.can_move:  # nodes move to those that come later
            self._ask([member.info for member in self._members.workers.values()])
        else:
            self._wish.withdraw()
        if stays and used < self._num_workers:
            # Nodes that stay leave some workers without nodes, so look soon whether others fit better.
            self._joins.note(time.monotonic())
        return placed, keys

    def spread(self, nodes: Sequence[PlannedNode]) -> Spread | None:
        """Where the nodes would be if they were placed anew, once after workers have joined.

        None: none has, or others may follow.
        """
        if not self._joins.are_over(time.monotonic()):
            return None
        self._joins = Joins()
        workers = self._messenger.sync(self._find)
        if len(workers) >= self._wanted_workers:
            # They get nodes now, or are of no use.
            self._wish.withdraw()
        threads = {worker.address: worker.nthreads for worker in workers}
        for address, member in self._members.workers.items():
            threads[address] = member.info.nthreads
        try:
            return Spread(self._place(nodes, workers, {}), threads)
        except PlacementError:
            return None

    def too_late(self) -> PlacementError:
        """The error for workers that do not start their leases in time; gives those up."""
        offers = []
        for address in sorted(self._members.waiting):
            worker = self._members.workers[address]
            worker.leases.pop().release()
            offered = dict(worker.info.resources) or "none"
            need = self._needs.get(address) or "none"
            offers.append(f"{address} offers {offered}, requested: {need}")
        return PlacementError(
            f"Workers did not start this session's lease tasks in time. They are paused or "
            f"closing, or other sessions or tasks use their resources: {'; '.join(offers)}. Close "
            f"these, start more workers, or wait longer."
        )

    def release(self, wait_seconds: float) -> None:
        """End all leases."""
        self._wish.withdraw()
        self._scheduler.unwatch([EVERY_WORKER], self._hear)
        pending = []
        for address in self._members.alive:
            # The scheduler has sent the lease of a worker that retires back to wait for such a worker.
            if address not in self._members.leaving:
                leases = self._members.workers[address].leases
                pending += [lease for lease in leases if lease.status == "pending"]
        client = self._scheduler.client
        if pending and client.status == "running":
            # Otherwise a worker that closes soon warns of an interrupted task.
            with suppress(Exception), client.as_current():
                wait(pending, timeout=wait_seconds)
        for member in self._members.workers.values():
            for lease in member.leases:
                lease.release()
            member.leases.clear()

    def _hear(self, address: str, news: WorkerNews) -> None:
        if news == "joined":
            self._joins.note(time.monotonic())

    # ---- placing

    def _place_in_time(
        self,
        nodes: Sequence[PlannedNode],
        stays: Mapping[str, str],
        deadline: float,
        *,
        is_first: bool,
    ) -> dict[str, str]:
        has_fitted = has_warned = False
        while True:
            workers = self._messenger.sync(self._find)
            now = time.monotonic()
            is_last_try = now >= deadline or self._num_workers >= self._scheduler.most_workers
            try:
                placed = self._place(nodes, workers, stays)
                # Those that suit now may be the first of many that start, and nodes move only after
                # an epoch. So a run that wants more waits until they are there, or none has joined
                # for a while.
                are_enough = not is_first or len(workers) >= self._wanted_workers
                if are_enough or is_last_try or (has_fitted and self._joins.are_over(now)):
                    self._messenger.sync(self._meet, workers, set(placed.values()))
                    return placed
                if not has_fitted:
                    has_fitted = True
                    self._joins.note(now)  # others may join for a while
            except PlacementError as error:
                if is_last_try:
                    raise
                if not has_warned:
                    has_warned = True
                    logger.warning("%s Waiting for at most %.0f s.", error, deadline - now)
            self._ask(workers)
            # Dask does not report when other bindings free workers.
            time.sleep(max(0.0, min(PLACE_AGAIN_SECONDS, deadline - now)))

    def _ask(self, workers: Sequence[WorkerInfo]) -> None:
        """Ask for the workers that are wanted, or for one that suits, like those that there are."""
        threads = max((worker.nthreads for worker in workers), default=1)
        self._wish.ask(max(1, self._wanted_workers), threads)

    def _place(
        self,
        nodes: Sequence[PlannedNode],
        workers: Sequence[WorkerInfo],
        stays: Mapping[str, str],
    ) -> dict[str, str]:
        """Choose a worker for each node, if possible workers that reach each other."""
        for side in within_reach(workers, self._cuts):
            with suppress(PlacementError):
                return place(nodes, side, stays, self._near)
        try:
            return place(nodes, workers, stays, self._near)
        except PlacementError as error:
            if not self._unfit:
                raise
            problem = str(error)
            if not workers:
                problem = f"Cannot place {len(nodes)} nodes: no worker of the cluster can run them."
            raise PlacementError(f"{problem} {describe_unfit(self._unfit)}") from None

    async def _meet(self, workers: Sequence[WorkerInfo], used: Collection[str]) -> None:
        """Make workers that get nodes members, if they get ready to host the binding."""
        members = self._members.workers
        new = {w.address: w for w in workers if w.address in used and w.address not in members}
        if not new:
            return
        incarnations = await self._messenger.meet(new)
        for address, answer in incarnations.items():
            if not isinstance(answer, str):
                self._messenger.part(new)
                self._unfit[address] = f"could not host nodes (found {answer!r})"
                raise PlacementError(
                    f"Worker {address} {self._unfit[address]}: it is gone or hangs, or has another "
                    f"version of jobrunner. Install this version there, or close the worker."
                )
        for address, worker in new.items():
            members[address] = Member(worker, incarnations[address])

    async def _find(self) -> list[WorkerInfo]:
        """The workers that nodes may be placed on now."""
        workers = await self._scheduler.workers()
        self._num_workers = len(workers)
        present = {w.address for w in workers}
        new = present - self._asked
        self._asked = present
        if new:
            # Dask still lists a worker that hangs, so it would get nodes again and again.
            unfit = dict.fromkeys(await self._scheduler.find_silent(new & self.doubted), SILENT)
            unfit |= await self._scheduler.find_unfit(new - unfit.keys())
            if unfit:
                logger.warning("%s", describe_unfit(unfit))
            self._unfit = {a: reason for a, reason in self._unfit.items() if a not in new} | unfit
        workers = [w for w in workers if w.address not in self._unfit]
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
        cuts: set[frozenset[str]] = set()
        for address, unreachable in answers.items():
            if isinstance(unreachable, list):
                for peer in addresses:
                    if peer in unreachable:
                        cuts.add(frozenset((address, peer)))
        return cuts

    # ---- reserving

    def _submit(self, options: BindingOptions) -> dict[str, str]:
        """Submit the lease tasks; returns address -> key."""
        keys: dict[str, str] = {}
        for address, need in self._needs.items():
            worker = self._members.workers[address]
            if worker.leases and not need:
                continue  # another lease is needed only for more resources
            key = lease_key(self._messenger.name, worker.incarnation, len(worker.leases))
            keys[address] = key
            worker.leases.append(
                self._scheduler.client.submit(
                    run_lease,
                    key,
                    options,
                    key=key,
                    workers=[address],
                    allow_other_workers=False,
                    resources=need,
                    pure=False,
                )
            )
        return keys


def _needs(nodes: Sequence[PlannedNode], placed: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """The resources that the nodes of each worker need, by address."""
    needs: dict[str, dict[str, float]] = {}
    for node in nodes:
        need = needs.setdefault(placed[node.name], {})
        for resource, amount in (node.resources or {}).items():
            need[resource] = need.get(resource, 0) + amount
    return needs
