"""One node's blobs, global and private."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jobrunner.errors import BlobNotFoundError, ExecutionError
from jobrunner.workspace.kept_states import KeptStates
from jobrunner.workspace.memory_limit import copied, size_of
from jobrunner.workspace.values import view


@dataclass(frozen=True, slots=True)
class BlobUpdate:
    """Returned by a task, it sets global blobs of the task's node, under any names.

    Parameters
    ----------
    values : mapping of str to object
        Neither copied nor frozen, so the task must keep no reference.
    replace : bool
        Drop all other global blobs of the node, transient ones too.
    changes : mapping of str to callable
        Each returns a blob's new value, given the present one or None.
    waiting : mapping of str to callable, optional
        The same for blobs that other tasks make first; applied by `Workspace.apply_waiting`.
    """

    values: Mapping[str, Any]
    replace: bool = False
    changes: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    waiting: Mapping[str, Callable[[Any], Any]] | None = None


class Workspace:
    """The blobs of one node, on the worker that holds it.

    Parameters
    ----------
    node : str
        Its name.
    transient : frozenset of str
        Names of the global blobs that are never saved.
    kept_states : KeptStates, optional
        The worker's kept states; by default it keeps nothing.

    Attributes
    ----------
    globals : dict of str to object
        The global blobs: they live across runs and are saved at checkpoints.
    private : dict of str to object
        The blobs of the current run of a group.
    retained : dict
        Group -> (task, part) -> frozen value of the group's last run, or the error in its place:
        what `TaskOutput.fetch` returns.
    updated : set of str
        Names of the blobs that tasks were given to update, until somebody clears it.
    companions : dict of str to object
        What users of the workspace store in it, for as long as it lives.

    Notes
    -----
    Not locked. Within a run, the plan's edges keep two threads from one blob. Between runs, one
    operation at a time uses it.
    """

    __slots__ = (
        "_detached",
        "_waiting",
        "companions",
        "globals",
        "kept_states",
        "node",
        "private",
        "retained",
        "transient",
        "updated",
    )

    def __init__(
        self,
        node: str,
        transient: frozenset[str] = frozenset(),
        kept_states: KeptStates | None = None,
    ) -> None:
        self.node = node
        self.transient = transient
        self.kept_states = kept_states if kept_states is not None else KeptStates()
        self.globals: dict[str, Any] = {}
        self.private: dict[str, Any] = {}
        self.retained: dict[str, dict[tuple[str, int], Any]] = {}
        self.updated: set[str] = set()
        self.companions: dict[str, Any] = {}
        self._detached: set[str] = set()
        self._waiting: Mapping[str, Callable[[Any], Any]] = {}

    def nbytes(self) -> int:
        """Approximate size of the blobs and retained values."""
        retained = [list(values.values()) for values in list(self.retained.values())]
        return size_of([*list(self.globals.values()), *list(self.private.values()), *retained])

    def lookup(self, name: str) -> Any:
        """Return the blob's value itself, private before global.

        Raises
        ------
        BlobNotFoundError
            There is no such blob.
        """
        for blobs in (self.private, self.globals):
            if name in blobs:
                return blobs[name]
        raise self.not_found(name)

    def result(self, groups: Iterable[str], task: str, part: int) -> Any:
        """Return what a task returned in the last run of one of the groups.

        Raises
        ------
        ExecutionError
            It was not retained.
        TypeError
            It cannot be copied.
        """
        for group in groups:
            values = self.retained.get(group, {})
            if (task, part) in values:
                value = values[task, part]
                if isinstance(value, TypeError):
                    raise value
                return view(value)
        raise ExecutionError(
            f"The return value of task {self.node}/{task} is not there to be fetched. Workers "
            f"retain it only if output() was called before the first run, and until the next one. "
            f"Write `out = task.output()` where the task is defined, and out.fetch() after the "
            f"run; or give the task global outputs=, and fetch that blob."
        )

    def not_found(self, name: str) -> BlobNotFoundError:
        """Make the error for a missing blob."""
        there = ", ".join(map(repr, sorted({**self.globals, **self.private}))) or "none"
        return BlobNotFoundError(
            f"Node {self.node!r} has no blob {name!r}; its blobs are: {there}. Check the name and "
            f"the node. A private blob exists during one run of its group only."
        )

    def apply(self, update: BlobUpdate) -> None:
        """Set the global blobs of `update`, all or none."""
        self.updated.update(update.changes)
        changed = {name: make(self.globals.get(name)) for name, make in update.changes.items()}
        if update.replace:
            self.globals.clear()
        self.globals.update(update.values)
        self.globals.update(changed)
        if update.waiting is not None:
            self._waiting = update.waiting

    def apply_waiting(self) -> None:
        """Apply the changes that waited for other tasks to make their blobs."""
        waiting, self._waiting = self._waiting, {}
        self.apply(BlobUpdate({}, changes=waiting))

    def start_run(self, group: str, *, has_updates: bool) -> None:
        """Drop what the group's last run left, before it runs again."""
        self.private.clear()
        self.retained.pop(group, None)
        self._detached.discard(group)
        if has_updates and len(self._detached) < len(self.retained):
            self._detach()

    def forget(self, group: str) -> None:
        """Drop a group's retained values."""
        self.retained.pop(group, None)
        self._detached.discard(group)

    def clear(self) -> None:
        """Drop everything."""
        for its in (self.globals, self.private, self.retained, self.companions):
            its.clear()

    def _detach(self) -> None:
        """Copy what other groups' retained values share with blobs that tasks may now update."""
        for group, values in self.retained.items():
            if group not in self._detached:
                for key, value in values.items():
                    values[key] = _copied(value)
                self._detached.add(group)


class WorkspaceView(Mapping[str, Any]):
    """A read-only view of a node's blobs, private ones of the run included.

    Attributes
    ----------
    kept_states : KeptStates
        The workspace's, for loads.
    """

    __slots__ = ("_workspace", "kept_states")

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self.kept_states = workspace.kept_states

    def __getitem__(self, name: str) -> Any:
        return view(self._workspace.lookup(name))

    def __iter__(self) -> Iterator[str]:
        return iter({**self._workspace.globals, **self._workspace.private})

    def __len__(self) -> int:
        return len({**self._workspace.globals, **self._workspace.private})

    def __contains__(self, name: object) -> bool:
        return name in self._workspace.private or name in self._workspace.globals

    def __repr__(self) -> str:
        return f"<blobs of {self._workspace.node!r}: {', '.join(map(repr, self)) or 'none'}>"


def _copied(frozen: Any) -> Any:
    """Copy the arrays of a frozen value that are views."""
    kind = type(frozen)
    if kind is np.ndarray and not frozen.flags.owndata:
        array = copied(frozen, "that can be fetched and a task updates")
        array.flags.writeable = False
        return array
    if kind is dict:
        return {key: _copied(item) for key, item in frozen.items()}
    if kind is list or kind is tuple:
        return kind(_copied(item) for item in frozen)
    return frozen
