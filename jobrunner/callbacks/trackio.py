"""Runs and metrics for Trackio, and for Weights & Biases, which has the same interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from jobrunner.callbacks.metrics import MAPPING, arrays, images, known_id, new_id, numbers, require
from jobrunner.define import LABEL, checked, one_of
from jobrunner.run import Callback, JobRunner


@checked(project=LABEL, name=LABEL, config=MAPPING, library=one_of("trackio", "wandb"))
class Trackio(Callback):
    """Track the job as a run of Trackio, with the metrics of each epoch but strings.

    Arrays are shown as histograms.

    Parameters
    ----------
    project : str
    name : str, optional
        Of the run there; by default the name of the job and an id.
    config : mapping, optional
        What to show as the configuration of the run.
    library : "trackio" or "wandb"
        ``"wandb"``: track with Weights & Biases.
    **options
        Other arguments of `trackio.init` or `wandb.init`.

    Raises
    ------
    DefinitionError
        The library is not installed.

    Notes
    -----
    A run that resumes continues the same run there: its id is part of the record of each epoch. One
    that begins with the init group begins another. Trackio keeps both values of an epoch that ran
    again, Weights & Biases the first. Trackio writes every half second, so values that a killed
    process has logged since then are missing.

    Examples
    --------
    >>> runner = JobRunner(job, manager, callbacks=[Trackio("digits", config={"lr": 0.1})])
    """

    is_passive = True

    def __init__(
        self,
        project: str,
        *,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        library: Literal["trackio", "wandb"] = "trackio",
        **options: Any,
    ) -> None:
        self._library = require(library, library, "Trackio")
        self._is_wandb = library == "wandb"
        self._name = name
        self._options = {"project": project, "config": dict(config or {}), **options}
        self._job = ""
        self._id: str | None = None
        self._run: Any = None

    def on_setup(self, runner: JobRunner) -> None:
        """Note whose run it is."""
        self._job, self._id = runner.job.name, None

    def state_dict(self) -> Mapping[str, str | None]:
        """Which run to continue."""
        return {"id": self._id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of the record, or begin one."""
        before = known_id(state) or self._id
        if self._run is not None and before == self._id:
            return  # after a loss
        self._id = before or new_id()
        named: dict[str, Any] = {"name": self._name or f"{self._job}-{self._id[:8]}"}
        if self._is_wandb:
            named["id"] = self._id
        resume = "never" if before is None else "allow"
        self._run = self._library.init(**named, resume=resume, **self._options)

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Log the metrics."""
        if self._run is not None:  # else it could not begin, which was told
            values: dict[str, Any] = dict(numbers(seconds, metrics))
            of_images, of_arrays = images(metrics).items(), arrays(metrics).items()
            values |= {name: self._library.Image(it) for name, it in of_images}
            values |= {name: self._library.Histogram(it) for name, it in of_arrays}
            self._run.log(values, step=epoch)

    def on_finish(self, result: object) -> None:
        """End the run there."""
        self._end(0)

    def on_error(self, error: BaseException) -> None:
        """End the run there, as failed if the library knows that."""
        self._end(1)

    def _end(self, exit_code: int) -> None:
        run, self._run = self._run, None
        if run is not None and self._is_wandb:
            run.finish(exit_code=exit_code)
        elif run is not None:
            run.finish()
