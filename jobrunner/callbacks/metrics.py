"""What callbacks share: the metrics that others can show, and libraries that may be missing."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from jobrunner.errors import DefinitionError


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """The metrics that are numbers, flags or strings; not arrays and images."""
    return {name: it for name, it in metrics.items() if isinstance(it, bool | int | float | str)}


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers or flags, as floats."""
    plain = plain_metrics(metrics).items()
    return {name: float(it) for name, it in plain if not isinstance(it, str)}


def require(module: str, extra: str, who: str) -> Any:
    """Import a library; raises `DefinitionError`, which names the extra, if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DefinitionError(
            f"{who} needs {module}, which cannot be imported here: {error}. Install it with "
            f"`pip install 'dask-jobrunner[{extra}]'`."
        ) from error
