"""Made ``readers/``, which every later version must load. Not to be run again.

python -m tests.golden.make_readers tests/golden/readers

Readers at positions in a pass, saved when each way of reading had a class of its own.
"""

from __future__ import annotations

import sys
from typing import Any

from jobrunner.data import from_iterable, from_records
from tests.golden.making import save


def squares() -> list[int]:
    """What is iterated over."""
    return [n * n for n in range(12)]


def readers() -> dict[str, Any]:
    """Readers at the beginning."""
    numbers = range(100, 120)
    return {
        "indexed": from_records(numbers).shuffled(3).batched(3),
        "shard": from_records(numbers).sharded(1, 2),
        "ahead": from_records(numbers).shuffled(4).batched(2).prefetched(3),
        "limited": from_records(numbers).batched(2).limited(batches=5),
        "stream": from_iterable(squares).batched(5),
    }


def plain(reader: Any) -> list[Any]:
    """What is left of the pass, or of the loop."""
    return [[int(it) for it in item] if hasattr(item, "__iter__") else int(item) for item in reader]


if __name__ == "__main__":
    made = readers()
    for reader in made.values():
        for _ in range(2):
            reader.read()
    save(sys.argv[1], made)
    print({name: plain(reader) for name, reader in made.items()})
