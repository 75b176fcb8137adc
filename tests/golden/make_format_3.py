"""Made ``format_3/``, which every later version must read. Not to be run again: make format_4.

python -m tests.golden.make_format_3 tests/golden/format_3

What is new against format 2: short arrays of which many are alike are rows of one array.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tests.golden.making import save

COUNT = 70


def blobs() -> dict[str, Any]:
    """What the node had."""
    table = np.arange(6.0).reshape(2, 3)
    return {
        "step": 7,
        **{f"row{i}": table + i for i in range(COUNT)},
        **{f"turned{i}": np.asfortranarray(table - i) for i in range(COUNT)},
        "params": [{"w": np.full(3, i, ">i2"), "b": np.array(i)} for i in range(COUNT)],
        "days": {f"d{i}": np.array([i, i + 1], "M8[D]") for i in range(COUNT)},
        "alone": np.arange(5),
    }


if __name__ == "__main__":
    save(sys.argv[1], blobs())
