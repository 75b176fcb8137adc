"""6 loop: one run of a job: init or resume, then epochs, then upload, download and exit."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jobrunner.checkpoint import load_waiting_states
from jobrunner.cluster import GroupResult, Session
from jobrunner.compile import Plan
from jobrunner.config import get_seconds
from jobrunner.errors import (
    CheckpointCorruptError,
    CheckpointError,
    NodeLostError,
    PlacementError,
    RunStoppedError,
    SchedulerLostError,
    TaskFailedError,
)
from jobrunner.run import resume
from jobrunner.run.callbacks import Callbacks
from jobrunner.run.decisions import Boundary, next_step
from jobrunner.run.load import load_newest
from jobrunner.run.losses import Loss, Survival
from jobrunner.run.options import Options, Requests
from jobrunner.run.result import ResumePlan, RunResult, SaveReport
from jobrunner.run.saver import Recorder
from jobrunner.signals import TerminatedError
from jobrunner.worker import UnderWay

logger = logging.getLogger(__name__)

MAX_STINT_EPOCHS = 10_000
"""So that what workers keep for the client stays small."""

SPARE_SECONDS = 1.0
"""How often a run that lost workers looks for new ones."""


class Run:
    """One run of a job: the loop and what it gathers.

    Parameters
    ----------
    options : Options
    requests : Requests
        Whoever holds them may ask for something at any time, from any thread.
    plan : Plan
    session : Session
    """

    def __init__(self, options: Options, requests: Requests, plan: Plan, session: Session) -> None:
        self.options = options
        self.requests = requests
        self.plan = plan
        self.session = session
        self.callbacks = Callbacks(options.callbacks)
        self.policy = options.policy
        self.limit = self.policy.epoch_limit(plan)
        manager = options.manager
        self.recorder = (
            None
            if manager is None
            else Recorder(
                manager,
                plan,
                options.on_save_error,
                self.callbacks.warn,
                self._saved,
                requests.save,
            )
        )
        self.fired: tuple[str, ...] = ()
        self.steps_done = 0  # of the epoch after the one that `_start` gives
        self.survival = Survival(
            options.job, options.max_restarts, self.callbacks, self._where_to_go_on
        )
        self.recorded: int | None = None  # the state in the workspaces, if it is recorded
        self.most_workers = 0  # in use at once
        self.look_again = 0.0  # for spare workers
        self.is_announced = False
        self.has_begun = False  # from where `resumed_from` says
        self.resumed_from: int | None = None
        self.metrics: dict[int, dict[str, Any]] = {}
        self.pace = float("inf")  # seconds that the last epoch took
        self.stint_seconds = get_seconds("stint-seconds")

    @property
    def under_way(self) -> UnderWay | None:
        """See `JobRunner.under_way`."""
        return self.binding.under_way if hasattr(self, "binding") else None

    def run(self) -> RunResult:
        """Run the job to its end; `JobRunner.run` documents it."""
        self._bind()
        try:
            result = self._run_to_end()
        except KeyboardInterrupt as interrupt:
            self.binding.abort()
            if isinstance(interrupt, TerminatedError) and self.requests.stop:
                raise self._stopped(None, "it had no more time for the epoch") from interrupt
            raise
        finally:
            if self.recorder is not None:
                self.recorder.end()
        self.callbacks.notify("on_finish", result)
        return result

    def _run_to_end(self) -> RunResult:
        lost: Loss | None = None
        while True:
            try:
                if lost is not None:
                    self._recover(lost)
                elif self.recorder is not None:
                    self.recorder.start(self.binding)
                decision = self._decide()
                if not self.is_announced:
                    self.is_announced = True
                    self.callbacks.notify("on_start", decision, self.limit)
                    for warning in decision.warnings:
                        self.callbacks.warn(warning)
                epoch = self._start(decision)
                # Falling back past a damaged epoch makes a finished job an unfinished one.
                is_finished = decision.is_finished and epoch == decision.epoch
                while (step := next_step(self._boundary(epoch))) not in ("finish", "stop"):
                    if step == "move":
                        self._move(epoch)
                    else:
                        epoch = self._run_on(epoch + 1)
                if step == "stop":
                    self._record(epoch)
                    raise self._stopped(epoch, "its epoch has ended")
                stopped_by = self._stopped_by(epoch)
                if not is_finished:
                    self._finish(epoch)
                break
            except (NodeLostError, SchedulerLostError) as error:
                lost = self._survive(error)
            except TaskFailedError as error:
                if not self.survival.is_transient(error):
                    raise
                lost = self._survive(error)
        return RunResult(
            epoch=epoch,
            resumed_from=self.resumed_from,
            stopped_by=stopped_by,
            restarts=self.survival.losses.in_all,
            metrics=[self.metrics[key] for key in sorted(self.metrics)],
            saves=[] if self.recorder is None else self.recorder.saves,
            failed_saves=[] if self.recorder is None else self.recorder.failed_saves,
        )

    def _bind(self, *, stays: bool = False) -> None:
        self.survival.begin(range(0))
        self.binding = self.session.bind(
            self.plan,
            wait_seconds=self.options.worker_wait_seconds,
            can_move=self.recorder is not None,
            stays=stays,
        )
        for group in self.options.job.groups.values():
            for task in group.tasks():
                task.session, task.plan = self.session, self.plan

    def _start(self, decision: ResumePlan) -> int:
        """Init or resume; gives the last epoch that is whole in the workspaces."""
        epoch = self.recorded = None
        self.steps_done = 0
        if (decision.epoch is not None or decision.damaged) and self.recorder is not None:
            epoch = self._load(self.recorder, decision.epoch)
        if epoch is None:
            self._run_group("init", 0)
            if self.recorder is not None:
                self.recorder.rewind(None, "started afresh")
            self.fired = ()
            self._save(0, {})
        if not self.has_begun:
            self.has_begun, self.resumed_from = True, epoch
        # The epoch that the user named was for the start; from now on this run's own count.
        self.policy = resume.Policy("latest", self.policy.num_epochs)
        return (epoch or 0) - bool(self.steps_done)

    def _load(self, recorder: Recorder, wanted: int | None) -> int | None:
        """Load `wanted`, or for "latest" the newest epoch that is whole; None if none is."""
        manager = recorder.manager.source()
        is_own = manager is recorder.manager
        damaged: dict[int, str] = {}
        is_asked_for = self.policy.resume_from != "latest"

        def pass_over(epoch: int, error: CheckpointCorruptError) -> None:
            if is_asked_for:
                raise error
            damaged[epoch] = str(error)
            self.callbacks.warn(
                f"Epoch {epoch} of {manager.path} is damaged{' and set aside' if is_own else ''}, "
                f"going back further: {error}"
            )

        # Those that are known to be damaged are tried as well, to be told of and set aside. One
        # that was asked for and is gone meanwhile is an error.
        latest = reversed(manager.epochs())
        candidates = [wanted] if is_asked_for and wanted is not None else latest
        loaded = load_newest(
            self.binding, self.options.job, self.plan, manager, candidates, pass_over
        )
        if loaded is None:
            self.callbacks.warn(f"No recorded epoch of {manager.path} is whole; starting afresh.")
            if is_own:
                recorder.set_aside(damaged)
            return None
        epoch, record = loaded.epoch, manager.record(loaded.epoch)
        if loaded.anew:
            # With all the others, for what their functions share to stay shared.
            self.binding.ship({**self.plan.groups, "resume": loaded.again})
        if loaded.again.slices:
            self._run_group("resume", 0)  # init tasks, with the random numbers they had then
        if loaded.anew:
            self.binding.apply(load_waiting_states)
        self.fired = resume.recorded_stops(self.plan, record)
        self.steps_done = resume.steps_done(self.plan, record)
        if is_own:
            recorder.set_aside(damaged)
            recorder.rewind(epoch, f"resumed from epoch {epoch}")
            self.recorded = None if self.steps_done else epoch
        metrics = record["details"].get("metrics", {})
        if self.steps_done:
            self.metrics[epoch] = dict(metrics)
        if not is_own:
            # From now on the run can go on from its own directory, whatever becomes of the other.
            self._save(epoch, metrics, self.steps_done or None)
        return epoch

    def _run_on(self, epoch: int) -> int:
        """Run the next epoch, or several in one go where nothing needs the client in between."""
        count = self._epochs_alone(epoch)
        self.survival.begin(range(epoch, epoch + count))
        if count == 1:
            return self._run_epoch(epoch)
        last = epoch
        metrics: Mapping[str, Any] = {}

        def ended(epoch: int, result: GroupResult) -> None:
            nonlocal last, metrics
            last, metrics = epoch, result.metrics
            self._note_end(epoch, result.stopped, result.seconds, metrics)

        self.binding.run_epochs(epoch, count, self.stint_seconds, ended)
        self._leave_epoch(last, metrics)
        return last

    def _epochs_alone(self, epoch: int) -> int:
        """How many epochs, from `epoch` on, the workers may run without asking in between."""
        if (
            self.steps_done
            or self.requests.stop
            or self.binding.leaving
            or self.options.epoch_deadline_seconds is not None
            or self.options.task_deadline_seconds is not None
            or 4 * self.pace > self.stint_seconds
            or not self.callbacks.are_passive
            or self.survival.losses.call_for_care(epoch)
        ):
            return 1
        bounds = [MAX_STINT_EPOCHS]
        if self.limit is not None:
            bounds.append(self.limit - epoch + 1)
        if self.recorder is not None and (until := self.recorder.epochs_until(epoch)) is not None:
            bounds.append(until)
        return min(bounds)

    def _run_group(self, group: str, epoch: int) -> None:
        self.survival.begin(range(epoch, epoch + 1))
        self.binding.run(
            group,
            epoch=epoch,
            task_deadline_seconds=self.options.task_deadline_seconds,
            is_careful=self.survival.is_careful,
        )

    def _run_epoch(self, epoch: int) -> int:
        started = time.monotonic()
        self.recorded = None
        first_step, self.steps_done = self.steps_done, 0
        # What was reported in this epoch before it was saved and resumed from.
        metrics: dict[str, Any] = self.metrics.pop(epoch, {}) if first_step else {}
        last_step = self.plan.steps_per_epoch
        for step in range(first_step, last_step):
            outcome = self.binding.run(
                "epoch",
                epoch=epoch,
                step=step,
                deadline_seconds=self.options.epoch_deadline_seconds,
                task_deadline_seconds=self.options.task_deadline_seconds,
                is_careful=self.survival.is_careful,
            )
            metrics.update(outcome.metrics)
            if step + 1 < last_step:
                asked = bool(self.requests.stop)
                if asked or self._is_due(epoch, step + 1):
                    self._save(epoch, metrics, step + 1)
                if asked and self.recorder is not None:
                    self._settle()
                    raise self._stopped(epoch - 1, f"step {step + 1} of epoch {epoch} has ended")
        self._note_end(epoch, outcome.stopped, time.monotonic() - started, metrics)
        self._leave_epoch(epoch, metrics)
        return epoch

    def _note_end(
        self, epoch: int, stopped: tuple[str, ...], seconds: float, metrics: Mapping[str, Any]
    ) -> None:
        self.fired, self.pace = stopped, seconds
        self.metrics[epoch] = {**metrics, "epoch": epoch}
        self.callbacks.notify("on_epoch", epoch, seconds, metrics)

    def _leave_epoch(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Save where that is due; the client decides what comes next."""
        # Whatever ends this epoch's stay on its workers needs its state recorded.
        then = next_step(replace(self._boundary(epoch), is_recorded=True))
        if self._is_due(epoch, self.plan.steps_per_epoch) or then != "run an epoch":
            self._save(epoch, metrics)
        if then in ("stop", "move"):
            self._settle()

    def _boundary(self, epoch: int) -> Boundary:
        return Boundary(
            stopped_by=self._stopped_by(epoch),
            stop_asked=self.requests.stop,
            is_recorded=self.recorder is not None and self.recorded == epoch,
            is_leaving=bool(self.binding.leaving),
            has_room=self._has_room(),
        )

    def _move(self, epoch: int) -> None:
        """Place the nodes anew, with the state that was just recorded: no epoch runs again."""
        who = ", ".join(self.binding.leaving)
        logger.info("Nodes move after epoch %d; leaving: %s", epoch, who or "nobody")
        self._bind_again(stays=bool(who))  # else they spread over workers that have come
        self.look_again = time.monotonic() + SPARE_SECONDS
        self._start(self._decide())

    def _is_due(self, epoch: int, step: int) -> bool:
        return self.recorder is not None and self.recorder.is_due(epoch, step)

    def _stopped_by(self, epoch: int) -> str:
        if self.steps_done:  # an epoch that was begun is ended, whatever the limit is now
            return ""
        if self.fired:
            return self.fired[0]
        return "epoch_limiter" if self.limit is not None and epoch >= self.limit else ""

    def _finish(self, epoch: int) -> None:
        self._settle()
        builder = self.options.upload_task_group_builder
        is_recorded = self.recorded == epoch
        if builder is not None and self.recorder is not None:
            if is_recorded:
                group = builder.build(epoch, self.recorder.manager)
                self.binding.run_group(group, epoch=epoch)
            else:
                self.callbacks.warn(
                    f"The last epoch, {epoch}, could not be recorded, so there is nothing to "
                    f"upload. Mend the storage and run the same command again: it goes on from "
                    f"{self._where_to_go_on()}."
                )
        self._run_group("download", epoch)
        self._run_group("exit", epoch)
        if is_recorded and self.recorder is not None:
            self.recorder.finish(epoch)

    def _save(self, epoch: int, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if self.recorder is not None:
            self.recorder.save(epoch, () if step else self.fired, metrics, step)

    def _record(self, epoch: int) -> None:
        """Save an epoch that ended while the client was not asked, if nobody has."""
        if not self.steps_done and self.recorded != epoch:
            self._save(epoch, self.metrics.get(epoch, {}))
            self._settle()

    def _settle(self) -> None:
        if self.recorder is not None:
            self.recorder.settle()

    def _saved(self, report: SaveReport, step: int | None) -> None:
        if report.error is None:
            self.survival.record()
            self.recorded = None if step else report.epoch
        self.callbacks.notify("on_save", report)

    def _survive(self, error: Loss) -> Loss:
        """Take note of a loss, and wait for a scheduler; raises when that is no use."""
        if self.recorder is not None:
            self.recorder.settle_quietly()
        self.survival.count(error)
        if self.requests.stop:
            raise self._stopped(None, "a loss ended its epoch") from error
        self.survival.await_scheduler(self.session, self.options.scheduler_wait_seconds, error)
        return error

    def _recover(self, error: Loss) -> None:
        """Place the nodes anew after a loss."""
        self.callbacks.warn(f"{error} Beginning again from {self._where_to_go_on()}.")
        self._bind_again(stays=True)

    def _bind_again(self, *, stays: bool) -> None:
        """Place the nodes anew; where they stay, workers go back to states that they keep."""
        try:
            self._bind(stays=stays)
        except PlacementError as error:
            raise PlacementError(
                f"{error} Run the same command again to go on from {self._where_to_go_on()}."
            ) from error
        if self.recorder is not None:
            self.recorder.start(self.binding)

    def _has_room(self) -> bool:
        """Whether workers have come that make up for those that were lost."""
        in_use = len(set(self.binding.placement.values()))
        self.most_workers = max(self.most_workers, in_use)
        if self.recorder is None or in_use == self.most_workers:
            return False
        if time.monotonic() < self.look_again:
            return False
        has_room = self.binding.count_spread() > in_use
        if not has_room:  # or the loop, which asks after the save as well, would hear otherwise
            self.look_again = time.monotonic() + SPARE_SECONDS
        return has_room

    def _decide(self) -> ResumePlan:
        return resume.plan_resume(self.options.job, self.plan, self.options.manager, self.policy)

    def _where_to_go_on(self) -> str:
        try:
            decision = self._decide()
        except CheckpointError as error:  # what it is asked for has to be told all the same
            return f"what is recorded, which cannot be read now: {str(error).rstrip('.')}"
        return "the start" if decision.epoch is None else f"epoch {decision.epoch}"

    def _stopped(self, epoch: int | None, why: str) -> RunStoppedError:
        """The error that says that the run ended as it was told to."""
        reason = self.requests.stop
        return RunStoppedError(
            f"Job {self.plan.job!r} was told to stop ({reason}) and did so: {why}. Run the same "
            f"command again to go on from {self._where_to_go_on()}.",
            reason=reason,
            epoch=epoch,
        )
