"""Configuration, through Dask's: ``jobrunner.yaml`` holds the defaults, and what each is for."""

from __future__ import annotations

from importlib.resources import files

import dask
import yaml


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
    """
    return _number(key)


def get_share(key: str) -> float:
    """Read a share, such as ``"memory-share"``; see `get_seconds`."""
    return _number(key)


def get_count(key: str) -> int:
    """Read a number of things, such as ``"direct-workers"``; see `get_seconds`."""
    return int(_number(key))


def _number(key: str) -> float:
    return float(dask.config.get(f"jobrunner.{key}"))


_DEFAULTS = yaml.safe_load(files("jobrunner").joinpath("jobrunner.yaml").read_text("utf-8"))
dask.config.update_defaults(_DEFAULTS)
