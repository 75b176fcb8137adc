"""JSON documents of a checkpoint: bytes become typed values here, checked once."""

from __future__ import annotations

import json
from typing import Any, NoReturn, TypeVar

import msgspec

from jobrunner.errors import CheckpointCorruptError

T = TypeVar("T")


class Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What a JSON object holds: subclasses list its fields, with types and limits."""


def decode(data: bytes | str, kind: type[T], path: str, *, advice: str) -> T:
    """Read a JSON document.

    Parameters
    ----------
    data : bytes or str
    kind : type
        What it must be: a `Document`, or any type that msgspec knows.
    path : str
        Where it lies, for the error.
    advice : str
        What to do if it is damaged, for the error.

    Raises
    ------
    CheckpointCorruptError
        It is not JSON, or a field is missing, unknown, named twice, of another type or out of
        range. Names the file and the field.
    """
    return convert(parse(data, path, advice=advice), kind, path, advice=advice)


def parse(data: bytes | str, path: str, *, advice: str) -> Any:
    """Read JSON strictly: no key twice, no NaN, no bytes that are not UTF-8; see `decode`."""
    try:
        return json.loads(data, object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        what = "it is nested too deep"
    except ValueError as error:  # also bytes that are not UTF-8, and integers of 4,300 digits
        what = str(error)
    raise CheckpointCorruptError(f"{path} is not valid JSON: {what}. {advice}", path=path)


def convert(tree: object, kind: type[T], path: str, *, advice: str) -> T:
    """Check what `parse` gave; see `decode`."""
    try:
        return msgspec.convert(tree, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise CheckpointCorruptError(
            f"{path} has an invalid field: {error}. {advice}", path=path
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")
