"""Compare values in all that a checkpoint preserves."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def assert_identical(expected: Any, found: Any, where: str = "value") -> None:
    """Raise unless two values are equal in type, dtype, byte order, memory order and bits.

    Parameters
    ----------
    expected, found : object
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
    _check(where, "type", type(expected), type(found))
    if isinstance(expected, np.ndarray):
        _arrays(expected, found, where)
    elif isinstance(expected, np.generic | float | complex):
        _arrays(np.asarray(expected), np.asarray(found), where)
    elif isinstance(expected, list | tuple):
        _check(where, "length", len(expected), len(found))
        for i, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert_identical(one, other, f"{where}[{i}]")
    elif isinstance(expected, dict):
        assert_identical(list(expected), list(found), f"keys of {where}")
        for (key, one), other in zip(expected.items(), found.values(), strict=True):
            assert_identical(one, other, f"{where}[{key!r}]")
        assert_identical(getattr(expected, "__dict__", None), getattr(found, "__dict__", None))
    elif type(expected).__module__.startswith("torch"):
        _tensors(expected, found, where)
    else:
        _check(where, "value", expected, found)


def _arrays(expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any], where: str) -> None:
    _check(where, "dtype", expected.dtype, found.dtype)
    _check(where, "shape", expected.shape, found.shape)
    for order in ("c_contiguous", "f_contiguous"):
        if getattr(expected.flags, order):
            _check(where, order, True, getattr(found.flags, order))
    if expected.dtype.names is not None:
        for name in expected.dtype.names:  # not the padding between them
            _arrays(expected[name], found[name], f"{where}[{name!r}]")
    elif expected.dtype.char in "gG":  # long doubles have padding, too
        _check(where, "values", list(map(repr, expected.flat)), list(map(repr, found.flat)))
    elif expected.dtype.hasobject or isinstance(expected.dtype, np.dtypes.StringDType):
        one, other = expected.ravel().tolist(), found.ravel().tolist()
        assert_identical(one, other, where)
    else:
        _check(where, "bytes", expected.tobytes(), found.tobytes())


def _tensors(expected: Any, found: Any, where: str) -> None:
    torch = sys.modules["torch"]
    for name in ("dtype", "shape", "requires_grad", "device"):
        _check(where, name, getattr(expected, name), getattr(found, name))
    one, other = (
        tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        for tensor in (expected, found)
    )
    _check(where, "bytes", one.tolist(), other.tolist())


def _check(where: str, what: str, expected: Any, found: Any) -> None:
    if expected != found:
        if isinstance(expected, type):
            expected, found = expected.__name__, found.__name__
        raise AssertionError(f"{where}: expected {what} {expected!s:.200}, found {found!s:.200}")
