"""What a story has: the runs of a checkpoint directory, their epochs, saves, losses and time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jobrunner.positions import PublicPosition
from jobrunner.report.ledger import Ledger, total

StateName = Literal["running", "finished", "stopped", "failed", "lost"]


@dataclass(frozen=True, slots=True)
class EpochStory:
    """A recorded epoch. Times are Unix times in seconds, here and below."""

    number: int
    ended: float
    seconds: float  # that it took; on average, if epochs before it were not recorded
    metrics: Mapping[str, Any]  # the first 4,096
    is_set_aside: bool  # it was run again, or not continued


@dataclass(frozen=True, slots=True)
class SaveStory:
    """A recorded checkpoint."""

    epoch: PublicPosition
    step: int  # 0: it contains whole epochs
    ended: float
    seconds: float  # until the slowest node's store was durable
    wait_seconds: float  # that epochs waited for it; 0 if the run was lost before it told
    nbytes: int
    nodes: Mapping[str, float]  # how long each took, in seconds


@dataclass(frozen=True, slots=True)
class LossStory:
    """A lost worker or scheduler, or an error that counts as transient."""

    time: float
    text: str
    resumed: float | None  # when the run went on; None: it did not
    resumed_from: PublicPosition | None  # None: the start, or it did not go on


@dataclass(frozen=True, slots=True)
class Span:
    """One call of a task's function, in an epoch of which a sample was taken."""

    node: str
    task: str
    epoch: int
    began: float
    seconds: float


@dataclass(frozen=True, slots=True)
class RunStory:
    """What one run did.

    Attributes
    ----------
    number : int
        1 for the first run of the directory.
    name : str
        Its name in the log.
    job, host : str
        Empty if not recorded.
    pid : int or None
    parameters : mapping
        What the function that made the job was called with.
    plan : mapping
        How it described its tasks; empty if that is not recorded.
    environment : mapping
        What it ran on; see `jobrunner.cluster.environment`.
    began : float
    ended : float or None
        None if it was lost or still runs.
    last_seen : float
        Its end, or else its last sign of life.
    state : str
        ``"running"``: it may be alive; ``"finished"``: the job ended; ``"stopped"``: it was asked to
        end early; ``"failed"``: an error ended it; ``"lost"``: it ended without a word, as after a
        crash.
    resumed_from : int, Position or None
        The epoch it resumed from; None if it began with the init group.
    epochs : tuple of EpochStory
        The whole epochs that it recorded, also those removed since.
    saves : tuple of SaveStory
    losses : tuple of LossStory
    moves : tuple of (float, float)
        From when to when nodes moved to other workers, without a loss.
    spans : tuple of Span
        Of the newest 100,000 samples of all runs, those of this one.
    ledger : Ledger
        Of a run that is still running: up to its last save.
    is_estimated : bool
        The run recorded no timing; the ledger is derived from the times of its saves.
    """

    number: int
    name: str
    job: str
    host: str
    pid: int | None
    parameters: Mapping[str, Any]
    plan: Mapping[str, Any]
    environment: Mapping[str, Any]
    began: float
    ended: float | None
    last_seen: float
    state: StateName
    resumed_from: PublicPosition | None
    epochs: tuple[EpochStory, ...]
    saves: tuple[SaveStory, ...]
    losses: tuple[LossStory, ...]
    moves: tuple[tuple[float, float], ...]
    spans: tuple[Span, ...]
    ledger: Ledger
    is_estimated: bool


@dataclass(frozen=True, slots=True)
class Story:
    """What all runs of a directory did."""

    path: str
    runs: tuple[RunStory, ...]

    @property
    def ledger(self) -> Ledger:
        """The sum of the runs' ledgers; the time between runs is in none of them."""
        return total(run.ledger for run in self.runs)

    @property
    def gap_seconds(self) -> float:
        """The time between the runs."""
        pairs = zip(self.runs, self.runs[1:], strict=False)
        return sum(max(0.0, later.began - run.last_seen) for run, later in pairs)
