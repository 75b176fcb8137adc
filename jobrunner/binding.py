"""4 run: nodes bound to workers, and what a runner does with them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from distributed import Future

from jobrunner.cluster import Cluster, Silence
from jobrunner.errors import ExecutionError, NodeLostError, PlacementError, TaskFailedError
from jobrunner.hosting import Message
from jobrunner.outcome import Failure, GroupResult, merge_metrics
from jobrunner.placement import WorkerInfo, place
from jobrunner.plan import GroupPlan, Plan, PlannedNode
from jobrunner.shipping import Parcel, nodes_of, pickle_function
from jobrunner.values import from_frames
from jobrunner.worker import hold_lease, lease_key

logger = logging.getLogger(__name__)

FIRST_WAIT_SECONDS = 0.25
"""How long a first message waits for its operation's end.

It holds one of the scheduler's connections meanwhile, and with more workers than connections the
next ones must get theirs for slices that wait for each other to begin at all.
"""
POLL_SECONDS = 2.0
ABORT_SECONDS = 2.0
TELL_SECONDS = 0.3
LOSS_SECONDS = 2.0
"""How long to wait for the scheduler to say that a worker, not reached by another one, is lost."""
PLACE_AGAIN_SECONDS = 0.1


class Worker:
    """A worker in use by a binding."""

    def __init__(self, info: WorkerInfo, incarnation: str) -> None:
        self.info = info
        self.incarnation = incarnation
        self.leases: list[Future] = []


class Binding:
    """A plan's nodes on workers of a cluster, with their workspaces.

    Made by `Session.bind`. Its methods wait for what they start, from whatever thread that is not
    the client's event loop.

    Parameters
    ----------
    cluster : Cluster
    name : str
        Unique on the cluster.
    plan : Plan
    attempt : int
        How many bindings of this plan there were before.

    Attributes
    ----------
    placement : dict of str to str
        Node -> address of its worker.
    """

    def __init__(self, cluster: Cluster, name: str, plan: Plan, attempt: int) -> None:
        self.plan = plan
        self.placement: dict[str, str] = {}
        self._cluster = cluster
        self._name = name
        self._attempt = attempt
        self._workers: dict[str, Worker] = {}
        self._lost: dict[str, str] = {}  # address -> how we know
        self._interrupted = asyncio.Event()
        self._number = 0
        self._run_number = 0
        self._is_released = False
        self._keys: dict[str, GroupPlan] = {}
        self._digests: dict[str, str] = {}
        self._running: dict[str, list[tuple[str, str]]] = {}  # by worker, as last heard

    # ---- for runners

    def run(
        self,
        group: str,
        *,
        epoch: int | None = None,
        step: int = 0,
        deadline_seconds: float | None = None,
    ) -> GroupResult:
        """Run a group of the plan, or one that `ship` was given, and wait for its end.

        Parameters
        ----------
        group : str
            ``"init"``, ``"epoch"``, ...
        epoch : int, optional
        step : int
        deadline_seconds : float, optional
            Give up, and abort the run, when it takes longer.

        Returns
        -------
        GroupResult

        Raises
        ------
        TaskFailedError
            A task raised; its exception is the cause. A `CheckpointError` or a `DefinitionError`
            that it raised comes as it is.
        BlobNotFoundError
            A task's input is not there.
        NodeLostError
            A worker that holds nodes of this binding is gone or silent.
        ExecutionError
            The deadline passed.

        Notes
        -----
        Runs on the client. *Atomicity*: after an error, the workspaces are as the tasks that did
        run left them.
        """
        plan = self._keys[group]
        nodes = nodes_of(plan)
        if not nodes:
            return GroupResult(0.0, (), {})
        addresses = list(dict.fromkeys(self.placement[node] for node in nodes))
        started = time.perf_counter()
        self._number = self._run_number = self._number + 1
        message = {"call": "run", "key": group, "epoch": epoch, "step": step}
        try:
            replies = self._cluster.sync(
                self._operate, message, addresses, deadline_seconds, plan.name, epoch
            )
        except BaseException as error:
            if not isinstance(error, NodeLostError):
                self.abort(f"the client gave up: {type(error).__name__}")
            raise
        self._check(replies, plan.name, epoch)
        fired = {name for reply in replies.values() for name in reply["stopped"]}
        entries = [
            entry
            for reply in replies.values()
            if reply["metrics"]
            for entry in json.loads(reply["metrics"])
        ]
        return GroupResult(
            seconds=time.perf_counter() - started,
            stopped=tuple(c.name for c in plan.conditions if c.name in fired),
            metrics=merge_metrics(entries) if entries else {},
        )

    def apply(self, fn: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Call ``fn(workspaces)`` once on each worker in use.

        Parameters
        ----------
        fn : callable
            Picklable; takes node -> `Workspace` of the worker's nodes. Runs in a thread.

        Returns
        -------
        dict
            Address -> what `fn` returned there.

        Raises
        ------
        Exception
            The one that `fn` raised; of several workers' the first by placement.
        NodeLostError
        """
        data = pickle_function(fn, "The function to apply")
        replies = self._run_operation({"call": "apply", "fn": data}, list(self._workers))
        return {address: _own_value(reply["frames"]) for address, reply in replies.items()}

    def abort(self, reason: str = "the client asked for it") -> None:
        """Stop slices everywhere: nothing further starts. Takes at most a few seconds.

        Functions that are running can't be stopped; what they return is dropped.
        """
        addresses = [address for address in self._workers if address not in self._lost]
        if not addresses or self._is_released:
            return
        message = {
            "call": "abort",
            "binding": self._name,
            "number": self._run_number,
            "reason": reason,
        }
        self._try_to_send(message, addresses)

    def release(self) -> None:
        """Free the workspaces, threads and leases on the workers. Once is enough."""
        if self._is_released:
            return
        self._is_released = True
        addresses = [address for address in self._workers if address not in self._lost]
        if addresses and self._cluster.client.status == "running":
            self._try_to_send({"call": "release", "binding": self._name}, addresses)
        self._cluster.unwatch(self._workers, self._lose)
        for worker in self._workers.values():
            for lease in worker.leases:
                lease.release()

    # ---- for the session

    def extend(self, nodes: Sequence[PlannedNode], wait_seconds: float) -> None:
        """Place further nodes, with empty workspaces.

        Raises
        ------
        PlacementError
            No workers that suit came, or none was free, in that time.
        """
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                placed = self._cluster.sync(self._place, nodes)
                break
            except PlacementError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(PLACE_AGAIN_SECONDS)
        resources: dict[str, dict[str, float]] = {address: {} for address in placed.values()}
        for node in nodes:
            held = resources[placed[node.name]]
            for resource, amount in (node.resources or {}).items():
                held[resource] = held.get(resource, 0) + amount
        # A further lease is needed for further resources only.
        new = [a for a, held in resources.items() if held or not self._workers[a].leases]
        leases = {
            address: lease_key(
                self._name,
                self._workers[address].incarnation,
                len(self._workers[address].leases),
            )
            for address in new
        }
        for address, key in leases.items():
            self._workers[address].leases.append(
                self._cluster.client.submit(
                    hold_lease,
                    key,
                    key=key,
                    workers=[address],
                    allow_other_workers=False,
                    resources=resources[address],
                    pure=False,
                )
            )
        if leases:
            self._cluster.sync(self._bind, leases, deadline)
        self.placement.update(placed)
        self._ship_nodes(placed)

    def ship(self, plans: Mapping[str, GroupPlan]) -> None:
        """Give the workers groups to run, by key; what they have already is not sent again."""
        parcel = Parcel(plans)
        self._keys.update(plans)
        if all(self._digests.get(key) == parcel.digest for key in plans):
            return
        messages = {}
        by_worker: dict[str, dict[str, bytes]] = {}
        for node, data in parcel.slices.items():
            by_worker.setdefault(self.placement[node], {})[node] = data
        for address, slices in by_worker.items():
            messages[address] = {"call": "ship", "groups": parcel.groups, "slices": slices}
        self._run_operation(messages, list(messages))
        self._digests.update(dict.fromkeys(plans, parcel.digest))

    def forget(self, keys: Collection[str]) -> None:
        """Let the workers drop groups that cannot be asked for any more."""
        for key in keys:
            self._keys.pop(key, None)
            self._digests.pop(key, None)
        self._ask({"call": "forget", "keys": list(keys)})

    def blob_names(self) -> dict[str, frozenset[str]]:
        """The names of the global blobs that there are, by node."""
        found: dict[str, frozenset[str]] = {}
        for reply in self._ask({"call": "blob names"}).values():
            found.update({node: frozenset(names) for node, names in reply["names"].items()})
        return found

    def fetch(self, node: str, name: str, group: str = "", part: int = -1) -> Any:
        """The value of a blob, or with `group` and `part` of what task `name` returned."""
        address = self.placement[node]
        message = {"call": "fetch", "node": node, "name": name, "group": group, "part": part}
        replies = self._run_operation(message, [address])
        return _own_value(replies[address]["frames"])

    @property
    def is_usable(self) -> bool:
        """Whether it is neither released nor has lost a worker."""
        return not (self._is_released or self._lost)

    # ---- operations, from the caller's thread

    def _run_operation(
        self, messages: Message | Mapping[str, Message], addresses: Sequence[str]
    ) -> dict[str, Message]:
        if not addresses:
            return {}  # a binding without nodes, or a group without tasks
        self._number += 1
        replies = self._cluster.sync(self._operate, messages, addresses, None, "", None)
        self._check(replies, "", None)
        found: dict[str, Message] = replies
        return found

    def _ask(self, message: Message) -> dict[str, Message]:
        """Ask all workers something that is answered at once."""
        self._number += 1
        replies = self._cluster.sync(
            self._operate, message, list(self._workers), None, "", None, False
        )
        found: dict[str, Message] = replies
        return found

    def _try_to_send(self, message: Message, addresses: Sequence[str]) -> None:
        async def send() -> None:
            await asyncio.wait_for(self._cluster.send(message, addresses), ABORT_SECONDS)

        try:
            self._cluster.sync(send)
        except Exception as error:
            logger.info("%s did not reach %s: %r", message["call"], addresses, error)

    def _ship_nodes(self, placed: Mapping[str, str]) -> None:
        everywhere = list(self._workers)
        messages = {
            address: {
                "call": "ship",
                "placement": self.placement,
                "nodes": {
                    node: sorted(self.plan.transient.get(node, ()))
                    for node, its in placed.items()
                    if its == address
                },
            }
            for address in everywhere
        }
        self._run_operation(messages, everywhere)

    def _check(self, replies: Mapping[str, Message], group: str, epoch: int | None) -> None:
        """Raise what workers say went wrong, the task's failure before its consequences."""
        for reply in replies.values():
            if reply["status"] == "failed":
                raise self._error(Failure(**reply["failure"]), group, epoch)
        for address, reply in replies.items():
            if reply["status"] != "done":
                reason = reply.get("reason") or f"it answered {reply['status']}"
                raise ExecutionError(
                    f"Worker {address} did not end its part of the {group or 'operation'}: "
                    f"{reason}. Start the run again."
                )

    def _error(self, failure: Failure, group: str, epoch: int | None) -> BaseException:
        cause = failure.exception()
        if failure.is_own:
            cause.add_note(f"On the worker:\n{failure.traceback}")
            return cause
        where = f"node {failure.node!r}, " if failure.node else ""
        when = f" at epoch {epoch}" if epoch is not None else ""
        error = TaskFailedError(
            f"Task {failure.task!r} ({where}group {group!r}, job {self.plan.job!r}) "
            f"failed{when}: {failure.summary}. The remote traceback says where; mend the task and "
            f"start the same command again.",
            job=self.plan.job,
            node=failure.node,
            task=failure.task,
            group=group,
            epoch=epoch,
            remote_traceback=failure.traceback,
        )
        error.add_note(f"On the worker:\n{failure.traceback}")
        error.__cause__ = cause
        return error

    # ---- on the client's event loop

    async def _place(self, nodes: Sequence[PlannedNode]) -> dict[str, str]:
        workers = [w for w in await self._cluster.workers() if w.address not in self._lost]
        placed = place(nodes, workers, self.placement)
        table = {worker.address: worker for worker in workers}
        new = [a for a in dict.fromkeys(placed.values()) if a not in self._workers]
        if not new:
            return placed
        # Whoever is lost from now on is heard of; whoever was lost just before shows here.
        self._cluster.watch(new, self._lose)
        try:
            answers = await self._cluster.ask({"call": "hello"}, new, 0, asyncio.Event())
        except Silence:
            answers = {}
        for address in new:
            answer = answers.get(address)
            if not isinstance(answer, dict):
                self._cluster.unwatch(new, self._lose)
                for other in new:
                    self._lost.pop(other, None)
                if not self._lost:
                    self._interrupted.clear()
                raise PlacementError(
                    f"Worker {address} does not answer jobrunner ({answer!r}): it is gone, has no "
                    f"jobrunner of this version installed, or hangs. Mend or close that worker."
                )
        for address in new:
            incarnation = answers[address]["incarnation"]  # type: ignore[index]
            self._workers[address] = Worker(table[address], incarnation)
        return placed

    async def _bind(self, leases: Mapping[str, str], deadline: float) -> None:
        """Wait until every lease task runs and its worker hosts the binding."""
        waiting = dict(leases)
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            message = {
                "call": "bind",
                "binding": self._name,
                "leases": leases,
                "wait_seconds": min(FIRST_WAIT_SECONDS, left),
                "job": self.plan.job,
                "seed": self.plan.seed,
                "attempt": self._attempt,
            }
            answers = await self._ask_workers(message, list(waiting), FIRST_WAIT_SECONDS, None)
            for address, answer in answers.items():
                if answer["status"] == "done":
                    del waiting[address]
            if waiting and not left:
                raise PlacementError(
                    f"Workers {', '.join(waiting)} did not start the lease tasks of this session "
                    f"in time: they are paused or closing, or others hold their resources "
                    f"({ {a: dict(self._workers[a].info.resources) for a in waiting} }). Close "
                    f"what holds them, start more workers, or wait longer."
                )

    async def _operate(
        self,
        messages: Message | Mapping[str, Message],
        addresses: Sequence[str],
        deadline_seconds: float | None,
        group: str,
        epoch: int | None,
        is_polled: bool = True,
    ) -> dict[str, Message]:
        """Start an operation on workers and ask until each has answered."""
        number = self._number
        common = {"binding": self._name}
        if is_polled:
            common |= {"number": number, "wait_seconds": FIRST_WAIT_SECONDS}  # type: ignore[dict-item]
        call = ""
        if "call" in messages:
            call = messages["call"]  # type: ignore[assignment]
            messages = {**messages, **common}
        else:
            call = next(iter(messages.values()))["call"]
            messages = {address: {**message, **common} for address, message in messages.items()}
        wait_seconds = FIRST_WAIT_SECONDS
        started = time.monotonic()
        pending = list(addresses)
        replies: dict[str, Message] = {}
        while True:
            answers = await self._ask_workers(messages, pending, wait_seconds, epoch)
            for address, answer in answers.items():
                if answer["status"] == "running":
                    self._running[address] = answer["tasks"]
                else:
                    self._running.pop(address, None)
                    replies[address] = answer
            suspect = next((r["suspect"] for r in replies.values() if "suspect" in r), None)
            if suspect is not None:
                await self._await_loss(suspect, replies, epoch)
            pending = [address for address in pending if address not in replies]
            if not pending:
                return {address: replies[address] for address in addresses}
            if call == "run" and any(r["status"] != "done" for r in replies.values()):
                await self._abort_on(pending, "another worker's part has failed")
            wait_seconds = POLL_SECONDS
            if deadline_seconds is not None:
                left = deadline_seconds - (time.monotonic() - started)
                if left <= 0:
                    raise self._late(pending, group, epoch, deadline_seconds)
                wait_seconds = min(wait_seconds, left)
            messages = {
                "call": call,
                "binding": self._name,
                "number": number,
                "wait_seconds": wait_seconds,
            }

    async def _ask_workers(
        self,
        messages: Message | Mapping[str, Message],
        addresses: Sequence[str],
        wait_seconds: float,
        epoch: int | None,
    ) -> dict[str, Message]:
        """One round of questions; a worker that is lost ends it."""
        for worker in self._workers.values():
            for lease in worker.leases:
                if lease.status in ("cancelled", "lost", "error"):
                    self._lost.setdefault(worker.info.address, f"its lease was {lease.status}")
        if self._lost:
            raise await self._node_lost(epoch)
        try:
            answers = await self._cluster.ask(messages, addresses, wait_seconds, self._interrupted)
        except Silence:
            silent = await self._cluster.find_silent(addresses)
            for address in silent:
                self._lost[address] = f"it has not answered for {self._cluster.silence_seconds:g} s"
            answers = {} if silent else dict.fromkeys(addresses, {"status": "running", "tasks": []})
        except OSError as error:
            raise ExecutionError(
                f"The scheduler at {self._cluster.client.scheduler.address} cannot be reached "
                f"any more: {error}. Start the same command again; it goes on from the last "
                f"recorded epoch."
            ) from error
        for address, answer in answers.items():
            if isinstance(answer, BaseException):
                self._lost[address] = f"{type(answer).__name__}: {answer}"
            elif not isinstance(answer, Mapping) or answer.get("status") == "unknown":
                self._lost[address] = "it died and came back without its workspaces"
        if self._lost:
            raise await self._node_lost(epoch)
        return answers  # type: ignore[return-value]

    async def _await_loss(
        self, suspect: str, replies: Mapping[str, Message], epoch: int | None
    ) -> None:
        """A worker could not reach another: soon the scheduler says whether that one is lost."""
        try:
            await asyncio.wait_for(self._interrupted.wait(), LOSS_SECONDS)
        except TimeoutError:
            reason = next(r["reason"] for r in replies.values() if r.get("suspect") == suspect)
            self._lost[suspect] = reason
        raise await self._node_lost(epoch)

    def _lose(self, address: str) -> None:
        """The scheduler says that the worker is gone."""
        self._lost.setdefault(address, "the scheduler removed it")
        self._interrupted.set()

    async def _node_lost(self, epoch: int | None) -> NodeLostError:
        """The error to raise, once the other workers know; `_lost` says who is to blame."""
        address, how = next(iter(self._lost.items()))
        nodes = tuple(n for n, its in self.placement.items() if its in self._lost)
        alive = [a for a in self._workers if a not in self._lost]
        running = [f"{node}/{task}" for node, task in self._running.get(address, ())]
        await self._abort_on(alive, f"worker {address} is lost")
        while_running = f" while it ran {', '.join(running)}" if running else ""
        names = ", ".join(map(repr, nodes[:10])) + (", …" if len(nodes) > 10 else "")
        return NodeLostError(
            f"Worker {', '.join(self._lost)} with nodes {names or 'none'} is lost"
            f"{f' at epoch {epoch}' if epoch is not None else ''}{while_running}: {how}. "
            f"The workspaces of those nodes are gone.",
            nodes=nodes,
            worker=address,
            epoch=epoch,
        )

    async def _abort_on(self, addresses: Sequence[str], reason: str) -> None:
        """Abort the current run there; whether they have heard it is not waited for long."""
        message = {
            "call": "abort",
            "binding": self._name,
            "number": self._run_number,
            "reason": reason,
        }
        if addresses:
            try:
                await asyncio.wait_for(self._cluster.send(message, addresses), TELL_SECONDS)
            except Exception as error:
                logger.info("Could not tell all of %s that %s: %r", addresses, reason, error)

    def _late(
        self, pending: Sequence[str], group: str, epoch: int | None, deadline_seconds: float
    ) -> ExecutionError:
        running = [
            f"{node}/{task}" for address in pending for node, task in self._running.get(address, ())
        ]
        late = [node for node, address in self.placement.items() if address in pending]
        return ExecutionError(
            f"The {group} group of job {self.plan.job!r} did not end within {deadline_seconds:g} s"
            f"{f' at epoch {epoch}' if epoch is not None else ''}. Late are nodes "
            f"{', '.join(map(repr, late))}; running: {', '.join(running) or 'nothing'}. Allow it "
            f"more time, or find out what holds it up."
        )


def _own_value(frames: Sequence[Any]) -> Any:
    """The value that came over the wire, in memory that nobody else has."""
    head, *buffers = frames
    return from_frames([head, *(bytearray(memoryview(b).cast("B")) for b in buffers)])
