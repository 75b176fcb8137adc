"""Objects that are saved by their state, and loaded into objects made again. Pure: no I/O.

Such an object has ``state_dict()`` and ``load_state_dict(state)``, like PyTorch's modules,
optimizers and schedulers. A checkpoint holds what ``state_dict()`` returned and the name of the
class, none of its code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobrunner.errors import CheckpointError, PlanMismatchError


def has_state(cls: type) -> bool:
    """Whether objects of a class are saved by their ``state_dict()``."""
    return all(callable(getattr(cls, name, None)) for name in ("state_dict", "load_state_dict"))


def name_class(value: object) -> str:
    """Return the full name of an object's class."""
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}"


@dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """Stands for an object until its state is loaded into one."""

    cls: str  # full name of its class; empty if it was given, not saved
    state: Any  # what its ``state_dict()`` returned; or a `JoinedStates`


@dataclass(frozen=True, slots=True, eq=False)
class JoinedStates:
    """The states of objects that another number of nodes saved, in the order of these nodes."""

    states: list[Any]
    new_parts: int  # of how many the object is one


@dataclass(frozen=True, slots=True)
class StatefulBlob:
    """A blob as it was read: a `SavedState`, or lists, tuples and dicts that contain some."""

    value: Any
    where: str  # names the blob in messages

    def load_into(self, current: Any) -> Any:
        """Load each state into the object at its place in `current`, the blob that the init task made.

        Return the value with these objects. Raises `PlanMismatchError` if there is no object for a
        state, or one of another class; `CheckpointError` if a ``load_state_dict`` raised: then do
        not use the blob's objects any more.
        """
        return _Merge(self.where).merge(self.value, current, "")


def join_states(parts: Sequence[object], new_parts: int, where: str) -> StatefulBlob:
    """Join the parts of a partitioned blob of objects, as they were read, for `new_parts` nodes.

    Raises `PlanMismatchError` if a part contains anything but objects, in lists, tuples and dicts, or
    if the parts do not contain them at the same places.
    """
    values = [part.value if isinstance(part, StatefulBlob) else part for part in parts]
    return StatefulBlob(_join(values, new_parts, where, ""), where)


def _join(parts: Sequence[Any], new_parts: int, where: str, place: str) -> Any:
    first = parts[0]
    kind = type(first)
    if all(type(part) is kind for part in parts):
        if kind is SavedState and all(part.cls == first.cls for part in parts):
            return SavedState(first.cls, JoinedStates([part.state for part in parts], new_parts))
        if kind in (list, tuple) and all(len(part) == len(first) for part in parts):
            joined = []
            for i, items in enumerate(zip(*parts, strict=True)):
                joined.append(_join(items, new_parts, where, f"{place}[{i}]"))
            return kind(joined)
        if kind is dict and all(part.keys() == first.keys() for part in parts):
            fields = {}
            for key in first:
                values = [part[key] for part in parts]
                fields[key] = _join(values, new_parts, where, f"{place}[{key!r}]")
            return fields
    kinds = ", ".join(dict.fromkeys(map(_name_part, parts)))
    raise PlanMismatchError(
        f"{_at(where, place)}: another number of nodes saved this partitioned blob; expected in all "
        f"parts objects of one class with a state, or lists, tuples or dicts of them alike, found "
        f"{kinds}. Resume on as many nodes as saved the parts."
    )


def _name_part(part: object) -> str:
    return f"the state of a {part.cls}" if isinstance(part, SavedState) else name_class(part)


def _at(where: str, place: str) -> str:
    return f"{where}, item {place}" if place else where


@dataclass(slots=True)
class _Merge:
    """Puts the objects of a blob in the places of their states."""

    where: str
    merged: dict[int, Any] = field(default_factory=dict)  # by `id` of what was saved

    def merge(self, saved: Any, current: Any, place: str) -> Any:
        cls = type(saved)
        if cls is tuple:
            items = []
            for i, item in enumerate(saved):
                items.append(self.merge(item, _item(current, i), f"{place}[{i}]"))
            return tuple(items)
        if id(saved) in self.merged:
            return self.merged[id(saved)]
        if cls is SavedState:
            _load(saved, current, _at(self.where, place))
            self.merged[id(saved)] = current
            return current
        if cls is list or isinstance(saved, dict):
            self.merged[id(saved)] = saved
            for key, item in enumerate(saved) if cls is list else list(saved.items()):
                saved[key] = self.merge(item, _item(current, key), f"{place}[{key!r}]")
        return saved


def _item(current: Any, key: Any) -> Any:
    if isinstance(current, Mapping):
        return current.get(key)
    if isinstance(current, list | tuple) and isinstance(key, int) and key < len(current):
        return current[key]
    return None


def _load(saved: SavedState, current: Any, where: str) -> None:
    """Load a state into an object."""
    if not has_state(type(current)):
        class_of_state = f" of class {saved.cls}" if saved.cls else ""
        present = "nothing" if current is None else name_class(current)
        raise PlanMismatchError(
            f"{where}: expected an object{class_of_state} to load the state into, found {present}. "
            f"Make the object in a task of the job's init group, or read the state without the "
            f"job: manager.open(epoch)[node][blob]."
        )
    name = name_class(current)
    # Our readers check their states, whatever an earlier version called their classes.
    are_readers = saved.cls.startswith(_READERS) and name.startswith(_READERS)
    # A script's module has another name if another program imports it.
    is_same = are_readers or saved.cls.endswith(f".{type(current).__qualname__}")
    if saved.cls and not is_same:
        raise PlanMismatchError(
            f"{where}: expected an object of class {saved.cls}, whose state was saved, found a "
            f"{name}. Make the same class in the init task, or start afresh "
            f"(resume_from_epoch=None, --resume none)."
        )
    joined = saved.state if isinstance(saved.state, JoinedStates) else None
    state = saved.state if joined is None else _merge_states(joined.states, current, where)
    whole = "the saved state is whole, but " if saved.cls else ""
    with _calling(
        f"{where}: {whole}load_state_dict of {name}",
        "Make the object in the init task as it was when it was saved, or start afresh "
        "(resume_from_epoch=None, --resume none).",
        where,
    ):
        current.load_state_dict(state)
    if are_readers and joined is not None:
        # Else two nodes read the same records, or none reads some.
        _, num_shards = current.state_dict()["shard"]
        if num_shards != joined.new_parts:
            raise PlanMismatchError(
                f"{where}: expected a shard of {joined.new_parts}, one for each node that has this "
                f"partitioned blob, found one of {num_shards}. Make it with "
                f"sharded(i, {joined.new_parts})."
            )


def _merge_states(states: list[Any], current: Any, where: str) -> Any:
    """What the object makes of the states of all former parts."""
    name = name_class(current)
    if not callable(getattr(type(current), "merge_state_dicts", None)):
        raise PlanMismatchError(
            f"{where}: the number of parts of this partitioned blob was {len(states)} and is "
            f"another now: expected {name} to have a method merge_state_dicts(self, states), which "
            f"makes one state of all parts' states; found none. Add it, or resume on as many nodes "
            f"as saved the parts."
        )
    with _calling(
        f"{where}: merge_state_dicts of {name}, given the states of {len(states)} parts,",
        "Correct it, or resume on as many nodes as saved the parts.",
        where,
    ):
        return current.merge_state_dicts(states)


@contextlib.contextmanager
def _calling(subject: str, remedy: str, where: str) -> Iterator[None]:
    """Turn what a method of an object raises into an error that names the blob."""
    try:
        yield
    except PlanMismatchError as error:  # of a reader, which says what to do
        raise PlanMismatchError(f"{where}: {error}") from None
    except Exception as error:
        raise CheckpointError(
            f"{subject} raised {type(error).__name__}: {error}. {remedy}"
        ) from error


_READERS = "jobrunner.data."
