"""Show the progress of a run: a callback of `JobRunner`, and the display that it draws on.

An epoch may take less than a millisecond, so most calls only note what is new.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

import rich.progress
from dask.utils import format_bytes
from rich.console import Console
from rich.table import Column

from jobrunner.cli.formatting import format_metrics
from jobrunner.texts import format_seconds, listed, printable

if TYPE_CHECKING:
    from jobrunner.run import ResumePlan, RunResult, SaveReport
    from jobrunner.worker import UnderWay

LONG_SECONDS = 1.0
"""A group that has run for this long is shown before it ends."""
LOOK_SECONDS = 0.5
"""How often a thread looks for such a group."""


def show_progress(stream: TextIO) -> Progress:
    """A callback that shows progress on `stream`; it is also the context to run in."""
    display = Display(stream)
    if stream.isatty():
        return Progress(display, interval_seconds=0.1)
    return Progress(display, interval_seconds=1.0, patience_seconds=10.0)


class Progress:
    """A callback that draws what is new, at most once per interval.

    A long group is drawn again after `patience_seconds` although nothing is new; this time doubles
    with each such drawing.
    """

    is_passive = True

    def __init__(
        self,
        display: Display,
        *,
        interval_seconds: float,
        patience_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._display = display
        self._warnings = _WarningHandler(display)
        self._interval_seconds = interval_seconds
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._drawn_at = clock()
        self._is_drawn = True
        self._pause_seconds = patience_seconds
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="jobrunner-progress", daemon=True)
        self.under_way: Callable[[], UnderWay | None] = lambda: None  # set it to the runner's
        self.total_epochs: int | None = None
        self.epoch = 0
        self.epoch_seconds = 0.0
        self.save_seconds = 0.0
        self.metrics: Mapping[str, object] = {}
        self.saved: SaveReport | None = None
        self.failed_saves = 0

    def on_start(self, plan: ResumePlan, total_epochs: int | None) -> None:
        """Show from where and how far the job runs."""
        self.total_epochs = total_epochs
        self._display.say(str(plan))

    def on_load(self, epoch: int, step: int, seconds: float) -> None:
        """Note where the run continues."""
        self.epoch = epoch

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, object]) -> None:
        """Note that an epoch has ended."""
        mean = self.epoch_seconds
        self.epoch_seconds = _mean(mean, seconds) if mean else seconds
        self.epoch = epoch
        self.metrics = metrics
        self._is_drawn = False
        if self._clock() - self._drawn_at >= self._interval_seconds:
            self._draw()

    def on_save(self, report: SaveReport) -> None:
        """Note that a checkpoint was recorded, or that its save failed."""
        stall = report.stall_seconds
        self.save_seconds = _mean(self.save_seconds, stall) if self.save_seconds else stall
        if report.error is None:
            self.saved = report
        else:
            self.failed_saves += 1

    def on_stop_asked(self, reason: str, at_once: str) -> None:
        """Confirm a signal at once. Runs in the signal handler, so it must not take a lock."""
        message = f"\n{reason}: the run ends once its epoch is recorded; {at_once} ends it now.\n"
        with contextlib.suppress(OSError):  # Ctrl-C may have ended the reader, for example `tee`
            os.write(2, message.encode())

    def on_finish(self, result: RunResult) -> None:
        """Show the last epoch."""
        self._draw()

    def describe(self) -> str:
        """Describe the state of the run in one line."""
        total = "" if self.total_epochs is None else f"/{self.total_epochs}"
        parts = [f"epoch {self.epoch}{total}"]
        run = self.under_way()
        if run is not None and run.seconds >= LONG_SECONDS:
            parts.append(_describe_run(run))
        if self.epoch_seconds:
            pace = f"{format_seconds(self.epoch_seconds)} each"
            if self.saved is not None:
                pace += f" + {format_seconds(self.save_seconds)} a save"
            parts.append(pace)
        parts += format_metrics(self.metrics)
        if self.saved is not None:
            parts.append(f"saved {self.saved.epoch} ({format_bytes(self.saved.nbytes)})")
        if self.failed_saves:
            parts.append(f"saves failed: {self.failed_saves}")
        return "  ".join(parts)

    def look(self) -> None:
        """Draw the group that runs if it has run for long."""
        run = self.under_way()
        if run is None or run.seconds < LONG_SECONDS:
            return
        if self._clock() - self._drawn_at >= max(self._pause_seconds, self._interval_seconds):
            pause_seconds = 2 * self._pause_seconds
            self._is_drawn = False
            self._draw()
            self._pause_seconds = pause_seconds

    def _watch(self) -> None:
        while not self._is_over.wait(max(self._interval_seconds, LOOK_SECONDS)):
            self.look()

    def _draw(self) -> None:
        with self._lock:
            if not self._is_drawn:
                self._is_drawn = True
                self._drawn_at = self._clock()
                self._pause_seconds = self._patience_seconds
                self._display.draw(self.epoch, self.total_epochs, self.describe())

    def __enter__(self) -> Self:
        self._display.open()
        logging.getLogger("jobrunner").addHandler(self._warnings)
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._watcher.join()
        logging.getLogger("jobrunner").removeHandler(self._warnings)
        try:
            self._draw()
        finally:
            self._display.close()


def _mean(mean: float, seconds: float) -> float:
    return 0.9 * mean + 0.1 * seconds


def _describe_run(run: UnderWay) -> str:
    what = f"epoch {run.epoch}" if run.group == "epoch" else f"{run.group} group"
    tasks = f": {listed(run.tasks, 3)}" if run.tasks else ""
    return f"[{what} for {format_seconds(run.seconds)}{tasks}]"


class Display:
    """A bar on a terminal's last line; a line for each drawing in files, pipes and batch logs."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(
            file=cast("TextIO", _TolerantStream(stream)), markup=False, emoji=False, highlight=False
        )
        self._bar = rich.progress.Progress(
            rich.progress.BarColumn(bar_width=16, table_column=Column(width=16)),
            rich.progress.TimeElapsedColumn(table_column=Column(width=8)),
            # A narrow terminal cuts the end of the text.
            rich.progress.TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            console=self._console,
            expand=True,
            disable=not stream.isatty(),
        )
        # Before the first epoch, only the time is shown.
        self._task = self._bar.add_task("starting", total=None)
        self._is_drawn = False

    def open(self) -> None:
        """Start drawing."""
        self._bar.start()

    def say(self, text: str) -> None:
        """Write lines that stay."""
        # A file has no width.
        self._console.print(printable(text), soft_wrap=self._bar.disable)

    def draw(self, epoch: int, total_epochs: int | None, text: str) -> None:
        """Show the state of the run."""
        text = printable(text, kept="")
        if self._bar.disable:
            self.say(text)
        self._is_drawn = True
        self._bar.update(self._task, completed=epoch, total=total_epochs, description=text)

    def close(self) -> None:
        """Stop drawing; what was drawn last stays."""
        self._bar.update(self._task, visible=self._is_drawn)
        if not self._bar.disable:  # older versions of rich add a line to a file
            self._bar.stop()


class _WarningHandler(logging.Handler):
    """Shows logged warnings on the display, so that they do not cut through a bar."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        """Show one warning."""
        self._display.say(f"{record.levelname.lower()}: {record.getMessage()}")


class _TolerantStream:
    """A stream that ignores errors: a job continues when the reader of its output is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
