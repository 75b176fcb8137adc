"""Whether nodes move to workers that have joined. No I/O, no Dask."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

LEAST_GAIN = 0.1
"""A move promises to make epochs shorter by that share at least."""
MUST_PAY = 2.0
"""It saves that many times the seconds that it takes, over the epochs that are left."""
MOST_EPOCHS = 1_000
"""How many epochs a run is thought to have left, at most."""
FIRST_MOVE_SECONDS = 0.1
"""What a run's first move is thought to take, besides twice the last save."""


class Moves:
    """What a run knows of its nodes and of its moves."""

    def __init__(self) -> None:
        self._node_seconds: dict[str, float] = {}  # in the last epoch of which a sample was taken
        self._seconds = 0.0  # of the last move

    def note_spans(self, spans: Iterable[Sequence[Any]]) -> None:
        """Take the calls of a sampled run of the epoch group: node, task, begin, seconds."""
        self._node_seconds.clear()
        for node, _, _, seconds in spans:
            self._node_seconds[node] = self._node_seconds.get(node, 0.0) + seconds

    def note_move(self, seconds: float) -> None:
        """Note how long a move has taken."""
        self._seconds = seconds

    def is_worthwhile(
        self,
        now: Mapping[str, str],
        after: Mapping[str, str],
        threads: Mapping[str, int],
        *,
        epoch_seconds: float,  # an infinite one is longer than any move
        epochs_left: int | None,
        save_seconds: float,
    ) -> bool:
        """Whether to move nodes from one placement to another, on workers with so many threads.

        An epoch takes as long as its fullest worker. If more nodes than threads wait for each other
        elsewhere, a move promises too much, but there is only one for each time that workers join.
        """
        fullest = self._fullest(now, threads)
        gain = 1 - self._fullest(after, threads) / fullest if fullest else 0.0
        if gain < LEAST_GAIN:
            return False
        left = MOST_EPOCHS if epochs_left is None else min(epochs_left, MOST_EPOCHS)
        move_seconds = self._seconds or FIRST_MOVE_SECONDS + 2 * save_seconds
        return gain * epoch_seconds * left >= MUST_PAY * move_seconds

    def _fullest(self, placement: Mapping[str, str], threads: Mapping[str, int]) -> float:
        """What the fullest worker does in an epoch: seconds of its nodes for each thread."""
        seconds_of = _measured(self._node_seconds, placement)
        load: dict[str, float] = {}
        for node, address in placement.items():
            load[address] = load.get(address, 0.0) + seconds_of[node] / threads.get(address, 1)
        return max(load.values(), default=0.0)


def _measured(seconds: Mapping[str, float], nodes: Collection[str]) -> dict[str, float]:
    """The seconds of each node; all the same if none was measured."""
    if not any(seconds.get(node) for node in nodes):
        return dict.fromkeys(nodes, 1.0)
    return {node: seconds.get(node, 0.0) for node in nodes}
