"""What is left of a pass: ranges of positions. Pure."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jobrunner.errors import PlanMismatchError

Ranges = tuple[range, ...]

OPEN = sys.maxsize
"""The stop of a range whose end is not known before it is reached; parts of it stop near there."""


def is_open(each: range) -> bool:
    """Whether the end of a range is not known."""
    return each.stop > OPEN // 2


def cut(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The positions from the `start`-th to before the `stop`-th."""
    found = []
    for each in ranges:
        found.append(each[max(start, 0) : max(stop, 0)])
        start, stop = start - len(each), stop - len(each)
    return tuple(each for each in found if each)


def union(parts: Sequence[Ranges]) -> Ranges:
    """What the parts of all shards are together, in as few ranges as can be."""
    everything = sorted((each for part in parts for each in part), key=lambda each: each.start)
    return joined(_with_one_end(everything, len(parts)))


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


def joined(ranges: list[range]) -> Ranges:
    """Join ranges that follow each other."""
    found: list[range] = []
    for each in ranges:
        last = found[-1] if found else range(0)
        if not last.step == each.step == 1 or each.start > last.stop or not found:
            found.append(each)
        elif each.start < last.stop:
            raise PlanMismatchError(
                f"The states of two shards have the same records left, from number {each.start} on: "
                f"expected each in one of them. Merge the states of one checkpoint."
            )
        else:
            found[-1] = range(last.start, each.stop)
    return tuple(found)
