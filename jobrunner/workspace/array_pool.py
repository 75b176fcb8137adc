"""Memory of arrays that tasks update after each save, reused for the next copy.

An array that a save or a kept state refers to is copied before a task updates it. Fresh memory costs
several times what a copy in used memory does. So the pool takes the array that a copy has replaced,
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
"""The C library itself reuses smaller memory."""

_Key = tuple[np.dtype[Any], tuple[int, ...], tuple[int, ...]]


class ArrayPool:
    """Unused arrays of one worker.

    Notes
    -----
    Holds at most one array for each copy made: arrays that tasks replace by their own are not
    taken. Arrays that no copy uses are freed after a while.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: dict[_Key, list[np.ndarray]] = {}
        self._old: dict[_Key, list[np.ndarray]] = {}  # those that `expire` has seen already
        # The arrays that copies have replaced, by id: they come back in `offer`.
        self._replaced: dict[int, weakref.ref[np.ndarray]] = {}

    @property
    def nbytes(self) -> int:
        """Size of all unused arrays."""
        with self._lock:
            lists = [*self._old.values(), *self._new.values()]
            return sum(array.nbytes for arrays in lists for array in arrays)

    def copy(self, array: np.ndarray, why: str) -> np.ndarray:
        """Copy an array, into an unused one if there is one alike: see `copied`."""
        if array.nbytes < LEAST_BYTES or array.dtype.hasobject or not array.flags.forc:
            return copied(array, why)
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
        """Take the arrays that copies have replaced, and empty `holder`.

        The caller must have no other reference to the values of `holder`.
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
        del expired  # not under the lock: to free much memory takes milliseconds

    def clear(self) -> None:
        """Free all arrays."""
        self.expire()
        self.expire()


def _key(array: np.ndarray) -> _Key:
    return array.dtype, array.shape, array.strides
