"""Whether nodes move to workers that have joined. No I/O, no Dask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

LEAST_GAIN = 0.1
"""A move promises to make epochs shorter by that share at least."""
MUST_PAY = 2.0
"""It saves that many times the seconds that it takes, over the epochs that are left."""
MOST_EPOCHS = 1_000
"""How many epochs a run is thought to have left, at most."""
FIRST_MOVE_SECONDS = 0.1
"""What a move is thought to take, besides twice the last save."""


def is_worthwhile(
    now: Mapping[str, str],
    after: Mapping[str, str],
    threads: Mapping[str, int],
    *,
    epoch_seconds: float,  # an infinite one is longer than any move
    epochs_left: int | None,
    save_seconds: float,
) -> bool:
    """Whether to move nodes from one placement to another, on workers with so many threads.

    An epoch takes as long as its fullest worker, and all nodes count the same. So a move may promise
    too much, but there is only one for each time that workers join.
    """
    gain = 1 - _fullest(after, threads) / _fullest(now, threads)
    if gain < LEAST_GAIN:
        return False
    left = MOST_EPOCHS if epochs_left is None else min(epochs_left, MOST_EPOCHS)
    move_seconds = FIRST_MOVE_SECONDS + 2 * save_seconds
    return gain * epoch_seconds * left >= MUST_PAY * move_seconds


def _fullest(placement: Mapping[str, str], threads: Mapping[str, int]) -> float:
    """How many nodes each thread of the fullest worker has."""
    counts = Counter(placement.values())
    return max(count / threads.get(address, 1) for address, count in counts.items())
