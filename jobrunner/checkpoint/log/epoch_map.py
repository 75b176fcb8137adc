"""A sorted map from epochs and positions to numbers, small if both grow evenly. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from itertools import islice, takewhile
from typing import overload

from jobrunner.positions import Position, PublicPosition

Run = tuple[int, ...]
"""A progression: first key, key step, count, first value, value step; the step of positions."""

_MOST = 10**18  # positions are written with at most 18 digits


class EpochMap(MutableMapping[Position, int]):
    """Epoch -> number, stored as arithmetic progressions.

    A hundred thousand epochs saved one after another take as much space as two, in memory and in
    the log; so do positions of the same step. Not thread-safe.
    """

    def __init__(self, runs: Iterable[Sequence[int]] = ()) -> None:
        self._runs: list[Run] = [*map(tuple, runs)]  # by step, then by epoch
        self._length = 0
        before: tuple[Run, int] = ((), -1)
        for run in self._runs:
            step, count = run[5:], run[2]
            if run[0] < 0 or run[1] < 1 or count < 1 or step == (0,):
                raise ValueError(f"the progression {[*run]} has no keys, or keys below 0")
            if _last(run) >= _MOST or step >= (_MOST,):
                raise ValueError(f"the progression {[*run]} has keys of more than 18 digits")
            if (step, run[0]) <= before:
                raise ValueError(f"the progression {[*run]} and the one before overlap")
            before = step, _last(run)
            self._length += count
        self._positions: list[Position] | None = None  # in order, once they were asked for

    def copy(self) -> EpochMap:
        """A map that changes independently."""
        found = EpochMap()
        found._runs, found._length = list(self._runs), self._length
        found._positions = None if self._positions is None else list(self._positions)
        return found

    def only(self, keys: Iterable[Position]) -> EpochMap:
        """A map of these keys alone, all of which are here."""
        found = EpochMap()
        for key in keys:
            found[key] = self[key]
        return found

    def runs(self) -> list[Run]:
        """The progressions, in order and without overlap; those of positions after all others."""
        return list(self._runs)

    @property
    def has_positions(self) -> bool:
        """Whether a key is a position in the middle of an epoch."""
        return bool(self._runs) and len(self._runs[-1]) > 5

    def __eq__(self, other: object) -> bool:
        if isinstance(other, EpochMap):
            return self.has_keys_of(other, with_values=True)
        return super().__eq__(other)

    def has_keys_of(self, other: EpochMap, *, with_values: bool = False) -> bool:
        """Whether both have the same keys, in whatever progressions."""
        if self._runs == other._runs or self._length != other._length:
            return self._length == other._length
        ours, theirs = self._runs[::-1], other._runs[::-1]
        while ours:
            one, two = ours.pop(), theirs.pop()
            count = min(one[2], two[2])
            part = 1 if count == 1 else 2  # the steps of a single key mean nothing
            if one[:part] != two[:part] or one[5:] != two[5:]:
                return False
            if with_values and one[3 : 3 + part] != two[3 : 3 + part]:
                return False
            if one[2] > count:
                ours.append(_cut(one, count, one[2]))
            if two[2] > count:
                theirs.append(_cut(two, count, two[2]))
        return True

    def public_in_order(self) -> Sequence[PublicPosition]:
        """The keys as users get them, as a sequence; not copied if all are epochs."""
        if not self.has_positions:
            return EpochSequence(self._runs, self._length)
        return [key.public for key in self]

    @property
    def last(self) -> Position:
        """The last key; raises ValueError if there is none."""
        place, _ = self._find(Position(_MOST))  # that of the last epochs, before all positions
        epochs = [Position(_last(run)) for run in self._runs[place : place + 1] if place >= 0]
        return max(epochs + self._positions_in_order()[-1:])

    def after(self, key: Position | None) -> list[Position]:
        """The keys that come after `key`, in order, without a look at those before it; None: all."""
        if key is None:
            return list(self)
        place, _ = self._find(Position(key.epoch))
        epochs: list[Position] = []
        for run in takewhile(lambda run: len(run) == 5, self._runs[max(0, place) :]):
            epochs += map(Position, _epochs(run)[max(0, (key.epoch - run[0]) // run[1] + 1) :])
        positions = self._positions_in_order()
        return sorted(epochs + positions[bisect_right(positions, key) :])

    def _positions_in_order(self) -> list[Position]:
        if self._positions is None:
            keys = [(it, run[5:]) for run in self._runs if len(run) > 5 for it in _epochs(run)]
            self._positions = [Position(epoch, *step) for epoch, step in sorted(keys)]
        return self._positions

    def __getitem__(self, key: Position) -> int:
        place, at = self._find(key)
        if at is None:
            raise KeyError(key)
        run = self._runs[place]
        return run[3] + at * run[4]

    def __setitem__(self, key: Position, value: int) -> None:
        place, at = self._find(key)
        if at is not None:
            if self[key] == value:
                return
            del self[key]
            place, _ = self._find(key)
        epoch, step = key.epoch, _step(key)
        self._length += 1
        if step and self._positions is not None:
            insort(self._positions, key)
        if place >= 0 and (run := self._runs[place])[5:] == step:
            first, key_step, count, start, value_step = run[:5]
            if epoch < _last(run):
                after = (epoch - first) // key_step + 1
                self._runs[place : place + 1] = [_cut(run, 0, after), _cut(run, after, count)]
            else:
                if count == 1:
                    key_step, value_step = epoch - first, value - start
                if (epoch, value) == (first + count * key_step, start + count * value_step):
                    self._runs[place] = (first, key_step, count + 1, start, value_step, *step)
                    return
        self._runs.insert(place + 1, (epoch, 1, 1, value, 0, *step))

    def __delitem__(self, key: Position) -> None:
        place, at = self._find(key)
        if at is None:
            raise KeyError(key)
        run = self._runs[place]
        parts = (_cut(run, 0, at), _cut(run, at + 1, run[2]))
        self._runs[place : place + 1] = [part for part in parts if part[2]]
        self._length -= 1
        if self._positions is not None and key.step:
            del self._positions[bisect_left(self._positions, key)]

    def __iter__(self) -> Iterator[Position]:
        if not self.has_positions:
            return map(Position, EpochSequence(self._runs, self._length))
        keys = [(epoch, run[5:]) for run in self._runs for epoch in _epochs(run)]
        return (Position(epoch, *step) for epoch, step in sorted(keys))

    def __len__(self) -> int:
        return self._length

    def _find(self, key: Position) -> tuple[int, int | None]:
        """The place of the last run that begins at or before `key`, and that of `key` in it."""
        epoch, step = key.epoch, _step(key)
        place = bisect_right(self._runs, (step, epoch), key=lambda run: (run[5:], run[0])) - 1
        if place >= 0 and (run := self._runs[place])[5:] == step:
            at, off = divmod(epoch - run[0], run[1])
            if not off and at < run[2]:
                return place, at
        return place, None


class EpochSequence(Sequence[int]):
    """The numbers of whole epochs in order; indexing costs the same at any length."""

    def __init__(self, runs: Sequence[Run], length: int) -> None:
        self._runs = runs
        self._length = length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            places = range(self._length)[index]
            if places.step == 1:
                return list(islice(self._from(places.start), len(places)))
            return [self[place] for place in places]
        place = range(self._length)[index]  # raises IndexError
        return _last(self._runs[-1]) if index == -1 else next(self._from(place))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return self._from(0)

    def _from(self, place: int) -> Iterator[int]:
        for run in self._runs:
            yield from _epochs(run)[place:]
            place = max(0, place - run[2])


def _epochs(run: Run) -> range:
    return range(run[0], run[0] + run[2] * run[1], run[1])


def _last(run: Run) -> int:
    return run[0] + (run[2] - 1) * run[1]


def _cut(run: Run, start: int, stop: int) -> Run:
    """The keys of a progression from place `start` until `stop`."""
    first, key_step, _, value, value_step, *step = run
    return (
        first + start * key_step,
        key_step,
        stop - start,
        value + start * value_step,
        value_step,
        *step,
    )


def _step(key: Position) -> Run:
    return (key.step,) if key.step else ()
