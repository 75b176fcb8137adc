"""JAX arrays come back as they were, without pickle."""

from __future__ import annotations

import itertools
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
EVERY_16_BITS = np.arange(1 << 16, dtype="u2")


def test_arrays_come_back_with_their_bits_and_weak_types_on_which_results_depend() -> None:
    shapes = [(), (3,), (2, 0), (2, 3)]
    saved = [jnp.ones(shape, dtype) for shape, dtype in itertools.product(shapes, DTYPES)]
    saved += [jnp.asarray(EVERY_16_BITS.view(it)) for it in (ml_dtypes.bfloat16, np.float16)]
    for value in (0.5, 3, 1j):
        saved += [jnp.asarray(value), jnp.full((2, 3), value), jnp.full((0,), value)]
    assert saved[-1].weak_type
    for expected, found in zip(saved, written_and_read(saved), strict=True):
        assert type(found) is type(expected)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.weak_type == expected.weak_type
        assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


def test_random_keys_and_deleted_arrays_are_refused() -> None:
    deleted = jnp.ones(3)
    deleted.delete()
    for value, why in (
        (jax.random.key(7), r"save jax.random.key_data\(x\)"),
        (deleted, "reading it raised RuntimeError: Array has been deleted"),
    ):
        with pytest.raises(DefinitionError, match=why):
            encode_blobs("n", {"x": value})


@pytest.mark.parametrize("values", [np.ones(2), np.array(["x"], object)], ids=["f8", "texts"])
def test_what_would_change_or_was_forged_is_refused(values: np.ndarray[Any, Any]) -> None:
    with pytest.raises(CheckpointError, match="jax cannot make jax.Array of it"):
        decode_forged("jax.Array", {"values": values, "weak": False})
