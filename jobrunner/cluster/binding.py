"""A plan's nodes on workers: how a runner runs groups there and reaches workspaces."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pickle import UnpicklingError
from typing import Any, NamedTuple

from msgspec import to_builtins

from jobrunner.cluster.arrivals import Arrivals
from jobrunner.cluster.exchange import Members, Reply, Request, malformed, pickle_function
from jobrunner.cluster.leases import Leases, Spread
from jobrunner.cluster.messenger import Messenger
from jobrunner.cluster.placement import check_fit
from jobrunner.cluster.results import GroupResult, UnderWay, read_runs
from jobrunner.cluster.scheduler import SchedulerLink
from jobrunner.cluster.shipping import Parcel, nodes_of
from jobrunner.compile import GroupPlan, Plan, PlannedNode, compile_group
from jobrunner.config import get_number
from jobrunner.define import TaskGroup, TaskOutput
from jobrunner.errors import ExecutionError, NodeLostError
from jobrunner.worker import (
    FETCH,
    BindingOptions,
    CaptureRhythm,
    Keeper,
    NewNode,
    RunOrder,
    add_groups,
    add_nodes,
    blob_names,
    call_keeper,
    call_on_workspaces,
    drop_groups,
    fetch,
    install_keeper,
)
from jobrunner.workspace import from_frames, unshared

ABORT_SECONDS = 2.0
RELEASE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class ShippedGroup:
    """A group that the workers have."""

    plan: GroupPlan
    addresses: list[str]  # of the workers that take part in a run
    judges: list[str]  # those of them that have stop conditions
    digest: str  # of what it came in


class _RunNow(NamedTuple):
    """A run of a group that has not ended."""

    group: str
    order: RunOrder
    began: float


class Binding:
    """A plan's nodes on workers of a cluster, with their workspaces.

    Its methods block until they are done; do not call them on the client's event loop.
    """

    def __init__(
        self,
        scheduler: SchedulerLink,
        name: str,  # unique on the cluster
        plan: Plan,
        before: Binding | None,  # the session's binding before this one
        arrivals: Arrivals,
        *,
        can_move: bool = False,  # workers that retire wait until their nodes are bound elsewhere
        stays: bool = False,  # nodes that `before` had placed stay on their workers if they can
    ) -> None:
        self.name = name
        self.plan = plan
        self.attempt = 0  # how many bindings of this plan there were before
        self.placement: dict[str, str] = {}  # node -> address of its worker
        self._can_move = can_move
        self._previous: Mapping[str, str] = {}
        if before is not None and before.plan is plan:
            self.attempt = before.attempt + 1
            if stays:
                self._previous = before.placement
        self.arrivals = arrivals
        self._scheduler = scheduler
        self._members = Members(self.placement)
        self._messenger = Messenger(scheduler, name, self._members)
        self._leases = Leases(
            self._messenger,
            doubted=() if before is None else before.doubted,
            is_cut=before is not None and before.is_cut,
            near=arrivals.near,
        )
        self.lost = self._members.lost  # workers that this binding has lost: address -> cause
        self.leaving = self._members.leaving  # workers in use about to leave: address -> cause
        self.capture_bytes: dict[str, int] = {}
        """What `Keeper.capture_bytes` of each worker has said in its last reply to a run."""
        self._groups: dict[str, ShippedGroup] = {}  # by key
        self._keys: weakref.WeakKeyDictionary[TaskGroup, str] = weakref.WeakKeyDictionary()
        self._num_keys = 0
        self._run_now: _RunNow | None = None
        self._is_released = False

    # ---- for runners

    @property
    def doubted(self) -> frozenset[str]:
        """Workers that this binding or an earlier one has lost."""
        return self._leases.doubted | self.lost.keys()

    @property
    def is_cut(self) -> bool:
        """Whether some workers that the scheduler can reach could not reach each other."""
        return self._leases.is_cut or bool(self._members.cut)

    def check_fit(self, sizes: Mapping[str, int], subject: str) -> None:
        """Refuse blobs that exceed workers' memory; see `placement.check_fit`."""
        workers = self._members.workers
        limits = {address: worker.info.limit_bytes for address, worker in workers.items()}
        check_fit(sizes, self.placement, limits, get_number("memory-share"), subject)

    @property
    def least_memory_bytes(self) -> int:
        """The memory limit of the smallest worker in use; 0: none has a limit."""
        limits = [worker.info.limit_bytes for worker in self._members.workers.values()]
        return min(filter(None, limits), default=0)

    @property
    def worker_names(self) -> dict[str, str]:
        """What Dask calls the workers in use, by address."""
        return {address: worker.info.name for address, worker in self._members.workers.items()}

    @property
    def under_way(self) -> UnderWay | None:
        """The current run, if any. Safe in any thread."""
        run = self._run_now
        if run is None:
            return None
        tasks = self._members.running_on(list(self._members.running))
        seconds = time.perf_counter() - run.began
        return UnderWay(run.group, run.order.epoch, seconds, tasks, run.order.step)

    def spread(self) -> Spread | None:
        """Where the nodes would be if they were placed anew; None unless workers have joined."""
        return self._leases.spread(self.plan.nodes)

    def run(
        self,
        group: str,
        *,
        epoch: int | None = None,
        step: int = 0,
        deadline_seconds: float | None = None,
    ) -> GroupResult:
        """Run a shipped group, given its key, and wait for its end.

        A task's exception is the cause of a `TaskFailedError`; only a
        `CheckpointError` or `DefinitionError` is raised itself. An `ExecutionError` tells of a
        missing blob, a lost worker, or a passed deadline. Changes by tasks that ran remain.
        """
        started = time.perf_counter()
        plan = self._groups[group].plan
        if plan.lazy:
            self._deliver(plan)
        results, failure = self._run(RunOrder(group, epoch, step), deadline_seconds)
        if plan.lazy:
            self.arrivals.release()
        if failure is not None:
            raise failure
        return replace(results[0], seconds=time.perf_counter() - started)

    def sync(self, function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
        """Run a coroutine function on the client's event loop and wait for it."""
        return self._messenger.sync(function, *arguments)

    def _deliver(self, plan: GroupPlan) -> None:
        """Bring what Dask has computed for the tasks of a group to their nodes."""
        lost = self._members.lost

        def check() -> None:
            # Dask runs no new task on a worker that leaves, so the one that brings values there would wait.
            for address, cause in self.leaving.items():
                lost.setdefault(address, cause)
            if lost:
                raise self._members.error(None)

        if not self.arrivals.has(plan):
            self.arrivals.compute(plan)
        for address in self.arrivals.deliver(plan, self.name, self.placement, check):
            lost.setdefault(address, "it restarted and lost this session's state")
        check()

    def run_epochs(
        self,
        first: int,
        epochs: int,
        seconds: float,
        rhythm: CaptureRhythm | None = None,
        deadline_seconds: float | None = None,
    ) -> Iterator[tuple[int, GroupResult]]:
        """Run the epoch group for up to `epochs` epochs with one message to each worker.

        The workers stop after a whole epoch: the last, one with a true stop condition, or one that
        ended after `seconds`. With stop conditions on several workers, only epoch `first` runs:
        these would have to agree after each epoch, and asking the client takes no longer.
        Yields each epoch that has ended, and its result; raises afterwards what made one fail.
        """
        group = self._groups["epoch"]
        if len(group.judges) > 1:
            epochs = 1
        order = RunOrder(
            "epoch",
            first,
            epochs=epochs,
            steps_per_epoch=self.plan.steps_per_epoch,
            lead=next(iter(group.judges or group.addresses), ""),
            is_judged=bool(group.judges),
            seconds=seconds,
            rhythm=rhythm,
        )
        results, failure = self._run(order, deadline_seconds)
        yield from enumerate(results, start=first)
        if failure is not None:
            raise failure

    def _run(
        self, order: RunOrder, deadline_seconds: float | None = None
    ) -> tuple[list[GroupResult], BaseException | None]:
        """The results of the epochs that have ended on all workers, and what made one fail."""
        group = self._groups[order.key]
        plan = group.plan
        if not group.addresses:
            return [GroupResult(0.0, ())] * order.epochs, None
        request = Request(
            "run",
            {"order": to_builtins(order)},
            deadline_seconds=deadline_seconds,
            group=plan.name,
            epoch=order.epoch,
            has_steps=plan.name == "epoch" and self.plan.steps_per_epoch != 1,
        )
        self._run_now = _RunNow(plan.name, order, time.perf_counter())
        try:
            num_runs = order.epochs * order.steps_per_epoch
            replies = self._messenger.call(request, group.addresses, num_runs)
        except NodeLostError:
            raise  # the run is aborted on the other workers already
        except BaseException as error:
            self.abort(f"the client gave up: {type(error).__name__}")
            raise
        finally:
            self._run_now = None
        for address, reply in replies.items():
            if reply.capture_bytes is not None:
                self.capture_bytes[address] = reply.capture_bytes
        results = read_runs(replies, order, plan.conditions)
        return results, request.failure(replies, self.plan.job)

    def apply(
        self,
        fn: Callable[..., Any],
        *,
        to_keeper: bool = False,
        channel: str = "apply",
        activity: str = "a call on the workers",
        deadline_seconds: float | None = None,
    ) -> dict[str, Any]:
        """Call ``fn(workspaces)`` once on each worker in use; returns by address.

        `workspaces` is a dictionary of those of the worker's nodes. `to_keeper` calls
        ``fn(keeper, workspaces)``.

        `fn` must be picklable and runs in a thread. Its exception is raised here, the first worker's
        if there are several. Meanwhile other threads of the client may run groups and call on other
        channels. Errors name the call `activity`. After the deadline an `ExecutionError` is raised, but
        `fn` continues.
        """
        request = Request(
            "apply", channel=channel, activity=activity, deadline_seconds=deadline_seconds
        )
        if to_keeper:
            return self._apply(request, partial(call_keeper, fn))
        return self._apply(request, partial(call_on_workspaces, fn))

    def keep(self, factory: Callable[[], Keeper]) -> None:
        """Make a `Keeper` on each worker in use, and close an earlier one.

        From now on runs whose `RunOrder` say so let it capture the workspaces, and `capture_bytes`
        says how much that takes. `factory` must be picklable.
        """
        self.capture_bytes.clear()
        request = Request("apply", channel="keeper", activity="making room for saves")
        self._apply(request, partial(install_keeper, factory))

    def abort(self, reason: str = "the client asked for it") -> None:
        """Start no further tasks of the current run; drop the results of running functions."""
        if not self._is_released:
            with suppress(ExecutionError):  # without a scheduler, no message reaches a worker
                self._messenger.sync(self._messenger.abort, reason, ABORT_SECONDS)

    def release(self, wait_seconds: float = RELEASE_SECONDS) -> None:
        """Free the workspaces, threads and leases on the workers. Later calls do nothing."""
        if self._is_released:
            return
        self._is_released = True
        with suppress(ExecutionError):  # without a scheduler, workers free everything themselves
            self._messenger.sync(self._messenger.tell, {"call": "release"}, wait_seconds)
        self._messenger.close()
        self._leases.release(wait_seconds)

    def ship(self, plans: Mapping[str, GroupPlan]) -> None:
        """Send groups, by key, to the workers, unless they have them already."""
        parcel = Parcel(plans, self.placement)
        if all(key in self._groups and self._groups[key].digest == parcel.digest for key in plans):
            return
        request = Request("apply", activity="sending tasks to the workers")
        for address, slices in parcel.by_worker.items():
            work = partial(add_groups, parcel.groups, slices)
            request.per_worker[address] = {"fn": pickle_function(work, "A group")}
        self._call(request, list(request.per_worker))
        for key, plan in plans.items():
            addresses = dict.fromkeys(self.placement[node] for node in nodes_of(plan))
            judges = dict.fromkeys(self.placement[condition.node] for condition in plan.conditions)
            self._groups[key] = ShippedGroup(plan, [*addresses], [*judges], parcel.digest)

    # ---- for the session

    def extend(
        self, nodes: Sequence[PlannedNode], wait_seconds: float, wanted_workers: int = 0
    ) -> None:
        """Place more nodes, with empty workspaces; a cluster that adapts is asked for workers.

        Raises a `PlacementError` if no suitable workers have room in time.
        """
        deadline = time.monotonic() + wait_seconds
        stays = {**self._previous, **self.placement}
        options = BindingOptions(
            job=self.plan.job,
            seed=self.plan.seed,
            attempt=self.attempt,
            can_move=self._can_move,
            silence_seconds=self._scheduler.silence_seconds,
        )
        placed, leases = self._leases.take(nodes, stays, options, deadline, wanted_workers)
        self.placement.update(placed)
        new: dict[str, dict[str, NewNode]] = {address: {} for address in self._members.workers}
        for node in nodes:
            transient = sorted(self.plan.transient.get(node.name, ()))
            histories = dict(self.plan.histories.get(node.name, {}))
            new[placed[node.name]][node.name] = NewNode(node.stream, transient, histories)
        request = Request("apply", activity="placing nodes")
        for address, new_nodes in new.items():
            work = pickle_function(partial(add_nodes, new_nodes), "A node")
            request.per_worker[address] = {"fn": work, "lease": leases.get(address, "")}
        request.deadline_seconds = max(0.0, deadline - time.monotonic())
        try:
            self._call(request, list(request.per_worker))
        except NodeLostError:
            raise
        except ExecutionError:
            if self._members.waiting:  # until the deadline
                raise self._leases.too_late() from None
            raise

    def blob_names(self) -> dict[str, frozenset[str]]:
        """The names of the global blobs, by node."""
        by_node: dict[str, frozenset[str]] = {}
        for names in self._apply(Request("apply"), blob_names).values():
            by_node.update(names)
        return by_node

    def run_alone(
        self, group: TaskGroup, epoch: int | None, deadline_seconds: float | None
    ) -> GroupResult:
        """Compile and run a group that belongs to no job; all its nodes must be placed."""
        self._forget_groups()
        if group not in self._keys:
            self._num_keys += 1
            self._keys[group] = f"{group.name}#{self._num_keys}"
        key = self._keys[group]
        self.ship({key: compile_group(group, self.blob_names())})
        return self.run(key, epoch=epoch, deadline_seconds=deadline_seconds)

    def _forget_groups(self) -> None:
        """Drop the groups of no job whose objects are gone."""
        alive = set(self._keys.values())
        gone = [key for key in self._groups if "#" in key and key not in alive]
        if gone:
            self._apply(Request("apply"), partial(drop_groups, gone))
        for key in gone:
            del self._groups[key]

    def fetch(self, node: str, name: str, groups: Sequence[str] = (), part: int = 0) -> Any:
        """Return a blob; with `groups`, part of task `name`'s return value in one of these."""
        read = partial(fetch, node, name, groups, part)
        captured = self._apply(Request("apply", channel=FETCH), read, [self.placement[node]])
        return unshared(*captured.values())

    def fetch_output(self, output: TaskOutput) -> Any:
        """Return a task's output in its group's last run."""
        task = output.task
        assert task.group is not None
        if task.plan is not None and task.plan is not self.plan:
            raise ExecutionError(
                f"{output} is gone: binding job {self.plan.job!r} in this session dropped the "
                f"workspaces of earlier runs. Fetch it before the next job runs, or run that job "
                f"in another session."
            )
        key = self._keys.get(task.group, task.group.name)
        keys = [key]
        if key == "init":
            keys.append("resume")  # it runs some of the init group's tasks
        return self.fetch(task.node.name, task.name, keys, output.part)

    def _apply(
        self,
        request: Request,
        fn: Callable[..., Any],
        addresses: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        request.details["fn"] = pickle_function(fn, "The function to apply")
        replies = self._call(request, addresses or list(self._members.workers))
        return {address: read_value(address, reply) for address, reply in replies.items()}

    def _call(self, request: Request, addresses: Sequence[str]) -> dict[str, Reply]:
        replies = self._messenger.call(request, addresses)
        failure = request.failure(replies, self.plan.job)
        if failure is not None:
            raise failure
        return replies


def read_value(address: str, reply: Reply) -> Any:
    """Unpickle the value in a reply; its arrays use the memory of the reply."""
    try:
        head, *buffers = [memoryview(frame) for frame in reply.frames or ()]
    except (TypeError, ValueError) as error:
        raise malformed(address, f"there is no value in it ({error})") from error
    try:
        return from_frames([head, *buffers])
    except (EOFError, UnpicklingError) as error:
        raise malformed(address, f"its value cannot be read ({error})") from error
