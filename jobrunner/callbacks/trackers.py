"""Trackers of runs and metrics: one callback, and an adapter for each library."""

from __future__ import annotations

import importlib
import os
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from jobrunner.define import Label, checked
from jobrunner.errors import DefinitionError, RunStoppedError
from jobrunner.run import Callback, JobRunner
from jobrunner.texts import without_credentials

Ending = Literal["finished", "stopped", "failed"]

MOST_METRICS = 1000
"""MLflow takes no more of them at once."""

FLUSH_SECONDS = 1.0
"""How long metrics wait for others on their way to MLflow: short epochs cost no request each."""


@runtime_checkable
class Tracker(Protocol):
    """Where runs and their metrics are shown. `Track` calls it, in the thread of the run."""

    def begin(self, job: str, run_id: str, epoch: int, *, is_new: bool) -> str:
        """Begin a run, or continue one after `epoch`: also the present one, after a loss.

        `run_id` is the id of the run to continue or, if `is_new`, a new one of 32 hexadecimal
        digits. Returns the id by which a later run can continue it: a word of at most 64 characters.
        """

    def log(self, epoch: int, values: Mapping[str, float]) -> None:
        """Take the metrics of an epoch that ended."""

    def flush(self) -> None:
        """Send or write all that was logged: a save begins."""

    def end(self, status: Ending) -> None:
        """End the run."""


@checked
class Track(Callback):
    """Report each epoch to a tracker: its numbers and flags, and its ``seconds``.

    Parameters
    ----------
    tracker : Tracker
        `TensorBoard`, `MLflow`, `WandB`, or an object of your own with these methods.

    Notes
    -----
    The id of the run there is in the record of each epoch: a run that resumes continues the same
    one, and a run that begins with the init group begins another.

    Examples
    --------
    >>> runner = JobRunner(job, manager, callbacks=[Track(TensorBoard("runs/digits"))])
    """

    is_passive = True

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.run_id = ""  # in the tracker
        self._job = ""
        self._has_begun = False

    def on_setup(self, runner: JobRunner) -> None:
        """Note whose run it is."""
        self._job = runner.job.name
        self.run_id = ""

    def state_dict(self) -> Mapping[str, str]:
        """Which run to continue."""
        return {"id": self.run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Note the run of the record, which `on_load` continues, unless one has begun already."""
        recorded = state.get("id")
        is_id = isinstance(recorded, str) and re.fullmatch(r"\w{1,64}", recorded, re.ASCII)
        if is_id and not self.run_id:
            self.run_id = str(recorded)

    def on_load(self, epoch: int, step: int, seconds: float) -> None:
        """Continue the run of the record."""
        self._begin(epoch)

    def on_group(self, group: str, epoch: int, seconds: float) -> None:
        """Begin a run after the init group."""
        if group == "init":
            self._begin(0)

    def _begin(self, epoch: int) -> None:
        is_new = not self.run_id
        run_id = self.run_id or uuid.uuid4().hex
        self.run_id = self.tracker.begin(self._job, run_id, epoch, is_new=is_new)
        self._has_begun = True

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Pass the metrics on."""
        if not self._has_begun:
            return  # it could not begin, which was told
        values = {"seconds": seconds}
        for name, value in metrics.items():
            if isinstance(value, bool | int | float):
                values[name] = float(value)
        self.tracker.log(epoch, values)

    def on_save_start(self, epoch: int, step: int) -> None:
        """Let no record be newer than what was sent."""
        if self._has_begun:
            self.tracker.flush()

    def on_finish(self, result: object) -> None:
        """End the run there."""
        self._end("finished")

    def on_error(self, error: BaseException) -> None:
        """End the run there."""
        if isinstance(error, RunStoppedError | KeyboardInterrupt):
            self._end("stopped")
        else:
            self._end("failed")

    def _end(self, status: Ending) -> None:
        if self._has_begun:
            self._has_begun = False
            self.tracker.end(status)


@checked
class TensorBoard:
    """Write scalars for TensorBoard.

    Parameters
    ----------
    logdir : str or os.PathLike
        Where TensorBoard looks: ``tensorboard --logdir ...``, or a directory within. Give each job
        a directory of its own.

    Raises
    ------
    DefinitionError
        tensorboardX is not installed.

    Notes
    -----
    A run that resumes adds a file, with a mark by which TensorBoard hides the values of epochs that
    run again.
    """

    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        self._library = require("tensorboardX", "tensorboard", "TensorBoard")
        self._logdir = os.fspath(logdir)
        self._writer: Any = None

    def begin(self, job: str, run_id: str, epoch: int, *, is_new: bool) -> str:
        """Begin a file."""
        if self._writer is not None:
            self._writer.close()
        # The library names files by the second; one run may begin several in that time.
        suffix = f".{time.time_ns()}"
        self._writer = self._library.SummaryWriter(
            self._logdir, purge_step=epoch + 1, filename_suffix=suffix
        )
        return run_id

    def log(self, epoch: int, values: Mapping[str, float]) -> None:
        """Write the metrics."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, epoch)

    def flush(self) -> None:
        """Write what waits."""
        self._writer.flush()

    def end(self, status: Ending) -> None:
        """Close the file."""
        self._writer.close()
        self._writer = None


@checked
class MLflow:
    """Track the job as a run of MLflow.

    Parameters
    ----------
    experiment : str
        It is made if there is none.
    tracking_uri : str, optional
        Of a server, a database or a directory; by default what MLflow uses: the environment variable
        ``MLFLOW_TRACKING_URI``.
    params : mapping of str to object, optional
        Parameters of the MLflow run.

    Raises
    ------
    DefinitionError
        MLflow is not installed, or the part of it that uses a database.

    Notes
    -----
    Numbers are sent at the end, at each save, and otherwise once a second. MLflow keeps both values
    of an epoch that ran again.
    """

    def __init__(
        self,
        experiment: Label,
        *,
        tracking_uri: str | None = None,
        params: Mapping[str, object] | None = None,
    ) -> None:
        self._entities = require("mlflow.entities", "mlflow", "MLflow")
        library = require("mlflow", "mlflow", "MLflow")
        try:
            self._client = library.MlflowClient(tracking_uri)
        except library.exceptions.MlflowException as error:
            # mlflow-skinny also has a database as its default, though it cannot use any.
            raise DefinitionError(
                f"MLflow cannot use its tracking_uri: {without_credentials(str(error).strip())} Name a "
                f"server by tracking_uri= or MLFLOW_TRACKING_URI; or install all of mlflow, which "
                f"can use a database."
            ) from error
        self._experiment = experiment
        self._params = dict(params or {})
        self._run_id = ""
        self._waiting: list[Any] = []
        self._sent_at = time.monotonic()

    def begin(self, job: str, run_id: str, epoch: int, *, is_new: bool) -> str:
        """Continue the MLflow run, or make one."""
        if is_new:
            experiment = self._client.get_experiment_by_name(self._experiment)
            if experiment is None:
                number = self._client.create_experiment(self._experiment)
            else:
                number = experiment.experiment_id
            run = self._client.create_run(number, run_name=job)
            run_id = str(run.info.run_id)
            for name, value in self._params.items():
                self._client.log_param(run_id, name, value)
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id = run_id
        return run_id

    def log(self, epoch: int, values: Mapping[str, float]) -> None:
        """Send the metrics, or let them wait for others."""
        now = int(time.time() * 1000)
        for name, value in values.items():
            key = re.sub(r"[^\w\-. /]", "_", name)  # MLflow allows no other characters
            self._waiting.append(self._entities.Metric(key, value, now, epoch))
        is_late = time.monotonic() - self._sent_at >= FLUSH_SECONDS
        if is_late or len(self._waiting) >= MOST_METRICS:
            self.flush()

    def flush(self) -> None:
        """Send the numbers that wait."""
        waiting, self._waiting = self._waiting, []
        self._sent_at = time.monotonic()
        for start in range(0, len(waiting), MOST_METRICS):
            self._client.log_batch(self._run_id, waiting[start : start + MOST_METRICS])

    def end(self, status: Ending) -> None:
        """Say how the run ended."""
        names = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
        try:
            self.flush()
        finally:
            self._client.set_terminated(self._run_id, names[status])


@checked
class WandB:
    """Track the job as a run of Weights & Biases, or of Trackio, which has the same interface.

    Parameters
    ----------
    project : str
    library : "wandb" or "trackio"
    **options
        Other arguments of ``wandb.init`` or ``trackio.init``, such as ``name=`` and ``config=``.

    Raises
    ------
    DefinitionError
        The library is not installed.

    Notes
    -----
    Trackio keeps both values of an epoch that ran again, Weights &
    Biases the first. Trackio writes every half second, so values that a killed process has logged
    since then are missing.
    """

    def __init__(
        self, project: Label, *, library: Literal["wandb", "trackio"] = "wandb", **options: Any
    ) -> None:
        self._library = require(library, library, "WandB")
        self._is_trackio = library == "trackio"
        self._options = {"project": project, **options}
        self._run: Any = None

    def begin(self, job: str, run_id: str, epoch: int, *, is_new: bool) -> str:
        """Begin or continue a run."""
        if self._run is None:
            options = {"name": f"{job}-{run_id[:8]}", **self._options}
            if not self._is_trackio:  # which knows runs by their names alone
                options["id"] = run_id
            self._run = self._library.init(resume="never" if is_new else "allow", **options)
        return run_id

    def log(self, epoch: int, values: Mapping[str, float]) -> None:
        """Log the metrics."""
        self._run.log(dict(values), step=epoch)

    def flush(self) -> None:
        """Do nothing: the library sends in the background."""

    def end(self, status: Ending) -> None:
        """End the run there, as failed if the library knows that."""
        run, self._run = self._run, None
        if self._is_trackio:
            run.finish()
        else:
            run.finish(exit_code=0 if status == "finished" else 1)


def require(module: str, extra: str, user: str) -> Any:
    """Import a library; raises `DefinitionError`, which names the extra, if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DefinitionError(
            f"{user} needs {module}, which cannot be imported here: {error}. Install it with "
            f"`pip install 'dask-jobrunner[{extra}]'`."
        ) from error
