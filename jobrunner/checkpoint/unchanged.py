"""Finds the arrays of a node that have not changed since its last save, without reading them.

An array that only its blob refers to changes only if a task names the blob in its `updates`. The
workspace notes these blobs.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from jobrunner.checkpoint.store import LINKED_BYTES, PlannedArray, Rows
from jobrunner.workspace import Workspace, sole_arrays

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
            if not _is_short(workspace.globals[name])
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


def _is_short(value: object) -> bool:
    return type(value) is np.ndarray and value.nbytes < LINKED_BYTES


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])
