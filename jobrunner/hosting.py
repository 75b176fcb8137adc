"""4 run: what one binding of a session has on one worker: workspaces, programs, operations.

An operation is started by its first message and polled by the next ones, so that no message waits
for long. Everything here happens on the worker's event loop but user functions, pickling and
unpickling, which happen in the binding's threads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import Context
from typing import Any

from jobrunner.crew import Crew
from jobrunner.current import RunInfo
from jobrunner.errors import ExecutionError
from jobrunner.outbox import Message, Outbox, wrap_frames
from jobrunner.outcome import Outcome, describe_failure
from jobrunner.plan import Crossing, Slice
from jobrunner.program import Program
from jobrunner.slice import GroupRun
from jobrunner.values import Snapshot, WireSnapshot, to_frames
from jobrunner.workspace import Workspace

logger = logging.getLogger(__name__)

STRAGGLER_SECONDS = 30.0


class Operation:
    """Something under way on the worker, and in the end its reply."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def finish(self, reply: Message) -> None:
        """Say what came of it; the first one counts."""
        if not self._reply.done():
            self._reply.set_result(reply)

    @property
    def is_done(self) -> bool:
        """Whether the reply is there."""
        return self._reply.done()

    async def reply(self, wait_seconds: float) -> Message | None:
        """The reply, if it is there within that time."""
        if not self._reply.done():
            await asyncio.wait((self._reply,), timeout=wait_seconds)
        return self._reply.result() if self._reply.done() else None


class GroupCode:
    """A group as this worker runs it."""

    def __init__(
        self,
        program: Program,
        routes: Mapping[int, tuple[str, ...]],
        peers: tuple[str, ...],
    ) -> None:
        self.program = program
        self.routes = routes  # crossing -> addresses of other workers that need it
        self.peers = peers  # addresses of the other workers that take part


class HostedBinding:
    """One binding's part on one worker.

    Parameters
    ----------
    name : str
        The binding's, unique on the cluster.
    job : str
    seed, attempt : int
    address : str
        This worker's.
    nthreads : int
        This worker's.
    context : contextvars.Context
        What user functions see; the lease task's.
    call_peer : callable
        ``await call_peer(address, message)`` gives another worker's reply.
    straggler_seconds : float
        How long a run waits for functions that an aborted one left behind.
    """

    def __init__(
        self,
        name: str,
        *,
        job: str,
        seed: int,
        attempt: int,
        address: str,
        nthreads: int,
        context: Context,
        call_peer: Callable[[str, Message], Awaitable[Message]],
        straggler_seconds: float = STRAGGLER_SECONDS,
    ) -> None:
        self.name = name
        self.workspaces: dict[str, Workspace] = {}
        self.ended = asyncio.Event()  # closed, and no thread is left
        self.crew = Crew(f"jobrunner-{name}", context, lambda: self._on_loop(self.ended.set))
        self._job, self._seed, self._attempt = job, seed, attempt
        self._address = address
        self._nthreads = nthreads
        self._call_peer = call_peer
        self._straggler_seconds = straggler_seconds
        self._loop = asyncio.get_running_loop()
        self._placement: dict[str, str] = {}
        self._groups: dict[str, GroupCode] = {}
        self._operations: dict[str, Operation] = {}  # of each kind, until its reply has gone
        self._numbers: dict[str, int] = {}  # the latest of each kind
        self._run: GroupRun | None = None
        self._run_number = 0
        self._peers: tuple[str, ...] = ()
        self._drained = asyncio.Event()
        self._drained.set()
        # What came for a run that has not started here yet: its number, values, reason to abort.
        self._early: tuple[int, dict[int, Snapshot], list[str]] = (0, {}, [])
        self._outbox = Outbox(self._push, self._could_not_push)
        self._background: set[asyncio.Task[None]] = set()

    # ---- operations

    async def ship(
        self,
        number: int,
        wait_seconds: float,
        nodes: Mapping[str, Sequence[str]] | None = None,
        placement: Mapping[str, str] | None = None,
        groups: bytes | None = None,
        slices: Mapping[str, bytes] | None = None,
    ) -> Message:
        """Take nodes (with their transient blobs) and groups; unpickles in a thread."""
        operation = self._start("ship", number)
        if operation is not None:
            self._placement.update(placement or {})
            for node, transient in (nodes or {}).items():
                self.workspaces[node] = Workspace(node, frozenset(transient))

            own_slices = list((slices or {}).items())

            def load() -> Message:
                parts = {node: self._load_slices(node, data) for node, data in own_slices}
                outline = pickle.loads(groups) if groups else {}
                for key, (name, crossings, conditions, all_nodes) in outline.items():
                    own = {node: part[key] for node, part in parts.items() if key in part}
                    if own:
                        program = Program(key, name, own, crossings, conditions, self.workspaces)
                        self._groups[key] = self._route(program, crossings, all_nodes)
                return {}

            self._in_thread(operation, load)
        return await self._poll("ship", number, wait_seconds)

    async def run(
        self,
        number: int,
        wait_seconds: float,
        key: str = "",
        epoch: int | None = None,
        step: int = 0,
    ) -> Message:
        """Run a group that was shipped."""
        operation = self._start("run", number)
        if operation is not None:
            if self._drained.is_set():
                self._start_run(operation, key, epoch, step)
            else:
                self._soon(self._start_run_later(operation, key, epoch, step))
        return await self._poll("run", number, wait_seconds)

    async def apply(self, number: int, wait_seconds: float, fn: bytes = b"") -> Message:
        """Call ``fn(workspaces)`` in a thread."""
        operation = self._start("apply", number)
        if operation is not None:

            def call() -> Message:
                return {"frames": wrap_frames(to_frames(pickle.loads(fn)(dict(self.workspaces))))}

            self._in_thread(operation, call)
        return await self._poll("apply", number, wait_seconds)

    async def fetch(
        self,
        number: int,
        wait_seconds: float,
        node: str = "",
        name: str = "",
        groups: Sequence[str] = (),
        part: int = 0,
    ) -> Message:
        """A blob's value; with `groups`, part of what task `name` returned in one of them."""
        operation = self._start("fetch", number)
        if operation is not None:

            def read() -> Message:
                workspace = self.workspaces[node]
                value = workspace.result(groups, name, part) if groups else workspace.lookup(name)
                return {"frames": wrap_frames(to_frames(value))}

            self._in_thread(operation, read)
        return await self._poll("fetch", number, wait_seconds)

    # ---- messages that are answered at once

    async def blob_names(self) -> Message:
        """The names of the global blobs, by node."""
        names = {node: sorted(space.globals) for node, space in self.workspaces.items()}
        return {"status": "done", "names": names}

    async def forget(self, keys: Sequence[str]) -> Message:
        """Drop groups, and what is retained of them."""
        for key in keys:
            self._groups.pop(key, None)
            for workspace in self.workspaces.values():
                workspace.forget(key)
        return {"status": "done"}

    async def push(self, number: int, values: Sequence[tuple[int, Sequence[Any]]]) -> Message:
        """Take values that another worker sends for a run."""
        arrived = {crossing: WireSnapshot(frames) for crossing, frames in values}
        if number == self._run_number and self._run is not None:
            self._run.deliver(arrived)
        elif number >= self._run_number:
            self._buffer(number)[1].update(arrived)
        return {"status": "done"}

    async def abort(self, number: int, reason: str) -> Message:
        """Let nothing of that run start any more."""
        if number == self._run_number and self._run is not None:
            self._run.abort(reason)
        elif number >= self._run_number:
            self._buffer(number)[2].append(reason)
        return {"status": "done"}

    def close(self, reason: str) -> None:
        """Abort what runs and let go of everything. Does not wait for running functions."""
        if self._run is not None:
            self._run.abort(reason)
        self._outbox.close()
        for task in self._background:
            task.cancel()
        for operation in self._operations.values():
            operation.finish({"status": "unknown"})
        self.crew.close()
        self._groups.clear()
        self.workspaces.clear()
        self._run = None

    # ---- operations, within

    def _start(self, kind: str, number: int) -> Operation | None:
        """The new operation of that number; None where it has started already."""
        if number <= self._numbers.get(kind, 0):
            return None
        self._numbers[kind] = number
        operation = self._operations[kind] = Operation(number)
        return operation

    async def _poll(self, kind: str, number: int, wait_seconds: float) -> Message:
        operation = self._operations.get(kind)
        if operation is None or operation.number != number:
            return {"status": "stale"}
        reply = await operation.reply(wait_seconds)
        if reply is not None:
            if self._operations.get(kind) is operation:
                del self._operations[kind]  # a reply may hold much
            return reply
        left, tasks = 0, list[tuple[str, str]]()
        if kind == "run" and self._run is not None:
            left, tasks = self._run.progress()
        return {"status": "running", "left": left, "tasks": tasks}

    def _in_thread(self, operation: Operation, work: Callable[[], Message]) -> None:
        def call() -> None:
            try:
                reply = {"status": "done", **work()}
            except BaseException as error:
                reply = failed_reply(error)
            self._on_loop(operation.finish, reply)

        self.crew.submit(call)

    def _on_loop(self, callback: Callable[..., object], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop has closed, and nobody waits any more
            logger.debug("The worker closed before %r", callback, exc_info=True)

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _load_slices(self, node: str, data: bytes) -> dict[str, Slice]:
        try:
            slices: dict[str, Slice] = pickle.loads(data)
        except Exception as error:
            raise ExecutionError(
                f"Worker {self._address} could not unpickle the tasks of node {node!r}: "
                f"{type(error).__name__}: {error}. Install the modules that they need there, in "
                f"the versions that the client has, or have cloudpickle send your module by value: "
                f"cloudpickle.register_pickle_by_value(module)."
            ) from error
        return slices

    # ---- a run

    def _route(
        self, program: Program, crossings: Sequence[Crossing], nodes: Sequence[str]
    ) -> GroupCode:
        routes = {}
        for crossing in crossings:
            if crossing.source in program.workspaces:
                addresses = {self._placement[node] for node in crossing.targets}
                routes[crossing.id] = tuple(addresses - {self._address})
        peers = {self._placement[node] for node in nodes} - {self._address}
        return GroupCode(program, routes, tuple(peers))

    def _start_run(self, operation: Operation, key: str, epoch: int | None, step: int) -> None:
        group = self._groups[key]
        number = operation.number
        values: dict[int, Snapshot] = {}
        reasons: list[str] = []
        if self._early[0] == number:
            _, values, reasons = self._early
        self._early = (0, {}, [])
        self._outbox.start(number)
        self._run_number = number
        self._peers = group.peers
        self._drained.clear()
        run = self._run = GroupRun(
            group.program,
            RunInfo(self._job, group.program.name, self._seed, epoch, step, self._attempt),
            nthreads=self._nthreads,
            submit=self.crew.submit,
            timer=self._loop.call_later,
            send=lambda crossing, value: self._outbox.put(
                number, group.routes[crossing], crossing, to_frames(value)
            ),
            finished=lambda outcome: self._on_loop(self._end_run, operation, run, outcome),
            drained=lambda: self._on_loop(self._drained.set),
        )
        run.start()
        if values:
            run.deliver(values)
        if reasons:
            run.abort(reasons[0])

    async def _start_run_later(
        self, operation: Operation, key: str, epoch: int | None, step: int
    ) -> None:
        """An aborted run left a function running: wait for it, it may change the blobs."""
        left_behind = self._run
        try:
            await asyncio.wait_for(self._drained.wait(), self._straggler_seconds)
        except TimeoutError:
            tasks = left_behind.progress()[1] if left_behind is not None else []
            names = ", ".join(f"{node}/{task}" for node, task in tasks)
            operation.finish(
                {
                    "status": "aborted",
                    "reason": f"{names} of an aborted run still runs after "
                    f"{self._straggler_seconds:g} s and may change blobs",
                }
            )
        else:
            self._start_run(operation, key, epoch, step)

    def _end_run(self, operation: Operation, run: GroupRun, outcome: Outcome) -> None:
        run.stop_timers()
        if outcome.status == "done":
            metrics = json.dumps(outcome.metrics) if outcome.metrics else ""
            operation.finish({"status": "done", "stopped": outcome.stopped, "metrics": metrics})
        elif outcome.failure is not None:
            failure = outcome.failure
            operation.finish({"status": "failed", "failure": failure.to_message()})
            reason = f"{failure.node}/{failure.task} failed: {failure.summary}"
            self._tell_peers(operation.number, reason)
        else:
            operation.finish({"status": "aborted", "reason": outcome.reason})

    def _buffer(self, number: int) -> tuple[int, dict[int, Snapshot], list[str]]:
        """Where to put what belongs to a run that has not started here.

        The driver starts a run only when the one before is over everywhere, so what is there for
        another number is stale, and at most one run's crossings are held.
        """
        if self._early[0] < number:
            self._early = (number, {}, [])
        return self._early if self._early[0] == number else (number, {}, [])

    # ---- to other workers

    async def _push(self, address: str, number: int, values: list[Any]) -> str | None:
        message = {"call": "push", "binding": self.name, "number": number, "values": values}
        try:
            reply = await self._call_peer(address, message)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None if reply.get("status") == "done" else f"it answered {reply}"

    def _could_not_push(self, address: str, number: int, problem: str) -> None:
        run, operation = self._run, self._operations.get("run")
        if run is not None and number == self._run_number:
            reason = f"worker {self._address} could not hand values to worker {address}: {problem}"
            if operation is not None:
                operation.finish({"status": "aborted", "reason": reason, "suspect": address})
            run.abort(reason)
            self._tell_peers(number, reason, but=address)

    def _tell_peers(self, number: int, reason: str, but: str = "") -> None:
        for address in self._peers:
            if address != but:
                self._soon(self._tell(address, number, reason))

    async def _tell(self, address: str, number: int, reason: str) -> None:
        message = {"call": "abort", "binding": self.name, "number": number, "reason": reason}
        try:
            await asyncio.wait_for(self._call_peer(address, message), 5)
        except Exception:  # the client tells it too
            logger.info("Could not tell %s that %s", address, reason, exc_info=True)


def failed_reply(error: BaseException) -> Message:
    """The reply of an operation whose function raised, outside of any task."""
    failure = describe_failure("", "", error, is_own=True)
    return {"status": "failed", "failure": failure.to_message()}
