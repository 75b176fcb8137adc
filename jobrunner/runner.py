"""6 loop: init or resume, then epochs, then upload, download and exit."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from jobrunner import resume
from jobrunner.checkpoint import MultiNodeCheckpointManager
from jobrunner.errors import (
    BlobNotFoundError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointWriteError,
    CommitConflictError,
    DefinitionError,
    NodeLostError,
)
from jobrunner.fingerprint import describe
from jobrunner.job import Job
from jobrunner.node import Blob
from jobrunner.plan import Plan
from jobrunner.result import NodeSave, ResumePlan, RunResult, SaveReport
from jobrunner.session import Binding, Session
from jobrunner.upload import UploadTaskGroupBuilder

logger = logging.getLogger("jobrunner.runner")

ResumeFrom = int | Literal["latest"] | None


class Callback(Protocol):
    """What a runner tells while it runs; an object may have any of these methods.

    They run on the client, between epochs; what one raises ends the run.
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
        return _Run(self, plan, session).run()

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
        session.run(manager.load(epoch, blobs=wanted))
        return True

    def _compile(self) -> Plan:
        plan = self.job.compile()
        if not plan.groups["epoch"].conditions and self._epoch_limit(plan) is None:
            raise DefinitionError(
                f"Job {plan.job!r} has no stop condition and no epoch limit, so it would never "
                f"end. Add one: job.add_stop_condition(...), epoch_limiter(job, n), or num_epochs="
            )
        return plan

    def _policy(self) -> resume.Policy:
        return resume.Policy(self.resume_from_epoch, self.num_epochs)

    def _epoch_limit(self, plan: Plan) -> int | None:
        return self._policy().epoch_limit(plan)


class _Run:
    """One call of `JobRunner.run`: the loop and what it gathers."""

    def __init__(self, runner: JobRunner, plan: Plan, session: Session) -> None:
        self.runner = runner
        self.manager = runner.checkpoint_manager
        self.plan = plan
        self.session = session
        self.binding: Binding
        self.policy = runner._policy()
        self.limit = self.policy.epoch_limit(plan)
        self.is_recording = False
        self.fired: tuple[str, ...] = ()
        self.restarts = 0
        self.restarts_in_a_row = 0
        self.resumed_from: int | None = None
        self.metrics: dict[int, dict[str, Any]] = {}
        self.saves: list[SaveReport] = []
        self.failed_saves: list[SaveReport] = []

    def run(self) -> RunResult:
        self._bind()
        try:
            with self._recording():
                decision = resume.plan_resume(self.plan, self.manager, self.policy)
                self._notify("on_start", decision, self.limit)
                result = self._run_from(decision)
        except KeyboardInterrupt:
            self.binding.abort()
            raise
        self._notify("on_finish", result)
        return result

    def _run_from(self, decision: ResumePlan) -> RunResult:
        while True:
            try:
                epoch = self._init() if decision.epoch is None else self._resume(decision)
                while not (stopped_by := self._stopped_by(epoch)):
                    epoch = self._run_epoch(epoch + 1)
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
            saves=self.saves,
            failed_saves=self.failed_saves,
        )

    # ---- the stages

    def _bind(self) -> None:
        self.binding = self.session.bind(self.plan, wait_seconds=self.runner.worker_wait_seconds)

    def _init(self) -> int:
        self.fired = ()
        if self.manager is not None and self.is_recording and self.manager.epochs():
            self.manager.rewind(None, "started afresh")
        self.binding.run("init", epoch=0)
        self._save(0, {})
        return 0

    def _resume(self, decision: ResumePlan) -> int:
        assert self.manager is not None and decision.epoch is not None
        damaged: dict[int, str] = {}
        epoch = decision.epoch
        while True:
            try:
                blobs = resume.required_blobs(self.plan, self.manager, epoch)
                self.binding.run_group(self.manager.load(epoch, blobs=blobs), epoch=epoch)
                break
            except CheckpointCorruptError as error:
                if self.policy.resume_from != "latest":
                    raise
                damaged[epoch] = str(error)
                older = [e for e in self.manager.epochs() if e < epoch]
                self._warn(
                    f"Epoch {epoch} of {self.manager.path} is damaged and set aside: {error} "
                    + (f"Falling back to epoch {older[-1]}." if older else "Starting afresh.")
                )
                if not older:
                    self._set_aside(damaged)
                    return self._init()
                epoch = older[-1]
        self._set_aside(damaged)
        if self.is_recording and self.manager.latest() != epoch:
            self.manager.rewind(epoch, f"resumed from epoch {epoch}")
        if self.plan.groups["resume"].slices:
            self.binding.run("resume", epoch=epoch)
        if self.resumed_from is None and not self.metrics:
            self.resumed_from = epoch
        self.fired = resume.recorded_stops(self.plan, self.manager.record(epoch))
        return epoch

    def _run_epoch(self, epoch: int) -> int:
        started = time.monotonic()
        metrics: dict[str, Any] = {}
        for step in range(self.plan.steps_per_epoch):
            outcome = self.binding.run(
                "epoch",
                epoch=epoch,
                step=step,
                deadline_seconds=self.runner.epoch_deadline_seconds,
            )
            metrics.update(outcome.metrics)
            self.fired = outcome.stopped
        seconds = time.monotonic() - started
        self.metrics[epoch] = {**metrics, "epoch": epoch}
        self._notify("on_epoch", epoch, seconds, metrics)
        self._save(epoch, metrics)
        return epoch

    def _stopped_by(self, epoch: int) -> str:
        if self.fired:
            return self.fired[0]
        return "epoch_limiter" if self.limit is not None and epoch >= self.limit else ""

    def _finish(self, epoch: int) -> None:
        builder = self.runner.upload_task_group_builder
        if builder is not None:
            assert self.manager is not None
            self.binding.run_group(builder.build(epoch, self.manager), epoch=epoch)
        self.binding.run("download", epoch=epoch)
        self.binding.run("exit", epoch=epoch)
        if self.manager is not None and self.is_recording and self.manager.latest() == epoch:
            self.manager.finish(epoch)

    def _recover(self, error: NodeLostError) -> ResumePlan:
        """Begin again after a lost worker; gives where from."""
        latest = self.manager.latest() if self.manager is not None and self.is_recording else None
        where = f"epoch {latest} of {self.manager.path}" if latest is not None else "the start"  # type: ignore[union-attr]
        if self.restarts_in_a_row >= self.runner.max_restarts:
            raise NodeLostError(
                f"{error} Lost workers {self.restarts_in_a_row + 1} times with no epoch recorded "
                f"in between (max_restarts={self.runner.max_restarts}). Run the same command "
                f"again to go on from {where}.",
                nodes=error.nodes,
                worker=error.worker,
                epoch=error.epoch,
            ) from error
        self.restarts += 1
        self.restarts_in_a_row += 1
        self._warn(f"{error} Beginning again from {where}.")
        self._bind()
        # The user's choice of an epoch held for the start; now only what this run recorded counts.
        self.policy = resume.Policy("latest", self.policy.num_epochs)
        return ResumePlan(latest, "a worker was lost")

    # ---- recording

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Hold the checkpoint directory for the run."""
        if self.manager is None:
            yield
            return
        try:
            self._start_recording()
            yield
        finally:
            if self.is_recording:
                self.manager.end_run()

    def _start_recording(self) -> None:
        assert self.manager is not None
        before = self.manager.epochs()
        try:
            self.manager.start_run(self.plan.checkpointed, {"plan": describe(self.plan)})
        except CheckpointWriteError as error:
            if before or self.runner.on_save_error == "raise":
                raise
            self._warn(f"{error} The job runs all the same; saving is tried again at each epoch.")
            return
        self.is_recording = True
        self.manager.check_probe(self.binding.apply(self.manager.probe()))

    def _save(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        if self.manager is None:
            return
        started = time.monotonic()
        nodes: dict[str, NodeSave] = {}
        error: CheckpointWriteError | None = None
        try:
            self._write(epoch, metrics, nodes)
        except CheckpointWriteError as caught:
            error = caught
        seconds = time.monotonic() - started
        report = SaveReport(
            epoch=epoch,
            seconds=seconds,
            stall_seconds=seconds,
            nbytes=sum(node.nbytes for node in nodes.values()),
            nodes=nodes,
            error=None if error is None else str(error),
        )
        (self.saves if error is None else self.failed_saves).append(report)
        self._notify("on_save", report)
        if error is None:
            self.restarts_in_a_row = 0
            return
        if self.runner.on_save_error == "raise":
            raise error
        self._warn(f"Epoch {epoch} was not saved: {error}")

    def _write(self, epoch: int, metrics: Mapping[str, Any], nodes: dict[str, NodeSave]) -> None:
        assert self.manager is not None
        if not self.is_recording:
            self.manager.start_run(self.plan.checkpointed, {"plan": describe(self.plan)})
            self.is_recording = True
            if self.manager.epochs():
                raise CommitConflictError(
                    f"{self.manager.path} could not be written when this run began, and now holds "
                    f"epochs of another run. Choose another directory, or run again to go on from "
                    f"them."
                )
            self.manager.check_probe(self.binding.apply(self.manager.probe()))
        order = self.manager.begin(epoch)
        try:
            receipts: dict[str, Any] = {}
            for answer in self.binding.apply(order).values():
                receipts.update(answer)
            self.manager.commit(
                order,
                receipts,
                {
                    "stopped_by": list(self.fired),
                    "metrics": dict(metrics),
                    "placement": dict(self.binding.placement),
                },
            )
        except CheckpointWriteError:
            self.manager.abandon(order)
            raise
        for node, receipt in receipts.items():
            nodes[node] = NodeSave(receipt.seconds, receipt.nbytes)

    def _set_aside(self, damaged: Mapping[int, str]) -> None:
        if self.manager is not None and self.is_recording:
            for epoch, reason in damaged.items():
                self.manager.set_aside(epoch, reason)

    # ---- telling

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
