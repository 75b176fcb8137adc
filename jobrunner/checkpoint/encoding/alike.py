"""Encode many items of one kind in a few calls. Pure: no I/O.

A walk to each of them would cost much more than what it finds: numbers, short text, and rows of
these. The trees are those that `Encoder.encode` returns for one item after another.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from jobrunner.checkpoint.encoding import classes
from jobrunner.checkpoint.encoding.libraries import find_type
from jobrunner.checkpoint.encoding.stateful import has_state
from jobrunner.names import is_clean

if TYPE_CHECKING:
    from jobrunner.checkpoint.encoding.dtypes import Array, Tree
    from jobrunner.checkpoint.encoding.encode import Encoder

EXACT_INT = 1 << 53  # JSON readers in other languages lose digits of larger ints
INLINE_CHARACTERS = 4096
_PACKED_LENGTH = 256

_SCALARS = frozenset((type(None), bool, int, float, str))


def encode_alike(encoder: Encoder, items: Collection[Any]) -> list[Tree] | None:
    """Encode scalars, or rows of one class that hold only scalars; None if any is anything else."""
    kinds = set(map(type, items))
    if kinds <= _SCALARS:
        return list(items) if _are_inline(items, kinds) else None
    if len(kinds) > 1:
        return None
    (cls,) = kinds
    if cls is tuple:
        is_plain = _are_rows(items)
        return [{"$": "tuple", "items": list(row)} for row in items] if is_plain else None
    if cls is list:
        is_plain = _are_rows(items) and encoder.mutables(items)
        return [list(row) for row in items] if is_plain else None
    if cls is dict:
        has_names = are_plain_keys(chain.from_iterable(items))
        is_plain = has_names and _hold_scalars(map(dict.values, items)) and encoder.mutables(items)
        return [dict(row) for row in items] if is_plain else None
    one = next(iter(items))
    if has_state(one) or find_type(one) or (encoder.codecs and encoder.codecs.get(cls)):
        return None
    return classes.encode_alike(encoder, cls, items, _hold_scalars)


def pack(items: Sequence[Any]) -> Array | None:
    """Return a long sequence of numbers of one type as an array."""
    if len(items) < _PACKED_LENGTH:
        return None
    cls, *others = set(map(type, items))
    if others or cls not in (float, int, bool):
        return None
    try:
        return np.array(items, cls)
    except OverflowError:
        return None


def are_plain_keys(keys: Iterable[Any]) -> bool:
    """Whether an object in JSON can have all of these keys."""
    names = set(keys)
    return "$" not in names and set(map(type, names)) <= {str} and _are_clean(names)


def _are_rows(items: Collection[Any]) -> bool:
    return max(map(len, items)) < _PACKED_LENGTH and _hold_scalars(items)


def _hold_scalars(rows: Iterable[Iterable[Any]]) -> bool:
    content = list(chain.from_iterable(rows))
    kinds = set(map(type, content))
    return kinds <= _SCALARS and _are_inline(content, kinds)


def _are_inline(items: Collection[Any], kinds: set[type]) -> bool:
    """Whether JSON holds each of these scalars as it is."""

    def of(cls: type) -> Collection[Any]:
        return items if len(kinds) == 1 else [item for item in items if type(item) is cls]

    if float in kinds and not all(map(math.isfinite, of(float))):
        return False
    if int in kinds and not -EXACT_INT <= min(of(int)) <= max(of(int)) <= EXACT_INT:
        return False
    if str not in kinds:
        return True
    texts = of(str)
    return max(map(len, texts)) <= INLINE_CHARACTERS and _are_clean(texts)


def _are_clean(texts: Collection[str]) -> bool:
    return all(map(str.isascii, texts)) or is_clean("".join(texts))
