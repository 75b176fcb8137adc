"""States of nodes that a worker keeps in memory, to recover without reading storage. No Dask.

An array that only its blob refers to is kept by reference: `values.own` copies it before an update,
because the kept state refers to it too. Built-in containers are packed or copied, tensors copied. Other
objects could change unnoticed, so they are not kept, and recovery reads them from storage.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jobrunner.workspace.array_pool import ArrayPool
from jobrunner.workspace.contents import (
    Form,
    Known,
    has_objects,
    is_plain,
    is_tensor,
    items_of,
    survey,
)
from jobrunner.workspace.copies import Packed, copy_containers, copy_tensor, pack
from jobrunner.workspace.kinds import IMMUTABLE, is_tensor_kind
from jobrunner.workspace.values import SOLE_ITEM, has_own_memory

_COPIED_BYTES = 1 << 20
"""Larger arrays over a file's memory map are not kept."""

_MOST_SAVES = 3
"""The last save known to be recorded, one that may be, and the newest."""


@dataclass(slots=True)
class _Save:
    """The states kept for one save."""

    states: dict[str, dict[str, Any]] = field(default_factory=dict)  # node -> blob -> kept value
    identities: dict[str, Hashable] = field(default_factory=dict)  # by node, once known
    arrays: set[int] = field(default_factory=set)  # ids; the save has one reference to each
    nbytes: int = 0  # at most, once the blobs have changed


class KeptStates:
    """The states that one worker keeps of its nodes, for one binding after another.

    Any thread may use it. A state is recalled by its identity: what its epoch's record says about
    its store, checksums included. So a recalled state is right, whatever happened in between.
    """

    def __init__(self, budget_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes  # for one save; blobs that no epoch changes cost nothing
        self.changing: dict[str, set[str]] = {}  # names of the blobs that epochs change, by node
        self.is_suspended = False  # keep nothing now
        self.array_pool = ArrayPool()  # for copies of kept arrays that tasks update
        self._saves: dict[str, _Save] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._saves)

    @property
    def nbytes(self) -> int:
        """How much memory all states take at most."""
        return sum(save.nbytes for save in list(self._saves.values()))

    def keep(
        self,
        save_id: str,
        node: str,
        state: Mapping[str, Any],
        names: Iterable[str],
        identity: Hashable = None,
        recollect: Callable[[str], Known | None] = lambda name: None,
    ) -> None:
        """Keep the named blobs of a node that can be kept exactly and within the budget.

        `state` must not change meanwhile, and the caller must have no other reference to its
        values. `recollect` returns what is known of a blob. Without an `identity`, `identify` must set it before the state can be recalled.
        """
        if self.budget_bytes <= 0 or self.is_suspended:
            return
        self._make_room_for(save_id)
        with self._lock:
            save = self._saves.setdefault(save_id, _Save())
            if node in save.states:
                return
            kept = save.states[node] = {}
            changing = self.changing.get(node, ())
            for name in names:
                known = recollect(name)
                keeper = _Keeper(
                    [other.arrays for other in self._saves.values()],
                    self.budget_bytes - save.nbytes,
                    name in changing,
                )
                try:
                    kept[name] = keeper.keep(state, name, known)
                except (_NotKeptError, RecursionError):
                    continue
                save.nbytes += keeper.nbytes
                save.arrays |= keeper.arrays
            if identity is not None:
                save.identities[node] = identity

    def identify(self, save_id: str, identities: Mapping[str, Hashable]) -> None:
        """Set the identities of a save's states, by node."""
        with self._lock:
            if save_id in self._saves:
                self._saves[save_id].identities.update(identities)

    def recall(self, node: str, identity: Hashable, names: Collection[str]) -> dict[str, Any]:
        """Return those of the named blobs that are kept in the state of that identity."""
        with self._lock:
            for save in self._saves.values():
                if node in save.identities and save.identities[node] == identity:
                    kept = save.states[node]
                    return {name: _restored(kept[name]) for name in names if name in kept}
        return {}

    def drop_before(self, save_id: str) -> None:
        """Drop the states of saves before that one, which was recorded or loaded."""
        with self._lock:
            saves = list(self._saves)
            place = saves.index(save_id) if save_id in saves else len(saves)
            dropped = [self._saves.pop(older) for older in saves[:place]]
        self._give_up(dropped)

    def drop_all(self) -> None:
        """Drop everything, unless another thread is using the states."""
        if self._lock.acquire(blocking=False):
            dropped, self._saves = self._saves, {}
            self._lock.release()
            del dropped
        self.array_pool.clear()

    def references(self, array: np.ndarray) -> int:
        """How many kept states refer to an array."""
        with self._lock:
            return sum(id(array) in save.arrays for save in self._saves.values())

    def _make_room_for(self, save_id: str) -> None:
        """Drop a save that cannot have been recorded: failing saves would pile up."""
        with self._lock:
            saves = list(self._saves)
            if save_id in saves or len(saves) < _MOST_SAVES:
                return
            dropped = self._saves.pop(saves[1])
        self._give_up([dropped])

    def _give_up(self, saves: Iterable[_Save]) -> None:
        self.array_pool.expire()
        for save in saves:
            for state in save.states.values():
                self.array_pool.offer(state)


class _NotKeptError(Exception):
    """A value cannot be kept exactly, or not within the budget."""


@dataclass
class _Keeper:
    """Keeps one blob."""

    others: Collection[Collection[int]]  # the arrays of each save
    left_bytes: int
    is_changing: bool
    nbytes: int = 0
    arrays: set[int] = field(default_factory=set)
    _shared: Collection[int] = ()
    _windows: dict[Hashable, Any] = field(default_factory=dict)
    _storages: dict[int, Hashable] = field(default_factory=dict)

    def keep(self, blobs: Mapping[str, Any], name: str, known: Known | None) -> Any:
        """Return what to keep of a blob; `known` is what is known of it, if nothing can change it."""
        if known is not None and known.kept is not None:
            kept, nbytes = known.kept
            self._spend(nbytes)
            return kept
        references = sys.getrefcount(blobs[name])
        value = blobs[name]
        if type(value) in IMMUTABLE:
            return value
        if type(value) is np.ndarray and not (value.dtype.hasobject and has_objects(value)):
            held = self._held(value)
            return self._array(value, references - held <= SOLE_ITEM)
        if is_tensor(value):
            return self._tensor(value)
        if items_of(type(value)) is None or has_objects(value):
            raise _NotKeptError
        if known is not None and known.form is not Form.OTHER:
            kept = self._plain(value, known)
            known.kept = (kept, self.nbytes)
            return kept
        contents = survey(value)
        if contents.form is not Form.OTHER:
            known = contents.known()
            del contents  # each part would seem to be in two places
            return self._plain(value, known)
        memory = contents.memory()
        kinds = {type(value), *contents.kinds}
        if not all(is_plain(kind) or is_tensor_kind(kind) for kind in kinds):
            raise _NotKeptError
        if any(map(has_objects, memory)):
            raise _NotKeptError
        self._spend(sum(map(sys.getsizeof, (value, *contents.parts))))
        self.nbytes -= sum(part.nbytes for part in memory)
        del memory
        is_sole = references - contents.ties.get(id(value), 0) <= SOLE_ITEM
        self._shared = contents.shared(self._held) if is_sole else set(map(id, contents.memory()))
        del contents
        return copy_containers(value, self._memory)

    def _plain(self, value: Any, known: Known) -> Any:
        """Return what to keep of a value without arrays, tensors and objects."""
        if known.form is Form.TREE and (packed := pack(value, known)):
            self._spend(sys.getsizeof(packed.data) + sys.getsizeof(packed.keys))
            return packed
        parts: Iterable[Any] = ()
        if known.row is not None:
            parts = items_of(type(value))(value)  # type: ignore[misc]  # it is a container
        elif known.form is Form.PLAIN:
            parts = survey(value).parts
        self._spend(sum(map(sys.getsizeof, (value, *parts))))
        del parts
        return copy_containers(value, self._memory, known)

    def _held(self, array: Any) -> int:
        return sum(id(array) in arrays for arrays in self.others)

    def _memory(self, part: Any) -> Any:
        return (
            self._tensor(part)
            if is_tensor(part)
            else self._array(part, id(part) not in self._shared)
        )

    def _array(self, value: np.ndarray, is_sole: bool) -> np.ndarray:
        if not has_own_memory(value, is_sole):
            if not isinstance(value.base, np.ndarray | None) and value.nbytes > _COPIED_BYTES:
                raise _NotKeptError
            self._spend(value.nbytes)
            value = value.copy(order="K")
        elif self.is_changing:
            self._spend(value.nbytes)
        self.arrays.add(id(value))
        return value

    def _tensor(self, value: Any) -> Any:
        torch = sys.modules["torch"]
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise _NotKeptError
        if not value.is_leaf or value.layout != torch.strided:
            raise _NotKeptError
        storage = value.untyped_storage().data_ptr()
        kind = (type(value), value.dtype, value.requires_grad)
        window = (storage, value.storage_offset(), value.shape, value.stride(), kind)
        # Two windows on one storage may overlap; their copies would not.
        if self._storages.setdefault(storage, window) != window:
            raise _NotKeptError
        if window not in self._windows:
            self._spend(value.nbytes)
            self._windows[window] = copy_tensor(value)
        return self._windows[window]

    def _spend(self, nbytes: int) -> None:
        self.nbytes += int(nbytes)
        if self.nbytes > self.left_bytes:
            raise _NotKeptError


def _restored(kept: Any) -> Any:
    """Rebuild a blob from a kept value; arrays are shared."""
    if type(kept) is Packed:
        return kept.open()
    return copy_containers(kept, lambda part: copy_tensor(part) if is_tensor(part) else part)
