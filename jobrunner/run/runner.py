"""The user's runner; `jobrunner.run.loop` runs the job."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any

from msgspec import structs

from jobrunner.checkpoint import MultiNodeCheckpointManager
from jobrunner.cluster import Binding, Session, UnderWay
from jobrunner.compile import Plan
from jobrunner.define import Blob, Count, Job, Natural, Rule, Seconds, checked
from jobrunner.errors import DefinitionError
from jobrunner.positions import EpochLike
from jobrunner.run.callbacks import check_callbacks, enders
from jobrunner.run.load import load_blobs
from jobrunner.run.loop import Run, tell_finished
from jobrunner.run.matching import Missing, adapt
from jobrunner.run.replay import Replay, ReplayReport
from jobrunner.run.result import ResumePlan, RunResult
from jobrunner.run.resume import RESUME_FROM, Resume, ResumeFrom, ResumeOptions, decide
from jobrunner.run.saver import SaveErrorPolicy
from jobrunner.run.upload import BUILDER, CopyTo, UploadTaskGroupBuilder
from jobrunner.signals import stop_on_signals
from jobrunner.story import show_run
from jobrunner.texts import printable

_Session = Annotated[
    Session, "a Session: Session(client), Session.local() or Session.connect(address)"
]


def _are_blobs(value: Any) -> bool:
    if isinstance(value, str | Blob):
        return True
    return isinstance(value, Sequence) and all(isinstance(blob, str | Blob) for blob in value)


_BLOBS = Rule("names or Blobs", _are_blobs)
_MANAGER = (
    "a MultiNodeCheckpointManager or a CheckpointManager, such as MultiNodeCheckpointManager(path)"
)


@checked
@dataclass(eq=False, repr=False)
class JobRunner:
    """Runs a job: from the start, or from the last recorded epoch.

    Parameters
    ----------
    job : Job
    checkpoint_manager : MultiNodeCheckpointManager or CheckpointManager, optional
        Without one, nothing is saved.
    resume_from_epoch : "latest", EpochLike or None
        ``"latest"``: resume from the last recorded epoch; start if there is none. An int: resume
        from that epoch or fail. A `Position`, which may be written ``(4, 200)`` or ``"4.s200"``:
        resume from that checkpoint in the middle of an epoch. ``"best:loss"``: resume from the epoch
        with the lowest loss, ``"best:accuracy:max"``: from that with the highest accuracy. None: start
        afresh, and set recorded epochs aside without deleting them.
    upload_task_group_builder : UploadTaskGroupBuilder, optional
        Makes the group that runs after the last epoch, before the download group.
    max_restarts : int
        How many losses in a row, with no epoch recorded in between, the run recovers from. After
        each it begins again from the last recorded epoch; without a manager, from init.
    on_save_error : "warn", "refuse" or "raise"
        What to do when a save fails. ``"warn"``: continue, and try again at the next save, until
        three saves in a row and for ten minutes have failed.
        ``"refuse"``: the same, but do not start if the directory is not writable. ``"raise"``: end
        the run. A blob that cannot be encoded, a directory that another run took over and a
        changed plan always end the run.
    worker_wait_seconds : float
        How long to wait for enough workers for the nodes.
    wanted_workers : int, optional
        Ask a cluster that adapts to its load for so many workers, but for no more than there are nodes. The
        run begins with those that there are, and nodes move to those that join later.
    scheduler_wait_seconds : float
        How long to wait until a lost scheduler is back at its address.
    epoch_deadline_seconds : float, optional
        Longest time one run of the epoch group may take. The error names the tasks that run.
    grace_seconds : float, optional
        How long the run may take after SIGTERM to end and record its epoch. None: no limit.
    num_epochs : int, optional
        Stop after that many epochs in all, like `epoch_limiter`.
    callbacks : sequence of Callback
        Objects with any of the methods of `Callback`. Each event calls them in this order.
    rename : mapping of str to str, optional
        What has another name now than in the checkpoint: ``{"old": "new"}`` for nodes,
        ``{"node/old": "node/new"}`` for blobs, ``{"*/old": "*/new"}`` for blobs of every node. In
        the old name of a blob, the node has its old name too. Means nothing for checkpoints of runs
        that were given it.
    missing : "error" or "init"
        What to do about nodes and blobs that the checkpoint lacks. ``"init"``: run the init tasks
        that make them, and what these need.

    Raises
    ------
    DefinitionError
        An argument is invalid.
    """

    job: Job
    checkpoint_manager: Annotated[MultiNodeCheckpointManager, _MANAGER] | None = None
    resume_from_epoch: Annotated[ResumeFrom, RESUME_FROM] = "latest"
    upload_task_group_builder: Annotated[UploadTaskGroupBuilder, BUILDER] | None = None
    _: KW_ONLY
    max_restarts: Natural = 3
    on_save_error: SaveErrorPolicy = "warn"
    worker_wait_seconds: Seconds = 60
    wanted_workers: Natural = 0
    scheduler_wait_seconds: Seconds = 60
    epoch_deadline_seconds: Seconds | None = None
    grace_seconds: Seconds | None = None
    num_epochs: Count | None = None
    callbacks: Annotated[Sequence[object], "a list of callbacks"] = ()
    rename: Annotated[Mapping[str, str], "a mapping of old names to new ones (str)"] | None = None
    missing: Missing = "error"

    def __post_init__(self) -> None:
        self._check_options()
        self.callbacks = tuple(self.callbacks)
        self.adaptation = adapt(self.rename, self.missing, self.job)
        self.stop_reason = ""  # why to stop after the epoch; empty: not asked
        self.save_asked = threading.Event()  # to save after the current step
        self._run: Run | None = None

    def __repr__(self) -> str:
        saves = "" if self.checkpoint_manager is None else f" with {self.checkpoint_manager!r}"
        return printable(f"<JobRunner of job {self.job.name!r}{saves}>", kept="")

    def plan_resume(self) -> ResumePlan:
        """Say what `run` would do and why, without running or writing anything.

        Raises
        ------
        DefinitionError
            The job cannot run.
        CheckpointError
            The checkpoint to resume from is missing or does not fit the job.

        Notes
        -----
        Runs on the client; needs no cluster. Only `run` finds out whether the stores are whole.
        """
        return self._decide().in_words()

    @checked
    def run(self, session: _Session, *, progress: bool | None = None) -> RunResult:
        """Run the job to its end.

        Parameters
        ----------
        session : Session
            The run replaces its workspaces, which stay for `Session.fetch` after the run.
        progress : bool, optional
            Show the run while it runs: in a notebook, on a terminal, or as lines on stderr. By
            default, only in a notebook and on a terminal.

        Returns
        -------
        RunResult

        Raises
        ------
        DefinitionError, PlacementError
            Before anything has run.
        TaskFailedError
            A task raised. The next run resumes from the last recorded epoch.
        NodeLostError, SchedulerLostError
            A worker or the scheduler was lost more often than `max_restarts` allows, or the
            scheduler did not come back in time.
        RunStoppedError
            `stop`, Ctrl-C or SIGTERM stopped the run. Its last epoch has ended and is recorded, unless
            `grace_seconds` were over before.
        CheckpointError
            State could not be loaded, or with ``on_save_error="raise"`` not saved.

        Notes
        -----
        Runs on the client. *Safe to retry*: run again to resume from the last recorded epoch.
        In the main thread, the first Ctrl-C or SIGTERM ends the run after its epoch. The second,
        or for SIGTERM the end of `grace_seconds`, stops the tasks at once with
        `KeyboardInterrupt`; the last recorded epoch stays.
        """
        began = time.monotonic()
        resume = self._decide()  # its errors come before anything is bound or written
        self.stop_reason = ""
        with session.exclusive(f"Job {self.job.name!r}"), show_run(progress, session) as views:
            self._run = Run(self, session, began, resume, views)
            try:
                with stop_on_signals(self._ask_to_stop, self.grace_seconds):
                    return self._run.run()
            finally:
                self._run = None

    @property
    def binding(self) -> Binding | None:
        """The nodes on their workers, for views of the run; None before and after it."""
        return getattr(self._run, "binding", None)

    def result_if_finished(self) -> RunResult | None:
        """The result of a job that has finished, exit group included; None if something is left.

        A run of such a job would only load its last epoch. Callbacks hear that it begins and ends.
        None also if a store of that epoch is gone: a run would find it, and repeat the epoch. Runs
        on the client; needs no cluster. Raises what `plan_resume` does.
        """
        resume = self._decide()
        return tell_finished(self, resume) if resume.is_over() else None

    def under_way(self) -> UnderWay | None:
        """Say what runs on the workers now: the group, its epoch, its tasks, and for how long.

        None if no group runs. Workers reported the tasks a few seconds ago at most. Runs on the
        client, in any thread, and returns at once.
        """
        binding = self.binding  # which another thread may drop
        return None if binding is None else binding.under_way

    @checked
    def stop(self, reason: str = "JobRunner.stop") -> None:
        """Ask the run to end once its epoch has ended and is recorded.

        Parameters
        ----------
        reason : str
            Why, or who asks; part of the `RunStoppedError` that ends the run.

        Notes
        -----
        Runs on the client, in any thread or callback, and returns at once. A job with several
        steps per epoch is saved and stops after the current step; one whose epochs have no
        known length stops there in any case.
        """
        self.stop_reason = reason or "JobRunner.stop"

    def save_now(self) -> None:
        """Ask the run to save when the current step ends, whatever its policy says.

        Notes
        -----
        Runs on the client, in any thread or signal handler, and returns at once. To ask
        `jobrunner run` for the same from outside, send it SIGUSR1.
        """
        self.save_asked.set()

    def wait_for_saves(self) -> None:
        """Wait until all epochs that have ended and are due are recorded, or could not be.

        Notes
        -----
        For callbacks that read the checkpoint while epochs are saved in the background, and for other
        threads. `Callback.on_save` is called afterwards. Returns at once if nothing runs.
        """
        run = self._run
        if run is not None:
            run.saver.wait_unreported()

    @checked
    def replay(self, session: _Session, epoch: EpochLike) -> ReplayReport:
        """Run a recorded epoch again from the one before it, and compare the result.

        Parameters
        ----------
        session : Session
            The replay replaces its workspaces.
        epoch : EpochLike

        Returns
        -------
        ReplayReport
            Each blob that differs in any bit, with the tasks that write it.

        Raises
        ------
        DefinitionError, PlacementError
            Before anything has run.
        CheckpointNotFoundError
            The epoch is not recorded.
        CheckpointCorruptError
            This epoch, or the one to begin from, is damaged.
        PlanMismatchError
            The checkpoint lacks nodes or blobs of the job.
        TaskFailedError, NodeLostError
            See `run`; a replay does not recover from losses.

        Notes
        -----
        Runs on the client. Begins with the newest epoch recorded before this one, or with the init
        group, and runs all epochs in between. Writes nothing to the checkpoint directory, but tasks
        repeat their side effects. *Safe to retry*: yes.
        """
        directory = self._manager("replay").directory
        replay = Replay(
            self.job,
            directory,
            directory.resolve(epoch),
            adaptation=self.adaptation,
            wait_seconds=self.worker_wait_seconds,
            deadline_seconds=self.epoch_deadline_seconds,
        )
        replay.check()
        return replay.run(session)

    @checked
    def load_blobs_from_checkpoints(
        self,
        blob_names: Annotated[Sequence[str | Blob], _BLOBS],
        epoch: EpochLike,
        session: _Session,
    ) -> bool:
        """Load only some blobs of an epoch into the session's workspaces.

        Parameters
        ----------
        blob_names : sequence of str or Blob
            A name stands for that blob of every checkpointed node that has it, a `Blob` for the
            blob of its node. The state of an object is loaded into the object in the workspace.
        epoch : EpochLike
        session : Session

        Returns
        -------
        bool
            False if the epoch is not recorded.

        Raises
        ------
        DefinitionError
            An argument is invalid.
        BlobNotFoundError
            No checkpointed node has the blob.
        CheckpointCorruptError
            A store is damaged. No blob was loaded.
        """
        directory = self._manager("load_blobs_from_checkpoints").directory
        snapshot = directory.snapshot()
        at = directory.resolve(epoch, snapshot)
        if at not in snapshot.recorded:
            return False
        load_blobs(directory, at, blob_names, session, self.adaptation.rename)
        return True

    def _manager(self, method: str) -> MultiNodeCheckpointManager:
        if self.checkpoint_manager is None:
            raise DefinitionError(
                f"JobRunner of job {self.job.name!r} has no checkpoint_manager, so {method} has "
                f"nothing to read."
            )
        return self.checkpoint_manager

    def _check_options(self) -> None:
        """Raise `DefinitionError` for callbacks that are none, and options that need a manager."""
        where = f"JobRunner of job {self.job.name!r}"
        manager, builder = self.checkpoint_manager, self.upload_task_group_builder
        check_callbacks(self.callbacks, where)
        if manager is None:
            for name, is_given in (
                ("resume_from_epoch", self.resume_from_epoch not in (None, "latest")),
                ("upload_task_group_builder", builder is not None),
                ("rename", bool(self.rename)),
                ("missing='init'", self.missing == "init"),
            ):
                if is_given:
                    raise DefinitionError(f"{where}: {name} requires a checkpoint_manager.")
        elif isinstance(builder, CopyTo):
            builder.check(manager)

    def _decide(self) -> Resume:
        """Decide where a run would begin; raises what `plan_resume` does."""
        plan, options = self._compile(), self.resume_options()
        return decide(options, plan, options.snapshot())

    def resume_options(self) -> ResumeOptions:
        """What says where a run begins, and what of that has no effect."""
        limit, warnings = self.job.epoch_limit, []
        if self.num_epochs is not None and limit is not None and self.num_epochs > limit:
            warnings.append(
                f"Job {self.job.name!r} ends at epoch {limit}, the limit that epoch_limiter sets in "
                f"its definition. num_epochs={self.num_epochs} (--epochs) can only end a run earlier. "
                f"To run more epochs, raise the limit of the job."
            )
        return ResumeOptions(
            self.job,
            self.checkpoint_manager,
            self.resume_from_epoch,
            self.adaptation,
            tuple(warnings),
        )

    def _compile(self) -> Plan:
        job = self.job
        # Check before the groups are compiled, so that the user can still add a condition.
        limits = [n for n in (job.epoch_limit, self.num_epochs) if n is not None]
        ends = enders(self.callbacks)
        if not (job.stop_conditions or limits or ends):
            raise DefinitionError(
                f"Job {job.name!r} has no stop condition and no epoch limit, so it would never "
                f"end. Add one: job.add_stop_condition(...), epoch_limiter(job, n), or a limit for "
                f"this run, JobRunner(..., num_epochs=n) or --epochs n."
            )
        plan = job.compile()
        return structs.replace(plan, epoch_limit=min(limits, default=None), enders=ends)

    def _ask_to_stop(self, signal_name: str) -> None:
        self.stop(signal_name)
        second_signal = "Ctrl-C again" if signal_name == "SIGINT" else "the same signal again"
        if self._run is not None:
            self._run.callbacks.notify("on_stop_asked", signal_name, second_signal)
