"""One binding's nodes on one worker: their workspaces, programs and operations.

Everything here runs on the worker's event loop; user functions, pickling and unpickling run in the
binding's threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import pickle
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from jobrunner.errors import ExecutionError
from jobrunner.worker.epoch_batch import EpochBatch, Note, Progress, read_note
from jobrunner.worker.executor import GroupRun
from jobrunner.worker.keeper import Keeper
from jobrunner.worker.memory import LOOK_SECONDS, MemoryLimit
from jobrunner.worker.messages import (
    AbortMessage,
    ApplyMessage,
    Message,
    PushMessage,
    RunMessage,
    RunOrder,
    RunValues,
)
from jobrunner.worker.outbox import Outbox, frame_bytes, wrap_frames
from jobrunner.worker.outcome import Failure, Outcome, describe_failure
from jobrunner.worker.program import Program
from jobrunner.worker.task_context import CurrentTask
from jobrunner.worker.threads import ThreadPool, call_on_loop
from jobrunner.workspace import BEFORE_COPY, Pickled, Workspace, received, to_frames

FULL_SECONDS = 0.5
"""How long the reply to another worker's values is delayed while there is no room for more."""

FETCH = "fetch"
"""The channel on which the client applies `fetch`."""

NOTE = -1
"""In place of a crossing: what is sent is no value, but a `Note` to another worker of the batch."""


@dataclass(frozen=True, kw_only=True)
class BindingOptions:
    """What a client says of a binding."""

    job: str
    seed: int
    attempt: int
    can_move: bool  # it binds the nodes elsewhere before this worker closes
    silence_seconds: float  # how long a worker may be silent: see `Outbox`


@dataclass(frozen=True, kw_only=True)
class BindingContext:
    """What all parts of one binding on one worker share."""

    name: str  # the binding's, unique on the cluster
    options: BindingOptions
    address: str  # this worker's
    nthreads: int  # this worker's
    call_peer: Callable[[str, str, Message], Awaitable[Any]]  # address, operation, message
    memory_limit: MemoryLimit  # ends a run if memory is short
    straggler_seconds: float = 30.0  # how long a run waits for functions of an aborted one


class Work:
    """What the client asked for under a number, and the reply once it is done."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reply: Message | None = None
        self.is_done = asyncio.Event()

    def finish(self, reply: Message) -> None:
        """Set the reply: the first counts, but for a "done" that turns out to be too early.

        A worker is done when its tasks have ended, although others may still wait for values of its
        last task. If these cannot be sent, only this worker knows of whom they could not be taken.
        """
        if self.reply is None or (self.reply["status"] == "done" and "suspect" in reply):
            self.reply = reply
            self.is_done.set()


@dataclass(slots=True)
class _Early:
    """What arrived for a run, or for the batch that begins with it, before it started here."""

    values: dict[int, Pickled] = field(default_factory=dict)
    nbytes: int = 0
    notes: list[Note] = field(default_factory=list)
    abort_reason: str = ""


class HostedNodes:
    """The nodes of one binding on one worker; their groups run one after another.

    User functions run in `task_context`, the lease task's.
    """

    def __init__(self, context: BindingContext, task_context: contextvars.Context) -> None:
        self.options = context.options
        self.workspaces: dict[str, Workspace] = {}
        self.programs: dict[str, Program] = {}  # groups, by key
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
            failed=lambda error: call_on_loop(self._loop, self._fail, own_failure(error)),
        )
        self._works: dict[str, Work] = {}  # the latest on each channel

        self._program: Program
        self._batch = EpochBatch(0, RunOrder())
        self._batch_work = Work(0)
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
            self.options.silence_seconds,
            failed=self._could_not_send,
            sent=self._after_sent,
        )
        self._waits_for_sent = False  # until other workers have taken enough of what was made
        self._waiting: asyncio.Task[None] | None = None  # to begin, until a run has drained
        self._timer: asyncio.TimerHandle | None = None
        if self._memory_limit.is_limited:
            self._check_memory()

    # ---- messages

    async def run(self, request: RunMessage) -> Message:
        """Run a group, once or for a batch of epochs."""
        work = self._begin("run", request.number)
        if work is not None:
            self._begin_run(request, work)
        return await self._reply("run", request)

    def _begin_run(self, request: RunMessage, work: Work) -> None:
        fetched = self._works.get(FETCH)
        if fetched is not None and fetched.reply is not None:
            fetched.reply = {"status": "stale"}  # it may refer to arrays that tasks update
        order = request.order or RunOrder()
        program = self.programs.get(order.key)
        if program is None:
            problem = (
                f"Worker {self._context.address} was asked to run a group that it was not sent. "
                f"Start the job again."
            )
            work.finish(failed_reply(ExecutionError(problem)))
            return
        followers = None
        if order.lead in ("", self._context.address):
            followers = program.peers
        batch = EpochBatch(request.number, order, followers)
        if self._drained.is_set():
            self._start_batch(program, batch, work)
        else:
            self._abort("the client asked for another run")  # should its abort have been lost
            waiting = self._start_drained(program, batch, work)
            self._waiting = asyncio.ensure_future(waiting)

    async def apply(self, request: ApplyMessage) -> Message:
        """Call a function with this in a thread."""
        work = self._begin(request.channel, request.number)
        if work is not None:
            self.threads.submit(partial(self._apply, request.fn, work))
        return await self._reply(request.channel, request)

    async def push(self, request: PushMessage) -> Message:
        """Take values and notes from another worker.

        While too many wait here for later runs, the reply waits for the end of this one. So a worker
        that is ahead waits. The run here cannot wait for that worker in turn: it has already received
        the values that its run needs from it.
        """
        self._take(request.values)
        early_bytes = sum(early.nbytes for early in self._early.values())
        if self._is_running and early_bytes > self._memory_limit.waiting_bytes:
            try:
                await asyncio.wait_for(self._run_ended.wait(), FULL_SECONDS)
            except TimeoutError:
                return {"status": "done", "is_full": True}
        return {"status": "done"}

    async def abort(self, request: AbortMessage) -> Message:
        """Start nothing more of the batch with a run of that number."""
        if self._batch.covers(request.number):
            self._abort(request.reason)
        elif request.number > self._batch.number:
            early = self._early.setdefault(request.number, _Early())
            early.abort_reason = early.abort_reason or request.reason
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
        for work in self._works.values():
            work.finish({"status": "unknown"})
        if self.keeper is not None:
            self.threads.submit(self.keeper.close)
        self.threads.close()
        # Reference cycles would keep the values alive until the garbage collector runs.
        for program in self.programs.values():
            program.arrived.clear()
            program.results.clear()
        for workspace in self.workspaces.values():
            workspace.clear()
        self.programs.clear()
        self.workspaces.clear()

    def _begin(self, channel: str, number: int) -> Work | None:
        """The work of that number; None if it has begun already."""
        before = self._works.get(channel)
        if before is not None and number <= before.number:
            return None
        work = self._works[channel] = Work(number)
        return work

    async def _reply(self, channel: str, request: RunMessage | ApplyMessage) -> Message:
        work = self._works[channel]
        if work.number != request.number:
            return {"status": "stale"}
        if work.reply is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(request.wait_seconds):
                    await work.is_done.wait()
        # It is kept: a client that lost the message asks again.
        if work.reply is not None:
            return work.reply
        reply: Message = {"status": "running"}
        if channel == "run":
            reply["tasks"] = self._running_tasks()
        return reply

    def _apply(self, fn: bytes, work: Work) -> None:
        try:
            value = self.unpickle(fn, "a function to apply")(self)
            reply = {"status": "done", "frames": wrap_frames(to_frames(value))}
        except BaseException as error:
            reply = failed_reply(error)
        call_on_loop(self._loop, work.finish, reply)

    def unpickle(self, data: bytes, description: str) -> Any:
        """Unpickle what the client has sent."""
        try:
            return pickle.loads(data)
        except Exception as error:
            raise ExecutionError(
                f"Worker {self._context.address} could not unpickle {description}: "
                f"{type(error).__name__}: {error}. Install the modules that the tasks need on the "
                f"worker, in the client's versions, or let cloudpickle send your module by value: "
                f"cloudpickle.register_pickle_by_value(module)."
            ) from error

    # ---- a batch

    def _start_batch(self, program: Program, batch: EpochBatch, work: Work) -> None:
        self._program, self._batch, self._batch_work = program, batch, work
        self._outbox.start(batch.number)
        for number in sorted(self._early):
            if number < batch.number:  # it is over
                del self._early[number]
            elif batch.covers(number):
                batch.abort_reason = self._early[number].abort_reason or batch.abort_reason
        if batch.number in self._early:
            for note in self._early[batch.number].notes:
                batch.hear(note)
        self._proceed()

    async def _start_drained(self, program: Program, batch: EpochBatch, work: Work) -> None:
        # A run is aborted while a function of it updates a blob, and nothing can stop that function.
        # If the next run began now, it would read the blob in the middle of the change.
        seconds = self._context.straggler_seconds
        try:
            await asyncio.wait_for(self._drained.wait(), seconds)
        except TimeoutError:
            names = ", ".join(map("/".join, self._running_tasks()))
            reason = (
                f"{names} of an aborted run still runs after {seconds:g} s and may change blobs"
            )
            work.finish({"status": "aborted", "reason": reason})
        else:
            self._start_batch(program, batch, work)

    def _proceed(self) -> None:
        """Decide what comes next, after the end of a run or a note from another worker."""
        batch, peers = self._batch, self._program.peers
        grant = batch.extend()
        if grant is not None and peers:
            self._tell(peers, grant)
        if self._is_running:
            return
        action = batch.action()
        if action == "run" and self._memory_limit.is_over:
            self._fail(own_failure(self._memory_limit.error()))
        elif action == "run":
            limit = self._memory_limit.waiting_bytes
            self._waits_for_sent = bool(peers) and self._outbox.waiting_bytes() > limit
            if not self._waits_for_sent:
                self._start_run()
        elif action == "end":
            self._answer({"status": "done"})
        elif action == "abort":
            self._answer({"status": "aborted", "reason": batch.abort_reason})

    def _after_sent(self) -> None:
        if self._waits_for_sent:
            self._waits_for_sent = False
            self._proceed()

    # ---- the end of a batch
    #
    # Usually `_proceed` answers when the last run that was granted has ended. Else it goes like this:
    #
    # 1. Memory runs short while a function computes that nothing can stop.
    # 2. `_fail` answers with the error, and the client tells the other workers to abort.
    # 3. `_abort` ends the run. Its outcome comes to `_end_run` a moment later, and then `_proceed`
    #    answers "aborted". That must not hide the error: the first answer counts (`Work.finish`).
    # 4. The client may ask for another run at once, which waits for the function (`_start_drained`).
    #
    # So whoever knows the cause, here and in `_could_not_send`, answers before it aborts.

    def _answer(self, reply: Message) -> None:
        """Reply to the client, which also gets the runs of the batch that have ended."""
        reply = {**reply, "runs": list(self._batch.ended)}
        if self.keeper is not None:
            reply["capture_bytes"] = self.keeper.capture_bytes()
        self._batch_work.finish(reply)

    def _abort(self, reason: str) -> None:
        """Start nothing more of the batch, and drop the results of functions that run."""
        self._batch.abort_reason = self._batch.abort_reason or reason
        if self._run is not None:
            self._run.abort(reason)
        if not self._is_running:  # else `_end_run` follows
            self._answer({"status": "aborted", "reason": reason})

    def _fail(self, failure: Failure) -> None:
        """End the batch at once: functions may run that never return."""
        epoch, step = self._batch.position
        self._answer({"status": "failed", "failure": asdict(failure), "epoch": epoch, "step": step})
        self._abort(failure.summary)

    def _check_memory(self) -> None:
        self._memory_limit.look()
        if self._memory_limit.is_over and self._is_running:
            self._fail(own_failure(self._memory_limit.error()))
        self._timer = self._loop.call_later(LOOK_SECONDS, self._check_memory)

    # ---- a run

    def _running_tasks(self) -> list[tuple[str, str]]:
        """The running tasks, as (node, task)."""
        if self._run is None:
            return []
        return self._run.running_tasks()

    def _start_run(self) -> None:
        options, program, batch = self.options, self._program, self._batch
        number = self._run_number = batch.number + len(batch.ended)
        epoch, step = batch.position
        shared = (options.job, program.name, options.seed, epoch, step, options.attempt)
        self._drained.clear()
        self._is_running = True
        capture = None
        at = batch.position_to_capture()
        if self.keeper is not None and at is not None:
            capture = partial(self.keeper.capture, self.workspaces, at=at)
        run = self._run = GroupRun(
            program=program,
            step=step,
            current_task=partial(CurrentTask, *shared),
            nthreads=self._context.nthreads,
            submit=self.threads.submit,
            timer=self._loop.call_later,
            send=lambda crossing, value: self._outbox.put(
                number, program.routes[crossing], crossing, to_frames(value)
            ),
            finished=partial(call_on_loop, self._loop, self._end_run),
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
        if outcome.failure is not None:
            self._fail(outcome.failure)
            return
        if outcome.status == "done":
            self._drained.set()
            metrics = ""
            if outcome.metrics:
                metrics = json.dumps(outcome.metrics)
            done = self._batch.end_run(outcome.stopped, metrics)
            if done is not None:
                self._tell([self._batch.order.lead], Progress(self._context.address, done))
        self._proceed()

    # ---- other workers

    def _take(self, pushed: RunValues) -> None:
        """Take values for runs, and notes for batches, which have the numbers of their first runs.

        What comes for one that has not begun here is kept until then.
        """
        for number, items in pushed:
            values: dict[int, Pickled] = {}
            notes: list[Note] = []
            nbytes = 0
            for crossing, frames in items:
                if crossing == NOTE:
                    notes.append(read_note(frames[0]))
                else:
                    values[crossing] = received(frames)  # TypeError for what is no frame
                    nbytes += frame_bytes(frames)
            if number == self._run_number and self._run is not None:
                self._run.deliver(values)
            elif number >= self._run_number:
                early = self._early.setdefault(number, _Early())
                early.values.update(values)
                early.nbytes += nbytes
            if notes:
                self._hear(number, notes)

    def _tell(self, peers: Sequence[str], note: Note) -> None:
        """Send a note to other workers of the batch."""
        data = msgspec.msgpack.encode(note)
        self._outbox.put(self._batch.number, tuple(peers), NOTE, [data])

    def _hear(self, number: int, notes: Sequence[Note]) -> None:
        if number > self._batch.number:
            self._early.setdefault(number, _Early()).notes.extend(notes)
        elif number == self._batch.number:
            for note in notes:
                self._batch.hear(note)
            if self._batch_work.reply is None:
                self._proceed()

    def _could_not_send(self, address: str, number: int, problem: str) -> None:
        if self._batch.covers(number):
            reason = (
                f"worker {self._context.address} could not send values to worker {address}: "
                f"{problem}"
            )
            # This reply replaces "done": the client asks once more.
            self._answer({"status": "aborted", "reason": reason, "suspect": address})
            self._abort(reason)


def own_failure(error: BaseException) -> Failure:
    """Describe an error that no task has raised."""
    return describe_failure("", "", error, is_own=True)


def failed_reply(error: BaseException) -> Message:
    """The reply of an operation that failed outside of tasks."""
    return {"status": "failed", "failure": asdict(own_failure(error))}
