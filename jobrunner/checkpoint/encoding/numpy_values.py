"""NumPy's values other than plain arrays and scalars, as nodes and back. Pure: no I/O.

Random generators, masked arrays, matrices, records and dtypes; see `everyday`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jobrunner.checkpoint.encoding.codecs import UnsuitableError
from jobrunner.checkpoint.encoding.dtypes import (
    Array,
    Spec,
    Trail,
    Tree,
    UnsupportedDtypeError,
    dtype_from_spec,
    dtype_to_spec,
)
from jobrunner.checkpoint.encoding.everyday import check_bits
from jobrunner.checkpoint.encoding.schema import Count, Shape
from jobrunner.names import is_clean

if TYPE_CHECKING:
    from jobrunner.checkpoint.encoding.decode import Decoder
    from jobrunner.checkpoint.encoding.encode import Encoder
else:
    Decoder = Any

_BITS = {
    cls.__name__: cls
    for cls in (
        *(np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937),
        *(np.random.Philox, np.random.SFC64),
    )
}
_POSITIONS = {"MT19937": ("pos", 624), "Philox": ("buffer_pos", 4)}
"""Where a bit generator reads next in its buffer, which it does not check."""


_STRING = np.dtypes.StringDType()

_MOST_HOLLOW = 1 << 24
"""Items of an array that takes no bytes, on disk or in memory, but time to look at."""


# --- to nodes


def check_hollow(value: Array) -> None:
    """Refuse an array of items without bytes if there are too many of them."""
    if value.size > _MOST_HOLLOW:
        raise UnsupportedDtypeError(
            f"it has {value.size} items of zero bytes, and at most {_MOST_HOLLOW} can be saved"
        )


def encode_dtype(encoder: Encoder, value: np.dtype[Any], trail: Trail) -> Tree:
    """Encode a dtype as a value."""
    return {"$": "dtype", "dtype": dtype_to_spec(value)}


def encode_scalar(value: np.generic) -> Tree:
    """Encode a scalar of one of NumPy's types."""
    cls = type(value)
    if cls is np.str_:
        return {"$": "np.str_", "hex": value.encode("utf-8", "surrogatepass").hex()}  # type: ignore[attr-defined]
    if cls is np.bytes_:
        return {"$": "np.bytes_", "hex": bytes(value).hex()}  # type: ignore[call-overload]
    spec = dtype_to_spec(value.dtype)
    if cls is not dtype_from_spec(spec).type:
        raise UnsupportedDtypeError(f"{cls.__name__} is not one of NumPy's scalar types")
    return {"$": "scalar", "dtype": spec, "hex": value.tobytes().hex()}


def encode_objects(encoder: Encoder, value: Array, trail: Trail) -> Tree:
    """Encode an array of objects, which must be strings."""
    items = value.ravel().tolist()
    if any(type(item) is not str for item in items):
        raise UnsupportedDtypeError("it holds Python objects other than str")
    if same := encoder.view(value, "objects", trail):
        return same
    if items and all(map(is_clean, items)):
        texts = value.astype(np.dtypes.StringDType())
        return {"$": "objects", "at": encoder.part(texts, trail, "ndarray of str objects")}
    trees = [encoder.text(item, (*trail, str(i))) for i, item in enumerate(items)]
    return {"$": "objects", "items": trees, "shape": list(value.shape)}


def encode_gaps(encoder: Encoder, value: Array, spec: Any, trail: Trail) -> Tree:
    """Encode an array of strings, some of which may be missing."""
    missing = [type(item) is not str for item in value.ravel().tolist()]
    gaps = np.array(missing, bool).reshape(value.shape)
    plain = np.empty_like(value, dtype=np.dtypes.StringDType(coerce=value.dtype.coerce))
    plain[~gaps] = value[~gaps]
    return {
        "$": "gaps",
        "dtype": spec,
        "at": encoder.part(plain, (*trail, "texts"), "ndarray"),
        "missing": encoder.part(gaps, (*trail, "missing"), "ndarray"),
    }


def encode_noted(encoder: Encoder, value: Array, trail: Trail) -> Tree:
    """Encode an array whose dtype has metadata."""
    plain = value.view(np.dtype(value.dtype.str)) if value.dtype.names is None else value
    dtype_to_spec(plain.dtype)
    metadata = dict(value.dtype.metadata or {})
    if same := encoder.view(value, f"{plain.dtype.str} {metadata!r}", trail):
        return same
    notes = encoder.encode(metadata, (*trail, "metadata"))
    encoder.formats.append(4)
    return {"$": "noted", "at": encoder.part(plain, trail, "ndarray"), "metadata": notes}


def _generator(encoder: Encoder, value: np.random.Generator, trail: Trail) -> Tree:
    _check_bits(value.bit_generator)
    return {"$": "np.Generator", "bits": encoder.encode(value.bit_generator, trail)}


def _bit_generator(encoder: Encoder, value: Any, trail: Trail) -> Tree:
    _check_bits(value)
    return {
        "$": "np.BitGenerator",
        "state": encoder.encode(value.state, trail),
        "seeds": encoder.encode(value.seed_seq, (*trail, "seeds")),
    }


def _check_bits(bits: Any) -> None:
    if type(bits) is not _BITS.get(type(bits).__name__):
        raise UnsuitableError(f"{type(bits).__name__} is not one of NumPy's bit generators")
    if type(bits.seed_seq) not in (type(None), np.random.SeedSequence):
        raise UnsuitableError(f"it was seeded by {type(bits.seed_seq).__name__}")


def _seed_sequence(encoder: Encoder, value: np.random.SeedSequence, trail: Trail) -> Tree:
    seed = value.entropy
    check_bits(*(seed if isinstance(seed, list | tuple) else [seed]), *value.spawn_key)
    return {
        "$": "np.SeedSequence",
        "entropy": encoder.encode(value.entropy, (*trail, "entropy")),
        "spawn_key": encoder.encode(value.spawn_key, (*trail, "spawn_key")),
        "pool_size": value.pool_size,
        "spawned": value.n_children_spawned,
    }


def _random_state(encoder: Encoder, value: np.random.RandomState, trail: Trail) -> Tree:
    state = value.get_state(legacy=False)
    if state["bit_generator"] not in _BITS:
        raise UnsuitableError("it has a bit generator that is not one of NumPy's")
    return {"$": "np.RandomState", "state": encoder.encode(state, trail)}


def _masked(encoder: Encoder, value: Any, trail: Trail) -> Tree:
    if value is np.ma.masked:
        return {"$": "masked"}
    if value._baseclass is not np.ndarray or value._optinfo:
        raise UnsuitableError("it masks a subclass of ndarray, or has attributes of its own")
    if value.dtype.hasobject and value.dtype != object:
        dtype_to_spec(value.dtype)  # raises
    data = encoder.encode(value.data, (*trail, "data"))
    mask = None if value.mask is np.ma.nomask else encoder.encode(value.mask, (*trail, "mask"))
    fill = value._fill_value  # None: the default one of the dtype
    return {
        "$": "np.MaskedArray",
        "data": data,
        "mask": mask,
        "fill": None if fill is None else encoder.encode(np.asarray(fill), (*trail, "fill")),
        "hard": bool(value.hardmask),
    }


def _subclass(encoder: Encoder, value: Array, trail: Trail) -> Tree:
    """Encode a matrix or an array of records as a plain array of the same memory."""
    plain = value.view(np.ndarray)
    if plain.dtype.type is np.record:
        plain = plain.view(np.dtype((np.void, plain.dtype)))
    again = plain.view(type(value))
    if (
        again.dtype != value.dtype
        or again.dtype.type is not value.dtype.type
        or vars(again) != vars(value)
    ):
        raise UnsuitableError("it would load as another one; save np.asarray(...) instead")
    dtype_to_spec(plain.dtype)
    return {"$": f"np.{type(value).__name__}", "array": encoder.encode(plain, trail)}


def _void(encoder: Encoder, value: np.void, trail: Trail) -> Tree:
    spec = dtype_to_spec(np.dtype((np.void, value.dtype)))
    return {
        "$": "np.void",
        "dtype": spec,
        "hex": value.tobytes().hex(),
        "record": type(value) is np.record,
    }


ENCODERS: dict[type, Callable[[Encoder, Any, Trail], Tree]] = {
    np.random.Generator: _generator,
    **dict.fromkeys(_BITS.values(), _bit_generator),
    np.random.SeedSequence: _seed_sequence,
    np.random.RandomState: _random_state,
    np.ma.MaskedArray: _masked,
    type(np.ma.masked): _masked,
    np.matrix: _subclass,
    np.recarray: _subclass,
    np.void: _void,
    np.record: _void,
}
MUTABLE = ENCODERS.keys() - {type(np.ma.masked)}


def memory_order(array: Array) -> tuple[int, ...] | None:
    """Return the memory order of the axes, outermost first; None if they are in it already."""
    if 0 in array.strides:
        return None
    order = tuple(sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis])))
    return None if order == tuple(range(array.ndim)) else order


# --- and back


def _make_bits(state: Any) -> Any:
    """Make a bit generator in a state that it does not check itself."""
    name = state["bit_generator"]
    if name in _POSITIONS:
        field, end = _POSITIONS[name]
        holder = state["state"] if name == "MT19937" else state
        if not 0 <= holder[field] <= end:
            raise ValueError(f"`{field}` is not between 0 and {end}")
    return _BITS[name](0)


def _to_bits(decoder: Decoder, state: Tree, seeds: Tree) -> Any:
    found = decoder.whole(state)
    bits = _make_bits(found)
    bits.__setstate__((found, decoder.whole(seeds)))
    return bits


def _to_generator(decoder: Decoder, bits: Tree) -> np.random.Generator:
    found = decoder.whole(bits)
    if type(found) not in _BITS.values():
        raise TypeError(f"expected a bit generator, found {type(found).__name__}")
    return np.random.Generator(found)


def _to_seeds(
    decoder: Decoder, entropy: Tree, spawn_key: Tree, pool_size: Count, spawned: Count
) -> np.random.SeedSequence:
    if pool_size > 1024:
        raise ValueError(f"a `pool_size` of {pool_size} is too large")
    seed, spawned_by = decoder.whole(entropy), decoder.decode_as(tuple, spawn_key)
    check_bits(*(seed if isinstance(seed, list | tuple) else [seed]), *spawned_by)
    return np.random.SeedSequence(
        seed,
        spawn_key=spawned_by,
        pool_size=pool_size,
        n_children_spawned=spawned,
    )


def _to_random_state(decoder: Decoder, state: Tree) -> np.random.RandomState:
    found = decoder.whole(state)
    made = np.random.RandomState(_make_bits(found))
    made.set_state(found)
    return made


def _to_masked_array(decoder: Decoder, data: Tree, mask: Tree, fill: Tree, hard: bool) -> Any:
    made: Any = np.ma.MaskedArray(decoder.array(data), hard_mask=hard)
    if mask is not None:
        found = decoder.array(mask)
        if found.dtype != np.ma.make_mask_descr(made.dtype) or found.shape != made.shape:
            raise ValueError("`mask` does not fit `data`")
        made._mask = found
    if fill is not None:
        made.set_fill_value(decoder.array(fill)[()])
    return made


def _to_noted(decoder: Decoder, at: Count, metadata: Tree) -> Any:
    notes = decoder.decode_as(dict, metadata)
    array = decoder.leaf(at)
    if not isinstance(array, np.ndarray):
        return array
    return array.view(np.dtype(array.dtype, metadata=notes))


def _to_matrix(decoder: Decoder, array: Tree) -> Any:
    return decoder.array(array).view(np.matrix)


def _to_recarray(decoder: Decoder, array: Tree) -> Any:
    return decoder.array(array).view(np.recarray)


def decode_scalar(decoder: Decoder, dtype: Spec, digits: str) -> Any:
    """Make a scalar of one of NumPy's types."""
    found = dtype_from_spec(dtype)
    if found.hasobject or found.subdtype:
        raise TypeError(f"there is no scalar of {found}")
    if not found.itemsize:
        return np.zeros((), found)[()]
    (scalar,) = np.frombuffer(bytearray.fromhex(digits), found)
    return scalar


def _to_void(decoder: Decoder, dtype: Spec, digits: str, record: bool) -> Any:
    void = decode_scalar(decoder, dtype, digits)
    if type(void) is not np.void:
        raise TypeError(f"expected a void, found {type(void).__name__}")
    return _as_record(void) if record else void


def _to_record(decoder: Decoder, scalar: Tree) -> Any:
    return _as_record(decoder.decode_as(np.void, scalar))


def _as_record(void: np.void) -> Any:
    array = np.array(void)
    return array.view(np.dtype((np.record, array.dtype)))[()]


def _to_dtype(decoder: Decoder, dtype: Spec) -> np.dtype[Any]:
    return dtype_from_spec(dtype)


def _to_masked(decoder: Decoder) -> Any:
    return np.ma.masked


def _to_hollow(decoder: Decoder, dtype: Spec, shape: Shape) -> Array:
    found = dtype_from_spec(dtype)
    if found.itemsize or math.prod(shape) > _MOST_HOLLOW:
        raise ValueError(f"an array {found}{list(shape)} does not have zero bytes")
    return np.empty(shape, found)


def _to_objects(
    decoder: Decoder,
    at: Count | None = None,
    items: list[Tree] | None = None,
    shape: Shape | None = None,
) -> Array:
    if at is not None and items is None and shape is None:
        return decoder.plain(at, _STRING).astype(object)
    if at is not None or items is None or shape is None:
        raise ValueError("expected either `at`, or `items` and `shape`")
    result = np.empty(len(items), object)
    result[:] = [decoder.decode(item) for item in items]
    return result.reshape(shape)


def _to_gaps(decoder: Decoder, dtype: Spec, at: Count, missing: Count) -> Array:
    found: Any = dtype_from_spec(dtype)
    gaps = decoder.plain(missing, np.dtype(bool))
    full = decoder.plain(at, np.dtypes.StringDType(coerce=found.coerce)).astype(found)
    if gaps.shape != full.shape:
        raise ValueError("`missing` does not fit `at`")
    full[gaps] = found.na_object
    return full


PLAIN: Mapping[str, Callable[..., Any]] = {
    "dtype": _to_dtype,
    "masked": _to_masked,
    "scalar": decode_scalar,
    "np.record": _to_record,  # of earlier versions, as a ``scalar`` of type void is
}

WITH_IDENTITY: Mapping[str, Callable[..., Any]] = {
    "hollow": _to_hollow,
    "objects": _to_objects,
    "gaps": _to_gaps,
    "np.void": _to_void,
    "np.Generator": _to_generator,
    "np.BitGenerator": _to_bits,
    "np.SeedSequence": _to_seeds,
    "np.RandomState": _to_random_state,
    "np.MaskedArray": _to_masked_array,
    "np.matrix": _to_matrix,
    "noted": _to_noted,
    "np.recarray": _to_recarray,
}
