"""Settings in Dask's configuration; ``jobrunner.yaml`` documents them and sets the defaults.

A key is a path below ``jobrunner``, for example ``"checkpoint.heartbeat-seconds"``. Users set it by
any means of `dask.config`: a YAML file, ``DASK_JOBRUNNER__CHECKPOINT__...``, ``dask.config.set``.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.resources import files
from typing import Any

import dask
import dask.utils
import yaml

from jobrunner.errors import DefinitionError

format_bytes = dask.utils.format_bytes
"""For messages of modules that do not import Dask."""


def get_number(key: str) -> float:
    """Read a number >= 0, or of a key in seconds a duration; raises `DefinitionError` otherwise."""
    if key.endswith("-seconds"):
        return _read(key, "a number of seconds >= 0, or a duration", float, read_seconds)
    return _read(key, "a number >= 0", float)


def read_seconds(text: str) -> float:
    """Read a duration as Dask does, such as "30s" or "1.5 hours", and "10min" too; else ValueError."""
    words = re.sub(r"(?<=[0-9 ])min$", "minutes", text.strip())
    try:
        return float(dask.utils.parse_timedelta(words, default=False))
    except (IndexError, KeyError, OverflowError, ValueError):
        raise ValueError(f"{text!r:.80} is no duration with a unit") from None


def get_flag(key: str) -> bool:
    """Read true or false; raises `DefinitionError` for anything else."""
    value = dask.config.get(f"jobrunner.{key}")
    if not isinstance(value, bool):
        raise DefinitionError(
            f"jobrunner.{key} in Dask's configuration must be true or false; got {value!r}."
        )
    return value


def get_choice(key: str, *choices: str) -> str:
    """Read one of some words; raises `DefinitionError` for anything else."""
    value = dask.config.get(f"jobrunner.{key}")
    if value not in choices:
        raise DefinitionError(
            f"jobrunner.{key} in Dask's configuration must be {' or '.join(choices)}; got {value!r}."
        )
    return str(value)


def _read(key: str, expected: str, *parsers: Callable[[Any], float]) -> float:
    value = dask.config.get(f"jobrunner.{key}")
    number = math.nan
    for parse in parsers:
        with suppress(AttributeError, TypeError, ValueError):
            number = parse(value)
            break
    if isinstance(value, bool) or not 0 <= number < math.inf:
        raise DefinitionError(
            f"jobrunner.{key} in Dask's configuration must be {expected}; got {value!r}."
        )
    return number


def largest(sizes: Mapping[str, int], count: int = 10) -> str:
    """List the largest nodes and their sizes, for a message."""
    names = heapq.nlargest(count, sizes, key=sizes.__getitem__)
    shown = ", ".join(f"{name!r} {format_bytes(sizes[name])}" for name in names)
    more = f" and {len(sizes) - count} more" if len(sizes) > count else ""
    return f"{shown or 'none'}{more}"


_DEFAULTS = yaml.safe_load(files("jobrunner").joinpath("jobrunner.yaml").read_text("utf-8"))
dask.config.update_defaults(_DEFAULTS)
