"""What stands in an outline for values that it does not make. Runs no code of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobrunner.checkpoint.encoding.schema import Count, Shape

if TYPE_CHECKING:
    from jobrunner.checkpoint.encoding.dtypes import Tree


@dataclass(frozen=True, slots=True, eq=False)
class ValueOutline:
    """Stands for a pickle, a tensor, the value of a codec, or what is made of arrays."""

    kind: str
    about: Mapping[str, Any]
    text: str

    def __repr__(self) -> str:
        return self.text


def outline_pickle(
    decoder: Any,
    digits: str | None = None,
    at: Count | None = None,
    classes: list[str] | None = None,
) -> Any:
    """Tell its size."""
    nbytes = len(digits or "") // 2 if at is None else decoder.leaf(at).shape[0]
    return ValueOutline("pickle", {"nbytes": nbytes}, f"pickle of {nbytes} bytes")


def outline_tensor(
    decoder: Any, at: Count | None, shape: Shape, dtype: str, requires_grad: bool, parameter: bool
) -> Any:
    """Tell its dtype and shape."""
    dtype = dtype.removeprefix("torch.")
    text = f"tensor {dtype}[{' x '.join(map(str, shape))}]"
    return ValueOutline("tensor", {"shape": list(shape), "dtype": dtype}, text)


def outline_codec(decoder: Any, name: str, value: Tree) -> Any:
    """Outline what its codec made of it."""
    inner = repr(decoder.decode(value))
    return ValueOutline("codec", {"codec": name, "value": inner}, f"{name}({inner})")


def outline_array(kind: str) -> Callable[..., Any]:
    """Return the function that outlines a value of this kind, which is made of arrays."""

    def outline(decoder: Any, *fields: Any) -> Any:
        data, *others = fields
        inner = decoder.decode(data)
        for other in others:
            decoder.decode(other)  # what it contains has numbers
        return ValueOutline(kind, {"value": repr(inner)}, f"{kind} {inner!r}")

    return outline
