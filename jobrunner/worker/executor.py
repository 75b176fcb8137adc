"""One run of a group on one worker, in threads. No Dask.

One thread works through whatever is ready, so that a chain of short tasks stays on one thread. More
threads join where that pays: for a task known to be long, or when a timer finds ready tasks and no
progress. No thread waits for another worker: a value that arrives starts a thread again.
"""

from __future__ import annotations

import threading
from asyncio import TimerHandle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import chain
from threading import get_ident
from time import perf_counter
from typing import Any

from jobrunner.compile import is_due
from jobrunner.texts import get_logger
from jobrunner.worker.call import Send, finish, gather, hand_over, set_up
from jobrunner.worker.outcome import Outcome, describe_failure, is_true
from jobrunner.worker.program import InputMissing, Program, Step
from jobrunner.worker.task_context import FRAME, CurrentTask, Reports
from jobrunner.workspace import IMMUTABLE, WorkspaceView

logger = get_logger(__name__)

# A tick that sees no progress since the last one marks the running tasks as long.
FIRST_TICK_SECONDS, SLOWEST_TICK_SECONDS = 0.002, 0.02
LONG_TASK_SECONDS = 0.001


@dataclass(kw_only=True, eq=False)
class GroupRun:
    """Runs a program once. No thread of an earlier run of the program may be left.

    `finished` is called once, in any thread, as soon as the outcome is known; functions that cannot
    be stopped may still run. If the outcome is not "done", `drained` is called once they have
    returned.
    """

    program: Program
    current_task: Callable[..., CurrentTask]  # gets only what differs between tasks of the run
    nthreads: int  # besides those of instances and of reports
    submit: Callable[[Callable[[], None]], bool]  # runs a call in a thread at once, or says no
    timer: Callable[[float, Callable[[], None]], TimerHandle]  # like `loop.call_later`
    send: Send
    finished: Callable[[GroupRun, Outcome], None]
    drained: Callable[[], None]
    step: int = 0  # of the epoch
    capture: Callable[[], object] | None = None  # called in a thread after the last task

    def __post_init__(self) -> None:
        program = self.program
        self._lock = threading.Lock()
        self._counts = program.needs.copy()
        # A heap of positions, so that tasks run in order of definition as far as possible.
        self._ready = program.first.copy()
        self._steps = program.steps
        self._remaining = len(program.steps)
        self._is_open = False  # steps may start: `_open` has frozen the blobs for other nodes
        self._is_over = False  # nothing more starts, and results are dropped
        self._threads = 0  # all that work for this run
        self._pullers = 0  # those that take ready steps
        self._running: dict[int, Step] = {}  # by thread
        self._seen = -1  # steps remaining at the last tick
        self._tick_seconds = FIRST_TICK_SECONDS
        self._handles: dict[int, TimerHandle] = {}  # -1: the tick; else a report's step
        self._report_locks: dict[int, threading.Lock] = {}
        for position in program.reports:
            self._report_locks[position] = threading.Lock()
        self._reports: Reports | None = None  # what tasks have reported
        self._make_current = self._make_task  # bound once, not at every call

    # ---- called on the timer's thread

    def start(self) -> None:
        """Begin, and return at once."""
        program = self.program
        program.number = self.step
        program.arrived.clear()
        program.results.clear()
        self._threads = self._pullers = 1
        self.submit(self._open)
        if self.nthreads > 1:
            self._handles[-1] = self.timer(self._tick_seconds, self._tick)
        for position in self._report_locks:
            self._schedule_report(position)

    def deliver(self, values: Mapping[int, Any]) -> None:
        """Take frozen values from other workers, by crossing."""
        with self._lock:
            if self._is_over:
                return
            for crossing, value in values.items():
                if crossing not in self.program.arrived:
                    self.program.arrived[crossing] = value
                    self._wake(self.program.waiters.get(crossing, ()))
            if not self._ready or self._pullers or not self._claim_puller():
                return
        self.submit(self._pull)

    def abort(self, reason: str) -> None:
        """Start nothing more, and drop the results of running functions."""
        self._end(Outcome("aborted", reason=reason))
        self.stop_timers()

    def stop_timers(self) -> None:
        """Cancel timers, once the run has finished."""
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()

    def running_tasks(self) -> list[tuple[str, str]]:
        """The running tasks, as (node, task)."""
        return [(step.workspace.node, step.name) for step in list(self._running.values())]

    def _tick(self) -> None:
        with self._lock:
            if self._is_over:
                return
            is_stuck, self._seen = self._seen == self._remaining, self._remaining
            for step in list(self._running.values()) if is_stuck else ():
                step.is_long = True
            helps = is_stuck and self._is_open and bool(self._ready) and self._claim_puller()
            if not is_stuck:
                self._tick_seconds = FIRST_TICK_SECONDS
            elif not self._ready:
                self._tick_seconds = min(self._tick_seconds * 1.5, SLOWEST_TICK_SECONDS)
        if helps:
            self.submit(self._pull)
        self._handles[-1] = self.timer(self._tick_seconds, self._tick)

    def _schedule_report(self, position: int) -> None:
        step = self._steps[position]
        assert step.report is not None

        def fire() -> None:
            with self._lock:
                # Once its node's tasks have ended, its last run is ready.
                if self._is_over or self._counts[position] == 0:
                    return
                is_free = self._is_open and not self._report_locks[position].locked()
                self._threads += is_free
            if is_free:
                self.submit(partial(self._report_beside, step))
            self._schedule_report(position)

        self._handles[position] = self.timer(step.report.interval_ms / 1000, fire)

    # ---- called in threads

    def _open(self) -> None:
        program = self.program
        try:
            for workspace in program.workspaces.values():
                workspace.start_run(program.key)
            hand_over(program, program.openings, self.send, must_exist=True)
        except BaseException as error:
            self._fail("", "", error)
        self._is_open = True
        self._pull()

    def _pull(self) -> None:
        """Run ready steps until there are none."""
        program, thread, send = self.program, get_ident(), self.send
        step = self._next(None, thread)
        while step is not None:
            is_done = True
            started = perf_counter() if step.is_long else 0.0
            try:
                if step.is_plain:
                    arguments = gather(step)
                    # The value lies in a list from the beginning: a variable would count as another
                    # reference to it, and `finish` would copy arrays that nothing else refers to.
                    FRAME.set([self._make_current, step, 0, None])
                    box = [step.fn(*arguments)]
                    place = step.sole
                    if self._is_over:
                        pass
                    elif place is not None and type(box[0]) in IMMUTABLE:
                        # What `finish` would do, but faster.
                        place.versions[place.key] += 1
                        place.values[place.key] = box[0]
                    else:
                        finish(program, step, box, arguments, send)
                    del arguments, box  # they would count as references to their items
                elif step.report is not None:
                    self._report(step)
                elif not is_due(step.every, self.step):
                    hand_over(program, step.handovers, send, must_exist=False)
                else:
                    is_done = self._run_instances(step)
            except BaseException as error:
                self._fail(step.workspace.node, step.name, error)
            if started and perf_counter() - started < LONG_TASK_SECONDS:
                step.is_long = False
            step = self._next(step if is_done else None, thread)
        FRAME.set(None)
        self._end_thread()

    def _run_instances(self, step: Step) -> bool:
        """Run all instances of a task at once, the first in this thread, which waits for the others.

        Returns whether none has failed. A failure ends the run at once, also if others never return.
        """
        count = step.num_instances
        arguments = [gather(step, instance) for instance in range(count)]
        results: list[Any] = [None] * count
        ended = threading.Semaphore(0)

        def call(instance: int) -> None:
            FRAME.set([self._make_current, step, instance, None])
            try:
                with set_up(step.instance_setup) as own:
                    results[instance] = step.fn(*arguments[instance], **shared, **own)
            except BaseException as error:
                self._fail(step.workspace.node, step.name, error)
            FRAME.set(None)
            ended.release()

        FRAME.set([self._make_current, step, -1, None])
        with set_up(step.setup) as shared:
            for instance in range(1, count):
                if not self.submit(partial(call, instance)):
                    ended.release()  # the pool has closed, so nobody takes the results
            call(0)
            for _ in range(count):
                ended.acquire()
            FRAME.set([self._make_current, step, -1, None])
        if not self._is_over:
            inputs, box = list(chain(*arguments)), [results.copy() if count > 1 else results[0]]
            arguments.clear()  # they would count as references to their items
            results.clear()
            finish(self.program, step, box, inputs, self.send)
        return not self._is_over

    def _report(self, step: Step) -> None:
        assert step.report is not None
        with self._report_locks[step.position]:
            FRAME.set([self._make_current, step, 0, None])
            step.fn()

    def _report_beside(self, step: Step) -> None:
        """Run a report in its own thread."""
        self._running[get_ident()] = step
        try:
            self._report(step)
        except BaseException as error:
            self._fail(step.workspace.node, step.name, error)
        FRAME.set(None)
        del self._running[get_ident()]
        self._end_thread()

    # ---- the state that threads share

    def _next(self, done: Step | None, thread: int) -> Step | None:
        """Mark a step as done and take the next one; None ends this thread's part."""
        with self._lock:
            if done is not None:
                self._remaining -= 1
                if done.successors:
                    self._wake(done.successors)
            ready = self._ready
            if self._is_over or not ready:
                self._running.pop(thread, None)
                self._pullers -= 1
                return None
            self._running[thread] = step = self._steps[heappop(ready)]
            if not (step.is_long and ready and self._claim_puller()):
                return step
        self.submit(self._pull)
        return step

    def _wake(self, positions: Iterable[int]) -> None:
        counts, ready = self._counts, self._ready
        for position in positions:
            counts[position] -= 1
            if not counts[position]:
                heappush(ready, position)

    def _claim_puller(self) -> bool:
        """Count one more thread that takes ready steps, if one more may run."""
        is_free = self._pullers < self.nthreads
        self._threads += is_free
        self._pullers += is_free
        return is_free

    def _end_thread(self) -> None:
        """Leave the run; its last thread ends it if no step remains."""
        with self._lock:
            ends = self._threads == 1 and self._remaining == 0 and not self._is_over
            self._threads -= not ends
            is_drained = self._is_over and self._threads == 0
        if ends:
            self._conclude()
        elif is_drained:
            self.drained()

    def _conclude(self) -> None:
        """End a run whose steps are all done: read the stop conditions, drop private values."""
        program = self.program
        outcome = Outcome("done")
        for condition in program.conditions:
            try:
                if is_true(condition.name, program.read(condition)):
                    outcome.stopped.append(condition.name)
            except BaseException as error:
                self._fail(condition.node, condition.name, error)
                break
        for workspace in program.workspaces.values():
            workspace.private.clear()
            for rows in workspace.histories.values():
                rows.end_run()
        program.arrived.clear()
        program.results.clear()
        if self.capture is not None and not self._is_over:
            try:
                self.capture()
            except BaseException as error:
                self._fail("", "", error, is_own=True)
        if self._reports is not None:
            outcome.metrics = self._reports.entries()
        if not self._end(outcome):
            self.drained()

    def _fail(self, node: str, task: str, error: BaseException, *, is_own: bool = False) -> None:
        if isinstance(error, InputMissing):
            node, error, is_own = error.node, error.reason, True
        if not self._is_over:
            failure = describe_failure(node, task, error, is_own=is_own)
            self._end(Outcome("failed", failure=failure))
        else:
            logger.info("Task %s/%s failed after the run's end", node, task, exc_info=error)

    def _end(self, outcome: Outcome) -> bool:
        """End the run; returns False if it was over before."""
        with self._lock:
            if self._is_over:
                return False
            self._is_over = True
            is_drained = self._threads == 0
        self.finished(self, outcome)
        if is_drained:
            self.drained()
        return True

    def _make_task(self, step: Step, instance: int) -> CurrentTask:
        node, blobs = step.workspace.node, WorkspaceView(step.workspace)

        def record(values: Mapping[str, Any]) -> None:
            with self._lock:
                if self._reports is None:
                    self._reports = Reports()
                self._reports.add(values, node, step.name, step.index, instance)

        return self.current_task(node, step.name, instance, blobs, record, lambda: self._is_over)
