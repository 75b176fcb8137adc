"""JAX arrays and random keys. They load onto the default device."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding.codecs import UnsuitableError

_SHORT = {
    *("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn"),
    *("int2", "int4", "uint2", "uint4"),
}
"""NumPy has no dtype for these; they are saved as unsigned integers of the same size."""

_KEYS = ("threefry2x32", "rbg", "unsafe_rbg")


def encode(name: str, value: Any) -> dict[str, Any]:
    """Return the array on the host."""
    jax = sys.modules["jax"]
    if len(value.devices()) > 1:
        raise UnsuitableError(
            f"it is on {len(value.devices())} devices, and would load onto one; save "
            f"jax.device_get(x), or make the blob transient"
        )
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        kind = jax.random.key_impl(value)
        if kind not in _KEYS:
            raise UnsuitableError(f"its keys are of the kind {kind!r}; save jax.random.key_data(x)")
        return {"key": str(kind), "values": np.asarray(jax.random.key_data(value))}
    array, dtype = np.asarray(value), str(value.dtype)
    if dtype in _SHORT:
        array = array.view(f"u{array.itemsize}")
    elif array.dtype.kind not in "biufc":
        raise UnsuitableError(f"there is no codec for its dtype {dtype}; save another array")
    return {"dtype": dtype, "values": array, "weak": bool(value.weak_type)}


def decode(name: str, parts: dict[str, Any]) -> Any:
    """Make it again."""
    jax, values = sys.modules["jax"], parts["values"]
    if type(values) is not np.ndarray:
        raise TypeError(f"expected an array, found {type(values).__name__}")
    if "key" in parts:
        if parts["key"] not in _KEYS:
            raise ValueError(f"the kind {parts['key']!r} of keys is unknown")
        return jax.random.wrap_key_data(jax.numpy.asarray(values), impl=parts["key"])
    dtype = parts["dtype"]
    if dtype in _SHORT:
        import ml_dtypes

        values = values.view(getattr(ml_dtypes, dtype))
    if str(values.dtype) != dtype:
        raise ValueError(f"its values are {values.dtype}, expected {dtype}")
    canonical = jax.dtypes.canonicalize_dtype(values.dtype)
    if canonical != values.dtype:
        raise TypeError(
            f"it would become {canonical}: set jax.config.update('jax_enable_x64', True)"
        )
    if parts["weak"]:
        return _make_weak(jax, values)
    return jax.numpy.asarray(values)


def _make_weak(jax: Any, values: Any) -> Any:
    """Make an array as it is the result of an operation with Python's numbers alone."""
    zero = {"b": False, "i": 0, "f": 0.0, "c": 0j}[values.dtype.kind]
    result = jax.numpy.full(values.shape, zero).at[...].set(jax.numpy.asarray(values))
    if result.dtype != values.dtype or not result.weak_type:
        raise TypeError("this version of JAX cannot make it weakly typed")
    return result
