"""What callbacks share: the metrics that others can show, and libraries that may be missing."""

from __future__ import annotations

import importlib
import re
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from jobrunner.define import Image, instance
from jobrunner.errors import DefinitionError

MAPPING = instance("a mapping", Mapping)


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """The metrics that are numbers, flags or strings; not arrays and images."""
    return {name: it for name, it in metrics.items() if isinstance(it, bool | int | float | str)}


def numbers(seconds: float, metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an epoch that are numbers or flags, as floats, and its ``seconds``."""
    plain = plain_metrics(metrics).items()
    found = {name: float(it) for name, it in plain if not isinstance(it, str)}
    return {**found, "seconds": seconds}


def images(metrics: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The pixels of images, of shape (height, width, 3 or 4)."""
    found = {}
    for name, it in metrics.items():
        if isinstance(it, Image):
            pixels = it.pixels if it.pixels.ndim == 3 else it.pixels[:, :, np.newaxis]
            found[name] = np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels
    return found


def arrays(metrics: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The real numbers of arrays that are finite, if there are any."""
    real = {
        name: it[np.isfinite(it)].astype(float)
        for name, it in metrics.items()
        if isinstance(it, np.ndarray) and it.dtype.kind in "biuf"
    }
    return {name: it for name, it in real.items() if it.size}


def new_id() -> str:
    """The id of a run elsewhere, of its own."""
    return uuid.uuid4().hex


def known_id(state: Mapping[str, Any]) -> str | None:
    """The id in the state from a record; None if it contains none that `new_id` can have made."""
    found = state.get("id")
    return found if isinstance(found, str) and re.fullmatch("[0-9a-f]{32}", found) else None


def require(module: str, extra: str, who: str) -> Any:
    """Import a library; raises `DefinitionError`, which names the extra, if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DefinitionError(
            f"{who} needs {module}, which cannot be imported here: {error}. Install it with "
            f"`pip install 'dask-jobrunner[{extra}]'`."
        ) from error
