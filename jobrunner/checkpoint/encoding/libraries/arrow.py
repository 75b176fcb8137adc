"""Arrow arrays, tables and schemas, as the buffers that they are made of.

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
_ARRAYS = ("Array", "ChunkedArray")
_SPARE_BYTES = 64
"""Arrow rounds the size of its buffers up to so many bytes."""


def encode(name: str, value: Any) -> Any:
    """Return its schema, or that of its type, and its columns."""
    pa, kind = sys.modules["pyarrow"], name.removeprefix("pyarrow.")
    if kind == "Schema":
        return {"schema": _pack_schema(value)}
    if kind == "DataType":
        return {"schema": _pack_schema(pa.schema([("type", value)]))}
    if kind in _ARRAYS:
        schema, columns = pa.schema([("array", value.type)]), [value]
    else:
        schema, columns = value.schema, value.columns
        if not columns and value.num_rows:
            raise UnsuitableError("it has rows but no columns, so they would be lost")
    packed: Any = []
    for column in columns:
        is_chunked = isinstance(column, pa.ChunkedArray)
        packed.append(list(map(_pack, column.chunks)) if is_chunked else _pack(column))
    if len(set(schema.names)) == len(schema.names):
        # Under their names in the store.
        packed = dict(zip(schema.names, packed, strict=True))
    return {"schema": _pack_schema(schema), "columns": packed}


def decode(name: str, parts: Any) -> Any:
    """Make it again, on the memory of the arrays, which are not trusted."""
    pa, kind = sys.modules["pyarrow"], name.removeprefix("pyarrow.")
    schema, columns = _unpack_schema(parts["schema"]), parts.get("columns")
    if kind == "Schema":
        return schema
    if kind == "DataType":
        (field,) = schema
        return field.type
    if isinstance(columns, dict):
        columns = list(columns.values())
    arrays = []
    for field, column in zip(schema, columns, strict=True):
        if kind in ("Table", "ChunkedArray"):
            chunks = [_unpack(field.type, chunk) for chunk in column]
            arrays.append(pa.chunked_array(chunks, type=field.type))
        else:
            arrays.append(_unpack(field.type, column))
    if kind in _ARRAYS:
        (array,) = arrays
        return array
    result = getattr(pa, kind).from_arrays(arrays, schema=schema)
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
    if array.offset or _hides_much(array):
        array = pa.concat_arrays([array])  # a copy of no more than the slice
    parts: dict[str, Any] = {"length": len(array)}
    if pa.types.is_dictionary(kind):
        return {**parts, "indices": _pack(array.indices), "dictionary": _pack(array.dictionary)}
    children = [_pack(child) for child in _children(array)]
    own_buffers = array.buffers()[: kind.num_buffers]
    buffers: list[Any] = [
        None if data is None else np.frombuffer(data, np.uint8) for data in own_buffers
    ]
    if buffers and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        # For other readers, which know numbers.
        dtype = np.dtype(kind.to_pandas_dtype())
        buffers[-1] = buffers[-1][: len(array) * dtype.itemsize].view(dtype)
    return {**parts, "buffers": buffers, "children": children}


_UNKNOWN = {
    *("union", "run_end_encoded", "string_view", "binary_view", "list_view"),
    "large_list_view",
}
"""Kinds whose buffers refer to others by pointers or in any order."""


def _is_known(kind: Any) -> bool:
    types = sys.modules["pyarrow"].types
    for name in _UNKNOWN:
        is_kind = getattr(types, f"is_{name}", None)  # newer versions know more kinds
        if is_kind is not None and is_kind(kind):
            return False
    return True


def _hides_much(array: Any) -> bool:
    sizes = [buffer.size for buffer in array.buffers() if buffer is not None]
    return any(size > _SPARE_BYTES + 2 * array.nbytes for size in sizes)


def _children(array: Any) -> list[Any]:
    pa, kind = sys.modules["pyarrow"], array.type
    if pa.types.is_struct(kind):
        return [array.field(i) for i in range(kind.num_fields)]
    if pa.types.is_map(kind):
        fields = [kind.key_field, kind.item_field]
        return [pa.StructArray.from_arrays([array.keys, array.items], fields=fields)]
    return [array.values] if kind.num_fields else []


def _unpack(kind: Any, parts: Any) -> Any:
    pa = sys.modules["pyarrow"]
    if not _is_known(kind):
        raise ValueError(f"the Arrow type {kind} is not one that is saved")
    if pa.types.is_dictionary(kind):
        indices = _unpack(kind.index_type, parts["indices"])
        values = _unpack(kind.value_type, parts["dictionary"])
        return pa.DictionaryArray.from_arrays(indices, values, ordered=kind.ordered, safe=True)
    kinds = [kind.field(i).type for i in range(kind.num_fields)]
    if pa.types.is_map(kind):
        kinds = [pa.struct([kind.key_field, kind.item_field])]
    children = list(map(_unpack, kinds, parts["children"]))
    if len(children) != len(kinds) or len(parts["buffers"]) != kind.num_buffers:
        raise ValueError(f"an array of {kind} has {kind.num_buffers} buffers")
    buffers: list[Any] = [None if data is None else _buffer_of(data) for data in parts["buffers"]]
    array = pa.Array.from_buffers(kind, parts["length"], buffers, children=children or None)
    array.validate(full=True)  # above all, that its buffers are as long as it says
    return array


def _buffer_of(data: Any) -> Any:
    # An array of Python objects would be read as addresses.
    if type(data) is not np.ndarray or data.dtype.kind not in "iuf":
        raise TypeError(f"expected an array of numbers, found {type(data).__name__}")
    return sys.modules["pyarrow"].py_buffer(np.ascontiguousarray(data))
