"""Computes the Dask collections among the arguments of init tasks, and brings the values to their nodes.

All are computed together, before a binding takes leases: a lease would hold resources that they may ask
for. Nodes are then placed where their values lie, if that fits, and one task for each worker takes the
values there from Dask. Nothing passes the client.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributed import Client, Future

from jobrunner.cluster.scheduler import SchedulerLink
from jobrunner.compile import GroupPlan
from jobrunner.define import LazyArgument
from jobrunner.errors import DefinitionError, ExecutionError, PlacementError, TaskFailedError
from jobrunner.texts import counted
from jobrunner.worker import PLUGIN_NAME, take_arrived

LOOK_SECONDS = 0.2
"""How often to look for errors and losses at least, while Dask computes."""

LEAST_IDLE_SECONDS = 10.0
"""The scheduler may take so long to read a large graph."""


class Arrivals:
    """The values of collections that tasks of a group get, as futures of Dask."""

    def __init__(
        self,
        scheduler: SchedulerLink,
        job: str,
        idle_seconds: float,  # for which no worker computes anything
        before: Arrivals | None = None,  # what it has computed is taken over
    ) -> None:
        self._scheduler = scheduler
        self._job = job
        self._idle_seconds = max(idle_seconds, LEAST_IDLE_SECONDS)
        self._futures: dict[int, Future[Any]] = {} if before is None else before._futures
        self.near: dict[str, dict[str, int]] = {}
        """How many bytes of what each node gets lie on which worker."""
        self.sizes: dict[str, int] = {}
        """How many bytes each node gets."""

    def has(self, plan: GroupPlan) -> bool:
        """Whether everything is computed that tasks of a group get."""
        return self._futures.keys() >= {id(lazy.collection) for lazy in plan.lazy}

    def compute(self, plan: GroupPlan) -> None:
        """Compute what tasks of a group get, wait for it, and forget all else.

        Raises a `TaskFailedError` for the task whose argument cannot be computed, and a
        `PlacementError` if no worker can compute.
        """
        wanted: dict[int, Any] = {id(lazy.collection): lazy.collection for lazy in plan.lazy}
        alive = ("pending", "finished")
        kept = {i: f for i, f in self._futures.items() if i in wanted and f.status in alive}
        by_type: dict[type, list[int]] = {}
        for identity, collection in wanted.items():
            if isinstance(collection, Future):
                kept[identity] = collection
            elif identity not in kept:
                by_type.setdefault(type(collection), []).append(identity)
        self._futures = kept
        for identities in by_type.values():
            # Of several types together, Dask returns the futures in another order.
            futures = self._scheduler.client.compute([wanted[i] for i in identities])
            self._futures.update(zip(identities, futures, strict=True))
        try:
            self._wait([*self._futures.values()], lambda: None)
            self._check(plan)
            if plan.lazy:
                self._look_where(plan)
        except BaseException:
            self.release()
            raise

    def _look_where(self, plan: GroupPlan) -> None:
        client = self._scheduler.client
        holders = client.who_has([*self._futures.values()])
        sizes = client.nbytes([future.key for future in self._futures.values()], summary=False)
        for lazy in plan.lazy:
            key = self._futures[id(lazy.collection)].key
            nbytes = sizes.get(key, 0)
            self.sizes[lazy.node] = self.sizes.get(lazy.node, 0) + nbytes
            by_worker = self.near.setdefault(lazy.node, {})
            for address in holders.get(key, ()):
                by_worker[address] = by_worker.get(address, 0) + nbytes

    def deliver(
        self,
        plan: GroupPlan,
        binding: str,
        placement: Mapping[str, str],
        check: Callable[[], object],  # raises an error if a worker is lost
    ) -> list[str]:
        """Bring the values to their nodes; returns the workers that have lost the binding."""
        client = self._scheduler.client
        by_worker: dict[str, list[int]] = {}
        for number, lazy in enumerate(plan.lazy):
            by_worker.setdefault(placement[lazy.node], []).append(number)
        tasks: dict[str, Future[Any]] = {}
        for address, numbers in by_worker.items():
            tasks[address] = client.submit(
                take_arrived,
                binding,
                [(plan.lazy[number].node, number) for number in numbers],
                [self._futures[id(plan.lazy[number].collection)] for number in numbers],
                workers=[address],
                pure=False,
            )
        try:
            self._wait([*tasks.values()], check)
            check()
            self._check(plan)
            for address, task in tasks.items():
                if task.status != "finished":
                    nodes = {plan.lazy[number].node: None for number in by_worker[address]}
                    raise ExecutionError(
                        f"Worker {address} could not copy the arguments of the {plan.name} group, as "
                        f"Dask has computed them, for {', '.join(map(repr, nodes))}: "
                        f"{task.exception()}."
                    ) from task.exception()
            return [address for address, task in tasks.items() if not task.result()]
        finally:
            for task in tasks.values():
                task.release()  # or that of a worker that is gone would wait for it

    def release(self) -> None:
        """Let Dask drop the values, also if an error refers to their futures."""
        for identity, future in self._futures.items():
            if id(future) != identity:  # else it is the user's
                future.release()
        self._futures.clear()

    def _wait(self, futures: Sequence[Future[Any]], check: Callable[[], object]) -> None:
        """Wait until all have ended or one has failed."""
        idle_since, look_at, pause, done = time.monotonic(), 0.0, 0.002, -1
        while True:
            statuses = [future.status for future in futures]
            pending = [status for status in statuses if status in ("pending", "lost")]
            if not pending or {"error", "cancelled"}.intersection(statuses):
                return
            self._scheduler.check_open()
            check()
            now = time.monotonic()
            if len(pending) != done:
                done, idle_since = len(pending), now
            elif now > look_at:
                look_at = now + self._idle_seconds / 4
                if is_busy(self._scheduler.client):
                    idle_since = now
                elif now - idle_since > self._idle_seconds:
                    raise PlacementError(
                        f"No worker has computed anything for {self._idle_seconds:g} s, and "
                        f"{counted(len(pending), 'argument')} of init tasks, Dask collections, are "
                        f"not there yet. Start workers, or some with the resources that the "
                        f"collections ask for."
                    )
            time.sleep(pause)
            pause = min(1.5 * pause, LOOK_SECONDS)

    def _check(self, plan: GroupPlan) -> None:
        """Raise an error for the first task whose argument is not there."""
        for lazy in plan.lazy:
            future = self._futures[id(lazy.collection)]
            if future.status in ("error", "cancelled"):
                raise self._explain(lazy, future) from future.exception()

    def _explain(self, lazy: LazyArgument, future: Future[Any]) -> Exception:
        error = future.exception()
        if future.status == "error":
            failure = TaskFailedError(
                f"{lazy} of job {self._job!r} cannot be computed: {type(error).__name__}: {error}.",
                job=self._job,
                node=lazy.node,
                task=lazy.task,
                group="init",
                epoch=0,
                remote_traceback="".join(traceback.format_exception(error)),
            )
            return failure.advise("Mend the collection and start the same command again.")
        own = self._scheduler.client.scheduler.address  # type: ignore[union-attr]  # it is open
        elsewhere = sorted(addresses_of(lazy.collection) - {own})
        if elsewhere:
            return DefinitionError(
                f"{lazy}: its data lie on the cluster of {elsewhere[0]}, and the session's is {own}. "
                f"Make the session of that cluster's client, or compute the data."
            )
        return ExecutionError(
            f"{lazy}: its data are gone, and Dask cannot make them again ({error}). Give the task a "
            f"collection that is not scattered (or scatter with broadcast=True), and keep the client "
            f"open that has persisted it."
        )


def is_busy(client: Client) -> bool:
    """Whether any worker computes something; leases do not count."""
    for keys in client.processing().values():
        for key in keys:
            if not str(key).startswith(f"lease-{PLUGIN_NAME}"):
                return True
    return False


def addresses_of(collection: Any) -> set[str]:
    """The schedulers of the futures in a collection's graph."""
    if isinstance(collection, Future):
        futures = [collection]
    else:
        if hasattr(collection, "expr"):  # a dataframe
            collection = collection.optimize()
        graph = collection.__dask_graph__()
        futures = []
        for layer in getattr(graph, "layers", {"": graph}).values():
            futures += [value for value in layer.values() if isinstance(value, Future)]
    return {str(future.client.scheduler.address) for future in futures}
