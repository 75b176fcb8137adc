"""A snapshot: the log, read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobrunner import Position
from jobrunner.checkpoint.log.entries import CommitEntry, PinEntry, Record, Store
from jobrunner.checkpoint.log.handler import FileMetadataHandler
from jobrunner.checkpoint.log.log_writer import LogWriter
from jobrunner.testing import FaultyFiles


@pytest.fixture
def log(tmp_path: Path) -> LogWriter:
    """The log of a run that has recorded epoch 1."""
    handler = FileMetadataHandler(FaultyFiles(sync=False))
    handler.set_params(str(tmp_path), ())
    log = LogWriter(handler, str(tmp_path))
    log.take("r", lambda state: {"nodes": ["a"], "info": {"note": "first"}})
    log.begin(Position(9))
    record_epoch(log, Position(1))
    return log


def record_epoch(log: LogWriter, at: Position) -> None:
    stores = {"a": Store(f"a.{at}", "", 8)}
    details = {"metrics": {"loss": at.epoch}}
    log.append(CommitEntry, begin=1, run_number=0, records=[Record(at, stores, details=details)])


def test_later_entries_do_not_change_a_snapshot(log: LogWriter) -> None:
    before = log.snapshot()
    record_epoch(log, Position(2))
    log.note(PinEntry, lambda state: {"epoch": Position(2), "label": "best"})
    after = log.snapshot()
    assert (before.epochs, before.latest, before.pins) == ([Position(1)], Position(1), {})
    assert (after.epochs, after.latest) == ([Position(1), Position(2)], Position(2))
    assert after.pins == {Position(2): ("best",)}
    with pytest.raises(AttributeError, match="immutable"):
        before.number = 3  # type: ignore[misc]


def test_a_snapshot_reads_records_and_infos_but_not_the_log(log: LogWriter) -> None:
    record_epoch(log, Position(2))
    snapshot = log.snapshot()
    record = snapshot.record(Position(1))
    assert (record.at, record.number, record.details.metrics) == (Position(1), 2, {"loss": 1})
    assert snapshot.info(record.run_number) == {"note": "first"}
    assert snapshot.info(None) == {}
    assert snapshot.entry(3).number == 3
