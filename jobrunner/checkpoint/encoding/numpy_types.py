"""Codecs of NumPy's values that are not plain arrays: scalars, arrays of objects, random generators.

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
from jobrunner.checkpoint.encoding.everyday import expect, fields_of, immutable, made_from
from jobrunner.names import is_clean

_BIT_GENERATORS: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        *(np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937),
        *(np.random.Philox, np.random.SFC64),
    )
}
_MOST_POOL = 1024
_MOST_SEED_BITS = 1 << 17  # NumPy takes long for longer ints

_STRING = np.dtypes.StringDType()
_OBJECT = np.dtype(object)


# --- scalars


def _encode_scalar(value: np.generic) -> object:
    if isinstance(value, np.void):
        raise UnsuitableError("a record may lie in an array that it changes; save np.array(...)")
    spec = dtype_to_spec(value.dtype)
    if type(value) is not dtype_from_spec(spec).type:
        raise UnsuitableError(f"{type(value).__name__} is not one of NumPy's scalar types")
    return [spec, without_padding(np.asarray(value)).tobytes().hex()]


def _decode_scalar(parts: object) -> Any:
    spec, digits = fields_of(parts, str, str)
    dtype = dtype_from_spec(spec)
    if dtype.hasobject or not dtype.itemsize:
        raise TypeError(f"there is no scalar of {dtype}")
    (scalar,) = np.frombuffer(bytes.fromhex(digits), dtype)
    return scalar


# --- arrays of objects


def _encode_objects(value: Array) -> object:
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


# --- random generators


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
    """Make a bit generator for a state.

    NumPy keeps some random numbers ready in a buffer. Where in it the state says that it is, there it
    reads, unchecked: a stranger's state could point to any memory of this process.
    """
    name = state["bit_generator"]
    position, end = 0, 0
    if name == "MT19937":
        position, end = state["state"]["pos"], 624
    elif name == "Philox":
        position, end = state["buffer_pos"], 4
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
    if not isinstance(entropy, list | tuple):
        entropy = [entropy]
    for seed in (*entropy, *spawn_key):
        if type(seed) is int and seed.bit_length() > _MOST_SEED_BITS:
            raise UnsuitableError(f"an int in it has more than {_MOST_SEED_BITS} bits")


def _encode_random_state(value: np.random.RandomState) -> object:
    state: Any = value.get_state(legacy=False)
    if state["bit_generator"] not in _BIT_GENERATORS:
        raise UnsuitableError("it has a bit generator that is not one of NumPy's")
    return state


def _decode_random_state(state: object) -> np.random.RandomState:
    result = np.random.RandomState(_make_bit_generator(expect(dict, state)))
    result.set_state(state)  # type: ignore[arg-type]  # a dict
    return result


OBJECTS = OwnCodec(np.ndarray, _encode_objects, _decode_objects, "objects")
"""For arrays whose dtype is object; all others are parts of the blob."""

CODECS = (
    OwnCodec(
        np.generic, _encode_scalar, _decode_scalar, "scalar", subclasses=True, is_mutable=False
    ),
    immutable(np.str_, str, made_from(np.str_, str), "np.str_"),
    immutable(np.bytes_, bytes, made_from(np.bytes_, bytes), "np.bytes_"),
    OwnCodec(
        np.random.Generator, lambda value: [value.bit_generator], _decode_generator, "np.Generator"
    ),
    *(
        OwnCodec(cls, _encode_bit_generator, _decode_bit_generator, "np.BitGenerator")
        for cls in _BIT_GENERATORS.values()
    ),
    OwnCodec(np.random.SeedSequence, _encode_seeds, _decode_seeds, "np.SeedSequence"),
    OwnCodec(np.random.RandomState, _encode_random_state, _decode_random_state, "np.RandomState"),
)
