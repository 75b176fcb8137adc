"""Exact types, and what holds for all of their values."""

from __future__ import annotations

import datetime as dt
import decimal
import fractions
import uuid
from collections import Counter, OrderedDict, defaultdict, deque

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
    {list, dict, tuple, set, type(None), bool, int, float, complex, str, bytes}
)
