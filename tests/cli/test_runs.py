"""Many runs: `ls` of a directory that has some below it, `top`, `compare` and `report`."""

import contextlib
import errno
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import dask
import numpy as np
import pytest

from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    SaveEvery,
    Task,
    current_task,
    epoch_limiter,
)
from jobrunner.checkpoint import Status
from jobrunner.checkpoint.log.handler import decode_entry, encode_entry
from jobrunner.positions import Position
from jobrunner.story import LiveRuns, find_runs, read_story, summarize_run
from jobrunner.story.log import unix_time
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.workspace import Workspace
from tests.cli.directories import ask, invoke
from tests.saves import save_epoch

PLAN = {"job": "kmeans", "nodes": {}, "structure": {}, "code": {}}
GOLDEN = Path(__file__).parents[1] / "golden" / "log_1"


def record(path, losses, total=None, **parameters):
    """A run that has recorded an epoch for each loss, and has not ended."""
    manager = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
    plan = {**PLAN, "structure": {"epoch:a/fit": ""}, "parameters": parameters}
    status = Status(len(losses) + 3, len(losses) + 4, {"loss": 0.125})
    manager.run.start([], {"plan": plan, "total_epochs": total}, lambda: status)
    for epoch, loss in enumerate(losses):
        details = {"metrics": {"loss": loss, "a/loss": loss, "note": "text"}}
        save_epoch(manager, Position.of(epoch), details=details)
    return manager


@pytest.fixture
def root(tmp_path):
    """Four runs, at several levels: one goes on, one is damaged."""
    finished = record(tmp_path / "a" / "finished", [3.0, 1.0, 2.0], total=2, k=2, lr=0.1)
    finished.run.finish(Position(2))
    finished.run.end()
    record(tmp_path / "stopped", [4.0, float("nan")], total=9, k=3, lr=0.1).run.end()
    running = record(tmp_path / "b" / "c" / "d" / "running", [0.5], total=9, k=4, lr=0.1)
    record(tmp_path / "damaged", [1.0]).run.end()
    for entry in (tmp_path / "damaged" / "_log").iterdir():
        entry.write_bytes(b"torn")
    (tmp_path / "notes").mkdir()
    yield tmp_path
    running.run.end()


# --- ls


def test_ls_lists_the_runs_below_a_directory(root):
    told = ask("ls", root)
    assert (told["epochs"], told["is_whole"]) == ([], True)
    runs = {run.pop("name"): run for run in told["runs"]}
    assert {name: run["state"] for name, run in runs.items()} == {
        "a/finished": "finished",
        "b/c/d/running": "running",
        "damaged": "damaged",
        "stopped": "stopped",
    }
    running = runs["b/c/d/running"]
    assert (running["epoch"], running["latest"], running["total_epochs"]) == (4, 0, 9)
    assert (running["metrics"], running["pid"]) == ({"loss": 0.125}, os.getpid())
    done = runs["a/finished"]
    assert (done["job"], done["parameters"]) == ("kmeans", {"k": 2, "lr": 0.1})
    assert (done["epochs"], done["latest"], done["is_done"]) == (3, 2, True)
    assert "fsck" in runs["damaged"]["error"]
    [line] = [line for line in invoke("ls", root).stdout.splitlines() if "a/finished" in line]
    cells = line.split()
    assert cells[:5] == ["a/finished", "kmeans", "finished", "2", "2"]
    assert cells[-3:] == ["loss=2", "note='text'", "k=2"]  # all have one rate


def test_runs_are_sorted_by_when_they_were_seen_or_their_best_value(root):
    def names(*args):
        return [run["name"].rpartition("/")[2] for run in ask("ls", root, *args)["runs"]]

    assert names()[0] == "running"  # whose heartbeat came last
    assert names("--best", "loss:max") == ["stopped", "finished", "running", "damaged"]
    assert names("--best", "loss", "--last", "2") == ["running", "finished"]
    told = {run["name"]: run for run in ask("ls", root, "--best", "loss")["runs"]}
    assert (told["a/finished"]["best"], told["a/finished"]["best_epoch"]) == (1.0, 1)
    assert told["stopped"]["best_epoch"] == 0  # the other is NaN


def test_commands_on_a_directory_do_not_change_how_its_run_ended(tmp_path):
    def seen(name):
        [run] = [run for run in ask("ls", tmp_path)["runs"] if run["name"] == name]
        return run["state"], run["last_seen"]

    manager = record(tmp_path / "a", [1.0, 2.0, 3.0])
    manager.run.lock.leave()
    before = seen("a")
    assert before[0] == "lost"
    manager.pin(2)
    assert invoke("prune", tmp_path / "a", "--keep-last", 2).exit_code == 0
    assert seen("a") == before
    killed = MultiNodeCheckpointManager(tmp_path / "a")
    killed.run.start([], {"command": "prune"})
    assert seen("a") == before
    assert ask("top", tmp_path)["runs"] == []
    killed.run.lock.leave()
    assert invoke("copy", tmp_path / "a", 2, tmp_path / "copy").exit_code == 0
    assert seen("copy")[0] == "stopped"
    assert seen("a") == before


def test_all_commands_agree_on_whether_a_job_has_finished(tmp_path):
    path = tmp_path / "a"

    def told():
        [run], *_, last = ask("ls", tmp_path)["runs"], *ask("stats", path)["runs"]
        assert run["is_done"] == ask("ls", path)["is_done"]
        return run["state"], last["state"], run["is_done"]

    record(path, [4.0, 3.0, 2.0, 1.0]).run.end({"outcome": "stopped"})
    assert told() == ("stopped", "stopped", False)
    second = record(path, [])
    second.run.rewind(Position(0), "test")
    save_epoch(second, Position(2))
    second.run.finish(Position(2))
    second.run.lock.leave()  # killed before it could end
    assert told() == ("finished", "finished", True)
    ask("restore", path, 1)  # epoch 2 stays the newest
    assert told() == ("finished", "finished", True)
    third = record(path, [])
    third.run.end({"outcome": "finished"})
    ask("restore", path, 3)  # from which the same command goes on
    assert told() == ("stopped", "stopped", False)
    kept = []
    for run in read_story(path).runs:
        kept.append([epoch.epoch for epoch in run.epochs if epoch.is_kept])
    assert kept == [[0, 1, 3], [2], []]
    restored = read_story(path).runs[0].epochs[3]
    assert restored.recorded == unix_time(ask("ls", path)["epochs"][3]["time"])
    page = tmp_path / "page.html"
    assert invoke("report", path, "-o", page).exit_code == 0
    assert "to resume it from epoch 3" in page.read_text()


def test_what_a_stranger_recorded_is_bounded(tmp_path):
    manager = record(tmp_path / "a", [1.0, 10**400], total=10**40, k=1)
    manager.run.end()
    entry = tmp_path / "a" / "_log" / "0000000000.json"
    tree = dict(decode_entry(entry.read_bytes(), 0, str(entry)))
    tree["info"]["plan"] |= {"job": "j" * 10**6, "parameters": {"p": "x" * 10**6}}
    entry.write_bytes(encode_entry(tree))
    [run] = ask("ls", tmp_path, "--best", "loss:max")["runs"]
    assert (run["total_epochs"], len(run["job"]), run["best"]) == (None, 128, 1.0)
    assert len(invoke("ls", tmp_path).stdout) < 1000


def test_neither_links_nor_hidden_directories_nor_runs_are_searched(tmp_path):
    record(tmp_path / "outside" / "x", [1.0]).run.end()
    root = tmp_path / "root"
    record(root / "run", [1.0]).run.end()
    record(root / "run" / "within", [1.0]).run.end()
    record(root / ".hidden" / "x", [1.0]).run.end()
    (root / "link").symlink_to(tmp_path / "outside")
    files = MultiNodeCheckpointManager(root).directory.files
    assert find_runs(files, str(root)) == (["run"], True, [])
    assert find_runs(files, str(root / "run")) == (["."], True, [])
    assert find_runs(files, str(root), most=1) == ([], False, [])


def test_directories_of_other_users_are_named_and_failures_are_told(root, monkeypatch):
    scandir, number = os.scandir, errno.EACCES

    def refuse(path):
        if path == refused:
            raise OSError(number, os.strerror(number), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    refused = str(root / "a")
    data = ask("ls", root)
    assert [run["name"] for run in data["runs"]][1:] == ["stopped", "damaged"]
    assert data["unreadable"] == ["a"]
    assert "this user may not read them: a." in invoke("ls", root).stdout
    result = invoke("ls", refused)
    assert result.exit_code == 8
    assert f"{refused} cannot be searched for runs: PermissionError" in result.stderr
    number = errno.EIO
    assert "Input/output error" in invoke("ls", root).stderr


def test_runs_in_a_bucket_are_listed_and_followed(s3):
    for name in ("a/x", "b"):
        manager = MultiNodeCheckpointManager(f"{s3.url}/runs/{name}")
        manager.run.start([], {"plan": {"job": "j"}})
        save_epoch(manager, Position(0), details={"metrics": {"loss": 1.0}})
        if name == "b":
            assert [run["name"] for run in ask("top", s3.url)["runs"]] == ["runs/b"]
        manager.run.end()
    told = ask("ls", f"{s3.url}/runs", "--best", "loss")
    assert {run["name"] for run in told["runs"]} == {"a/x", "b"}


# --- top


@pytest.fixture
def alive(tmp_path):
    """A run whose heartbeats the test writes, beside one that has ended."""
    record(tmp_path / "ended", [1.0]).run.end()
    with dask.config.set({"jobrunner.checkpoint.heartbeat-seconds": 60}):
        manager = record(tmp_path / "a" / "alive", [3.0, 2.0], total=100, k=1)
    yield manager
    manager.run.end()


def test_top_shows_the_runs_that_are_alive(alive, tmp_path):
    _, line = invoke("top", tmp_path).stdout.splitlines()
    assert line.split()[:5] == ["a/alive", "kmeans", "running", "5", "100"]
    assert "loss=0.125" in line
    [run] = ask("top", tmp_path)["runs"]
    assert (run["name"], run["epoch"], run["latest"]) == ("a/alive", 5, 1)
    assert 0 <= run["beat_seconds"] < 60
    assert run["eta_seconds"] == pytest.approx(95 * run["pace_seconds"])
    assert invoke("top", tmp_path / "nothing").exit_code == 6


def test_runs_that_begin_or_end_while_top_looks_come_and_go(alive, tmp_path):
    clock = [100.0]
    runs = LiveRuns(alive.directory.files, str(tmp_path), lambda: clock[0])
    assert [run.name for run in runs.look()] == ["a/alive"]
    second = record(tmp_path / "second", [1.0])
    clock[0] += 2  # the directory is searched again
    assert [run.name for run in runs.look()] == ["a/alive", "second"]
    second.run.end()
    assert [run.name for run in runs.look()] == ["a/alive"]


def test_a_run_says_its_epoch_and_metrics_between_saves(tmp_path, inproc_session):
    with Job("walk") as job:
        Task(lambda: current_task().report(loss=0.5), node="a")
    epoch_limiter(job, 4)
    seen = []

    class Look:
        def on_epoch(self, epoch, seconds, metrics):
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
    assert summarize_run(manager.directory, "walk").state == "finished"


@pytest.mark.nightly
def test_top_follows_runs_on_a_terminal_until_it_is_interrupted(alive, tmp_path):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "jobrunner", "top", str(tmp_path)]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    seen = b""
    while b"a/alive" not in seen:
        seen += os.read(ours, 10_000)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # the end of a terminal
        while True:
            seen += os.read(ours, 10_000)
    assert process.wait() == 0
    assert b"a/alive" in seen.rpartition(b"\x1b[2J")[2]  # it stays on the cleared screen
    os.close(ours)


# --- compare


def walk(path, values, code="1", first=0, **how):
    """A run whose blob b/x has these values, epoch by epoch; a/x is always the same."""
    manager = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
    code_of = {"epoch:a/t": code}
    plan = {**PLAN, "structure": {"epoch:a/t": "1"}, "code": code_of, "parameters": how}
    manager.run.start(["a", "b"], {"plan": plan})
    for epoch, value in enumerate(values, first):
        workspaces = {node: Workspace(node) for node in "ab"}
        workspaces["a"].globals["x"] = np.arange(6.0)
        workspaces["b"].globals["x"] = np.full(3, value)
        metrics = {"loss": value, "nan": float("nan"), "note": "text"}
        save_epoch(manager, Position.of(epoch), workspaces, {"metrics": metrics})
    manager.run.end()


def test_runs_that_part_and_meet_again_differ_first_where_they_part(tmp_path):
    walk(tmp_path / "a", [1, 2, 3, 4, 5, 6], k=1, lr=0.1)
    walk(tmp_path / "b", [1, 2, 9, 4, 5, 6], code="2", k=2, lr=0.1)
    result = invoke("compare", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 11
    lines = result.stdout.splitlines()
    assert "From A to B, parameter 'k' was 1 and is 2" in lines
    assert "From A to B, task epoch:a/t has other code" in lines
    assert ["loss", "3", "9"] in [line.split() for line in lines]
    assert "b/x: 3 of 3 elements differ, by at most 6" in lines
    told = ask("compare", tmp_path / "a", tmp_path / "b")
    assert (told["differ_at"], told["metrics"]["epoch"], told["num_compared"]) == (2, 2, 3)
    assert [(it["node"], it["blob"]) for it in told["difference"]["differences"]] == [("b", "x")]


def test_runs_are_equal_if_all_common_epochs_are_and_there_are_some(tmp_path):
    walk(tmp_path / "a", [1.0, 2.0])
    walk(tmp_path / "b", [1.0, 2.0, 3.0])
    walk(tmp_path / "c", [1.0], first=2)
    result = invoke("compare", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 0
    assert result.stdout.endswith("The blobs of 2 common epochs are equal.\n")
    result = invoke("compare", tmp_path / "a", tmp_path / "c")
    assert result.exit_code == 11
    assert "No epoch is recorded in both" in result.stdout


# --- report


def test_report_says_where_the_time_went(tmp_path):
    page = tmp_path / "page.html"
    told = ask("report", GOLDEN, "-o", page)
    ledger = told["ledger"]
    parts = ("start", "compute", "save_wait", "redone", "recovery", "idle")
    assert sum(ledger[part] for part in parts) == pytest.approx(ledger["wall"])
    assert ledger["goodput"] == pytest.approx(ledger["compute"] / ledger["wall"])
    assert "<html" in page.read_text()
    [run] = ask("stats", GOLDEN)["runs"]
    assert run["ledger"] == ledger
    assert invoke("stats", GOLDEN).stdout.rstrip().endswith(f"{ledger['goodput']:.1%}")
