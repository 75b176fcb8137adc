"""What tasks print, for a view: a worker keeps it until its next reply to the run."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal, TextIO

import msgspec

from jobrunner.worker.task_context import FRAME
from jobrunner.workspace import Workspace

MOST_CHARACTERS, MOST_LINES = 64 << 10, 400
"""What a worker keeps of what tasks print, until it is asked."""

Where = Literal["leave", "take", "copy"]
"""What to do about text that gets to the view's user anyway, by the same terminal or the same process:
let it, take it instead, or copy it. All other text is copied: it is in the worker's output, too."""


class PrintOptions(msgspec.Struct, frozen=True):
    """What a view wants of what tasks print."""

    own_streams: list[str]  # what identifies those that its user sees: see `names_of`
    where: Where


def names_of(stream: TextIO | None) -> set[str]:
    """What identifies an open file among those of all machines; None: this process."""
    host = platform.node()
    if stream is None:
        return {f"{host}/process {os.getpid()}"}
    try:
        status = os.fstat(stream.fileno())
    except (AttributeError, OSError, ValueError):  # it is no file
        return set()
    return {f"{host}/file {status.st_dev}:{status.st_ino}"}


class Prints:
    """Keeps what the tasks on some workspaces print, from now until `end`."""

    def __init__(self, options: PrintOptions, workspaces: Iterable[Workspace]) -> None:
        self.options = options
        self._workspaces = list(workspaces)
        self._lock = threading.RLock()  # an object that is collected meanwhile may print, too
        self._lines: list[tuple[str, str, str]] = []  # the node, the task and the text of each
        # Lines without an end, by thread and task.
        self._begun: dict[tuple[int, str, str], str] = {}
        self._characters = self._left_out = 0
        with _lock:
            for name in ("stdout", "stderr"):
                stream = getattr(sys, name)
                if stream is not None and type(stream) is not _Stream:
                    setattr(sys, name, _Stream(stream))
            _listeners.update(dict.fromkeys(self._workspaces, self))

    def end(self) -> None:
        """Let tasks print as they do without a view."""
        with _lock:
            for workspace in self._workspaces:
                _listeners.pop(workspace, None)
            for name in ("stdout", "stderr"):
                stream = getattr(sys, name)
                if not _listeners and type(stream) is _Stream:
                    setattr(sys, name, stream.original)

    def take(self, node: str, task: str, text: str) -> bool:
        """Keep a text, if there is room."""
        key = threading.get_ident(), node, task
        with self._lock:
            size = self._characters + len(text)
            if size > MOST_CHARACTERS or len(self._lines) >= MOST_LINES:
                self._left_out += text.count("\n")
                return False
            self._characters = size
            *lines, begun = f"{self._begun.pop(key, '')}{text}".split("\n")
            # A bar that draws over itself is as it was drawn last.
            self._begun[key] = begun[begun.rstrip("\r").rfind("\r") + 1 :][-MOST_CHARACTERS:]
            for line in lines:
                self._lines.append((node, task, line.rstrip("\r").rpartition("\r")[2]))
        return True

    def give(self, *, is_over: bool) -> dict[str, Any]:
        """The lines since the last time, and how many had no room; at the end, those without an end too."""
        with self._lock:
            lines = self._lines
            if is_over:
                lines += [(node, task, text) for (_, node, task), text in self._begun.items()]
                self._begun.clear()
            answer = {"printed": [line for line in lines if line[2]], "left_out": self._left_out}
            self._lines, self._left_out, self._characters = [], 0, 0
        return answer


_lock = threading.Lock()
_listeners: dict[Workspace, Prints] = {}  # all of this process


class _Stream:
    """A stream of this process, in whose place it is while somebody listens to tasks here.

    It ignores that the reader of a pipe is gone: a task that prints there must not fail.
    """

    def __init__(self, original: TextIO) -> None:
        self.original = original
        self._names = names_of(original) | names_of(None)

    def write(self, text: str) -> int:
        """Write, unless it is taken."""
        frame = FRAME.get()
        prints = None if frame is None else _listeners.get(frame[1].workspace)
        is_written = True
        if frame is not None and prints is not None:
            is_here = not self._names.isdisjoint(prints.options.own_streams)
            if not is_here or prints.options.where != "leave":
                is_taken = prints.take(frame[1].workspace.node, frame[1].name, text)
                is_written = not (is_taken and is_here and prints.options.where == "take")
        if is_written:
            with suppress(BrokenPipeError):
                self.original.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, if somebody reads."""
        with suppress(BrokenPipeError):
            self.original.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)
