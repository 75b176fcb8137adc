"""Objects that are saved by their state, and loaded into objects made again. Pure: no I/O.

Such an object has ``state_dict()`` and ``load_state_dict(state)``, like PyTorch's modules,
optimizers and schedulers. A checkpoint holds what ``state_dict()`` returned and the name of the
class, none of its code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    def load_into(self, made: Any) -> Any:
        """Load each state into the object at its place in `made`, the blob that the init task made.

        Return the value with these objects. Raises `PlanMismatchError` if there is no object for a
        state, or one of another class; `CheckpointError` if a ``load_state_dict`` raised: then do
        not use the blob's objects any more.
        """
        return _Merge(self.where).merge(self.value, made, "")


def given_state(state: object, where: str) -> StatefulBlob:
    """A blob that is an object whose state was not saved but made by hand."""
    return StatefulBlob(SavedState("", state), where)


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
            items = zip(*parts, strict=True)
            return kind(
                _join(its, new_parts, where, f"{place}[{i}]") for i, its in enumerate(items)
            )
        if kind is dict and all(part.keys() == first.keys() for part in parts):
            return {
                key: _join([part[key] for part in parts], new_parts, where, f"{place}[{key!r}]")
                for key in first
            }
    found = ", ".join(dict.fromkeys(map(_name_part, parts)))
    raise PlanMismatchError(
        f"{where}{place and f', item {place}'}: another number of nodes saved this partitioned blob; "
        f"expected in all parts objects of one class with a state, or lists, tuples or dicts of them "
        f"alike, found {found}. Resume on as many nodes as saved the parts."
    )


def _name_part(part: object) -> str:
    return f"the state of a {part.cls}" if isinstance(part, SavedState) else name_class(part)


@dataclass(slots=True)
class _Merge:
    where: str
    merged: dict[int, Any] = field(default_factory=dict)  # by `id` of what was saved

    def merge(self, saved: Any, made: Any, place: str) -> Any:
        cls = type(saved)
        if cls is tuple:
            return tuple(
                self.merge(item, _item(made, i), f"{place}[{i}]") for i, item in enumerate(saved)
            )
        if id(saved) in self.merged:
            return self.merged[id(saved)]
        if cls is SavedState:
            self.merged[id(saved)] = made = self._load(saved, made, place)
            return made
        if cls is list or isinstance(saved, dict):
            self.merged[id(saved)] = saved
            for key, item in enumerate(saved) if cls is list else list(saved.items()):
                saved[key] = self.merge(item, _item(made, key), f"{place}[{key!r}]")
        return saved

    def _load(self, saved: SavedState, made: Any, place: str) -> Any:
        where = self.where + (f", item {place}" if place else "")
        if not has_state(type(made)):
            found = "nothing" if made is None else name_class(made)
            raise PlanMismatchError(
                f"{where}: expected an object{saved.cls and f' of class {saved.cls}'} to load the state into, "
                f"found {found}. Make the object in a task of the job's init group, or read the state "
                f"without the job: manager.open(epoch)[node][blob]."
            )
        # Our readers check their states, whatever an earlier version called their classes.
        are_readers = all(it.startswith("jobrunner.data.") for it in (saved.cls, name_class(made)))
        # A script's module has another name if another program imports it.
        is_same = are_readers or saved.cls.endswith(f".{type(made).__qualname__}")
        if saved.cls and not is_same:
            raise PlanMismatchError(
                f"{where}: expected an object of class {saved.cls}, whose state was saved, found a "
                f"{name_class(made)}. Make the same class in the init task, or start afresh "
                f"(resume_from_epoch=None, --resume none)."
            )
        state = saved.state
        if isinstance(state, JoinedStates):
            state = self._joined(state.states, made, where)
        try:
            made.load_state_dict(state)
        except PlanMismatchError as error:  # of a reader, which says what to do
            raise PlanMismatchError(f"{where}: {error}") from None
        except Exception as error:
            raise CheckpointError(
                f"{where}: {'the saved state is whole, but ' if saved.cls else ''}load_state_dict of {name_class(made)} "
                f"raised {type(error).__name__}: {error}. Make the object in the init task as it was "
                f"when it was saved, or start afresh (resume_from_epoch=None, --resume none)."
            ) from error
        if are_readers and isinstance(saved.state, JoinedStates):
            # Else two nodes read the same records, or none reads some.
            (_, count), expected = made.state_dict()["shard"], saved.state.new_parts
            if count != expected:
                raise PlanMismatchError(
                    f"{where}: expected a shard of {expected}, one for each node that has this "
                    f"partitioned blob, found one of {count}. Make it with sharded(i, {expected})."
                )
        return made

    def _joined(self, states: list[Any], made: Any, where: str) -> Any:
        """What the object makes of the states of all former parts."""
        if not callable(getattr(type(made), "merge_state_dicts", None)):
            raise PlanMismatchError(
                f"{where}: the number of parts of this partitioned blob was {len(states)} and is "
                f"another now: expected {name_class(made)} to have a method merge_state_dicts(self, "
                f"states), which makes one state of all parts' states; found none. Add it, or resume "
                f"on as many nodes as saved the parts."
            )
        try:
            return made.merge_state_dicts(states)
        except PlanMismatchError as error:  # of a reader, which says what to do
            raise PlanMismatchError(f"{where}: {error}") from None
        except Exception as error:
            raise CheckpointError(
                f"{where}: merge_state_dicts of {name_class(made)}, given the states of "
                f"{len(states)} parts, raised {type(error).__name__}: {error}. Correct it, or resume "
                f"on as many nodes as saved the parts."
            ) from error


def _item(made: Any, key: Any) -> Any:
    if isinstance(made, Mapping):
        return made.get(key)
    if isinstance(made, list | tuple) and isinstance(key, int) and key < len(made):
        return made[key]
    return None
