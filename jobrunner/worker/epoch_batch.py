"""4 run: several runs of a group for one message of the client. Decides, sends nothing.

One of the workers leads: it holds all stop conditions, if there are any. After each epoch it says
whether the others may go on, ahead of time where nothing is judged, and never further ahead
than a window of runs that the slowest is within. So every worker ends after the same epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

AHEAD_SECONDS = 0.01
LEAST_AHEAD_RUNS, MOST_AHEAD_RUNS = 8, 32
"""Where no stop condition is read, the lead grants so many runs ahead as fit into that time."""
WINDOW_RUNS = 64
"""How many runs any worker may be ahead of the slowest."""
REPORT_RUNS = 16
"""A follower says how far it has got after every so many runs."""

Action = Literal["run", "wait", "end", "abort"]


@dataclass(slots=True)
class Ended:
    """What one run came to on this worker.

    Attributes
    ----------
    stopped : list of str
        The stop conditions that were true.
    metrics : str
        JSON text.
    seconds : float
        Since the run before ended, or the batch began.
    """

    stopped: list[str]
    metrics: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Grant:
    """How many of a batch's runs may run; `is_final`: and no more will."""

    runs: int
    is_final: bool


@dataclass(slots=True)
class EpochBatch:
    """What one worker knows of the runs that it was told to do in one go.

    Attributes
    ----------
    number : int
        Of the first run; the others have the numbers that follow.
    epochs : int
        At most so many.
    steps_per_epoch : int
        Runs that make an epoch. A batch ends after a whole epoch.
    lead : str
        Address of the worker that decides; the empty string where this one does.
    followers : collection of str
        Addresses of those that this one leads.
    is_judged : bool
        Stop conditions are read, by the lead.
    seconds : float
        Let no epoch begin when so much time has passed.
    """

    number: int
    epochs: int = 1
    steps_per_epoch: int = 1
    lead: str = ""
    followers: Collection[str] = ()
    is_judged: bool = False
    seconds: float = 0.0
    clock: Callable[[], float] = monotonic
    ended: list[Ended] = field(default_factory=list)
    abort_reason: str = ""
    _grant: Grant = field(init=False)
    _started: float = field(init=False)
    _last_end: float = field(init=False)
    _reported: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._grant = Grant(self.steps_per_epoch, self.epochs == 1)
        self._started = self._last_end = self.clock()
        self._reported = dict.fromkeys(self.followers, 0)

    @property
    def run_number(self) -> int:
        """The number of the run that is under way, or comes next."""
        return self.number + len(self.ended)

    def covers(self, number: int) -> bool:
        """Whether a run of that number is one of this batch's."""
        return self.number <= number < self.number + self.epochs * self.steps_per_epoch

    def epoch_and_step(self, epoch: int | None, step: int) -> tuple[int | None, int]:
        """Epoch and step of the run that comes next, where the first has these."""
        done = len(self.ended)
        if epoch is None or not done:
            return epoch, step
        return epoch + (step + done) // self.steps_per_epoch, (step + done) % self.steps_per_epoch

    def end_run(self, stopped: list[str], metrics: str) -> None:
        """Take what a run came to."""
        now = self.clock()
        self.ended.append(Ended(stopped, metrics, now - self._last_end))
        self._last_end = now

    def hear_report(self, follower: str, runs: int) -> None:
        """A follower has ended so many runs."""
        self._reported[follower] = max(runs, self._reported.get(follower, 0))

    def hear_grant(self, grant: Grant) -> None:
        """The lead lets this worker go on, or says where the end is."""
        if grant.runs >= self._grant.runs:
            self._grant = grant

    def report(self) -> int | None:
        """What to tell the lead now, if anything."""
        done = len(self.ended)
        return done if self.lead and done % REPORT_RUNS == 0 else None

    def extend(self) -> Grant | None:
        """Decide on the next epochs; gives what the followers must be told, if anything."""
        if self.lead or self._grant.is_final:
            return None
        done, runs = len(self.ended), self._grant.runs
        ahead = 1 if self.is_judged else self._runs_ahead()
        if runs - done > ahead // 2:
            return None
        if self.is_judged and self.ended[-1].stopped:
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
        """What to do when no run is under way."""
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
