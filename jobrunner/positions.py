"""Positions of a run: how many whole epochs it has run, and how many steps of the next one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import total_ordering
from numbers import Integral
from typing import Any, NoReturn

from jobrunner.errors import DefinitionError

BEST = re.compile(r"best:(?P<metric>.+?)(?::(?P<mode>min|max))?", re.S)
"""The recorded epoch with the lowest value of a metric, or with the highest."""

_POSITION = re.compile(r"(0|[1-9][0-9]{0,17})(?:\.s([1-9][0-9]{0,17}))?")


@total_ordering
class Position:
    """How far a run is: `epoch` whole epochs, and `step` steps of the next one.

    Parameters
    ----------
    epoch : int
        At least 0, which is "after init".
    step : int
        At least 0; 0 after a whole epoch.

    Raises
    ------
    DefinitionError
        An argument is invalid.

    Notes
    -----
    Positions are ordered among themselves: one within an epoch comes after its whole epochs and
    before the next. Where the library returns one, it returns a plain int for a whole epoch, which
    is what `public` is; `Position.of` reads both.

    Examples
    --------
    >>> sorted([Position(5), Position(4, 200), Position(4), Position(4, 20)])
    [Position(4), Position(4, 20), Position(4, 200), Position(5)]
    >>> print(Position(4, 200))
    4.s200
    >>> Position(4).public
    4
    """

    # No dataclass: msgspec would read and write it as a JSON object, not as `to_json` does.
    __slots__ = ("epoch", "step")
    epoch: int
    step: int

    def __init__(self, epoch: int, step: int = 0) -> None:
        # Most are made from the log, with plain ints.
        if not (type(epoch) is int and type(step) is int and epoch >= 0 <= step):
            for name, value in (("epoch", epoch), ("step", step)):
                if not is_whole(value, 0):
                    raise DefinitionError(
                        f"Position: {name} must be an int >= 0; got {value!r:.200}."
                    )
            epoch, step = int(epoch), int(step)
        object.__setattr__(self, "epoch", epoch)
        object.__setattr__(self, "step", step)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"A Position cannot be changed: {name}")

    def __eq__(self, position: object) -> bool:
        if not isinstance(position, Position):
            return NotImplemented
        return self.epoch == position.epoch and self.step == position.step

    def __lt__(self, position: Position) -> bool:
        if not isinstance(position, Position):
            return NotImplemented
        return (self.epoch, self.step) < (position.epoch, position.step)

    def __hash__(self) -> int:
        return hash((self.epoch, self.step))

    def __reduce__(self) -> tuple[type[Position], tuple[int, int]]:
        return Position, (self.epoch, self.step)

    @classmethod
    def of(cls, epoch: EpochLike) -> Position:
        """Read an epoch (4), a pair (4, 200), a text ("4.s200") or a position.

        Raises
        ------
        DefinitionError
            The value is none of these.
        """
        position = read_position(epoch)
        if position is None:
            raise DefinitionError(
                f"Expected an epoch (an int >= 0) or a Position such as (4, 200) or '4.s200'; "
                f"got {epoch!r:.200}."
            )
        return position

    def to_json(self) -> int | str:
        """The position as JSON: an int after a whole epoch, else a text such as ``4.s200``."""
        return str(self) if self.step else self.epoch

    @property
    def public(self) -> PublicPosition:
        """What users get: an int after a whole epoch."""
        return self if self.step else self.epoch

    def __str__(self) -> str:
        return f"{self.epoch}.s{self.step}" if self.step else str(self.epoch)

    def __repr__(self) -> str:
        return f"Position({self.epoch}, {self.step})" if self.step else f"Position({self.epoch})"


PublicPosition = int | Position
"""How users get positions: a whole epoch as an int."""

EpochLike = int | tuple[int, int] | str | Position
"""How callers name a checkpoint: an epoch (4), a `Position`, its pair (4, 200) or text "4.s200".

Where recorded checkpoints are looked up, also "latest", the newest one; and "best:loss", the whole
epoch with the lowest loss, or "best:accuracy:max", the one with the highest accuracy.
"""


def parse_position(text: str) -> Position | None:
    """Read ``4`` or ``4.s200``, as in the names of stores; None for any other text."""
    match = _POSITION.fullmatch(text)
    if match is None:
        return None
    return Position(int(match[1]), int(match[2] or 0))


def position_from_json(value: int | str) -> Position:
    """Undo `Position.to_json`; raises ValueError for what it does not write."""
    if isinstance(value, str):
        position = parse_position(value)
        if position is None or not position.step:
            raise ValueError(f"{value!r:.80} is no position in an epoch")
        return position
    if not 0 <= value < 10**18:
        raise ValueError(f"{value!r:.80} is no epoch")
    return Position(value)


def is_whole(value: object, least: int) -> bool:
    """Whether it is an int that is at least `least`, also one of NumPy; no bool."""
    if type(value) is int:  # much faster
        return value >= least
    is_int = isinstance(value, Integral) and not isinstance(value, bool)
    return is_int and int(value) >= least  # type: ignore[call-overload]


def read_position(value: object) -> Position | None:
    """Read what `EpochLike` allows; None if it is something else."""
    if isinstance(value, Position):
        return value
    if isinstance(value, str):
        position = parse_position(value)
        # Whole epochs are written as ints: "4" is more likely a mistake than an epoch.
        return position if position is not None and position.step else None
    if isinstance(value, tuple):
        if len(value) == 2 and is_whole(value[0], 0) and is_whole(value[1], 0):
            return Position(*value)
        return None
    if is_whole(value, 0):
        return Position(value)  # type: ignore[arg-type]
    return None


def read_epoch(value: object) -> Position | str | None:
    """Read what `EpochLike` allows where checkpoints are looked up; None if it is something else."""
    if isinstance(value, str) and (value == "latest" or BEST.fullmatch(value)):
        return value
    return read_position(value)


def describe_position(at: Position, steps_per_epoch: int | None) -> dict[str, Any]:
    """What a recorded checkpoint contains, for ``--json``."""
    return {
        "epoch": at.public,
        "whole_epochs": at.epoch,
        "step": at.step,
        "steps_per_epoch": steps_per_epoch if at.step else None,
    }


def name_step(step: int, steps_per_epoch: int | None) -> str:
    """Name a step, for a message; how many there are may not be recorded."""
    if steps_per_epoch is None:
        return f"step {step}"
    return f"step {step} of {steps_per_epoch}"


def format_ranges(numbers: Iterable[PublicPosition]) -> str:
    """Write ascending numbers or positions as text, three or more whole ones in a row as a range."""
    ranges: list[list[Position]] = []
    next_in_row = None
    for number in numbers:
        at = Position.of(number)
        if at == next_in_row:
            ranges[-1].append(at)
        else:
            ranges.append([at])
        next_in_row = None
        if not at.step:
            next_in_row = Position(at.epoch + 1)
    texts = []
    for items in ranges:
        if len(items) > 2:
            texts.append(f"{items[0]} to {items[-1]}")
        else:
            texts.extend(map(str, items))
    return ", ".join(texts) or "none"
