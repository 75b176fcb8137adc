"""Where progress is drawn: a bar on a terminal, lines anywhere else."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column


class Display:
    """A bar on a terminal's last line; a line for each drawing in files, pipes and batch logs."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(
            file=cast("TextIO", _TolerantStream(stream)), markup=False, emoji=False, highlight=False
        )
        self._bar = Progress(
            BarColumn(bar_width=16, table_column=Column(width=16)),
            TimeElapsedColumn(table_column=Column(width=8)),
            # A narrow terminal cuts the end of the text.
            TextColumn(
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
        self._console.print(text, soft_wrap=self._bar.disable)  # a file has no width

    def draw(self, epoch: int, total_epochs: int | None, text: str) -> None:
        """Show the state of the run."""
        if self._bar.disable:
            self.say(text)
        self._is_drawn = True
        self._bar.update(self._task, completed=epoch, total=total_epochs, description=text)

    def close(self) -> None:
        """Stop drawing; what was drawn last stays."""
        self._bar.update(self._task, visible=self._is_drawn)
        self._bar.stop()


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
