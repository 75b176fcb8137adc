"""The job's own classes: saved by name, and found again in the running job. Pure: no I/O.

Named tuples and dataclasses are saved as the name of their class and their fields.
Pickles refer by name to classes that they would otherwise contain, those of the job's own file, so
that a resume has one class and not two. No module is imported because a checkpoint names it.
"""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np

from jobrunner.checkpoint.encoding.codecs import UnsuitableError
from jobrunner.errors import CheckpointError, PlanMismatchError
from jobrunner.texts import SCRIPT_PREFIX

_IS_HEAP_TYPE = 1 << 9  # of `__flags__`: the class was made by a class statement

# --- names of classes


def name_of(cls: type) -> str:
    """Return the name by which a resume finds a class; raises `UnsuitableError` if it could not."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    module = sys.modules.get(cls.__module__)
    is_local = "<" in cls.__qualname__
    # Workers may not have the module of the client's script: then the client looks.
    is_for_client = module is None or cls.__module__ == "__main__"
    if is_local or not (is_for_client or _look_up(module, cls.__qualname__) is cls):
        raise UnsuitableError(
            f"a resume could not find its class {name}: it is not at the top level of its module, "
            f"under its own name. Define it there"
        )
    return name


def find_class(name: str) -> type | None:
    """Find a class in the modules that this process has; imports nothing.

    The job's own file has another module name when another program runs it.
    """
    module_name, _, qualified = name.partition(":")
    for module in _modules(module_name):
        located = _look_up(module, qualified)
        if isinstance(located, type):
            return located
    return None


def find_classes(names: Iterable[str], where: str) -> dict[str, type]:
    """Find classes by name; raises `PlanMismatchError` if one is not there."""
    located = {}
    missing = []
    for name in names:
        cls = find_class(name)
        if cls is None:
            missing.append(name)
        else:
            located[name] = cls
    if missing:
        raise PlanMismatchError(
            f"{where} contains values of {', '.join(missing)}, which this program does not have. "
            f"Define the class under that name at the top level of the job's file, or import its "
            f"module there."
        )
    return located


def _modules(name: str) -> Iterator[ModuleType | None]:
    yield sys.modules.get(name)
    # A job's own file is `jobrunner_script_x` if the command line runs it, `__main__` if Python does,
    # and `x` if a notebook or test imports it; the newest one counts.
    for loaded_name in reversed(list(sys.modules)):
        if loaded_name.startswith(SCRIPT_PREFIX):
            yield sys.modules.get(loaded_name)
    yield sys.modules.get("__main__")
    yield sys.modules.get(name.removeprefix(SCRIPT_PREFIX))


def _look_up(module: ModuleType | None, qualified: str) -> object:
    """Look a name up without running code: no ``__getattr__``, no descriptors."""
    located: object = module
    for part in qualified.split("."):
        if not isinstance(located, ModuleType | type):
            return None
        located = vars(located).get(part)
    return located


# --- named tuples and dataclasses


def has_fields(cls: type) -> bool:
    """Whether a class is a named tuple or a dataclass."""
    if issubclass(cls, tuple):
        return hasattr(cls, "_fields")
    return dataclasses.is_dataclass(cls)


def field_names(cls: Any) -> tuple[str, ...]:
    """The names of the fields of a named tuple or dataclass."""
    if issubclass(cls, tuple):
        return tuple(cls._fields)
    return tuple(field.name for field in dataclasses.fields(cls))


def state_of(value: Any) -> dict[str, Any]:
    """Return the fields of a value and what else it holds, by name; raises `UnsuitableError`.

    A dataclass may hold less than its fields, or attributes of its own.
    """
    if isinstance(value, tuple):
        names = field_names(type(value))
        if getattr(value, "__dict__", None) or len(value) != len(names):
            raise UnsuitableError("it has more than its fields")
        return dict(zip(names, value, strict=True))
    reason = _unlike_dataclass(type(value))
    if reason:
        raise UnsuitableError(reason)
    state: Any = object.__getstate__(value)
    if isinstance(state, tuple):  # of a class with slots
        attributes, slots = state
        return {**(attributes or {}), **slots}
    return state or {}


def _unlike_dataclass(cls: Any) -> str:
    """Why fields and attributes are not all that an instance is; empty if they are."""
    for base in cls.__mro__[:-1]:
        if not base.__flags__ & _IS_HEAP_TYPE:
            return f"it inherits from {base.__name__}"
        for name in ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"):
            own = vars(base).get(name)
            if own is not None and getattr(own, "__module__", "") != "dataclasses":
                return f"its class has a {name} of its own"
    return ""


def make_instance(cls: Any, names: Sequence[str], state: dict[str, Any], where: str) -> Any:
    """Make a value of a class again, without its code, from the names of its fields and its state.

    Raises `CheckpointError` if the class has changed since.
    """
    change = _find_change(cls, sorted(names))
    if change:
        raise CheckpointError(
            f"{where} is whole, but the class {cls.__module__}:{cls.__qualname__} has changed: "
            f"{change}. Change the class back, or start afresh (resume_from_epoch=None, "
            f"--resume none)."
        )
    if issubclass(cls, tuple):
        return tuple.__new__(cls, [state[name] for name in field_names(cls)])
    instance: Any = object.__new__(cls)
    for name, value in state.items():
        slot = inspect.getattr_static(cls, name, None)
        if isinstance(slot, MemberDescriptorType):
            slot.__set__(instance, value)
        else:
            vars(instance)[name] = value
    return instance


def _find_change(cls: Any, names: list[str]) -> str:
    """What has changed of a class whose values had fields of these sorted names; empty: nothing."""
    if not has_fields(cls):
        return "it is no named tuple or dataclass any more"
    present = sorted(field_names(cls))
    if present != names:
        fields = ", ".join(names)
        return f"it was saved with the fields {fields}, but now has {', '.join(present)}"
    if issubclass(cls, tuple):
        return ""
    return _unlike_dataclass(cls)


# --- pickles

_finding: ContextVar[Callable[[str], type | None]] = ContextVar("finding", default=find_class)


def class_of_job(name: str) -> type:
    """Find a class by name. Pickles in checkpoints call it: it must keep this place and name."""
    cls = _finding.get()(name)
    if cls is None:
        raise PlanMismatchError(f"this program does not have the class {name}")
    return cls


def array_of_dtype(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """View an array as a dtype. Pickles in checkpoints call it: it must keep this place and name."""
    return array.view(dtype)


class PicklerByName(cloudpickle.Pickler):  # type: ignore[misc]  # no types
    """Pickles by name what cloudpickle would pickle by value: classes of the job's own file.

    `names` are those of classes.
    """

    def __init__(self, name_class: Callable[[type], str]) -> None:
        self.names: dict[str, None] = {}
        self._name_class = name_class
        self._data = bytearray()
        super().__init__(SimpleNamespace(write=self._data.extend), protocol=5)

    def pickle(self, value: object) -> bytes:
        """Pickle a value."""
        self.dump(value)
        return bytes(self._data)

    def reducer_override(self, obj: Any) -> Any:
        """Called for all but the simplest objects."""
        if type(obj) is memoryview:
            raise UnsuitableError("it contains a memoryview, which would load as bytes")
        if type(obj) is np.ndarray and not obj.dtype.isnative and obj.dtype.names is None:
            # NumPy's own pickles of dates and of slices load with the byte order of the machine.
            return array_of_dtype, (obj.view(obj.dtype.newbyteorder("=")), obj.dtype)
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) > 2:
            # cloudpickle would pickle the class with its code. A resume would then make another class
            # of the same name, of which no value is an instance of the program's own.
            name = self._name_class(obj)
            self.names[name] = None
            return class_of_job, (name,)
        return reduced


def unpickle(data: bytes, find: Callable[[str], type | None]) -> Any:
    """Unpickle with the classes that `find` returns."""
    token = _finding.set(find)
    try:
        return pickle.loads(data)
    finally:
        _finding.reset(token)
