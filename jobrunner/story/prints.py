"""What tasks print, taken for a view. Runs on the workers."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO

from jobrunner.dask_internals import find_plugin
from jobrunner.worker import FRAME, PLUGIN_NAME, WorkspaceHost
from jobrunner.workspace import Workspace

if TYPE_CHECKING:
    from distributed import Worker

MOST_CHARACTERS, MOST_LINES = 64 << 10, 400
"""What a worker keeps of what tasks print, until it is asked."""

Where = Literal["leave", "take", "copy"]
"""What to do about text that gets to the view's user anyway, by the same terminal or the same process:
let it, take it instead, or copy it. All other text is copied: it is in the worker's output, too."""


def listen(binding: str, here: Collection[str], where: Where, dask_worker: Worker) -> None:
    """Begin to take what the tasks of a binding print; `names_of` its user's stream are `here`."""
    host = find_plugin(dask_worker, PLUGIN_NAME)
    hosted = host.bindings.get(binding) if isinstance(host, WorkspaceHost) else None
    if hosted is not None and (hosted.listener is None or hosted.listener.is_over):
        hosted.listener = Prints(binding, hosted.workspaces, here, where)


def names_of(stream: TextIO | None) -> set[str]:
    """What identifies an open file among those of all machines; None: this process."""
    host = platform.node()
    if stream is None:
        return {f"{host}/process {os.getpid()}"}
    try:
        about = os.fstat(stream.fileno())
    except (AttributeError, OSError, ValueError):  # it is no file
        return set()
    return {f"{host}/file {about.st_dev}:{about.st_ino}"}


class Given(NamedTuple):
    """An answer to a view, kept until the view has got it."""

    number: int
    lines: list[tuple[str, str, str]]  # the node, the task and the text of each
    left_out: int  # how many had no room


class Prints:
    """Takes what the tasks of one binding print, in place of both streams of this process.

    Of these, only tasks on `spaces`, by node: another worker of the process has a listener, too.
    """

    def __init__(
        self, binding: str, spaces: Mapping[str, Workspace], here: Collection[str], where: Where
    ) -> None:
        self.is_over = False
        self._spaces = spaces
        self._threads = f"jobrunner-{binding}-"  # how the names of its threads begin
        self._lock = threading.RLock()  # an object that is collected meanwhile may print, too
        self._lines: list[tuple[str, str, str]] = []
        self._begun: dict[
            tuple[int, str, str], str
        ] = {}  # lines without an end, by thread and task
        self._characters = self._left_out = 0
        self._given = Given(0, [], 0)
        self._streams: dict[str, _Stream] = {}
        for name in ("stdout", "stderr"):
            stream: TextIO | None = getattr(sys, name)
            if stream is None:  # a process without a console
                continue
            is_here = bool((names_of(stream) | names_of(None)) & set(here))
            if not is_here or where != "leave":
                self._streams[name] = _Stream(stream, self, copies=not is_here or where == "copy")
                setattr(sys, name, self._streams[name])

    def take(self, text: str) -> bool:
        """Take a text if a task of the binding prints it, and there is room."""
        frame = FRAME.get()
        if frame is None or self.is_over:
            return False
        thread = threading.current_thread()
        space = frame[1].workspace
        is_ours = thread.name.startswith(self._threads) and self._spaces.get(space.node) is space
        if not is_ours:
            return False
        key = thread.ident or 0, space.node, frame[1].name
        with self._lock:
            size = self._characters + len(text)
            if size > MOST_CHARACTERS or len(self._lines) >= MOST_LINES:
                self._left_out += text.count("\n")
                return False
            self._characters = size
            *lines, begun = f"{self._begun.pop(key, '')}{text}".split("\n")
            self._begun[key] = begun[begun.rstrip("\r").rfind("\r") + 1 :][-MOST_CHARACTERS:]
            # A bar that draws over itself is as it was drawn last.
            self._lines += ((*key[1:], line.rstrip("\r").rpartition("\r")[2]) for line in lines)
        return True

    def give(self, got: int, *, is_over: bool) -> Given:
        """All lines since what the view has got, the number of an earlier answer.

        If it is over, lines without an end too; tasks then print as they do without a view.
        """
        with self._lock:
            number, given, left_out = self._given
            if got == number:
                given, left_out = [], 0
            if is_over:
                self._lines += ((*key[1:], text) for key, text in self._begun.items())
                self._begun.clear()
            if is_over or len(given) < MOST_LINES:
                given = [*given, *(line for line in self._lines if line[2])]
                left_out += self._left_out
                self._lines, self._left_out, self._characters = [], 0, 0
            self._given = Given(number + 1, given, left_out)
        if is_over:
            self.end()
        return self._given

    def end(self) -> None:
        """Let tasks print as they do without a view."""
        self.is_over = True
        for name, stream in self._streams.items():
            if getattr(sys, name) is stream:  # else somebody has wrapped it, and it passes all on
                setattr(sys, name, stream.restored)


class _Stream:
    """A stream that lets a view take what tasks write to it.

    It ignores that the reader of a pipe is gone: a task that prints there must not fail.
    """

    def __init__(self, original: TextIO, prints: Prints, *, copies: bool) -> None:
        self._original = original
        self._prints = prints
        self._copies = copies

    @property
    def restored(self) -> TextIO:
        """The stream before all of these that are over."""
        before: Any = self._original
        is_over = isinstance(before, _Stream) and before._prints.is_over
        return before.restored if is_over else before  # type: ignore[no-any-return]

    def write(self, text: str) -> int:
        """Write, unless it is taken."""
        is_taken = self._prints.take(text)
        if self._copies or not is_taken:
            with suppress(BrokenPipeError):
                self._original.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, if somebody reads."""
        with suppress(BrokenPipeError):
            self._original.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
