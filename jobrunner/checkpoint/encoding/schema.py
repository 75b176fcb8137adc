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

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
EpochJson = (
    Annotated[int, msgspec.Meta(ge=0, lt=10**18)]
    | Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,18}\.s[0-9]{1,18}\Z")]
)
if TYPE_CHECKING:
    from jobrunner.positions import Position

    EpochKey = Position
else:  # as in JSON: each class makes it a `Position`
    EpochKey = EpochJson
Length = Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]


class Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A JSON object; subclasses list its fields, with types and limits."""


_described: set[Any] = set()
_describing = threading.Lock()


def described(kind: type[T]) -> type[T]:
    """Return `kind`, once msgspec knows its fields: two threads that use it first would crash."""
    if kind not in _described:
        with _describing:
            msgspec.json.Decoder(kind)
        _described.add(kind)
    return kind


def read_document(data: bytes | str, kind: type[T], path: str, *, advice: str) -> T:
    """Read a JSON document as `kind`, with exactly its fields; `path` and `advice` are for messages.

    Raises `CheckpointCorruptError` if it is not JSON, or a field is missing, unknown, repeated, of
    another type or out of range.
    """
    try:
        document = msgspec.json.decode(data, type=described(kind))
        # Much faster than `parse`; what is encoded again has no key twice.
        if not _has_many_digits(data) and msgspec.json.encode(document) == data:
            return document
    except msgspec.ValidationError as error:
        raise _invalid(error, path, advice) from None
    except (ValueError, RecursionError):
        pass
    return convert(parse(data, path, advice=advice), kind, path, advice=advice)


def parse(data: bytes | str, path: str, *, advice: str) -> Any:
    """Read JSON strictly: no key twice, no NaN, no bytes that are not UTF-8; see `read_document`."""
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
    """Convert what `parse` returned to `kind`; see `read_document`."""
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
