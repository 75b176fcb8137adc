"""The arrays of a save: which have not changed since the last one, and copies of the others.

An array that only its blob refers to changes only if a task names the blob in its `updates`. The
workspace notes these blobs. Such an array need not be read, nor copied before epochs go on.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import numpy as np

from jobrunner.checkpoint.storage import THREADS, run_all
from jobrunner.checkpoint.store import LINKED_BYTES, PlannedArray, Rows
from jobrunner.workspace import Form, Workspace, sole_arrays

_ALIGNMENT = 64
_COPY_BYTES = 16 << 20

StoreIdentity = tuple[str, str, str]
"""The directory and name of a store, and the SHA-256 of its manifest."""

_LAST = "last written arrays"

_Arrays = dict[str, tuple[weakref.ref[np.ndarray[Any, Any]], dict[str, Any]]]
"""Path within the store -> the array, and its entry in the manifest without its files."""

_Written = tuple[StoreIdentity | None, _Arrays]
"""A store, and the arrays that were written to it."""


class UnchangedArrays:
    """Marks, for one save of one node, which arrays are sole and which have not changed.

    An array is sole if only its blob refers to it; so make this before the blobs `names` are
    encoded. Making it clears the workspace's notes of updates and of the last store; `remember`
    notes the next one. Runs on the worker, in one thread. Skips arrays that are too short to be
    linked.
    """

    def __init__(self, workspace: Workspace, names: Collection[str]) -> None:
        self._last: _Written = workspace.companions.pop(_LAST, (None, {}))
        changing = workspace.kept_states.changing
        # Without a plan, any blob may change.
        self._changing = changing.get(workspace.node, ()) if changing else names
        self._updated, workspace.updated = workspace.updated, set()
        self._sole = {
            _address(array): array
            for name in names
            if _may_have_arrays(workspace, name)
            for array in sole_arrays(
                workspace.globals, name, LINKED_BYTES, workspace.kept_states.references
            )
        }
        self._arrays: _Arrays = {}

    def mark(self, arrays: Iterable[PlannedArray], former: StoreIdentity | None) -> None:
        """Set `is_sole`, `is_constant` and, since store `former`, `is_unchanged` on each array."""
        last_store, last_arrays = self._last
        last = last_arrays if last_store == former else {}
        for array in arrays:
            if isinstance(array.data, Rows) or array.data.nbytes < LINKED_BYTES:
                continue
            found = self._sole.get(_address(array.data))
            if found is None:
                continue
            array.is_sole = True
            array.is_constant = array.blob not in self._changing
            about = dict(array.entry)
            self._arrays[array.path] = (weakref.ref(found), about)
            if array.path in last and array.blob not in self._updated:
                known, then = last[array.path]
                array.is_unchanged = known() is found and then == about
        self._sole.clear()  # or `values.own` would copy them

    def remember(self, workspace: Workspace, store: StoreIdentity) -> None:
        """Note, for the next save, the arrays of this store, which is now durable."""
        workspace.companions[_LAST] = (store, self._arrays)


def _may_have_arrays(workspace: Workspace, name: str) -> bool:
    """Whether a blob may have arrays that are long enough to be linked."""
    if type(workspace.globals[name]) is np.ndarray:
        return bool(workspace.globals[name].nbytes >= LINKED_BYTES)
    known = workspace.recollect(workspace.globals, name)
    if known is None:  # what refers to it may change it until the next save
        workspace.remember(workspace.globals, name, None)
    return known is None or known.form is Form.OTHER


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


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
    count = min(len(source), -(-source.nbytes // _COPY_BYTES))
    pieces = zip(np.array_split(target, count), np.array_split(source, count), strict=True)
    return [partial(np.copyto, *piece) for piece in pieces]
