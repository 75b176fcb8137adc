"""Runs and metrics for MLflow."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from jobrunner.callbacks.metrics import MAPPING, images, known_id, numbers, require
from jobrunner.define import LABEL, TEXT, checked
from jobrunner.errors import RunStoppedError
from jobrunner.run import Callback, JobRunner
from jobrunner.texts import get_logger

logger = get_logger(__name__)

MOST_METRICS = 1000
"""MLflow takes no more of them at once."""

FLUSH_SECONDS = 1.0
"""How long metrics may wait for others, so that short epochs cost no request each."""


@checked(experiment=LABEL, run_name=LABEL, tracking_uri=TEXT, params=MAPPING)
class MLflow(Callback):
    """Track the job as a run of MLflow, with the numbers and images of each epoch.

    Parameters
    ----------
    experiment : str
        It is made if there is none.
    run_name : str, optional
        By default the name of the job.
    tracking_uri : str, optional
        Of a server, a database or a directory; by default what MLflow uses: the environment variable
        ``MLFLOW_TRACKING_URI``.
    params : mapping of str to object, optional
        Parameters of the MLflow run.

    Raises
    ------
    DefinitionError
        MLflow is not installed.

    Notes
    -----
    A run that resumes continues the same MLflow run, whose id is part of the record of each epoch;
    one that begins with the init group begins another. MLflow keeps both values of an epoch that
    ran again. Metrics are sent at the end, at each save, and otherwise every second.

    Examples
    --------
    >>> runner = JobRunner(job, manager, callbacks=[MLflow("digits", params={"lr": 0.1})])
    """

    is_passive = True

    def __init__(
        self,
        experiment: str,
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        params: Mapping[str, object] | None = None,
    ) -> None:
        self._entities = require("mlflow.entities", "mlflow", "MLflow")
        self._client = require("mlflow", "mlflow", "MLflow").MlflowClient(tracking_uri)
        self._experiment, self._run_name = experiment, run_name
        self._params = dict(params or {})
        self._job = ""
        self._waiting: list[Any] = []
        self._sent_at = time.monotonic()
        self.run_id: str | None = None
        self._before: str | None = None  # what the loaded record says, also if it did not answer

    def state_dict(self) -> Mapping[str, str | None]:
        """Which MLflow run to continue."""
        return {"id": self.run_id or self._before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the MLflow run of the record, or begin one."""
        self._send()
        self._before = before = known_id(state)
        if before is not None and self._continue(before):
            self.run_id = before
        elif before is not None or self.run_id is None:
            self.run_id = self._begin()

    def on_setup(self, runner: JobRunner) -> None:
        """Note whose run it is."""
        self._job, self.run_id = runner.job.name, None

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Send the metrics, or let them wait for others."""
        now = int(time.time() * 1000)
        for name, value in numbers(seconds, metrics).items():
            self._waiting.append(self._entities.Metric(_key(name), value, now, epoch))
        if self.run_id is not None:
            for name, pixels in images(metrics).items():
                self._client.log_image(self.run_id, pixels, key=_key(name), step=epoch)
        is_late = time.monotonic() - self._sent_at >= FLUSH_SECONDS
        if is_late or len(self._waiting) >= MOST_METRICS:
            self._send()

    def on_save_start(self, epoch: int, step: int) -> None:
        """Let no record be newer than what was sent."""
        self._send()

    def on_finish(self, result: object) -> None:
        """Mark the MLflow run as finished."""
        self._end("FINISHED")

    def on_error(self, error: BaseException) -> None:
        """Mark the MLflow run as failed, or as killed if somebody stopped it."""
        is_stopped = isinstance(error, RunStoppedError | KeyboardInterrupt)
        self._end("KILLED" if is_stopped else "FAILED")

    def _continue(self, run_id: str) -> bool:
        try:
            self._client.update_run(run_id, status="RUNNING")
        except Exception as error:
            logger.warning("MLflow run %s cannot be continued: %s. Another begins.", run_id, error)
            return False
        return True

    def _begin(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            self._client.create_experiment(self._experiment)
            if found is None
            else found.experiment_id
        )
        run = self._client.create_run(experiment, run_name=self._run_name or self._job)
        run_id = str(run.info.run_id)
        for name, value in self._params.items():
            self._client.log_param(run_id, name, value)
        return run_id

    def _send(self) -> None:
        waiting, self._waiting, self._sent_at = self._waiting, [], time.monotonic()
        if self.run_id is None:
            return  # none could be begun, which was told
        for start in range(0, len(waiting), MOST_METRICS):
            self._client.log_batch(self.run_id, waiting[start : start + MOST_METRICS])

    def _end(self, status: str) -> None:
        if self.run_id is not None:
            try:
                self._send()
            finally:
                self._client.set_terminated(self.run_id, status)


def _key(name: str) -> str:
    """A name that MLflow allows."""
    return re.sub(r"[^\w\-. /]", "_", name)
