"""One binding's runs on one worker: epoch batches, values from other workers, aborts.

Everything here runs on the worker's event loop; tasks run in the binding's threads.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from jobrunner.worker.epoch_batch import EpochBatch, Grant
from jobrunner.worker.executor import GroupRun
from jobrunner.worker.keeper import Premises
from jobrunner.worker.memory import MemoryLimit
from jobrunner.worker.outbox import Message, Outbox, RunValues, frame_bytes
from jobrunner.worker.outcome import Failure, Outcome, describe_failure
from jobrunner.worker.program import Program
from jobrunner.worker.task_context import CurrentTask
from jobrunner.worker.threads import Operation, ThreadPool, call_on_loop
from jobrunner.workspace import Pickled, received, to_frames

GRANT, REPORT = -1, -2
"""Notes between a batch's lead and its followers travel under these in place of a crossing."""


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
    memory_limit: MemoryLimit  # ends a run if memory is short
    silence_seconds: float = math.inf  # how long another worker may be silent: see `Outbox`
    straggler_seconds: float = 30.0  # how long a run waits for functions of an aborted one
    can_move: bool = False  # the client binds the nodes elsewhere before this worker closes


@dataclass(slots=True)
class _Early:
    """What arrived for a run, or for the batch that begins with it, before it started here."""

    values: dict[int, Pickled] = field(default_factory=dict)
    nbytes: int = 0
    notes: list[tuple[int, Sequence[Any]]] = field(default_factory=list)
    abort_reason: str = ""


class GroupRuns:
    """Runs a binding's groups, one after another; none begins while memory is over its limit."""

    def __init__(
        self,
        context: BindingContext,
        premises: Premises,
        threads: ThreadPool,
        memory_limit: MemoryLimit,
    ) -> None:
        self._context = context
        self._premises = premises
        self._threads = threads
        self._memory_limit = memory_limit
        self._loop = asyncio.get_running_loop()
        self._program: Program
        self._batch = EpochBatch(0)
        self._operation = Operation(0)  # the batch's
        self._run: GroupRun | None = None
        self._run_number = 0
        self.is_running = False  # tasks may be running
        self._drained = asyncio.Event()
        self._drained.set()
        self._early: dict[int, _Early] = {}  # by number
        self._outbox = Outbox(
            context.name,
            context.call_peer,
            context.silence_seconds,
            failed=self._could_not_send,
            sent=self._after_sent,
        )
        self._waits_for_sent = False  # until other workers have taken enough of what was made
        self._run_ended = asyncio.Event()  # set and cleared whenever a run ends
        self._background: set[asyncio.Task[None]] = set()

    def start(self, program: Program, batch: EpochBatch, operation: Operation) -> None:
        """Begin a batch, once no function of an aborted run still runs."""
        if self._drained.is_set():
            self._begin(program, batch, operation)
        else:
            self._stop("the client asked for another run")  # should its abort have been lost
            self._in_background(self._begin_later(program, batch, operation))

    def running_tasks(self) -> list[tuple[str, str]]:
        """The running tasks, as (node, task)."""
        return [] if self._run is None else self._run.running_tasks()

    def push(self, pushed: RunValues) -> None:
        """Take values and notes from another worker."""
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
                if not self._operation.is_done:
                    self._proceed()
            elif notes and number > self._batch.number:
                self._early.setdefault(number, _Early()).notes.extend(notes)

    async def has_room(self, wait_seconds: float) -> bool:
        """Whether more values for later runs may come; waits that long for the run to end.

        This makes a worker that is ahead wait. The run here cannot wait for that worker in turn: it
        has already received the values that its run needs from it.
        """
        early_bytes = sum(early.nbytes for early in self._early.values())
        if not self.is_running or early_bytes <= self._memory_limit.waiting_bytes:
            return True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._run_ended.wait(), wait_seconds)
            return True
        return False

    def abort(self, number: int, reason: str) -> None:
        """Start nothing more of the batch with a run of that number."""
        if self._batch.covers(number):
            self._abort(reason)
        elif number > self._batch.number:
            early = self._early.setdefault(number, _Early())
            early.abort_reason = early.abort_reason or reason

    def fail(self, error: BaseException) -> None:
        """End the batch with an error that no task raised."""
        failure = describe_failure("", "", error, is_own=True)
        self._stop(failure.summary)
        self._finish_failed(failure)

    def close(self, reason: str) -> None:
        """Abort the run and stop sending. Does not wait for running functions."""
        self._abort(reason)
        self._outbox.close()
        self._run_ended.set()
        for task in self._background:
            task.cancel()
        self._run = None

    # ---- a batch

    def _begin(self, program: Program, batch: EpochBatch, operation: Operation) -> None:
        self._program, self._batch, self._operation = program, batch, operation
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
            names = ", ".join(map("/".join, self.running_tasks()))
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
        if self.is_running:
            return
        action = batch.action()
        if action == "run" and self._memory_limit.is_over:
            self.fail(self._memory_limit.error())
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
        if self._premises.keeper is not None:
            reply["room"] = self._premises.keeper.room()
        self._operation.finish(reply)

    def _finish_failed(self, failure: Failure) -> None:
        epoch, step = self._batch.epoch_and_step
        position = {"epoch": epoch, "step": step}
        self._finish({"status": "failed", "failure": asdict(failure), **position})
        where = f"{failure.node}/{failure.task} failed: " if failure.node else ""
        self._abort_peers(self._batch.run_number, where + failure.summary)

    def _stop(self, reason: str) -> None:
        """Start nothing more."""
        self._batch.abort_reason = self._batch.abort_reason or reason
        if self._run is not None:
            self._run.abort(reason)

    def _abort(self, reason: str) -> None:
        self._stop(reason)
        if not self.is_running:
            self._finish({"status": "aborted", "reason": reason})

    def _note(self, kind: int, addresses: Sequence[str], text: str) -> None:
        self._outbox.put(self._batch.number, tuple(addresses), kind, [text.encode()])

    def _hear(self, notes: Sequence[tuple[int, Sequence[Any]]]) -> None:
        for kind, (data,) in notes:
            first, _, argument = str(data, "utf-8").partition(" ")
            if kind == GRANT:
                self._batch.hear_grant(Grant(int(first), argument == "1"))
            elif kind == REPORT:
                self._batch.hear_report(argument, int(first))

    # ---- a run

    def _start_run(self) -> None:
        context, program, number = self._context, self._program, self._batch.run_number
        epoch, step = self._batch.epoch_and_step
        shared = (context.job, program.name, context.seed, epoch, step, context.attempt)
        self._run_number = number
        self._drained.clear()
        self.is_running = True
        run = self._run = GroupRun(
            program=program,
            step=step,
            current_task=partial(CurrentTask, *shared),
            nthreads=context.nthreads,
            submit=self._threads.submit,
            timer=self._loop.call_later,
            send=lambda crossing, value: self._outbox.put(
                number, program.routes[crossing], crossing, to_frames(value)
            ),
            finished=lambda outcome: call_on_loop(self._loop, self._end_run, run, outcome),
            drained=lambda: call_on_loop(self._loop, self._drained.set),
            capture=self._capture(),
        )
        run.start()
        early = self._early.pop(number, None)
        if early is not None and early.values:
            run.deliver(early.values)

    def _capture(self) -> Callable[[], None] | None:
        """What captures the workspaces after the run, if its epoch is to be captured."""
        at, premises = self._batch.position_to_capture(), self._premises
        if at is None or premises.keeper is None:
            return None
        return partial(premises.keeper.capture, at, premises.workspaces)

    def _end_run(self, run: GroupRun, outcome: Outcome) -> None:
        run.stop_timers()
        if run is not self._run:
            return
        self.is_running = False
        self._run_ended.set()
        self._run_ended.clear()
        batch = self._batch
        if outcome.status == "done":
            self._drained.set()
            metrics = json.dumps(outcome.metrics) if outcome.metrics else ""
            batch.end_run(outcome.stopped, metrics)
            done = batch.report()
            if done is not None:
                self._note(REPORT, [batch.lead], f"{done} {self._context.address}")
            self._proceed()
        elif outcome.failure is not None:
            self._finish_failed(outcome.failure)
        else:
            self._finish({"status": "aborted", "reason": outcome.reason})

    # ---- to other workers

    def _could_not_send(self, address: str, sent: RunValues, problem: str) -> None:
        number = max(number for number, _ in sent)
        if self._batch.covers(number):
            crossings = [
                crossing
                for run_number, values in sent
                if self._batch.covers(run_number)  # an earlier batch may be another group's
                for crossing, _ in values
            ]
            reason = (
                f"worker {self._context.address} could not send values to worker {address}: "
                f"{problem}{self._program.name_crossings(crossings)}"
            )
            self._stop(reason)
            # This reply replaces "done": the client asks once more.
            self._finish({"status": "aborted", "reason": reason, "suspect": address})
            self._abort_peers(number, reason, but=address)

    def _abort_peers(self, number: int, reason: str, but: str = "") -> None:
        for address in self._program.peers:
            if address != but:
                self._in_background(self._outbox.abort(address, number, reason))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
