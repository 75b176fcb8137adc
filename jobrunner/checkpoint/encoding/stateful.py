"""Objects that are saved by their state, which an object made anew then takes. Pure: no I/O.

Such an object has ``state_dict()`` and ``load_state_dict(state)``, as PyTorch's modules, optimizers
and schedulers have. A checkpoint holds what ``state_dict()`` returned and the name of the class,
and nothing of its code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jobrunner.errors import CheckpointError, PlanMismatchError


def has_state(value: object) -> bool:
    """Whether an object is saved by its state."""
    cls = type(value)
    return all(callable(getattr(cls, name, None)) for name in ("state_dict", "load_state_dict"))


def name_class(value: object) -> str:
    """The full name of an object's class."""
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}"


@dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """Stands for an object until there is one to load the state into.

    Attributes
    ----------
    cls : str
        Full name of the object's class.
    state : object
        What its ``state_dict()`` returned.
    """

    cls: str
    state: Any


@dataclass(frozen=True, slots=True)
class StatefulBlob:
    """A blob as it was read: its value, in which a `SavedState` stands for each such object.

    Attributes
    ----------
    value : object
        One itself, or lists, tuples and dicts that hold some.
    where : str
        For messages.
    """

    value: Any
    where: str

    def load_into(self, made: Any) -> Any:
        """The blob's value, its objects being those of `made`, each with its state loaded.

        Parameters
        ----------
        made : object
            The blob as it was made anew: objects at the same places; None: there is none.

        Raises
        ------
        PlanMismatchError
            There is no object for a state, or one of another class.
        CheckpointError
            A ``load_state_dict`` raised. The blob's objects are not to be used any more.
        """
        return _Merge(self.where).merge(self.value, made, "")


@dataclass(slots=True)
class _Merge:
    where: str
    objects: dict[int, Any] = field(default_factory=dict)
    containers: dict[int, Any] = field(default_factory=dict)

    def merge(self, saved: Any, made: Any, place: str) -> Any:
        cls = type(saved)
        if cls is SavedState:
            if id(saved) not in self.objects:
                self.objects[id(saved)] = self._load(saved, made, place)
            return self.objects[id(saved)]
        if cls is tuple:
            return tuple(
                self.merge(item, _item(made, i), f"{place}[{i}]") for i, item in enumerate(saved)
            )
        if (cls is list or isinstance(saved, dict)) and id(saved) not in self.containers:
            self.containers[id(saved)] = saved
            for key, item in enumerate(saved) if cls is list else list(saved.items()):
                saved[key] = self.merge(item, _item(made, key), f"{place}[{key!r}]")
        return saved

    def _load(self, saved: SavedState, made: Any, place: str) -> Any:
        where = self.where + (f", item {place}" if place else "")
        if not has_state(made):
            found = "nothing" if made is None else f"a {name_class(made)}"
            raise PlanMismatchError(
                f"{where}: expected an object of class {saved.cls} to load the saved state into, "
                f"found {found}. A task of the job's init group makes it anew: let it, or read the "
                f"state itself without the job, manager.open(epoch)[node][blob]."
            )
        # A script's module is called otherwise where another program runs it.
        if not saved.cls.endswith(f".{type(made).__qualname__}"):
            raise PlanMismatchError(
                f"{where}: expected an object of class {saved.cls}, whose state was saved, found a "
                f"{name_class(made)}. Let the init task make what was saved, or start afresh "
                f"(resume_from_epoch=None, --resume none)."
            )
        try:
            made.load_state_dict(saved.state)
        except Exception as error:
            raise CheckpointError(
                f"{where}: the saved state is whole, but load_state_dict of {name_class(made)} "
                f"raised {type(error).__name__}: {error}. Let the init task make the object as it "
                f"was when it was saved, or start afresh (resume_from_epoch=None, --resume none)."
            ) from error
        return made


def _item(made: Any, key: Any) -> Any:
    """What `made` has at `key`; None where it has nothing there."""
    if isinstance(made, Mapping):
        return made.get(key)
    if isinstance(made, list | tuple) and isinstance(key, int) and key < len(made):
        return made[key]
    return None
