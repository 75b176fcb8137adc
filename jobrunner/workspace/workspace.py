"""One node's blobs, global and private."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jobrunner.errors import BlobNotFoundError, ExecutionError
from jobrunner.workspace.history_rows import Rows
from jobrunner.workspace.values import (
    adopt,
    arrays_of,
    capture,
    is_provable,
    opened,
    owner_of,
    settle,
    size_of,
    thaw,
    view,
)


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """How a blob was written to a store."""

    version: int  # of the blob
    arrays: dict[str, bytes]  # path within the store -> how the array is described there


@dataclass(frozen=True, slots=True)
class StoredAs:
    """The last store that was written of a node, or loaded."""

    store: tuple[str, str, str]  # its directory, its name, the SHA-256 of its document
    files: Mapping[str, tuple[int, str]]  # size and digest of long ones, by path within the store
    blobs: Mapping[str, StoredBlob]


@dataclass(frozen=True, slots=True)
class LoadedArrays:
    """Blobs that are exactly the arrays of a store."""

    store: tuple[str, str, str]  # as in `StoredAs`
    files: Mapping[str, tuple[int, str]]  # the same
    arrays: Mapping[str, Mapping[str, bytes]]  # blob -> as in `StoredBlob`


@dataclass(frozen=True, slots=True)
class BlobUpdate:
    """A task that returns this sets global blobs of its node, under any names."""

    values: Mapping[str, Any]  # not copied, so the task must keep no reference
    replace: bool = False  # drop all other global blobs of the node, transient ones too
    # Each returns a blob's new value, given the current one or None.
    changes: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    # The same, for blobs that other tasks make first; `Workspace.apply_waiting` applies them.
    waiting: Mapping[str, Callable[[Any], Any]] | None = None
    loaded: LoadedArrays | None = None  # which of `values` a store has
    histories: Mapping[str, Rows] = field(default_factory=dict)  # what goes on from a store


class Taken:
    """Stands for a blob while a task updates it; `box` has the value, until it is settled."""

    __slots__ = ("box",)

    def __init__(self, value: Any) -> None:
        self.box = [value]


@dataclass(eq=False, repr=False, slots=True)
class Workspace:
    """The blobs of one node, on its worker.

    It has no lock: within a run, the plan's edges keep two threads from using one blob, and between
    runs one operation at a time uses it.
    """

    node: str
    transient: frozenset[str] = frozenset()  # names of the global blobs that are never saved
    stream: str = ""  # the first name of a renamed node, under which its tasks draw
    # The stored values of blobs: see `values`. Global ones outlive runs and are saved, private ones
    # are those of the current run.
    globals: dict[str, Any] = field(default_factory=dict)
    private: dict[str, Any] = field(default_factory=dict)
    # For `TaskOutput.fetch`: group -> (task, part) -> captured value of the last run, or an error.
    retained: dict[str, dict[tuple[str, int], Any]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # of global blobs
    histories: dict[str, Rows] = field(default_factory=dict)  # of global blobs
    stored: StoredAs | None = None
    # What waits here between two calls: values that Dask has computed, until their task runs; and
    # what a replay made, until the recorded values are loaded in its place.
    parked: dict[str, Any] = field(default_factory=dict)
    _waiting: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)

    def nbytes(self) -> int:
        """Approximate size of the blobs; memory that two of them share counts twice."""
        return sum(map(size_of, [*self.globals.values(), *self.private.values()]))

    def lookup(self, name: str) -> Any:
        """Return a blob as a task reads it; `BlobNotFoundError` if there is none."""
        for blobs in (self.private, self.globals):
            if name in blobs:
                return read(blobs, name)
        raise self.not_found(name)

    def capture(self, name: str) -> Any:
        """Return a blob as it is now; `BlobNotFoundError` if there is none."""
        for blobs in (self.private, self.globals):
            if name in blobs:
                return capture(stored_in(blobs, name))
        raise self.not_found(name)

    def put(self, name: str, stored: Any) -> None:
        """Set a global blob to a value that is settled."""
        self.versions[name] += 1
        self.globals[name] = stored

    def take(self, name: str) -> Any:
        """Return a global blob to be changed; the caller puts it again, settled."""
        self.versions[name] += 1
        return take(self.globals, name)

    def value(self, name: str) -> Any:
        """Return a global blob for a save: arrays themselves, which only `take` changes."""
        return opened(stored_in(self.globals, name))

    def is_provable(self, name: str) -> bool:
        """Whether an equal version proves that a global blob has not changed."""
        return is_provable(stored_in(self.globals, name))

    def holds_arrays(self, name: str) -> bool:
        """Whether a global blob is an array or a container of some."""
        return bool(arrays_of(stored_in(self.globals, name)))

    def has_rows(self, name: str) -> bool:
        """Whether a global blob is a history in which a task has put a value."""
        return name in self.histories and self.histories[name].last is not None

    def has_at_rest(self, name: str, array: np.ndarray) -> bool:
        """Whether an array's memory is that of an array at rest in a global blob."""
        arrays = arrays_of(stored_in(self.globals, name))
        return owner_of(array) in {owner_of(part) for part in arrays}

    def result(self, groups: Collection[str], task: str, part: int) -> Any:
        """Return a captured part of a task's return value in the groups' last run that has it.

        Raises `ExecutionError` if it was not retained, and `TypeError` if it cannot be copied.
        """
        for group in reversed(self.retained):  # in the order of their last runs
            values = self.retained[group]
            if group in groups and (task, part) in values:
                value = values[task, part]
                if isinstance(value, TypeError):
                    raise value
                return value
        raise ExecutionError(
            f"The return value of task {self.node}/{task} was not retained. Workers retain it "
            f"only if output() was called before the first run, and only until the next run. "
            f"Call `out = task.output()` where the task is defined, and out.fetch() after the "
            f"run; or give the task global outputs=, and fetch that blob."
        )

    def not_found(self, name: str) -> BlobNotFoundError:
        """Make the error for a missing blob."""
        names = ", ".join(map(repr, sorted({**self.globals, **self.private}))) or "none"
        return BlobNotFoundError(
            f"Node {self.node!r} has no blob {name!r}; its blobs are: {names}. Check the name and "
            f"the node. A private blob exists only during one run of its group."
        )

    def apply(self, update: BlobUpdate) -> None:
        """Set the global blobs of `update`, all or none."""
        changed = {}
        for name, make in update.changes.items():
            changed[name] = make(self.take(name) if name in self.globals else None)
        if update.replace:
            self.globals.clear()
        for values in (update.values, changed):
            for name, value in values.items():
                self.put(name, adopt(value))
        if update.waiting is not None:
            self._waiting = update.waiting
        for name, rows in update.histories.items():
            if name in self.histories:
                self.histories[name].continue_from(rows)
        if update.loaded is not None:
            self._note_loaded(update.loaded)

    def _note_loaded(self, loaded: LoadedArrays) -> None:
        """Let the next save link arrays to the store that they came from, until a task sets them."""
        blobs: dict[str, StoredBlob] = {}
        for name, arrays in loaded.arrays.items():
            blobs[name] = StoredBlob(self.versions[name], dict(arrays))
        self.stored = StoredAs(loaded.store, loaded.files, blobs)

    def apply_waiting(self) -> None:
        """Apply the changes that waited for blobs of other tasks."""
        waiting, self._waiting = self._waiting, {}
        self.apply(BlobUpdate({}, changes=waiting))

    def start_run(self, group: str) -> None:
        """Drop private blobs and what the group's last run retained."""
        self.private.clear()
        for rows in self.histories.values():
            rows.begin_run()
        self.retained.pop(group, None)

    def forget(self, group: str) -> None:
        """Drop a group's retained values."""
        self.retained.pop(group, None)

    def clear(self) -> None:
        """Drop everything."""
        blobs = (self.globals, self.private, self.retained, self.parked, self.histories)
        for values in blobs:
            values.clear()
        self.stored = None


def take(blobs: dict[Any, Any], name: Any) -> Any:
    """Return a blob to be changed. Until it is set again, a `Taken` is in its place."""
    if type(blobs[name]) is Taken:  # a task that updated it has failed
        blobs[name] = settle(blobs[name].box)
    thaw(blobs, name)
    update = blobs[name] = Taken(blobs[name])
    return update.box[0]


def read(blobs: Mapping[Any, Any], name: Any) -> Any:
    """Return a blob as a task reads it."""
    stored = blobs[name]
    if type(stored) is Taken:
        stored = stored_in(blobs, name)
    return view(stored)


def stored_in(blobs: Mapping[Any, Any], name: Any) -> Any:
    """Return a blob as it is stored; of one that a task is updating, how it looks now."""
    stored = blobs[name]
    if type(stored) is not Taken:
        return stored
    value = stored.box[0]
    if type(value) is np.ndarray:
        return adopt(value.view())
    return settle([value])


class WorkspaceView(Mapping[str, Any]):
    """A read-only view of a node's blobs, private ones of the run included."""

    __slots__ = ("_workspace", "identity")

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self.identity = workspace.stream or workspace.node

    def __getitem__(self, name: str) -> Any:
        return self._workspace.lookup(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __contains__(self, name: object) -> bool:
        return name in self._workspace.private or name in self._workspace.globals

    def __repr__(self) -> str:
        return f"<blobs of {self._workspace.node!r}: {', '.join(map(repr, self)) or 'none'}>"

    def _names(self) -> dict[str, Any]:
        return {**self._workspace.globals, **self._workspace.private}
