"""Read the JSON documents of a checkpoint as typed values, checked once."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import msgspec

from jobrunner.define import MOST_DIGITS
from jobrunner.errors import CheckpointCorruptError

T = TypeVar("T")

EpochJson = (
    Annotated[int, msgspec.Meta(ge=0, lt=10**18)]
    | Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,18}\.s[0-9]{1,18}\Z")]
)
if TYPE_CHECKING:
    from jobrunner.positions import Position

    EpochKey = Position
else:  # as in JSON: each class makes it a `Position`
    EpochKey = EpochJson

_described: set[Any] = set()
_describing = threading.Lock()


def described(kind: type[T]) -> type[T]:
    """Return `kind`, once msgspec knows its fields: two threads that use it first would crash."""
    if kind not in _described:
        with _describing:
            msgspec.json.Decoder(kind)
        _described.add(kind)
    return kind


def parse(data: bytes | str, path: str, *, advice: str) -> Any:
    """Read JSON strictly: no key twice, no NaN, no bytes that are not UTF-8.

    `path` and `advice` are for messages. Raises `CheckpointCorruptError` if it is not such JSON.
    """
    with contextlib.suppress(ValueError, RecursionError):
        if not _has_many_digits(data):
            tree = msgspec.json.decode(data)
            if msgspec.json.encode(tree) == data:
                return tree
    tree = None  # frees it
    try:
        return json.loads(
            data,
            object_pairs_hook=_unique,
            parse_constant=_refuse,
            parse_float=_finite,
            parse_int=_short,
        )
    except RecursionError:
        what = "it is nested too deep"
    except ValueError as error:  # also bytes that are not UTF-8
        what = str(error)
    raise CheckpointCorruptError(f"{path} is not valid JSON: {what}. {advice}", path=path)


def convert(tree: object, kind: type[T], path: str, *, advice: str) -> T:
    """Convert what `parse` returned to `kind`, with exactly its fields.

    Raises `CheckpointCorruptError` if a field is missing, unknown, of another type or out of range.
    """
    try:
        return msgspec.convert(tree, described(kind))
    except (ValueError, RecursionError) as error:  # also of a key with a lone surrogate
        raise _invalid(error, path, advice) from None


def _invalid(error: Exception, path: str, advice: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"{path} has an invalid field: {error}. {advice}", path=path)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} appears twice")
    return found


def _has_many_digits(data: bytes | str) -> bool:
    """Whether there may be more than `MOST_DIGITS` in a row, perhaps in a string."""
    size = MOST_DIGITS // 2  # of pieces, one of which would be digits only
    return any(data[at : at + size].isdigit() for at in range(0, len(data) - size + 1, size))


def _short(digits: str) -> int:
    if (count := len(digits.lstrip("-"))) > MOST_DIGITS:
        raise ValueError(f"an integer has {count:,} digits; expected at most {MOST_DIGITS:,}")
    return int(digits)


def _finite(digits: str) -> float:
    return value if math.isfinite(value := float(digits)) else _refuse(digits)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")
