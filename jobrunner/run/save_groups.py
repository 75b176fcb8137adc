"""Saves that are under way, and the thread that writes and records them in groups."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobrunner.positions import Position
from jobrunner.run.result import NodeSave

MOST_PENDING = 512
"""Epochs that may be under way; above it the next epoch waits."""

MOST_CAPTURED = 128
"""Epochs that workers capture before the client hands them over: so the first ones are written while
the next ones run."""

MOST_SECONDS = 1.0
"""An epoch waits if one before it has been under way for so long."""

GAP_SECONDS = 0.1
"""Between the begins of two groups, so that each has the epochs of some time. A run's first groups
begin sooner, or a short run would be recorded only at its end."""

_FIRST_GAP_SECONDS = 0.005


@dataclass(eq=False, slots=True)
class Save:
    """The save of one position."""

    at: Position
    details: Mapping[str, Any]  # what the record says of the run
    began: float = field(default_factory=time.monotonic)
    nbytes: int = 0  # memory that it keeps from being freed on a worker, until it is recorded
    stall_seconds: float = 0.0  # how long epochs waited for it
    seconds: float = 0.0
    nodes: dict[str, NodeSave] = field(default_factory=dict)
    is_passed_over: bool = False  # the retention policy would have retired it at once
    error: BaseException | None = None


class SaveGroups:
    """The saves of a run that are under way.

    The run's thread adds saves and takes those that have ended, both in order. Another thread hands
    everything that waits to `record`, as one group; then all that has come meanwhile, and so on.
    `record` takes the first ones of these, sets what has become of them and raises nothing. It
    returns how many it took, and whether the run may go on: if not, nothing later is recorded.
    """

    def __init__(self, record: Callable[[Sequence[Save]], tuple[int, bool]]) -> None:
        self._record = record
        self._changed = threading.Condition()
        self._waiting: list[Save] = []
        self._group: Sequence[Save] = ()
        self._ended: deque[Save] = deque()
        self._thread: threading.Thread | None = None
        self._began = 0.0  # the last group
        self._gap_seconds = _FIRST_GAP_SECONDS
        self._is_urgent = False
        self._is_stopped = False

    @property
    def pending(self) -> list[Save]:
        """All that are not recorded yet, in order."""
        with self._changed:
            return [*self._group, *self._waiting]

    def add(self, saves: Sequence[Save]) -> None:
        """Add saves, whose captures the workers have."""
        with self._changed:
            if self._is_stopped:
                return
            self._waiting += saves
            self._changed.notify_all()
            if self._thread is None and self._waiting:
                self._thread = threading.Thread(
                    target=self._work, name="jobrunner-save", daemon=True
                )
                self._thread.start()

    def wait(self, until: Callable[[], bool] | None = None) -> None:
        """Wait until a condition holds, by default that nothing is under way; groups do not wait."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            try:
                while self._thread is not None and not (until is not None and until()):
                    self._changed.wait()
            finally:
                self._is_urgent = False

    def give_up(self) -> None:
        """Drop what no worker was told to write yet, and wait for the group under way."""
        with self._changed:
            self._waiting.clear()
        self.wait()

    def take_ended(self) -> Save | None:
        """The next save that has ended, if any."""
        with self._changed:
            return self._ended.popleft() if self._ended else None

    def forget(self) -> None:
        """Forget saves that have ended; what is added from now on is recorded again."""
        with self._changed:
            self._ended.clear()
            self._is_stopped = False

    def _work(self) -> None:
        while self._form_group():
            try:
                count, may_go_on = self._record(self._group)
            except BaseException as error:
                # `wait` would wait for ever for a thread that has died.
                for save in self._group:
                    save.error = error
                count, may_go_on = len(self._group), False
            with self._changed:
                self._waiting = [*self._group[count:], *self._waiting]
                self._group = self._group[:count]
                if not may_go_on:
                    self._is_stopped = True
                    self._waiting.clear()
                self._ended += self._group
                self._group = ()
                self._changed.notify_all()

    def _form_group(self) -> bool:
        """Take all that waits; False, and the thread ends, if there is nothing."""
        with self._changed:
            begin = self._began + self._gap_seconds
            while self._waiting and not self._is_urgent and len(self._waiting) < MOST_PENDING // 2:
                seconds_left = begin - time.monotonic()
                if seconds_left <= 0:
                    break
                self._changed.wait(seconds_left)
            if not self._waiting:
                # Under the lock, so that `add` knows whether the thread runs.
                self._thread = None
                self._changed.notify_all()
                return False
            self._group, self._waiting = self._waiting, []
            self._began = time.monotonic()
            self._gap_seconds = min(2 * self._gap_seconds, GAP_SECONDS)
            return True
