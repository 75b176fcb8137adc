"""Values to JSON trees and arrays, and back. Pure."""

from __future__ import annotations

from jobrunner.checkpoint.encoding.codecs import Codec, register_codec, registered_codecs
from jobrunner.checkpoint.encoding.decode import Decoder
from jobrunner.checkpoint.encoding.dtypes import (
    Spec,
    dtype_from_spec,
    dtype_to_spec,
    without_padding,
    zarr_data_type,
)
from jobrunner.checkpoint.encoding.encode import ArrayPart, EncodedBlob, child_names
from jobrunner.checkpoint.encoding.node import encode_blobs, store_as
from jobrunner.checkpoint.encoding.schema import convert, parse
from jobrunner.checkpoint.encoding.stateful import StatefulBlob

__all__ = [
    "ArrayPart",
    "Codec",
    "Decoder",
    "EncodedBlob",
    "Spec",
    "StatefulBlob",
    "child_names",
    "convert",
    "dtype_from_spec",
    "dtype_to_spec",
    "encode_blobs",
    "parse",
    "register_codec",
    "registered_codecs",
    "store_as",
    "without_padding",
    "zarr_data_type",
]
