"""Several runs of a group for one message of the client: what runs next. Pure.

One worker leads; it has all stop conditions, if there are any. After each epoch it grants the
followers more runs; without conditions it grants several ahead, but never more than a window beyond
the slowest worker. All workers run what was granted, so all end after the same epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal, TypedDict

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


class RunOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the client asks of each worker: to run a group once, or for a batch of epochs."""

    key: str = ""  # of the group
    epoch: int | None = None  # of the first run; None outside a runner
    step: int = 0  # of the first run
    epochs: Number = 1  # at most
    steps_per_epoch: Number = 1  # runs in an epoch; a batch ends after a whole epoch
    lead: str = ""  # address of the worker that leads a batch
    is_judged: bool = False  # the group has stop conditions
    seconds: Seconds = 0.0  # no epoch is granted after this time
    captures: tuple[int, Number] | None = None
    """The first epoch that the binding's keepers capture when it ends, and every how many epochs."""


@dataclass(frozen=True, slots=True)
class Grant:
    """How many of a batch's runs may run."""

    runs: int
    is_final: bool  # no more will be granted


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
        self._reported = dict.fromkeys(followers or (), 0)

    @property
    def run_number(self) -> int:
        """Number of the current or next run."""
        return self.number + len(self.ended)

    def covers(self, number: int) -> bool:
        """Whether the run of that number belongs to this batch."""
        return self.number <= number < self.number + self.most_runs

    @property
    def epoch_and_step(self) -> tuple[int | None, int]:
        """Epoch and step of the current or next run."""
        order = self.order
        if order.epoch is None or not self.ended:
            return order.epoch, order.step
        epochs, step = divmod(order.step + len(self.ended), order.steps_per_epoch)
        return order.epoch + epochs, step

    @property
    def position(self) -> dict[str, Any]:
        """Where the batch is, for a reply."""
        epoch, step = self.epoch_and_step
        return {"epoch": epoch, "step": step}

    def position_to_capture(self) -> Position | None:
        """The position after the current run, if the keeper is to capture it."""
        epoch, step = self.epoch_and_step
        is_whole = (step + 1) % self.order.steps_per_epoch == 0
        if self.order.captures is None or epoch is None or not is_whole:
            return None
        first, every = self.order.captures
        is_due = epoch >= first and (epoch - first) % every == 0
        return Position(epoch) if is_due else None

    def end_run(self, stopped: list[str], metrics: str) -> None:
        """Record the end of a run."""
        now = self._clock()
        seconds = now - self._last_end
        ended: EndedRun = {"stopped": stopped, "metrics": metrics, "seconds": seconds}
        self.ended.append(ended)
        self._last_end = now

    def hear_report(self, follower: str, runs: int) -> None:
        """Take a follower's report of how many runs it has ended."""
        if follower in self._reported:
            self._reported[follower] = max(runs, self._reported[follower])

    def hear_grant(self, grant: Grant) -> None:
        """Take the lead's grant."""
        if not self._leads and self._grant.runs <= grant.runs <= self.most_runs:
            self._grant = grant

    def report(self) -> int | None:
        """How many runs to report to the lead now, if any."""
        done = len(self.ended)
        return None if self._leads or done % REPORT_RUNS else done

    def extend(self) -> Grant | None:
        """Grant more epochs if this worker leads; returns a grant to send to the followers."""
        if not self._leads or self._grant.is_final:
            return None
        width, is_judged = self.order.steps_per_epoch, self.order.is_judged
        done, runs = len(self.ended), self._grant.runs
        ahead = 1 if is_judged else self._runs_ahead()
        if runs - done > ahead // 2:
            return None
        if is_judged and self.ended[-1]["stopped"]:
            self._grant = Grant(runs, is_final=True)
            return self._grant
        if runs - min(self._reported.values(), default=done) >= WINDOW_RUNS:
            return None
        more = 0
        if self._clock() - self._started < self.order.seconds:
            more = max(1, ahead // width)
        runs = min(runs + more * width, self.most_runs)
        self._grant = Grant(runs, is_final=not more or runs == self.most_runs)
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
