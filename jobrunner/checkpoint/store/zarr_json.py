"""Zarr documents, as bytes. Pure: no I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding import Spec, dtype_from_spec, zarr_data_type
from jobrunner.checkpoint.store.grid import Grid, to_logical

OWN_KEY = "/jobrunner"
"""Attribute that holds our own words; no blob can be called so."""

_ENCODER = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":"))
_INDEX_CODECS = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
]


def describe_array(
    spec: Spec,
    grid: Grid,
    holds: str,
    compressors: Sequence[dict[str, Any]] = (),
    names: Sequence[str] = (),
) -> bytes:
    """The Zarr document of an array.

    Parameters
    ----------
    spec : JSON
        Of its dtype, as `dtype_to_spec` gives it.
    grid : Grid
    holds : str
        What the array is a part of.
    compressors : sequence of mapping
    names : sequence of str
        Of its rows, where it is a stack.
    """
    dtype = dtype_from_spec(spec)
    codecs: list[dict[str, Any]] = []
    if grid.order:
        codecs.append({"name": "transpose", "configuration": {"order": list(grid.order)}})
    if isinstance(dtype, np.dtypes.StringDType):
        data_type: Any = "string"
        fill: Any = ""
        codecs.append({"name": "vlen-utf8"})
    else:
        data_type, fill, endian = zarr_data_type(dtype)
        configuration = {"configuration": {"endian": endian}} if endian else {}
        codecs.append({"name": "bytes", **configuration})
    codecs += compressors
    if grid.piece_shape is not None:
        shard = {
            "chunk_shape": to_logical(grid.piece_shape, grid.order),
            "codecs": codecs,
            "index_codecs": _INDEX_CODECS,
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": shard}]
    return to_json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": to_logical(grid.shape, grid.order),
            "data_type": data_type,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": to_logical(grid.chunk_shape, grid.order)},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": fill,
            "codecs": codecs,
            "attributes": {
                **({"names": names} if names else {}),
                OWN_KEY: {"holds": holds, "dtype": spec},
            },
            "storage_transformers": [],
        }
    )


describe_usual_array = lru_cache(maxsize=4096)(describe_array)
"""The same, kept: the arrays of one epoch are those of the one before, and often alike."""


def group_document(attributes: Mapping[str, Any]) -> bytes:
    """The Zarr document of a group."""
    return to_json({"zarr_format": 3, "node_type": "group", "attributes": attributes})


_SEAL = b',"sha256":"%s"}}'


def seal(document: bytes) -> bytes:
    """The document of a group with its own digest as a last attribute."""
    return document[:-2] + _SEAL % hashlib.sha256(document).hexdigest().encode()


def is_sealed(document: bytes) -> bool:
    """Whether it is, to the last bit, what `seal` has made."""
    return document == seal(document[: -len(_SEAL % bytes(64))] + b"}}")


def to_json(document: object) -> bytes:
    """Strict JSON in ASCII, of what does not contain itself."""
    return _ENCODER.encode(document).encode()
