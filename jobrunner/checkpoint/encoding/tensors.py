"""PyTorch tensors as NumPy arrays and back; torch is never imported for anything else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

# Those that NumPy has no dtype for travel as integers of their size.
_AS_INTEGERS = {1: ("uint8", np.uint8), 2: ("int16", np.int16)}
_IN_NUMPY = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]


class UnsupportedTensorError(TypeError):
    """A tensor that cannot be kept exactly; the message says why."""


def is_tensor(value: object) -> bool:
    """Whether `value` is a plain tensor or a parameter."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter)


def to_array(
    tensor: Any, *, from_device: bool = False
) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
    """The tensor's memory as an array, and what else is needed to make it again.

    `from_device`: a tensor on another device is copied from there, and comes back on the host.

    Raises
    ------
    UnsupportedTensorError
        Not in host memory, not strided, or not a leaf of its autograd graph.
    """
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu" and not from_device:
        raise UnsupportedTensorError(
            f"it lives on the device {tensor.device}; tensor.cpu() gives a copy that can be saved"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnsupportedTensorError(f"its layout is {tensor.layout}; tensor.to_dense() is saved")
    if not tensor.is_leaf:
        raise UnsupportedTensorError(
            "it is part of an autograd graph, which is not kept; tensor.detach() is saved"
        )
    plain = tensor.detach().cpu()  # the same tensor where it is there already
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _IN_NUMPY:
        if tensor.element_size() not in _AS_INTEGERS:
            raise UnsupportedTensorError(f"NumPy has nothing like its dtype {dtype}")
        plain = plain.view(getattr(torch, _AS_INTEGERS[tensor.element_size()][0]))
    return plain.numpy(), {
        "dtype": dtype,
        "requires_grad": bool(tensor.requires_grad),
        "parameter": type(tensor) is torch.nn.Parameter,
    }


def from_array(
    array: np.ndarray[Any, Any] | None, shape: Sequence[int], description: dict[str, Any]
) -> Any:
    """Make the tensor again, on the memory of `array`; None stands for no elements."""
    torch = sys.modules["torch"]
    dtype = getattr(torch, description["dtype"])
    if array is None:
        tensor = torch.empty(tuple(shape), dtype=dtype)
    else:
        tensor = torch.from_numpy(array)
        if tensor.dtype != dtype:
            tensor = tensor.view(dtype)
    if description["parameter"]:
        return torch.nn.Parameter(tensor, requires_grad=description["requires_grad"])
    return tensor.requires_grad_(description["requires_grad"])
