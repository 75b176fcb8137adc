"""Show how a run gets on: a bar where a terminal is, else a line now and then.

Both are callbacks of a `JobRunner`. An epoch may take less than a millisecond, so `on_epoch` only
notes what is new, and drawing keeps to an interval of its own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO, cast

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from jobrunner.run import ResumePlan, RunResult, SaveReport
    from jobrunner.worker import UnderWay

LONG_SECONDS = 1.0
"""What has run for so long is worth a word before it ends."""
LOOK_SECONDS = 0.5

_SHOWN_METRICS = 4
_SHOWN_TASKS = 3


def show_progress(stream: TextIO) -> Progress:
    """Choose how to show progress on `stream`.

    Parameters
    ----------
    stream : text stream
        A bar is drawn where it is a terminal; lines go anywhere else.

    Returns
    -------
    Progress
        A callback for `JobRunner` and a context manager to run it in.
    """
    kept = cast("TextIO", _Unread(stream))
    if stream.isatty():
        return Progress(_Bar(kept), interval_seconds=0.1)
    return Progress(_Lines(kept), interval_seconds=1.0, patience_seconds=10.0)


class Progress:
    """A callback that tells a display what is new, at most once an interval.

    Parameters
    ----------
    display : Display
    interval_seconds : float
        Shortest time between two drawings.
    patience_seconds : float
        How long nothing new is no news; then a drawing says what runs, and again after double
        that time. 0: at every interval.
    clock : callable
        Returns monotonic seconds.

    Attributes
    ----------
    under_way : callable
        Returns what runs now; `JobRunner.under_way`, once there is one.

    Notes
    -----
    Runs on the client, in the thread of `JobRunner.run`; what runs for long is looked at in a
    thread of its own.
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
        self._warnings = _Warnings(display)
        self._interval_seconds = interval_seconds
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._drawn_at = clock()
        self._is_drawn = True
        self._pause_seconds = patience_seconds
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="jobrunner-progress", daemon=True)
        self.under_way: Callable[[], UnderWay | None] = lambda: None
        self.total_epochs: int | None = None
        self.epoch = 0
        self.epoch_seconds = 0.0
        self.save_seconds = 0.0
        self.metrics: Mapping[str, object] = {}
        self.saved_epoch: int | None = None
        self.saved_bytes = 0
        self.failed_saves = 0

    def on_start(self, plan: ResumePlan, total_epochs: int | None) -> None:
        """Say from where the run goes on, and to what."""
        self.total_epochs = total_epochs
        self._display.say(str(plan))

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, object]) -> None:
        """Note that an epoch has ended."""
        # Epochs vary; a slow mean reads better than the last one's time.
        is_first = self.epoch == 0
        self.epoch_seconds = seconds if is_first else 0.9 * self.epoch_seconds + 0.1 * seconds
        self.epoch = epoch
        self.metrics = metrics
        self._is_drawn = False
        if self._clock() - self._drawn_at >= self._interval_seconds:
            self._draw()

    def on_save(self, report: SaveReport) -> None:
        """Note what was recorded, and how often that failed."""
        is_first = self.save_seconds == 0
        stall = report.stall_seconds
        self.save_seconds = stall if is_first else 0.9 * self.save_seconds + 0.1 * stall
        if report.error is None:
            self.saved_epoch = report.epoch
            self.saved_bytes = report.nbytes
        else:
            self.failed_saves += 1

    def on_finish(self, result: RunResult) -> None:
        """Show the last epoch."""
        self._draw()

    def describe(self) -> str:
        """Describe in one line where the run is."""
        total = "" if self.total_epochs is None else f"/{self.total_epochs}"
        parts = [f"epoch {self.epoch}{total}"]
        run = self.under_way()
        if run is not None and run.seconds >= LONG_SECONDS:
            parts.append(describe_run(run))
        if self.epoch:
            pace = f"{format_seconds(self.epoch_seconds)} each"
            if self.saved_epoch is not None:
                pace += f" + {format_seconds(self.save_seconds)} a save"
            parts.append(pace)
        parts += format_metrics(self.metrics)
        if self.saved_epoch is not None:
            parts.append(f"saved {self.saved_epoch} ({format_bytes(self.saved_bytes)})")
        if self.failed_saves:
            parts.append(f"saves failed: {self.failed_saves}")
        return "  ".join(parts)

    def look(self) -> None:
        """Draw what runs, if that has been the same for long."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._watcher.join()
        logging.getLogger("jobrunner").removeHandler(self._warnings)
        try:
            self._draw()
        finally:
            self._display.close()


class Display(Protocol):
    """Where progress is drawn."""

    def open(self) -> None:
        """Begin to draw."""

    def say(self, text: str) -> None:
        """Write lines that stay."""

    def draw(self, epoch: int, total_epochs: int | None, text: str) -> None:
        """Show where the run is now."""

    def close(self) -> None:
        """Leave what was drawn last."""


class _Warnings(logging.Handler):
    """Says what is logged as a warning, so that it does not run through the bar.

    What the runner tells `on_warning` it logs as well, and so do others, in threads of their own.
    """

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        self._display.say(f"{record.levelname.lower()}: {record.getMessage()}")


class _Unread:
    """A stream that may go away: a job does not end because nobody reads its output any more."""

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


class _Lines:
    """A line for each drawing: for files, pipes and batch systems' logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def open(self) -> None:
        pass

    def say(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def draw(self, epoch: int, total_epochs: int | None, text: str) -> None:
        self.say(text)

    def close(self) -> None:
        pass


class _Bar:
    """A bar that stays on the terminal's last line."""

    def __init__(self, stream: TextIO) -> None:
        # Slow to import, and of use on a terminal only.
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        self._progress: RichProgress = RichProgress(
            BarColumn(bar_width=16, table_column=Column(width=16)),
            TimeElapsedColumn(table_column=Column(width=8)),
            # On a narrow terminal the text gives way, from its end.
            TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            console=Console(file=stream),
            expand=True,
        )
        self._task: TaskID
        self._is_drawn = False

    def open(self) -> None:
        # Before there is an epoch, what is there to see is the time.
        self._task = self._progress.add_task("starting", total=None)
        self._progress.start()

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def draw(self, epoch: int, total_epochs: int | None, text: str) -> None:
        self._is_drawn = True
        self._progress.update(self._task, completed=epoch, total=total_epochs, description=text)

    def close(self) -> None:
        if not self._is_drawn:
            self._progress.update(self._task, visible=False)
        self._progress.stop()


def describe_run(run: UnderWay) -> str:
    """Say which group has been running for how long, and what of it."""
    what = f"epoch {run.epoch}" if run.group == "epoch" else f"{run.group} group"
    tasks = ", ".join(run.tasks[:_SHOWN_TASKS])
    more = len(run.tasks) - _SHOWN_TASKS
    tasks += f" and {more} more" if more > 0 else ""
    return f"[{what} for {format_seconds(run.seconds)}{f': {tasks}' if tasks else ''}]"


def format_metrics(metrics: Mapping[str, object]) -> list[str]:
    """Write the first few metrics that are numbers as ``name=value``."""
    shown = []
    for name, value in metrics.items():
        if name == "epoch":
            continue
        try:
            shown.append(f"{name}={float(value):.4g}")  # type: ignore[arg-type]
        except (TypeError, ValueError):
            continue
    return shown[:_SHOWN_METRICS]


def format_seconds(seconds: float) -> str:
    """Write a duration in the unit that suits it."""
    if seconds < 0.01:
        return f"{seconds * 1e3:.2f} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_bytes(nbytes: int) -> str:
    """Write a size in binary units."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
