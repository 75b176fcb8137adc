"""Settings in Dask's configuration; ``jobrunner.yaml`` documents them and holds the defaults."""

from __future__ import annotations

import math
from contextlib import suppress
from importlib.resources import files

import dask
import dask.utils
import yaml

from jobrunner.errors import DefinitionError


def get_seconds(key: str) -> float:
    """Read a duration in seconds.

    Parameters
    ----------
    key : str
        A key below ``jobrunner``, such as ``"checkpoint.heartbeat-seconds"``. Set it by any means
        of `dask.config`: a YAML file, ``DASK_JOBRUNNER__CHECKPOINT__...``, ``dask.config.set``.

    Raises
    ------
    DefinitionError
        The value is not a number, or negative.
    """
    return _number(key)


def get_share(key: str) -> float:
    """Read a share, such as ``"memory-share"``; see `get_seconds`."""
    return _number(key)


def get_count(key: str) -> int:
    """Read an integer, such as ``"direct-workers"``; see `get_seconds`."""
    return int(_number(key))


def get_bytes(key: str, whole: int) -> int:
    """Read an amount of memory, such as ``"rollback-memory"``; see `get_seconds`.

    Parameters
    ----------
    key : str
    whole : int
        All of the memory, in bytes. A value up to 1 is a share of it.

    Raises
    ------
    DefinitionError
        The value is not an amount of memory.
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
            f"jobrunner.{key} in Dask's configuration must be a share from 0 to 1, a number of "
            f"bytes, or a text such as '2 GiB'; got {value!r}."
        )
    return int(nbytes * whole if nbytes <= 1 else nbytes)


def _number(key: str) -> float:
    value = dask.config.get(f"jobrunner.{key}")
    number = math.nan
    with suppress(TypeError, ValueError):
        number = float(value)
    if isinstance(value, bool) or not 0 <= number < math.inf:
        raise DefinitionError(
            f"jobrunner.{key} in Dask's configuration must be a number of at least 0; got {value!r}."
        )
    return number


_DEFAULTS = yaml.safe_load(files("jobrunner").joinpath("jobrunner.yaml").read_text("utf-8"))
dask.config.update_defaults(_DEFAULTS)
