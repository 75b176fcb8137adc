"""JAX arrays. They load onto the default device."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding.codecs import UnsuitableError
from jobrunner.checkpoint.encoding.everyday import expect


def encode(name: str, value: Any) -> dict[str, Any]:
    """Return the array on the host; small floats have the dtypes of ml_dtypes."""
    jax = sys.modules["jax"]
    if len(value.devices()) > 1:
        raise UnsuitableError(
            f"it is on {len(value.devices())} devices, and would load onto one; save "
            f"jax.device_get(x), or make the blob transient"
        )
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise UnsuitableError("it is of random keys; save jax.random.key_data(x)")
    return {"values": np.asarray(value), "weak": bool(value.weak_type)}


def decode(name: str, parts: dict[str, Any]) -> Any:
    """Make it again."""
    jax, values = sys.modules["jax"], expect(np.ndarray, parts["values"])
    canonical = jax.dtypes.canonicalize_dtype(values.dtype)
    if canonical != values.dtype:
        raise TypeError(
            f"it would become {canonical}: set jax.config.update('jax_enable_x64', True)"
        )
    result = jax.numpy.asarray(values)
    if parts["weak"]:
        # As the result of an operation with Python's numbers alone.
        zero = {"b": False, "i": 0, "f": 0.0, "c": 0j}[values.dtype.kind]
        result = jax.numpy.full(values.shape, zero).at[...].set(result)
        if result.dtype != values.dtype or not result.weak_type:
            raise TypeError("this version of JAX cannot make it weakly typed")
    return result
