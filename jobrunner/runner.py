"""6 loop: init or resume, then epochs, then upload, download and exit."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from jobrunner import resume
from jobrunner.checkpoint import MultiNodeCheckpointManager
from jobrunner.config import get_seconds
from jobrunner.errors import (
    BlobNotFoundError,
    CheckpointCorruptError,
    DefinitionError,
    NodeLostError,
)
from jobrunner.job import Job
from jobrunner.node import Blob
from jobrunner.plan import Plan
from jobrunner.recorder import Recorder
from jobrunner.result import ResumePlan, RunResult, SaveReport
from jobrunner.session import GroupResult, Session
from jobrunner.upload import UploadTaskGroupBuilder

logger = logging.getLogger("jobrunner.runner")

MAX_STINT_EPOCHS = 10_000
"""So that what workers keep for the client stays small."""

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
    epoch_deadline_seconds : float, optional
        Longest time one run of the epoch group may take.
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
        epoch_deadline_seconds: float | None = None,
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
            ("epoch_deadline_seconds", epoch_deadline_seconds),
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
        self.epoch_deadline_seconds = epoch_deadline_seconds
        self.num_epochs = num_epochs
        self.callbacks = tuple(callbacks)
        self._save_now = threading.Event()

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
        NodeLostError
            A worker was lost, more often than `max_restarts` allows.
        CheckpointError
            State could not be loaded, or not saved and `on_save_error` is "raise".

        Notes
        -----
        Runs on the client. *Safe to retry*: run again, it goes on from the last recorded epoch.
        Ctrl-C stops the tasks on the workers and leaves the last recorded epoch as it is.
        """
        plan = self._compile()
        resume.plan_resume(plan, self.checkpoint_manager, self._policy())
        with session.exclusive(f"Job {plan.job!r}"):
            return _Run(self, plan, session).run()

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
        self.restarts = 0
        self.restarts_in_a_row = 0
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
            if self.recorder is not None:
                self.recorder.start(self.binding)
            decision = resume.plan_resume(self.plan, self.runner.checkpoint_manager, self.policy)
            self._notify("on_start", decision, self.limit)
            result = self._run_from(decision)
        except KeyboardInterrupt:
            self.binding.abort()
            raise
        finally:
            if self.recorder is not None:
                self.recorder.end()
        self._notify("on_finish", result)
        return result

    def _run_from(self, decision: ResumePlan) -> RunResult:
        while True:
            try:
                epoch = self._start(decision)
                while not (stopped_by := self._stopped_by(epoch)):
                    epoch = self._run_on(epoch + 1)
                if not decision.is_finished:
                    self._finish(epoch)
                break
            except NodeLostError as error:
                decision = self._recover(error)
        return RunResult(
            epoch=epoch,
            resumed_from=self.resumed_from,
            stopped_by=stopped_by,
            restarts=self.restarts,
            metrics=[self.metrics[key] for key in sorted(self.metrics)],
            saves=[] if self.recorder is None else self.recorder.saves,
            failed_saves=[] if self.recorder is None else self.recorder.failed_saves,
        )

    def _bind(self) -> None:
        self.binding = self.session.bind(self.plan, wait_seconds=self.runner.worker_wait_seconds)
        for group in self.runner.job.groups.values():
            for task in group.tasks():
                task.session = self.session

    def _start(self, decision: ResumePlan) -> int:
        """Init or resume; gives the last epoch that is whole in the workspaces."""
        epoch = None
        self.steps_done = 0
        if decision.epoch is not None and self.recorder is not None:
            epoch = self._load(self.recorder, decision.epoch)
        if not self.restarts:
            self.resumed_from = epoch
        if epoch is None:
            if self.recorder is not None:
                self.recorder.rewind(None, "started afresh")
            self.binding.run("init", epoch=0)
            self.fired = ()
            self._save(0, {})
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
                group = manager.load(epoch, blobs=blobs)
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
        if manager is recorder.manager:
            recorder.set_aside(damaged)
            recorder.rewind(epoch, f"resumed from epoch {epoch}")
        if self.plan.groups["resume"].slices:
            self.binding.run("resume", epoch=epoch)
        self.fired = resume.recorded_stops(self.plan, record)
        self.steps_done = resume.steps_done(self.plan, record)
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

        def ended(epoch: int, result: GroupResult) -> None:
            nonlocal last
            last = epoch
            self.fired, self.pace = result.stopped, result.seconds
            self.metrics[epoch] = {**result.metrics, "epoch": epoch}
            self._notify("on_epoch", epoch, result.seconds, result.metrics)

        self.binding.run_epochs(epoch, count, self.stint_seconds, ended)
        return last

    def _epochs_alone(self, epoch: int) -> int:
        """How many epochs, from `epoch` on, the workers may run without asking in between."""
        if (
            self.recorder is not None  # which has a say after every epoch
            or self.runner.epoch_deadline_seconds is not None
            or 4 * self.pace > self.stint_seconds
            or not self.is_watched_passively
        ):
            return 1
        left = MAX_STINT_EPOCHS if self.limit is None else self.limit - epoch + 1
        return min(left, MAX_STINT_EPOCHS)

    def _run_epoch(self, epoch: int) -> int:
        started = time.monotonic()
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
            )
            metrics.update(outcome.metrics)
            if step + 1 < last_step and self._is_due(epoch, step + 1):
                self._save(epoch, metrics, step + 1)
        self.fired = outcome.stopped
        self.metrics[epoch] = {**metrics, "epoch": epoch}
        self.pace = time.monotonic() - started
        self._notify("on_epoch", epoch, self.pace, metrics)
        if self._is_due(epoch, last_step) or self._stopped_by(epoch):
            self._save(epoch, metrics)
        return epoch

    def _is_due(self, epoch: int, step: int) -> bool:
        return self.recorder is not None and self.recorder.is_due(epoch, step)

    def _stopped_by(self, epoch: int) -> str:
        if self.steps_done:  # an epoch that was begun is ended, whatever the limit is now
            return ""
        if self.fired:
            return self.fired[0]
        return "epoch_limiter" if self.limit is not None and epoch >= self.limit else ""

    def _finish(self, epoch: int) -> None:
        if self.recorder is not None:
            self.recorder.settle()
        builder, manager = self.runner.upload_task_group_builder, self.runner.checkpoint_manager
        if builder is not None and manager is not None:
            self.binding.run_group(builder.build(epoch, manager), epoch=epoch)
        self.binding.run("download", epoch=epoch)
        self.binding.run("exit", epoch=epoch)
        if self.recorder is not None:
            self.recorder.finish(epoch)

    def _save(self, epoch: int, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if self.recorder is not None:
            self.recorder.save(epoch, () if step else self.fired, metrics, step)

    def _saved(self, report: SaveReport) -> None:
        if report.error is None:
            self.restarts_in_a_row = 0
        self._notify("on_save", report)

    def _recover(self, error: NodeLostError) -> ResumePlan:
        """Place the nodes anew after a loss; gives where to begin again from."""
        manager = self.runner.checkpoint_manager
        if self.recorder is not None:
            self.recorder.settle_quietly()
        decision = resume.plan_resume(self.plan, manager, self.policy)
        start = "the start" if decision.epoch is None else f"epoch {decision.epoch}"
        if self.restarts_in_a_row >= self.runner.max_restarts:
            raise NodeLostError(
                f"{error} That was loss {self.restarts_in_a_row + 1} with no epoch recorded in "
                f"between, and max_restarts is {self.runner.max_restarts}. Run the same command "
                f"again to go on from {start}.",
                nodes=error.nodes,
                worker=error.worker,
                epoch=error.epoch,
            ) from error
        self.restarts += 1
        self.restarts_in_a_row += 1
        self._warn(f"{error} Beginning again from {start}.")
        self._bind()
        if self.recorder is not None:
            self.recorder.attach(self.binding)
        return decision

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
