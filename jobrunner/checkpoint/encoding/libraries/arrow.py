"""Arrow arrays, tables and schemas, as the buffers that they are made of.

Only types are read by Arrow's own format; data is taken from arrays of known size, and validated.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding.dtypes import Array
from jobrunner.checkpoint.encoding.libraries.table import NotExactError

_EXTENSION = b"ARROW:extension:name"


def encode(name: str, value: Any) -> Any:
    """Return its type or schema, and its arrays; raises `NotExactError`."""
    pa = sys.modules["pyarrow"]
    match name.rpartition(".")[2]:
        case "Schema":
            return {"schema": _pack_schema(value)}
        case "DataType":
            return {"type": _pack_type(value)}
        case "Array":
            return {"type": _pack_type(value.type), **_pack(value)}
        case "ChunkedArray":
            return {"type": _pack_type(value.type), "chunks": list(map(_pack, value.chunks))}
    if not value.num_columns and value.num_rows:
        raise NotExactError("it has rows but no columns, so they would be lost")
    parts: dict[str, Any] = {"schema": _pack_schema(value.schema)}
    names = value.schema.names
    is_named = len(set(names)) == len(names)
    packed: list[Any]
    if isinstance(value, pa.Table):
        packed = [list(map(_pack, column.chunks)) for column in value.columns]
    else:
        packed = [_pack(column) for column in value.columns]
    # Under their names in the store, if these are distinct.
    return {**parts, "columns": dict(zip(names, packed, strict=True)) if is_named else packed}


def decode(name: str, parts: Any) -> Any:
    """Make it again, on the memory of the arrays, which are not trusted."""
    pa = sys.modules["pyarrow"]
    match name.rpartition(".")[2]:
        case "Schema":
            return _unpack_schema(parts["schema"])
        case "DataType":
            return _unpack_type(parts["type"])
        case "Array":
            return _unpack(_unpack_type(parts["type"]), parts)
        case "ChunkedArray":
            return _unpack_chunks(_unpack_type(parts["type"]), parts["chunks"])
    schema, columns = _unpack_schema(parts["schema"]), parts["columns"]
    if isinstance(columns, dict):
        columns = list(columns.values())
    pairs = list(zip((field.type for field in schema), columns, strict=True))
    if name == "pyarrow.Table":
        table = pa.Table.from_arrays([_unpack_chunks(*it) for it in pairs], schema=schema)
        table.validate()
        return table
    batch = pa.RecordBatch.from_arrays([_unpack(*it) for it in pairs], schema=schema)
    batch.validate()
    return batch


# --- types and schemas


def _pack_schema(schema: Any) -> bytes:
    data = bytes(schema.serialize())
    _refuse_extensions(data, NotExactError)
    if not _unpack_schema(data).equals(schema, check_metadata=True):
        raise NotExactError("Arrow's own format does not keep all of its schema")
    return data


def _pack_type(kind: Any) -> bytes:
    return _pack_schema(sys.modules["pyarrow"].schema([("", kind)]))


def _unpack_schema(data: Any) -> Any:
    """Read a schema; Arrow would call the class that an extension type names, so there is none."""
    pa = sys.modules["pyarrow"]
    if type(data) is not bytes:
        raise TypeError(f"expected bytes, found {type(data).__name__}")
    _refuse_extensions(data, ValueError)
    return pa.ipc.read_schema(pa.py_buffer(data))


def _unpack_type(data: Any) -> Any:
    (field,) = _unpack_schema(data)
    return field.type


def _refuse_extensions(data: bytes, error: type[Exception]) -> None:
    if _EXTENSION in data:
        raise error("its schema has an extension type; save the array's storage instead")


# --- arrays


def _unpack_chunks(kind: Any, chunks: list[Any]) -> Any:
    return sys.modules["pyarrow"].chunked_array([_unpack(kind, it) for it in chunks], type=kind)


def _pack(array: Any) -> dict[str, Any]:
    """Return the length, the validity and the buffers of an array, without what a slice hides."""
    types, kind = sys.modules["pyarrow"].types, array.type
    try:
        array.validate(full=True)
    except ValueError as error:  # as a load would find it
        raise NotExactError(f"Arrow says that it is not valid: {error}") from error
    parts: dict[str, Any] = {"length": len(array)}
    if types.is_null(kind):
        return parts
    if types.is_dictionary(kind):
        return {**parts, "indices": _pack(array.indices), "dictionary": _pack(array.dictionary)}
    valid = None
    if array.null_count:
        parts["valid"] = valid = np.asarray(array.is_valid().to_numpy(zero_copy_only=False))
    if types.is_boolean(kind):
        bits = np.unpackbits(_buffer(array, 1, "u1"), bitorder="little")
        values = bits[array.offset : array.offset + len(array)].astype(bool)
        return {**parts, "values": _blank(values, valid)}
    if _is_binary(kind):
        offsets = _offsets(array, kind)
        data = _buffer(array, 2, "u1")[offsets[0] : offsets[-1]]
        return {**parts, "offsets": offsets - offsets[0], "data": data}
    if types.is_fixed_size_list(kind):
        size = kind.list_size
        return {
            **parts,
            "values": _pack(array.values.slice(array.offset * size, len(array) * size)),
        }
    if _is_list(kind):
        offsets = _offsets(array, kind)
        items = array.values if not types.is_map(kind) else _entries(array)
        inner = items.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        return {**parts, "offsets": offsets - offsets[0], "values": _pack(inner)}
    if types.is_struct(kind):
        return {**parts, "fields": [_pack(array.field(i)) for i in range(kind.num_fields)]}
    if types.is_primitive(kind) or _width(kind):
        values = _buffer(array, 1, _dtype(kind))
        if width := _width(kind):
            values = values[: len(values) // width * width].reshape(-1, width)
        return {**parts, "values": _blank(values[array.offset : array.offset + len(array)], valid)}
    raise NotExactError(f"there is no codec for the Arrow type {kind}; cast it to another type")


def _unpack(kind: Any, parts: Any) -> Any:
    pa = sys.modules["pyarrow"]
    types, length = pa.types, parts["length"]
    if types.is_null(kind):
        return pa.nulls(length)
    if types.is_dictionary(kind):
        indices = _unpack(kind.index_type, parts["indices"])
        values = _unpack(kind.value_type, parts["dictionary"])
        made = pa.DictionaryArray.from_arrays(indices, values, ordered=kind.ordered, safe=True)
        return _validated(made, length)
    valid = parts.get("valid")
    if valid is not None and (valid.dtype != bool or valid.shape != (length,)):
        raise ValueError("its validity does not fit its length")
    buffers = [None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))]
    children: list[Any] = []
    if types.is_boolean(kind):
        bits = np.packbits(parts["values"], bitorder="little")
        buffers.append(_flat(bits, "u"))
    elif _is_binary(kind):
        buffers += [_flat(parts["offsets"], "i"), _flat(parts["data"], "u")]
    elif types.is_struct(kind):
        children = [_unpack(it.type, part) for it, part in zip(kind, parts["fields"], strict=True)]
    elif types.is_fixed_size_list(kind):
        children = [_unpack(kind.value_type, parts["values"])]
    elif _is_list(kind):
        is_map = types.is_map(kind)
        inner = pa.struct([kind.key_field, kind.item_field]) if is_map else kind.value_type
        buffers.append(_flat(parts["offsets"], "i"))
        children = [_unpack(inner, parts["values"])]
    elif types.is_primitive(kind) or _width(kind):
        if parts["values"].dtype != _dtype(kind):
            raise ValueError(f"its values are {parts['values'].dtype}, expected {_dtype(kind)}")
        buffers.append(_flat(parts["values"], _dtype(kind).kind))
    else:
        raise ValueError(f"the Arrow type {kind} is not one that is saved")
    made = pa.Array.from_buffers(kind, length, buffers, children=children or None)
    return _validated(made, length)


def _validated(array: Any, length: int) -> Any:
    if len(array) != length:
        raise ValueError(f"its length is {len(array)}, expected {length}")
    array.validate(full=True)  # above all, that its buffers are as long as it says
    return array


def _is_binary(kind: Any) -> bool:
    types = sys.modules["pyarrow"].types
    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(is_it(kind) for is_it in tests)


def _is_list(kind: Any) -> bool:
    types = sys.modules["pyarrow"].types
    return any(is_it(kind) for is_it in (types.is_list, types.is_large_list, types.is_map))


def _width(kind: Any) -> int:
    """Return the bytes of an item that no number of NumPy holds; else 0."""
    types = sys.modules["pyarrow"].types
    is_bytes = types.is_fixed_size_binary(kind) or types.is_decimal(kind)
    return kind.bit_width // 8 if is_bytes or types.is_interval(kind) else 0


def _dtype(kind: Any) -> np.dtype[Any]:
    """Return the dtype of an item's number, or of its bytes."""
    types = sys.modules["pyarrow"].types
    if types.is_integer(kind) or types.is_floating(kind):
        dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return dtype
    return np.dtype("u1" if _width(kind) else f"i{kind.bit_width // 8}")


def _buffer(array: Any, i: int, dtype: Any) -> Array:
    buffer = array.buffers()[i]
    if buffer is None:
        return np.zeros(0, dtype)
    return np.frombuffer(buffer, dtype, buffer.size // np.dtype(dtype).itemsize)


def _blank(values: Array, valid: Array | None) -> Array:
    """Return the values with zeros where there is none: what lies there may differ in every run."""
    if valid is None:
        return values
    values = values.copy()
    values[~valid] = 0
    return values


def _offsets(array: Any, kind: Any) -> Array:
    types = sys.modules["pyarrow"].types
    large = (types.is_large_binary, types.is_large_string, types.is_large_list)
    dtype = np.dtype("i8" if any(is_it(kind) for is_it in large) else "i4")
    if not len(array):
        return np.zeros(1, dtype)
    return _buffer(array, 1, dtype)[array.offset : array.offset + len(array) + 1]


def _entries(array: Any) -> Any:
    """Return the entries of maps, without regard to the array's offset."""
    fields = [array.type.key_field, array.type.item_field]
    arrays = [array.keys, array.items]
    return sys.modules["pyarrow"].StructArray.from_arrays(arrays, fields=fields)


def _flat(values: Array, kind: str) -> Any:
    if type(values) is not np.ndarray or values.dtype.kind != kind:
        raise TypeError(f"expected an array of kind {kind!r}, found {type(values).__name__}")
    return sys.modules["pyarrow"].py_buffer(np.ascontiguousarray(values))
