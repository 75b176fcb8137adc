"""Copies the arrays of a save, so that epochs can run while the copies are written."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from jobrunner.checkpoint.storage import THREADS, run_all
from jobrunner.checkpoint.store import PlannedArray, Rows

_ALIGNMENT = 64
_COPY_BYTES = 16 << 20


class Arena:
    """Memory for the copies of a save, reused from save to save.

    Fresh memory costs several times as much at its first touch as a copy does. So the arena frees
    its memory only if a save needs less than half of it.
    """

    def __init__(self) -> None:
        self.memory: np.ndarray[Any, Any] = np.empty(0, np.uint8)

    def reserve(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Return memory of this size; it overlaps what earlier calls returned."""
        if not nbytes <= self.memory.nbytes <= 2 * nbytes:
            self.memory = np.empty(0, np.uint8)  # free it first
            self.memory = np.empty(nbytes, np.uint8)
        return self.memory[:nbytes]


def copy_arrays(
    arrays: Iterable[PlannedArray], arena: Arena, budget_bytes: int | None
) -> list[PlannedArray]:
    """Replace the data of arrays by copies, and return the arrays that exceed the budget.

    These must be written before anything changes them. An array that only its blob refers to is
    not copied here: a task changes it through `values.own`, which copies an array while a save
    refers to it. The budget covers these copies too.
    """
    left: list[PlannedArray] = []
    copied: list[tuple[PlannedArray, np.ndarray[Any, Any], int]] = []
    total = 0
    for array in arrays:
        data = array.data
        size = -(-data.nbytes // _ALIGNMENT) * _ALIGNMENT
        if array.is_sole and array.is_constant:
            continue
        if budget_bytes is not None and total + size > budget_bytes:
            left.append(array)
        elif array.is_sole:
            budget_bytes = None if budget_bytes is None else budget_bytes - size
        elif isinstance(data, Rows) or isinstance(data.dtype, np.dtypes.StringDType):
            array.data = data.gather() if isinstance(data, Rows) else data.copy()
            budget_bytes = None if budget_bytes is None else budget_bytes - size
        else:
            copied.append((array, data, total))
            total += size
    memory = arena.reserve(total)
    jobs = []
    for array, data, start in copied:
        place = memory[start : start + data.nbytes].view(data.dtype).reshape(data.shape)
        jobs += _copy_jobs(place, data)
        array.data = place
    run_all(jobs, THREADS, total)
    return left


def _copy_jobs(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> list[Any]:
    """Split a copy along the first axis, for several threads."""
    if source.nbytes <= _COPY_BYTES or not source.ndim:
        return [partial(np.copyto, target, source)]
    rows = max(1, _COPY_BYTES * len(source) // source.nbytes)
    return [
        partial(np.copyto, target[start : start + rows], source[start : start + rows])
        for start in range(0, len(source), rows)
    ]
