"""Settings in Dask's configuration; ``jobrunner.yaml`` documents them and sets the defaults.

A key is a path below ``jobrunner``, for example ``"checkpoint.heartbeat-seconds"``. Users set it by
any means of `dask.config`: a YAML file, ``DASK_JOBRUNNER__CHECKPOINT__...``, ``dask.config.set``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.resources import files
from typing import TypeVar

import dask
import dask.utils
import yaml

from jobrunner.errors import DefinitionError
from jobrunner.texts import format_bytes, listed

Choice = TypeVar("Choice", bool, str)


def get_number(key: str) -> float:
    """Read a number >= 0, or of a key in seconds a duration; raises `DefinitionError` otherwise."""
    value = number = dask.config.get(f"jobrunner.{key}")
    expected = "a number >= 0"
    if key.endswith("-seconds"):
        expected = "a number of seconds >= 0, or a duration"
        with suppress(ValueError, AttributeError):
            number = read_seconds(value)
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not 0 <= number < math.inf:
        raise DefinitionError(
            f"jobrunner.{key} in Dask's configuration must be {expected}; got {value!r}."
        )
    return float(number)


def read_seconds(text: str) -> float:
    """Read a duration as Dask does, such as "30s" or "1.5 hours", and "10min" too; else ValueError."""
    words = re.sub(r"(?<=[0-9 ])min$", "minutes", text.strip())
    try:
        return float(dask.utils.parse_timedelta(words, default=False))
    except (IndexError, KeyError, OverflowError, ValueError):
        raise ValueError(f"{text!r:.80} is no duration with a unit") from None


def get_choice(key: str, *choices: Choice) -> Choice:
    """Read one of some values; raises `DefinitionError` for anything else."""
    value = dask.config.get(f"jobrunner.{key}")
    for choice in choices:
        if value == choice:
            return choice
    raise DefinitionError(
        f"jobrunner.{key} in Dask's configuration must be {' or '.join(map(str, choices))}; got "
        f"{value!r}."
    )


def largest(sizes: Mapping[str, int], most: int = 10) -> str:
    """List the largest nodes and their sizes, for a message."""
    names = sorted(sizes, key=sizes.__getitem__, reverse=True)
    return listed([f"{name!r} {format_bytes(sizes[name])}" for name in names], most)


_DEFAULTS = yaml.safe_load(files("jobrunner").joinpath("jobrunner.yaml").read_text("utf-8"))
dask.config.update_defaults(_DEFAULTS)
