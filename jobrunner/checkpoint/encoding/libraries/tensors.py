"""PyTorch tensors as NumPy arrays and back. Imports torch only to make them."""

from __future__ import annotations

import sys
from typing import Any

from jobrunner.checkpoint.encoding.dtypes import NUMBERS, Array, Trail, Tree
from jobrunner.checkpoint.encoding.schema import Count, Shape
from jobrunner.errors import DefinitionError

# NumPy has no dtype for some of torch's; they are saved as integers of the same size.
_AS_INTEGERS = {1: "uint8", 2: "int16"}


class UnsupportedTensorError(TypeError):
    """A tensor that cannot be saved exactly; the message says why."""


def is_tensor(value: object) -> bool:
    """Whether `value` is a plain tensor or a parameter."""
    if type(value).__module__.partition(".")[0] != "torch":
        return False  # perhaps another thread is only beginning to import torch
    torch = sys.modules["torch"]
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def to_array(tensor: Any, *, from_device: bool = False) -> tuple[Array, dict[str, Any]]:
    """Return the tensor's memory as an array, and the other fields of its node.

    With `from_device`, a tensor on another device is copied to the host, and will load there.
    """
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu" and not from_device:
        raise UnsupportedTensorError(f"it is on the device {tensor.device}; save tensor.cpu()")
    if tensor.is_quantized:
        raise UnsupportedTensorError("it is quantized; save tensor.dequantize(), or its parts")
    if tensor.layout != torch.strided:
        raise UnsupportedTensorError(f"its layout is {tensor.layout}; save tensor.to_dense()")
    if not tensor.is_leaf:
        raise UnsupportedTensorError("it is part of an autograd graph; save tensor.detach()")
    plain = tensor.detach().cpu()  # no copy if it is there already
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in NUMBERS:
        if tensor.element_size() not in _AS_INTEGERS:
            raise UnsupportedTensorError(f"NumPy has no equivalent of its dtype {dtype}")
        plain = plain.view(getattr(torch, _AS_INTEGERS[tensor.element_size()]))
    return plain.numpy(), {
        "dtype": dtype,
        "requires_grad": bool(tensor.requires_grad),
        "parameter": type(tensor) is torch.nn.Parameter,
    }


def encode_tensor(encoder: Any, value: Any, trail: Trail, is_state: bool) -> Tree:
    """Encode a tensor."""
    # load_state_dict() copies a state to the device of the object.
    array, description = to_array(value, from_device=is_state)
    if same := encoder.view(array, str(description), trail):
        return same
    holds = f"torch.Tensor of {description['dtype']}"  # which may be none of NumPy's
    part = encoder.part(array, trail, holds) if array.size else None
    return {"$": "tensor", "at": part, "shape": list(array.shape), **description}


def decode_tensor(
    decoder: Any, at: Count | None, shape: Shape, dtype: str, requires_grad: bool, parameter: bool
) -> Any:
    """Make the tensor again, on the memory of its array; there is none if it has no elements."""
    try:
        import torch
    except ImportError:
        raise DefinitionError(
            f"{decoder.where} is a PyTorch tensor, but torch cannot be imported. Install it "
            f"(pip install torch)."
        ) from None
    array = None if at is None else decoder.part(at)
    torch_dtype = vars(torch).get(dtype)  # without `__getattr__`, which imports
    if not isinstance(torch_dtype, torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype")
    if array is None:
        if 0 not in shape:
            raise ValueError(f"expected `at`, the data of a tensor of shape {list(shape)}")
        tensor = torch.empty(shape, dtype=torch_dtype)
    else:
        tensor = torch.from_numpy(array)
        if tensor.dtype != torch_dtype:
            if tensor.element_size() != torch_dtype.itemsize:
                raise ValueError(
                    f"its items have {tensor.element_size()} bytes, those of {dtype} not"
                )
            tensor = tensor.view(torch_dtype)
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"its shape is {list(tensor.shape)}, expected {list(shape)}")
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)
