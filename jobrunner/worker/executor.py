"""One run of a group on one worker, in threads. No Dask.

One thread works through the tasks that are ready, so that a chain of short tasks stays on one thread.
More threads join where that pays: for a task known to be long, or when a timer finds ready tasks and
no progress. No thread waits for another worker: a value that arrives starts a thread again.
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
from jobrunner.worker.program import InputMissing, PreparedTask, Program
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
        self._tasks = program.tasks
        self._remaining = len(program.tasks)
        self._is_open = False  # tasks may start: `_open` has captured the blobs for other nodes
        self._is_over = False  # nothing more starts, and results are dropped
        self._threads = 0  # all that work for this run
        self._pullers = 0  # those that take ready tasks
        self._running: dict[int, PreparedTask] = {}  # by thread
        self._seen = -1  # tasks remaining at the last tick
        self._tick_seconds = FIRST_TICK_SECONDS
        self._handles: dict[int, TimerHandle] = {}  # by a report's position; -1: the tick
        self._report_locks: dict[int, threading.Lock] = {}
        self._reports: Reports | None = None  # what tasks have reported
        self._make_current = self._make_current_task  # bound once, not at every call

    # ---- called on the timer's thread

    def start(self) -> None:
        """Begin, and return at once."""
        program = self.program
        program.step = self.step
        program.arrived.clear()
        program.results.clear()
        for report in program.reports:
            self._report_locks[report.position] = threading.Lock()
        self._threads = self._pullers = 1
        self.submit(self._open)
        if self.nthreads > 1:
            self._handles[-1] = self.timer(self._tick_seconds, self._tick)
        for report in program.reports:
            self._schedule(report)

    def deliver(self, values: Mapping[int, Any]) -> None:
        """Take captured values from other workers, by crossing."""
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
        return [(task.workspace.node, task.name) for task in list(self._running.values())]

    def _tick(self) -> None:
        """Without progress since the last tick, let another thread take ready tasks."""
        helps = False
        with self._lock:
            if self._is_over:
                return
            if self._remaining != self._seen:
                self._seen = self._remaining
                self._tick_seconds = FIRST_TICK_SECONDS
            else:
                for task in list(self._running.values()):
                    task.is_long = True
                if not self._ready:
                    self._tick_seconds = min(self._tick_seconds * 1.5, SLOWEST_TICK_SECONDS)
                elif self._is_open:
                    helps = self._claim_puller()
        if helps:
            self.submit(self._pull)
        self._handles[-1] = self.timer(self._tick_seconds, self._tick)

    def _schedule(self, task: PreparedTask) -> None:
        """Let a report run again after its interval."""
        assert task.report is not None
        interval_seconds = task.report.interval_seconds
        handle = self.timer(interval_seconds, partial(self._report_again, task))
        self._handles[task.position] = handle

    def _report_again(self, task: PreparedTask) -> None:
        """Run a report beside the tasks, unless it still runs from the last time."""
        with self._lock:
            # Once its node's tasks have ended, its last run is ready, as a task of the program.
            if self._is_over or self._counts[task.position] == 0:
                return
            is_free = self._is_open and not self._report_locks[task.position].locked()
            if is_free:
                self._threads += 1
        if is_free:
            self.submit(partial(self._report_beside, task))
        self._schedule(task)

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
        """Run ready tasks until there are none."""
        program, thread, send = self.program, get_ident(), self.send
        task = self._next(None, thread)
        while task is not None:
            started = perf_counter() if task.is_long else 0.0
            try:
                if task.is_plain:
                    arguments = gather(task)
                    # The value lies in a list from the beginning: a variable would count as another
                    # reference to it, and `finish` would copy arrays that nothing else refers to.
                    FRAME.set([self._make_current, task, 0, None])
                    box = [task.fn(*arguments)]
                    slot = task.sole
                    if self._is_over:
                        pass
                    elif slot is not None and type(box[0]) in IMMUTABLE:
                        # What `finish` would do, but faster.
                        slot.versions[slot.key] += 1
                        slot.values[slot.key] = box[0]
                    else:
                        finish(program, task, box, arguments, send)
                    del arguments, box  # they would count as references to their items
                else:
                    self._run_special(task)
            except BaseException as error:
                self._fail(task.workspace.node, task.name, error)
            if started and perf_counter() - started < LONG_TASK_SECONDS:
                task.is_long = False
            task = self._next(task, thread)
        FRAME.set(None)
        self._leave()

    def _run_special(self, task: PreparedTask) -> None:
        """Run what is more than one call, or none."""
        if task.report is not None:
            self._report(task)
        elif is_due(task.every, self.step):
            self._run_instances(task)
        else:
            hand_over(self.program, task.handovers, self.send, must_exist=False)

    def _run_instances(self, task: PreparedTask) -> None:
        """Run all instances of a task at once, the first in this thread, which waits for the others.

        A failure of one ends the run at once, also if others never return.
        """
        count = task.num_instances
        inputs = [gather(task, instance) for instance in range(count)]
        results: list[Any] = [None] * count
        ended = threading.Semaphore(0)

        def call(instance: int) -> None:
            FRAME.set([self._make_current, task, instance, None])
            try:
                with set_up(task.instance_setup) as own:
                    results[instance] = task.fn(*inputs[instance], **shared, **own)
            except BaseException as error:
                self._fail(task.workspace.node, task.name, error)
            FRAME.set(None)
            ended.release()

        FRAME.set([self._make_current, task, -1, None])
        with set_up(task.setup) as shared:
            for instance in range(1, count):
                if not self.submit(partial(call, instance)):
                    ended.release()  # the pool has closed, so nobody takes the results
            call(0)
            for _ in range(count):
                ended.acquire()
            FRAME.set([self._make_current, task, -1, None])
        if self._is_over:
            return
        # What lies in two lists counts as referred to twice, and `finish` would copy it.
        box = results
        if count > 1:
            box = [results.copy()]
            results.clear()
        arguments = list(chain(*inputs))
        inputs.clear()
        finish(self.program, task, box, arguments, self.send)

    def _report(self, task: PreparedTask) -> None:
        with self._report_locks[task.position]:
            FRAME.set([self._make_current, task, 0, None])
            task.fn()

    def _report_beside(self, task: PreparedTask) -> None:
        """Run a report in its own thread."""
        self._running[get_ident()] = task
        try:
            self._report(task)
        except BaseException as error:
            self._fail(task.workspace.node, task.name, error)
        FRAME.set(None)
        del self._running[get_ident()]
        self._leave()

    # ---- the state that threads share

    def _next(self, done: PreparedTask | None, thread: int) -> PreparedTask | None:
        """Mark a task as done and take the next one; None ends this thread's part."""
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
            task = self._running[thread] = self._tasks[heappop(ready)]
            if not (task.is_long and ready and self._claim_puller()):
                return task
        self.submit(self._pull)
        return task

    def _wake(self, positions: Iterable[int]) -> None:
        counts, ready = self._counts, self._ready
        for position in positions:
            counts[position] -= 1
            if not counts[position]:
                heappush(ready, position)

    def _claim_puller(self) -> bool:
        """Count one more thread that takes ready tasks, if one more may run."""
        if self._pullers >= self.nthreads:
            return False
        self._pullers += 1
        self._threads += 1
        return True

    def _leave(self) -> None:
        """End a thread's part in the run. The last thread also ends the run, if no task remains."""
        with self._lock:
            concludes = self._threads == 1 and self._remaining == 0 and not self._is_over
            # A thread that concludes the run counts until then: if an abort came meanwhile, the run
            # would be drained, the next one would begin, and its private blobs would be cleared here.
            if not concludes:
                self._threads -= 1
            is_drained = self._is_over and self._threads == 0
        if concludes:
            self._conclude()
        elif is_drained:
            self.drained()

    def _conclude(self) -> None:
        """End a run whose tasks are all done: read the stop conditions, drop private values."""
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
        if self._is_over:
            logger.info("Task %s/%s failed after the run's end", node, task, exc_info=error)
            return
        if isinstance(error, InputMissing):
            node, error, is_own = error.node, error.reason, True
        failure = describe_failure(node, task, error, is_own=is_own)
        self._end(Outcome("failed", failure=failure))

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

    def _make_current_task(self, task: PreparedTask, instance: int) -> CurrentTask:
        node, blobs = task.workspace.node, WorkspaceView(task.workspace)

        def record(values: Mapping[str, Any]) -> None:
            with self._lock:
                if self._reports is None:
                    self._reports = Reports()
                self._reports.add(values, node, task.name, task.index, instance)

        return self.current_task(node, task.name, instance, blobs, record, lambda: self._is_over)
