"""Codecs, by which values of a type are saved, and the errors of what cannot be saved or made."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import numpy as np

from jobrunner.define import Label, Rule, checked
from jobrunner.errors import DefinitionError

EXACT_TYPES: frozenset[type] = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, bytearray),
        *(list, tuple, dict, collections.OrderedDict, np.ndarray),
    }
)
"""Saved exactly without a codec, as are NumPy scalars and PyTorch tensors."""


class UnsuitableError(TypeError):
    """Raised for a value that cannot be saved; says why, and what to do if no codec would help."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


class UnmakeableError(Exception):
    """Raised by a codec of ours for what is whole, but cannot be made on this machine."""


class InvalidTreeError(ValueError):
    """A tree that no encoder produces; names the node."""


class RefusedValueError(Exception):
    """A value inside a blob cannot be saved: where it is, its class, and why."""

    def __init__(self, trail: tuple[str, ...], cls: type, reason: UnsuitableError) -> None:
        super().__init__(str(reason))
        self.trail = trail
        self.cls = cls
        self.remedy = reason.remedy


_Function = Annotated[Callable[[Any], object], Rule("a function of one argument", callable)]


@checked
@dataclass(frozen=True, slots=True)
class Codec:
    """Converts values of one type to values that can be saved, and back.

    Parameters
    ----------
    cls : type
        Exactly this type, or with `subclasses` also its subclasses.
    encode : callable
        Converts a value to one that can be saved (arrays, containers, scalars).
    decode : callable
        Makes an equal value, of the same type, from what `encode` returned.
    name : str
        Its name in checkpoints; keep it as long as you read them.
    subclasses : bool
        Whether it also converts values of subclasses that have no codec of their own.
    """

    cls: Annotated[type, "a class"]
    encode: _Function
    decode: _Function
    name: Label
    subclasses: bool = False


@dataclass(frozen=True, slots=True)
class OwnCodec(Codec):
    """A codec of jobrunner's own for a type of Python or NumPy."""

    is_mutable: bool = True
    """Whether a value can change: then one that occurs twice in a blob loads as one object."""
    keeps_states: bool = False
    """Whether items lie where they lay, so that the state of an object inside can be loaded again."""
    hides_memory: ClassVar[bool] = False
    """Whether a change of a value never shows in what shares its memory."""


AnyCodec = TypeVar("AnyCodec", bound=Codec)


class CodecTable(Generic[AnyCodec]):
    """The codec of each type: its own, or that of its nearest base class with `subclasses`."""

    def __init__(self, codecs: Iterable[AnyCodec]) -> None:
        self._by_class: dict[type, AnyCodec | None] = {}
        self._by_base: dict[type, AnyCodec] = {}
        self._by_name: dict[str, AnyCodec] = {}
        for codec in codecs:
            self._by_class[codec.cls] = codec
            self._by_name[codec.name] = codec
            if codec.subclasses:
                self._by_base[codec.cls] = codec

    def __iter__(self) -> Iterator[AnyCodec]:
        return iter(self._by_name.values())

    def get(self, cls: type) -> AnyCodec | None:
        """The codec of a type, if any."""
        if cls not in self._by_class:
            codec = None
            for base in cls.__mro__:
                codec = self._by_base.get(base)
                if codec is not None:
                    break
            self._by_class[cls] = codec
        return self._by_class[cls]

    def named(self, name: str) -> AnyCodec | None:
        """The codec that a checkpoint names, if any."""
        return self._by_name.get(name)


REGISTERED_CODECS: dict[type, Codec] = {}


@checked
def register_codec(
    cls: Annotated[type, "a class"],
    encode: _Function,
    decode: _Function,
    *,
    name: Label | None = None,
    subclasses: bool = False,
) -> Codec:
    """Save values of a type by a codec.

    Parameters
    ----------
    cls : type
        Exactly this type, unless `subclasses` is true.
    encode, decode : callable
        Of one argument: to a value that can be saved, and back. Sent to the workers with
        cloudpickle.
    name : str, optional
        Its name in checkpoints; by default the type's module and qualified name.
    subclasses : bool, optional
        Also save values of its subclasses, except those that have a codec of their own. `encode`
        must save which subclass a value is of, and `decode` restore it. For a type that is
        saved without a codec, such as ``dict``, the codec is for its subclasses only.

    Returns
    -------
    Codec

    Raises
    ------
    DefinitionError
        An argument is not what it should be, the type needs no codec, or another type's codec has
        the name.

    Examples
    --------
    >>> from fractions import Fraction
    >>> codec = register_codec(Fraction, lambda f: f.as_integer_ratio(), lambda t: Fraction(*t))
    >>> codec.name
    'fractions.Fraction'

    Notes
    -----
    Runs on the client, before a checkpoint is saved or read. *Safe to retry*: registering a type
    again replaces its codec.
    """
    if cls is object:
        raise DefinitionError(
            "register_codec: cls must be a class whose values are alike; all values are an object."
        )
    if not subclasses and needs_no_codec(cls):
        raise DefinitionError(f"register_codec: {cls.__name__} is saved exactly without a codec.")
    codec = Codec(cls, encode, decode, name or _full_name(cls), subclasses)
    for registered in list(REGISTERED_CODECS.values()):
        if registered.name != codec.name:
            continue
        if _full_name(registered.cls) != _full_name(cls):
            raise DefinitionError(
                f"register_codec: the codec of {registered.cls.__name__} already has the name "
                f"{codec.name!r}. Choose another one."
            )
        del REGISTERED_CODECS[registered.cls]  # the class was defined anew
    REGISTERED_CODECS[cls] = codec
    return codec


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def needs_no_codec(cls: type) -> bool:
    """Whether `register_codec` refuses the type, because it is saved exactly without a codec."""
    return cls in EXACT_TYPES or issubclass(cls, np.generic) or cls.__module__ == "torch"
