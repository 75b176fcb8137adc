"""4 run: what one binding of a session has on one worker: workspaces, programs, operations.

An operation is started by its first message and polled by the next ones, so that no message waits
for long. Everything here happens on the worker's event loop but user functions, pickling and
unpickling, which happen in the binding's threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from functools import partial
from typing import Any

from jobrunner.compile import Crossing, Slice, gc_paused
from jobrunner.errors import ExecutionError
from jobrunner.worker.epoch_batch import EpochBatch
from jobrunner.worker.group_runs import GroupCode, GroupRuns
from jobrunner.worker.operation import Operation
from jobrunner.worker.outbox import Message, RunValues, wrap_frames
from jobrunner.worker.outcome import describe_failure
from jobrunner.worker.program import Program
from jobrunner.worker.start_gate import StartGate
from jobrunner.worker.thread_pool import ThreadPool
from jobrunner.workspace import MEMORY_LIMIT, KeptStates, MemoryLimit, Workspace, to_frames

logger = logging.getLogger(__name__)

STRAGGLER_SECONDS = 30.0
SMALL_BYTES = 1 << 20

FULL_SECONDS = 0.5
"""How long the answer to another worker waits for memory_limit."""


class HostedNodes:
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
    silence_seconds : float
        How long another worker may be silent: see `GroupRuns`.
    used_bytes, limit_bytes, memory_share
        When to end a run for want of memory: see `MemoryLimit`.
    can_move : bool
        Its client binds the nodes elsewhere when this worker is to leave.
    kept_states : KeptStates, optional
        What is kept of the nodes' states; the binding before this one may have begun it.
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
        silence_seconds: float = math.inf,
        used_bytes: Callable[[], int] = lambda: 0,
        limit_bytes: int = 0,
        memory_share: float = 0.0,
        can_move: bool = False,
        kept_states: KeptStates | None = None,
    ) -> None:
        self.name = name
        self.kept_states = kept_states if kept_states is not None else KeptStates()
        self.can_move = can_move
        self.workspaces: dict[str, Workspace] = {}
        self.ended = asyncio.Event()  # closed, and no thread is left
        self._memory_limit = MemoryLimit(
            address,
            used_bytes=used_bytes,
            limit_bytes=limit_bytes,
            share=memory_share,
            sizes=lambda: {node: its.nbytes() for node, its in list(self.workspaces.items())},
            relieve=self.kept_states.void,
        )
        context.run(MEMORY_LIMIT.set, self._memory_limit)
        self.threads = ThreadPool(
            f"jobrunner-{name}",
            context,
            ended=lambda: self._on_loop(self.ended.set),
            failed=lambda error: self._on_loop(self._fail_run, error),
        )
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._placement: dict[str, str] = {}
        self._groups: dict[str, GroupCode] = {}
        self._operations: dict[str, Operation] = {}  # of each kind, the latest
        self._numbers: dict[str, int] = {}  # the latest of each kind
        self._runs = GroupRuns(
            name,
            job=job,
            seed=seed,
            attempt=attempt,
            address=address,
            nthreads=nthreads,
            threads=self.threads,
            call_peer=call_peer,
            straggler_seconds=straggler_seconds,
            silence_seconds=silence_seconds,
            memory_limit=self._memory_limit,
        )
        self._timer: asyncio.TimerHandle | None = None
        if self._memory_limit.is_limited:
            self._look_at_memory()

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
                self.workspaces[node] = Workspace(node, frozenset(transient), self.kept_states)

            own_slices = list((slices or {}).items())

            @gc_paused()
            def load() -> Message:
                parts = {node: self._load_slices(node, data) for node, data in own_slices}
                outline = pickle.loads(groups) if groups else {}
                for key, (name, crossings, conditions, all_nodes) in outline.items():
                    own = {node: part[key] for node, part in parts.items() if key in part}
                    if own:
                        program = Program(key, name, own, crossings, conditions, self.workspaces)
                        self._groups[key] = self._route(program, crossings, all_nodes)
                        if name not in ("init", "resume"):
                            for node, changed in program.changes.items():
                                self.kept_states.changing.setdefault(node, set()).update(changed)
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
        epoch_batch: Mapping[str, Any] | None = None,
        recorded: str = "",
        is_careful: bool = False,
    ) -> Message:
        """Run a group that was shipped, once or for a batch: see `Binding.run_epochs`.

        `recorded` is the moment before which no states are to be kept any more. Where it
        `is_careful`, tasks begin one at a time, each once the client has heard of it.
        """
        operation = self._start("run", number)
        if operation is not None:
            if recorded:
                self._drop_kept_states(recorded)
            group = self._groups[key]
            lead = (epoch_batch or {}).get("lead", self._address)
            batch = EpochBatch(number)
            if epoch_batch is not None:
                batch = EpochBatch(
                    number,
                    epoch_batch["epochs"],
                    epoch_batch["steps_per_epoch"],
                    lead="" if lead == self._address else lead,
                    followers=group.peers if lead == self._address else (),
                    is_judged=epoch_batch["is_judged"],
                    seconds=epoch_batch["seconds"],
                )
            if is_careful:
                operation.start_gate = StartGate()
            self._runs.start(group, batch, epoch, step, operation.finish, operation.start_gate)
        return await self._poll("run", number, wait_seconds)

    async def apply(
        self, number: int, wait_seconds: float, fn: bytes = b"", channel: str = "apply"
    ) -> Message:
        """Call ``fn(workspaces)`` in a thread."""
        kind = f"apply, {channel}"
        operation = self._start(kind, number)
        if operation is not None:

            def call() -> Message:
                return {"frames": wrap_frames(to_frames(pickle.loads(fn)(dict(self.workspaces))))}

            self._in_thread(operation, call)
        return await self._poll(kind, number, wait_seconds)

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

    async def push(self, values: RunValues) -> Message:
        """Take values that another worker sends for runs."""
        self._runs.push(values)
        if await self._runs.has_room(FULL_SECONDS):
            return {"status": "done"}
        return {"status": "done", "is_full": True}

    async def abort(self, number: int, reason: str) -> Message:
        """Let nothing of that run start any more."""
        self._runs.abort(number, reason)
        return {"status": "done"}

    def close(self, reason: str) -> None:
        """Abort what runs and let go of everything. Does not wait for running functions."""
        self._runs.close(reason)
        if self._timer is not None:
            self._timer.cancel()
        for operation in self._operations.values():
            operation.finish({"status": "unknown"})
        self.threads.close()
        # Emptied, for whoever still refers to them may go only when the collector comes by.
        for group in self._groups.values():
            group.program.forget_values()
        for workspace in self.workspaces.values():
            workspace.clear()
        self._groups.clear()
        self.workspaces.clear()

    # ---- operations, within

    def _look_at_memory(self) -> None:
        seconds = self._memory_limit.look()
        self.kept_states.is_suspended = self._memory_limit.is_tight
        if self._memory_limit.is_over and self._runs.is_running:
            self._runs.fail(self._memory_limit.error())
        self._timer = self._loop.call_later(seconds, self._look_at_memory)

    def _fail_run(self, error: BaseException) -> None:
        if self._runs.is_running:
            self._runs.fail(error)

    def _drop_kept_states(self, save_id: str) -> None:
        # Much memory is given back to the system in milliseconds, which the loop has not.
        if self.kept_states.nbytes > SMALL_BYTES:
            self.threads.submit(partial(self.kept_states.drop_before, save_id))
        else:
            self.kept_states.drop_before(save_id)

    def _start(self, kind: str, number: int) -> Operation | None:
        """The new operation of that number; None where it has started already."""
        if number <= self._numbers.get(kind, 0):
            return None
        self._numbers[kind] = number
        fetched = self._operations.get("fetch")
        if kind == "run" and fetched is not None and fetched.is_done:
            del self._operations["fetch"]  # it may hold much, of what is to be changed in place
        operation = self._operations[kind] = Operation(number)
        return operation

    async def _poll(self, kind: str, number: int, wait_seconds: float) -> Message:
        operation = self._operations.get(kind)
        if operation is None or operation.number != number:
            return {"status": "stale"}
        reply = await operation.reply(wait_seconds)
        if reply is not None:
            # Kept until the next begins: whoever gave up this message asks once more.
            return reply
        left, tasks = self._runs.progress() if kind == "run" else (0, [])
        return {"status": "running", "left": left, "tasks": tasks}

    def _in_thread(self, operation: Operation, work: Callable[[], Message]) -> None:
        def call() -> None:
            try:
                reply = {"status": "done", **work()}
            except BaseException as error:
                reply = failed_reply(error)
            self._on_loop(operation.finish, reply)

        self.threads.submit(call)

    def _on_loop(self, callback: Callable[..., object], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop has closed, and nobody waits any more
            logger.debug("The worker closed before %r", callback, exc_info=True)

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


def failed_reply(error: BaseException) -> Message:
    """The reply of an operation whose function raised, outside of any task."""
    failure = describe_failure("", "", error, is_own=True)
    return {"status": "failed", "failure": failure.to_message()}
