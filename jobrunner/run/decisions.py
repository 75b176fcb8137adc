"""6 loop: what a run does next, as pure functions of what is known. No I/O, no Dask, no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

Step = Literal["run an epoch", "finish", "stop", "move"]


@dataclass(frozen=True, slots=True)
class Boundary:
    """What is known when an epoch has ended, or the state of one has been loaded.

    Attributes
    ----------
    stopped_by : str
        The stop condition or limit that ends the job here; empty: it goes on.
    stop_asked : str
        Who asked the run to stop; empty: nobody.
    is_recorded : bool
        The checkpoint of this very epoch is recorded.
    is_leaving : bool
        A worker in use announced that it leaves.
    has_room : bool
        Workers that the last loss took away have been replaced.
    """

    stopped_by: str = ""
    stop_asked: str = ""
    is_recorded: bool = False
    is_leaving: bool = False
    has_room: bool = False


def next_step(boundary: Boundary) -> Step:
    """What comes after an epoch.

    A job that has come to its end is finished, even when it was asked to stop: what is left is
    its exit group. Nodes move only from a recorded epoch, for then nothing is run again.
    """
    if boundary.stopped_by:
        return "finish"
    if boundary.stop_asked:
        return "stop"
    if boundary.is_recorded and (boundary.is_leaving or boundary.has_room):
        return "move"
    return "run an epoch"


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses with no epoch recorded in between.

    Attributes
    ----------
    limit : int
        How many a run survives in a row.
    in_a_row : int
    in_all : int
    running : mapping of str to int
        ``node/task`` -> how many of those in a row came while it ran on the worker that died, as
        far as that is known.
    careful : int
        How many of those in a row came in a run whose tasks begin only once they are known of.
    surely : mapping of str to int
        ``node/task`` -> at how many of these it ran.
    epochs : range
        In which those in a row came.
    """

    limit: int
    in_a_row: int = 0
    in_all: int = 0
    running: Mapping[str, int] | None = None
    careful: int = 0
    surely: Mapping[str, int] | None = None
    epochs: range = range(0)

    def after_loss(
        self,
        running: Collection[str] = (),
        epochs: range = range(0),
        *,
        was_careful: bool = False,
    ) -> Losses:
        """One more; `running` is what ran on the worker, `epochs` those that were under way."""
        return replace(
            self,
            in_a_row=self.in_a_row + 1,
            in_all=self.in_all + 1,
            running=_counted(self.running, running),
            careful=self.careful + was_careful,
            surely=_counted(self.surely, running if was_careful else ()),
            epochs=_span(self.epochs, epochs),
        )

    def after_record(self) -> Losses:
        """An epoch was recorded."""
        return Losses(self.limit, in_all=self.in_all)

    def call_for_care(self, epoch: int) -> bool:
        """Whether to find out in `epoch` which task it is; one loss has other reasons as a rule."""
        return self.in_a_row >= 2 and epoch in self.epochs

    @property
    def are_too_many(self) -> bool:
        """Whether the run must end."""
        return self.in_a_row > self.limit

    @property
    def accusation(self) -> str:
        """What to say of the suspects, as a sentence after others."""
        suspects = " and ".join(self.suspects)
        if not suspects:
            return ""
        if not self.careful:
            return f" Each time {suspects} was running."
        times = "the last time" if self.careful == 1 else "the last times"
        return (
            f" {suspects} was running {times}, when each task was told of before it began and no "
            f"other ran beside it: see whether it kills its worker."
        )

    @property
    def suspects(self) -> list[str]:
        """Tasks that ran at every one of several losses: they may well be the cause."""
        if self.careful:
            return [name for name, count in (self.surely or {}).items() if count == self.careful]
        if self.in_a_row < 2:
            return []
        return [name for name, count in (self.running or {}).items() if count == self.in_a_row]


def _counted(counts: Mapping[str, int] | None, names: Collection[str]) -> dict[str, int]:
    """The counts, with one more for each of some names."""
    new = dict(counts or {})
    for name in names:
        new[name] = new.get(name, 0) + 1
    return new


def _span(one: range, other: range) -> range:
    """The shortest range that holds both."""
    if not one or not other:
        return one or other
    return range(min(one.start, other.start), max(one.stop, other.stop))
