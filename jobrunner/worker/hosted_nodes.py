"""One binding's nodes on one worker: their workspaces, programs and operations.

An operation's first message starts it and later ones poll it, so that no message waits for long.
Everything here runs on the worker's event loop; user functions, pickling and unpickling run in the
binding's threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from jobrunner.compile import GroupPlan, Slice, gc_paused
from jobrunner.errors import ExecutionError
from jobrunner.worker.calls import Number, Seconds
from jobrunner.worker.epoch_batch import PLAIN_RUN, BatchOptions, EpochBatch, RunOptions
from jobrunner.worker.group_runs import BindingContext, GroupRuns
from jobrunner.worker.keeper import Premises
from jobrunner.worker.outbox import Message, RunValues, wrap_frames
from jobrunner.worker.outcome import describe_failure
from jobrunner.worker.program import Program
from jobrunner.worker.threads import Operation, ThreadPool, call_on_loop
from jobrunner.workspace import BEFORE_COPY, Workspace, to_frames

FULL_SECONDS = 0.5
"""How long the reply to another worker's values is delayed while there is no room for more."""

FETCH = "fetch"
"""The channel on which the client applies `fetch`."""


class HostedNodes:
    """The nodes of one binding on one worker.

    User functions run in `task_context`, the lease task's.
    """

    def __init__(self, context: BindingContext, task_context: contextvars.Context) -> None:
        self.can_move = context.can_move
        self.workspaces: dict[str, Workspace] = {}
        self._premises = Premises(self.workspaces)
        self.ended = asyncio.Event()  # set once this is closed and its last thread has ended
        self._address = context.address
        self._loop = asyncio.get_running_loop()
        self._memory_limit = replace(
            context.memory_limit,
            sizes=lambda: {space.node: space.nbytes() for space in list(self.workspaces.values())},
        )
        task_context.run(BEFORE_COPY.set, self._memory_limit.require)
        self.threads = ThreadPool(
            f"jobrunner-{context.name}",
            task_context,
            ended=lambda: call_on_loop(self._loop, self.ended.set),
            failed=lambda error: call_on_loop(self._loop, self._fail_run, error),
        )
        self._placement: dict[str, str] = {}
        self._programs: dict[str, Program] = {}
        self._operations: dict[str, Operation] = {}  # the latest of each kind
        self._numbers: dict[str, int] = {}  # those of the latest operations, deleted ones too
        self._runs = GroupRuns(context, self._premises, self.threads, self._memory_limit)
        self._timer: asyncio.TimerHandle | None = None
        if self._memory_limit.is_limited:
            self._check_memory()

    # ---- operations

    async def ship(
        self,
        number: Number,
        wait_seconds: Seconds,
        nodes: Mapping[str, Sequence[str]] | None = None,
        streams: Mapping[str, str] | None = None,
        placement: Mapping[str, str] | None = None,
        groups: bytes | None = None,
        slices: Mapping[str, bytes] | None = None,
    ) -> Message:
        """Take groups, and nodes with the names of their transient blobs."""

        def begin(operation: Operation) -> None:
            self._placement.update(placement or {})
            for node, transient in (nodes or {}).items():
                stream = (streams or {}).get(node, "")
                self.workspaces[node] = Workspace(node, frozenset(transient), stream)
            self._in_thread(operation, partial(self._load_groups, groups, dict(slices or {})))

        self._start("ship", number, begin)
        return await self._poll("ship", number, wait_seconds)

    async def run(
        self,
        number: Number,
        wait_seconds: Seconds,
        key: str = "",
        epoch: int | None = None,
        step: int = 0,
        epoch_batch: BatchOptions | None = None,
        options: RunOptions = PLAIN_RUN,
    ) -> Message:
        """Run a shipped group, once or for a batch of epochs: see `Binding.run_epochs`."""

        def begin(operation: Operation) -> None:
            program, batch_options = self._programs.get(key), dict[str, Any](epoch_batch or {})
            if program is None:
                raise ExecutionError(
                    f"Worker {self._address} was asked to run a group {key!r:.80} that it was not "
                    f"sent. Start the job again."
                )
            if batch_options.get("lead") == self._address:
                batch_options.update(lead="", followers=program.peers)
            batch = EpochBatch(number, epoch=epoch, step=step, options=options, **batch_options)
            self._runs.start(program, batch, operation)

        self._start("run", number, begin)
        return await self._poll("run", number, wait_seconds)

    async def apply(
        self, number: Number, wait_seconds: Seconds, fn: bytes = b"", channel: str = "apply"
    ) -> Message:
        """Call the pickled ``fn(premises)`` in a thread."""

        def call() -> Message:
            work = self._unpickle(fn, "a function to apply")
            return {"frames": wrap_frames(to_frames(work(self._premises)))}

        self._start(channel, number, lambda operation: self._in_thread(operation, call))
        return await self._poll(channel, number, wait_seconds)

    # ---- messages with an immediate reply

    async def blob_names(self) -> Message:
        """Return the names of the global blobs, by node."""
        names = {node: sorted(space.globals) for node, space in self.workspaces.items()}
        return {"status": "done", "names": names}

    async def forget(self, keys: Sequence[str]) -> Message:
        """Drop groups and their retained values."""
        for key in keys:
            self._programs.pop(key, None)
            for workspace in self.workspaces.values():
                workspace.forget(key)
        return {"status": "done"}

    async def push(self, values: RunValues) -> Message:
        """Take values from another worker."""
        self._runs.push(values)
        if await self._runs.has_room(FULL_SECONDS):
            return {"status": "done"}
        return {"status": "done", "is_full": True}

    async def abort(self, number: int, reason: str) -> Message:
        """Start nothing more of a run."""
        self._runs.abort(number, reason)
        return {"status": "done"}

    def close(self, reason: str) -> None:
        """Abort what runs and drop everything. Does not wait for running functions."""
        self._runs.close(reason)
        if self._timer is not None:
            self._timer.cancel()
        for operation in self._operations.values():
            operation.finish({"status": "unknown"})
        if self._premises.keeper is not None:
            self.threads.submit(self._premises.keeper.close)
        self.threads.close()
        # Reference cycles would keep the values alive until the garbage collector runs.
        for program in self._programs.values():
            program.arrived.clear()
            program.results.clear()
        for workspace in self.workspaces.values():
            workspace.clear()
        self._programs.clear()
        self.workspaces.clear()

    # ---- inside

    def _check_memory(self) -> None:
        seconds = self._memory_limit.look()
        if self._memory_limit.is_over and self._runs.is_running:
            self._runs.fail(self._memory_limit.error())
        self._timer = self._loop.call_later(seconds, self._check_memory)

    def _fail_run(self, error: BaseException) -> None:
        if self._runs.is_running:
            self._runs.fail(error)

    def _start(self, kind: str, number: int, begin: Callable[[Operation], None]) -> None:
        """Begin the operation of that number, unless it has begun already."""
        if number <= self._numbers.get(kind, 0):
            return
        self._numbers[kind] = number
        fetched = self._operations.get(FETCH)
        if kind == "run" and fetched is not None and fetched.is_done:
            del self._operations[FETCH]  # its reply may refer to arrays that tasks update
        operation = self._operations[kind] = Operation(number)
        try:
            begin(operation)
        except Exception as error:  # or polls of it would wait for ever
            operation.finish(failed_reply(error))

    async def _poll(self, kind: str, number: int, wait_seconds: float) -> Message:
        operation = self._operations.get(kind)
        if operation is None or operation.number != number:
            return {"status": "stale"}
        reply = await operation.reply(wait_seconds)
        if reply is not None:
            return reply  # and keep it: a client that lost this message asks again
        tasks = self._runs.running_tasks() if kind == "run" else []
        return {"status": "running", "tasks": tasks}

    def _in_thread(self, operation: Operation, work: Callable[[], Message]) -> None:
        def call() -> None:
            try:
                reply = {"status": "done", **work()}
            except BaseException as error:
                reply = failed_reply(error)
            call_on_loop(self._loop, operation.finish, reply)

        self.threads.submit(call)

    def _unpickle(self, data: bytes, description: str) -> Any:
        try:
            return pickle.loads(data)
        except Exception as error:
            raise ExecutionError(
                f"Worker {self._address} could not unpickle {description}: {type(error).__name__}: "
                f"{error}. Install the modules that the tasks need on the worker, in the client's "
                f"versions, or let cloudpickle send your module by value: "
                f"cloudpickle.register_pickle_by_value(module)."
            ) from error

    @gc_paused()
    def _load_groups(self, groups: bytes | None, slices: Mapping[str, bytes]) -> Message:
        parts: dict[str, dict[str, Slice]] = {}
        for node, data in slices.items():
            parts[node] = self._unpickle(data, f"the tasks of node {node!r}")
        outline = self._unpickle(groups, "the groups") if groups else {}
        for key, (name, crossings, conditions, nodes) in outline.items():
            own = {node: part[key] for node, part in parts.items() if key in part}
            if own:
                plan = GroupPlan(name, own, crossings, conditions)
                elsewhere = {n: self._placement[n] for n in nodes if n not in self.workspaces}
                self._programs[key] = Program(key, plan, self.workspaces, elsewhere)
        return {}


def fetch(
    workspaces: Mapping[str, Workspace], node: str, name: str, groups: Sequence[str], part: int
) -> Any:
    """Capture a blob; with `groups`, part of task `name`'s return value in one of these."""
    workspace = workspaces[node]
    return workspace.result(groups, name, part) if groups else workspace.capture(name)


def failed_reply(error: BaseException) -> Message:
    """The reply of an operation that failed outside of tasks."""
    return {"status": "failed", "failure": asdict(describe_failure("", "", error, is_own=True))}
