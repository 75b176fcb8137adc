"""Where the time of runs went. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from operator import add, attrgetter
from typing import NamedTuple

from jobrunner.checkpoint import Timing
from jobrunner.positions import Position


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

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(*map(add, _values(self), _values(other)))

    @classmethod
    def of(cls, timing: Timing) -> Ledger:
        """What a run had spent, as a record says."""
        parts = {part.name: getattr(timing, part.name) for part in fields(cls)[1:]}
        return cls(sum(parts.values()), **parts)


_values = attrgetter(*(part.name for part in fields(Ledger)))


class Mark(NamedTuple):
    """What a run had spent when the save of a checkpoint began, since the run began."""

    at: Position
    spent: Ledger


def total(ledgers: Iterable[Ledger]) -> Ledger:
    """The sum."""
    return sum(ledgers, Ledger())


def estimate(
    began: float, saves: Sequence[tuple[Position, float, float]]
) -> tuple[list[Mark], Ledger]:
    """The marks of a run that recorded no timing, as far as its entries tell, and what it spent.

    `saves` are the position, the end and the seconds of each. Whatever lies between two saves counts as
    epochs.
    """
    marks: list[Mark] = []
    spent, last = Ledger(), began
    for at, ended, seconds in saves:
        ended = max(ended, last)
        seconds = min(seconds, ended - last)
        spent = spent + _part("compute" if marks else "start", ended - seconds - last)
        marks.append(Mark(at, spent))
        spent, last = spent + _part("save_wait", seconds), ended
    return marks, spent


def _part(name: str, seconds: float) -> Ledger:
    return Ledger(**{"wall": seconds, name: seconds})


def close(spent: Ledger, wall: float, *, is_lost: bool) -> Ledger:
    """The ledger of a run that had `spent` something at its last record, and took `wall` in all.

    What came after is idle; or redone, if the run was lost.
    """
    rest = max(0.0, wall - spent.wall)
    return spent + _part("redone" if is_lost else "idle", rest)


def go_back(ledger: Ledger, marks: Sequence[Mark], to: Position | None) -> Ledger:
    """The ledger of an earlier run after another went back to a position; None: to the start."""
    kept = 0.0
    if to is not None:
        kept = max((mark.spent.compute for mark in marks if mark.at <= to), default=0.0)
    lost = max(0.0, ledger.compute - kept)
    return replace(ledger, compute=ledger.compute - lost, redone=ledger.redone + lost)
