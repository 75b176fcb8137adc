"""PyTorch tensors as NumPy arrays and back."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding.codecs import UnsuitableError
from jobrunner.checkpoint.encoding.dtypes import NUMBERS, Array

_AS_INTEGERS = {1: "uint8", 2: "int16"}
"""NumPy has no dtype for some of torch's; they are saved as integers of the same size."""


def encode(name: str, value: Any) -> dict[str, Any]:
    """Return the tensor's memory as an array on the host, its dtype, and what autograd knows of it."""
    torch = sys.modules["torch"]
    _refuse_unlike_arrays(torch, value)
    plain = value.detach().cpu()  # no copy if it is there already
    # torch marks a conjugate or negative view instead of computing it; NumPy does not see the mark.
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in NUMBERS:
        integers = _AS_INTEGERS.get(value.element_size())
        if integers is None:
            raise UnsuitableError(f"NumPy has no equivalent of its dtype {dtype}")
        plain = plain.view(getattr(torch, integers))
    return {
        "data": plain.numpy(),
        "dtype": dtype,
        "requires_grad": bool(value.requires_grad),
        "parameter": type(value) is torch.nn.Parameter,
    }


def _refuse_unlike_arrays(torch: Any, value: Any) -> None:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsuitableError(f"{type(value).__name__} would load as a plain tensor")
    if value.is_quantized:
        raise UnsuitableError("it is quantized; save tensor.dequantize(), or its parts")
    if not value.is_leaf:
        raise UnsuitableError("it is part of an autograd graph; save tensor.detach()")


def check_device(value: Any) -> None:
    """Refuse a tensor that would load on another device than it is on."""
    if value.device.type != "cpu":
        raise UnsuitableError(f"it is on the device {value.device}; save tensor.cpu()")


def decode(name: str, parts: dict[str, Any]) -> Any:
    """Make the tensor again, on the memory of its array."""
    torch = sys.modules["torch"]
    data, dtype = parts["data"], parts["dtype"]
    if type(data) is not np.ndarray:
        raise TypeError(f"expected an array, found {type(data).__name__}")
    tensor = _tensor_of(torch, data, dtype)
    if parts["parameter"]:
        return torch.nn.Parameter(tensor, requires_grad=parts["requires_grad"])
    return tensor.requires_grad_(parts["requires_grad"])


def _tensor_of(torch: Any, data: Array, name: str) -> Any:
    dtype = vars(torch).get(name)  # without `__getattr__`, which imports
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    tensor = torch.from_numpy(data)
    if tensor.dtype == dtype:
        return tensor
    if tensor.element_size() != dtype.itemsize:
        raise ValueError(f"its items have {tensor.element_size()} bytes, those of {name} not")
    return tensor.view(dtype)
