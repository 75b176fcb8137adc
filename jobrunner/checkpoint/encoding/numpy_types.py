"""Codecs of NumPy's values that are not plain arrays: scalars, objects, masks, random generators.

Pure: no I/O. Plain arrays have no codec: they are the parts of a blob.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding.codecs import OwnCodec, UnsuitableError
from jobrunner.checkpoint.encoding.dtypes import (
    Array,
    dtype_from_spec,
    dtype_to_spec,
    without_padding,
)
from jobrunner.checkpoint.encoding.everyday import check_bits, expect, fields_of
from jobrunner.names import is_clean

_BIT_GENERATORS: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        *(np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937),
        *(np.random.Philox, np.random.SFC64),
    )
}
_MOST_POOL = 1024

_STRING = np.dtypes.StringDType()
_OBJECT = np.dtype(object)


# --- scalars and dtypes


def _encode_scalar(value: np.generic) -> object:
    spec = dtype_to_spec(value.dtype)
    if type(value) is not dtype_from_spec(spec).type:
        raise UnsuitableError(f"{type(value).__name__} is not one of NumPy's scalar types")
    return [spec, without_padding(np.asarray(value)).tobytes().hex()]


def _decode_scalar(parts: object) -> Any:
    spec, digits = fields_of(parts, object, str)
    dtype = dtype_from_spec(spec)
    if dtype.hasobject or dtype.subdtype or not dtype.itemsize:
        raise TypeError(f"there is no scalar of {dtype}")
    # A record lies in memory of its own, so that it can be changed.
    (scalar,) = np.frombuffer(bytearray.fromhex(digits), dtype)
    return scalar


def _decode_bytes(data: object) -> np.bytes_:
    return np.bytes_(expect(bytes, data))


# --- arrays of objects and masked arrays


def encode_objects(value: Array) -> object:
    """Convert an array of Python objects; strings become an array of strings."""
    if value.dtype != _OBJECT:
        raise UnsuitableError(f"the dtype {value.dtype!r} holds Python objects")
    items = value.ravel().tolist()
    if items and set(map(type, items)) == {str} and all(map(is_clean, items)):
        return value.astype(_STRING)
    return [list(value.shape), items]


def _decode_objects(parts: object) -> Array:
    if type(parts) is np.ndarray:
        if parts.dtype != _STRING:
            raise TypeError(f"expected an array of strings, found {parts.dtype}")
        return parts.astype(_OBJECT)
    shape, items = fields_of(parts, list, list)
    result = np.empty(len(items), _OBJECT)
    for i, item in enumerate(items):
        result[i] = item
    return result.reshape(shape)


def _encode_masked(value: Any) -> object:
    if value is np.ma.masked:
        return None
    if value._baseclass is not np.ndarray or value._optinfo:
        raise UnsuitableError("it masks a subclass of ndarray, or has attributes of its own")
    mask = None if value.mask is np.ma.nomask else np.asarray(value.mask)
    fill = value._fill_value  # None: the default one of the dtype
    return {
        "data": value.data,
        "mask": mask,
        "fill": None if fill is None else np.asarray(fill),
        "hard": bool(value.hardmask),
    }


def _decode_masked(parts: object) -> Any:
    if parts is None:
        return np.ma.masked
    fields = expect(dict, parts)
    result: Any = np.ma.MaskedArray(expect(np.ndarray, fields["data"]), hard_mask=fields["hard"])
    mask, fill = fields["mask"], fields["fill"]
    if mask is not None:
        expect(np.ndarray, mask)
        if mask.dtype != np.ma.make_mask_descr(result.dtype) or mask.shape != result.shape:
            raise ValueError("`mask` does not fit `data`")
        result._mask = mask
    if fill is not None:
        result.set_fill_value(expect(np.ndarray, fill)[()])
    return result


# --- random generators


def _encode_generator(value: np.random.Generator) -> object:
    return [value.bit_generator]


def _decode_generator(parts: object) -> np.random.Generator:
    (bits,) = fields_of(parts, object)
    if type(bits) not in _BIT_GENERATORS.values():
        raise TypeError(f"expected a bit generator, found {type(bits).__name__}")
    return np.random.Generator(bits)


def _encode_bit_generator(value: Any) -> object:
    return {"state": value.state, "seeds": value.seed_seq}


def _decode_bit_generator(parts: object) -> Any:
    fields = expect(dict, parts)
    result = _make_bit_generator(fields["state"])
    result.__setstate__((fields["state"], fields["seeds"]))
    return result


def _make_bit_generator(state: Any) -> Any:
    """Make a bit generator; NumPy reads where a state says that it is in its buffer, unchecked."""
    name = state["bit_generator"]
    if name == "MT19937":
        position, end = state["state"]["pos"], 624
    elif name == "Philox":
        position, end = state["buffer_pos"], 4
    else:
        position, end = 0, 0
    if not 0 <= position <= end:
        raise ValueError(f"its position in its buffer is not between 0 and {end}")
    return _BIT_GENERATORS[name](0)


def _encode_seeds(value: np.random.SeedSequence) -> object:
    _check_seeds(value.entropy, value.spawn_key)
    return [value.entropy, value.spawn_key, value.pool_size, value.n_children_spawned]


def _decode_seeds(parts: object) -> np.random.SeedSequence:
    entropy, spawn_key, pool_size, num_children = fields_of(parts, object, tuple, int, int)
    if pool_size > _MOST_POOL:
        raise ValueError(f"a pool of {pool_size} is too large")
    _check_seeds(entropy, spawn_key)
    return np.random.SeedSequence(
        entropy, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=num_children
    )


def _check_seeds(entropy: Any, spawn_key: Any) -> None:
    check_bits(*(entropy if isinstance(entropy, list | tuple) else [entropy]), *spawn_key)


def _encode_random_state(value: np.random.RandomState) -> object:
    state: Any = value.get_state(legacy=False)
    if state["bit_generator"] not in _BIT_GENERATORS:
        raise UnsuitableError("it has a bit generator that is not one of NumPy's")
    return state


def _decode_random_state(state: object) -> np.random.RandomState:
    result = np.random.RandomState(_make_bit_generator(expect(dict, state)))
    result.set_state(state)  # type: ignore[arg-type]  # a dict
    return result


OBJECTS = OwnCodec(np.ndarray, encode_objects, _decode_objects, "objects")
"""For arrays whose dtype is object; all others are parts of the blob."""

CODECS = (
    OwnCodec(
        np.generic, _encode_scalar, _decode_scalar, "scalar", subclasses=True, is_mutable=False
    ),
    OwnCodec(np.void, _encode_scalar, _decode_scalar, "void"),
    OwnCodec(np.str_, str, lambda text: np.str_(expect(str, text)), "np.str_", is_mutable=False),
    OwnCodec(np.bytes_, bytes, _decode_bytes, "np.bytes_", is_mutable=False),
    OwnCodec(np.dtype, dtype_to_spec, dtype_from_spec, "dtype", subclasses=True, is_mutable=False),
    OwnCodec(np.ma.MaskedArray, _encode_masked, _decode_masked, "np.MaskedArray"),
    OwnCodec(type(np.ma.masked), _encode_masked, _decode_masked, "np.masked", is_mutable=False),
    OwnCodec(np.random.Generator, _encode_generator, _decode_generator, "np.Generator"),
    *(
        OwnCodec(cls, _encode_bit_generator, _decode_bit_generator, "np.BitGenerator")
        for cls in _BIT_GENERATORS.values()
    ),
    OwnCodec(np.random.SeedSequence, _encode_seeds, _decode_seeds, "np.SeedSequence"),
    OwnCodec(np.random.RandomState, _encode_random_state, _decode_random_state, "np.RandomState"),
)


def memory_order(array: Array) -> tuple[int, ...] | None:
    """Return the memory order of the axes, outermost first; None if they are in it already."""
    if array.flags.c_contiguous or 0 in array.strides:
        return None
    order = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    return None if order == list(range(array.ndim)) else tuple(order)
