"""A sorted map from epochs and positions to numbers, small if both grow evenly. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from itertools import islice, pairwise
from operator import eq
from typing import overload

from jobrunner.positions import Position


class EpochMap(MutableMapping[int, int]):
    """Epoch -> number, stored as arithmetic progressions (key, key step, count, value, value step).

    A hundred thousand epochs saved one after another take as much space as two, in memory and in
    the log. So do positions of the same step: their progressions end with that step. Not
    thread-safe.
    """

    def __init__(self, runs: Iterable[Sequence[int]] = ()) -> None:
        self._runs: list[list[int]] = []
        self._partial: dict[int, EpochMap] = {}  # by step
        by_step: dict[int, list[Sequence[int]]] = {}
        for each in runs:
            if len(each) > 5:
                by_step.setdefault(each[5], []).append(each[:5])
            else:
                self._runs.append(list(each))
        for step, its in by_step.items():
            self._partial[step] = EpochMap(its)
        self._length = sum(run[2] for run in self._runs)
        for run, after in pairwise(self._runs):
            if _last(run) >= after[0]:
                raise ValueError(f"the progressions {run} and {after} overlap")

    def runs(self) -> list[list[int]]:
        """The progressions, in order and without overlap; those of positions after all others."""
        partial = [
            [*run, step] for step, its in sorted(self._partial.items()) for run in its.runs()
        ]
        return [*(list(run) for run in self._runs), *partial]

    @property
    def has_positions(self) -> bool:
        """Whether a key is a position in the middle of an epoch."""
        return bool(self._partial)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, EpochMap) and self.runs() == other.runs():
            return True  # the usual case, at any length
        return super().__eq__(other)  # one map may have several forms

    def has_keys_of(self, other: EpochMap) -> bool:
        """Whether both have the same keys."""
        plain = not (self._partial or other._partial)
        if plain and [run[:3] for run in self._runs] == [run[:3] for run in other._runs]:
            return True  # the usual case, at any length
        return len(self) == len(other) and all(map(eq, self, other))

    def keys_in_order(self) -> Sequence[int]:
        """The keys as a sequence; not copied if all are epochs."""
        return list(self) if self._partial else EpochSequence(self._runs, self._length)

    @property
    def last(self) -> int:
        """The last key; raises ValueError if there is none."""
        lasts = [(_last(its._runs[-1]), step) for step, its in self._partial.items()]
        epoch, step = max([*lasts, *((_last(run), 0) for run in self._runs[-1:])])
        return Position(epoch, step) if step else epoch

    def __getitem__(self, key: int) -> int:
        if isinstance(key, Position):
            step = key.step
            try:
                return self._partial[step][int(key)]
            except KeyError:
                raise KeyError(key) from None
        place = self._place(key)
        if place >= 0:
            first, step, count, value, value_step = self._runs[place]
            at, off = divmod(key - first, step)
            if not off and at < count:
                return value + at * value_step
        raise KeyError(key)

    def __setitem__(self, key: int, value: int) -> None:
        if isinstance(key, Position):
            step = key.step
            self._partial.setdefault(step, EpochMap())[int(key)] = value
            return
        if self.get(key) == value:
            return
        self.pop(key, None)
        place = self._place(key)
        if place >= 0:
            run = self._runs[place]
            if key < _last(run):
                self._split(place, key, key)
            elif self._extend(run, key, value):
                self._length += 1
                return
        self._runs.insert(place + 1, [key, 1, 1, value, 0])
        self._length += 1

    def __delitem__(self, key: int) -> None:
        self[key]  # raises KeyError
        if isinstance(key, Position):
            step = key.step
            its = self._partial[step]
            del its[int(key)]
            if not its:
                del self._partial[step]
            return
        self._split(self._place(key), key - 1, key)
        self._length -= 1

    def __iter__(self) -> Iterator[int]:
        if not self._partial:
            return self._epochs()
        keys = [(epoch, 0) for epoch in self._epochs()]
        keys += [(epoch, step) for step, its in self._partial.items() for epoch in its]
        keys.sort()
        return (Position(epoch, step) if step else epoch for epoch, step in keys)

    def __len__(self) -> int:
        return self._length + sum(map(len, self._partial.values()))

    def _epochs(self) -> Iterator[int]:
        for first, step, count, _, _ in self._runs:
            yield from range(first, first + count * step, step)

    def _place(self, key: int) -> int:
        """Index of the last run that begins at or before `key`; -1 if none does."""
        return bisect_right(self._runs, key, key=lambda run: run[0]) - 1

    def _split(self, place: int, last: int, after: int) -> None:
        """Split a run: keys up to `last`, and keys after `after`."""
        first, step, count, value, value_step = self._runs[place]
        left, skipped = ((key - first) // step + 1 for key in (last, after))
        start = first + skipped * step
        parts = [
            [first, step, left, value, value_step],
            [start, step, count - skipped, value + skipped * value_step, value_step],
        ]
        self._runs[place : place + 1] = [part for part in parts if part[2]]

    @staticmethod
    def _extend(run: list[int], key: int, value: int) -> bool:
        first, step, count, start, value_step = run
        if count == 1:
            run[1], run[4] = key - first, value - start
        elif (key, value) != (first + count * step, start + count * value_step):
            return False
        run[2] += 1
        return True


class EpochSequence(Sequence[int]):
    """The keys of an `EpochMap` in order; indexing costs the same at any length."""

    def __init__(self, runs: Sequence[Sequence[int]], length: int) -> None:
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
        for first, step, count, *_ in self._runs:
            if place < count:
                yield from range(first + place * step, first + count * step, step)
            place = max(0, place - count)


def _last(run: Sequence[int]) -> int:
    return run[0] + (run[2] - 1) * run[1]
