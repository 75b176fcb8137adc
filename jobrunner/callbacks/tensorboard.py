"""Metrics for TensorBoard."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from jobrunner.callbacks.metrics import arrays, images, numbers, require
from jobrunner.define import PATH, checked
from jobrunner.run import Callback


@checked(logdir=PATH)
class TensorBoard(Callback):
    """Write the metrics of each epoch and its seconds for TensorBoard.

    Numbers become scalars, arrays histograms, images images.

    Parameters
    ----------
    logdir : str or os.PathLike
        Where TensorBoard looks: ``tensorboard --logdir ...``, or a directory within.

    Raises
    ------
    DefinitionError
        tensorboardX is not installed.

    Notes
    -----
    A run that resumes adds a file. TensorBoard then hides the values of epochs that ran again, and
    of all epochs if the run began with the init group.

    Examples
    --------
    >>> runner = JobRunner(job, manager, callbacks=[TensorBoard("runs/tensorboard/digits")])
    """

    is_passive = True

    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        self._library = require("tensorboardX", "tensorboard", "TensorBoard")
        self._logdir = os.fspath(logdir)
        self._writer: Any = None

    def on_group(self, group: str, epoch: int, seconds: float) -> None:
        """Begin after the init group."""
        if group == "init":
            self._begin(1)

    def on_load(self, epoch: int, step: int, seconds: float) -> None:
        """Go on after the loaded epoch."""
        self._begin(epoch + 1)

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Write the metrics."""
        if self._writer is None:
            return  # it could not begin, which was told
        for name, value in numbers(seconds, metrics).items():
            self._writer.add_scalar(name, value, epoch)
        for name, pixels in images(metrics).items():
            self._writer.add_image(name, pixels, epoch, dataformats="HWC")
        for name, array in arrays(metrics).items():
            self._writer.add_histogram(name, array, epoch)

    def on_save_start(self, epoch: int, step: int) -> None:
        """Let no record be newer than the file."""
        if self._writer is not None:
            self._writer.flush()

    def on_finish(self, result: object) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def on_error(self, error: BaseException) -> None:
        """Close the file."""
        self.on_finish(None)

    def _begin(self, first: int) -> None:
        self.on_finish(None)
        # The library names files by the second; one run may begin several in that time.
        suffix = f".{time.time_ns()}"
        self._writer = self._library.SummaryWriter(
            self._logdir, purge_step=first, filename_suffix=suffix
        )
