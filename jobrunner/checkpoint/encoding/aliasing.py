"""Arrays that share memory: one object to a running job, two after a resume. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jobrunner.errors import DefinitionError


class Window(NamedTuple):
    """An array of a blob, as the blob holds it."""

    blob: str
    trail: tuple[str, ...]
    array: np.ndarray[Any, Any]


def refuse_shared_memory(
    node: str, memory: Sequence[Window], beside: Mapping[str, np.ndarray[Any, Any]]
) -> None:
    """Refuse arrays of one node of which one would no longer change with the other.

    Parameters
    ----------
    node : str
        For the message.
    memory : sequence of Window
        Each array once.
    beside : mapping of str to numpy.ndarray
        Blobs, each an array that owns its memory.

    Raises
    ------
    DefinitionError
        Naming both.
    """
    if _all_apart(memory, beside):
        return
    memory = [*memory, *(Window(name, (), array) for name, array in beside.items())]
    spans = sorted(
        (
            (*np.lib.array_utils.byte_bounds(array), index)
            for index, (_, _, array) in enumerate(memory)
            if array.size and array.itemsize
        ),
    )
    reaching: list[tuple[int, int]] = []  # (end, index) of the spans that the next may overlap
    for low, high, index in spans:
        reaching = [(end, other) for end, other in reaching if end > low]
        for _, other in reaching:
            if _overlap(memory[other][2], memory[index][2]):
                first, second = (
                    "/".join((name, *trail)) for name, trail, _ in (memory[other], memory[index])
                )
                raise DefinitionError(
                    f"Node {node!r}: the blobs {first!r} and {second!r} share memory, and would "
                    f"come apart after a resume. Give one of them a copy (array.copy()), or save "
                    f"only one and make the other from it."
                )
        reaching.append((high, index))


def _all_apart(memory: Sequence[Window], beside: Mapping[str, np.ndarray[Any, Any]]) -> bool:
    """Whether each array owns its memory, and none is there twice: so none share any."""
    arrays = [*(array for _, _, array in memory), *beside.values()]
    return len(set(map(id, arrays))) == len(arrays) and all(
        array.flags.owndata for _, _, array in memory
    )


def _overlap(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    try:
        return np.shares_memory(one, other, max_work=1_000_000)  # type: ignore[arg-type]  # the stubs know two of its values
    except np.exceptions.TooHardError:
        return True
