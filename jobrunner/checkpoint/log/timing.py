"""What entries say of a run's time, as it is read. Pure: no I/O.

A `Timing` has all that the run has spent since it began, so that a lost entry makes no hole; the
losses, moves and spans are those since the entry before. A move is from when to when nodes moved to
other workers, in seconds since the run began.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from jobrunner.checkpoint.encoding import EpochJson

MOST_LOSSES, MOST_SPANS = 100, 2_000
"""In one entry, at most."""
LONGEST_TEXT = 1_000

Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]


class LossRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A loss; times are seconds since the run began."""

    at: Seconds
    text: _Text
    resumed: Seconds | None = None  # the first epoch after it began
    epoch: EpochJson | None = None  # that the run went on from; None: from the start


class SpanRecord(NamedTuple):
    """One call of a task's function."""

    node: _Text
    task: _Text
    epoch: Annotated[int, Meta(ge=0, lt=10**18)]
    began: Seconds  # since the run began
    seconds: Seconds


class Timing(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the time of a run went; docs/time.md defines the parts."""

    start: Seconds = 0
    compute: Seconds = 0
    save_wait: Seconds = 0
    redone: Seconds = 0
    recovery: Seconds = 0
    idle: Seconds = 0
    losses: Annotated[list[LossRecord], Meta(max_length=MOST_LOSSES)] = []
    moves: Annotated[list[tuple[Seconds, Seconds]], Meta(max_length=MOST_LOSSES)] = []
    spans: Annotated[list[SpanRecord], Meta(max_length=MOST_SPANS)] = []
