"""The job's own classes: saved by name, and found again in the running job. Pure: no I/O.

Values of named tuples, dataclasses and enumerations are nodes with the name of their class. Pickles
refer by name to classes that they would otherwise contain, those of the job's own file, so that a
resume has one class and not two. No module is imported because a checkpoint names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import pickle
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from itertools import chain, repeat
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from jobrunner.checkpoint.encoding.codecs import UnsuitableError
from jobrunner.checkpoint.encoding.dtypes import Trail, Tree
from jobrunner.checkpoint.encoding.numpy_values import encode_dtype
from jobrunner.checkpoint.encoding.outline import SavedObject
from jobrunner.errors import CheckpointError, DefinitionError, PlanMismatchError
from jobrunner.texts import SCRIPT_PREFIX

if TYPE_CHECKING:
    from jobrunner.checkpoint.encoding.decode import Decoder
    from jobrunner.checkpoint.encoding.encode import Encoder
else:
    Decoder = Any

_IS_HEAP_TYPE = 1 << 9  # of `__flags__`: the class was made by a class statement
_CLOUDPICKLE = vars(cloudpickle.cloudpickle)  # for what it does not document, and may lose

Fields = list[tuple[str, Tree]]
FewFields = tuple[tuple[str, Tree], ...]

# --- names of classes


def name_of(cls: type) -> str:
    """Return the name by which a resume finds a class; raises `UnsuitableError` if it could not."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    module = sys.modules.get(cls.__module__)
    is_known = cls.__module__ == "__main__" or module is None  # for the client to check
    if "<" in cls.__qualname__ or not (is_known or _look_up(module, cls.__qualname__) is cls):
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
        found = _look_up(module, qualified)
        if isinstance(found, type):
            return found
    return None


def find_classes(names: Iterable[str], where: str) -> dict[str, type]:
    """Find classes by name; raises `PlanMismatchError` if one is not there."""
    found = {name: find_class(name) for name in names}
    missing = [name for name, cls in found.items() if cls is None]
    if missing:
        raise PlanMismatchError(
            f"{where} contains values of {', '.join(missing)}, which this program does not have. "
            f"Define the class under that name at the top level of the job's file, or import its "
            f"module there."
        )
    return {name: cls for name, cls in found.items() if cls is not None}


def sent_as(cls: type) -> str:
    """The id that a class has in all processes to which it was sent by value; empty for others."""
    return str(_CLOUDPICKLE.get("_DYNAMIC_CLASS_TRACKER_BY_CLASS", {}).get(cls, ""))


def check_classes(saved: Collection[tuple[str, str]], where: str) -> None:
    """Raise if the program finds no class, or another, by a name; each comes with its `sent_as`."""
    by_name = find_classes({name for name, _ in saved}, where)
    sent = _CLOUDPICKLE.get("_DYNAMIC_CLASS_TRACKER_BY_ID", {})
    for name, key in saved:
        if sent.get(key, by_name[name]) is not by_name[name]:
            raise DefinitionError(
                f"{where} contains values of a class {name}, but the program has another class "
                f"of that name, which a resume would find. Give each class its own name."
            )


def _modules(name: str) -> Iterator[ModuleType | None]:
    yield sys.modules.get(name)
    main = sys.modules.get("__main__")
    is_script = name == "__main__" or name.startswith(SCRIPT_PREFIX)
    if is_script:
        for other in reversed(list(sys.modules)):
            if other.startswith(SCRIPT_PREFIX):
                yield sys.modules.get(other)
        yield main
        yield sys.modules.get(name.removeprefix(SCRIPT_PREFIX))
    else:
        stem = re.sub(r"\W", "_", name)
        yield sys.modules.get(SCRIPT_PREFIX + stem)
        file = getattr(main, "__file__", None) or ""
        if file.replace("\\", "/").endswith(f"/{name}.py") or file == f"{name}.py":
            yield main


def _look_up(module: ModuleType | None, qualified: str) -> object:
    """Look a name up without running code: no ``__getattr__``, no descriptors."""
    found: Any = module
    for part in qualified.split("."):
        if found is not module and not isinstance(found, type):
            return None
        found = None if found is None else vars(found).get(part)
    return found


# --- enumerations, named tuples and dataclasses


def find_encoder(value: object) -> Callable[[Encoder, Any, Trail], Tree] | None:
    """The function that encodes a value of a class of the user's, if it is of a kind that can be."""
    cls: Any = type(value)
    if issubclass(cls, enum.Enum):
        return _enum
    if issubclass(cls, tuple) and _fields_of(cls):
        return _named_tuple
    if isinstance(value, np.dtype):
        return encode_dtype
    return _dataclass if dataclasses.is_dataclass(cls) else None


@lru_cache(maxsize=256)
def _fields_of(cls: Any) -> tuple[str, ...]:
    if issubclass(cls, tuple):
        fields = getattr(cls, "_fields", None)
        is_named = type(fields) is tuple and all(type(name) is str for name in fields)
        return fields if is_named else ()  # type: ignore[return-value]
    return tuple(field.name for field in dataclasses.fields(cls))


def _enum(encoder: Encoder, value: enum.Enum, trail: Trail) -> Tree:
    name = encoder.name_class(type(value))
    is_plain = type(value.value) in (bool, int, float, str, type(None))
    content = encoder.encode(value.value, trail) if is_plain else None
    return {"$": "enum", "cls": name, "name": value.name, "value": content}


def _named_tuple(encoder: Encoder, value: Any, trail: Trail) -> Tree:
    cls: Any = type(value)
    if getattr(value, "__dict__", None) or len(value) != len(_fields_of(cls)):
        raise UnsuitableError("it has more than its fields")
    name = encoder.name_class(cls)
    fields = dict(zip(_fields_of(cls), value, strict=True))
    return {"$": "namedtuple", "cls": name, "fields": _fields(encoder, value, fields, trail)}


def _dataclass(encoder: Encoder, value: Any, trail: Trail) -> Tree:
    cls: Any = type(value)
    if why := _unlike_dataclass(cls):
        raise UnsuitableError(why)
    state = _state_of(value)
    name = encoder.name_class(cls)
    if same := encoder.mutable(value, trail):
        return same
    fields = _fields_of(cls)
    tree = {
        "$": "dataclass",
        "cls": name,
        "fields": _fields(encoder, value, {it: state[it] for it in fields if it in state}, trail),
    }
    if unset := [it for it in fields if it not in state]:
        tree["unset"] = unset
    if others := {it: state[it] for it in state if it not in fields}:
        tree["attributes"] = _fields(encoder, value, others, (*trail, "_attributes"))
    return tree


def split_fields(cls: Any, values: Sequence[Any]) -> tuple[str, tuple[str, ...], list[list[Any]]]:
    """Return kind, names and values of the fields of many values of a class, field by field.

    There are none if the values have more than these, or are not of a named tuple or dataclass.
    """
    method = find_encoder(values[0])
    names = _fields_of(cls) if method in (_named_tuple, _dataclass) else ()
    kind = "namedtuples" if method is _named_tuple else "dataclasses"
    rows: Sequence[Any] = ()
    if method is _named_tuple:
        rows = values if not cls.__dictoffset__ and cls.__iter__ is tuple.__iter__ else ()
    elif names and not (_unlike_dataclass(cls) or _slots(cls)):
        states = [getattr(it, "__dict__", {}) for it in values]
        is_bare = list(chain.from_iterable(states)) == [*names] * len(values)
        rows = list(map(dict.values, states)) if is_bare else ()
    elif names and set(_slots(cls)) == set(names) and not cls.__dictoffset__:
        with contextlib.suppress(AttributeError):  # not set
            return kind, names, [[*map(attrgetter(it), values)] for it in names]
    if set(map(len, rows)) != {len(names)}:
        return kind, names, []
    flat = list(chain.from_iterable(rows))
    return kind, names, [flat[i :: len(names)] for i in range(len(names))]


@lru_cache(maxsize=256)
def _unlike_dataclass(cls: Any) -> str:
    """Why fields and attributes are not all that an instance of a dataclass is; empty if they are."""
    for base in cls.__mro__[:-1]:
        if not base.__flags__ & _IS_HEAP_TYPE:
            return f"it inherits from {base.__name__}"
        for name in ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"):
            own = vars(base).get(name)
            if own is not None and getattr(own, "__module__", "") != "dataclasses":
                return f"its class has a {name} of its own"
    return ""


def _state_of(value: Any) -> dict[str, Any]:
    state = dict(getattr(value, "__dict__", None) or {})
    cls: Any = type(value)
    slots = _slots(cls)
    if not slots:
        return state
    if not set(_fields_of(cls)).issuperset(slots):
        raise UnsuitableError("it has slots that are not fields")
    return state | {name: getattr(value, name) for name in slots if hasattr(value, name)}


@lru_cache(maxsize=256)
def _slots(cls: Any) -> list[str]:
    found = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    names = [name for it in found for name in ([it] if isinstance(it, str) else it)]
    return [name for name in names if name[:2] != "__"]


def _fields(encoder: Encoder, value: object, fields: Mapping[str, Any], trail: Trail) -> Fields:
    found: dict[str, Tree] = encoder.children(type(value).__name__, value, fields, trail)
    return list(found.items())


# --- and back


def _to_enum(decoder: Decoder, cls: str, name: str | None, value: Tree) -> Any:
    content = decoder.decode(value)
    found: Any = decoder.find_class(cls)
    if found is None:
        return SavedObject(cls, {"name": name, "value": content})
    _check_kind(issubclass(found, enum.Enum), found, "an enumeration", decoder)
    member = None
    if issubclass(found, enum.Flag) and type(content) is int:
        with contextlib.suppress(ValueError):
            member = found(content)
    elif name is not None:
        member = found.__members__.get(name)
    if member is None or member.name != name:
        raise _changed(decoder, cls, f"it no longer has the member {name!r}, which was saved")
    return member


def _to_named_tuple(decoder: Decoder, cls: str, fields: Fields) -> Any:
    values = {name: decoder.decode(tree) for name, tree in fields}
    return make_named_tuples(decoder, cls, list(values), [values.values()])[0]


def make_named_tuples(
    decoder: Decoder, cls: str, names: list[str], rows: Iterable[Iterable[Any]]
) -> list[Any]:
    """Make named tuples from their fields."""
    found: Any = decoder.find_class(cls)
    if found is None:
        return [SavedObject(cls, dict(zip(names, row, strict=True))) for row in rows]
    is_one = issubclass(found, tuple) and bool(_fields_of(found))
    _check_kind(is_one, found, "a named tuple", decoder)
    _check_fields(decoder, cls, names, list(_fields_of(found)))
    return list(map(tuple.__new__, repeat(found), rows))


def _to_dataclass(
    decoder: Decoder,
    cls: str,
    fields: Fields,
    unset: tuple[str, ...] = (),
    attributes: FewFields = (),
) -> Any:
    values = {name: decoder.decode(tree) for name, tree in fields}
    others = {name: decoder.decode(tree) for name, tree in attributes}
    (made,) = make_dataclasses(decoder, cls, list(values), [values.values()], unset)
    if type(made) is SavedObject:
        made.fields.update(others)
    elif others:
        vars(made).update(others)
    return made


def make_dataclasses(
    decoder: Decoder,
    cls: str,
    names: list[str],
    rows: Iterable[Iterable[Any]],
    unset: tuple[str, ...] = (),
) -> list[Any]:
    """Make instances of a dataclass from their fields."""
    found: Any = decoder.find_class(cls)
    if found is None:
        return [SavedObject(cls, dict(zip(names, row, strict=True))) for row in rows]
    is_one = hasattr(found, "__dataclass_fields__") and not _unlike_dataclass(found)
    _check_kind(is_one, found, "a dataclass", decoder)
    _check_fields(decoder, cls, sorted([*names, *unset]), sorted(_fields_of(found)))
    made = []
    for row in rows:
        one: Any = object.__new__(found)
        for name, value in zip(names, row, strict=True):
            object.__setattr__(one, name, value)  # frozen ones too
        made.append(one)
    return made


def _check_kind(is_one: bool, cls: type, kind: str, decoder: Decoder) -> None:
    if not is_one:
        raise _changed(decoder, cls.__qualname__, f"it was {kind}, and no longer is")


def _check_fields(decoder: Decoder, cls: str, saved: list[str], now: list[str]) -> None:
    if saved != now:
        what = f"it was saved with the fields {', '.join(saved)}, but now has {', '.join(now)}"
        raise _changed(decoder, cls, what)


def _changed(decoder: Decoder, cls: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{decoder.where} is whole, but the class {cls} has changed: {what}. Change the class back, "
        f"or start afresh (resume_from_epoch=None, --resume none)."
    )


PLAIN: Mapping[str, Callable[..., Any]] = {"enum": _to_enum, "namedtuple": _to_named_tuple}
WITH_IDENTITY: Mapping[str, Callable[..., Any]] = {"dataclass": _to_dataclass}


# --- pickles


_finding: ContextVar[Callable[[str], type | None]] = ContextVar("finding", default=find_class)


def class_of_job(name: str) -> type:
    """Find a class by name. Pickles in checkpoints call it: it must keep this place and name."""
    found = _finding.get()(name)
    if found is None:
        raise PlanMismatchError(f"this program does not have the class {name}")
    return found


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # no types
    """Pickles by name what cloudpickle would pickle by value: classes of the job's own file."""

    def __init__(self, write: Callable[[bytes], object], name_class: Callable[[type], str]) -> None:
        super().__init__(SimpleNamespace(write=write), protocol=5)
        self._name_class = name_class
        self.names: dict[str, None] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Called for all but the simplest objects."""
        if type(obj) is memoryview:
            raise UnsuitableError("it contains a memoryview, which would load as bytes")
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) > 2:
            self.names[name := self._name_class(obj)] = None
            return class_of_job, (name,)
        return reduced


def pickle_by_name(value: object, name_class: Callable[[type], str]) -> tuple[bytes, list[str]]:
    """Pickle a value; also return the names by which the pickle refers to classes."""
    pickler = _Pickler((written := list[bytes]()).append, name_class)
    pickler.dump(value)
    return b"".join(written), list(pickler.names)


def unpickle(data: bytes, find: Callable[[str], type | None]) -> Any:
    """Unpickle with the classes that `find` returns."""
    token = _finding.set(find)
    try:
        return pickle.loads(data)
    finally:
        _finding.reset(token)
