"""JAX arrays and random keys. They load onto the default device."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding.codecs import UnsuitableError
from jobrunner.checkpoint.encoding.everyday import expect

_KEYS = ("threefry2x32", "rbg", "unsafe_rbg")


def encode(name: str, value: Any) -> dict[str, Any]:
    """Return the array on the host; small floats have the dtypes of ml_dtypes."""
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
    return {"values": np.asarray(value), "weak": bool(value.weak_type)}


def decode(name: str, parts: dict[str, Any]) -> Any:
    """Make it again."""
    jax, values = sys.modules["jax"], expect(np.ndarray, parts["values"])
    if "key" in parts:
        if parts["key"] not in _KEYS:
            raise ValueError(f"the kind {parts['key']!r} of keys is unknown")
        return jax.random.wrap_key_data(jax.numpy.asarray(values), impl=parts["key"])
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
