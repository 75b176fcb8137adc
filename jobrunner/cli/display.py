"""Where progress is drawn: a bar on a terminal, lines anywhere else."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Display(Protocol):
    """Where progress is drawn."""

    def open(self) -> None:
        """Start drawing."""

    def say(self, text: str) -> None:
        """Write lines that stay."""

    def draw(self, epoch: int, total_epochs: int | None, text: str) -> None:
        """Show the state of the run."""

    def close(self) -> None:
        """Stop drawing; what was drawn last stays."""


def make_display(stream: TextIO) -> Display:
    """A bar if `stream` is a terminal, else lines."""
    tolerant = cast("TextIO", _TolerantStream(stream))
    return _Bar(tolerant) if stream.isatty() else _Lines(tolerant)


class _Lines:
    """A line for each drawing: for files, pipes and the logs of batch systems."""

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
    """A bar on the terminal's last line."""

    def __init__(self, stream: TextIO) -> None:
        # Slow to import, and only needed on a terminal.
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        self._progress: RichProgress = RichProgress(
            BarColumn(bar_width=16, table_column=Column(width=16)),
            TimeElapsedColumn(table_column=Column(width=8)),
            # A narrow terminal cuts the end of the text.
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
        # Before the first epoch, only the time is shown.
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


class WarningHandler(logging.Handler):
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
