"""The state of a run, where its time goes, and what it does next. No I/O, no Dask."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, get_args

from jobrunner.checkpoint import Status
from jobrunner.cluster import GroupResult
from jobrunner.compile import Plan
from jobrunner.positions import Position, PublicPosition
from jobrunner.run.result import RunResult, SaveReport

Decision = Literal["run an epoch", "finish", "stop", "move"]
TimePart = Literal["start", "compute", "save_wait", "redone", "recovery", "idle"]
TIME_PARTS: tuple[TimePart, ...] = get_args(TimePart)

MOST_MARKS = 200
"""Saves that a run may go back to without counting all its epochs as lost."""
MOST_REPORTS = 1_000
"""Of saves, in the result of a run; the same of saves that failed."""
MOST_LOSSES = 50
"""What one record says, at most."""

LEAST_GAIN = 0.1
"""A move promises to make epochs shorter by that share at least."""
MUST_PAY = 2.0
"""It saves that many times the seconds that it takes, over the epochs that are left."""
MOST_EPOCHS = 1_000
"""How many epochs a run is thought to have left, at most."""
FIRST_MOVE_SECONDS = 0.1
"""What a move is thought to take, besides twice the last save."""


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of a run; "in a row" means with no epoch recorded in between."""

    limit: int  # how many in a row a run recovers from
    in_all: int = 0
    in_a_row: tuple[tuple[str, ...], ...] = ()
    """The tasks that ran at each loss on the lost worker, as ``node/task``, if known."""

    def after_loss(self, running: Collection[str] = ()) -> Losses:
        """Add a loss, at which these tasks ran on the lost worker."""
        return Losses(self.limit, self.in_all + 1, (*self.in_a_row, tuple(running)))

    def after_record(self) -> Losses:
        """Begin a new row: an epoch was recorded."""
        return Losses(self.limit, self.in_all)

    @property
    def are_too_many(self) -> bool:
        """Whether the run must end."""
        return len(self.in_a_row) > self.limit

    def describe(self) -> str:
        """Say how many losses came in a row, and which tasks ran at each of several."""
        count = (
            f"That was loss {len(self.in_a_row)} in a row with no epoch recorded in between; "
            f"max_restarts is {self.limit}."
        )
        first, *later = self.in_a_row
        suspects = set(first).intersection(*later)
        if not (suspects and later):
            return count
        return f"{count} Running each time: {', '.join(sorted(suspects))}."


@dataclass(slots=True)
class Progress:
    """How far a run is."""

    losses: Losses
    epoch: int = 0  # the last that ended; 0 is "after init"
    steps_done: int = 0  # of the next epoch, in the loaded checkpoint
    recorded: Position | None = None  # what was recorded last, or was loaded
    fired: tuple[str, ...] = ()  # stop conditions that were true when `epoch` ended
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)  # by epoch
    saves: list[SaveReport] = field(default_factory=list)  # the newest
    failed_saves: list[SaveReport] = field(default_factory=list)
    num_saves: int = 0  # without those that failed
    reported: dict[str, Any] = field(default_factory=dict)  # in the last epoch, or its steps so far
    epoch_seconds: float = math.inf  # the last epoch's
    under_way_until: int = 0  # the epoch after those that workers run now
    wary_until: int = 0  # earlier epochs, which a loss interrupted, are saved one by one
    resumed_from: PublicPosition | None = None  # by the first load; None: it began with init

    @property
    def at(self) -> Position:
        """The last epoch that ended."""
        return Position(self.epoch)

    @property
    def is_recorded(self) -> bool:
        """Whether the last epoch that ended is recorded."""
        return self.recorded == self.at

    def end(self, epoch: int, result: GroupResult) -> None:
        """Note that an epoch has ended."""
        self.epoch, self.fired, self.epoch_seconds = epoch, result.stopped, result.seconds
        self.metrics[epoch] = self.reported = dict(result.metrics)

    def fire(self, names: Sequence[str]) -> None:
        """Count what ends the job here among the stop conditions that are true."""
        self.fired = tuple(dict.fromkeys((*self.fired, *names)))

    def lose(self, running: Collection[str]) -> None:
        """Note a loss, at which these tasks ran on the lost worker."""
        self.losses = self.losses.after_loss(running)
        self.wary_until = max(self.wary_until, self.under_way_until)

    def note_save(self, report: SaveReport) -> None:
        """Note a save."""
        reports = self.failed_saves
        if report.error is None:
            reports = self.saves
            self.num_saves += 1
            if self.losses.in_a_row:
                self.losses = self.losses.after_record()
            self.recorded = Position.of(report.epoch)
        reports.append(report)
        del reports[:-MOST_REPORTS]

    def is_wary(self, epoch: int) -> bool:
        """Whether to save an epoch before the next one begins.

        Else an epoch that kills workers, in a batch with those before it, would keep these from ever
        being recorded.
        """
        return epoch < self.wary_until

    def stopped_by(self, limit: int | None) -> str:
        """The stop condition or limit that ends the job after `epoch`; empty: it continues."""
        if self.steps_done:  # an epoch that has begun also ends, whatever the limit is now
            return ""
        if self.fired:
            return self.fired[0]
        if self.epochs_left(limit) <= 0:
            return "epoch_limiter"
        return ""

    def epochs_left(self, limit: int | None) -> float:
        """How many epochs there are until the limit; infinitely many without one."""
        if limit is None:
            return math.inf
        return limit - self.epoch

    def status(self) -> Status:
        """How far the run is, for its heartbeat, whose thread calls this."""
        metrics = self.metrics.get(self.epoch, {}).items()
        shown = {name: float(value) for name, value in metrics if isinstance(value, Real)}
        return Status(self.epoch, len(self.metrics), shown)

    def details(self, at: Position) -> dict[str, Any]:
        """What the record of a position says of the run."""
        fired = list(self.fired)
        if at.step:
            fired = []
        return {"stopped_by": fired, "metrics": dict(self.reported)}

    def result(self, limit: int | None) -> RunResult:
        """The result for the user."""
        return RunResult(
            epoch=self.epoch,
            resumed_from=self.resumed_from,
            stopped_by=self.stopped_by(limit),
            restarts=self.losses.in_all,
            metrics=[{**self.metrics[epoch], "epoch": epoch} for epoch in sorted(self.metrics)],
            saves=list(self.saves),
            failed_saves=list(self.failed_saves),
            num_saves=self.num_saves,
        )


class Stopwatch:
    """Adds up where a run's time goes, for its records; see docs/watching.md. `began` is by `clock`."""

    def __init__(self, began: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._began = self._since = began
        self._clock = clock
        self._part: TimePart = "start"
        self._spent = dict.fromkeys(TIME_PARTS, 0.0)
        self._marks: dict[Position, float] = {}  # what is saved -> `compute` when its save began
        self._losses: list[dict[str, Any]] = []
        self._told = 0  # how many of them a record tells
        self._from: Position | None = None  # what was loaded last

    def enter(self, part: TimePart) -> TimePart:
        """Count the time from now on as `part`; returns what it was before."""
        now, before = self._clock(), self._part
        self._spent[before] += now - self._since
        self._since, self._part = now, part
        if before == "recovery" and part in ("compute", "idle"):
            for loss in self._losses:
                if "resumed" not in loss:
                    loss["resumed"] = round(now - self._began, 4)
                    loss["epoch"] = None if self._from is None else self._from.to_json()
        return before

    @contextmanager
    def spending(self, part: TimePart) -> Iterator[None]:
        """Count the time of a with block as `part`."""
        before = self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def lose(self, text: str) -> None:
        """Note a loss: recovery begins."""
        self.enter("recovery")
        self._losses.append({"at": round(self._since - self._began, 4), "text": text})

    @property
    def seconds_lost(self) -> float:
        """The time since the last loss."""
        return self._clock() - self._began - float(self._losses[-1]["at"])

    def go_back(self, to: Position | None) -> None:
        """Note that the run goes on from what was recorded there, or None: from the start."""
        self.enter(self._part)
        kept = 0.0
        marks: dict[Position, float] = {}
        if to is not None:
            kept = self._marks.get(to, 0.0)
            marks = {at: compute for at, compute in self._marks.items() if at <= to}
        self._spent["redone"] += self._spent["compute"] - kept
        self._spent["compute"] = kept
        self._from = to
        self._marks = marks

    def capture(self, at: Position) -> dict[str, Any]:
        """What the record of a position says of the time when its save begins.

        A loss is told by the first record after it, and by the end of the run again, should that record
        have failed.
        """
        self.enter(self._part)
        self._marks[at] = self._spent["compute"]
        if len(self._marks) > MOST_MARKS:
            del self._marks[next(iter(self._marks))]
        timing = self._timing()
        losses = [loss for loss in self._losses[self._told :] if "resumed" in loss][:MOST_LOSSES]
        self._told += len(losses)
        if losses:
            timing["losses"] = losses
        return {"timing": timing}

    def end(self, outcome: str, recorded: Position | None) -> dict[str, Any]:
        """What the ``end`` entry says of the run, after the last epoch that is recorded."""
        self.enter(self._part)
        if outcome != "finished":  # epochs that were not saved run again
            self.go_back(recorded)
        timing = self._timing()
        if self._losses:
            timing["losses"] = self._losses[-MOST_LOSSES:]
        return {"outcome": outcome, "timing": timing}

    def _timing(self) -> dict[str, Any]:
        return {part: round(seconds, 4) for part, seconds in self._spent.items() if seconds}


def next_decision(
    *,
    stopped_by: str = "",  # the stop condition or limit that ends the job here
    stop_asked: str = "",  # the reason of a request to stop
    is_recorded: bool = False,
    is_leaving: bool = False,  # a worker in use has announced that it retires
    has_room: bool = False,  # a move to workers that have joined is worthwhile
) -> Decision:
    """Decide what comes after an epoch that has ended or was loaded.

    A job at its end runs its last groups even if it was asked to stop. Nodes move only after a
    recorded epoch, so that nothing runs twice.
    """
    if stopped_by:
        return "finish"
    if stop_asked:
        return "stop"
    if is_recorded and (is_leaving or has_room):
        return "move"
    return "run an epoch"


def each_step(
    plan: Plan, epoch: int, first: int, run: Callable[[str, int, int], GroupResult]
) -> Iterator[tuple[int, GroupResult, bool]]:
    """Run an epoch from step `first` on, counted from 0, and its end group after the last step.

    `run` runs a group, given its key, epoch and step. Yields after each step how many are done, its
    result, and whether the epoch has ended; the last result includes that of the end group.
    """
    step, has_ended = first, False
    while not has_ended:
        result = run("epoch", epoch, step)
        step += 1
        has_ended = step >= plan.steps_per_epoch
        if has_ended and "epoch_end" in plan.groups:
            last = run("epoch_end", epoch, step)
            stopped = (*result.stopped, *last.stopped)
            result = GroupResult(
                seconds=result.seconds + last.seconds,
                stopped=tuple(name for name in plan.stops if name in stopped),
                metrics={**result.metrics, **last.metrics},
            )
        yield step, result, has_ended


def remainder(
    at: Position,
    limit: int | None,
    *,
    fired: Sequence[str] = (),
    later: Sequence[Position] = (),
    is_done: bool = False,
) -> Literal["epochs", "last groups", "nothing"]:
    """What is left to run after the load of what is recorded at a position.

    `fired` are the stop conditions that were
    true, `later` what is recorded after it; `is_done`: the last run ran its exit group.
    """
    is_reached = limit is not None and at.epoch >= limit
    if at.step or not (fired or is_reached):
        return "epochs"
    return "nothing" if is_done and not later else "last groups"


def is_move_worthwhile(
    now: Mapping[str, str],
    after: Mapping[str, str],
    threads: Mapping[str, int],
    *,
    epoch_seconds: float,  # an infinite one is longer than any move
    epochs_left: float,
    save_seconds: float,
) -> bool:
    """Whether to move nodes to workers that have joined, which have so many threads.

    An epoch takes as long as its fullest worker, and all nodes count the same. So a move may promise
    too much, but there is only one for each time that workers join.
    """
    gain = 1 - _fullest(after, threads) / _fullest(now, threads)
    if gain < LEAST_GAIN:
        return False
    left = min(epochs_left, MOST_EPOCHS)
    move_seconds = FIRST_MOVE_SECONDS + 2 * save_seconds
    return gain * epoch_seconds * left >= MUST_PAY * move_seconds


def _fullest(placement: Mapping[str, str], threads: Mapping[str, int]) -> float:
    """How many nodes each thread of the fullest worker has."""
    counts = Counter(placement.values())
    return max(count / threads.get(address, 1) for address, count in counts.items())
