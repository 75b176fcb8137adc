"""Compare values in all that a checkpoint preserves."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def assert_identical(expected: Any, actual: Any, where: str = "value") -> None:
    """Raise unless two values are equal in type, dtype, byte order, memory order and bits.

    Parameters
    ----------
    expected, actual : object
        Scalars, strings, arrays, PyTorch tensors, and containers of them.
    where : str
        Begins the message.

    Raises
    ------
    AssertionError
        The values differ; the message says where.

    Examples
    --------
    >>> assert_identical([np.float32(1)], [np.float32(1)])
    >>> assert_identical(1, 1.0)
    Traceback (most recent call last):
    AssertionError: value: expected type int, found float
    """
    _check(where, "type", type(expected), type(actual))
    if isinstance(expected, np.ndarray):
        _arrays(expected, actual, where)
    elif isinstance(expected, np.generic | float | complex):
        _arrays(np.asarray(expected), np.asarray(actual), where)
    elif isinstance(expected, list | tuple):
        _check(where, "length", len(expected), len(actual))
        for i, (item, actual_item) in enumerate(zip(expected, actual, strict=True)):
            assert_identical(item, actual_item, f"{where}[{i}]")
    elif isinstance(expected, dict):
        assert_identical(list(expected), list(actual), f"keys of {where}")
        # In order: a key that is NaN is found in its own dict only.
        for (key, item), actual_item in zip(expected.items(), actual.values(), strict=True):
            assert_identical(item, actual_item, f"{where}[{key!r}]")
        assert_identical(getattr(expected, "__dict__", None), getattr(actual, "__dict__", None))
    elif type(expected).__module__.startswith("torch"):
        _tensors(expected, actual, where)
    else:
        _check(where, "value", expected, actual)


def _arrays(expected: np.ndarray[Any, Any], actual: np.ndarray[Any, Any], where: str) -> None:
    _check(where, "dtype", expected.dtype, actual.dtype)
    _check(where, "shape", expected.shape, actual.shape)
    for order in ("c_contiguous", "f_contiguous"):
        if getattr(expected.flags, order):
            _check(where, order, True, getattr(actual.flags, order))
    if expected.dtype.names is not None:
        for name in expected.dtype.names:  # not the padding between them
            _arrays(expected[name], actual[name], f"{where}[{name!r}]")
    elif expected.dtype.char in "gG":  # long doubles have padding, too
        _check(where, "values", list(map(repr, expected.flat)), list(map(repr, actual.flat)))
    elif expected.dtype.hasobject or isinstance(expected.dtype, np.dtypes.StringDType):
        assert_identical(expected.ravel().tolist(), actual.ravel().tolist(), where)
    else:
        _check(where, "bytes", expected.tobytes(), actual.tobytes())


def _tensors(expected: Any, actual: Any, where: str) -> None:
    for name in ("dtype", "shape", "requires_grad", "device"):
        _check(where, name, getattr(expected, name), getattr(actual, name))
    _check(where, "bytes", _bytes_of(expected), _bytes_of(actual))


def _bytes_of(tensor: Any) -> list[int]:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    numbers: list[int] = plain.view(-1).view(sys.modules["torch"].uint8).tolist()
    return numbers


def _check(where: str, property_name: str, expected: Any, actual: Any) -> None:
    if expected != actual:
        if isinstance(expected, type):
            expected, actual = expected.__name__, actual.__name__
        raise AssertionError(
            f"{where}: expected {property_name} {expected!s:.200}, found {actual!s:.200}"
        )
