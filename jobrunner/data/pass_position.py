"""Where a reader of numbered records stands: what is left of a pass, and for which shard. Pure.

A pass goes through positions 0, 1, 2, …; an order says which record stands at each. What is left of
a pass is a list of ranges of positions, and each shard has a contiguous part of it. So what all shards
have left, put together, is what is left of the whole, and any number of new shards can divide it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jobrunner.data.saved_state import SavedInt, SavedShard
from jobrunner.errors import PlanMismatchError

Ranges = list[range]

_MOST_PASSES = 1000
"""By so many one shard may be ahead of another, when they are merged."""


class SavedPosition(SavedShard, kw_only=True):
    """What is left of a pass, and of those after it that are not whole: ranges [start, stop]."""

    order: str
    left: list[list[tuple[SavedInt, SavedInt]]]


class PassPosition:
    """The place of one shard in pass after pass.

    Parameters
    ----------
    length : int
        Records of a pass of all shards.
    order : str
        Which records they are and in which order, so that no state is used with others.
    shard : tuple of int
        Which shard, of how many.
    least : int
        The pass ends when fewer records than these are left.
    """

    def __init__(
        self, length: int, order: str, shard: tuple[int, int] = (0, 1), least: int = 1
    ) -> None:
        self._length, self._order, self._shard, self._least = length, order, shard, least
        self.number = 0
        self._left = [self.whole_share(shard)]  # of this pass, and of later ones that are not whole

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left of the pass that would be read."""
        return sum(map(len, self._left[0])) < self._least

    def peek(self, count: int, skip: int = 0) -> Ranges:
        """The next `count` positions after `skip` others, or as many as there are."""
        return cut_ranges(self._left[0], skip, skip + count)

    def advance(self, count: int) -> None:
        """Count the next positions as read."""
        self._left[0] = cut_ranges(self._left[0], count, self._length)

    def begin(self) -> None:
        """Begin the next pass."""
        self.number += 1
        self._left = self._left[1:] or [self.whole_share(self._shard)]

    def whole_share(self, shard: tuple[int, int]) -> Ranges:
        """The part that a shard has of a whole pass."""
        return shard_ranges([range(self._length)], shard)

    def state_dict(self) -> dict[str, Any]:
        """The place as plain values."""
        left = [] if self.has_ended else self._left[0]
        return self._write(self._shard, self.number, [left, *self._left[1:]])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state of this shard was, or to this shard's part of a merged state."""
        saved = SavedPosition.read_own(state, self._shard)
        left = self._left_in(saved)
        if saved.shard is None:
            left = [shard_ranges(ranges, self._shard) for ranges in left]
        self.number, self._left = saved.number, left

    def merge_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of the whole, from those of all its shards."""
        shards = SavedPosition.read_all(states)
        first = min(state.number for state in shards)
        stop = max(state.number + len(state.left) for state in shards)
        if stop - first > _MOST_PASSES:
            raise PlanMismatchError(
                f"The states to merge, field 'pass': expected numbers that differ by less than "
                f"{_MOST_PASSES}, found {[state.number for state in shards]!r:.200}."
            )
        left: list[Ranges] = [[] for _ in range(first, stop)]
        for state in shards:
            # Of the passes before its own, a shard has nothing left; of those not begun, its share.
            begun = self._left_in(state)
            whole = self.whole_share(state.shard or self._shard)
            for number in range(state.number, stop):
                place = number - state.number
                ranges = whole
                if place < len(begun):
                    ranges = begun[place]
                left[number - first] += ranges
        return self._write(None, first, list(map(joined_ranges, left)))

    def _write(
        self, shard: tuple[int, int] | None, number: int, left: Sequence[Ranges]
    ) -> dict[str, Any]:
        pairs = [[(piece.start, piece.stop) for piece in ranges] for ranges in left]
        return SavedPosition(number=number, shard=shard, order=self._order, left=pairs).write()

    def _left_in(self, state: SavedPosition) -> list[Ranges]:
        """What a state of the same data in the same order says is left of each pass."""
        if state.order != self._order:
            raise PlanMismatchError(
                f"the state, field 'order': expected {self._order!r}, found {state.order!r:.200}. Read "
                f"the same data in the same order and blocks as when it was saved, or start afresh."
            )
        left = []
        for pairs in state.left:
            end = 0
            for start, stop in pairs:
                if not end <= start < stop <= self._length:
                    raise PlanMismatchError(
                        f"the state, field 'left': expected ranges [start, stop] that ascend up to "
                        f"{self._length}, found {pairs!r:.200}; it would read records twice, or none. "
                        f"Load a state that a reader has made."
                    )
                end = stop
            left.append([range(start, stop) for start, stop in pairs])
        return left or [[]]


def shard_ranges(ranges: Ranges, shard: tuple[int, int]) -> Ranges:
    """The part of a shard: as many positions as any other has, or one more or less."""
    i, n = shard
    total = sum(map(len, ranges))
    return cut_ranges(ranges, i * total // n, (i + 1) * total // n)


def cut_ranges(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The positions from the `start`-th to before the `stop`-th."""
    pieces = []
    for positions in ranges:
        piece = positions[max(start, 0) : max(stop, 0)]
        if piece:
            pieces.append(piece)
        start, stop = start - len(positions), stop - len(positions)
    return pieces


def joined_ranges(ranges: Ranges) -> Ranges:
    """The same positions in ascending order, in as few ranges as can be."""
    pieces: Ranges = []
    for positions in sorted(ranges, key=lambda positions: positions.start):
        end = pieces[-1].stop if pieces else -1
        if positions.start < end:
            raise PlanMismatchError(
                f"The states of two shards have the same records left, from number "
                f"{positions.start} on: expected each in one of them. Merge the states of one "
                f"checkpoint."
            )
        if positions.start == end:
            pieces[-1] = range(pieces[-1].start, positions.stop)
        else:
            pieces.append(positions)
    return pieces
