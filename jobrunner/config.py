"""Configuration, through Dask's: ``jobrunner.yaml`` holds the defaults, and what each is for."""

from __future__ import annotations

import math
from contextlib import suppress
from importlib.resources import files

import dask
import dask.utils
import yaml

from jobrunner.errors import DefinitionError


def get_seconds(key: str) -> float:
    """Read a duration.

    Parameters
    ----------
    key : str
        Below ``jobrunner``, such as ``"checkpoint.heartbeat-seconds"``. Anything that
        `dask.config` knows sets it: a YAML file, ``DASK_JOBRUNNER__CHECKPOINT__...``, or
        ``dask.config.set``.

    Returns
    -------
    float
        Seconds.

    Raises
    ------
    DefinitionError
        It is no number from 0 on.
    """
    return _number(key)


def get_share(key: str) -> float:
    """Read a share, such as ``"memory-share"``; see `get_seconds`."""
    return _number(key)


def get_count(key: str) -> int:
    """Read a number of things, such as ``"direct-workers"``; see `get_seconds`."""
    return int(_number(key))


def get_bytes(key: str, whole: int) -> int:
    """Read an amount of memory, such as ``"rollback-memory"``; see `get_seconds`.

    Parameters
    ----------
    key : str
    whole : int
        What a number up to 1 is a share of, in bytes.

    Raises
    ------
    DefinitionError
        It is no amount of memory.
    """
    value = dask.config.get(f"jobrunner.{key}")
    nbytes = math.nan
    with suppress(TypeError, ValueError):
        nbytes = float(value)
    if math.isnan(nbytes) and isinstance(value, str):
        with suppress(ValueError):
            nbytes = float(dask.utils.parse_bytes(value))
    if isinstance(value, bool) or not 0 <= nbytes < math.inf:
        raise DefinitionError(
            f"jobrunner.{key} in Dask's configuration is a share from 0 to 1, a number of bytes, "
            f"or a text such as '2 GiB'; got {value!r}."
        )
    return int(nbytes * whole if nbytes <= 1 else nbytes)


def _number(key: str) -> float:
    value = dask.config.get(f"jobrunner.{key}")
    number = math.nan
    with suppress(TypeError, ValueError):
        number = float(value)
    if isinstance(value, bool) or not 0 <= number < math.inf:
        raise DefinitionError(
            f"jobrunner.{key} in Dask's configuration is a number from 0 on; got {value!r}."
        )
    return number


_DEFAULTS = yaml.safe_load(files("jobrunner").joinpath("jobrunner.yaml").read_text("utf-8"))
dask.config.update_defaults(_DEFAULTS)
