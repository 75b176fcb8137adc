"""Objects that are saved by their state, and loaded into objects made again. Pure: no I/O.

Such an object has ``state_dict()`` and ``load_state_dict(state)``, like PyTorch's modules,
optimizers and schedulers. A checkpoint holds what ``state_dict()`` returned and the name of the
class, none of its code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
        return _merge(self.value, current, self.where, {})


def join_states(parts: Sequence[object], new_parts: int, where: str) -> StatefulBlob:
    """Join the parts of a partitioned blob of objects, as they were read, for `new_parts` nodes.

    Raises `PlanMismatchError` if the parts are anything but objects of one class.
    """
    states = []
    classes: dict[str, None] = {}  # in their order
    for part in parts:
        saved = part
        if isinstance(part, StatefulBlob):
            saved = part.value
        if isinstance(saved, SavedState):
            states.append(saved.state)
            classes[saved.cls] = None
        else:
            classes[name_class(saved)] = None
    if len(states) < len(parts) or len(classes) > 1:
        raise PlanMismatchError(
            f"{where}: another number of nodes saved this partitioned blob; expected in all parts "
            f"an object with a state, of one class, found {', '.join(classes)}. Resume on as many "
            f"nodes as saved the parts."
        )
    return StatefulBlob(SavedState("".join(classes), JoinedStates(states, new_parts)), where)


def _merge(saved: Any, current: Any, where: str, merged: dict[int, Any]) -> Any:
    """Put the objects of a blob in the places of their states; `merged` has those that are, by `id`."""
    if type(saved) is tuple:
        items = []
        for i, item in enumerate(saved):
            items.append(_merge(item, _item(current, i), f"{where}[{i}]", merged))
        return tuple(items)
    # An object that occurs twice in the blob has one saved state, which is loaded once. Lists and dicts
    # are changed in place, so that those which occur twice stay one; tuples are made again.
    if id(saved) in merged:
        return merged[id(saved)]
    merged[id(saved)] = saved
    if isinstance(saved, SavedState):
        _load(saved, current, where)
        merged[id(saved)] = current
        return current
    places: Any = ()
    if type(saved) is list:
        places = enumerate(saved)
    elif isinstance(saved, dict):
        places = list(saved.items())
    for key, item in places:
        saved[key] = _merge(item, _item(current, key), f"{where}[{key!r}]", merged)
    return saved


def _item(current: Any, key: Any) -> Any:
    if isinstance(current, Mapping):
        return current.get(key)
    if isinstance(current, list | tuple) and isinstance(key, int) and key < len(current):
        return current[key]
    return None


def _load(saved: SavedState, current: Any, where: str) -> None:
    """Load a state into an object."""
    name = "nothing"
    if current is not None:
        name = name_class(current)
    if not has_state(type(current)):
        class_of_state = f" of class {saved.cls}" if saved.cls else ""
        raise PlanMismatchError(
            f"{where}: expected an object{class_of_state} to load the state into, found {name}. "
            f"Make the object in a task of the job's init group, or read the state without the "
            f"job: manager.open(epoch)[node][blob]."
        )
    # A script's module has another name if another program imports it.
    if saved.cls and not saved.cls.endswith(f".{type(current).__qualname__}"):
        raise PlanMismatchError(
            f"{where}: expected an object of class {saved.cls}, whose state was saved, found a "
            f"{name}. Make the same class in the init task, or start afresh "
            f"(resume_from_epoch=None, --resume none)."
        )
    state = saved.state
    if isinstance(state, JoinedStates):
        state = _merge_states(state.states, current, where)
    whole = "the saved state is whole, but " if saved.cls else ""
    with _calling(
        f"{where}: {whole}load_state_dict of {name}",
        "Make the object in the init task as it was when it was saved, or start afresh "
        "(resume_from_epoch=None, --resume none).",
        where,
    ):
        current.load_state_dict(state)
    if isinstance(saved.state, JoinedStates) and name.startswith("jobrunner.data."):
        _check_shard(current, saved.state.new_parts, where)


def _check_shard(reader: Any, new_parts: int, where: str) -> None:
    """Check that a reader of records reads one of so many parts.

    Else two nodes would read the same records, or none would read some.
    """
    _, num_shards = reader.state_dict()["shard"]
    if num_shards != new_parts:
        raise PlanMismatchError(
            f"{where}: expected a shard of {new_parts}, one for each node that has this "
            f"partitioned blob, found one of {num_shards}. Make it with sharded(i, {new_parts})."
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
