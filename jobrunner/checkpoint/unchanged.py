"""Which arrays of a node are the very ones that its last store was written from.

A blob's array that nothing else can reach changes only where a task names the blob in its
`updates`, and a workspace notes those. What a store was written from, and what no task was given
since, need not be read to know that it has not changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jobrunner.checkpoint.store import LINKED_BYTES, PlannedArray, Rows
from jobrunner.workspace import Workspace, sole_arrays

Origin = tuple[str, str, str]
"""A store: its directory, its name, and the SHA-256 of its manifest."""

_LAST = "what the last store was written from"


@dataclass(frozen=True, slots=True)
class _Written:
    """What a store was written from; arrays are known as long as they live.

    Attributes
    ----------
    origin : Origin
    arrays : dict
        Path within the store -> the array, and what the manifest says of it but for its files.
    """

    origin: Origin
    arrays: dict[str, tuple[weakref.ref[np.ndarray[Any, Any]], dict[str, Any]]]


class Provenance:
    """Tells, for one save of one node, what nothing else can reach and what has not changed.

    Parameters
    ----------
    workspace : Workspace
        Of which nothing is encoded yet, for that refers to its arrays. What it notes of updates
        begins anew, and what its last store was written from is known again only after `leave`.
    names : collection of str
        The blobs that are saved.

    Notes
    -----
    Runs on the worker, in one thread. Arrays too short to be linked are left out.
    """

    def __init__(self, workspace: Workspace, names: Collection[str]) -> None:
        self._last: _Written | None = workspace.companions.pop(_LAST, None)
        changing = workspace.kept_states.changing
        # Without a plan, nobody knows.
        self._changing = changing.get(workspace.node, ()) if changing else names
        self._updated, workspace.updated = workspace.updated, set()
        worth_a_look = [name for name in names if not _is_short(workspace.globals[name])]
        self._sole = {
            _address(array): array
            for name in worth_a_look
            for array in sole_arrays(
                workspace.globals, name, LINKED_BYTES, workspace.kept_states.references
            )
        }
        self._arrays: dict[str, tuple[weakref.ref[np.ndarray[Any, Any]], dict[str, Any]]] = {}

    def tell(self, arrays: Iterable[PlannedArray], former: Origin | None) -> None:
        """Say of each array whether it is sole and unchanged.

        Parameters
        ----------
        arrays : iterable of PlannedArray
        former : tuple, optional
            The store that unchanged files may be shared with.
        """
        last = self._last.arrays if self._last and self._last.origin == former else {}
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

    def leave(self, workspace: Workspace, origin: Origin) -> None:
        """Let the next save know what this store, now durable, was written from."""
        workspace.companions[_LAST] = _Written(origin, self._arrays)


def _is_short(value: object) -> bool:
    return type(value) is np.ndarray and value.nbytes < LINKED_BYTES


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])
