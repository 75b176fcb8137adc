"""4 run: one run of a group on one worker, in threads. No Dask.

One thread works through whatever is ready, so that a chain of short tasks never changes threads.
Others join where that pays: for a task known to be long, or when a timer finds ready tasks and no
progress. No thread waits for another worker: what a value's arrival makes ready, a thread takes up
then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush, heapreplace
from time import perf_counter
from typing import Any, Protocol

from jobrunner.errors import BlobNotFoundError
from jobrunner.worker.call import InputMissing, finish, gather, hand_over
from jobrunner.worker.outcome import MetricEntry, Outcome, describe_failure, is_true
from jobrunner.worker.program import Program, Step
from jobrunner.worker.task_context import FRAME, CurrentTask, Metric, RunInfo
from jobrunner.workspace import IMMUTABLE, view

logger = logging.getLogger(__name__)

# A tick that sees no progress since the last one calls the running tasks long.
FIRST_TICK_SECONDS = 0.002
SLOWEST_TICK_SECONDS = 0.02
LONG_TASK_SECONDS = 0.001


class Timer(Protocol):
    """Calls back once after a delay, on the thread that uses it; `loop.call_later` is one."""

    def __call__(self, delay: float, callback: Callable[[], None]) -> Cancellable:
        """Call `callback()` in `delay` seconds."""
        ...


class Cancellable(Protocol):
    """A timer's handle."""

    def cancel(self) -> object:
        """Do not call back."""
        ...


@dataclass(slots=True)
class _Gang:
    """The instances of one task that are under way."""

    arguments: list[list[Any]]
    results: list[Any]
    left: int


class GroupRun:
    """Runs a program once.

    Parameters
    ----------
    program : Program
        No other run of it may have a thread left.
    info : RunInfo
    nthreads : int
        How many threads may run tasks at once; those of `num_instances` and of reports come on
        top.
    submit : callable
        Takes a call and runs it in a thread, at once.
    timer : Timer
    send : callable
        Takes a crossing's id and its frozen value, for the targets on other workers. Called in
        the thread that made the value.
    finished : callable
        Takes the `Outcome`, once, as soon as it is known: threads may be left in functions that
        can't be stopped. Called in any thread.
    drained : callable
        Takes nothing; called once where the run was over before its end, when no thread is left
        in it. One that is done has none.
    start_gate : callable, optional
        Called in a thread that is about to run a task, it returns when the task may begin.

    Notes
    -----
    `start`, `deliver` and `abort` are called on one thread, that of `timer`'s callbacks.
    """

    def __init__(
        self,
        program: Program,
        info: RunInfo,
        *,
        nthreads: int,
        submit: Callable[[Callable[[], None]], None],
        timer: Timer,
        send: Callable[[int, Any], None],
        finished: Callable[[Outcome], None],
        drained: Callable[[], None],
        start_gate: Callable[[], None] | None = None,
    ) -> None:
        self._start_gate = start_gate
        self._program = program
        self._info = info
        self._nthreads = nthreads
        self._submit = submit
        self._timer = timer
        self._send = send
        self._finished = finished
        self._drained = drained

        self._lock = threading.Lock()
        self._counts = program.needs.copy()
        # A heap: in order of definition as far as possible. Of the steps that wait for nothing it
        # holds the next one only, for it to stay small.
        self._first = iter(program.first)
        self._next_first = next(self._first, -1)
        self._ready = [self._next_first] if program.first else []
        self._steps = program.steps
        self._remaining = len(program.steps)
        self._is_over = False  # nothing further starts, nothing more is kept
        self._threads = 0  # inside this run, whatever they do
        self._workers = 0  # those of them that take up ready steps
        self._slots: list[list[Step | None]] = []  # what each thread runs, for whoever asks
        self._seen = -1  # steps remaining at the last tick
        self._tick_seconds = FIRST_TICK_SECONDS
        self._handles: dict[int, Cancellable] = {}  # -1: the tick; else a report's step
        self._report_locks = {
            step.position: threading.Lock() for step in program.steps if step.report is not None
        }
        self._metrics: dict[tuple[str, str], MetricEntry] = {}
        self._make_current = self._make_task  # bound once, not at every call

    # ---- called on the timer's thread

    def start(self) -> None:
        """Begin; returns at once."""
        self._program.forget_values()
        self._threads = self._workers = 1
        self._submit(self._open)
        if self._nthreads > 1:
            self._handles[-1] = self._timer(self._tick_seconds, self._tick)
        for position in self._report_locks:
            self._schedule_report(position)

    def deliver(self, values: Mapping[int, Any]) -> None:
        """Take what other workers sent: crossing -> frozen value."""
        with self._lock:
            if self._is_over:
                return
            for crossing, value in values.items():
                if crossing not in self._program.arrived:
                    self._program.arrived[crossing] = value
                    self._wake(self._program.waiters.get(crossing, ()))
            if not self._ready or self._workers:
                return
            self._claim_worker()
        self._submit(self._work)

    def abort(self, reason: str) -> None:
        """Let nothing further start, and forget what running functions return."""
        self._end(Outcome("aborted", reason=reason))
        self.stop_timers()

    def stop_timers(self) -> None:
        """Let go of the timer; to be called once the run has finished."""
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()

    def progress(self) -> tuple[int, list[tuple[str, str]]]:
        """How many steps are left, and which (node, task) are running."""
        running = [step for slot in self._slots if (step := slot[0]) is not None]
        return self._remaining, [(step.workspace.node, step.name) for step in running]

    def _tick(self) -> None:
        helps = False
        with self._lock:
            if self._is_over:
                return
            if self._seen != self._remaining:
                self._seen = self._remaining
                self._tick_seconds = FIRST_TICK_SECONDS
            else:
                for slot in self._slots:
                    if (step := slot[0]) is not None:
                        step.is_long = True
                if self._ready:
                    helps = self._claim_helper()
                else:
                    self._tick_seconds = min(self._tick_seconds * 1.5, SLOWEST_TICK_SECONDS)
        if helps:
            self._submit(self._work)
        self._handles[-1] = self._timer(self._tick_seconds, self._tick)

    def _schedule_report(self, position: int) -> None:
        report = self._program.steps[position].report
        assert report is not None

        def fire() -> None:
            with self._lock:
                # Its last run is ready once its node's tasks have ended.
                if self._is_over or self._counts[position] == 0:
                    return
                is_free = not self._report_locks[position].locked()
                if is_free:
                    self._threads += 1
            if is_free:
                self._submit(lambda: self._report(position))
            self._schedule_report(position)

        self._handles[position] = self._timer(report.interval_ms / 1000, fire)

    # ---- called in threads

    def _open(self) -> None:
        program = self._program
        try:
            for node, workspace in program.workspaces.items():
                workspace.start_run(program.key, has_updates=program.has_updates[node])
            for handover in program.openings:
                crossing = handover.crossing
                if crossing.blob is not None and crossing.blob not in handover.blobs:
                    missing = program.workspaces[crossing.source].not_found(str(crossing.blob))
                    self._fail(crossing.source, "", missing, is_own=True)
                else:
                    hand_over(self._program, handover, self._send)
        except BaseException as error:
            self._fail("", "", error)
        self._work()

    def _work(self) -> None:
        """Run ready steps until none is."""
        program = self._program
        slot: list[Step | None] = [None]
        with self._lock:
            self._slots.append(slot)
        step = self._next(None, slot)
        while step is not None:
            is_done = True
            started = perf_counter() if step.is_long else 0.0
            try:
                if step.num_instances > 1:
                    is_done = self._run_instances(step)
                elif step.report is not None:
                    with self._report_locks[step.position]:
                        self._call(step, [], 0)
                else:
                    arguments = gather(step)
                    box = [self._call(step, arguments, 0)]
                    if self._is_over:
                        pass
                    elif step.sole is not None and type(box[0]) in IMMUTABLE:
                        # What `finish` comes to then, for half a call less.
                        step.sole[0][step.sole[1]] = box[0]
                    else:
                        finish(program, step, box, arguments, self._send)
                    del arguments, box  # or what they hold would seem to be kept by somebody
            except BaseException as error:
                self._fail_step(step, error)
            if started and perf_counter() - started < LONG_TASK_SECONDS:
                step.is_long = False
            step = self._next(step if is_done else None, slot)
        FRAME.set(None)
        self._leave()

    def _call(self, step: Step, arguments: list[Any], instance: int) -> Any:
        FRAME.set([self._make_current, step, instance, None])
        if self._start_gate is not None:
            self._start_gate()
            if self._is_over:
                return None
        if not step.kwargs:
            return step.fn(*arguments)
        if step.is_plain:
            return step.fn(*arguments, **step.kwargs)
        return step.fn(*arguments, **step.keywords())

    def _run_instances(self, step: Step) -> bool:
        """Run a task's instances at once; whether this thread's was the last to end."""
        count = step.num_instances
        gang = _Gang([gather(step, i) for i in range(count)], [None] * count, count)
        with self._lock:
            self._threads += count - 1
        for instance in range(1, count):
            self._submit(partial(self._join_gang, step, gang, instance))
        return self._run_instance(step, gang, 0)

    def _join_gang(self, step: Step, gang: _Gang, instance: int) -> None:
        slot: list[Step | None] = [step]
        with self._lock:
            self._slots.append(slot)
        is_last = False
        try:
            is_last = self._run_instance(step, gang, instance)
        except BaseException as error:
            self._fail_step(step, error)
        FRAME.set(None)
        with self._lock:
            self._slots = [its for its in self._slots if its is not slot]  # equal ones are others'
            if is_last:
                self._complete(step)
            stays = bool(self._ready) and not self._workers and not self._is_over
            self._workers += stays
        if stays:
            self._work()
        else:
            self._leave()

    def _run_instance(self, step: Step, gang: _Gang, instance: int) -> bool:
        gang.results[instance] = self._call(step, gang.arguments[instance], instance)
        with self._lock:
            gang.left -= 1
            if gang.left:
                return False
        arguments = [value for some in gang.arguments for value in some]
        box, gang.results, gang.arguments = [gang.results], [], []
        if not self._is_over:
            finish(self._program, step, box, arguments, self._send)
        return True

    def _report(self, position: int) -> None:
        step = self._program.steps[position]
        slot: list[Step | None] = [step]
        with self._lock:
            self._slots.append(slot)
        try:
            with self._report_locks[position]:
                self._call(step, [], 0)
        except BaseException as error:
            self._fail_step(step, error)
        FRAME.set(None)
        with self._lock:
            self._slots = [its for its in self._slots if its is not slot]
        self._leave()

    # ---- the state that threads share

    def _next(self, done: Step | None, slot: list[Step | None]) -> Step | None:
        """Mark a step as done and take the next one; None ends this thread's work."""
        with self._lock:
            if done is not None:
                self._complete(done)
            ready = self._ready
            if self._is_over or not ready:
                # Equal ones are others'.
                self._slots = [its for its in self._slots if its is not slot]
                self._workers -= 1
                return None
            position = ready[0]
            if position == self._next_first and (following := next(self._first, -1)) >= 0:
                self._next_first = following
                heapreplace(ready, following)
            else:
                heappop(ready)
            slot[0] = step = self._steps[position]
            if not (step.is_long and ready and self._claim_helper()):
                return step
        self._submit(self._work)
        return step

    def _complete(self, step: Step) -> None:
        self._remaining -= 1
        if step.successors:
            self._wake(step.successors)

    def _wake(self, positions: Iterable[int]) -> None:
        counts, ready = self._counts, self._ready
        for position in positions:
            counts[position] -= 1
            if not counts[position]:
                heappush(ready, position)

    def _claim_helper(self) -> bool:
        if self._workers >= self._nthreads:
            return False
        self._claim_worker()
        return True

    def _claim_worker(self) -> None:
        self._threads += 1
        self._workers += 1

    def _leave(self) -> None:
        """Let this thread go; the last one ends the run if nothing remains."""
        with self._lock:
            ends = self._threads == 1 and self._remaining == 0 and not self._is_over
            self._threads -= not ends
            is_drained = self._is_over and self._threads == 0
        if ends:
            self._conclude()
        elif is_drained:
            self._drained()

    def _conclude(self) -> None:
        """All has run: read the stop conditions, release what is private."""
        program = self._program
        outcome = Outcome("done")
        for condition in program.conditions:
            try:
                if condition.blob is not None:
                    value = program.workspaces[condition.node].lookup(condition.blob)
                else:
                    value = view(program.results[condition.task, condition.part])
                if is_true(condition.name, value):
                    outcome.stopped.append(condition.name)
            except BaseException as error:
                is_own = isinstance(error, BlobNotFoundError)
                self._fail(condition.node, condition.name, error, is_own=is_own)
                break
        for workspace in program.workspaces.values():
            workspace.private.clear()
        program.forget_values()
        outcome.metrics = list(self._metrics.values())
        with self._lock:
            was_over, self._is_over = self._is_over, True
        if was_over:
            self._drained()
        else:
            self._finished(outcome)

    def _fail_step(self, step: Step, error: BaseException) -> None:
        if isinstance(error, InputMissing):
            self._fail(step.workspace.node, step.name, error.reason, is_own=True)
        else:
            self._fail(step.workspace.node, step.name, error)

    def _fail(self, node: str, task: str, error: BaseException, *, is_own: bool = False) -> None:
        if not self._is_over:
            failure = describe_failure(node, task, error, is_own=is_own)
            self._end(Outcome("failed", failure=failure))
        else:
            logger.info("Task %s/%s failed after the run's end", node, task, exc_info=error)

    def _end(self, outcome: Outcome) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            is_drained = self._threads == 0
        self._finished(outcome)
        if is_drained:
            self._drained()

    # ---- what functions see

    def _make_task(self, step: Step, instance: int) -> CurrentTask:
        def record(metrics: Mapping[str, Metric]) -> None:
            node = step.workspace.node
            with self._lock:
                for name, value in metrics.items():
                    found = self._metrics.get((name, node))
                    if found is None or (found.order, found.instance) <= (step.index, instance):
                        self._metrics[name, node] = MetricEntry(
                            name, node, step.index, instance, value
                        )

        return CurrentTask(self._info, step.workspace, step.name, instance, record)
