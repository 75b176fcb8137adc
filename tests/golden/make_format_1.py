"""Made ``format_1/``, a small checkpoint of each kind of array. Not to be run again after a release.

python -m tests.golden.make_format_1 tests/golden/format_1
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from jobrunner.define.array_options import ArrayOptions
from tests.golden.making import save

ZSTD = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
OPTIONS = {"pressed": ArrayOptions((ZSTD,)), "cut": ArrayOptions(chunks=(2, 5))}


def blobs() -> dict[str, Any]:
    """What the node had."""
    table = np.arange(12.0).reshape(3, 4)
    return {
        "table": table,
        "turned": np.asfortranarray(table),
        "pressed": np.zeros(1000),
        "cut": np.arange(35, dtype=">i2").reshape(5, 7),
        "words": np.array(["a", "längerer"]),
        "texts": np.array(["", "längerer"], np.dtypes.StringDType()),
        "nothing": np.zeros((0, 3)),
        "plain": {"n": 3, "x": 0.1, "names": ["a", None, True], "layers": [table[0] + 1]},
        "rows": {f"p{i}": np.full(3, i) for i in range(64)},
    }


if __name__ == "__main__":
    save(sys.argv[1], blobs(), OPTIONS)
