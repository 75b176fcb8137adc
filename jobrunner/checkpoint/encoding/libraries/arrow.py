"""Arrow arrays and tables, as the buffers that they are made of.

Only types are read by Arrow's own format. Its format for data would allocate what a forged header
says before it looks at the data; so buffers are arrays of known size, and Arrow validates the whole.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding.codecs import UnsuitableError
from jobrunner.checkpoint.encoding.everyday import expect

_EXTENSION = b"ARROW:extension:name"
_UNKNOWN = (
    *("map", "union", "run_end_encoded", "string_view", "binary_view", "list_view"),
    "large_list_view",
)
"""Kinds whose buffers refer to others by pointers or in any order; and maps."""


def encode(name: str, value: Any) -> Any:
    """Return its schema, or that of its type, and its columns."""
    pa = sys.modules["pyarrow"]
    if name.endswith("Array"):
        schema, columns = pa.schema([("array", value.type)]), [value]
    else:
        schema, columns = value.schema, value.columns
        if not columns and value.num_rows:
            raise UnsuitableError("it has rows but no columns, so they would be lost")
    packed = []
    for column in columns:
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        packed.append(list(map(_pack, chunks)))
    return {"schema": _pack_schema(schema), "columns": packed}


def decode(name: str, parts: Any) -> Any:
    """Make it again, on the memory of the arrays, which are not trusted."""
    pa, kind = sys.modules["pyarrow"], name.removeprefix("pyarrow.")
    schema = _unpack_schema(parts["schema"])
    columns = []
    for field, chunks in zip(schema, parts["columns"], strict=True):
        arrays = [_unpack(field.type, chunk) for chunk in chunks]
        if kind in ("Table", "ChunkedArray"):
            columns.append(pa.chunked_array(arrays, type=field.type))
        else:
            columns += arrays
    if name.endswith("Array"):
        (array,) = columns
        return array
    result = getattr(pa, kind).from_arrays(columns, schema=schema)
    result.validate()
    return result


# --- schemas


def _pack_schema(schema: Any) -> bytes:
    data = bytes(schema.serialize())
    if _EXTENSION in data:
        raise UnsuitableError("its schema has an extension type; save the array's storage instead")
    if not _unpack_schema(data).equals(schema, check_metadata=True):
        raise UnsuitableError("Arrow's own format does not keep all of its schema")
    return data


def _unpack_schema(data: Any) -> Any:
    """Read a schema; Arrow would call the class that an extension type names, so there is none."""
    pa = sys.modules["pyarrow"]
    if _EXTENSION in expect(bytes, data):
        raise ValueError("its schema has an extension type")
    return pa.ipc.read_schema(pa.py_buffer(data))


# --- arrays


def _pack(array: Any) -> dict[str, Any]:
    """Return the length, the buffers and the children of an array, without what a slice hides."""
    pa = sys.modules["pyarrow"]
    try:
        array.validate(full=True)
    except ValueError as error:  # as a load would find it
        raise UnsuitableError(f"Arrow says that it is not valid: {error}") from error
    kind = array.type
    if not _is_known(kind):
        raise UnsuitableError(
            f"there is no codec for the Arrow type {kind}; cast it to another type"
        )
    array = pa.concat_arrays([array])  # a copy of no more than the slice
    if pa.types.is_dictionary(kind):
        return {"indices": _pack(array.indices), "dictionary": _pack(array.dictionary)}
    children = []
    if pa.types.is_struct(kind):
        children = [_pack(array.field(i)) for i in range(kind.num_fields)]
    elif kind.num_fields:
        children = [_pack(array.values)]
    buffers = []
    for data in array.buffers()[: kind.num_buffers]:
        buffers.append(None if data is None else np.frombuffer(data, np.uint8))
    return {"length": len(array), "buffers": buffers, "children": children}


def _is_known(kind: Any) -> bool:
    types = sys.modules["pyarrow"].types
    for name in _UNKNOWN:
        is_kind = getattr(types, f"is_{name}", None)  # newer versions know more kinds
        if is_kind is not None and is_kind(kind):
            return False
    return True


def _unpack(kind: Any, parts: Any) -> Any:
    pa = sys.modules["pyarrow"]
    if not _is_known(kind):
        raise ValueError(f"the Arrow type {kind} is not one that is saved")
    if pa.types.is_dictionary(kind):
        indices = _unpack(kind.index_type, parts["indices"])
        values = _unpack(kind.value_type, parts["dictionary"])
        return pa.DictionaryArray.from_arrays(indices, values, ordered=kind.ordered, safe=True)
    kinds = [kind.field(i).type for i in range(kind.num_fields)]
    children = list(map(_unpack, kinds, parts["children"]))
    if len(children) != len(kinds) or len(parts["buffers"]) != kind.num_buffers:
        raise ValueError(f"an array of {kind} has {kind.num_buffers} buffers")
    buffers = [None if data is None else _buffer_of(data) for data in parts["buffers"]]
    array = pa.Array.from_buffers(kind, parts["length"], buffers, children=children or None)
    array.validate(full=True)  # above all, that its buffers are as long as it says
    return array


def _buffer_of(data: Any) -> Any:
    # An array of Python objects would be read as addresses.
    if type(data) is not np.ndarray or data.dtype != np.uint8:
        raise TypeError(f"expected an array of bytes, found {type(data).__name__}")
    return sys.modules["pyarrow"].py_buffer(np.ascontiguousarray(data))
