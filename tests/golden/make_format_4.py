"""Made ``format_4/``, which every later version must read. Not to be run again: make format_5.

python -m tests.golden.make_format_4 tests/golden/format_4

What is new against format 3: data types of Zarr's core only, so that items of texts, bytes, records
and long doubles have an axis; dtypes of ml_dtypes; names of axes; consolidated metadata.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from jobrunner.define.array_options import ArrayOptions
from tests.golden.making import save

WORDS = np.array([["a", "bcd"], ["", "é"], ["x", "yz"]])
RECORD = np.dtype([("a", "i1"), ("b", ">f8"), ("c", "<U2")], align=True)
OPTIONS = {
    "words": ArrayOptions(dims=("x", "y"), coords=("days",)),
    "days": ArrayOptions(dims=("x",)),
    "cut": ArrayOptions(chunks=(2,), shards=(4,)),
    "packed": ArrayOptions(({"name": "zstd", "configuration": {"level": 3, "checksum": False}},)),
}


def blobs() -> dict[str, Any]:
    """What the node had, but for the dtypes of ml_dtypes."""
    return {
        "step": 7,
        "words": WORDS,
        "turned": np.asfortranarray(WORDS),
        "cut": np.array([b"a", b"", b"bcd", b"e", b"fg"]),
        "packed": WORDS[0].astype(">U3"),
        "raw": np.frombuffer(b"0123456789", "V5"),
        "records": np.array([(1, 0.5, "x"), (-1, 2.5, "yz")], RECORD),
        "days": np.array(["2020-01-01", "NaT", "1969-12-31"], "M8[D]"),
        "spans": np.array([5, "NaT"], ">m8[ms]"),
        "words in lists": [WORDS[0].copy(), {"deep": WORDS[1].copy()}],
        **{f"word{i}": np.array([f"word {i:2}"]) for i in range(64)},
    }


def small_floats() -> dict[str, Any]:
    """What the node had that needs ml_dtypes."""
    import ml_dtypes

    return {
        "bfloat16": np.array([1.5, -2.0], ml_dtypes.bfloat16),
        "float8": np.array([1.5, -2.0], ml_dtypes.float8_e4m3fn),
    }


if __name__ == "__main__":
    save(sys.argv[1], {**blobs(), **small_floats()}, OPTIONS)
