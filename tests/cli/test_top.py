"""`top` shows the runs that are alive, and how fast they are, by their heartbeats."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import pytest

from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    SaveEvery,
    Session,
    Task,
    current_task,
    epoch_limiter,
)
from jobrunner.cli.runs import follow, format_live
from jobrunner.story import LiveRuns, RunSummary, summarize_run
from tests.cli.directories import ask, invoke
from tests.cli.test_many_runs import record


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[MultiNodeCheckpointManager]:
    """A run whose heartbeats the test writes, beside one that has ended."""
    record(tmp_path / "ended", [1.0]).run.end()
    with dask.config.set({"jobrunner.checkpoint.heartbeat-seconds": 60}):
        manager = record(tmp_path / "a" / "alive", [3.0, 2.0], total=100, k=1)
    yield manager
    manager.run.end()


def beat(manager: MultiNodeCheckpointManager, at: float, epoch: int, ended: int) -> None:
    assert manager.commits.lock is not None
    path = Path(manager.path) / "_runs" / manager.commits.lock.run / "heartbeat"
    status = {"epoch": epoch, "num_ended": ended, "metrics": {"loss": 1 / epoch}}
    path.write_text(json.dumps({"time": at, "status": status}))


def test_top_shows_the_runs_that_are_alive(
    alive: MultiNodeCheckpointManager, tmp_path: Path
) -> None:
    head, titles, line, about = invoke("top", tmp_path).stdout.splitlines()
    assert head.endswith(f"1 run alive below {tmp_path}")
    assert titles.split() == ["RUN", "EPOCH", "PACE", "LEFT", "SAVED", "BEAT"]
    assert line.split()[:2] == ["a/alive", "5/100"]
    assert f"pid {os.getpid()}: loss=0.125" in about
    [run] = ask("top", tmp_path)["runs"]
    assert (run["name"], run["epoch"], run["latest"]) == ("a/alive", 5, 1)
    assert 0 <= run["beat_seconds"] < 60
    assert run["eta_seconds"] == pytest.approx(95 * run["pace_seconds"])


def test_top_of_a_directory_where_nothing_runs_says_so(tmp_path: Path) -> None:
    record(tmp_path / "ended", [1.0]).run.end()
    assert "No run is alive below" in invoke("top", tmp_path, "--once").stdout
    assert ask("top", tmp_path)["runs"] == []
    assert invoke("top", tmp_path / "nothing").exit_code == 6


def test_a_run_says_its_epoch_and_metrics_between_saves(
    tmp_path: Path, inproc_session: Session
) -> None:
    with Job("walk") as job:
        Task(lambda: current_task().report(loss=0.5), node="a")
    epoch_limiter(job, 4)
    seen: list[RunSummary] = []

    class Look:
        def on_epoch(self, epoch: int, seconds: float, metrics: object) -> None:
            deadline = time.monotonic() + 10
            while epoch == 3 and not seen and time.monotonic() < deadline:
                run = summarize_run(MultiNodeCheckpointManager(tmp_path).directory, "walk")
                seen.extend([run] if run.epoch == 3 else [])

    with dask.config.set({"jobrunner.checkpoint.heartbeat-seconds": 0.01}):
        manager = MultiNodeCheckpointManager(tmp_path, save=SaveEvery(epochs=100))
        JobRunner(job, manager, callbacks=[Look()]).run(inproc_session)
    [run] = seen
    assert (run.state, run.job, run.latest, run.total_epochs) == ("running", "walk", 0, 4)
    assert run.metrics == {"loss": 0.5}
    assert run.pace_seconds is not None
    assert run.pace_seconds > 0
    assert summarize_run(manager.directory, "walk").state == "finished"


def test_runs_that_begin_or_end_are_noticed(
    alive: MultiNodeCheckpointManager, tmp_path: Path
) -> None:
    clock = [100.0]
    runs = LiveRuns(alive.directory.files, str(tmp_path), lambda: clock[0])
    assert [run.name for run in runs.look()] == ["a/alive"]
    second = record(tmp_path / "second", [1.0])
    assert [run.name for run in runs.look()] == ["a/alive"]
    clock[0] += 2
    assert [run.name for run in runs.look()] == ["a/alive", "second"]
    second.run.end()
    assert [run.name for run in runs.look()] == ["a/alive"]


def test_the_screen_has_whole_metrics_and_says_how_many_runs_are_not_shown() -> None:
    metrics = {f"metric {i}": i / 7 for i in range(12)}
    run = RunSummary(
        "x" * 100, "running", job="job", epoch=3, total_epochs=10, pace_seconds=2.0, metrics=metrics
    )
    found = [run] * 30
    for width in (80, 120):
        lines = format_live(found, "runs", width, 24)
        assert len(lines) <= 24
        assert max(map(len, lines)) <= width
        assert lines[-1] == "and 20 more"
        assert lines[2].split()[1:5] == ["3/10", "2.0", "s", "14.0"]
        assert lines[3].endswith("…")
        assert all("=" in it for it in lines[3].split("metric ")[1:])


def test_following_ends_with_what_was_seen_last(capsys: pytest.CaptureFixture[str]) -> None:
    class Runs:
        looks = 0

        def look(self) -> list[RunSummary]:
            self.looks += 1
            if self.looks == 3:
                raise KeyboardInterrupt
            return [RunSummary(str(self.looks))]

    runs: Any = Runs()
    assert [run.name for run in follow(runs, "runs", 0.001)] == ["2"]


@pytest.mark.nightly
def test_top_follows_runs_on_a_terminal_until_it_is_interrupted(
    alive: MultiNodeCheckpointManager, tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "jobrunner", "top", str(tmp_path), "--interval", "0.1"]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    seen = b""
    while b"a/alive" not in seen or b"7/100" not in seen:
        seen += os.read(ours, 10_000)
        beat(alive, time.time(), 7, 7)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # the end of a terminal
        while True:
            seen += os.read(ours, 10_000)
    assert process.wait() == 0
    assert b"\x1b[?1049l" in seen  # the screen is as before
    assert seen.rstrip().endswith(b"loss=0.1429")
    os.close(ours)
