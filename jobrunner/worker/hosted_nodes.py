"""One binding's nodes on one worker: their workspaces, programs and operations.

An operation's first message starts it and later ones poll it, so that no message waits for long.
Everything here runs on the worker's event loop; user functions, pickling and unpickling run in the
binding's threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import math
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from jobrunner.compile import GroupPlan, Slice, gc_paused
from jobrunner.errors import ExecutionError
from jobrunner.worker.calls import Number, Seconds
from jobrunner.worker.epoch_batch import EpochBatch, Grant, RunOrder
from jobrunner.worker.executor import GroupRun
from jobrunner.worker.keeper import Keeper
from jobrunner.worker.memory import LOOK_SECONDS, MemoryLimit
from jobrunner.worker.outbox import Message, Outbox, RunValues, frame_bytes, wrap_frames
from jobrunner.worker.outcome import Outcome, describe_failure
from jobrunner.worker.program import Program
from jobrunner.worker.task_context import CurrentTask
from jobrunner.worker.threads import ThreadPool, call_on_loop
from jobrunner.workspace import BEFORE_COPY, Pickled, Workspace, received, to_frames

FULL_SECONDS = 0.5
"""How long the reply to another worker's values is delayed while there is no room for more."""

FETCH = "fetch"
"""The channel on which the client applies `fetch`."""

GRANT, REPORT, FAILURE = -1, -2, -3
"""Notes between the workers of a batch travel under these in place of a crossing."""


@dataclass(frozen=True, kw_only=True)
class BindingContext:
    """What all parts of one binding on one worker share."""

    name: str  # the binding's, unique on the cluster
    job: str
    seed: int
    attempt: int
    address: str  # this worker's
    nthreads: int  # this worker's
    call_peer: Callable[[str, Message], Awaitable[Message]]  # returns another worker's reply
    ping_peer: Callable[[str], Awaitable[object]]
    memory_limit: MemoryLimit  # ends a run if memory is short
    silence_seconds: float = math.inf  # how long another worker may be silent: see `Outbox`
    straggler_seconds: float = 30.0  # how long a run waits for functions of an aborted one
    can_move: bool = False  # the client binds the nodes elsewhere before this worker closes


class Operation:
    """Work for the client, and its reply once it is done."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def finish(self, reply: Message) -> None:
        """Set the reply. Only "done" can be replaced: when another worker then refuses values."""
        if self._reply.done():
            if self._reply.result()["status"] != "done" or "suspect" not in reply:
                return
            self._reply = asyncio.get_running_loop().create_future()
        self._reply.set_result(reply)

    @property
    def is_done(self) -> bool:
        """Whether the reply is set."""
        return self._reply.done()

    async def reply(self, wait_seconds: float) -> Message | None:
        """Wait for the reply; None if there is none yet."""
        if not self._reply.done():
            await asyncio.wait((self._reply,), timeout=wait_seconds)
        return self._reply.result() if self._reply.done() else None


@dataclass(slots=True)
class _Early:
    """What arrived for a run, or for the batch that begins with it, before it started here."""

    values: dict[int, Pickled] = field(default_factory=dict)
    nbytes: int = 0
    notes: list[tuple[int, Sequence[Any]]] = field(default_factory=list)
    abort_reason: str = ""


class HostedNodes:
    """The nodes of one binding on one worker; their groups run one after another.

    User functions run in `task_context`, the lease task's.
    """

    def __init__(self, context: BindingContext, task_context: contextvars.Context) -> None:
        self.can_move = context.can_move
        self.workspaces: dict[str, Workspace] = {}
        self.keeper: Keeper | None = None
        self.ended = asyncio.Event()  # set once this is closed and its last thread has ended
        self._context = context
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
            failed=lambda error: call_on_loop(self._loop, self._fail, error),
        )
        self._placement: dict[str, str] = {}
        self._programs: dict[str, Program] = {}
        self._operations: dict[str, Operation] = {}  # the latest of each kind
        self._numbers: dict[str, int] = {}  # those of the latest operations, deleted ones too

        self._program: Program
        self._batch = EpochBatch(0, RunOrder())
        self._batch_operation = Operation(0)
        self._run: GroupRun | None = None
        self._run_number = 0
        self._is_running = False  # tasks may be running
        self._run_ended = asyncio.Event()  # set and cleared whenever a run ends
        self._drained = asyncio.Event()  # no function of the run is running
        self._drained.set()
        self._early: dict[int, _Early] = {}  # by number
        self._outbox = Outbox(
            context.name,
            context.call_peer,
            context.ping_peer,
            context.silence_seconds,
            failed=self._could_not_send,
            sent=self._after_sent,
        )
        self._waits_for_sent = False  # until other workers have taken enough of what was made
        self._waiting: asyncio.Task[None] | None = None  # to begin, until a run has drained
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
        forgotten: Sequence[str] = (),
    ) -> Message:
        """Take groups, and nodes with the names of their transient blobs; drop groups."""

        def begin(operation: Operation) -> None:
            for key in forgotten:
                self._programs.pop(key, None)
                for workspace in self.workspaces.values():
                    workspace.forget(key)
            self._placement.update(placement or {})
            for node, transient in (nodes or {}).items():
                stream = (streams or {}).get(node, "")
                self.workspaces[node] = Workspace(node, frozenset(transient), stream)
            self._in_thread(operation, partial(self._load_groups, groups, dict(slices or {})))

        self._start("ship", number, begin)
        return await self._poll("ship", number, wait_seconds)

    async def run(
        self, number: Number, wait_seconds: Seconds, order: RunOrder | None = None
    ) -> Message:
        """Run a shipped group, once or for a batch of epochs."""

        def begin(operation: Operation) -> None:
            program = None if order is None else self._programs.get(order.key)
            if order is None or program is None:
                raise ExecutionError(
                    f"Worker {self._context.address} was asked to run a group that it was not "
                    f"sent. Start the job again."
                )
            leads = order.lead in ("", self._context.address)
            batch = EpochBatch(number, order, program.peers if leads else None)
            if self._drained.is_set():
                self._begin(program, batch, operation)
            else:
                self._stop("the client asked for another run")  # should its abort have been lost
                waiting = self._begin_later(program, batch, operation)
                self._waiting = asyncio.ensure_future(waiting)

        self._start("run", number, begin)
        return await self._poll("run", number, wait_seconds)

    async def apply(
        self, number: Number, wait_seconds: Seconds, fn: bytes = b"", channel: str = "apply"
    ) -> Message:
        """Call the pickled ``fn(self)`` in a thread."""

        def call() -> Message:
            work = self._unpickle(fn, "a function to apply")
            return {"frames": wrap_frames(to_frames(work(self)))}

        self._start(channel, number, lambda operation: self._in_thread(operation, call))
        return await self._poll(channel, number, wait_seconds)

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
        return {"status": "running", "tasks": self._running_tasks() if kind == "run" else []}

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
                f"Worker {self._context.address} could not unpickle {description}: "
                f"{type(error).__name__}: {error}. Install the modules that the tasks need on the "
                f"worker, in the client's versions, or let cloudpickle send your module by value: "
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

    # ---- messages with an immediate reply

    async def push(self, values: RunValues) -> Message:
        """Take values and notes from another worker.

        While too many wait here for later runs, the reply waits for the end of this one. So a worker
        that is ahead waits. The run here cannot wait for that worker in turn: it has already received
        the values that its run needs from it.
        """
        self._take(values)
        early_bytes = sum(early.nbytes for early in self._early.values())
        if self._is_running and early_bytes > self._memory_limit.waiting_bytes:
            try:
                await asyncio.wait_for(self._run_ended.wait(), FULL_SECONDS)
            except TimeoutError:
                return {"status": "done", "is_full": True}
        return {"status": "done"}

    async def abort(self, number: int, reason: str) -> Message:
        """Start nothing more of the batch with a run of that number."""
        if self._batch.covers(number):
            self._abort(reason)
        elif number > self._batch.number:
            early = self._early.setdefault(number, _Early())
            early.abort_reason = early.abort_reason or reason
        return {"status": "done"}

    def close(self, reason: str) -> None:
        """Abort what runs and drop everything. Does not wait for running functions."""
        self._abort(reason)
        self._outbox.close()
        self._run_ended.set()
        self._run = None
        if self._waiting is not None:
            self._waiting.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for operation in self._operations.values():
            operation.finish({"status": "unknown"})
        if self.keeper is not None:
            self.threads.submit(self.keeper.close)
        self.threads.close()
        # Reference cycles would keep the values alive until the garbage collector runs.
        for program in self._programs.values():
            program.arrived.clear()
            program.results.clear()
        for workspace in self.workspaces.values():
            workspace.clear()
        self._programs.clear()
        self.workspaces.clear()

    # ---- a batch

    def _begin(self, program: Program, batch: EpochBatch, operation: Operation) -> None:
        self._program, self._batch, self._batch_operation = program, batch, operation
        self._outbox.start(batch.number)
        # Those before it are over.
        self._early = {n: early for n, early in self._early.items() if n >= batch.number}
        for number, early in self._early.items():
            if batch.covers(number):
                batch.abort_reason = early.abort_reason or batch.abort_reason
        if batch.number in self._early:
            self._hear(self._early[batch.number].notes)
        self._proceed()

    async def _begin_later(self, program: Program, batch: EpochBatch, operation: Operation) -> None:
        # A function that still runs might change the blobs while the new run reads them.
        seconds = self._context.straggler_seconds
        try:
            await asyncio.wait_for(self._drained.wait(), seconds)
        except TimeoutError:
            names = ", ".join(map("/".join, self._running_tasks()))
            reason = (
                f"{names} of an aborted run still runs after {seconds:g} s and may change blobs"
            )
            operation.finish({"status": "aborted", "reason": reason})
        else:
            self._begin(program, batch, operation)

    def _proceed(self) -> None:
        """Decide what comes next, after the end of a run or a note from another worker."""
        batch, peers = self._batch, self._program.peers
        grant = batch.extend()
        if grant is not None and peers:
            self._note(GRANT, peers, f"{grant.runs} {grant.is_final:d}")
        if self._is_running:
            return
        action = batch.action()
        if action == "run" and self._memory_limit.is_over:
            self._finish_failed(self._memory_limit.error())
        elif action == "run":
            limit = self._memory_limit.waiting_bytes
            self._waits_for_sent = bool(peers) and self._outbox.waiting_bytes() > limit
            if not self._waits_for_sent:
                self._start_run()
        elif action == "end":
            self._finish({"status": "done"})
        elif action == "abort":
            self._finish({"status": "aborted", "reason": batch.abort_reason})

    def _after_sent(self) -> None:
        if self._waits_for_sent:
            self._waits_for_sent = False
            self._proceed()

    def _finish(self, reply: Message) -> None:
        reply = {**reply, "runs": list(self._batch.ended)}
        if self.keeper is not None:
            reply["room"] = self.keeper.room()
        self._batch_operation.finish(reply)
        if reply["status"] == "failed" and self._program.peers:
            # The client has this reply only together with those of the others, which run for so long.
            self._note(FAILURE, self._program.peers, f"{self._context.address} has failed")

    def _finish_failed(self, error: BaseException) -> None:
        """End the batch with an error that no task raised."""
        failure = describe_failure("", "", error, is_own=True)
        self._stop(failure.summary)
        self._finish({"status": "failed", "failure": asdict(failure), **self._batch.position})

    def _stop(self, reason: str) -> None:
        """Start nothing more."""
        self._batch.abort_reason = self._batch.abort_reason or reason
        if self._run is not None:
            self._run.abort(reason)

    def _abort(self, reason: str) -> None:
        self._stop(reason)
        if not self._is_running:
            self._finish({"status": "aborted", "reason": reason})

    def _fail(self, error: BaseException) -> None:
        if self._is_running:
            self._finish_failed(error)

    def _check_memory(self) -> None:
        self._memory_limit.look()
        if self._memory_limit.is_over:
            self._fail(self._memory_limit.error())
        self._timer = self._loop.call_later(LOOK_SECONDS, self._check_memory)

    # ---- a run

    def _running_tasks(self) -> list[tuple[str, str]]:
        """The running tasks, as (node, task)."""
        return [] if self._run is None else self._run.running_tasks()

    def _start_run(self) -> None:
        context, program, batch = self._context, self._program, self._batch
        number, (epoch, step) = batch.run_number, batch.epoch_and_step
        shared = (context.job, program.name, context.seed, epoch, step, context.attempt)
        self._run_number = number
        self._drained.clear()
        self._is_running = True
        at, capture = batch.position_to_capture(), None
        if at is not None and self.keeper is not None:
            capture = partial(self.keeper.capture, self.workspaces, at=at)
        run = self._run = GroupRun(
            program=program,
            step=step,
            current_task=partial(CurrentTask, *shared),
            nthreads=context.nthreads,
            submit=self.threads.submit,
            timer=self._loop.call_later,
            send=lambda crossing, value: self._outbox.put(
                number, program.routes[crossing], crossing, to_frames(value)
            ),
            finished=lambda outcome: call_on_loop(self._loop, self._end_run, run, outcome),
            drained=lambda: call_on_loop(self._loop, self._drained.set),
            capture=capture,
        )
        run.start()
        early = self._early.pop(number, None)
        if early is not None and early.values:
            run.deliver(early.values)

    def _end_run(self, run: GroupRun, outcome: Outcome) -> None:
        run.stop_timers()
        if run is not self._run:
            return
        self._is_running = False
        self._run_ended.set()
        self._run_ended.clear()
        batch = self._batch
        if outcome.status == "done":
            self._drained.set()
            metrics = json.dumps(outcome.metrics) if outcome.metrics else ""
            batch.end_run(outcome.stopped, metrics)
            done = batch.report()
            if done is not None:
                self._note(REPORT, [batch.order.lead], f"{done} {self._context.address}")
            self._proceed()
        elif outcome.failure is not None:
            failure = asdict(outcome.failure)
            self._finish({"status": "failed", "failure": failure, **batch.position})
        else:
            self._finish({"status": "aborted", "reason": outcome.reason})

    # ---- other workers

    def _take(self, pushed: RunValues) -> None:
        nbytes = [  # TypeError, before anything is taken, if a frame has none
            sum(frame_bytes(frames) for crossing, frames in values if crossing >= 0)
            for _, values in pushed
        ]
        for (number, values), size in zip(pushed, nbytes, strict=True):
            arrived = {c: received(frames) for c, frames in values if c >= 0}
            notes = [(c, frames) for c, frames in values if c < 0]
            if number == self._run_number and self._run is not None:
                self._run.deliver(arrived)
            elif number >= self._run_number:
                early = self._early.setdefault(number, _Early())
                early.values.update(arrived)
                early.nbytes += size
            if notes and number == self._batch.number:
                self._hear(notes)
                if not self._batch_operation.is_done:
                    self._proceed()
            elif notes and number > self._batch.number:
                self._early.setdefault(number, _Early()).notes.extend(notes)

    def _note(self, kind: int, addresses: Sequence[str], text: str) -> None:
        self._outbox.put(self._batch.number, tuple(addresses), kind, [text.encode()])

    def _hear(self, notes: Sequence[tuple[int, Sequence[Any]]]) -> None:
        for kind, (data,) in notes:
            text = str(data, "utf-8")
            first, _, argument = text.partition(" ")
            if kind == GRANT:
                self._batch.hear_grant(Grant(int(first), argument == "1"))
            elif kind == REPORT:
                self._batch.hear_report(argument, int(first))
            elif kind == FAILURE:
                self._abort(text)

    def _could_not_send(self, address: str, number: int, problem: str) -> None:
        if self._batch.covers(number):
            reason = (
                f"worker {self._context.address} could not send values to worker {address}: "
                f"{problem}"
            )
            self._stop(reason)
            # This reply replaces "done": the client asks once more.
            self._finish({"status": "aborted", "reason": reason, "suspect": address})


def fetch(
    workspaces: Mapping[str, Workspace], node: str, name: str, groups: Sequence[str], part: int
) -> Any:
    """Capture a blob; with `groups`, part of task `name`'s return value in one of these."""
    workspace = workspaces[node]
    return workspace.result(groups, name, part) if groups else workspace.capture(name)


def blob_names(workspaces: Mapping[str, Workspace]) -> dict[str, frozenset[str]]:
    """The names of the global blobs, by node."""
    return {node: frozenset(space.globals) for node, space in workspaces.items()}


def install_keeper(factory: Callable[[], Keeper], hosted: HostedNodes) -> None:
    """Make a keeper, in place of an earlier one."""
    previous, hosted.keeper = hosted.keeper, None
    if previous is not None:
        previous.close()
    hosted.keeper = factory()


def call_keeper(fn: Callable[[Keeper, Mapping[str, Workspace]], Any], hosted: HostedNodes) -> Any:
    """Call a function with the keeper and the workspaces."""
    if hosted.keeper is None:
        raise ExecutionError("This worker keeps no captures: Binding.keep was not called.")
    return fn(hosted.keeper, hosted.workspaces)


def call_on_workspaces(fn: Callable[[dict[str, Workspace]], Any], hosted: HostedNodes) -> Any:
    """Call a function with a copy of the dictionary of workspaces."""
    return fn(dict(hosted.workspaces))


def failed_reply(error: BaseException) -> Message:
    """The reply of an operation that failed outside of tasks."""
    return {"status": "failed", "failure": asdict(describe_failure("", "", error, is_own=True))}
