"""4 run: a binding's workers: what they run, and what is heard of those that are lost or leave.

A worker counts as lost when the scheduler says so, when its lease task ends, and when a
`Conversation` with it finds that out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed import Future

from jobrunner.cluster.placement import WorkerInfo
from jobrunner.cluster.workers import Cluster
from jobrunner.errors import NodeLostError

NEWS_SECONDS = 0.5
"""How long to wait for the scheduler's word on a worker whose answer was an error."""
LOSS_SECONDS = 2.0
"""How long to wait for the scheduler's word on a worker that another one could not reach."""


@dataclass(slots=True)
class Member:
    """A worker in use by a binding."""

    info: WorkerInfo
    incarnation: str
    leases: list[Future[Any]] = field(default_factory=list)


class Membership:
    """The workers in use by one binding.

    Parameters
    ----------
    cluster : Cluster
    placement : mapping of str to str
        Node -> address; the binding's own, which grows.
    lose : callable
        Called without arguments when the scheduler says that a worker in use is gone.

    Attributes
    ----------
    workers : dict of str to Member
        By address.
    lost : dict of str to str
        Address -> how we know.
    cut : set of str
        Of those lost, the ones that another worker could not hand values to; the scheduler still
        has them.
    leaving : dict of str to str
        Address -> how we know; of workers that are about to leave, and serve until then.
    running : dict of str to list of (str, str)
        Address -> node and name of each task that ran there when the worker was last heard.
    interrupted : asyncio.Event
        Set: the scheduler said of a worker that it is gone.

    Notes
    -----
    Coroutines run on the client's event loop.
    """

    def __init__(
        self, cluster: Cluster, placement: Mapping[str, str], lose: Callable[[], None]
    ) -> None:
        self.workers: dict[str, Member] = {}
        self.lost: dict[str, str] = {}
        self.cut: set[str] = set()
        self.leaving: dict[str, str] = {}
        self.running: dict[str, list[tuple[str, str]]] = {}
        self.interrupted = asyncio.Event()
        self._cluster = cluster
        self._placement = placement
        self._lose = lose
        self._news = asyncio.Event()
        self._excused: set[str] = set()

    @property
    def alive(self) -> list[str]:
        """Addresses of the workers that are not known to be lost."""
        return [address for address in self.workers if address not in self.lost]

    def running_on(self, addresses: Collection[str]) -> tuple[str, ...]:
        """The tasks that run on some workers, as ``node/task``."""
        running = dict(self.running)
        return tuple(f"{node}/{task}" for a in addresses for node, task in running.get(a, ()))

    def nodes_on(self, addresses: Collection[str]) -> tuple[str, ...]:
        """The nodes that some workers hold."""
        return tuple(node for node, address in self._placement.items() if address in addresses)

    def worker_of(self, node: str) -> str | None:
        """The address of the worker that holds a node."""
        return self._placement.get(node)

    # ---- who takes part

    def watch(self, addresses: Collection[str]) -> None:
        """Hear from now on who of these is lost or leaves."""
        self._cluster.watch(addresses, self._hear)

    def dismiss(self, addresses: Collection[str]) -> None:
        """Forget workers that were watched and are not taken into use."""
        self._cluster.unwatch(addresses, self._hear)
        for address in addresses:
            self.lost.pop(address, None)
            self.leaving.pop(address, None)
        if not self.lost:
            self.interrupted.clear()

    def leave(self) -> None:
        """Listen to the workers no more."""
        self._cluster.unwatch(list(self.workers), self._hear)

    # ---- who is lost

    def check_leases(self) -> None:
        """Find out who is lost by what became of its lease tasks."""
        for address, worker in self.workers.items():
            for lease in worker.leases:
                if lease.status in ("cancelled", "lost", "error"):
                    self.lost.setdefault(address, f"its lease task was {lease.status}")

    async def await_news(self) -> None:
        """A connection broke: soon there is word of the worker, or none from the scheduler."""
        deadline = time.monotonic() + NEWS_SECONDS
        while not (self.lost or self.leaving) and time.monotonic() < deadline:
            self._cluster.check_open()
            await asyncio.sleep(NEWS_SECONDS / 50)

    async def await_loss(self, address: str, reason: str) -> None:
        """A worker could not reach another: soon the scheduler says whether that one is lost."""
        try:
            await asyncio.wait_for(self.interrupted.wait(), LOSS_SECONDS)
        except TimeoutError:
            self.lost[address] = reason
            self.cut.add(address)

    async def is_excused(self, address: str) -> bool:
        """Whether there was no answer because the scheduler let go of a worker that leaves."""
        if address in self._excused:  # that happens once
            return False
        self._excused.add(address)
        deadline = time.monotonic() + NEWS_SECONDS
        while address not in self.leaving and not self.lost:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                break
        return address in self.leaving and address not in self.lost

    def error(self, epoch: int | None) -> NodeLostError:
        """The error to raise; `lost` says who is to blame."""
        lost = dict(self.lost)
        # No task is to blame for the network.
        died = [address for address in lost if address not in self.cut]
        when = f" at epoch {epoch}" if epoch is not None else ""
        told = [self._tell_of_loss(address, how) for address, how in lost.items()]
        said = f"worker {told[0]}" if len(told) == 1 else f"{len(told)} workers: {'; '.join(told)}"
        return NodeLostError(
            f"Lost{when}: {said}. The workspaces of those nodes are gone.",
            nodes=self.nodes_on(lost),
            worker=next(iter(lost)),
            epoch=epoch,
            running=self.running_on(died),
        )

    def _tell_of_loss(self, address: str, how: str) -> str:
        nodes = self.nodes_on([address])
        names = ", ".join(map(repr, nodes[:10])) + (", …" if len(nodes) > 10 else "")
        running = self.running_on([address])
        what = f" and ran {', '.join(running)}" if running else ""
        return f"{address}, which held {names or 'no nodes'}{what} ({how})"

    def _hear(self, address: str, is_lost: bool) -> None:
        """The scheduler says that the worker is gone, or goes."""
        if is_lost:
            self.lost.setdefault(address, "the scheduler removed it")
            self.interrupted.set()
            if address in self.workers:
                self._lose()
        else:
            self.leaving.setdefault(address, "the scheduler retires it")
        self._news.set()
