"""The shortest loops that do what a step of `bench_kinds.py` cannot do without, by kind and step.

Each is a call or two of C code that goes through all items once. What a step takes beyond the sum of
its loops is what jobrunner adds: checks, the file, other passes.
"""

from __future__ import annotations

import gc
import marshal
import pickle
import tempfile
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash


class Loop(NamedTuple):
    """A loop over `prepare(value)`, while the collector rests."""

    does: str
    run: Callable[[Any], Any]
    prepare: Callable[[Any], Any] = lambda value: value


def _parts(rows: Iterable[Any]) -> list[Any]:
    return list(chain.from_iterable(rows))


def _is_held(value: Any) -> Any:
    return np.array([item is not None for item in value])


def _codes(value: Any) -> Any:
    return np.fromiter(value[:2], object, 2), np.arange(len(value)) % 2


def _write(data: bytes) -> None:
    with tempfile.TemporaryFile(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as file:
        file.write(data)
        xxhash.xxh3_128(data).digest()


TYPES = Loop("the type of each item", lambda items: list(map(type, items)))
ADDRESSES = Loop("the address of each item", lambda items: np.fromiter(items, object, len(items)))
MARSHAL = Loop("marshal", lambda items: marshal.dumps(items, 2))
SELECT = Loop("items by their codes", lambda it: it[0][it[1]].tolist(), _codes)

FILE = Loop("8 bytes each, written and digested", _write, lambda value: bytes(8 * len(value)))
SHORT_FILE = Loop("4 bytes each, written and digested", _write, lambda value: bytes(4 * len(value)))

FLOORS: Mapping[tuple[str, str], tuple[Loop, ...]] = {
    ("sets", "held"): (
        TYPES,
        TYPES._replace(prepare=_parts),
        Loop("copy() of each", lambda rows: list(map(set.copy, rows))),
    ),
    ("set of integers", "held"): (TYPES, Loop("copy()", set.copy)),
    ("set of floats", "held"): (TYPES, Loop("copy()", set.copy)),
    ("integer keys", "held"): (
        TYPES,
        TYPES._replace(prepare=lambda value: value.values()),
        Loop("copy()", dict.copy),
    ),
    ("bools", "returned"): (MARSHAL,),
    ("integers", "saved"): (MARSHAL, SHORT_FILE),
    ("floats", "saved"): (MARSHAL, FILE),
    ("few strings", "saved"): (ADDRESSES,),
    ("enumerations", "saved"): (ADDRESSES,),
    ("one list again and again", "saved"): (ADDRESSES,),
    ("floats or None", "saved"): (
        ADDRESSES,
        Loop(
            "those that are not None",
            lambda it: it[0][it[1]].tolist(),
            lambda value: (np.fromiter(value, object, len(value)), _is_held(value)),
        ),
        MARSHAL._replace(prepare=lambda value: [item for item in value if item is not None]),
    ),
    ("integers and floats", "saved"): (
        Loop("the type of each item", lambda it: np.fromiter(map(type, it), object, len(it))),
        Loop("each as a float", lambda items: np.fromiter(items, np.float64, len(items))),
        FILE,
    ),
    ("set of integers", "saved"): (
        Loop("a list", list),
        MARSHAL._replace(prepare=list),
        Loop("sort", np.sort, lambda value: np.array(list(value), np.int32)),
        SHORT_FILE,
    ),
    ("set of floats", "saved"): (
        Loop("a list", list),
        MARSHAL._replace(prepare=list),
        Loop("sort", np.sort, lambda value: np.array(list(value))),
        FILE,
    ),
    ("integer keys", "saved"): (MARSHAL, SHORT_FILE, FILE),
    ("defaultdict", "saved"): (
        Loop("two lists", lambda value: (list(value), list(value.values()))),
        *[MARSHAL._replace(prepare=list), SHORT_FILE] * 2,
    ),
    ("ragged lists", "saved"): (Loop("all items", _parts), MARSHAL._replace(prepare=_parts)),
    ("set of tuples", "loaded"): (
        Loop(
            "tuples", lambda it: [*zip(*it, strict=True)], lambda v: [*zip(*sorted(v), strict=True)]
        ),
        Loop("hashed in their order", set, sorted),
    ),
    ("small dicts", "loaded"): (
        Loop(
            "a dict for each",
            lambda it: list(map(dict, map(zip, repeat(it[0]), it[1]))),
            lambda value: (list(value[0]), [tuple(row.values()) for row in value]),
        ),
    ),
    ("few strings", "loaded"): (SELECT,),
    ("one list again and again", "loaded"): (SELECT,),
    ("floats or None", "loaded"): (SELECT,),
}


def print_floors(
    make: Callable[[], Any], name: str, clock_of: Callable[[], Any], rounds: int
) -> None:
    """Print what the loops of a kind take beside pickle, for each step that has some."""
    for (kind, step), loops in FLOORS.items():
        if kind != name:
            continue
        clock = clock_of()
        for _ in range(rounds):
            value = make()
            pickled = clock.take("dumps", lambda value=value: pickle.dumps(value, 5))
            clock.take("loads", lambda pickled=pickled: pickle.loads(pickled))
            for i, loop in enumerate(loops):
                gc.collect()
                gc.disable()
                given = loop.prepare(value)
                clock.take(str(i), lambda loop=loop, given=given: loop.run(given))
                del given
                gc.enable()
        unit = clock.milliseconds("loads" if step == "loaded" else "dumps")
        ratios = [clock.milliseconds(str(i)) / unit for i in range(len(loops))]
        parts = ", ".join(f"{it.does} {x:.1f}" for it, x in zip(loops, ratios, strict=True))
        print(f"  {name}, {step}: at least {sum(ratios):.1f} × ({parts})", flush=True)
