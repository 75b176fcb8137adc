"""States of nodes that a worker keeps in memory, to recover without reading storage. No Dask.

An array that only its blob refers to is kept by reference: `values.own` copies it before an update,
because the kept state refers to it too. Built-in containers are rebuilt, tensors copied. Other
objects could change unnoticed, so they are not kept, and recovery reads them from storage.
"""

from __future__ import annotations

import collections
import sys
import threading
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jobrunner.workspace.array_pool import ArrayPool
from jobrunner.workspace.values import IMMUTABLE, SOLE_ITEM, copy_tensor, has_own_memory

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
    ) -> None:
        """Keep the named blobs of a node that can be kept exactly and within the budget.

        `state` must not change meanwhile, and the caller must have no other reference to its
        values. Without an `identity`, `identify` must set it before the state can be recalled.
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
                keeper = _Keeper(
                    [other.arrays for other in self._saves.values()],
                    self.budget_bytes - save.nbytes,
                    name in changing,
                )
                try:
                    kept[name] = keeper.keep(state, name)
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
                    return {name: _restored(kept[name], {}) for name in names if name in kept}
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
    _memo: dict[Hashable, Any] = field(default_factory=dict)
    _storages: dict[int, Hashable] = field(default_factory=dict)

    def keep(self, holder: Any, key: Any, *, is_hidden: bool = False) -> Any:
        """Return what to keep of ``holder[key]``.

        If `is_hidden`, its arrays must be copied: `own` does not find them, or something else
        refers to a container of them.
        """
        references = sys.getrefcount(holder[key])
        value = holder[key]
        kind = type(value)
        if kind in IMMUTABLE:
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if kind is np.ndarray and not value.dtype.hasobject:
            held = sum(id(value) in arrays for arrays in self.others)
            return self._array(value, references - held <= SOLE_ITEM and not is_hidden)
        is_hidden = is_hidden or references > SOLE_ITEM
        if kind is list or kind is tuple:
            self._spend(sys.getsizeof(value))
            if IMMUTABLE.issuperset(map(type, value)):
                return self._remember(value, kind(value))
            items: list[Any] = self._remember(value, []) if kind is list else []
            items += [self.keep(value, i, is_hidden=is_hidden) for i in range(len(value))]
            return items if kind is list else tuple(items)
        if kind is dict:
            return self._fill(self._remember(value, {}), value, is_hidden=is_hidden)
        if kind is collections.OrderedDict:
            fields = self._remember(value, collections.OrderedDict())
            if vars(value):  # torch keeps the versions of a state_dict's modules there
                self._fill(vars(fields), vars(value), is_hidden=True)
            return self._fill(fields, value, is_hidden=True)
        if (kind is set and IMMUTABLE.issuperset(map(type, value))) or kind is bytearray:
            self._spend(sys.getsizeof(value))
            return self._remember(value, value.copy())
        if _is_tensor(value):
            return self._tensor(value)
        raise _NotKeptError

    def _fill(self, fields: Any, value: Mapping[Any, Any], *, is_hidden: bool) -> Any:
        self._spend(sys.getsizeof(value))
        if not all(_is_constant(name) for name in value):
            raise _NotKeptError
        if IMMUTABLE.issuperset(map(type, value.values())):
            fields.update(value)
        else:
            for name in value:
                fields[name] = self.keep(value, name, is_hidden=is_hidden)
        return fields

    def _array(self, value: np.ndarray, is_sole: bool) -> np.ndarray:
        if not has_own_memory(value, is_sole):
            if not isinstance(value.base, np.ndarray | None) and value.nbytes > _COPIED_BYTES:
                raise _NotKeptError
            self._spend(value.nbytes)
            value = self._remember(value, value.copy(order="K"))
        elif self.is_changing:
            self._spend(value.nbytes)
        self.arrays.add(id(value))
        return value

    def _tensor(self, value: Any) -> Any:
        if not value.is_leaf or value.layout != sys.modules["torch"].strided:
            raise _NotKeptError
        storage = value.untyped_storage().data_ptr()
        window = (storage, value.storage_offset(), value.shape, value.stride(), value.dtype)
        # Two windows on one storage may overlap; their copies would not.
        if self._storages.setdefault(storage, window) != window:
            raise _NotKeptError
        if window not in self._memo:
            self._spend(value.nbytes)
            self._memo[window] = copy_tensor(value)
        return self._memo[window]

    def _remember(self, value: Any, kept: Any) -> Any:
        self._memo[id(value)] = kept
        return kept

    def _spend(self, nbytes: int) -> None:
        self.nbytes += int(nbytes)
        if self.nbytes > self.left_bytes:
            raise _NotKeptError


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter)


def _is_constant(key: object) -> bool:
    return type(key) in IMMUTABLE or (type(key) is tuple and all(map(_is_constant, key)))


def _restored(kept: Any, memo: dict[int, Any], *, is_hidden: bool = False) -> Any:
    """Rebuild a blob from a kept value; arrays are shared, unless `own` does not find them."""
    kind = type(kept)
    if kind in IMMUTABLE or (kind is np.ndarray and not is_hidden):
        return kept
    if id(kept) in memo:
        return memo[id(kept)]
    if kind is tuple:
        return tuple(_restored(item, memo, is_hidden=is_hidden) for item in kept)
    if kind is list:
        items = memo[id(kept)] = []
        items += [_restored(item, memo, is_hidden=is_hidden) for item in kept]
        return items
    if isinstance(kept, dict):
        fields = memo[id(kept)] = kind()
        if kind is not dict:
            is_hidden = True
            vars(fields).update(_restored(vars(kept), memo, is_hidden=True))
        fields.update((name, _restored(kept[name], memo, is_hidden=is_hidden)) for name in kept)
        return fields
    memo[id(kept)] = copy_tensor(kept) if _is_tensor(kept) else kept.copy()
    return memo[id(kept)]
