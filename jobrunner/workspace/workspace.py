"""One node's blobs, global and private."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jobrunner.errors import BlobNotFoundError, ExecutionError
from jobrunner.workspace.contents import Form, Known, items_of, survey
from jobrunner.workspace.copies import copy_containers
from jobrunner.workspace.kept_states import KeptStates
from jobrunner.workspace.memory_limit import copied, size_of
from jobrunner.workspace.values import SOLE_ITEM, view


@dataclass(frozen=True, slots=True)
class BlobUpdate:
    """A task that returns this sets global blobs of its node, under any names."""

    values: Mapping[str, Any]  # not copied, so the task must keep no reference
    replace: bool = False  # drop all other global blobs of the node, transient ones too
    # Each returns a blob's new value, given the current one or None.
    changes: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    # The same, for blobs that other tasks make first; `Workspace.apply_waiting` applies them.
    waiting: Mapping[str, Callable[[Any], Any]] | None = None


@dataclass(eq=False, repr=False, slots=True)
class Workspace:
    """The blobs of one node, on its worker.

    It has no lock: within a run, the plan's edges keep two threads from using one blob, and between
    runs one operation at a time uses it.
    """

    node: str
    transient: frozenset[str] = frozenset()  # names of the global blobs that are never saved
    uid: str = ""  # the node's, if it has one
    kept_states: KeptStates = field(default_factory=KeptStates)
    globals: dict[str, Any] = field(default_factory=dict)  # they outlive runs and are saved
    private: dict[str, Any] = field(default_factory=dict)  # those of the current run
    # For `TaskOutput.fetch`: group -> (task, part) -> frozen value of the last run, or an error.
    retained: dict[str, dict[tuple[str, int], Any]] = field(default_factory=dict)
    updated: set[str] = field(default_factory=set)  # by tasks; a save clears it
    known: dict[str, Known] = field(default_factory=dict)  # of blobs that are containers
    companions: dict[str, Any] = field(default_factory=dict)  # what other packages keep here
    _detached: set[str] = field(default_factory=set)  # groups whose retained values are copies
    _waiting: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)

    def nbytes(self) -> int:
        """Approximate size of the blobs and retained values."""
        return size_of([self.globals, self.private, self.retained])

    def lookup(self, name: str) -> Any:
        """Return a blob's value itself; `BlobNotFoundError` if there is none."""
        for blobs in (self.private, self.globals):
            if name in blobs:
                return blobs[name]
        raise self.not_found(name)

    def holds(self, blobs: dict[Any, Any]) -> bool:
        """Whether it is the dictionary of the node's global or private blobs."""
        return blobs is self.globals or blobs is self.private

    def remember(self, blobs: dict[str, Any], name: str, known: Known | None) -> None:
        """Note what is known of a blob that was just set or settled; nothing else refers to it."""
        if known is None:
            self.known.pop(name, None)
        else:
            known.home, known.id = blobs, id(blobs[name])
            self.known[name] = known

    def recollect(self, blobs: dict[str, Any], name: str) -> Known | None:
        """Return what is known of a blob; None if it is no container, or something could change it.

        The caller must have no reference to the blob.
        """
        is_sole = sys.getrefcount(blobs[name]) <= SOLE_ITEM
        value = blobs[name]
        known = self.known.get(name)
        if known is not None and known.home is blobs and known.id == id(value):
            return known if is_sole or known.form in _LASTING else None
        if isinstance(value, np.ndarray) or items_of(type(value)) is None:
            return None
        contents = survey(value)
        known = contents.known()
        if known.form not in _LASTING and not (is_sole and not contents.shared()):
            return None
        del value
        self.remember(blobs, name, known)
        return known

    def result(self, groups: Collection[str], task: str, part: int) -> Any:
        """Return part of a task's return value in the last of the groups' runs that has it.

        Raises `ExecutionError` if it was not retained, and `TypeError` if it cannot be copied.
        """
        for group in reversed(self.retained):  # in the order of their last runs
            values = self.retained[group]
            if group in groups and (task, part) in values:
                value = values[task, part]
                if isinstance(value, TypeError):
                    raise value
                return view(value)
        raise ExecutionError(
            f"The return value of task {self.node}/{task} was not retained. Workers retain it "
            f"only if output() was called before the first run, and only until the next run. "
            f"Call `out = task.output()` where the task is defined, and out.fetch() after the "
            f"run; or give the task global outputs=, and fetch that blob."
        )

    def not_found(self, name: str) -> BlobNotFoundError:
        """Make the error for a missing blob."""
        there = ", ".join(map(repr, sorted({**self.globals, **self.private}))) or "none"
        return BlobNotFoundError(
            f"Node {self.node!r} has no blob {name!r}; its blobs are: {there}. Check the name and "
            f"the node. A private blob exists only during one run of its group."
        )

    def apply(self, update: BlobUpdate) -> None:
        """Set the global blobs of `update`, all or none."""
        self.updated.update(update.changes)
        changed = {name: make(self.globals.get(name)) for name, make in update.changes.items()}
        if update.replace:
            self.globals.clear()
        for values in (update.values, changed):
            self.globals.update(values)
            for name in values:
                self.known.pop(name, None)
        if update.waiting is not None:
            self._waiting = update.waiting

    def apply_waiting(self) -> None:
        """Apply the changes that waited for blobs of other tasks."""
        waiting, self._waiting = self._waiting, {}
        self.apply(BlobUpdate({}, changes=waiting))

    def start_run(self, group: str, *, has_updates: bool) -> None:
        """Drop private blobs and the values of the group's last run."""
        self.private.clear()
        self.forget(group)
        if has_updates and len(self._detached) < len(self.retained):
            self._detach()

    def forget(self, group: str) -> None:
        """Drop a group's retained values."""
        self.retained.pop(group, None)
        self._detached.discard(group)

    def clear(self) -> None:
        """Drop everything."""
        for values in (self.globals, self.private, self.retained, self.companions, self.known):
            values.clear()

    def _detach(self) -> None:
        """Copy arrays that retained values share with blobs, since tasks may now update these."""
        for group, values in self.retained.items():
            if group not in self._detached:
                for key, value in values.items():
                    values[key] = copy_containers(value, _copied)
                self._detached.add(group)


_LASTING = (Form.CONSTANT, Form.OTHER)
"""What holds, or is the most careful guess, whoever refers to the value."""


class WorkspaceView(Mapping[str, Any]):
    """A read-only view of a node's blobs, private ones of the run included."""

    __slots__ = ("_workspace", "identity", "kept_states")

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self.kept_states = workspace.kept_states
        self.identity = workspace.uid or workspace.node

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


def _copied(array: Any) -> Any:
    """Copy an array of a frozen value if it is a view."""
    if isinstance(array, np.ndarray) and not array.flags.owndata:
        array = copied(array, "that can be fetched and a task updates")
        array.flags.writeable = False
    return array
