"""Several runs of a group for one message of the client: what runs next. Pure.

One worker leads; it has all stop conditions, if there are any. After each epoch it grants the
followers more runs; without conditions it grants several ahead, but never more than a window beyond
the slowest worker. All workers run what was granted, so all end after the same epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal, TypedDict

import msgspec

from jobrunner.positions import Position
from jobrunner.worker.calls import Number, Seconds

AHEAD_SECONDS = 0.01
LEAST_AHEAD_RUNS, MOST_AHEAD_RUNS = 8, 32
"""Without stop conditions, the lead grants as many runs ahead as fit into that time."""
WINDOW_RUNS = 64
"""How many runs a worker may be ahead of the slowest."""
REPORT_RUNS = 16
"""How many runs a follower ends between two reports of its progress."""

Action = Literal["run", "wait", "end", "abort"]


class EndedRun(TypedDict):
    """One run's result on this worker, as the client gets it."""

    stopped: list[str]  # the stop conditions that were true
    metrics: str  # JSON text
    seconds: Seconds  # since the previous run ended or the batch began


class BatchOptions(TypedDict, total=False):
    """What the client says of a batch; see `EpochBatch`."""

    epochs: Number
    steps_per_epoch: Number
    lead: str
    is_judged: bool
    seconds: Seconds


class RunOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a run does beside running the group: once, or in each epoch of a batch."""

    captures: tuple[int, Number] | None = None
    """The first epoch that the binding's keepers capture when it ends, and every how many epochs."""


PLAIN_RUN = RunOptions()


@dataclass(frozen=True, slots=True)
class Grant:
    """How many of a batch's runs may run."""

    runs: int
    is_final: bool  # no more will be granted


@dataclass
class EpochBatch:
    """The state of one batch of runs on one worker."""

    number: int  # of the first run; the next ones count up from it
    epochs: int = 1  # at most
    steps_per_epoch: int = 1  # runs in an epoch; a batch ends after a whole epoch
    lead: str = ""  # address of the lead; empty if this worker leads
    followers: Collection[str] = ()  # addresses of the workers that this one leads
    is_judged: bool = False  # the group has stop conditions
    seconds: float = 0.0  # no epoch is granted after this time
    epoch: int | None = None  # of the first run; None outside a runner
    step: int = 0  # of the first run
    options: RunOptions = PLAIN_RUN
    clock: Callable[[], float] = monotonic
    ended: list[EndedRun] = field(default_factory=list)
    abort_reason: str = ""

    def __post_init__(self) -> None:
        self._grant = Grant(self.steps_per_epoch, self.epochs == 1)
        self._started = self._last_end = self.clock()
        self._reported = dict.fromkeys(self.followers, 0)

    @property
    def run_number(self) -> int:
        """Number of the current or next run."""
        return self.number + len(self.ended)

    def covers(self, number: int) -> bool:
        """Whether the run of that number belongs to this batch."""
        return self.number <= number < self.number + self.epochs * self.steps_per_epoch

    @property
    def epoch_and_step(self) -> tuple[int | None, int]:
        """Epoch and step of the current or next run."""
        if self.epoch is None or not self.ended:
            return self.epoch, self.step
        epochs, step = divmod(self.step + len(self.ended), self.steps_per_epoch)
        return self.epoch + epochs, step

    def position_to_capture(self) -> Position | None:
        """The position after the current run, if the keeper is to capture it."""
        epoch, step = self.epoch_and_step
        if self.options.captures is None or epoch is None or (step + 1) % self.steps_per_epoch:
            return None
        first, every = self.options.captures
        is_due = epoch >= first and (epoch - first) % every == 0
        return Position(epoch) if is_due else None

    def end_run(
        self,
        stopped: list[str],
        metrics: str,
    ) -> None:
        """Record the end of a run."""
        now = self.clock()
        ended: EndedRun = {
            "stopped": stopped,
            "metrics": metrics,
            "seconds": now - self._last_end,
        }
        self.ended.append(ended)
        self._last_end = now

    def hear_report(self, follower: str, runs: int) -> None:
        """Take a follower's report of how many runs it has ended."""
        if follower in self._reported:
            self._reported[follower] = max(runs, self._reported[follower])

    def hear_grant(self, grant: Grant) -> None:
        """Take the lead's grant."""
        if self.lead and self._grant.runs <= grant.runs <= self.epochs * self.steps_per_epoch:
            self._grant = grant

    def report(self) -> int | None:
        """How many runs to report to the lead now, if any."""
        done = len(self.ended)
        return done if self.lead and done % REPORT_RUNS == 0 else None

    def extend(self) -> Grant | None:
        """Grant more epochs if this worker leads; returns a grant to send to the followers."""
        if self.lead or self._grant.is_final:
            return None
        done, runs = len(self.ended), self._grant.runs
        ahead = 1 if self.is_judged else self._runs_ahead()
        if runs - done > ahead // 2:
            return None
        if self.is_judged and self.ended[-1]["stopped"]:
            self._grant = Grant(runs, is_final=True)
            return self._grant
        if runs - min(self._reported.values(), default=done) >= WINDOW_RUNS:
            return None
        more = max(1, ahead // self.steps_per_epoch)
        if self.clock() - self._started >= self.seconds:
            more = 0
        runs = min(runs + more * self.steps_per_epoch, self.epochs * self.steps_per_epoch)
        is_final = not more or runs == self.epochs * self.steps_per_epoch
        self._grant = Grant(runs, is_final)
        return self._grant

    def action(self) -> Action:
        """What to do next if no run is running."""
        if self.abort_reason:
            return "abort"
        if len(self.ended) < self._grant.runs:
            return "run"
        return "end" if self._grant.is_final else "wait"

    def _runs_ahead(self) -> int:
        done = len(self.ended)
        seconds = (self._last_end - self._started) / done if done else AHEAD_SECONDS
        shortest = AHEAD_SECONDS / MOST_AHEAD_RUNS
        return max(LEAST_AHEAD_RUNS, int(AHEAD_SECONDS / max(seconds, shortest)))
