"""What the runs of a checkpoint directory did: epochs, losses, and where the time went."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any, Literal

from jobrunner.names import described_nodes
from jobrunner.positions import PublicPosition

StateName = Literal["running", "finished", "stopped", "failed", "lost"]

OUTCOMES = {
    "running": "is running, or was a moment before",
    "finished": "has finished",
    "stopped": "has ended",
    "failed": "failed",
    "lost": "ended without a word, as after a crash",
}
"""What people read of each state."""


@dataclass(slots=True)
class Ledger:
    """Where the time of a run, or of several, went, in seconds.

    Attributes
    ----------
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

    start: float = 0.0
    compute: float = 0.0
    save_wait: float = 0.0
    redone: float = 0.0
    recovery: float = 0.0
    idle: float = 0.0

    @property
    def wall(self) -> float:
        """From the call of `JobRunner.run` to its end, or to the last sign of life."""
        return float(sum(astuple(self)))

    @property
    def goodput(self) -> float:
        """The share of `wall` that is `compute`, from 0 to 1."""
        if not self.wall:
            return 0.0
        return self.compute / self.wall

    @classmethod
    def total(cls, ledgers: Iterable[Ledger]) -> Ledger:
        """The sum of some ledgers."""
        total = cls()
        for ledger in ledgers:
            total = cls(*map(sum, zip(astuple(total), astuple(ledger), strict=True)))
        return total


PARTS = tuple(part.name for part in fields(Ledger))
"""The names of a ledger's parts."""


@dataclass(slots=True)
class EpochStory:
    """A recorded epoch.

    Attributes
    ----------
    epoch : int or Position
        A position within an epoch, or a whole epoch.
    recorded : float
        When, as Unix time in seconds.
    save_seconds : float
        Until the slowest node's store was durable.
    nbytes : int
        Bytes written by all nodes.
    metrics : mapping
        What tasks reported, by name.
    is_kept : bool
        Whether its checkpoint can be loaded.
    is_set_aside : bool
        Whether it was run again, or not continued.
    stopped_by : sequence of str
        What ended the job after it.
    compute : float
        Seconds that its run had computed when it ended.
    """

    epoch: PublicPosition
    recorded: float
    save_seconds: float
    nbytes: int
    metrics: Mapping[str, Any]
    is_kept: bool = False
    is_set_aside: bool = False
    stopped_by: Sequence[str] = ()
    compute: float = 0.0


@dataclass(frozen=True, slots=True)
class LossStory:
    """A lost worker or scheduler, or an error that counts as transient.

    Attributes
    ----------
    time : float
        When, as Unix time in seconds.
    text : str
        What was lost, and why.
    resumed : float or None
        When the run went on, as Unix time in seconds; None: it did not.
    resumed_from : int, Position or None
        The epoch from which it went on; None: from the start, or not at all.
    """

    time: float
    text: str
    resumed: float | None
    resumed_from: PublicPosition | None


@dataclass(slots=True)
class RunStory:
    """What one run did.

    Attributes
    ----------
    name : str
        Its name in the log.
    began : float
        When, as Unix time in seconds.
    last_seen : float
        Its end, or else its last sign of life, as Unix time in seconds.
    number : int
        1 for the first run of the directory.
    host : str
        Empty if not recorded.
    pid : int or None
        The process; None if not recorded.
    plan : mapping
        How it described its tasks; empty if that is not recorded.
    environment : mapping
        What it ran on: versions, workers, working directory, command.
    state : str
        ``"running"``: it may be alive; ``"finished"``: the job ended; ``"stopped"``: the run ended,
        but not the job; ``"failed"``: an error ended it; ``"lost"``: it ended without a word, as after
        a crash.
    stopped_by : sequence of str
        What ended the job, as its last record says: names of stop conditions, the limit of epochs,
        or callbacks.
    resumed_from : int, Position or None
        The epoch it resumed from; None if it began with the init group.
    epochs : list of EpochStory
        All that it recorded, also those removed since.
    losses : sequence of LossStory
        In the order in which they came.
    ledger : Ledger
        Of a run that is still running: up to its last save.
    """

    name: str
    began: float
    last_seen: float
    number: int = 0
    host: str = ""
    pid: int | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    state: StateName = "lost"
    stopped_by: Sequence[str] = ()
    resumed_from: PublicPosition | None = None
    epochs: list[EpochStory] = field(default_factory=list)
    losses: Sequence[LossStory] = ()
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def job(self) -> str:
        """The name of the job; empty if not recorded."""
        return str(self.plan.get("job") or "")

    @property
    def nodes(self) -> Collection[str]:
        """The nodes of the job; none if not recorded."""
        return described_nodes(self.plan)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """What the function that made the job was called with."""
        parameters: Mapping[str, Any] = self.plan.get("parameters", {})
        return parameters


@dataclass(frozen=True, slots=True)
class Story:
    """What all runs of a directory did."""

    path: str
    runs: Sequence[RunStory]

    @property
    def ledger(self) -> Ledger:
        """The sum of the runs' ledgers; the time between runs is in none of them."""
        return Ledger.total(run.ledger for run in self.runs)

    @property
    def gap_seconds(self) -> float:
        """The time between the runs."""
        pairs = zip(self.runs, self.runs[1:], strict=False)
        return sum(max(0.0, later.began - run.last_seen) for run, later in pairs)
