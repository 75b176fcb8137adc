"""Codecs, by which users save values of their own types."""

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
"""Saved exactly without a codec, as are NumPy scalars and PyTorch tensors."""


@dataclass(frozen=True, slots=True)
class Codec:
    """Converts values of one type to values that can be saved, and back.

    Parameters
    ----------
    cls : type
        Exactly this type, not its subclasses.
    encode : callable
        Converts a value to one that can be saved (arrays, containers, scalars).
    decode : callable
        Makes an equal value from what `encode` returned.
    name : str
        Its name in checkpoints; keep it as long as you read them.
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
    """Save values of a type by a codec.

    Parameters
    ----------
    cls : type
        Exactly this type, not its subclasses.
    encode, decode : callable
        To a value that can be saved, and back; sent to the workers with cloudpickle.
    name : str, optional
        Its name in checkpoints; by default the type's module and qualified name.

    Returns
    -------
    Codec

    Raises
    ------
    DefinitionError
        The type needs no codec, or another type's codec has the name.

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
    if not isinstance(cls, type):
        raise DefinitionError(f"register_codec: expected a class for cls, got {cls!r}.")
    if cls in EXACT_TYPES or issubclass(cls, np.generic) or cls.__module__ == "torch":
        raise DefinitionError(f"register_codec: {cls.__name__} is saved exactly without a codec.")
    codec = Codec(cls, encode, decode, name or f"{cls.__module__}.{cls.__qualname__}")
    for other in _registered.values():
        if other.name == codec.name and other.cls is not cls and name is not None:
            raise DefinitionError(
                f"register_codec: the codec of {other.cls.__name__} already has the name {name!r}. "
                f"Choose another one."
            )
    _registered[cls] = codec
    return codec


def registered_codecs() -> tuple[Codec, ...]:
    """Return all registered codecs."""
    return tuple(_registered.values())
