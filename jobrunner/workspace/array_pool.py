"""Reuses the memory of arrays that were copied before an update.

An array that a save or a kept state refers to is copied before a task updates it. A copy into fresh
memory takes several times as long as one into used memory. So the pool takes the replaced array,
once nothing else refers to it, and fills it with the next copy.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np

from jobrunner.workspace.memory_limit import copied
from jobrunner.workspace.values import sole_arrays

LEAST_BYTES = 128 << 10
"""Smaller memory is reused by the C library."""

_Key = tuple[np.dtype[Any], tuple[int, ...], tuple[int, ...]]


class ArrayPool:
    """Unused arrays of one worker.

    It takes only arrays that its copies have replaced, and `expire` frees what no copy uses.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: dict[_Key, list[np.ndarray]] = {}
        self._old: dict[_Key, list[np.ndarray]] = {}  # unused since before the last `expire`
        self._replaced: dict[int, weakref.ref[np.ndarray]] = {}  # by id, until `offer`

    @property
    def nbytes(self) -> int:
        """Size of all unused arrays."""
        with self._lock:
            lists = [*self._old.values(), *self._new.values()]
            return sum(array.nbytes for arrays in lists for array in arrays)

    def copy(self, array: np.ndarray, why: str) -> np.ndarray:
        """Copy an array, into an unused one of the same form if there is one: see `copied`."""
        dtype = array.dtype
        if array.nbytes < LEAST_BYTES or dtype.hasobject or not array.flags.forc:
            return copied(array, why)
        if dtype.names is not None or dtype.metadata:
            return copied(array, why)  # equal dtypes may differ in alignment or metadata
        key = _key(array)
        with self._lock:
            alike = self._old.get(key) or self._new.get(key)
            copy = alike.pop() if alike else None
        if copy is None:
            copy = copied(array, why)
        else:
            np.copyto(copy, array)
        replaced, known = id(array), self._replaced
        known[replaced] = weakref.ref(array, lambda _: known.pop(replaced, None))
        return copy

    def offer(self, holder: dict[Any, Any]) -> None:
        """Empty `holder`, and take those of its arrays that copies have replaced.

        The caller must have no reference to the values of `holder`.
        """
        if self._replaced:
            for name in holder:
                for array in sole_arrays(holder, name, LEAST_BYTES):
                    known = self._replaced.get(id(array))
                    if known is not None and known() is array and array.flags.owndata:
                        with self._lock:
                            self._new.setdefault(_key(array), []).append(array)
                            del self._replaced[id(array)]
        holder.clear()

    def expire(self) -> None:
        """Free the arrays that no copy has used since the last call."""
        with self._lock:
            expired, self._old, self._new = self._old, self._new, {}
        del expired  # without the lock: to free much memory takes milliseconds

    def clear(self) -> None:
        """Free all arrays."""
        self.expire()
        self.expire()


def _key(array: np.ndarray) -> _Key:
    return array.dtype, array.shape, array.strides
