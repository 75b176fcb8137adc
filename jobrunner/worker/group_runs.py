"""4 run: one binding's runs on one worker: batches, values from other workers, aborts.

All of it happens on the worker's event loop but tasks, which run in the binding's threads.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from jobrunner.worker.epoch_batch import EpochBatch, Grant
from jobrunner.worker.executor import GroupRun
from jobrunner.worker.outbox import Message, Outbox, RunValues, size_of
from jobrunner.worker.outcome import Outcome, describe_failure
from jobrunner.worker.peers import Peers
from jobrunner.worker.program import Program
from jobrunner.worker.start_gate import StartGate
from jobrunner.worker.task_context import RunInfo
from jobrunner.worker.thread_pool import ThreadPool
from jobrunner.workspace import MemoryLimit, Snapshot, WireSnapshot, to_frames

logger = logging.getLogger(__name__)

GRANT, REPORT = -1, -2
"""In place of a crossing: what a batch's lead and its followers tell each other."""


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


class GroupRuns:
    """GroupRuns of a binding's groups, one after another.

    Parameters
    ----------
    name : str
        The binding's.
    job : str
    seed, attempt : int
    address : str
        This worker's.
    nthreads : int
        This worker's.
    threads : ThreadPool
    call_peer, silence_seconds
        See `Peers`.
    straggler_seconds : float
        How long a run waits for functions that an aborted one left behind.
    memory_limit : MemoryLimit
        No run begins where there is none.
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
        threads: ThreadPool,
        call_peer: Callable[[str, Message], Awaitable[Message]],
        straggler_seconds: float,
        silence_seconds: float,
        memory_limit: MemoryLimit,
    ) -> None:
        self._job, self._seed, self._attempt = job, seed, attempt
        self._address = address
        self._nthreads = nthreads
        self._threads = threads
        self._peers = Peers(name, call_peer, silence_seconds)
        self._straggler_seconds = straggler_seconds
        self._memory_limit = memory_limit
        self._loop = asyncio.get_running_loop()
        self._group: GroupCode
        self._batch = EpochBatch(0)
        self._epoch: int | None = None
        self._step = 0
        self._reply: Callable[[Message], None] = _ignore
        self._amend: Callable[[Message], None] = _ignore  # the same, also once there was a reply
        self._start_gate: StartGate | None = None
        self._run: GroupRun | None = None
        self._run_number = 0
        self._is_running = False
        self._drained = asyncio.Event()
        self._drained.set()
        # What came for runs and batches that have not started here yet, by number.
        self._early: dict[int, dict[int, Snapshot]] = {}
        self._early_aborts: dict[int, str] = {}
        self._early_notes: dict[int, list[tuple[int, list[Any]]]] = {}
        self._early_bytes: dict[int, int] = {}
        self._outbox = Outbox(self._push, self._could_not_push, self._go_on_if_held)
        self._is_held = False  # the next run waits until what was made has been taken
        self._turn = asyncio.Event()  # a run has ended
        self._background: set[asyncio.Task[None]] = set()

    def start(
        self,
        group: GroupCode,
        batch: EpochBatch,
        epoch: int | None,
        step: int,
        reply: Callable[[Message], None],
        start_gate: StartGate | None = None,
    ) -> None:
        """Begin a batch; `reply` is called with what came of it.

        It is called again where values then could not be handed to another worker.

        With a start_gate, tasks run one at a time, and each begins when it is cleared.
        """

        def begin() -> None:
            self._group, self._batch = group, batch
            self._reply = self._amend = reply
            self._start_gate = start_gate
            self._epoch, self._step = epoch, step
            group.program.keeps_running = batch.epochs * batch.steps_per_epoch > 1
            self._outbox.start(batch.number)
            for early in (
                self._early,
                self._early_bytes,
                self._early_aborts,
                self._early_notes,
            ):
                for number in [n for n in early if n < batch.number]:
                    del early[number]  # of runs that are over
            self._hear(self._early_notes.pop(batch.number, []), goes_on=False)
            for number in [n for n in self._early_aborts if batch.covers(n)]:
                batch.abort_reason = self._early_aborts.pop(number)
            self._go_on()

        if self._drained.is_set():
            begin()
        else:
            self._soon(self._begin_later(begin, reply))

    def progress(self) -> tuple[int, list[tuple[str, str]]]:
        """How many steps of the run are left, and which (node, task) are running."""
        return (0, []) if self._run is None else self._run.progress()

    def push(self, pushed: RunValues) -> None:
        """Take what other workers made, and what they say of the batch."""
        for number, values in pushed:
            arrived = {c: WireSnapshot(frames) for c, frames in values if c >= 0}
            if number == self._run_number and self._run is not None:
                self._run.deliver(arrived)
            elif number >= self._run_number:
                self._early.setdefault(number, {}).update(arrived)
                size = sum(size_of(frames) for c, frames in values if c >= 0)
                self._early_bytes[number] = self._early_bytes.get(number, 0) + size
            notes = [(c, frames) for c, frames in values if c < 0]
            if number == self._batch.number:
                self._hear(notes)
            elif notes and number > self._batch.number:
                self._early_notes.setdefault(number, []).extend(notes)

    async def has_room(self, wait_seconds: float) -> bool:
        """Whether more may come for later runs: too much is not there, or a run ends in that time.

        So whoever is ahead waits for this worker. It does not wait for them: what its run needs
        was made before, and has come before.
        """
        if (
            not self._is_running
            or sum(self._early_bytes.values()) <= self._memory_limit.waiting_bytes
        ):
            return True
        try:
            await asyncio.wait_for(self._turn.wait(), wait_seconds)
        except TimeoutError:
            return False
        return True

    def abort(self, number: int, reason: str) -> None:
        """Let nothing of the batch that has a run of that number start any more."""
        if self._batch.covers(number):
            self._abort(reason)
        elif number > self._batch.number:
            self._early_aborts.setdefault(number, reason)

    @property
    def is_running(self) -> bool:
        """Whether tasks may be running."""
        return self._is_running

    def fail(self, error: BaseException) -> None:
        """End the batch with an error that no task raised."""
        failure = describe_failure("", "", error, is_own=True)
        epoch, _ = self._batch.epoch_and_step(self._epoch, self._step)
        self._finish({"status": "failed", "failure": failure.to_message(), "epoch": epoch})
        self._tell_peers(self._batch.run_number, failure.summary)
        self._abort(failure.summary)

    def close(self, reason: str) -> None:
        """Abort what runs and stop sending. Does not wait for running functions."""
        self._abort(reason)
        self._outbox.close()
        self._turn.set()
        for task in self._background:
            task.cancel()
        self._run = None

    # ---- a batch

    async def _begin_later(
        self, begin: Callable[[], None], reply: Callable[[Message], None]
    ) -> None:
        """An aborted run left a function running: wait for it, it may change the blobs."""
        left_behind = self._run
        try:
            await asyncio.wait_for(self._drained.wait(), self._straggler_seconds)
        except TimeoutError:
            tasks = left_behind.progress()[1] if left_behind is not None else []
            names = ", ".join(f"{node}/{task}" for node, task in tasks)
            reply(
                {
                    "status": "aborted",
                    "reason": f"{names} of an aborted run still runs after "
                    f"{self._straggler_seconds:g} s and may change blobs",
                }
            )
        else:
            begin()

    def _go_on(self) -> None:
        """Decide what comes next, when no run is under way or a note has come."""
        batch = self._batch
        grant = batch.extend()
        if grant is not None and self._group.peers:
            self._note(GRANT, self._group.peers, f"{grant.runs} {grant.is_final:d}")
        if self._is_running:
            return
        action = batch.action()
        if action == "run" and self._memory_limit.is_over:
            self.fail(self._memory_limit.error())
        elif action == "run" and self._outbox.waiting_bytes() > self._memory_limit.waiting_bytes:
            self._is_held = True
        elif action == "run":
            self._start_run()
        elif action == "end" and self._start_gate is not None and self._outbox.waiting_bytes():
            self._is_held = True  # the client asks each worker for itself, and none twice
        elif action == "end":
            self._finish({"status": "done"})
        elif action == "abort":
            self._finish({"status": "aborted", "reason": batch.abort_reason})

    def _go_on_if_held(self) -> None:
        if self._is_held:
            self._is_held = False
            self._go_on()

    def _finish(self, reply: Message) -> None:
        self._reply({**reply, "runs": [asdict(ended) for ended in self._batch.ended]})
        self._reply = _ignore
        self._open_start_gate()

    def _abort(self, reason: str) -> None:
        self._batch.abort_reason = self._batch.abort_reason or reason
        if self._run is not None:
            self._run.abort(reason)
            self._open_start_gate()
        if not self._is_running:
            self._finish({"status": "aborted", "reason": reason})

    def _open_start_gate(self) -> None:
        if self._start_gate is not None:
            self._start_gate.end()

    def _note(self, kind: int, addresses: Sequence[str], text: str) -> None:
        self._outbox.put(self._batch.number, tuple(addresses), kind, [text.encode()])

    def _hear(self, notes: Sequence[tuple[int, Sequence[Any]]], *, goes_on: bool = True) -> None:
        for kind, (data,) in notes:
            first, _, rest = bytes(data).decode().partition(" ")
            if kind == GRANT:
                self._batch.hear_grant(Grant(int(first), rest == "1"))
            else:
                self._batch.hear_report(rest, int(first))
        if notes and goes_on and self._reply is not _ignore:
            self._go_on()

    # ---- a run of it

    def _start_run(self) -> None:
        group, number = self._group, self._batch.run_number
        epoch, step = self._batch.epoch_and_step(self._epoch, self._step)
        self._run_number = number
        self._drained.clear()
        self._is_running = True
        run = self._run = GroupRun(
            group.program,
            RunInfo(self._job, group.program.name, self._seed, epoch, step, self._attempt),
            nthreads=self._nthreads if self._start_gate is None else 1,
            submit=self._threads.submit,
            timer=self._loop.call_later,
            send=lambda crossing, value: self._outbox.put(
                number, group.routes[crossing], crossing, to_frames(value)
            ),
            finished=lambda outcome: self._on_loop(self._end_run, run, outcome),
            drained=lambda: self._on_loop(self._drained.set),
            start_gate=None if self._start_gate is None else self._start_gate.wait,
        )
        run.start()
        self._early_bytes.pop(number, None)
        values = self._early.pop(number, None)
        if values:
            run.deliver(values)

    def _end_run(self, run: GroupRun, outcome: Outcome) -> None:
        run.stop_timers()
        if run is not self._run:
            return
        self._is_running = False
        if outcome.status == "done":
            self._drained.set()
        self._turn.set()  # whoever waits goes on, however little memory_limit there is
        self._turn.clear()
        batch = self._batch
        if outcome.status == "done":
            metrics = json.dumps(outcome.metrics) if outcome.metrics else ""
            batch.end_run(outcome.stopped, metrics)
            done = batch.report()
            if done is not None:
                self._note(REPORT, [batch.lead], f"{done} {self._address}")
            self._go_on()
        elif outcome.failure is not None:
            failure = outcome.failure
            epoch, _ = batch.epoch_and_step(self._epoch, self._step)
            self._finish({"status": "failed", "failure": failure.to_message(), "epoch": epoch})
            reason = f"{failure.node}/{failure.task} failed: {failure.summary}"
            self._tell_peers(batch.run_number, reason)
        else:
            self._finish({"status": "aborted", "reason": outcome.reason})

    # ---- to other workers

    async def _push(self, address: str, pushed: RunValues) -> str | None:
        problem = await self._peers.push(address, pushed)
        if problem is None:
            return None
        # Of another batch, they may be another group's.
        values = [its for number, its in pushed if self._batch.covers(number)]
        crossings = [c for its in values for c, _ in its]
        return f"{problem}{self._group.program.tell_of_crossings(crossings)}"

    def _could_not_push(self, address: str, number: int, problem: str) -> None:
        if self._batch.covers(number):
            reason = f"worker {self._address} could not hand values to worker {address}: {problem}"
            self._reply = self._amend  # "done", perhaps: then the client asks once more
            self._finish({"status": "aborted", "reason": reason, "suspect": address})
            self._abort(reason)
            self._tell_peers(number, reason, but=address)

    def _tell_peers(self, number: int, reason: str, but: str = "") -> None:
        for address in self._group.peers:
            if address != but:
                self._soon(self._peers.abort(address, number, reason))

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _on_loop(self, callback: Callable[..., object], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop has closed, and nobody waits any more
            logger.debug("The worker closed before %r", callback, exc_info=True)


def _ignore(reply: Message) -> None:
    """Where a reply goes that nobody waits for."""
