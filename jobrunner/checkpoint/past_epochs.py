"""What all runs of a directory have recorded of epochs, read from its log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from jobrunner.checkpoint.log import (
    CommitEntry,
    LogEntry,
    RewindEntry,
    given_up_by,
    read_details,
    strict_json,
)
from jobrunner.errors import DefinitionError
from jobrunner.positions import Position
from jobrunner.texts import get_logger

if TYPE_CHECKING:
    from pandas import DataFrame

logger = get_logger(__name__)

_MOST_METADATA_BYTES = 64 << 10


def as_json(value: Mapping[str, Any], subject: str) -> Any:
    """`value` as strict JSON; raises DefinitionError if that is impossible."""
    try:
        strict = strict_json(value)
        msgspec.json.encode(strict)
    except (TypeError, ValueError) as error:
        raise DefinitionError(
            f"{subject} of a checkpoint must be JSON (str, numbers, bool, None, lists and dicts of "
            f"them): {error}."
        ) from error
    return strict


def check_metadata(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what users add to the records; raises DefinitionError if it cannot be recorded."""
    size = len(msgspec.json.encode(as_json(metadata, "The metadata")))
    if size > _MOST_METADATA_BYTES:
        raise DefinitionError(
            f"The metadata of a checkpoint takes {size} bytes, and at most {_MOST_METADATA_BYTES} "
            f"are recorded with each epoch. Keep large values in blobs, or in a file whose name "
            f"you record."
        )
    return metadata


def read_past_epochs(entries: Iterable[LogEntry]) -> list[dict[str, Any]]:
    """What the records say, in the order of epochs; see `MultiNodeCheckpointManager.past_epochs`."""
    rows: dict[Position, dict[str, Any]] = {}
    for entry in entries:
        if isinstance(entry, RewindEntry):
            for epoch in given_up_by(entry, list(rows)):
                del rows[epoch]
        if not isinstance(entry, CommitEntry):
            continue
        for record in entry.records:
            try:
                details = read_details(record.details)
            except (ValueError, RecursionError) as error:
                logger.warning("The record of epoch %s cannot be read: %s", record.at, error)
                continue
            rows[record.at] = {
                "epoch": record.at.public,
                "step": record.at.step,
                "time": entry.time,
                "run": entry.run,
                "metrics": details.metrics,
                "metadata": details.metadata,
            }
    return [rows[at] for at in sorted(rows)]


def frame_of(rows: Iterable[Mapping[str, Any]]) -> DataFrame:
    """The metrics of whole epochs as a table."""
    try:
        import pandas as pd  # slow to import, and seldom needed
    except ModuleNotFoundError as error:
        advice = "The table of metrics needs pandas: pip install 'dask-jobrunner[pandas]'."
        raise ModuleNotFoundError(advice) from error

    whole = [row for row in rows if not row["step"]]
    index = pd.Index([row["epoch"] for row in whole], name="epoch")
    return pd.DataFrame([row["metrics"] for row in whole], index=index)
