"""What a runner reports: its plan, its saves, its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jobrunner.json_output import to_json
from jobrunner.positions import PublicPosition, format_ranges
from jobrunner.texts import printable


@dataclass(frozen=True, slots=True)
class NodeSave:
    """One node's part in a save."""

    seconds: float  # until its store was durable
    nbytes: int  # written


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A save, successful or not.

    Attributes
    ----------
    epoch : int or Position
    seconds : float
        Until the checkpoint was durable and recorded.
    stall_seconds : float
        How long the epochs waited for it.
    nbytes : int
        Bytes written by all nodes.
    nodes : mapping of str to NodeSave
    error : str or None
        Why it failed; None if the checkpoint is recorded.
    step : int
        How many steps it contains besides whole epochs.
    """

    epoch: PublicPosition
    seconds: float
    stall_seconds: float
    nbytes: int
    nodes: Mapping[str, NodeSave] = field(default_factory=dict)
    error: str | None = None
    step: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class RunResult:
    """How a run ended.

    Attributes
    ----------
    epoch : int
        The last finished epoch; 0 is "after init".
    resumed_from : int, Position or None
        The epoch it resumed from; None if it began with the init group.
    stopped_by : str
        ``"node/task"`` or ``"node/blob"`` of the stop condition, ``"epoch_limiter"``, or the
        `Callback.ends_by` of a callback.
    restarts : int
        How often it began again after a loss.
    metrics : list of dict
        What tasks reported: one dict for each epoch that this run finished, with the epoch itself
        under ``"epoch"``.
    saves, failed_saves : list of SaveReport
        The newest ones, at most 1,000 of each.
    num_saves : int
        How many saves succeeded, if that is more than `saves` has.
    """

    epoch: int
    resumed_from: PublicPosition | None
    stopped_by: str
    restarts: int
    metrics: list[dict[str, Any]]
    saves: list[SaveReport]
    failed_saves: list[SaveReport]
    num_saves: int = field(default=0, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        data: dict[str, Any] = to_json(self)
        return data

    def __repr__(self) -> str:
        facts = {
            "epoch": self.epoch,
            "stopped by": self.stopped_by,
            "resumed from": self.resumed_from,
            "restarts": self.restarts,
            "epochs run": len(self.metrics),
            "saves": max(self.num_saves, len(self.saves)),
            "failed saves": len(self.failed_saves),
        }
        shown = [f"{name} {value}" for name, value in facts.items() if value or name == "epoch"]
        return printable(f"<RunResult: {', '.join(shown)}>", kept="")


@dataclass(frozen=True, slots=True, repr=False)
class ResumePlan:
    """Where a run would begin, what it would do, and why.

    Attributes
    ----------
    epoch : int, Position or None
        The epoch it would resume from; None: it would begin with the init group.
    reason : str
    step : int
        How many steps of the next epoch the checkpoint contains.
    steps : tuple of str
        What would run, in order.
    rebuilds : tuple of str
        The init tasks that would run again after the load.
    renames : tuple of str
        Recorded nodes and blobs that have another name now, by ``rename``.
    makes : tuple of str
        Blobs that the checkpoint lacks: what would make them, if not an init task.
    drops : tuple of str
        Recorded nodes and blobs that the job would not load.
    sets_aside : tuple of int or Position
        Recorded epochs that the run would set aside.
    changes : tuple of str
        How this job differs from the recorded one.
    is_finished : bool
        The recorded run ended after its exit group, and nothing would run.
    warnings : tuple of str
        Possible problems: another run uses the directory, or the log has lost entries.
    damaged : mapping of int or Position to str
        Recorded epochs newer than `epoch` that are known to be damaged -> how.
    """

    epoch: PublicPosition | None
    reason: str
    steps: tuple[str, ...] = ()
    rebuilds: tuple[str, ...] = ()
    renames: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    sets_aside: tuple[PublicPosition, ...] = ()
    changes: tuple[str, ...] = ()
    is_finished: bool = False
    step: int = 0
    warnings: tuple[str, ...] = ()
    damaged: Mapping[PublicPosition, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        tree: dict[str, Any] = to_json(self)
        return tree

    @property
    def name(self) -> str:
        """Where it would begin, for a message; not if `epoch` is None."""
        return f"epoch {self.epoch}"

    @property
    def _start(self) -> str:
        start = "from the start" if self.epoch is None else f"from {self.name}"
        return f"{start}: {self.reason}"

    def __str__(self) -> str:
        lines = [self._start, *(f"warning: {warning}" for warning in self.warnings)]
        lines += [f"epoch {epoch} is damaged: {damage}" for epoch, damage in self.damaged.items()]
        sets_aside: tuple[str, ...] = ()
        if self.sets_aside:
            sets_aside = (format_ranges(self.sets_aside),)
        lists = {
            "runs": self.steps,
            "loads under another name": self.renames,
            "makes, as it is not recorded": self.makes,
            "does not load": self.drops,
            "runs again after the load": self.rebuilds,
            "sets aside epochs": sets_aside,
            "changed since it was recorded": self.changes,
        }
        for title, items in lists.items():
            if items:
                lines += [f"{title}:", *(f"  {item}" for item in items)]
        return printable("\n".join(lines))

    def __repr__(self) -> str:
        return printable(f"<ResumePlan {self._start}>", kept="")
