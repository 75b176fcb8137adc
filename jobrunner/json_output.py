"""JSON for people and other programs: positions as text, nothing that is not strict JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from jobrunner.positions import Position
from jobrunner.texts import without_credentials


def to_json(value: Any) -> Any:
    """Any value as strict JSON, without credentials; NaN and infinities become null."""
    if isinstance(value, Position):
        return value.to_json()
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {to_json(str(key)): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return without_credentials(value)
    if value is None or isinstance(value, int):
        return value
    # A number or an array of one item, of NumPy or a library like it.
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:
        return to_json(value.item())
    return str(value)
