"""Made ``format_4_values/``, which every later version must read. Not to be run again.

python -m tests.golden.make_format_4_values tests/golden/format_4_values

One value of each kind of node that is new in format 4.
"""

from __future__ import annotations

import array
import collections
import copy
import datetime as dt
import decimal
import fractions
import functools
import pathlib
import random
import sys
import types
import uuid
import zoneinfo
from typing import Any

import numpy as np

from tests.checkpoint.encoding.kinds_of_values import Access, Phase, Point, Slotted, State
from tests.golden.making import save

RECORDS = np.array([(1, 2.5)], [("n", ">i4"), ("x", "f8")])


def alike() -> list[Any]:
    """Columns of each kind."""
    records: list[Any] = [
        {"id": i, "at": [i, i + 0.5], "who": f"w{i}é", "phase": (Phase.HOT, Phase.COLD)[i % 2]}
        for i in range(300)
    ]
    mixed = (None, 1 << 70, b"x", np.float32(0.5), decimal.Decimal("1.50"), True, {1: 2.5})
    return [
        records,
        records[7],
        records[::-1],
        [{"n": 1.5}] * 300,
        tuple((i, copy.copy(mixed[i % 7]), frozenset(range(i % 3))) for i in range(3000)),
        {Point(i, f"{i}\0"): State(i, [i] * (i % 4), [{i}, Slotted(i)]) for i in range(300)},
        collections.OrderedDict((i, bytes([i % 256])) for i in range(300)),
    ]


def blobs() -> dict[str, Any]:
    """What the node had."""
    day = dt.datetime(2024, 10, 27, 2, 30, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"), fold=1)
    return {
        "sets": [{1, "a", (2.5, None)}, frozenset({b"x"})],
        "deques": [collections.deque([1, np.arange(3)], 5), collections.Counter("aab")],
        "defaults": [collections.defaultdict(list, a=[1]), types.SimpleNamespace(a=1)],
        "bounds": [range(0, 9, 2), slice(None, -1), ..., int, np.float32, np.dtype(">i2")],
        "buffers": [array.array("d", [1.5]), array.array("u", "aé"), memoryview(b"abc")],
        "days": [day, day.date(), dt.time(1, 2, tzinfo=dt.UTC), dt.timedelta(-1, 5, 7)],
        "zone": dt.timezone(dt.timedelta(hours=5, minutes=30), "east"),
        "numbers": [decimal.Decimal("-0"), fractions.Fraction(1, 3), uuid.UUID(int=5)],
        "path": pathlib.PurePosixPath("a/b"),
        "random": [random.Random(1), np.random.Generator(np.random.PCG64(2))],
        "legacy": np.random.RandomState(3),
        "masked": [np.ma.masked, np.ma.MaskedArray([1, 2], [True, False], fill_value=7)],
        "records": [RECORDS.view(np.recarray), np.eye(2).view(np.matrix)],
        "noted": np.arange(3, dtype=np.dtype("i4", metadata={"unit": "m"})),
        "own": [Phase.COLD, Access.READ, Point(1, [2]), Slotted("x"), State(1, np.ones(2))],
        "alike": alike(),
        "pickled": functools.partial(max, Phase.HOT),
    }


if __name__ == "__main__":
    save(sys.argv[1], blobs())
