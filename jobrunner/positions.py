"""Positions of a run: whole epochs, and steps of the next one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from numbers import Integral
from typing import Any, Self

from jobrunner.errors import DefinitionError
from jobrunner.texts import without_credentials

_POSITION = re.compile(r"(0|[1-9][0-9]{0,17})(?:\.s([1-9][0-9]{0,17}))?")


class Position(int):
    """A position in the middle of an epoch: `epoch` whole epochs, and `step` steps of the next one.

    Parameters
    ----------
    epoch : int
        At least 0.
    step : int
        At least 1. The position after a whole epoch is a plain int.

    Raises
    ------
    DefinitionError
        An argument is invalid.

    Notes
    -----
    A position comes after its whole epochs and before the next one: ``4 < Position(4, 200) < 5``.
    It equals no int. In arithmetic it counts as its whole epochs, and JSON encoders write only
    these: write ``str(position)``, which is ``"4.s200"``.

    Examples
    --------
    >>> sorted([5, Position(4, 200), 4, Position(4, 20)])
    [4, Position(4, 20), Position(4, 200), 5]
    >>> print(Position(4, 200))
    4.s200
    """

    step: int

    def __new__(cls, epoch: int, step: int) -> Self:  # noqa: D102
        for name, value, least in (("epoch", epoch, 0), ("step", step, 1)):
            if not is_whole(value, least):
                raise DefinitionError(
                    f"Position: {name} must be an int >= {least}; got {value!r:.200}."
                )
        found = super().__new__(cls, epoch)
        found.step = int(step)
        return found

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]
        return int(self), self.step

    def __repr__(self) -> str:
        return f"Position({int(self)}, {self.step})"

    def __str__(self) -> str:
        return f"{int(self)}.s{self.step}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec.removesuffix("d"))

    def __hash__(self) -> int:
        return hash((int(self), self.step))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Position) and _key(self) == _key(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Any) -> bool:
        return _key(self) < _key(other)

    def __le__(self, other: Any) -> bool:
        return _key(self) <= _key(other)

    def __gt__(self, other: Any) -> bool:
        return _key(self) > _key(other)

    def __ge__(self, other: Any) -> bool:
        return _key(self) >= _key(other)


def is_whole(value: object, least: int) -> bool:
    """Whether it is an int that is at least `least`, also one of NumPy; no bool, no position."""
    if type(value) is int:  # much faster
        return value >= least
    is_int = isinstance(value, Integral) and not isinstance(value, bool | Position)
    return is_int and int(value) >= least  # type: ignore[call-overload]


EpochLike = int | tuple[int, int] | str
"""How callers name a checkpoint: an epoch (4), a `Position`, or its pair (4, 200) or text "4.s200"."""


def as_epoch(value: EpochLike) -> int:
    """The epoch or `Position` that `read_position` finds in a value, which is one."""
    found = read_position(value)
    assert found is not None
    return found


def _key(value: Any) -> tuple[Any, int]:
    return (int(value), value.step) if isinstance(value, Position) else (value, 0)


def step_of(epoch: int) -> int:
    """The steps that a position contains besides whole epochs; 0 for an epoch."""
    return epoch.step if isinstance(epoch, Position) else 0


def parse_position(text: str) -> int | None:
    """Read ``4`` as an epoch and ``4.s200`` as a position; None for any other text."""
    match = _POSITION.fullmatch(text)
    if match is None:
        return None
    return Position(int(match[1]), int(match[2])) if match[2] else int(match[1])


def is_position(text: object) -> bool:
    """Whether a text names a position in the middle of an epoch."""
    return isinstance(text, str) and isinstance(parse_position(text), Position)


def read_position(value: object) -> int | None:
    """Read an epoch or a position, which may be a pair or ``"4.s200"``; None if it is neither."""
    if isinstance(value, str):
        return parse_position(value) if is_position(value) else None
    if isinstance(value, tuple) and len(value) == 2 and all(is_whole(it, 0) for it in value):
        return Position(*value) if value[1] else int(value[0])
    if isinstance(value, Position):
        return value
    return int(value) if is_whole(value, 0) else None  # type: ignore[call-overload]


def epoch_to_json(epoch: int) -> int | str:
    """An epoch or a position as JSON; `epoch_from_json` reads it."""
    return str(epoch) if isinstance(epoch, Position) else epoch


def plain(value: Any) -> Any:
    """Plain data with all its positions as JSON."""
    if isinstance(value, dict):
        return {epoch_to_json(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return epoch_to_json(value)


def to_json(value: Any) -> Any:
    """Any value as strict JSON, without credentials; NaN and infinities become null."""
    if isinstance(value, Mapping):
        return {to_json(str(key)): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, int):
        return epoch_to_json(value)
    if value is None:
        return value
    unpacked = value.item() if hasattr(value, "item") and getattr(value, "size", 0) == 1 else value
    return str(value) if unpacked is value else to_json(unpacked)


def epoch_from_json(value: int | str) -> int:
    """Undo `epoch_to_json`; raises ValueError for a text that is no position."""
    if not isinstance(value, str):
        return value
    found = parse_position(value)
    if not isinstance(found, Position):
        raise ValueError(f"{value!r:.80} is no position in an epoch")
    return found
