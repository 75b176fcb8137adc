"""4 run: nodes bound to workers, and what a runner does with them."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jobrunner.cluster.candidates import Candidates
from jobrunner.cluster.direct import DirectLines
from jobrunner.cluster.leases import Leases
from jobrunner.cluster.members import Membership
from jobrunner.cluster.messages import Conversation
from jobrunner.cluster.placement import check_fit
from jobrunner.cluster.request import Request
from jobrunner.cluster.shipping import Parcel, nodes_of, pickle_function
from jobrunner.cluster.workers import Cluster
from jobrunner.compile import GroupPlan, Plan, PlannedNode
from jobrunner.config import get_count, get_share
from jobrunner.errors import ExecutionError, NodeLostError, PlacementError
from jobrunner.worker import GroupResult, Message, UnderWay, merge_runs
from jobrunner.workspace import from_frames

logger = logging.getLogger(__name__)

ABORT_SECONDS = 2.0
RELEASE_SECONDS = 3.0
PLACE_AGAIN_SECONDS = 0.1


class Binding:
    """A plan's nodes on workers of a cluster, with their workspaces.

    `Session.bind` makes it. Its methods wait for what they start; they may be called in any
    thread but that of the client's event loop.

    Parameters
    ----------
    cluster : Cluster
    name : str
        Unique on the cluster.
    plan : Plan
    attempt : int
        How many bindings of this plan there were before.
    can_move : bool
        A worker that is to leave may wait for its nodes to be bound elsewhere.
    doubted, is_cut
        See `Candidates`.
    previous : mapping of str to str, optional
        Node -> address of the worker that it stays on, if that is still there.

    Attributes
    ----------
    placement : dict of str to str
        Node -> address of its worker.
    recorded : str
        Set, it tells the workers with the next run which moment's states to keep: see `KeptStates`.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        plan: Plan,
        attempt: int,
        *,
        can_move: bool = False,
        doubted: Collection[str] = (),
        is_cut: bool = False,
        previous: Mapping[str, str] | None = None,
    ) -> None:
        self.plan = plan
        self.recorded = ""
        self._previous = previous or {}
        self._can_move = can_move
        self.attempt = attempt
        self.placement: dict[str, str] = {}
        self._cluster = cluster
        lines = DirectLines(cluster.client, get_count("direct-workers"))
        self._members = Membership(cluster, self.placement, lines.hang_up)
        self._candidates = Candidates(cluster, self._members.lost, doubted, is_cut)
        self._leases = Leases(cluster, name, self._members)
        self._talk = Conversation(cluster, name, self._members, lines)
        self._under_way: tuple[str, int | None, float] | None = None
        self._is_released = False
        self._numbering = threading.Lock()
        self._groups: dict[str, tuple[GroupPlan, list[str]]] = {}  # and who takes part
        self._digests: dict[str, str] = {}

    # ---- for runners

    @property
    def lost(self) -> dict[str, str]:
        """Workers that are lost to this binding: address -> how we know."""
        return self._members.lost

    @property
    def is_cut(self) -> bool:
        """Whether workers that the scheduler has could not reach each other, now or before."""
        return self._candidates.is_cut or bool(self._members.cut)

    @property
    def leaving(self) -> dict[str, str]:
        """Workers in use that are about to leave: address -> how we know."""
        return self._members.leaving

    def check_fit(self, sizes: Mapping[str, int], what: str) -> None:
        """Refuse to fill the workers beyond what they may use; see `placement.check_fit`."""
        limits = {address: held.info.limit_bytes for address, held in self._members.workers.items()}
        check_fit(sizes, self.placement, limits, get_share("memory-share"), what)

    @property
    def under_way(self) -> UnderWay | None:
        """The run that is under way, if one is; for any thread."""
        run = self._under_way
        if run is None:
            return None
        group, epoch, started = run
        return UnderWay(
            group,
            epoch,
            time.perf_counter() - started,
            self._members.running_on(list(self._members.running)),
        )

    def count_spread(self) -> int:
        """How many workers the nodes would be on if they were placed anew now."""
        placed: dict[str, str] = self._cluster.sync(self._place_anew)
        return len(set(placed.values()))

    def run(
        self,
        group: str,
        *,
        epoch: int | None = None,
        step: int = 0,
        deadline_seconds: float | None = None,
        task_deadline_seconds: float | None = None,
        is_careful: bool = False,
    ) -> GroupResult:
        """Run a group of the plan, or another that `ship` was given, and wait for its end.

        Parameters
        ----------
        group : str
            ``"init"``, ``"epoch"``, ...
        epoch : int, optional
        step : int
            Which run within the epoch.
        deadline_seconds : float, optional
            Abort the run and give up when it takes longer.
        task_deadline_seconds : float, optional
            The same for each of its tasks.
        is_careful : bool
            Run one task at a time on each worker, and none before the client knows of it: when a
            worker dies, `NodeLostError.running` says for certain what it ran. It costs a message
            and its answer a task.

        Returns
        -------
        GroupResult

        Raises
        ------
        TaskFailedError
            A task raised; its exception is the cause. A `CheckpointError` or `DefinitionError`
            that it raised comes as it is.
        BlobNotFoundError
            A task's input is not there.
        NodeLostError
            A worker that holds nodes of this binding is gone or silent.
        ExecutionError
            A deadline passed.

        Notes
        -----
        Runs on the client. *Atomicity*: none; after an error, the workspaces are as the tasks
        that did run left them.
        """
        results: list[GroupResult] = []
        details = {"epoch": epoch, "step": step}
        self._run(
            group,
            details,
            lambda _, result: results.append(result),
            deadline_seconds,
            task_deadline_seconds,
            is_careful,
        )
        return results[0]

    def run_epochs(
        self,
        first: int,
        epochs: int,
        seconds: float,
        ended: Callable[[int, GroupResult], None],
    ) -> None:
        """Run the epoch group for several epochs, without the client in between.

        The workers stop after a whole epoch: the last, one in which a stop condition was true, or
        one that ended after `seconds`.

        Parameters
        ----------
        first : int
            Of the epochs.
        epochs : int
            At most so many.
        seconds : float
        ended : callable
            Takes an epoch and what its runs came to, for each epoch in order; also where a later
            epoch failed.

        Raises
        ------
        TaskFailedError, BlobNotFoundError, NodeLostError
            See `run`.

        Notes
        -----
        Runs on the client. Where several workers hold stop conditions, only `first` is run: they
        would have to agree after each epoch, which is what the client does as fast.
        """
        plan, addresses = self._groups["epoch"]
        judges = {self.placement[condition.node] for condition in plan.conditions}
        batch = {
            "epochs": epochs if len(judges) <= 1 else 1,
            "steps_per_epoch": self.plan.steps_per_epoch,
            "lead": next(iter(judges or addresses), ""),
            "is_judged": bool(judges),
            "seconds": seconds,
        }
        self._run("epoch", {"epoch": first, "step": 0, "epoch_batch": batch}, ended)

    def _run(
        self,
        group: str,
        details: dict[str, Any],
        ended: Callable[[int, GroupResult], None],
        deadline_seconds: float | None = None,
        task_deadline_seconds: float | None = None,
        is_careful: bool = False,
    ) -> None:
        plan, addresses = self._groups[group]
        epoch = details["epoch"]
        batch = details.get("epoch_batch", {"epochs": 1, "steps_per_epoch": 1})
        if not addresses:
            for i in range(batch["epochs"]):
                ended((epoch or 0) + i, GroupResult(0.0, (), {}))
            return
        started = time.perf_counter()
        recorded, self.recorded = self.recorded, ""  # a save in the background sets it, too
        news: dict[str, Any] = {"recorded": recorded} if recorded else {}
        if is_careful:
            news["is_careful"] = True
        request = Request(
            "run",
            {"key": group, **details, **news},
            deadline_seconds=deadline_seconds,
            task_deadline_seconds=task_deadline_seconds,
            group=plan.name,
            epoch=epoch,
            is_careful=is_careful,
        )
        self._under_way = (plan.name, epoch, started)
        try:
            replies = self._ask(request, addresses)
        except NodeLostError:
            raise  # the others know already
        except BaseException as error:
            self.abort(f"the client gave up: {type(error).__name__}")
            raise
        finally:
            self._under_way = None
            # Each run of a batch has a number of its own.
            with self._numbering:
                self._talk.number += batch["epochs"] * batch["steps_per_epoch"] - 1
        width = batch["steps_per_epoch"]
        wall_seconds = time.perf_counter() - started
        by_worker = [reply.get("runs", ()) for reply in replies.values()]
        for i in range(min(map(len, by_worker)) // width):
            rows = [runs[i * width : (i + 1) * width] for runs in by_worker]
            result = merge_runs(rows, [condition.name for condition in plan.conditions])
            if "epoch_batch" not in details:
                result = dataclasses.replace(result, seconds=wall_seconds)
            ended((epoch or 0) + i, result)
        request.check(replies, self.plan.job)

    def apply(
        self,
        fn: Callable[[dict[str, Any]], Any],
        *,
        channel: str = "apply",
        what: str = "a call on the workers",
        deadline_seconds: float | None = None,
    ) -> dict[str, Any]:
        """Call ``fn(workspaces)`` once on each worker in use.

        Parameters
        ----------
        fn : callable
            Picklable; takes node -> `Workspace` of that worker's nodes. Runs in a thread.
        channel : str
            Calls on another channel may be made from another thread of the client while this one
            is under way; so may a run.
        what : str
            What it is for, in errors.
        deadline_seconds : float, optional
            Give up when it takes longer; `fn` cannot be stopped.

        Returns
        -------
        dict
            Address -> what `fn` returned there.

        Raises
        ------
        Exception
            The one that `fn` raised; of several workers' the first by placement.
        ExecutionError
            The deadline passed; names the nodes whose workers are late.
        NodeLostError
        """
        details = {"fn": pickle_function(fn, "The function to apply")}
        request = Request(
            "apply", details, channel=channel, what=what, deadline_seconds=deadline_seconds
        )
        replies = self._operate(request, list(self._members.workers))
        return {address: _own_value(reply["frames"]) for address, reply in replies.items()}

    def abort(self, reason: str = "the client asked for it") -> None:
        """Stop slices everywhere: nothing further starts. Takes at most a few seconds.

        Functions that are running can't be stopped; what they return is dropped.
        """
        if not self._is_released:
            with suppress(ExecutionError):  # without a scheduler, nobody is there to be told
                self._cluster.sync(self._talk.abort, self._members.alive, reason, ABORT_SECONDS)

    def release(self, wait_seconds: float = RELEASE_SECONDS, *, heir: str = "") -> None:
        """Free the workspaces, threads and leases on the workers. Once is enough.

        Parameters
        ----------
        heir : str
            Name of a binding of the same plan that comes next and gets the kept_states.
        wait_seconds : float
            How long to wait for the workers to have done so.
        """
        if self._is_released:
            return
        self._is_released = True
        with suppress(ExecutionError):  # without a scheduler, workers free it of themselves
            self._cluster.sync(self._talk.part, wait_seconds, heir)
        self._talk.leave()
        self._leases.release(wait_seconds)

    # ---- for the session

    def extend(
        self, nodes: Sequence[PlannedNode], wait_seconds: float, most_workers: float = math.inf
    ) -> None:
        """Place further nodes, with empty workspaces.

        Parameters
        ----------
        nodes : sequence of PlannedNode
        wait_seconds : float
            How long to wait for workers that suit.
        most_workers : float
            With so many there, no others will come.

        Raises
        ------
        PlacementError
            In that time no workers came that suit, or none had room.
        """
        deadline = time.monotonic() + wait_seconds
        is_told = False
        while True:
            try:
                placed: dict[str, str] = self._cluster.sync(self._place, nodes)
                break
            except PlacementError as error:
                there = len(self._cluster.sync(self._cluster.workers))
                left = deadline - time.monotonic()
                if there >= most_workers or left <= 0:
                    raise
                if not is_told:
                    is_told = True
                    logger.warning("%s Waiting for at most %g s.", error, wait_seconds)
                # Workers may come, and others make room; of the latter nothing tells.
                time.sleep(min(PLACE_AGAIN_SECONDS, left))
        self._hold(nodes, placed, deadline)
        self.placement.update(placed)
        news: dict[str, Any] = {a: {"nodes": {}} for a in self._members.workers}
        for node, address in placed.items():
            news[address]["nodes"][node] = sorted(self.plan.transient.get(node, ()))
        for details in news.values():
            details["placement"] = self.placement
        self._operate(Request("ship", news, is_separate=True), list(news))

    def ship(self, plans: Mapping[str, GroupPlan]) -> None:
        """Give the workers groups to run, by key; what they have already is not sent again."""
        parcel = Parcel(plans)
        for key, plan in plans.items():
            addresses = dict.fromkeys(self.placement[node] for node in nodes_of(plan))
            self._groups[key] = (plan, list(addresses))
        if all(self._digests.get(key) == parcel.digest for key in plans):
            return
        contents: dict[str, Any] = {}
        for node, data in parcel.slices.items():
            address = self.placement[node]
            content = contents.setdefault(address, {"groups": parcel.groups, "slices": {}})
            content["slices"][node] = data
        self._operate(Request("ship", contents, is_separate=True), list(contents))
        self._digests.update(dict.fromkeys(plans, parcel.digest))

    def forget(self, keys: Collection[str]) -> None:
        """Let the workers drop groups that nobody can run or fetch from any more."""
        for key in keys:
            self._groups.pop(key, None)
            self._digests.pop(key, None)
        self._cluster.sync(self._talk.ask, "forget", keys=list(keys))

    def blob_names(self) -> dict[str, frozenset[str]]:
        """The names of the global blobs that there are, by node."""
        found: dict[str, frozenset[str]] = {}
        for reply in self._cluster.sync(self._talk.ask, "blob names").values():
            found.update({node: frozenset(names) for node, names in reply["names"].items()})
        return found

    def fetch(self, node: str, name: str, groups: Sequence[str] = (), part: int = 0) -> Any:
        """The value of a blob; with `groups`, part of what task `name` returned in one of them."""
        details = {"node": node, "name": name, "groups": list(groups), "part": part}
        address = self.placement[node]
        return _own_value(self._operate(Request("fetch", details), [address])[address]["frames"])

    # ---- within

    async def _place_anew(self) -> dict[str, str]:
        try:
            workers = await self._candidates.find()
            return self._candidates.place(self.plan.nodes, workers, {})
        except PlacementError:
            return {}

    async def _place(self, nodes: Sequence[PlannedNode]) -> dict[str, str]:
        workers = await self._candidates.find()
        stays = {**self._previous, **self.placement}
        placed = self._candidates.place(nodes, workers, stays)
        used = set(placed.values()) - set(self._members.workers)
        strange = await self._talk.meet([w for w in workers if w.address in used]) if used else {}
        self._candidates.doubt(strange)
        for address, answer in strange.items():
            raise PlacementError(
                f"Worker {address} does not answer jobrunner (found {answer!r}): it is gone or "
                f"hangs, or has no jobrunner of this version. Install the same version there, or "
                f"close that worker."
            )
        return placed

    def _hold(
        self, nodes: Sequence[PlannedNode], placed: Mapping[str, str], deadline: float
    ) -> None:
        """Take leases, and let their workers host this binding."""
        details = {
            "job": self.plan.job,
            "seed": self.plan.seed,
            "attempt": self.attempt,
            "can_move": self._can_move,
            "silence_seconds": self._cluster.silence_seconds,
        }
        keys = self._leases.take(nodes, placed)
        late = self._cluster.sync(self._talk.bind, keys, deadline, details)
        if late:
            raise self._leases.give_up(late, nodes, placed)

    def _operate(self, request: Request, addresses: Sequence[str]) -> dict[str, Message]:
        replies = self._ask(request, addresses)
        request.check(replies, self.plan.job)
        return replies

    def _ask(self, request: Request, addresses: Sequence[str]) -> dict[str, Message]:
        with self._numbering:
            self._talk.number += 1
            request.number = self._talk.number
            request.started = time.monotonic()
            if request.call == "run":
                self._talk.run_number = request.number
        if request.call == "run" and not request.is_careful:
            self._cluster.check_open()
            answers = self._talk.try_directly(request, addresses)
            if answers is not None:
                return answers
        operate = self._talk.operate_each if request.is_careful else self._talk.operate
        replies: dict[str, Message] = self._cluster.sync(operate, request, addresses)
        return replies


def _own_value(frames: Sequence[Any]) -> Any:
    """The value that came over the wire, in memory that nobody else has."""
    head, *buffers = frames
    return from_frames([head, *(bytearray(memoryview(b).cast("B")) for b in buffers)])
