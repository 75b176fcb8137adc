"""4 run: memory of arrays that a task updates after each save, used again for the next copy.

What a save or a rollback refers to is copied before a task changes it in place. The first touch of
fresh memory costs several times what a copy does, so the array that was replaced by a copy is kept
once nothing refers to it any longer, and takes the next one.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np

from jobrunner.workspace.memory_limit import copied
from jobrunner.workspace.values import sole_arrays

LEAST_BYTES = 128 << 10
"""Shorter memory is used again by the C library itself."""

_Key = tuple[np.dtype[Any], tuple[int, ...], tuple[int, ...]]


class ArrayPool:
    """Arrays of one worker whose values nobody needs any longer.

    Notes
    -----
    There is at most one for each copy that was made: what tasks replace by arrays of their own
    comes never here. What no copy needs for long is freed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[_Key, list[np.ndarray]] = {}
        self._old: dict[_Key, list[np.ndarray]] = {}  # those that `expire` has seen already
        # By identity, what copies have taken the place of: it comes back, unless somebody has it.
        self._replaced: dict[int, weakref.ref[np.ndarray]] = {}

    @property
    def nbytes(self) -> int:
        """What all that is spare takes."""
        with self._lock:
            return sum(
                array.nbytes
                for some in (self._old, self._left)
                for arrays in some.values()
                for array in arrays
            )

    def copy(self, array: np.ndarray, why: str) -> np.ndarray:
        """A copy, in memory that is spare if there is such; see `memory.copied`."""
        if array.nbytes < LEAST_BYTES or array.dtype.hasobject or not array.flags.forc:
            return copied(array, why)
        key = _key(array)
        with self._lock:
            alike = self._old.get(key) or self._left.get(key)
            spare = alike.pop() if alike else None
        if spare is None:
            spare = copied(array, why)
        else:
            np.copyto(spare, array)
        replaced, known = id(array), self._replaced
        known[replaced] = weakref.ref(array, lambda _: known.pop(replaced, None))
        return spare

    def offer(self, holder: dict[Any, Any]) -> None:
        """Take from what is given up the arrays that copies have taken the place of.

        Parameters
        ----------
        holder : dict
            Emptied. The caller has no other reference to what is in it.
        """
        if self._replaced:
            for name in holder:
                for array in sole_arrays(holder, name, LEAST_BYTES):
                    known = self._replaced.get(id(array))
                    if known is not None and known() is array and array.flags.owndata:
                        with self._lock:
                            self._left.setdefault(_key(array), []).append(array)
                            del self._replaced[id(array)]
        holder.clear()

    def expire(self) -> None:
        """Free what no copy has needed since this was called last."""
        with self._lock:
            expired, self._old, self._left = self._old, self._left, {}
        del expired  # without the lock: much memory is given back in milliseconds

    def clear(self) -> None:
        """Free all."""
        self.expire()
        self.expire()


def _key(array: np.ndarray) -> _Key:
    return array.dtype, array.shape, array.strides
