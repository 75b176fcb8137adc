"""Made ``format_6/``, which every later version must read. Not to be run again: make format_7.

python -m tests.golden.make_format_6 tests/golden/format_6

What is new against format 5: columns of bytearrays.
"""

from __future__ import annotations

import sys
from typing import Any

from tests.golden.making import save


def blobs() -> dict[str, Any]:
    """What the node had."""
    rows = [{"id": i, "data": bytearray(b"%d\0" % i) * (i % 3)} for i in range(300)]
    shared = bytearray(b"shared")
    return {"buffers": [rows, rows[7]["data"], [shared, bytearray(b"other")] * 200, shared]}


if __name__ == "__main__":
    save(sys.argv[1], blobs())
