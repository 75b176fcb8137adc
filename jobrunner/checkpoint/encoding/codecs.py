"""Codecs: how users let values of their own types be saved."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jobrunner.errors import DefinitionError

EXACT_TYPES: frozenset[type] = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, bytearray),
        *(list, tuple, dict, collections.OrderedDict, np.ndarray),
    }
)
"""Saved exactly, without a codec; so are NumPy's scalars and PyTorch's tensors."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How values of one type are turned into values that can be saved, and back.

    Parameters
    ----------
    cls : type
        Exactly this type, not its subclasses.
    encode : callable
        Makes of a value another one, of types that can be saved (arrays, containers, scalars).
    decode : callable
        Makes an equal value of what `encode` made.
    name : str
        What the checkpoint calls it; it must stay the same as long as checkpoints are read.
    """

    cls: type
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]
    name: str


_registered: dict[type, Codec] = {}


def register_codec(
    cls: type,
    encode: Callable[[Any], object],
    decode: Callable[[Any], object],
    *,
    name: str | None = None,
) -> Codec:
    """Let blobs of a type be saved.

    Parameters
    ----------
    cls : type
        Exactly this type, not its subclasses.
    encode, decode : callable
        To a value that can be saved, and back; they are sent to the workers with cloudpickle.
    name : str, optional
        What the checkpoint calls it; by default the type's module and qualified name.

    Returns
    -------
    Codec

    Raises
    ------
    DefinitionError
        The type is saved without a codec, or the name is taken by another type's.

    Examples
    --------
    >>> from fractions import Fraction
    >>> codec = register_codec(Fraction, lambda f: f.as_integer_ratio(), lambda t: Fraction(*t))
    >>> codec.name
    'fractions.Fraction'

    Notes
    -----
    Runs on the client, before the checkpoint is saved or read. *Safe to retry*: registering a
    type again replaces its codec.
    """
    if not isinstance(cls, type):
        raise DefinitionError(f"register_codec: cls is a class; got {cls!r}.")
    if cls in EXACT_TYPES or issubclass(cls, np.generic) or cls.__module__ == "torch":
        raise DefinitionError(f"register_codec: {cls.__name__} is saved exactly without a codec.")
    codec = Codec(cls, encode, decode, name or f"{cls.__module__}.{cls.__qualname__}")
    for other in _registered.values():
        if other.name == codec.name and other.cls is not cls and name is not None:
            raise DefinitionError(
                f"register_codec: the name {name!r} is that of the codec of "
                f"{other.cls.__name__} already. Choose another name."
            )
    _registered[cls] = codec
    return codec


def registered_codecs() -> tuple[Codec, ...]:
    """All codecs that are registered now."""
    return tuple(_registered.values())
