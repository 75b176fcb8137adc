"""One run of a job: init or resume, then epochs, then upload, download and exit."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec import structs

from jobrunner.checkpoint import Details
from jobrunner.cluster import Binding, GroupResult, Session
from jobrunner.config import get_number
from jobrunner.define import Job
from jobrunner.errors import (
    CheckpointCorruptError,
    CheckpointError,
    NodeLostError,
    PlacementError,
    RunStoppedError,
    SchedulerLostError,
    TaskFailedError,
)
from jobrunner.positions import Position
from jobrunner.run.callbacks import Callbacks
from jobrunner.run.decisions import (
    Decision,
    Losses,
    Progress,
    Stopwatch,
    each_step,
    is_move_worthwhile,
    next_decision,
)
from jobrunner.run.load import finish_load, load
from jobrunner.run.null_saver import NullSaver
from jobrunner.run.result import RunResult, SaveReport
from jobrunner.run.resume import (
    Begin,
    Resume,
    decide,
    recorded_stops,
    with_streams,
)
from jobrunner.run.saver import Saver
from jobrunner.signals import TerminatedError
from jobrunner.texts import clip, get_logger, printable

if TYPE_CHECKING:
    from jobrunner.run.runner import JobRunner

logger = get_logger(__name__)

Loss = NodeLostError | SchedulerLostError | TaskFailedError
MAX_BATCH_EPOCHS = 10_000
"""Bounds the results that workers keep for the client."""


def tell_finished(runner: JobRunner, resume: Resume) -> RunResult:
    """The result of a run of a job that has finished: nothing is placed, and nothing is loaded."""
    begin = resume.begin
    assert begin is not None
    state = Progress(Losses(runner.max_restarts))
    state.epoch, state.resumed_from = begin.record.at.epoch, begin.record.epoch
    state.fired = recorded_stops(resume.plan, begin.record)
    result = state.result(resume.plan.epoch_limit)
    callbacks = Callbacks(runner.callbacks)
    callbacks.notify("on_setup", runner)
    planned = replace(resume.in_words(), steps=(), rebuilds=())  # which are those of a load
    callbacks.notify("on_start", planned, resume.plan.epoch_limit)
    for warning in planned.warnings:
        callbacks.warn(warning)
    callbacks.notify("on_finish", result)
    return result


class Run:
    """One run of a job; any thread may ask its runner to stop it or to save."""

    def __init__(
        self,
        runner: JobRunner,
        session: Session,
        began: float,  # by the monotonic clock
        resume: Resume,
        views: Sequence[object] = (),
    ) -> None:
        self.runner = runner
        self.session = session
        self.resume = resume  # where it begins; after a loss, where it goes on
        self.has_begun = False  # at `resume.begin`, or with the init group
        self.streams = resume.streams
        self.plan = with_streams(resume.plan, resume.streams)
        self.callbacks = Callbacks([*views, *runner.callbacks])
        self.state = Progress(Losses(runner.max_restarts))
        self.watch = Stopwatch(began)
        self.lineage: Mapping[str, Any] = {}  # what each record says of `adaptation`
        self.batch_seconds = get_number("batch-seconds")
        self.binding: Binding
        self._must_move = False  # workers have joined, and a move there is worthwhile
        self._handed_over: Position | None = None  # what the saver was given last
        self.saver: Saver | NullSaver = NullSaver()
        manager = runner.checkpoint_manager
        if manager is None:
            # Rows of histories would wait in memory for a save.
            self.plan = structs.replace(self.plan, histories={})
        else:
            self.saver = Saver(
                manager,
                self.plan,
                on_save_error=runner.on_save_error,
                warn=self.callbacks.warn,
                saved=self._saved,
                save_now=runner.save_asked,
                status=self.state.status,
                began=round(time.time() - (time.monotonic() - began), 3),
            )

    def run(self) -> RunResult:
        """See `JobRunner.run`."""
        outcome, at_once = "failed", False
        try:
            self.callbacks.notify("on_setup", self.runner)
            self._bind_first()
            try:
                self._run_to_end()
                outcome = "finished"
            except RunStoppedError:
                outcome = "stopped"
                raise
            except KeyboardInterrupt as interrupt:
                outcome, at_once = "stopped", True
                self.binding.abort()
                self._explain_interrupt(interrupt)
                raise
            finally:
                self.saver.end(
                    lambda: self.watch.end(outcome, self.state.recorded), at_once=at_once
                )
            result = self.state.result(self.plan.epoch_limit)
            self.callbacks.notify("on_finish", result)
        except BaseException as error:
            self.callbacks.notify("on_error", error)
            raise
        return result

    def _explain_interrupt(self, interrupt: KeyboardInterrupt) -> None:
        """Raise `RunStoppedError` if a request to stop came before."""
        shown = f"{type(interrupt).__name__}: Job {self.plan.job!r} was interrupted at once."
        lines = [shown, self._advice()]
        # IPython shows what is recorded instead of a traceback.
        interrupt._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
        if isinstance(interrupt, TerminatedError) and self.runner.stop_reason:
            raise self._stopped(None, "it had no more time for the epoch") from interrupt

    def _run_to_end(self) -> None:
        """Init or resume, then epochs, then upload, download and exit; again after a loss."""
        loss: Loss | None = None
        while True:
            try:
                if loss is not None:
                    beginning = f"Beginning again from {self._describe_beginning()}."
                    self.callbacks.warn(f"{loss.without_advice()} {beginning}")
                    self._bind_again(stays=True)
                self._init_or_resume()
                if loss is not None:
                    loss, state = None, self.state
                    seconds = self.watch.seconds_lost
                    self.callbacks.notify("on_recovery", state.epoch, state.steps_done, seconds)
                self._run_epochs()
                self.watch.enter("idle")
                if self.resume.left != "nothing":
                    self._finish()
                return
            except (NodeLostError, SchedulerLostError, TaskFailedError) as error:
                if isinstance(error, TaskFailedError) and not _is_transient(self.runner.job, error):
                    raise
                loss = error
                self._count_loss(error)

    def _count_loss(self, error: Loss) -> None:
        """Count a loss and wait for a lost scheduler; raise if the run cannot continue."""
        state, runner = self.state, self.runner
        self.watch.lose(clip(printable(error.without_advice(), kept=""), 500))
        self.callbacks.notify("on_loss", error)
        self.saver.wait_quietly(gives_up=not isinstance(error, TaskFailedError))
        state.lose(error.running if isinstance(error, NodeLostError) else ())
        if state.losses.are_too_many:
            last = copy.copy(error)
            last.args = (f"{error.without_advice()} {state.losses.describe()}",)
            raise last.advise(self._advice()) from error
        if runner.stop_reason:
            raise self._stopped(None, "a loss ended its epoch") from error
        if isinstance(error, SchedulerLostError) or not self.session.is_connected:
            seconds = runner.scheduler_wait_seconds
            self.callbacks.warn(
                f"The scheduler is lost. Waiting up to {seconds:g} s for it to return at its address."
            )
            try:
                self.session.reconnect(seconds)
            except SchedulerLostError as lost:
                raise SchedulerLostError(str(lost)).advise(self._advice()) from error

    # ---- init or resume

    def _init_or_resume(self) -> None:
        """Set `state.epoch` to the last epoch that is complete in the workspaces."""
        state = self.state
        self.saver.start(self.binding)
        self.resume = self._decide_in_lock()
        if not (self.has_begun or state.losses.in_all):
            planned = self.resume.in_words()
            self.callbacks.notify("on_start", planned, self.plan.epoch_limit)
            for warning in planned.warnings:
                self.callbacks.warn(warning)
        self._handed_over = None
        started = time.monotonic()
        begin = self._load_newest()
        if begin is None:
            self._start_afresh()
        else:
            self._go_on_from(begin, started)
        if not self.has_begun:
            self.has_begun = True
            state.resumed_from = None if begin is None else begin.record.epoch
        if self.resume.left != "nothing":
            state.fire(self.callbacks.ended_by())

    def _decide(self, damaged: Mapping[Position, str] | None = None) -> Resume:
        """Decide anew where to begin, or where the same command would.

        `damaged` are epochs that could not be loaded: then by the log as it was decided before.
        """
        options = self.runner.resume_options()
        if self.has_begun:
            # What was asked is for the start only; after a loss, resume from this run's own epochs.
            options = replace(options, resume_from="latest")
        if damaged:
            return decide(options, self.plan, self.resume.snapshot, damaged)
        return decide(options, self.plan, options.snapshot())

    def _decide_in_lock(self) -> Resume:
        """Decide again unless the log is still as it was, but for the entry of this run."""
        manager, decided = self.runner.checkpoint_manager, self.resume
        if manager is None:
            return decided
        lock, before = manager.run.lock, decided.snapshot
        if self.has_begun or lock is None or before is None:
            return self._decide()
        have_others_appended = before.number != lock.number - 1
        if have_others_appended:
            return self._decide()
        return replace(decided, in_use="")

    def _load_newest(self) -> Begin | None:
        """Load what was decided; if it is damaged, decide without it, until an epoch is whole."""
        reported = set[Position]()
        while True:
            resume, origin = self.resume, self.resume.origin
            if not self.binding.arrivals.has(resume.first_group):
                # The nodes were bound for a load, which needs none of the collections of init tasks. But
                # the epoch is damaged, and no other is whole, so the init group runs after all. Bind
                # anew: collections are computed before the leases, which may hold the resources that
                # they ask for.
                self._bind(stays=True)
                self.saver.start(self.binding)
            if origin is None:
                return None
            for at, damage in resume.damaged.items():
                if at not in reported:
                    reported.add(at)
                    self.callbacks.warn(
                        f"Epoch {at} of {origin.path} is damaged; trying an earlier one: {damage}"
                    )
            if resume.begin is None:
                if resume.damaged:
                    self.callbacks.warn(
                        f"No recorded epoch of {origin.path} is whole; starting afresh."
                    )
                return None
            begin, record = resume.begin, resume.begin.record
            try:
                load(self.session, self.binding, origin, begin)
            except CheckpointCorruptError as error:
                if resume.is_named:
                    raise
                self.resume = self._decide({**resume.damaged, record.at: error.without_advice()})
                continue
            changed = begin.match.describe()
            if changed:
                where = f"Epoch {record.at} of {origin.path}"
                self.callbacks.warn(f"{where} has other nodes or blobs than the job: {changed}")
            return begin

    def _start_afresh(self) -> None:
        state = self.state
        self.watch.go_back(None)
        self.lineage = self.runner.adaptation.lineage(Details(), self.streams)
        self._run_group("init", 0)
        if self.resume.is_own:
            self.saver.set_aside(self.resume.damaged)
        self.saver.rewind(None, "started afresh")
        state.fired, state.reported, state.recorded = (), {}, None
        state.epoch = state.steps_done = 0
        self.callbacks.load_states({})
        # What cannot be saved is named before epoch 1.
        self._save(Position(0), must_wait=True)

    def _go_on_from(self, begin: Begin, started: float) -> None:
        """Go on from an epoch that was loaded; `started` is when its load began."""
        state, record, at = self.state, begin.record, begin.record.at
        is_own = self.resume.is_own
        self.watch.go_back(at)
        finish_load(self.binding, begin, self._run_group)
        state.reported = dict(record.details.metrics)
        state.fired = recorded_stops(self.plan, record)
        state.epoch, state.steps_done = at.epoch, at.step
        state.recorded = at if is_own else None
        self.callbacks.load_states(record.details.callbacks)
        self.lineage = self.runner.adaptation.lineage(record.details, self.streams)
        if is_own:
            self.saver.set_aside(self.resume.damaged)
            self.saver.rewind(at, f"resumed from epoch {at}")
        self.callbacks.notify("on_load", at.epoch, at.step, time.monotonic() - started)
        is_reshaped = begin.match.is_reshaped and self.resume.left != "nothing"
        if not is_own or is_reshaped:
            # From another directory: then it can resume from its own alone. Else it is recorded in
            # the shape that the job gave it; a crash before the commit leaves the record as it was.
            self._save(at, must_wait=True)

    # ---- where the same command would resume

    def _describe_beginning(self) -> str:
        try:
            at = self._decide().at
        except CheckpointError as error:  # the error that needs this text matters more
            return f"the last recorded epoch, which cannot be read now: {str(error).rstrip('.')}"
        return "the start" if at is None else f"epoch {at}"

    def _advice(self) -> str:
        """How to resume, as the end of a message."""
        return f"Run the same command again to resume from {self._describe_beginning()}."

    def _stopped(self, epoch: int | None, cause: str) -> RunStoppedError:
        """The error that ends a run on request."""
        reason = self.runner.stop_reason
        text = f"Job {self.plan.job!r} stopped on request ({reason}): {cause}."
        return RunStoppedError(text, reason=reason, epoch=epoch).advise(self._advice())

    # ---- epochs

    def _run_epochs(self) -> None:
        """Run epochs until the job ends; raises `RunStoppedError` if the run is to stop before."""
        while True:
            decision = self._next_decision(is_recorded=True)
            if decision != "run an epoch":
                # The state must be recorded before the nodes leave their workspaces.
                self._record_epoch()
                decision = self._next_decision(is_recorded=self.state.is_recorded)
            if decision == "finish":
                return
            if decision == "stop":
                raise self._stopped(self.state.epoch, "its epoch has ended")
            with self.watch.spending("save_wait"):
                self.saver.make_room(self.state.epoch + 1)
            count = self._batch_size()
            if decision == "move":
                self._move()
            elif count:
                self._run_batch(count)
            else:
                self._run_epoch()

    def _next_decision(self, *, is_recorded: bool) -> Decision:
        return next_decision(
            stopped_by=self.state.stopped_by(self.plan.epoch_limit),
            stop_asked=self.runner.stop_reason,
            is_recorded=is_recorded,
            is_leaving=bool(self.binding.leaving),
            has_room=self._has_room(),
        )

    def _batch_size(self) -> int:
        """How many epochs the workers may run without the client; 0: it asks for each step."""
        state, plan = self.state, self.plan
        if state.steps_done or not plan.can_batch or self.callbacks.hear_steps:
            return 0
        count = self._most_epochs(state.epoch + 1)
        if count == 1 and plan.steps_per_epoch > 1:
            # A message for each step costs little then, and a save or a stop may come between two.
            return 0
        return count

    def _most_epochs(self, first: int) -> int:
        """How many epochs, from `first` on, may run until the client has something to do."""
        state = self.state
        if (
            self.binding.leaving
            or self.runner.epoch_deadline_seconds is not None
            or 4 * state.epoch_seconds > self.batch_seconds
            or (state.is_wary(first) and self.saver.can_save)
            or not self.callbacks.are_passive
        ):
            return 1
        count = int(min(MAX_BATCH_EPOCHS, state.epochs_left(self.plan.epoch_limit)))
        until_save = self.saver.epochs_until(first)
        if until_save is not None:
            count = min(count, until_save)
        return max(1, count)

    def _run_batch(self, count: int) -> None:
        state = self.state
        first = state.epoch + 1
        rhythm = None
        if not state.is_wary(first):
            rhythm = self.saver.capture_rhythm()
        captured: list[tuple[Position, Mapping[str, Any]]] = []
        state.under_way_until = first + count
        self.watch.enter("compute")
        self.callbacks.notify("on_epoch_start", first)
        try:
            for epoch, result in self.binding.run_epochs(
                first, count, self.batch_seconds, rhythm, self.runner.epoch_deadline_seconds
            ):
                if epoch > first:
                    self.callbacks.notify("on_epoch_start", epoch)
                self._end_epoch(epoch, result)
                if rhythm is not None and rhythm.covers(epoch):
                    captured.append((state.at, self._details(state.at)))
        finally:
            # Also if an epoch has failed: those before it have ended.
            if captured:
                self._handed_over, _ = captured[-1]
                self.callbacks.notify("on_save_start", self._handed_over.epoch, 0)
                self.saver.save_captured(captured)
        state.under_way_until = 0
        self.watch.enter("idle")
        if self._handed_over != state.at:
            self._save_if_due()

    def _run_epoch(self) -> None:
        started, state = time.monotonic(), self.state
        epoch, first_step = state.epoch + 1, state.steps_done
        state.under_way_until, state.steps_done = epoch + 1, 0
        self.watch.enter("compute")
        self.callbacks.notify("on_epoch_start", epoch)
        for done, result, has_ended in each_step(self.plan, epoch, first_step, self._run_step):
            if done == 1:
                state.reported = {}
            state.reported.update(result.metrics)
            if not has_ended:
                self._end_step(epoch, done)
        state.under_way_until = 0
        self.watch.enter("idle")
        seconds = time.monotonic() - started
        self._end_epoch(epoch, replace(result, seconds=seconds, metrics=state.reported))
        self._save_if_due()

    def _run_step(self, group: str, epoch: int, step: int) -> GroupResult:
        """Run a step, or the epoch end group."""
        deadline_seconds = self.runner.epoch_deadline_seconds
        if group == "epoch_end":
            return self._run_group(group, epoch, step, deadline_seconds)
        self.callbacks.notify("on_step_start", epoch, step + 1)
        result = self.binding.run(group, epoch=epoch, step=step, deadline_seconds=deadline_seconds)
        self.callbacks.notify("on_step", epoch, step + 1, result.seconds, result.metrics)
        return result

    def _end_step(self, epoch: int, done: int) -> None:
        """Save after a step that is not the last of its epoch, if it is due, and stop if asked."""
        stops = bool(self.runner.stop_reason) and self.saver.can_save
        if stops or self.saver.is_due(epoch, done, self.state.reported):
            self._save(Position(epoch - 1, done), must_wait=stops)
        if stops:
            raise self._stopped(epoch - 1, f"step {done} of epoch {epoch} has ended")

    def _end_epoch(self, epoch: int, result: GroupResult) -> None:
        self.state.end(epoch, result)
        self.callbacks.notify("on_epoch", epoch, result.seconds, result.metrics)
        self.state.fire(self.callbacks.ended_by())

    # ---- saves

    def _save_if_due(self) -> None:
        """Save the epoch that ended if the policy or the user asks for it."""
        state, is_asked = self.state, self.saver.is_asked
        if self.saver.is_due(state.epoch, self.plan.steps_per_epoch, state.reported):
            self._save(state.at, must_wait=is_asked or state.is_wary(state.epoch))

    def _record_epoch(self) -> None:
        """Wait until the epoch that ended is recorded; save it if it was not due.

        If it could not be saved in a group with others, it is tried once more, alone.
        """
        state = self.state
        if self._handed_over == state.at or state.is_recorded or state.steps_done:
            with self.watch.spending("save_wait"):
                self.saver.wait()
            if not self.saver.must_retry:
                return
        self._save(state.at, must_wait=True)

    def _save(self, at: Position, *, must_wait: bool = False) -> None:
        """Save the state of the workspaces, which is that of position `at`.

        In the background, unless it `must_wait` until that is recorded.
        """
        if self.saver.can_save:
            self._handed_over = at
            self.callbacks.notify("on_save_start", at.epoch, at.step)
            details = self._details(at)
            with self.watch.spending("save_wait"):
                self.saver.save(at, details, must_wait=must_wait)

    def _details(self, at: Position) -> dict[str, Any]:
        """What the record of a position says of the run."""
        details = {**self.state.details(at), **self.lineage, **self.watch.capture(at)}
        callbacks = self.callbacks.states()
        if callbacks:
            details["callbacks"] = callbacks
        return details

    def _saved(self, report: SaveReport) -> None:
        self.state.note_save(report)
        self.callbacks.notify("on_save", report)

    # ---- moves

    def _has_room(self) -> bool:
        """Whether nodes are to move to workers that have joined; true until they have moved."""
        if self._must_move or not self.saver.can_save:
            return self._must_move
        spread = self.binding.spread()
        if spread is not None:
            state = self.state
            save_seconds = 0.0
            if state.saves:
                save_seconds = state.saves[-1].seconds
            self._must_move = is_move_worthwhile(
                self.binding.placement,
                spread.placement,
                spread.threads,
                epoch_seconds=state.epoch_seconds,
                epochs_left=state.epochs_left(self.plan.epoch_limit),
                save_seconds=save_seconds,
            )
        return self._must_move

    def _move(self) -> None:
        """Place the nodes again and load the state just recorded, so that no epoch runs twice."""
        logger.info(
            "Nodes move after epoch %d; workers that retire: %s, that have joined: %s",
            self.state.epoch,
            ", ".join(self.binding.leaving) or "none",
            "some" if self._must_move else "none",
        )
        with self.watch.spending("recovery"):
            self._bind_again(stays=not self._must_move)
            self._init_or_resume()

    def _bind_first(self) -> None:
        while True:
            try:
                return self._bind()
            except TaskFailedError as error:  # a collection among the arguments of init tasks
                if not _is_transient(self.runner.job, error):
                    raise
                self._count_loss(error)

    def _bind(self, *, stays: bool = False) -> None:
        self._must_move = False
        self.binding = self.session.bind(
            self.plan,
            wait_seconds=self.runner.worker_wait_seconds,
            can_move=self.saver.can_save,
            stays=stays,
            wanted_workers=self.runner.wanted_workers,
            first=self.resume.first_group,
        )
        for group in self.runner.job.groups.values():
            for task in group.tasks():
                task.session, task.plan = self.session, self.plan
        self.callbacks.notify("on_placement", dict(self.binding.placement))

    def _bind_again(self, *, stays: bool) -> None:
        """Place the nodes again; if it `stays`, on the same workers where possible."""
        if self.plan.groups["init"].lazy:  # it is decided now which of them are computed
            self.resume = self._decide()
        try:
            self._bind(stays=stays)
        except PlacementError as error:
            raise PlacementError(str(error)).advise(self._advice()) from error

    # ---- other groups

    def _run_group(
        self, group: str, epoch: int, step: int = 0, deadline_seconds: float | None = None
    ) -> GroupResult:
        """Run a group that is not of epochs."""
        result = self.binding.run(group, epoch=epoch, step=step, deadline_seconds=deadline_seconds)
        self.callbacks.notify("on_group", group, epoch, result.seconds)
        return result

    def _finish(self) -> None:
        """Run the upload, download and exit groups, and record that the job has ended."""
        state, epoch = self.state, self.state.epoch
        builder, manager = self.runner.upload_task_group_builder, self.runner.checkpoint_manager
        if builder is not None and not state.is_recorded:
            self.callbacks.warn(
                f"The last epoch, {epoch}, could not be recorded, so nothing is uploaded. "
                f"Repair the storage. {self._advice()}"
            )
        elif builder is not None and manager is not None:
            started = time.monotonic()
            self.session.run_group(builder.build(epoch, manager), epoch)
            self.callbacks.notify("on_group", "upload", epoch, time.monotonic() - started)
        for group in ("download", "exit"):
            self._run_group(group, epoch)
        self.saver.finish(state.at)


def _is_transient(job: Job, error: TaskFailedError) -> bool:
    """Whether the failed task declares its error as transient."""
    group = job.groups.get(error.group)
    if group is None:
        return False
    task = group.find(error.node, error.task)
    return task is not None and isinstance(error.__cause__, task.transient_errors)
