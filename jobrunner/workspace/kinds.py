"""Types, and what holds for all of their values."""

from __future__ import annotations

import datetime as dt
import decimal
import fractions
import sys
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from enum import Enum

import numpy as np

IMMUTABLE: frozenset[type] = frozenset(
    {
        *(type(None), type(...), bool, int, float, complex, str, bytes, range),
        *(dt.date, dt.time, dt.datetime, dt.timedelta),
        *(decimal.Decimal, fractions.Fraction, uuid.UUID),
        *(kind for kind in np.sctypeDict.values() if kind not in (np.void, np.object_)),
        type(np.ma.masked),
    }
)
"""Exact types whose values cannot change."""

SEQUENCES: frozenset[type] = frozenset({list, deque})
MAPPINGS: frozenset[type] = frozenset({dict, OrderedDict, defaultdict, Counter})
ATTRIBUTED: frozenset[type] = frozenset({OrderedDict, Counter})
LEAVES: frozenset[type] = frozenset({set, bytearray, np.void, np.record})
"""Types whose `copy()` is enough: what they hold cannot change, or counts as one value."""
ROWS: frozenset[type] = (SEQUENCES | MAPPINGS | {set, bytearray}) - {Counter}
"""Types whose `copy()` is code of C alone; a `Counter`'s is Python."""
MARSHALLED: frozenset[type] = frozenset(
    {list, dict, tuple, type(None), bool, int, float, complex, str, bytes}
)
"""Exact types that `marshal` copies as they are; it would sort the members of sets."""


def is_fixed(kind: type) -> bool:
    """Whether it is `frozenset`, `tuple`, or a class of named tuples without other attributes."""
    if kind is tuple or kind is frozenset:
        return True
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and not kind.__dictoffset__


def is_memory(kind: type) -> bool:
    """Whether it is a class of arrays or tensors."""
    return issubclass(kind, np.ndarray) or is_tensor_kind(kind)


def is_immutable(kind: type) -> bool:
    """Whether values of that type cannot change, or are members of an enumeration."""
    return kind in IMMUTABLE or issubclass(kind, Enum)


def is_tensor_kind(kind: type) -> bool:
    """Whether it is the class of PyTorch's tensors or a subclass."""
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(kind, torch.Tensor)
