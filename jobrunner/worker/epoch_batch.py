"""Several runs of a group for one message of the client: what runs next. Pure.

One worker leads; it has all stop conditions, if there are any. After each epoch it grants the
followers more runs; without conditions it grants several ahead, but never more than a window beyond
the slowest worker. All workers run what was granted, so all end after the same epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from time import monotonic
from typing import Literal

import msgspec

from jobrunner.positions import Position
from jobrunner.worker.messages import EndedRun, RunOrder

AHEAD_SECONDS = 0.01
LEAST_AHEAD_RUNS, MOST_AHEAD_RUNS = 8, 32
"""Without stop conditions, the lead grants as many runs ahead as fit into that time."""
WINDOW_RUNS = 64
"""How many runs a worker may be ahead of the slowest."""
PROGRESS_RUNS = 16
"""How many runs a follower ends between two notes of its progress."""


class Grant(msgspec.Struct, frozen=True, tag=True):
    """A note of the lead: how many of a batch's runs may run."""

    runs: int
    is_final: bool  # no more will be granted


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A note of a follower: how many of a batch's runs it has ended."""

    follower: str  # its address
    runs: int


Note = Grant | Progress
read_note = msgspec.msgpack.Decoder(Note).decode


class EpochBatch:
    """The state of one batch of runs on one worker."""

    def __init__(
        self,
        number: int,  # of the first run; the next ones count up from it
        order: RunOrder,
        followers: Collection[str] | None = (),  # None: another worker leads
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.number = number
        self.order = order
        self.most_runs = order.epochs * order.steps_per_epoch
        self.ended: list[EndedRun] = []
        self.abort_reason = ""
        self._leads = followers is not None
        self._clock = clock
        self._grant = Grant(order.steps_per_epoch, order.epochs == 1)
        self._started = self._last_end = clock()
        self._progress = dict.fromkeys(followers or (), 0)  # runs that they have ended

    def covers(self, number: int) -> bool:
        """Whether the run of that number belongs to this batch."""
        return self.number <= number < self.number + self.most_runs

    @property
    def position(self) -> tuple[int | None, int]:
        """Epoch and step of the current or next run."""
        order = self.order
        if order.epoch is None or not self.ended:
            return order.epoch, order.step
        epochs, step = divmod(order.step + len(self.ended), order.steps_per_epoch)
        return order.epoch + epochs, step

    def position_to_capture(self) -> Position | None:
        """The position after the current run, if the keeper is to capture it."""
        epoch, step = self.position
        rhythm = self.order.rhythm
        is_whole = (step + 1) % self.order.steps_per_epoch == 0
        if epoch is None or rhythm is None or not (is_whole and rhythm.covers(epoch)):
            return None
        return Position(epoch)

    def end_run(self, stopped: list[str], metrics: str) -> int | None:
        """Record the end of a run; returns how many have ended, if the lead is to know that now."""
        now = self._clock()
        self.ended.append({"stopped": stopped, "metrics": metrics, "seconds": now - self._last_end})
        self._last_end = now
        done = len(self.ended)
        if self._leads or done % PROGRESS_RUNS:
            return None
        return done

    def hear(self, note: Note) -> None:
        """Take a note from another worker; notes may come late or in another order."""
        if isinstance(note, Progress):
            if note.follower in self._progress:
                self._progress[note.follower] = max(note.runs, self._progress[note.follower])
        elif not self._leads and self._grant.runs <= note.runs <= self.most_runs:
            self._grant = note

    def extend(self) -> Grant | None:
        """Grant more epochs if this worker leads; returns a grant to send to the followers."""
        if not self._leads or self._grant.is_final or self.abort_reason:
            return None
        width, is_judged = self.order.steps_per_epoch, self.order.is_judged
        done, runs = len(self.ended), self._grant.runs
        ahead = 1
        if not is_judged:
            ahead = self._runs_ahead()
        if runs - done > ahead // 2:
            return None
        if is_judged and self.ended[-1]["stopped"]:
            self._grant = Grant(runs, is_final=True)
            return self._grant
        if runs - min(self._progress.values(), default=done) >= WINDOW_RUNS:
            return None
        more = 0
        if self._clock() - self._started < self.order.seconds:
            more = max(1, ahead // width)
        runs = min(runs + more * width, self.most_runs)
        self._grant = Grant(runs, is_final=not more or runs == self.most_runs)
        return self._grant

    def action(self) -> Literal["run", "wait", "end", "abort"]:
        """What to do next if no run is running."""
        if self.abort_reason:
            return "abort"
        if len(self.ended) < self._grant.runs:
            return "run"
        if self._grant.is_final:
            return "end"
        return "wait"

    def _runs_ahead(self) -> int:
        done = len(self.ended)
        seconds = AHEAD_SECONDS
        if done:
            seconds = (self._last_end - self._started) / done
        shortest = AHEAD_SECONDS / MOST_AHEAD_RUNS
        return max(LEAST_AHEAD_RUNS, int(AHEAD_SECONDS / max(seconds, shortest)))
