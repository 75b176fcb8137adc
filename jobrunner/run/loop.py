"""One run of a job: init or resume, then epochs, then upload, download and exit."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from jobrunner.checkpoint import Details, MultiNodeCheckpointManager
from jobrunner.cluster import Binding, GroupResult, Session
from jobrunner.config import get_number
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
from jobrunner.run.decisions import State, Step, Stopwatch, each_step, is_captured, next_step
from jobrunner.run.load import finish_load, load
from jobrunner.run.losses import Loss, Losses, is_transient
from jobrunner.run.moves import is_worthwhile
from jobrunner.run.null_saver import NullSaver
from jobrunner.run.recovery import count_loss
from jobrunner.run.result import RunResult, SaveReport
from jobrunner.run.resume import (
    Begin,
    Resume,
    decide,
    describe_damage,
    recorded_stops,
    with_streams,
)
from jobrunner.run.saver import Saver
from jobrunner.signals import TerminatedError
from jobrunner.texts import get_logger

if TYPE_CHECKING:
    from jobrunner.run.runner import JobRunner

logger = get_logger(__name__)

MAX_BATCH_EPOCHS = 10_000
"""Bounds the results that workers keep for the client."""


def recorded_metrics(manager: MultiNodeCheckpointManager | None) -> list[dict[str, Any]]:
    """The metrics of all recorded whole epochs, as in `RunResult.metrics`."""
    rows = [] if manager is None else manager.history()
    whole = [row for row in rows if row["epoch"] and not row["step"]]
    return [{**row["metrics"], "epoch": row["epoch"]} for row in whole]


def tell_finished(runner: JobRunner, resume: Resume) -> RunResult:
    """The result of a run of a job that has finished: nothing is placed, and nothing is loaded."""
    begin = resume.begin
    assert begin is not None
    state = State(Losses(runner.max_restarts))
    state.epoch, state.resumed_from = begin.record.at.epoch, begin.record.epoch
    state.fired = recorded_stops(resume.plan, begin.record)
    earlier = partial(recorded_metrics, runner.checkpoint_manager)
    result = state.result(resume.plan.epoch_limit, earlier)
    callbacks = Callbacks(runner.callbacks)
    try:
        callbacks.notify("on_setup", runner)
        callbacks.notify("on_start", resume.in_words(), resume.plan.epoch_limit)
        callbacks.notify("on_finish", result)
    finally:
        callbacks.close()
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
        self.resume = resume  # where it begins; after a loss, where it goes on
        self.has_begun = False
        self.streams = resume.streams
        self.plan = plan = with_streams(resume.plan, resume.streams)
        self.session = session
        self.callbacks = Callbacks([*views, *runner.callbacks])
        self.state = State(Losses(runner.max_restarts))
        self.watch = Stopwatch(began)
        self._must_move = False  # workers have joined, and a move there is worthwhile
        self.batch_seconds = get_number("stint-seconds")
        self.binding: Binding
        self._handed_over: Position | None = None  # what the saver was given last
        self._captures: tuple[int, int] | None = None  # what workers capture of the current epoch
        self.lineage: Mapping[str, Any] = {}  # what each record says of `adaptation`
        self.saver: Saver | NullSaver = NullSaver()
        if (manager := runner.checkpoint_manager) is not None:
            warn, policy = self.callbacks.warn, runner.on_save_error
            asked, status = runner.save_asked, self.state.status
            since = round(time.time() - (time.monotonic() - began), 3)
            self.saver = Saver(manager, plan, policy, warn, self._saved, asked, status, since)

    def run(self) -> RunResult:
        """See `JobRunner.run`."""
        try:
            self.callbacks.notify("on_setup", self.runner)
            result = self._run()
            self.callbacks.notify("on_finish", result)
        except BaseException as error:
            self.callbacks.notify("on_error", error)
            raise
        finally:
            self.callbacks.close()
        return result

    def _run(self) -> RunResult:
        self._bind()
        outcome = "failed"
        try:
            self._run_to_end()
            outcome = "finished"
        except RunStoppedError:
            outcome = "stopped"
            raise
        except KeyboardInterrupt as interrupt:
            self.binding.abort()
            shown = f"{type(interrupt).__name__}: Job {self.plan.job!r} was interrupted at once."
            lines = [shown, self.advice()]
            # IPython shows what is recorded instead of a traceback.
            interrupt._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
            outcome = "stopped"
            if isinstance(interrupt, TerminatedError) and self.runner.stop_reason:
                raise self.stopped(None, "it had no more time for the epoch") from interrupt
            raise
        finally:
            self.saver.end(lambda: self.watch.end(outcome, self.state.recorded))
        earlier = partial(recorded_metrics, self.runner.checkpoint_manager)
        return self.state.result(self.plan.epoch_limit, earlier)

    def _run_to_end(self) -> None:
        """Init or resume, then epochs, then upload, download and exit; again after a loss."""
        loss: Loss | None = None
        while True:
            try:
                if loss is not None:
                    again = f"Beginning again from {self._describe_beginning()}."
                    self.callbacks.warn(f"{loss.without_advice()} {again}")
                    self._bind_again(stays=True)
                self._init_or_resume()
                if loss is not None:
                    loss, state = None, self.state
                    seconds = self.watch.seconds_lost
                    self.callbacks.notify("on_recovery", state.epoch, state.steps_done, seconds)
                self._run_epochs()
                self.watch.enter("idle")
                if not self.state.is_finished:
                    self._finish()
                return
            except (NodeLostError, SchedulerLostError, TaskFailedError) as error:
                if isinstance(error, TaskFailedError) and not is_transient(self.runner.job, error):
                    raise
                loss = error
                count_loss(self, error)

    # ---- init or resume

    def _init_or_resume(self) -> None:
        """Set `state.epoch` to the last epoch that is complete in the workspaces."""
        state = self.state
        self.saver.start(self.binding)
        self.resume = self._decide_in_lock()
        if not state.is_announced:
            state.is_announced = True
            planned = self.resume.in_words()
            self.callbacks.notify("on_start", planned, self.plan.epoch_limit)
            for warning in planned.warnings:
                self.callbacks.warn(warning)
        state.steps_done, self._handed_over = 0, None
        started = time.monotonic()
        begin = self._load_newest()
        if begin is None:
            if self.resume.is_own:
                self.saver.set_aside(self.resume.damaged)
            self._start_afresh()
        else:
            self._go_on_from(begin, started)
        if not self.has_begun:
            self.has_begun = True
            state.resumed_from = None if begin is None else begin.record.epoch
        state.is_finished = self.resume.left == "nothing"
        if not state.is_finished:
            state.fire(self.callbacks.ended_by())

    def _decide(self) -> Resume:
        """Decide anew where to begin, or where the same command would."""
        runner, manager = self.runner, self.runner.checkpoint_manager
        # What was asked is for the start only; after a loss, resume from this run's own epochs.
        asked = "latest" if self.has_begun else runner.resume_from_epoch
        snapshot = None if manager is None else manager.directory.snapshot()
        return decide(runner.job, self.plan, asked, manager, snapshot, runner.adaptation)

    def _decide_in_lock(self) -> Resume:
        """Decide again unless the log is still as it was, but for the entry of this run."""
        manager, decided = self.runner.checkpoint_manager, self.resume
        if manager is None:
            return decided
        if not self.has_begun and decided.snapshot is not None:
            lock = manager.commits.lock
            before = manager.directory.snapshot().number if lock is None else lock.number - 1
            if before == decided.snapshot.number:
                return replace(decided, in_use="")
        return self._decide()

    def _load_newest(self) -> Begin | None:
        """Load what was decided; if it is damaged, decide without it, until an epoch is whole."""
        runner, told = self.runner, set[Position]()
        while True:
            resume, origin = self.resume, self.resume.origin
            if origin is None:
                return None
            aside = " and set aside" if resume.is_own else ""
            for at, damage in resume.damaged.items():
                if at not in told:
                    told.add(at)
                    where = f"Epoch {at} of {origin.path}"
                    self.callbacks.warn(
                        f"{where} is damaged{aside}; trying an earlier one: {damage}"
                    )
            if resume.begin is None:
                if resume.damaged:
                    self.callbacks.warn(
                        f"No recorded epoch of {origin.path} is whole; starting afresh."
                    )
                return None
            try:
                begin = load(
                    self.session,
                    self.binding,
                    runner.job,
                    origin,
                    resume.begin,
                    runner.adaptation,
                )
            except CheckpointCorruptError as error:
                if resume.is_named:
                    raise
                damaged = {**resume.damaged, resume.begin.record.at: describe_damage(error)}
                self.resume = decide(
                    runner.job,
                    self.plan,
                    "latest",
                    runner.checkpoint_manager,
                    resume.snapshot,
                    runner.adaptation,
                    damaged,
                )
                continue
            if changed := begin.match.describe():
                where = f"Epoch {begin.record.at} of {origin.path}"
                self.callbacks.warn(f"{where} has other nodes or blobs than the job: {changed}")
            return begin

    def _start_afresh(self) -> None:
        state = self.state
        self.watch.go_back(None)
        self.lineage = self.runner.adaptation.lineage(Details(), self.streams)
        self.saver.refuse_classes(self.runner.job)
        self.run_group("init", 0)
        self.saver.rewind(None, "started afresh")
        state.fired, state.epoch, state.recorded = (), 0, None
        self.callbacks.load_states({})
        # What cannot be saved is named before epoch 1.
        self.save(Position(0), {}, must_wait=True)

    def _go_on_from(self, begin: Begin, started: float) -> None:
        """Go on from an epoch that was loaded; `started` is when its load began."""
        state, record, at = self.state, begin.record, begin.record.at
        manager = self.runner.checkpoint_manager
        assert manager is not None
        self.watch.go_back(at)
        finish_load(self.binding, begin, self.run_group)
        state.reported = dict(record.details.metrics)
        state.fired = recorded_stops(self.plan, record)
        state.epoch, state.steps_done = at.epoch, at.step
        self.callbacks.load_states(record.details.callbacks)
        self.lineage = self.runner.adaptation.lineage(record.details, self.streams)
        is_own = self.resume.is_own
        state.recorded = at if is_own else None
        if is_own:
            self.saver.set_aside(self.resume.damaged)
            self.saver.rewind(at, f"resumed from epoch {at}")
        self.callbacks.notify("on_load", at.epoch, at.step, time.monotonic() - started)
        if not is_own:
            # Then it can resume from its own directory alone.
            self.save(at, state.reported, must_wait=True)
        elif begin.match.is_reshaped and self.resume.left != "nothing":
            # Record it in the shape that the job gave it. A crash before the commit leaves the
            # record as it was. A new record has no pins.
            labels = manager.pins().get(at.public, [])
            self.save(at, state.reported, must_wait=True)
            self.wait_for_save()
            for label in labels:
                manager.pin(at, label)

    # ---- where the same command would resume

    def _describe_beginning(self) -> str:
        try:
            at = self._decide().at
        except CheckpointError as error:  # the error that needs this text matters more
            return f"the last recorded epoch, which cannot be read now: {str(error).rstrip('.')}"
        return "the start" if at is None else f"epoch {at}"

    def advice(self) -> str:
        """How to resume, as the end of a message."""
        return f"Run the same command again to resume from {self._describe_beginning()}."

    def stopped(self, epoch: int | None, why: str) -> RunStoppedError:
        """The error that ends a run on request."""
        reason = self.runner.stop_reason
        return RunStoppedError(
            f"Job {self.plan.job!r} stopped on request ({reason}): {why}.",
            reason=reason,
            epoch=epoch,
        ).advise(self.advice())

    # ---- epochs

    def _run_epochs(self) -> None:
        while (step := self._next_step()) not in ("finish", "stop"):
            with self.watch.spending("save_wait"):
                self.saver.make_room(self.state.epoch + 1)
            if step == "move":
                self._move()
            elif (count := self._batch_size()) > 1:
                first = self.state.epoch + 1
                self._run_batch(first, count)
                self._save_if_due()
            else:
                self._run_epoch()
        state = self.state
        if step == "stop":
            self.wait_for_save()
            if not state.steps_done and state.recorded != state.at:
                # A batch of epochs ended, in which nothing was saved.
                self.save(state.at, state.metrics.get(state.epoch, {}))
                self.wait_for_save()
            raise self.stopped(state.epoch, "its epoch has ended")

    def _batch_size(self) -> int:
        """How many epochs the workers may run without the client."""
        state, runner = self.state, self.runner
        epoch = state.epoch + 1
        if (
            state.steps_done
            or not self.plan.can_batch
            or runner.stop_reason
            or self.binding.leaving
            or runner.epoch_deadline_seconds is not None
            or runner.task_deadline_seconds is not None
            or 4 * state.epoch_seconds > self.batch_seconds
            or (state.is_wary(epoch) and self.saver.can_save)
            or not self.callbacks.are_passive
        ):
            return 1
        limit = self.plan.epoch_limit
        until_end = None if limit is None else limit - state.epoch
        counts = (MAX_BATCH_EPOCHS, until_end, self.saver.epochs_until(epoch))
        return min(count for count in counts if count is not None)

    def _run_batch(self, first: int, count: int) -> None:
        self.state.begin(range(first, first + count))
        self.watch.enter("compute")
        captures = self.saver.captures(first)
        ended = self.binding.run_epochs(first, count, self.batch_seconds, captures)
        captured: list[tuple[Position, Mapping[str, Any]]] = []
        try:
            for epoch, result, is_last in ended:
                self.state.end(epoch, result)
                if is_last or self.callbacks.hear_each:
                    self._notify("on_epoch_start", epoch, is_last=is_last)
                    self._tell_end(result, is_last=is_last)
                if is_captured(epoch, captures):
                    at = self.state.at
                    captured.append((at, self._about(at, self.state.metrics[epoch])))
        finally:
            # Also if an epoch has failed: those before it have ended.
            self._save_captured(captured)
        self.watch.enter("idle")

    def _run_epoch(self) -> None:
        started, state = time.monotonic(), self.state
        epoch = state.epoch + 1
        state.begin(range(epoch, epoch + 1))
        self.watch.enter("compute")
        first_step, state.steps_done = state.steps_done, 0
        reported = state.reported
        self._notify("on_epoch_start", epoch)

        self._captures = None if state.is_wary(epoch) else self.saver.captures(epoch)
        for done, outcome, has_ended in each_step(self.plan, epoch, first_step, self._run_step):
            if done == 1:
                reported = state.reported = dict(outcome.metrics)
            else:
                reported.update(outcome.metrics)
            if not has_ended:
                can_stop = self.saver.can_save or self.plan.steps_per_epoch is None
                stops = bool(self.runner.stop_reason) and can_stop
                at = Position(epoch - 1, done)
                if stops or self.saver.is_due(epoch, done, reported):
                    self.save(at, reported)
                if stops:
                    self.wait_for_save()
                    why = f"step {done} of epoch {epoch} has ended"
                    raise self.stopped(epoch - 1, why)
        state.num_steps = done
        self.watch.enter("idle")
        seconds = time.monotonic() - started
        outcome = replace(outcome, seconds=seconds, metrics=reported)
        state.end(epoch, outcome)
        self._tell_end(outcome)
        if self._captures_step(done - 1) and is_captured(epoch, self._captures):
            self._save_captured([(state.at, self._about(state.at, state.metrics[epoch]))])
        self._save_if_due()

    def _run_step(self, group: str, epoch: int, step: int) -> GroupResult:
        """Run a step, or the epoch end group."""
        is_step = group != "epoch_end"
        if is_step:
            self._notify("on_step_start", epoch, step + 1)
        deadline = self.runner.epoch_deadline_seconds
        captures = self._captures if self._captures_step(step) else None
        outcome = self._run_on_workers(
            group, epoch, captures=captures, step=step, deadline_seconds=deadline
        )
        if is_step:
            self._notify("on_step", epoch, step + 1, outcome.seconds, outcome.metrics)
        else:
            self.callbacks.notify("on_group", group, epoch, outcome.seconds)
        return outcome

    def _captures_step(self, step: int) -> bool:
        """Whether workers can capture an epoch when that step, counted from 0, has ended."""
        return step + 1 == self.plan.steps_per_epoch and "epoch_end" not in self.plan.groups

    def _tell_end(self, result: GroupResult, *, is_last: bool = True) -> None:
        if self.callbacks.are_any:
            about = self.state.epoch, result.seconds, result.metrics
            self.callbacks.notify("on_epoch", *about, is_last=is_last)
            self.state.fire(self.callbacks.ended_by())

    def _save_if_due(self) -> None:
        """Save the epoch that ended if the policy or the next step asks for it."""
        epoch = self.state.epoch
        # The state must be recorded before the nodes leave their workspaces.
        then = self._next_step(is_recorded=True)
        steps = self.plan.steps_per_epoch or self.state.num_steps
        is_asked = self.saver.is_asked
        is_due = self.saver.is_due(epoch, steps, self.state.metrics[epoch], has_ended=True)
        if self._handed_over == self.state.at:
            pass
        elif is_due or then != "run an epoch":
            must_wait = self.state.is_wary(epoch)
            self.save(self.state.at, self.state.metrics[epoch], must_wait=must_wait)
        if then != "run an epoch" or is_asked:
            self.wait_for_save()
            if self.saver.must_retry:
                self.save(self.state.at, self.state.metrics[epoch])

    def _next_step(self, *, is_recorded: bool = False) -> Step:
        return next_step(
            stopped_by=self.state.stopped_by(self.plan.epoch_limit),
            stop_asked=self.runner.stop_reason,
            is_recorded=is_recorded or self.state.recorded == self.state.at,
            is_leaving=bool(self.binding.leaving),
            has_room=self._has_room(),
        )

    def _has_room(self) -> bool:
        """Whether nodes are to move to workers that have joined; true until they have moved."""
        if self._must_move or not self.saver.can_save:
            return self._must_move
        spread = self.binding.spread()
        if spread is not None:
            limit, state = self.plan.epoch_limit, self.state
            self._must_move = is_worthwhile(
                self.binding.placement,
                spread.placement,
                spread.threads,
                epoch_seconds=state.epoch_seconds,
                epochs_left=None if limit is None else limit - state.epoch,
                save_seconds=state.saves[-1].seconds if state.saves else 0.0,
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

    # ---- after the last epoch

    def _finish(self) -> None:
        """Run the upload, download and exit groups, and record that the job has ended."""
        self.wait_for_save()
        state, runner = self.state, self.runner
        epoch = state.epoch
        is_recorded = state.recorded == state.at
        builder, manager = runner.upload_task_group_builder, runner.checkpoint_manager
        if builder is not None and not is_recorded:
            self.callbacks.warn(
                f"The last epoch, {epoch}, could not be recorded, so nothing is uploaded. "
                f"Repair the storage. {self.advice()}"
            )
        elif builder is not None and manager is not None:
            started = time.monotonic()
            self.session.run_group(builder.build(epoch, manager), epoch)
            self.callbacks.notify("on_group", "upload", epoch, time.monotonic() - started)
        for group in ("download", "exit"):
            self.run_group(group, epoch)
        if is_recorded:
            self.saver.finish(state.at)

    # ---- for all phases

    def _notify(self, event: str, *args: object, is_last: bool = True) -> None:
        if self.callbacks.are_any:
            self.callbacks.notify(event, *args, is_last=is_last)

    def run_group(self, group: str, epoch: int) -> None:
        """Run a group that is not of epochs."""
        self.state.begin(range(epoch, epoch + 1))
        self.callbacks.notify("on_group", group, epoch, self._run_on_workers(group, epoch).seconds)

    def _run_on_workers(
        self, group: str, epoch: int, captures: tuple[int, int] | None = None, **options: Any
    ) -> GroupResult:
        return self.binding.run(
            group,
            epoch=epoch,
            task_deadline_seconds=self.runner.task_deadline_seconds,
            captures=captures,
            **options,
        )

    def save(self, at: Position, metrics: Mapping[str, Any], *, must_wait: bool = False) -> None:
        """Save the state of the workspaces, which is that of position `at`.

        In the background, unless it `must_wait` until that is recorded.
        """
        if self.saver.can_save:
            self._handed_over = at
            self._notify("on_save_start", at.epoch, at.step)
            about = self._about(at, metrics)
            with self.watch.spending("save_wait"):
                self.saver.save(at, about, must_wait=must_wait)

    def _save_captured(self, captured: Sequence[tuple[Position, Mapping[str, Any]]]) -> None:
        """Save positions that the workers have captured, with what their records say."""
        if captured:
            self._handed_over, _ = captured[-1]
            self._notify("on_save_start", self._handed_over.epoch, 0)
            self.saver.save_captured(captured)

    def wait_for_save(self) -> None:
        """Wait for all saves in the background."""
        with self.watch.spending("save_wait"):
            self.saver.wait()

    def _about(self, at: Position, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._details(metrics, at.step), **self.watch.capture(at)}

    def _details(self, metrics: Mapping[str, Any], step: int) -> dict[str, Any]:
        callbacks = self.callbacks.states() if self.callbacks.are_any else {}
        return {**self.state.details(metrics, step, callbacks), **self.lineage}

    def _saved(self, report: SaveReport) -> None:
        self.state.note_save(report)
        self._notify("on_save", report)

    def _bind(self, *, stays: bool = False) -> None:
        self.state.begin(range(0))
        self._must_move = False
        self.binding = self.session.bind(
            self.plan,
            wait_seconds=self.runner.worker_wait_seconds,
            can_move=self.saver.can_save,
            stays=stays,
            wanted_workers=self.runner.wanted_workers,
        )
        for group in self.runner.job.groups.values():
            for task in group.tasks():
                task.session, task.plan = self.session, self.plan
        self.callbacks.notify("on_placement", dict(self.binding.placement))

    def _bind_again(self, *, stays: bool) -> None:
        """Place the nodes again; nodes that stay return to the states that their workers keep."""
        try:
            self._bind(stays=stays)
        except PlacementError as error:
            raise PlacementError(str(error)).advise(self.advice()) from error
