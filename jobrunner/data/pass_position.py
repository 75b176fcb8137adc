"""Where a reader stands: which records of a pass are left, and for whom.

A pass goes through positions 0, 1, 2, …; an order says which record stands at each. What is left of
a pass is a tuple of ranges of positions. Shards have a part each of what is left: contiguous parts
where the number of records is known, every n-th record where it is not. So what all shards have
left, put together, is what is left of the whole, and any number of new shards can divide it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import length_hint
from typing import Any, NamedTuple

from jobrunner.data.ranges import OPEN, Ranges, cut, is_open, joined, union
from jobrunner.define import NATURAL, Rule
from jobrunner.errors import EndOfData, PlanMismatchError

_MOST_PASSES = 1000
"""By so many one shard may be ahead of another, when they are merged."""


def end_of(number: int) -> EndOfData:
    """What a read beyond the end of pass `number` raises."""
    return EndOfData(
        f"Pass {number} has ended. To begin the next one, iterate over the reader: "
        f"for batch in reader."
    )


class _State(NamedTuple):
    """What a `state_dict` says."""

    shard: tuple[int, int] | None  # None: the whole
    number: int
    rests: list[Ranges]  # what is left of this pass, and of the next ones if not all of them


class PassPosition:
    """The place of one shard, or of the whole, in pass after pass.

    Parameters
    ----------
    whole : range
        All positions of a pass.
    shard : tuple of int
        Which shard, of how many.
    identity : mapping
        What a state must hold to be of the same data in the same order.
    least : int
        The pass ends when fewer records than these are left.
    """

    def __init__(
        self,
        whole: range,
        shard: tuple[int, int],
        identity: Mapping[str, object],
        least: int = 1,
    ) -> None:
        self.lock = threading.Lock()
        self.moves = 0  # how often it went elsewhere than to the next record
        self._whole, self._shard, self._least = whole, shard, least
        self._identity = identity
        self._reads: Callable[..., Any]
        self._items: tuple[Iterator[Any], ...]
        self.ready: Iterator[Any]
        self._own = self._share((whole,))
        self.at = 0
        self.prepare_items((), 1)
        self._go(0, [])

    def _go(self, number: int, rests: Sequence[Ranges]) -> None:
        self.number = number
        self.rest, *later = rests or [self._own]
        self._later = later
        self.moves += 1

    @property
    def rest(self) -> Ranges:
        """What is left of the pass."""
        ready = length_hint(self._items[0]) * self._size
        first = range(self.at - ready, self.until, self.step)
        return (first, *self.behind) if first else self.behind

    @rest.setter
    def rest(self, ranges: Ranges) -> None:
        if self._least > 1 and sum(map(len, ranges)) < self._least:
            ranges = ()
        self._drop()  # who still holds `ready` finds no more
        first, *behind = ranges or (range(0),)
        self.at, self.until, self.step = first.start, first.stop, first.step
        self.behind = tuple(behind)

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left of the pass. Takes the lock, but not at each record."""
        if self.at < self.until or self.has_ready:
            return False
        with self.lock:
            return self.is_at_end

    @property
    def is_at_end(self) -> bool:
        """The same for who holds the lock; without it, also true for a moment while the place changes."""
        return self.at >= self.until and not self.has_ready

    @property
    def has_ready(self) -> bool:
        """Whether anything is `ready`."""
        return length_hint(self._items[0]) > 0

    def prepare(
        self,
        read: Callable[[Any], Any],
        indices: Iterable[Any],
        starts: range,
        stop: int,
        gather: Callable[[Any, int], Any] | None = None,
    ) -> None:
        """Make `ready` what is next: what `read` returns for each of `indices`.

        Each reads the records from one of `starts` to before the next, or `stop`. Threads take from
        `ready` without the lock: each index goes to one of them. It counts as read from then on,
        since the position is told by how many are left.
        """
        self._size = starts.step
        self._reads = self._attempt(read, stop, gather)
        self._items = (iter(indices), iter(starts))
        self.ready = map(self._reads, *self._items)
        self.at += len(starts) * starts.step

    def prepare_items(self, items: Any, size: int) -> None:
        """Make `ready` these items, each of which has `size` records: nothing is left to read."""
        self._reads = _itself
        self.ready = iter(items)
        self._items = (self.ready,)
        self._size = size
        self.at += len(items) * size

    def take(self) -> Callable[[], Any] | None:
        """What reads the first of `ready`, which counts as read from now on; None if there is none."""
        for item in zip(*self._items, strict=False):
            return partial(self._reads, *item)
        return None

    def reading(self, read: Callable[[Any], Any], index: Any, taken: Ranges) -> Callable[[], Any]:
        """The same for what counts as read already."""
        return partial(self._attempt(read, 0), index, taken)

    def _attempt(
        self,
        read: Callable[[Any], Any],
        stop: int,
        gather: Callable[[Any, int], Any] | None = None,
    ) -> Callable[[Any, int | Ranges], Any]:
        """The same function, after whose errors the next read tries again."""
        moves, size = self.moves, self._size

        def give_back(taken: int | Ranges) -> None:
            if isinstance(taken, int):
                taken = (range(taken, min(taken + size, stop)),)
            with self.lock:
                if moves == self.moves:
                    self.at -= self._drop() * self._size
                    ranges = sorted((*taken, *self.rest), key=lambda each: each.start)
                    self.rest = joined(ranges)

        def attempt(index: Any, taken: int | Ranges) -> Any:
            try:
                return read(index)
            except BaseException:
                give_back(taken)
                raise

        def attempt_gather(index: Any, taken: int | Ranges) -> Any:
            try:
                return gather(index, 0)  # type: ignore[misc]
            except BaseException:
                give_back(taken)
                raise

        return attempt_gather if gather else attempt

    def _drop(self) -> int:
        """Empty `ready`; return how much it was."""
        # In one step, since threads take from it without the lock: what is left must be a range.
        return len(list(self._items[0]))

    def begin(self) -> None:
        """Begin the next pass, unless another thread has."""
        with self.lock:
            if self.is_at_end:
                self._go(self.number + 1, self._later)

    def follow(self, other: PassPosition) -> None:
        """Go to where another one is."""
        with self.lock:
            self._go(other.number, [other.rest, *other._later])

    def state_dict(self) -> dict[str, Any]:
        """The place as plain values."""
        with self.lock:
            rests = [self.rest, *self._later]
            return self._written(_State(self._shard, self.number, rests))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state of this shard was, or to this shard's part of a merged state."""
        own = list(self._shard)
        mine = Rule(str(own), lambda it: it is None or (_is_shard(it) and list(it) == own))
        shard, number, rests = self._read(state, "the state", mine)
        with self.lock:
            self._go(number, rests if shard else [self._share(each) for each in rests])

    def merge_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of the whole, from those of all its shards in order."""
        any_shard = Rule("two ints [i, n], i < n, or None", lambda it: it is None or _is_shard(it))
        found: list[_State] = []
        for i, state in enumerate(states):
            found.append(self._read(state, f"state {i} of {len(states)}", any_shard))
        found.sort(key=lambda each: each.shard or (0, 0))
        shards, n = [each.shard for each in found], len(found)
        if not found or shards != [(i, n) for i in range(n)]:
            raise PlanMismatchError(
                f"The states to merge, field 'shard': expected one of each shard [i, n], found "
                f"{[shard and list(shard) for shard in shards]!r:.200}."
            )
        first = min(each.number for each in found)
        passes = range(first, max(each.number + len(each.rests) for each in found))
        if len(passes) > _MOST_PASSES:
            raise PlanMismatchError(
                f"The states to merge, field 'pass': expected numbers that differ by less than "
                f"{_MOST_PASSES}, found {[each.number for each in found]!r:.200}."
            )
        rests = [union([self._left(each, number) for each in found]) for number in passes]
        return self._written(_State(None, first, rests))

    def _left(self, state: _State, number: int) -> Ranges:
        """What the shard of a state has left of pass `number`."""
        i = number - state.number
        if i < 0:
            return ()  # it has read all of its part
        return state.rests[i] if i < len(state.rests) else self._share((self._whole,), state.shard)

    def _share(self, ranges: Ranges, shard: tuple[int, int] | None = None) -> Ranges:
        i, n = shard or self._shard
        if not is_open(self._whole):
            total = sum(map(len, ranges))
            return cut(ranges, i * total // n, (i + 1) * total // n)
        # Which shard begins changes from range to range: there may be many short ones.
        parts = (each[(i + k) % n :: n] for k, each in enumerate(ranges))
        return tuple(each for each in parts if each)

    def _written(self, state: _State) -> dict[str, Any]:
        rest, *later = (
            [[each.start, None if is_open(each) else each.stop, each.step] for each in ranges]
            for ranges in state.rests
        )
        shard = state.shard and list(state.shard)
        return {
            **self._identity,
            "shard": shard,
            "pass": state.number,
            "rest": rest,
            "later": later,
        }

    def _read(self, state: Mapping[str, Any], where: str, shard: Rule) -> _State:
        ranges = "ranges [start, stop, step], 0 <= start < stop"
        limit = " or stop None" if is_open(self._whole) else f" <= {self._whole.stop}, ascending"
        rules = {
            "shard": shard,
            "pass": Rule("an int >= 0", _is_whole),
            "rest": Rule(ranges + limit, lambda it: self._ranges(it) is not None),
            "later": Rule(
                f"lists of {ranges}{limit}",
                lambda it: _is_list(it) and None not in map(self._ranges, it),
            ),
        }
        same = {
            name: Rule(repr(value), partial(_is_same, value))
            for name, value in self._identity.items()
        }
        check_state(state, {**same, **rules}, where)
        rests = [self._ranges(each) or () for each in (state["rest"], *state["later"])]
        return _State(state["shard"] and tuple(state["shard"]), state["pass"], rests)

    def _ranges(self, listed: Any) -> Ranges | None:
        """The ranges that were written; None if they were not."""
        may_open = is_open(self._whole)
        found: list[range] = []
        if not _is_list(listed) or not all(_is_list(each) and len(each) == 3 for each in listed):
            return None
        for each in listed:
            start, stop, step = (OPEN if it is None and may_open else it for it in each)
            if not all(map(_is_whole, (start, stop, step))):
                return None
            if not start < stop <= self._whole.stop or not 1 <= step <= (
                1 << 32 if may_open else 1
            ):
                return None
            if found and start < found[-1].stop and not may_open:
                return None  # it would repeat records
            found.append(range(start, stop, step))
        return tuple(found)


_ADVICE = {
    "length": "The data has another number of records than when the state was saved: read the same "
    "data, or start afresh.",
    "order": "Shuffle and list the files as when the state was saved, or start afresh.",
    "shard": "If the number of nodes has changed, name the blob Blob(..., partition=0), or pass the "
    "states of all shards to merge_state_dicts.",
}


def _itself(item: Any) -> Any:
    return item


def _is_same(expected: object, value: object) -> bool:
    return type(value) is type(expected) and value == expected


def _is_whole(value: Any) -> bool:
    return NATURAL.fits(value) and value <= OPEN


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _is_shard(value: Any) -> bool:
    return (
        _is_list(value) and len(value) == 2 and all(map(_is_whole, value)) and value[0] < value[1]
    )


def check_state(state: Any, rules: Mapping[str, Rule], where: str) -> None:
    """Raise `PlanMismatchError` if a state has not these fields; a limited reader adds "loop"."""
    is_state = isinstance(state, Mapping)
    found = sorted(map(str, {*state} - {"loop"})) if is_state else type(state).__name__
    if found != sorted(rules):
        raise PlanMismatchError(
            f"{where} is not one of this reader: expected the fields {sorted(rules)}, found "
            f"{found!s:.500}. Load a state that a reader of the same kind has made."
        )
    for name, rule in {**rules, "loop": NATURAL}.items():
        if not rule.fits(value := state.get(name, 0)):
            message = f"{where}, field {name!r}: expected {rule.expected}, found {value!r:.200}."
            raise PlanMismatchError(f"{message} {_ADVICE.get(name, '')}".rstrip())
