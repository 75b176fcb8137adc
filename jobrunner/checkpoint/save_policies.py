"""Save policies: when a run saves. They do no I/O."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from jobrunner.define import Count, Interval, Rule, Seconds, checked, number
from jobrunner.errors import DefinitionError


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time between two steps (runs of the epoch group), when a save is possible.

    Attributes
    ----------
    epoch : int
        The epoch that is running, or has just ended.
    step : int
        The number of steps of this epoch that have ended, at least 1.
    steps_per_epoch : int
    seconds_since_save : float
        Time since the last save began, or since the run began.
    is_saving : bool
        Whether so much is still being written in the background that epochs would wait.
    seconds_to_record : float or None
        The longest that one of the last few saves took until it was recorded; None before the first.
    seconds_to_next : float or None
        The longest time between two of the last few such moments, without the time for saves. If
        workers run several short epochs without asking the client, there is none in between.
    time : float
        Unix time, in seconds.
    metrics : mapping
        What the tasks of this epoch have reported so far, by name; see `CurrentTask.report`.
    """

    epoch: int
    step: int
    steps_per_epoch: int
    seconds_since_save: float = 0.0
    is_saving: bool = False
    seconds_to_record: float | None = None
    seconds_to_next: float | None = None
    time: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_boundary(self) -> bool:
        """Whether the epoch has ended."""
        return self.step == self.steps_per_epoch

    @property
    def total_steps(self) -> int:
        """The number of steps since epoch 0, including those before a resume."""
        return (self.epoch - 1) * self.steps_per_epoch + self.step


class Pace:
    """Measures how long a run's steps and saves take. `now` is the monotonic clock's time."""

    def __init__(self, now: float) -> None:
        self._last_save = self._last_look = now
        self._records: deque[float] = deque(maxlen=5)
        self._gaps: deque[float] = deque(maxlen=5)

    def begin_save(self, now: float) -> None:
        """Note the begin of a save, or of the right to save."""
        self._last_save = now

    def continue_run(self, now: float) -> None:
        """Note that nodes are placed, or that epochs go on after a save."""
        self._last_look = now

    def end_save(self, seconds: float) -> None:
        """Note how long it took until a save was recorded."""
        self._records.append(seconds)

    def look(self, now: float, moment: Moment) -> Moment:
        """The moment, with what this pace knows of it; `now` is the monotonic clock's time."""
        self._gaps.append(now - self._last_look)
        self._last_look = now
        return replace(
            moment,
            seconds_since_save=now - self._last_save,
            seconds_to_record=max(self._records, default=None),
            seconds_to_next=max(self._gaps),
        )


@runtime_checkable
class SavePolicy(Protocol):
    """Decides when to save.

    A run also saves epoch 0, the last epoch, and when `JobRunner.save_now` asks for it. A policy
    may also have a method ``epochs_until(epoch, steps_per_epoch)``: how many epochs, from `epoch`
    on, may run before `is_due` must be asked; None if only time decides. It lets workers run
    several short epochs without asking the client.

    Examples
    --------
    >>> class UnlessNaN:
    ...     def is_due(self, moment):
    ...         loss = moment.metrics.get("loss", 0.0)
    ...         return moment.seconds_since_save >= 300 and not np.isnan(loss)
    >>> UnlessNaN().is_due(Moment(7, 1, 1, seconds_since_save=301, metrics={"loss": np.nan}))
    False
    """

    def is_due(self, moment: Moment) -> bool:
        """Whether to save now; must depend on `moment` alone."""


def epochs_until(policy: SavePolicy, epoch: int, steps_per_epoch: int) -> int | None:
    """Call the policy's ``epochs_until``; 1 if it has none. See `SavePolicy`."""
    method = getattr(policy, "epochs_until", None)
    if method is None:
        return 1
    count: int | None = method(epoch, steps_per_epoch)
    return count


def stride_of(policy: SavePolicy, steps_per_epoch: int) -> int | None:
    """A number of epochs; all multiples of it are due, and nothing else that depends on numbers.

    None: the policy must be asked.
    """
    if type(policy) is not SaveEvery or (policy.steps or 0) % steps_per_epoch:
        return None
    intervals = policy._intervals(steps_per_epoch)
    return intervals[0] if len(intervals) == 1 else None


class _JoinsSaves:
    """Joins save policies with ``|``."""

    __slots__ = ()

    def __or__(self, policy: SavePolicy) -> AnyOf:
        if not isinstance(policy, SavePolicy):
            return NotImplemented
        return AnyOf((self, policy))  # type: ignore[arg-type]  # every subclass has `is_due`

    def __ror__(self, policy: SavePolicy) -> AnyOf:
        """For a user's policy on the left, which may have no ``|`` of its own."""
        if not isinstance(policy, SavePolicy):
            return NotImplemented
        return AnyOf((policy, self))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class AnyOf(_JoinsSaves):
    """Save when any of `policies` is due; ``a | b`` makes one."""

    policies: tuple[SavePolicy, ...]

    def is_due(self, moment: Moment) -> bool:
        """Whether any policy is due."""
        return any(policy.is_due(moment) for policy in self.policies)

    def epochs_until(self, epoch: int, steps_per_epoch: int) -> int | None:
        """How many epochs may run before any policy must be asked."""
        counts = [epochs_until(policy, epoch, steps_per_epoch) for policy in self.policies]
        return min((count for count in counts if count is not None), default=None)


@checked
@dataclass(frozen=True, slots=True)
class SaveEvery(_JoinsSaves):
    """Save at intervals: whenever one of them ends.

    Parameters
    ----------
    epochs : int, optional
        Save after each epoch whose number is a multiple of this.
    steps : int, optional
        Save each time the epoch group has run this often, counted from epoch 0, and at the end of
        each epoch in which it did so.
    seconds : float, optional
        Save after the first step that ends this long or longer after the last save began.

    Raises
    ------
    DefinitionError
        There is no interval, or one is not positive.

    Examples
    --------
    >>> every_other = SaveEvery(epochs=2) | SaveEvery(seconds=600)
    >>> every_other.is_due(Moment(3, step=1, steps_per_epoch=1, seconds_since_save=5))
    False
    """

    epochs: Count | None = None
    steps: Count | None = None
    seconds: Interval | None = None

    def __post_init__(self) -> None:
        if self.epochs is None and self.steps is None and self.seconds is None:
            raise DefinitionError(
                "SaveEvery needs an interval: SaveEvery(epochs=1), SaveEvery(steps=100) or "
                "SaveEvery(seconds=600)."
            )

    def is_due(self, moment: Moment) -> bool:
        """Whether one of the intervals has ended."""
        if self.epochs is not None and moment.is_boundary and moment.epoch % self.epochs == 0:
            return True
        total = moment.total_steps
        before = total - 1
        if moment.is_boundary:  # whether a multiple of `steps` lies within the epoch
            before = total - moment.step
        if self.steps is not None and total // self.steps > before // self.steps:
            return True
        return self.seconds is not None and moment.seconds_since_save >= self.seconds

    def epochs_until(self, epoch: int, steps_per_epoch: int) -> int | None:
        """How many epochs, from `epoch` on, may run before a save is due; None: time decides."""
        intervals = self._intervals(steps_per_epoch)
        counts = [interval - (epoch - 1) % interval for interval in intervals]
        return min(counts, default=None)

    def _intervals(self, steps_per_epoch: int) -> list[int]:
        """The numbers of epochs, and steps as epochs: 1 if some are saved within epochs."""
        intervals = []
        if self.epochs is not None:
            intervals.append(self.epochs)
        if self.steps is not None:
            whole_epochs, steps_left = divmod(self.steps, steps_per_epoch)
            intervals.append(1 if steps_left else whole_epochs)
        return intervals


_UNIX_SECONDS = number("Unix seconds", lambda seconds: 0 <= seconds < 1e12)


def _is_deadline(value: Any) -> bool:
    return isinstance(value, datetime) or _UNIX_SECONDS.fits(value) or str(value) == "slurm"


_DEADLINE = Rule("Unix seconds, a datetime or 'slurm'", _is_deadline)


@checked
@dataclass(frozen=True, slots=True)
class SaveBefore(_JoinsSaves):
    """Save once more before the run must end, such as at the time limit of a batch system.

    Parameters
    ----------
    deadline : float, datetime or "slurm"
        When the run must have been recorded: Unix time in seconds, or a `datetime.datetime` (local
        time if it has no time zone). ``"slurm"``: the end of the Slurm job that this process is
        part of, from the environment variable ``SLURM_JOB_END_TIME``.
    margin_seconds : float
        How long before that.

    Attributes
    ----------
    deadline : float
        Unix time in seconds.

    Raises
    ------
    DefinitionError
        An argument is invalid, or the environment names no end of a Slurm job.

    Notes
    -----
    It saves after the last step that can be recorded in time: when the next step, as long as the
    longest of the last few, and a save, as long as the longest of the last few, would end too late.
    The run goes on; what it does after that save may be lost.
    """

    deadline: Annotated[float | datetime | Literal["slurm"], _DEADLINE]
    margin_seconds: Seconds = 60

    def __post_init__(self) -> None:
        deadline: object = self.deadline
        if isinstance(deadline, datetime):
            deadline = deadline.timestamp()
        elif deadline == "slurm":
            deadline = os.environ.get("SLURM_JOB_END_TIME", "")
            if not deadline.isdecimal():
                raise DefinitionError(
                    f"SaveBefore('slurm'): expected the environment variable SLURM_JOB_END_TIME to "
                    f"be a time in Unix seconds, as Slurm sets it in its jobs; got {deadline!r}. "
                    f"Run in a Slurm job, or pass the time itself."
                )
        object.__setattr__(self, "deadline", float(deadline))  # type: ignore[arg-type]

    def is_due(self, moment: Moment) -> bool:
        """Whether the next step and a save would end too late."""
        assert isinstance(self.deadline, float)
        seconds_left = self.deadline - moment.time
        saves = 2 if moment.is_saving else 1  # another save waits for the one in the background
        needed = self.margin_seconds + (moment.seconds_to_next or 0.0)
        needed += saves * (moment.seconds_to_record or 0.0)
        # A save that began when no more time was left than that need not be repeated.
        return seconds_left <= needed < seconds_left + moment.seconds_since_save

    def epochs_until(self, epoch: int, steps_per_epoch: int) -> int | None:
        """None: only time decides."""
        return None
