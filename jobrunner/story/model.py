"""What the runs of a checkpoint directory did: epochs, saves, losses, and where the time went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from jobrunner.checkpoint import Timing
from jobrunner.positions import Position, PublicPosition

StateName = Literal["running", "finished", "stopped", "failed", "lost"]


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the time of a run, or of several, went. All in seconds; the parts add up to `wall`.

    Attributes
    ----------
    wall : float
        From the call of `JobRunner.run` to its end, or to the last sign of life.
    start : float
        Until the first epoch began: workers found, checkpoint loaded or init group run.
    compute : float
        Epochs that count: no later run or recovery went back to before them.
    save_wait : float
        Epochs waited for saves.
    redone : float
        Epochs that were lost, and so ran in vain.
    recovery : float
        From each loss to the first epoch after it; and moves to other workers.
    idle : float
        The rest: callbacks, the upload, download and exit groups.
    """

    wall: float = 0.0
    start: float = 0.0
    compute: float = 0.0
    save_wait: float = 0.0
    redone: float = 0.0
    recovery: float = 0.0
    idle: float = 0.0

    @property
    def goodput(self) -> float:
        """The share of `wall` that is `compute`, from 0 to 1."""
        return self.compute / self.wall if self.wall else 0.0

    @classmethod
    def of(cls, timing: Timing) -> Ledger:
        """What a run had spent, as a record says."""
        parts = {part: getattr(timing, part) for part in PARTS}
        return cls(sum(parts.values()), **parts)

    @classmethod
    def total(cls, ledgers: Iterable[Ledger]) -> Ledger:
        """The sum of some ledgers."""
        columns = [[getattr(ledger, field.name) for field in fields(cls)] for ledger in ledgers]
        return cls(*map(sum, zip(*columns, strict=True))) if columns else cls()

    def closed(self, wall: float, *, is_lost: bool) -> Ledger:
        """The ledger of a run that took `wall` in all, and had spent this at its last record.

        What came after is idle; or redone, if the run was lost.
        """
        rest = max(0.0, wall - self.wall)
        if is_lost:
            return replace(self, wall=self.wall + rest, redone=self.redone + rest)
        return replace(self, wall=self.wall + rest, idle=self.idle + rest)

    def after_going_back(self, marks: Sequence[Mark], to: Position | None) -> Ledger:
        """The ledger of a run after a later one went back to a position; None: to the start."""
        kept = 0.0
        if to is not None:
            kept = max((mark.spent.compute for mark in marks if mark.at <= to), default=0.0)
        lost = max(0.0, self.compute - kept)
        return replace(self, compute=self.compute - lost, redone=self.redone + lost)


PARTS = tuple(field.name for field in fields(Ledger) if field.name != "wall")
"""The names of a ledger's parts."""


class Mark(NamedTuple):
    """What a run had spent when the save of a position began, since the run began."""

    at: Position
    spent: Ledger


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

    @property
    def slowest(self) -> str:
        """The node that took the longest; empty if there is none."""
        return max(self.nodes, key=self.nodes.__getitem__, default="")


@dataclass(frozen=True, slots=True)
class LossStory:
    """A lost worker or scheduler, or an error that counts as transient."""

    time: float
    text: str
    resumed: float | None  # when the run went on; None: it did not
    resumed_from: PublicPosition | None  # None: the start, or it did not go on


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
    stopped_by : tuple of str
        What ended the job, as its last record says: names of stop conditions, the limit of epochs,
        or callbacks.
    resumed_from : int, Position or None
        The epoch it resumed from; None if it began with the init group.
    epochs : tuple of EpochStory
        The whole epochs that it recorded, also those removed since.
    saves : tuple of SaveStory
    losses : tuple of LossStory
    ledger : Ledger
        Of a run that is still running: up to its last save.
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
    stopped_by: tuple[str, ...]
    resumed_from: PublicPosition | None
    epochs: tuple[EpochStory, ...]
    saves: tuple[SaveStory, ...]
    losses: tuple[LossStory, ...]
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class Story:
    """What all runs of a directory did."""

    path: str
    runs: tuple[RunStory, ...]

    @property
    def ledger(self) -> Ledger:
        """The sum of the runs' ledgers; the time between runs is in none of them."""
        return Ledger.total(run.ledger for run in self.runs)

    @property
    def gap_seconds(self) -> float:
        """The time between the runs."""
        pairs = zip(self.runs, self.runs[1:], strict=False)
        return sum(max(0.0, later.began - run.last_seen) for run, later in pairs)
