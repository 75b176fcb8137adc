"""Logs have one line for each epoch, whatever happened to the runs that wrote them."""

import csv
import errno
import json
import os
import resource
from pathlib import Path

import pandas as pd
import pytest

from jobrunner import JobRunner, MultiNodeCheckpointManager, Position, SaveEvery, Task, current_task
from jobrunner.callbacks import EpochLog
from tests.callbacks.jobs import LOSSES, DiesAfter, build


@pytest.fixture(params=["csv", "jsonl"])
def path(tmp_path, request):
    return tmp_path / "logs" / f"run.{request.param}"


@pytest.fixture
def manager(tmp_path):
    return MultiNodeCheckpointManager(tmp_path / "ckpt", save=SaveEvery(epochs=2))


def read(path):
    """The epochs and their losses."""
    text = Path(path).read_text()
    if text.startswith("epoch,"):
        rows = list(csv.DictReader(text.splitlines()))
    else:
        rows = [json.loads(line) for line in text.splitlines()]
    assert all(float(row["seconds"]) >= 0 for row in rows)
    return [(int(row["epoch"]), float(row["loss"])) for row in rows]


WHOLE = list(enumerate(LOSSES, start=1))


def test_rows_of_epochs_that_run_again_are_replaced(inproc_session, path, manager):
    with pytest.raises(InterruptedError):
        JobRunner(build(), manager, callbacks=[EpochLog(path), DiesAfter(5)]).run(inproc_session)
    assert read(path) == WHOLE[:5]
    assert manager.latest() == 4
    with path.open("a") as file:
        file.write('{"epoch": 6, "sec' if path.suffix == ".jsonl" else "6,0.2")  # torn by a crash
    JobRunner(build(), manager, callbacks=[EpochLog(path)]).run(inproc_session)
    assert read(path) == WHOLE


def test_a_resume_within_an_epoch_replaces_its_row(inproc_session, path, tmp_path):
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt", save=SaveEvery(steps=1))
    job = build(4, steps_per_epoch=2)
    with pytest.raises(InterruptedError):
        JobRunner(job, manager, callbacks=[EpochLog(path), DiesAfter(3)]).run(inproc_session)
    assert [epoch for epoch, _ in read(path)] == [1, 2, 3]
    assert manager.latest() == Position(2, 1)
    JobRunner(job, manager, callbacks=[EpochLog(path)]).run(inproc_session)
    assert read(path) == [(1, 0.5), (2, 0.45), (3, 0.7), (4, 0.9)]


@pytest.mark.parametrize("content", ["a,b\n1,2\n", "epoch,seconds", ""])
def test_the_file_of_another_program_is_not_touched(inproc_session, path, caplog, content):
    path.parent.mkdir()
    path.write_text(content)
    JobRunner(build(3), callbacks=[EpochLog(path)]).run(inproc_session)
    if content == "" or (path.suffix == ".csv" and content == "epoch,seconds"):
        assert read(path) == WHOLE[:3]
    else:
        assert path.read_text() == content
        assert f"{path} contains the line" in caplog.text
        assert "Give the log another path" in caplog.text


def report_more(n):
    current_task().report(**{"a b,c": 'x"\n', "nan": float("nan")})
    return n


def test_metrics_of_every_name_and_value_are_kept(inproc_session, path):
    job = build(4)
    Task(report_more, inputs="n", node="a", group=job.epoch_group)
    JobRunner(job, callbacks=[EpochLog(path)]).run(inproc_session)
    assert read(path) == WHOLE[:4]
    if path.suffix == ".csv":
        frame, text = pd.read_csv(path), 'x"\\n'
    else:
        frame, text = pd.read_json(path, lines=True), 'x"\n'
    assert list(frame.columns) == ["epoch", "seconds", "loss", "a b,c", "nan"]
    assert frame["a b,c"].tolist() == [text] * 4
    assert frame["nan"].isna().all()
    # Without a manager every run begins at the start, and so does its log.
    JobRunner(build(3), callbacks=[EpochLog(path)]).run(inproc_session)
    assert read(path) == WHOLE[:3]


def test_a_metric_that_comes_later_adds_a_column(tmp_path):
    log = EpochLog(tmp_path / "log.csv")
    log.on_group("init", 0, 0.0)
    log.on_epoch(1, 0.5, {"loss": 1.0})
    log.on_epoch(2, 0.5, {"loss": 0.5, "accuracy": 0.75})
    log.on_epoch(3, 0.5, {"accuracy": 0.8})
    assert (tmp_path / "log.csv").read_text().splitlines() == [
        "epoch,seconds,loss,accuracy",
        "1,0.5,1.0,",
        "2,0.5,0.5,0.75",
        "3,0.5,,0.8",
    ]


def test_a_full_disk_is_an_error_of_the_log_and_tears_no_line(path):
    path.parent.mkdir()
    log = EpochLog(path)
    log.on_epoch(1, 0.5, {})
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 3, limits[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            log.on_epoch(2, 0.5, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    log.on_epoch(2, 0.5, {})
    assert path.read_bytes().startswith(before)


def test_what_replaces_the_file_and_rows_before_a_record_are_on_disk(
    inproc_session, path, manager, monkeypatch
):
    on_disk, checks = {}, []
    fsync, replace = os.fsync, os.replace

    def look(fd):
        fsync(fd)
        on_disk[os.fstat(fd).st_ino] = os.fstat(fd).st_size

    def is_on_disk(file):
        return on_disk.get(os.stat(file).st_ino) == os.stat(file).st_size

    def put(source, target):
        if str(target) == str(path):
            checks.append(is_on_disk(source))
        replace(source, target)

    class Saved:
        def on_save(self, report):
            checks.append(report.epoch == 0 or is_on_disk(path))

    monkeypatch.setattr(os, "fsync", look)
    monkeypatch.setattr(os, "replace", put)
    JobRunner(build(3), manager, callbacks=[EpochLog(path), Saved()]).run(inproc_session)
    assert len(checks) > 3
    assert all(checks)
