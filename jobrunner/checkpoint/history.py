"""What all runs of a directory have recorded, read from its log."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from jobrunner.checkpoint.log import (
    CommitEntry,
    LogEntry,
    Record,
    RewindEntry,
    given_up_by,
    read_details,
    strict_json,
)
from jobrunner.define import Rule
from jobrunner.errors import DefinitionError
from jobrunner.positions import Position, PublicPosition
from jobrunner.texts import get_logger

if TYPE_CHECKING:
    from pandas import DataFrame

logger = get_logger(__name__)

MOST_METADATA_BYTES = 64 << 10

Metadata = Mapping[str, Any] | Callable[[PublicPosition], Mapping[str, Any]]
"""What users add to the records: the same to all, or a function of the epoch."""

METADATA = Rule(
    "a dict of JSON values, or a function of the epoch that returns one",
    lambda value: (
        callable(value) or (isinstance(value, Mapping) and read_metadata(value) is not None)
    ),
)


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


def read_metadata(metadata: Metadata, epoch: Position | None = None) -> dict[str, Any]:
    """The metadata for the record of an epoch; raises DefinitionError if it cannot be recorded."""
    where = "metadata" if epoch is None else f"metadata({epoch})"
    values = metadata
    if not isinstance(values, Mapping):
        values = values((epoch or Position(0)).public)
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise DefinitionError(
            f"{where} must be a dict whose keys are str; got {type(values).__name__}: "
            f"{values!r:.200}."
        )
    plain = as_json(values, f"The {where}")
    size = len(json.dumps(plain))
    if size > MOST_METADATA_BYTES:
        raise DefinitionError(
            f"The {where} of a checkpoint takes {size} bytes, and at most {MOST_METADATA_BYTES} are "
            f"recorded with each epoch. Keep large values in blobs, or in a file whose name you "
            f"record."
        )
    return dict(values)


def read_history(entries: Iterable[LogEntry], *, set_aside: bool = False) -> list[dict[str, Any]]:
    """What the records say, in the order of epochs; see `MultiNodeCheckpointManager.history`."""
    counting: dict[Position, dict[str, Any]] = {}
    given_up: list[dict[str, Any]] = []
    for entry in entries:
        if isinstance(entry, RewindEntry):
            epochs = given_up_by(entry, list(counting))
            given_up += [{**counting.pop(epoch), "is_set_aside": True} for epoch in epochs]
        if isinstance(entry, CommitEntry):
            for record in entry.records:
                row = _row(entry, record)
                if row is not None:
                    counting[record.at] = row
    rows = [*given_up, *counting.values()] if set_aside else counting.values()
    return sorted(rows, key=lambda row: (Position.of(row["epoch"]), row["time"]))


def _row(entry: CommitEntry, record: Record) -> dict[str, Any] | None:
    try:
        details = read_details(record.details)
    except (ValueError, RecursionError) as error:
        logger.warning("The record of epoch %s cannot be read: %s", record.at, error)
        return None
    return {
        "epoch": record.at.public,
        "step": record.at.step,
        "time": entry.time,
        "run": entry.run,
        "metrics": details.metrics,
        "metadata": details.metadata,
        "is_set_aside": False,
    }


def frame_of(rows: Iterable[Mapping[str, Any]]) -> DataFrame:
    """The metrics of whole epochs as a table."""
    try:
        import pandas as pd
    except ImportError as error:
        raise DefinitionError(
            f"metrics() returns a pandas.DataFrame, and pandas cannot be imported here: {error}. "
            f"Install it with `pip install 'dask-jobrunner[pandas]'`, or call history(), which "
            f"returns the same as a list of dicts."
        ) from error
    whole = [row for row in rows if not row["step"]]
    index = pd.Index([row["epoch"] for row in whole], name="epoch")
    return pd.DataFrame([row["metrics"] for row in whole], index=index)
