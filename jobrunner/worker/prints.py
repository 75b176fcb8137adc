"""What tasks print in the worker processes of `Session.local`, which have the streams of their client."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from jobrunner.texts import printable
from jobrunner.worker.task_context import FRAME

if TYPE_CHECKING:
    from distributed import Worker

MOST_LINES = 200
"""A second and stream: the scheduler passes each on. Others go to the terminal."""
LONGEST_LINE = 64 << 10


def replace_streams(worker: Worker) -> None:
    """Put a `TaskStream` in the place of both streams of this process."""
    for number, name in enumerate(("stdout", "stderr"), start=1):
        stream = getattr(sys, name)
        if stream is not None:  # of a process without a console
            setattr(sys, name, TaskStream(stream, number, worker))


class TaskStream:
    """A stream that keeps what tasks print away from what a view draws on the same terminal.

    On a terminal, whole lines of tasks go to the client in the way of `distributed.print`: the client
    prints them, and its view moves them above its own lines. All else is written where it would be
    without this; but if nobody reads a pipe any more, that does not fail a task that prints.
    """

    def __init__(self, original: TextIO, number: int, worker: Worker) -> None:
        self._original = original
        self._number = number  # 1: stdout, 2: stderr
        self._worker = worker
        self._is_terminal = original.isatty()
        self._lock = threading.RLock()  # an object that is collected meanwhile may print, too
        self._begun: dict[tuple[int, str], str] = {}  # lines without an end, by thread and task
        self._second = self._num_lines = 0

    def write(self, text: str) -> int:
        """Send whole lines of a task, and keep the rest of its last line. Write all else."""
        frame = FRAME.get()
        if frame is None or not self._is_terminal:
            self._write(text)
            return len(text)
        task = frame[1]
        name = f"{task.workspace.node}/{task.name}"
        key = threading.get_ident(), name
        with self._lock:
            *lines, begun = f"{self._begun.pop(key, '')}{text}".split("\n")
            if begun:
                # A bar that draws over itself is kept as it was drawn last.
                self._begun[key] = begun[begun.rstrip("\r").rfind("\r") + 1 :][-LONGEST_LINE:]
            for line in lines:
                last_drawn = line.rstrip("\r").rpartition("\r")[2]
                self._send(f"{name}: {last_drawn}")
        return len(text)

    def _send(self, line: str) -> None:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._num_lines = second, 0
        self._num_lines += 1
        if self._num_lines > MOST_LINES:
            self._write(f"{line}\n")
            return
        message = {"args": (printable(line, kept="\t"),), "sep": " ", "end": "\n", "flush": False}
        self._worker.log_event("print", {**message, "file": self._number})

    def _write(self, text: str) -> None:
        with suppress(BrokenPipeError):
            self._original.write(text)

    def flush(self) -> None:
        """Flush, if somebody reads."""
        with suppress(BrokenPipeError):
            self._original.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
