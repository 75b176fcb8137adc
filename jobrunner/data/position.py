"""Where a reader stands: which records of a pass are left, and for whom. Pure.

A pass goes through positions 0, 1, 2, …; an order says which record stands at each. What is left of
a pass is a tuple of ranges of positions. Shards have a part each of what is left: contiguous parts
where the number of records is known, every n-th record where it is not. So what all shards have
left, put together, is what is left of the whole, and any number of new shards can divide it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jobrunner.errors import PlanMismatchError

Ranges = tuple[range, ...]

OPEN = sys.maxsize
"""The stop of a range whose end is not known before it is reached; parts of it stop near there."""


def is_open(each: range) -> bool:
    """Whether the end of a range is not known."""
    return each.stop > OPEN // 2


def count(ranges: Ranges) -> int:
    """How many positions there are in all."""
    return sum(map(len, ranges))


def cut(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The positions from the `start`-th to before the `stop`-th."""
    found = []
    for each in ranges:
        found.append(each[max(start, 0) : max(stop, 0)])
        start, stop = start - len(each), stop - len(each)
    return tuple(each for each in found if each)


def after(ranges: Ranges, last: int) -> Ranges:
    """The positions greater than `last`."""
    found = (each[max(0, (last - each.start) // each.step + 1) :] for each in ranges)
    return tuple(each for each in found if each)


class Position:
    """The place of one shard, or of the whole, in pass after pass.

    Parameters
    ----------
    whole : range
        All positions of a pass.
    shard : tuple of int
        Which shard, of how many.
    identity : mapping
        What a state must agree with: items that `state_dict` adds.
    """

    def __init__(
        self, whole: range, shard: tuple[int, int], identity: Mapping[str, object]
    ) -> None:
        self.whole = whole
        self.shard = shard
        self.identity = dict(identity)
        self.number = 0  # of the pass
        self.rest = self._share((whole,))
        self.later: tuple[Ranges, ...] = ()  # what is left of the next passes, if not all of them

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left of the pass."""
        return not self.rest

    def begin(self) -> None:
        """Begin the next pass."""
        self.number += 1
        if self.later:
            self.rest, *later = self.later
            self.later = tuple(later)
        else:
            self.rest = self._share((self.whole,))

    def state_dict(self, rest: Ranges | None = None) -> dict[str, Any]:
        """The place as plain values; `rest` replaces what is left of the pass."""
        return {
            **self.identity,
            "shard": list(self.shard),
            "pass": self.number,
            "rest": _written(self.rest if rest is None else rest),
            "later": [_written(each) for each in self.later],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state of this shard was, or to this shard's part of a merged state."""
        number, rests, shard = self._read(state, "the state")
        if shard not in (self.shard, None):
            raise _mismatch(
                "the state",
                "shard",
                f"[{self.shard[0]}, {self.shard[1]}]",
                list(shard),
                "If the number of nodes has changed, name the blob Blob(..., partition=0), or pass "
                "the states of all shards to merge_state_dicts.",
            )
        if shard is None:
            rests = [self._share(each) for each in rests]
        self.number, self.rest, self.later = number, rests[0], tuple(rests[1:])

    def merge_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of the whole, from those of all its shards in order."""
        found = [self._read(state, f"state {i} of {len(states)}") for i, state in enumerate(states)]
        found.sort(key=lambda each: each[2] or (0, 0))
        shards = [shard for _, _, shard in found]
        if not shards or shards != [(i, len(shards)) for i in range(len(shards))]:
            raise PlanMismatchError(
                f"The states to merge, field 'shard': expected one of each shard [i, n], found "
                f"{[shard and list(shard) for shard in shards]!r:.200}."
            )
        read = [(number, rests) for number, rests, _ in found]
        first = min(number for number, _ in read)
        end = max(number + len(rests) for number, rests in read)
        rests = []
        for number in range(first, end):
            parts = []
            for i, (begun, own) in enumerate(read):
                if number >= begun + len(own):
                    parts.append(self._share((self.whole,), (i, len(read))))
                elif number >= begun:
                    parts.append(own[number - begun])
                else:  # it has read all of its part
                    parts.append(())
            rests.append(_union(parts))
        return {
            **self.identity,
            "shard": None,
            "pass": first,
            "rest": _written(rests[0]),
            "later": [_written(each) for each in rests[1:]],
        }

    def _share(self, ranges: Ranges, shard: tuple[int, int] | None = None) -> Ranges:
        i, n = shard or self.shard
        if not is_open(self.whole):
            total = count(ranges)
            return cut(ranges, i * total // n, (i + 1) * total // n)
        # Which shard begins changes from range to range: there may be many short ones.
        parts = (each[(i + k) % n :: n] for k, each in enumerate(ranges))
        return tuple(each for each in parts if each)

    def _read(
        self, state: Mapping[str, Any], where: str
    ) -> tuple[int, list[Ranges], tuple[int, int] | None]:
        """The number of the pass, what is left of it and of those after it, and the shard, if any."""
        expected = [*self.identity, "shard", "pass", "rest", "later"]
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        if found != sorted(expected):
            raise PlanMismatchError(
                f"{where} is not one of this reader: expected the fields {sorted(expected)}, found "
                f"{found!s:.500}. Load a state that a reader of the same kind has made."
            )
        for name, value in self.identity.items():
            if type(state[name]) is not type(value) or state[name] != value:
                raise _mismatch(where, name, repr(value), state[name], _ADVICE.get(name, ""))
        number, shard = state["pass"], state["shard"]
        if not _is_whole(number):
            raise _mismatch(where, "pass", "an int >= 0", number, "")
        is_shard = isinstance(shard, list | tuple) and len(shard) == 2
        if shard is not None and not (
            is_shard and all(map(_is_whole, shard)) and shard[0] < shard[1]
        ):
            raise _mismatch(where, "shard", "two ints [i, n], i < n, or None", shard, "")
        later = state["later"]
        if not isinstance(later, list | tuple):
            raise _mismatch(where, "later", "a list of lists of ranges", later, "")
        rests = [self._ranges(state["rest"], where, "rest")]
        rests += [self._ranges(each, where, "later") for each in later]
        return number, rests, None if shard is None else (shard[0], shard[1])

    def _ranges(self, listed: object, where: str, field: str) -> Ranges:
        may_open = is_open(self.whole)
        bounds = "0 <= start < stop"
        bounds += " or stop None" if may_open else f" <= {self.whole.stop}, in ascending order"
        expected = f"ranges [start, stop, step], {bounds}"
        if not isinstance(listed, list | tuple):
            raise _mismatch(where, field, expected, listed, "")
        found: list[range] = []
        for each in listed:
            if not isinstance(each, list | tuple) or len(each) != 3:
                raise _mismatch(where, field, expected, each, "")
            start, stop, step = each
            if stop is None and may_open:
                stop = OPEN
            if not all(map(_is_whole, (start, stop, step))) or not 0 <= start < stop <= OPEN:
                raise _mismatch(where, field, expected, each, "")
            if stop > self.whole.stop or step < 1 or (step > 1 and not may_open):
                raise _mismatch(where, field, expected, each, "")
            if found and start < found[-1].stop and not may_open:
                raise _mismatch(where, field, expected, each, "It would repeat records.")
            found.append(range(start, stop, step))
        return tuple(found)


_ADVICE = {
    "length": "The data has another number of records than when the state was saved: read the same "
    "data, or start afresh.",
    "order": "Shuffle as when the state was saved, or start afresh.",
}


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= OPEN


def _mismatch(
    where: str, field: str, expected: object, found: object, advice: str
) -> PlanMismatchError:
    message = f"{where}, field {field!r}: expected {expected}, found {found!r:.200}."
    return PlanMismatchError(f"{message} {advice}".rstrip())


def _written(ranges: Ranges) -> list[list[int | None]]:
    return [[each.start, None if is_open(each) else each.stop, each.step] for each in ranges]


def _union(parts: Sequence[Ranges]) -> Ranges:
    """What the parts of all shards are together, in as few ranges as can be."""
    everything = sorted((each for part in parts for each in part), key=lambda each: each.start)
    return tuple(_joined(_with_one_end(everything, len(parts))))


def _with_one_end(ranges: list[range], n: int) -> list[range]:
    """Put n open ranges of every n-th record together, from where on all of them is left."""
    ends = [each for each in ranges if is_open(each)]
    steps = {each.step for each in ends}
    if len(ends) != n or len(steps) != 1 or n == 1:
        return ranges
    step, odd = divmod(steps.pop(), n)
    places = {(each.start - ends[0].start) % (step * n) for each in ends}
    if odd or places != {k * step for k in range(n)}:
        return ranges
    start = ends[-1].start - (n - 1) * step  # from where on all is left
    behind = [range(each.start, start, each.step) for each in ends]
    found = [each for each in ranges if not is_open(each)] + [each for each in behind if each]
    return [*sorted(found, key=lambda each: each.start), range(start, OPEN, step)]


def _joined(ranges: list[range]) -> Iterator[range]:
    """Join ranges that follow each other."""
    last: range | None = None
    for each in ranges:
        if last is not None and last.step == each.step == 1 and each.start <= last.stop:
            if each.start < last.stop:
                raise PlanMismatchError(
                    f"The states of two shards have the same records left, from number {each.start} "
                    f"on: expected each in one of them. Merge the states of one checkpoint."
                )
            last = range(last.start, each.stop)
        else:
            if last is not None:
                yield last
            last = each
    if last is not None:
        yield last
