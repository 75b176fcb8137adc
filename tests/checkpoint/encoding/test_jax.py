"""JAX arrays come back as they were, without pickle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jobrunner import CheckpointError, DefinitionError
from jobrunner.checkpoint import encode_blobs
from tests.stores import decode_forged, written_and_read

jax = pytest.importorskip("jax", reason="jax is not installed; its arrays cannot be made")
jnp = jax.numpy
ml_dtypes = pytest.importorskip("ml_dtypes")

DTYPES = [
    *("bool", "int8", "uint32", "int32", "float16", "float32", "complex64", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "int4", "uint4"),
]


def assert_same(expected: Any, found: Any) -> None:
    assert type(found) is type(expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.weak_type == expected.weak_type
    one, other = (np.asarray(it) for it in (expected, found))
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_any_array_comes_back_as_it_was(dtype: str, shape: tuple[int, ...]) -> None:
    array = jnp.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2, dtype=dtype)
    assert_same(array, written_and_read(array))


@pytest.mark.parametrize("value", [0.5, 3, 1j])
def test_weak_types_are_kept_since_results_depend_on_them(value: Any) -> None:
    for array in (jnp.asarray(value), jnp.full((2, 3), value), jnp.full((0,), value)):
        assert array.weak_type
        assert_same(array, written_and_read(array))


def test_all_bits_are_kept() -> None:
    bits = np.arange(1 << 16, dtype="u2")
    for dtype in (ml_dtypes.bfloat16, np.float16):
        array = jnp.asarray(bits.view(dtype))
        assert_same(array, written_and_read(array))


def test_random_keys_are_refused() -> None:
    with pytest.raises(DefinitionError, match=r"save jax.random.key_data\(x\)"):
        encode_blobs("n", {"x": jax.random.key(7)})


def test_a_deleted_array_is_refused() -> None:
    array = jnp.ones(3)
    array.delete()
    with pytest.raises(
        DefinitionError, match="reading it raised RuntimeError: Array has been deleted"
    ):
        encode_blobs("n", {"x": array})


FORGED = [
    {"dtype": "float64", "values": np.ones(2), "weak": False},
    {"dtype": "float32", "values": np.ones(2), "weak": False},
    {"dtype": "ufunc", "values": np.ones(2), "weak": False},
    {"dtype": "object", "values": np.array(["x"], object), "weak": False},
]


@pytest.mark.parametrize("parts", FORGED)
def test_what_would_change_or_was_forged_is_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="jax cannot make jax.Array of it"):
        decode_forged("jax.Array", parts)
