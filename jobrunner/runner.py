"""6 loop: init or resume, then epochs, then upload, download and exit."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from jobrunner import resume
from jobrunner.checkpoint import MultiNodeCheckpointManager
from jobrunner.config import get_seconds
from jobrunner.decisions import Boundary, Losses, next_step
from jobrunner.errors import (
    BlobNotFoundError,
    CheckpointCorruptError,
    DefinitionError,
    NodeLostError,
    PlacementError,
    RunStoppedError,
    SchedulerLostError,
    TaskFailedError,
)
from jobrunner.job import Job
from jobrunner.node import Blob
from jobrunner.plan import Plan
from jobrunner.recorder import Recorder
from jobrunner.result import ResumePlan, RunResult, SaveReport
from jobrunner.session import GroupResult, Session
from jobrunner.signals import TerminatedError, stop_on_signals
from jobrunner.upload import UploadTaskGroupBuilder

logger = logging.getLogger("jobrunner.runner")

MAX_STINT_EPOCHS = 10_000
"""So that what workers keep for the client stays small."""

SPARE_SECONDS = 1.0
"""How often a run that lost workers looks for new ones."""

Loss = NodeLostError | SchedulerLostError | TaskFailedError
ResumeFrom = int | Literal["latest"] | None


class Callback(Protocol):
    """What a runner tells while it runs; an object may have any of these methods.

    They run on the client, between epochs; what one raises ends the run. One that only looks on
    says so with an attribute ``is_passive = True``: where nothing else needs the client either,
    the workers then run short epochs on their own for `jobrunner.stint-seconds`, and `on_epoch`
    comes for all of these together, after the last.
    """

    def on_start(self, plan: ResumePlan, total_epochs: int | None) -> None:
        """The run begins; `total_epochs` is the limit, if there is one."""

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """An epoch has ended; its checkpoint has not been written yet."""

    def on_save(self, report: SaveReport) -> None:
        """A checkpoint is recorded, or could not be (`SaveReport.error`)."""

    def on_warning(self, message: str) -> None:
        """Something went wrong that does not end the run."""

    def on_stop_asked(self, reason: str, at_once: str) -> None:
        """A signal asked the run to end with its epoch; `at_once` says what ends it now."""

    def on_finish(self, result: RunResult) -> None:
        """The exit group has ended."""


class JobRunner:
    """Runs a job: from the start, or from the last epoch that is recorded.

    Parameters
    ----------
    job : Job
    checkpoint_manager : MultiNodeCheckpointManager or CheckpointManager, optional
        Without one nothing is saved.
    resume_from_epoch : "latest", int or None
        ``"latest"``: go on where there is something to go on from, else start. An int: that epoch,
        or an error. None: start afresh; recorded epochs are set aside, not deleted.
    upload_task_group_builder : UploadTaskGroupBuilder, optional
        Makes the group that runs after the last epoch, before the download group.
    max_restarts : int
        How often in a row, with no epoch recorded in between, the run begins again from the last
        recorded epoch (without a manager: from init) because a worker was lost.
    on_save_error : "warn" or "raise"
        What a storage fault does while a checkpoint is written. A blob that cannot be encoded, a
        directory that another run took over and a changed plan always raise.
    worker_wait_seconds : float
        How long to wait for workers that the nodes may be placed on.
    scheduler_wait_seconds : float
        How long to wait for a lost scheduler to be back at its address.
    epoch_deadline_seconds : float, optional
        Longest time one run of the epoch group may take.
    task_deadline_seconds : float, optional
        Longest time one task of any group may run.
    grace_seconds : float, optional
        How long after SIGTERM the run may take to end its epoch and record it. None: as long as
        it takes.
    num_epochs : int, optional
        Stop after so many epochs in all, as `epoch_limiter` does.
    callbacks : sequence of Callback

    Raises
    ------
    DefinitionError
        An argument cannot be what it says.
    """

    def __init__(
        self,
        job: Job,
        checkpoint_manager: MultiNodeCheckpointManager | None = None,
        resume_from_epoch: ResumeFrom = "latest",
        upload_task_group_builder: UploadTaskGroupBuilder | None = None,
        *,
        max_restarts: int = 3,
        on_save_error: Literal["warn", "raise"] = "warn",
        worker_wait_seconds: float = 60,
        scheduler_wait_seconds: float = 60,
        epoch_deadline_seconds: float | None = None,
        task_deadline_seconds: float | None = None,
        grace_seconds: float | None = None,
        num_epochs: int | None = None,
        callbacks: Sequence[object] = (),
    ) -> None:
        if not isinstance(job, Job):
            raise DefinitionError(f"JobRunner runs a Job; got {type(job).__name__}.")
        where = f"JobRunner of job {job.name!r}"
        if on_save_error not in ("warn", "raise"):
            raise DefinitionError(
                f"{where}: on_save_error is 'warn' or 'raise'; got {on_save_error!r}."
            )
        if resume_from_epoch not in ("latest", None):
            _check_int(where, "resume_from_epoch, unless 'latest' or None,", resume_from_epoch, 0)
        _check_int(where, "max_restarts", max_restarts, 0)
        if num_epochs is not None:
            _check_int(where, "num_epochs", num_epochs, 1)
        for what, seconds in (
            ("worker_wait_seconds", worker_wait_seconds),
            ("scheduler_wait_seconds", scheduler_wait_seconds),
            ("epoch_deadline_seconds", epoch_deadline_seconds),
            ("task_deadline_seconds", task_deadline_seconds),
            ("grace_seconds", grace_seconds),
        ):
            if seconds is not None and not 0 <= seconds < float("inf"):
                raise DefinitionError(f"{where}: {what} is a number of seconds; got {seconds!r}.")
        if checkpoint_manager is None:
            for what, value in (
                ("resume_from_epoch", isinstance(resume_from_epoch, int)),
                ("upload_task_group_builder", upload_task_group_builder is not None),
            ):
                if value:
                    raise DefinitionError(f"{where}: {what} needs a checkpoint_manager.")
        self.job = job
        self.checkpoint_manager = checkpoint_manager
        self.resume_from_epoch = resume_from_epoch
        self.upload_task_group_builder = upload_task_group_builder
        self.max_restarts = max_restarts
        self.on_save_error = on_save_error
        self.worker_wait_seconds = worker_wait_seconds
        self.scheduler_wait_seconds = scheduler_wait_seconds
        self.epoch_deadline_seconds = epoch_deadline_seconds
        self.task_deadline_seconds = task_deadline_seconds
        self.grace_seconds = grace_seconds
        self.num_epochs = num_epochs
        self.callbacks = tuple(callbacks)
        self._save_now = threading.Event()
        self._stop_asked = ""

    def plan_resume(self) -> ResumePlan:
        """Say what `run` would do and why; runs and writes nothing.

        Returns
        -------
        ResumePlan

        Raises
        ------
        DefinitionError
            The job cannot run.
        CheckpointError
            The checkpoint that would be resumed from is missing or does not fit.

        Notes
        -----
        Runs on the client; needs no cluster. Whether the stores are whole is found when they are
        loaded.
        """
        return resume.plan_resume(self._compile(), self.checkpoint_manager, self._policy())

    def run(self, session: Session) -> RunResult:
        """Run the job to its end.

        Parameters
        ----------
        session : Session
            Its workspaces are replaced by the job's, and stay after the run for `Session.fetch`.

        Returns
        -------
        RunResult

        Raises
        ------
        DefinitionError, PlacementError
            Before anything has run.
        TaskFailedError
            A task raised. What was recorded stays, and the next run goes on from there.
        NodeLostError, SchedulerLostError
            A worker or the scheduler was lost, more often than `max_restarts` allows, or the
            scheduler did not come back in time.
        RunStoppedError
            The run was told to stop: by `stop`, Ctrl-C or SIGTERM. The epoch that was under way
            has ended, and is recorded.
        CheckpointError
            State could not be loaded, or not saved and `on_save_error` is "raise".

        Notes
        -----
        Runs on the client. *Safe to retry*: run again, it goes on from the last recorded epoch.
        In the main thread, the first Ctrl-C and SIGTERM let the epoch end. The second one, and for
        SIGTERM the end of `grace_seconds`, stop the tasks at once (`KeyboardInterrupt`) and leave
        the last recorded epoch as it is.
        """
        plan = self._compile()
        resume.plan_resume(plan, self.checkpoint_manager, self._policy())
        self._stop_asked = ""
        with session.exclusive(f"Job {plan.job!r}"):
            run = _Run(self, plan, session)
            with stop_on_signals(self._ask_to_stop, self.grace_seconds):
                return run.run()

    def stop(self, reason: str = "JobRunner.stop") -> None:
        """Ask the run to end once its epoch has ended and is recorded.

        Parameters
        ----------
        reason : str
            Who asks; for `RunStoppedError`, with which the run ends.

        Notes
        -----
        Runs on the client, in any thread or callback, and returns at once. A job of several steps
        an epoch stops, and is saved, after the step that is under way.
        """
        self._stop_asked = reason or "JobRunner.stop"

    def save_now(self) -> None:
        """Ask the run to save when the step that is under way ends, whatever its policy says.

        Notes
        -----
        Runs on the client, in any thread or signal handler, and returns at once. A file
        ``_save_now`` in the checkpoint directory asks for the same.
        """
        self._save_now.set()

    def load_blobs_from_checkpoints(
        self, blob_names: Sequence[str | Blob], epoch: int, session: Session
    ) -> bool:
        """Load some blobs of an epoch into the session's workspaces, and nothing else.

        Parameters
        ----------
        blob_names : sequence of str or Blob
            A name stands for that blob of every checkpointed node that has it, a `Blob` for that
            of its node.
        epoch : int
        session : Session

        Returns
        -------
        bool
            False where the epoch is not recorded.

        Raises
        ------
        BlobNotFoundError
            No checkpointed node has the blob.
        CheckpointCorruptError
            A store is not what was written; then no blob is loaded.
        """
        manager = self.checkpoint_manager
        if manager is None:
            raise DefinitionError(
                f"JobRunner of job {self.job.name!r} has no checkpoint_manager to load blobs from."
            )
        if epoch not in manager.epochs():
            return False
        there = manager.blobs(epoch)
        wanted: dict[str, set[str]] = {}
        for asked in [blob_names] if isinstance(blob_names, str | Blob) else blob_names:
            blob = Blob(asked) if isinstance(asked, str) else asked
            nodes = [
                node
                for node, names in there.items()
                if blob.name in names and (blob.node is None or blob.node.name == node)
            ]
            if not nodes:
                raise BlobNotFoundError(
                    f"Epoch {epoch} of {manager.path} has no blob {blob!r}. It holds: "
                    + "; ".join(f"{n}: {', '.join(sorted(b))}" for n, b in there.items())
                )
            for node in nodes:
                wanted.setdefault(node, set()).add(blob.name)
        group = manager.load(epoch, blobs=wanted)
        session.run(group)
        manager.report_load(group)
        return True

    def _compile(self) -> Plan:
        plan = self.job.compile()
        if not plan.groups["epoch"].conditions and self._policy().epoch_limit(plan) is None:
            raise DefinitionError(
                f"Job {plan.job!r} has no stop condition and no epoch limit, so it would never "
                f"end. Add one: job.add_stop_condition(...), epoch_limiter(job, n), or num_epochs="
            )
        return plan

    def _policy(self) -> resume.Policy:
        return resume.Policy(self.resume_from_epoch, self.num_epochs)

    def _ask_to_stop(self, signal_name: str) -> None:
        self.stop(signal_name)
        again = "Ctrl-C again" if signal_name == "SIGINT" else "the same signal again"
        for callback in self.callbacks:
            getattr(callback, "on_stop_asked", lambda *_: None)(signal_name, again)


class _Run:
    """One call of `JobRunner.run`: the loop and what it gathers."""

    def __init__(self, runner: JobRunner, plan: Plan, session: Session) -> None:
        self.runner = runner
        self.plan = plan
        self.session = session
        self.policy = runner._policy()
        self.limit = self.policy.epoch_limit(plan)
        manager = runner.checkpoint_manager
        self.recorder = (
            None
            if manager is None
            else Recorder(
                manager, plan, runner.on_save_error, self._warn, self._saved, runner._save_now
            )
        )
        self.fired: tuple[str, ...] = ()
        self.steps_done = 0  # of the epoch after the one that `_start` gives
        self.losses = Losses(runner.max_restarts)
        self.recorded: int | None = None  # the state in the workspaces, if it is recorded
        self.saved_steps: dict[int, int | None] = {}  # of epochs whose save is under way
        self.most_workers = 0  # in use at once
        self.look_again = 0.0  # for spare workers
        self.is_announced = False
        self.has_begun = False  # from where `resumed_from` says
        self.resumed_from: int | None = None
        self.metrics: dict[int, dict[str, Any]] = {}
        self.pace = float("inf")  # seconds that the last epoch took
        self.stint_seconds = get_seconds("stint-seconds")
        self.is_watched_passively = all(
            getattr(callback, "is_passive", False) or not hasattr(callback, "on_epoch")
            for callback in runner.callbacks
        )

    def run(self) -> RunResult:
        self._bind()
        try:
            result = self._run_to_end()
        except KeyboardInterrupt as interrupt:
            self.binding.abort()
            if isinstance(interrupt, TerminatedError) and self.runner._stop_asked:
                raise self._stopped(None, "it had no more time for the epoch") from interrupt
            raise
        finally:
            if self.recorder is not None:
                self.recorder.end()
        self._notify("on_finish", result)
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
                    self._notify("on_start", decision, self.limit)
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
                if not self._is_transient(error):
                    raise
                lost = self._survive(error)
        return RunResult(
            epoch=epoch,
            resumed_from=self.resumed_from,
            stopped_by=stopped_by,
            restarts=self.losses.in_all,
            metrics=[self.metrics[key] for key in sorted(self.metrics)],
            saves=[] if self.recorder is None else self.recorder.saves,
            failed_saves=[] if self.recorder is None else self.recorder.failed_saves,
        )

    def _bind(self) -> None:
        self.binding = self.session.bind(
            self.plan,
            wait_seconds=self.runner.worker_wait_seconds,
            can_move=self.recorder is not None,
        )
        for group in self.runner.job.groups.values():
            for task in group.tasks():
                task.session, task.plan = self.session, self.plan

    def _start(self, decision: ResumePlan) -> int:
        """Init or resume; gives the last epoch that is whole in the workspaces."""
        epoch = self.recorded = None
        self.steps_done = 0
        if decision.epoch is not None and self.recorder is not None:
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

    def _load(self, recorder: Recorder, wanted: int) -> int | None:
        """Load `wanted`, or for "latest" the newest epoch that is whole; None if none is."""
        manager = recorder.manager.source()
        damaged: dict[int, str] = {}
        candidates = [epoch for epoch in reversed(manager.epochs()) if epoch <= wanted]
        for epoch in candidates:
            try:
                blobs = resume.required_blobs(self.plan, manager, epoch)
                partitions = {name: nodes for name, (_, nodes) in self.plan.partitions.items()}
                group = manager.load(epoch, blobs=blobs, partitions=partitions)
                self.binding.run_group(group, epoch=epoch)
                manager.report_load(group)
                break
            except CheckpointCorruptError as error:
                if self.policy.resume_from != "latest":
                    raise
                damaged[epoch] = str(error)
                self._warn(
                    f"Epoch {epoch} of {manager.path} is damaged"
                    f"{' and set aside' if manager is recorder.manager else ''}, going back "
                    f"further: {error}"
                )
        else:
            self._warn(f"No recorded epoch of {manager.path} is whole; starting afresh.")
            if manager is recorder.manager:
                recorder.set_aside(damaged)
            return None
        record = manager.record(epoch)
        if self.plan.groups["resume"].slices:
            self._run_group("resume", 0)  # init tasks, with the random numbers they had then
        self.fired = resume.recorded_stops(self.plan, record)
        self.steps_done = resume.steps_done(self.plan, record)
        if manager is recorder.manager:
            recorder.set_aside(damaged)
            recorder.rewind(epoch, f"resumed from epoch {epoch}")
            self.recorded = None if self.steps_done else epoch
        metrics = record["details"].get("metrics", {})
        if self.steps_done:
            self.metrics[epoch] = dict(metrics)
        if manager is not recorder.manager:
            # From now on the run can go on from its own directory, whatever becomes of the other.
            self._save(epoch, metrics, self.steps_done or None)
        return epoch

    def _run_on(self, epoch: int) -> int:
        """Run the next epoch, or several in one go where nothing needs the client in between."""
        count = self._epochs_alone(epoch)
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
            or self.runner._stop_asked
            or self.binding.leaving
            or self.runner.epoch_deadline_seconds is not None
            or self.runner.task_deadline_seconds is not None
            or 4 * self.pace > self.stint_seconds
            or not self.is_watched_passively
        ):
            return 1
        bounds = [MAX_STINT_EPOCHS]
        if self.limit is not None:
            bounds.append(self.limit - epoch + 1)
        if self.recorder is not None and (until := self.recorder.epochs_until(epoch)) is not None:
            bounds.append(until)
        return min(bounds)

    def _run_group(self, group: str, epoch: int) -> None:
        seconds = self.runner.task_deadline_seconds
        self.binding.run(group, epoch=epoch, task_deadline_seconds=seconds)

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
                deadline_seconds=self.runner.epoch_deadline_seconds,
                task_deadline_seconds=self.runner.task_deadline_seconds,
            )
            metrics.update(outcome.metrics)
            if step + 1 < last_step:
                asked = bool(self.runner._stop_asked)
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
        self._notify("on_epoch", epoch, seconds, metrics)

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
            stop_asked=self.runner._stop_asked,
            is_recorded=self.recorder is not None and self.recorded == epoch,
            is_leaving=bool(self.binding.leaving),
            has_room=self._has_room(),
        )

    def _move(self, epoch: int) -> None:
        """Place the nodes anew, with the state that was just recorded: no epoch runs again."""
        who = ", ".join(self.binding.leaving)
        logger.info("Nodes move after epoch %d; leaving: %s", epoch, who or "nobody")
        self._bind_again()
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
        builder = self.runner.upload_task_group_builder
        is_recorded = self.recorded == epoch
        if builder is not None and self.recorder is not None:
            if is_recorded:
                group = builder.build(epoch, self.recorder.manager)
                self.binding.run_group(group, epoch=epoch)
            else:
                self._warn(
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
            self.saved_steps[epoch] = step
            self.recorder.save(epoch, () if step else self.fired, metrics, step)

    def _record(self, epoch: int) -> None:
        """Save an epoch that ended while the client was not asked, if nobody has."""
        if not self.steps_done and self.recorded != epoch:
            self._save(epoch, self.metrics.get(epoch, {}))
            self._settle()

    def _settle(self) -> None:
        if self.recorder is not None:
            self.recorder.settle()

    def _saved(self, report: SaveReport) -> None:
        step = self.saved_steps.pop(report.epoch, None)
        if report.error is None:
            self.losses = self.losses.after_record()
            self.recorded = None if step else report.epoch
        self._notify("on_save", report)

    def _survive(self, error: Loss) -> Loss:
        """Take note of a loss, and wait for a scheduler; raises when that is no use."""
        if self.recorder is not None:
            self.recorder.settle_quietly()
        self.losses = self.losses.after_loss(getattr(error, "running", ()))
        if self.losses.are_too_many:
            suspects = " and ".join(self.losses.suspects)
            named = f" Each time {suspects} was running." if suspects else ""
            raise _with_message(
                error,
                f"{error} That was loss {self.losses.in_a_row} with no epoch recorded in between, "
                f"and max_restarts is {self.losses.limit}.{named} Run the same command again to go "
                f"on from {self._where_to_go_on()}.",
            ) from error
        if self.runner._stop_asked:
            raise self._stopped(None, "a loss ended its epoch") from error
        if isinstance(error, SchedulerLostError) or not self.session.is_connected:
            self._warn(f"{error} Waiting for it to be back.")
            try:
                self.session.reconnect(self.runner.scheduler_wait_seconds)
            except SchedulerLostError as lost:
                raise SchedulerLostError(
                    f"{lost} Run the same command again to go on from {self._where_to_go_on()}."
                ) from error
        return error

    def _is_transient(self, error: TaskFailedError) -> bool:
        """Whether the task that failed had said that such an error passes."""
        group = self.runner.job.groups.get(error.group)
        task = group.find(error.node, error.task) if group is not None else None
        return task is not None and isinstance(error.__cause__, task.transient_errors)

    def _recover(self, error: Loss) -> None:
        """Place the nodes anew after a loss."""
        self._warn(f"{error} Beginning again from {self._where_to_go_on()}.")
        self._bind_again()

    def _bind_again(self) -> None:
        try:
            self._bind()
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
        return resume.plan_resume(self.plan, self.runner.checkpoint_manager, self.policy)

    def _where_to_go_on(self) -> str:
        decision = self._decide()
        return "the start" if decision.epoch is None else f"epoch {decision.epoch}"

    def _stopped(self, epoch: int | None, why: str) -> RunStoppedError:
        """The error that says that the run ended as it was told to."""
        reason = self.runner._stop_asked
        return RunStoppedError(
            f"Job {self.plan.job!r} was told to stop ({reason}) and did so: {why}. Run the same "
            f"command again to go on from {self._where_to_go_on()}.",
            reason=reason,
            epoch=epoch,
        )

    def _warn(self, message: str) -> None:
        logger.warning(message)
        self._notify("on_warning", message)

    def _notify(self, event: str, *args: object) -> None:
        for callback in self.runner.callbacks:
            handle = getattr(callback, event, None)
            if handle is not None:
                handle(*args)


def _check_int(where: str, what: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DefinitionError(f"{where}: {what} is an int from {least} on; got {value!r}.")


def _with_message(error: Loss, message: str) -> Loss:
    told = copy.copy(error)
    told.args = (message,)
    return told
