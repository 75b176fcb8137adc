"""`ls` of a directory with runs below it: which it finds, what it says of each, and in which order."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobrunner import MultiNodeCheckpointManager
from jobrunner.checkpoint import Status
from jobrunner.checkpoint.log.handler import decode_entry, encode_entry
from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.cli.runs import RunFilter, RunRow, clip_name, format_runs, list_runs
from jobrunner.cli.tables import Column, count_cells, draw_table, fit_items, format_age
from jobrunner.positions import Position
from jobrunner.story import RunSummary, find_runs, read_story
from jobrunner.testing import FaultyFiles, FaultyObjects
from tests.cli.directories import ask, invoke
from tests.saves import save_epoch

PLAN = {"job": "kmeans", "nodes": {}, "structure": {}, "code": {}}


def record(
    path: Path,
    losses: list[float],
    total: int | None = None,
    **parameters: Any,
) -> MultiNodeCheckpointManager:
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
def root(tmp_path: Path) -> Iterator[Path]:
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


def test_ls_lists_the_runs_below_a_directory(root: Path) -> None:
    found = ask("ls", root)
    assert (found["epochs"], found["is_whole"]) == ([], True)
    runs = {run.pop("name"): run for run in found["runs"]}
    assert {name: run["state"] for name, run in runs.items()} == {
        "a/finished": "finished",
        "b/c/d/running": "running",
        "damaged": "damaged",
        "stopped": "stopped",
    }
    running = runs["b/c/d/running"]
    assert (running["epoch"], running["latest"], running["total_epochs"]) == (4, 0, 9)
    assert running["metrics"] == {"loss": 0.125}
    assert running["pid"] == os.getpid()
    done = runs["a/finished"]
    assert (done["job"], done["parameters"]) == ("kmeans", {"k": 2, "lr": 0.1})
    assert (done["epochs"], done["latest"], done["is_done"]) == (3, 2, True)
    assert done["metrics"] == {"loss": 2.0, "a/loss": 2.0, "note": "text"}
    assert "fsck" in runs["damaged"]["error"]
    assert "error" not in done

    head, *lines = invoke("ls", root).stdout.splitlines()
    assert head.split() == ["RUN", "STATE", "EPOCH", "SEEN", "METRICS", "PARAMETERS"]
    cells = {line.split()[0]: line.split()[1:3] for line in lines[:4]}
    assert cells["a/finished"] == ["finished", "2/2"]
    assert cells["b/c/d/running"] == ["running", "4/9"]
    assert "a/loss" not in "".join(lines)
    assert "All are runs of kmeans with lr=0.1" in lines
    assert lines[-1].startswith(f"To list the epochs of one: jobrunner ls {root}/")


def names(*args: object) -> list[str]:
    return [run["name"].rpartition("/")[2] for run in ask("ls", *args)["runs"]]


def test_runs_are_sorted_and_chosen(root: Path) -> None:
    assert names(root)[0] == "running"  # whose heartbeat came last
    assert names(root, "--best", "loss") == ["running", "finished", "stopped", "damaged"]
    assert names(root, "--best", "loss:max") == ["stopped", "finished", "running", "damaged"]
    assert names(root, "--best", "loss", "--last", "2") == ["running", "finished"]
    chosen = names(root, "--state", "stopped", "--state", "finished")
    assert sorted(chosen) == ["finished", "stopped"]
    assert names(root, "--param", "k=3") == ["stopped"]
    assert names(root, "--job", "other") == []
    assert sorted(names(root, "--depth", "2", "--job", "kmeans")) == ["finished", "stopped"]
    best = {
        run["name"]: (run["best"], run["best_epoch"])
        for run in ask("ls", root, "--best", "loss")["runs"]
    }
    assert best["a/finished"] == (1.0, 1)
    assert best["stopped"] == (4.0, 0)  # the other is NaN
    assert best["damaged"] == (None, None)
    assert "BEST loss" in invoke("ls", root, "--best", "loss").stdout


def test_a_directory_of_one_run_has_no_use_for_options_of_many(root: Path, tmp_path: Path) -> None:
    for path, what in ((root / "stopped", "of one run"), (root / "notes", "no run below it")):
        result = invoke("ls", path, "--best", "loss")
        assert result.exit_code == 2
        assert what in result.output
    assert invoke("ls", root / "stopped").stdout.startswith("EPOCH")


def test_a_run_that_is_gone_is_lost(tmp_path: Path) -> None:
    manager = record(tmp_path / "a", [1.0])
    assert manager.commits.lock is not None
    beat = tmp_path / "a" / "_runs" / manager.commits.lock.run / "heartbeat"
    manager.commits.lock.leave()
    assert ask("ls", tmp_path)["runs"][0]["state"] == "lost"
    beat.parent.mkdir()
    beat.write_bytes(b"%020d\n{}" % (time.time_ns() - 20 * 10**9))
    assert ask("ls", tmp_path)["runs"][0]["state"] == "lost"
    beat.write_bytes(b"%020d\n{}" % time.time_ns())
    run = ask("ls", tmp_path)["runs"][0]
    assert (run["state"], run["epoch"]) == ("lost", 0)  # its heartbeat's thread has ended


def state(path: Path) -> str:
    [run] = [run for run in ask("ls", path.parent)["runs"] if run["name"] == path.name]
    return str(run["state"])


@pytest.mark.parametrize("state_before", ["lost", "failed", "stopped", "finished"])
def test_commands_on_a_directory_do_not_change_how_its_run_ended(
    tmp_path: Path, state_before: str
) -> None:
    path = tmp_path / "a"
    record(path, [1.0]).run.end({"outcome": "failed"})
    manager = record(path, [1.0, 2.0, 3.0])
    if state_before == "lost":
        assert manager.commits.lock is not None
        manager.commits.lock.leave()
    elif state_before == "finished":
        manager.run.finish(Position(2))
        manager.run.end({"outcome": "finished"})
    else:
        manager.run.end({"outcome": state_before})
    assert state(path) == state_before
    [before] = ask("ls", tmp_path)["runs"]
    manager.pin(2)
    for _ in range(3):
        assert invoke("prune", path, "--keep-last", 2).exit_code == 0
        assert state(path) == state_before
    assert ask("ls", tmp_path)["runs"][0]["last_seen"] == before["last_seen"]
    assert read_story(path).runs[-1].state == state_before
    killed = MultiNodeCheckpointManager(path)
    killed.run.start([], {"command": "prune"})
    assert killed.commits.lock is not None
    assert state(path) == state_before
    assert ask("top", tmp_path)["runs"] == []
    killed.commits.lock.leave()
    assert state(path) == state_before
    assert invoke("copy", path, 2, tmp_path / "copy").exit_code == 0
    assert state(tmp_path / "copy") == ("finished" if state_before == "finished" else "stopped")
    assert state(path) == state_before


def test_what_a_stranger_recorded_is_bounded(tmp_path: Path) -> None:
    manager = record(tmp_path / "a", [1.0], total=10**40, k=1)  # type: ignore[arg-type]
    manager.run.end()
    entry = tmp_path / "a" / "_log" / "0000000000.json"
    tree = dict(decode_entry(entry.read_bytes(), 0, str(entry)))
    tree["info"]["plan"] |= {"job": "j" * 10**6, "parameters": {"p": "x" * 10**6}}
    entry.write_bytes(encode_entry(tree))
    [run] = ask("ls", tmp_path)["runs"]
    assert run["total_epochs"] is None
    assert len(run["job"]) == 128
    assert len(invoke("ls", tmp_path).stdout) < 1000
    named = {"plan": {"job": "j\nforged", "parameters": {"p\nforged": "x\nforged"}}}
    entry.write_bytes(encode_entry({**tree, "info": named, "time": "0001-01-01T00:00:00+14:00"}))
    last = max((tmp_path / "a" / "_log").iterdir())
    tree_of_last = dict(decode_entry(last.read_bytes(), int(last.stem), str(last)))
    last.write_bytes(encode_entry({**tree_of_last, "time": "9999-12-31T23:59:59-14:00"}))
    record(tmp_path / "x", [1.0], **{"p\nforged": 2}).run.end()
    (tmp_path / "y\nforged" / "_log").mkdir(parents=True)
    assert {run["last_seen"] is None for run in ask("ls", tmp_path)["runs"]} == {True, False}
    texts = [
        invoke("ls", tmp_path).stdout,
        invoke("compare", tmp_path / "a", tmp_path / "x").stdout,
    ]
    assert not [line for text in texts for line in text.splitlines() if line.startswith("forged")]
    assert all(r"p\nforged" in text for text in texts)
    shutil.rmtree(tmp_path / "x")
    for info in ({"plan": [1]}, {"plan": {"nodes": 3}}, {"total_epochs": "x"}, {}):
        entry.write_bytes(encode_entry({**tree, "info": info}))
        [run] = ask("ls", tmp_path)["runs"]
        assert (run["state"], run["job"], run["total_epochs"]) == ("stopped", "", None)


def test_metrics_too_large_for_a_float_are_listed_and_compared(tmp_path: Path) -> None:
    for name, loss in (("a", 2.0), ("b", 3.0)):
        record(tmp_path / name, [10**400, loss, 10**400]).run.end()
    rows = ask("ls", tmp_path, "--best", "loss:max")["runs"]
    assert [(row["best"], row["best_epoch"]) for row in rows] == [(3.0, 1), (2.0, 1)]
    assert "1" + "0" * 16 + "..." in invoke("compare", tmp_path / "a", tmp_path / "b").stdout


def test_a_parameter_that_is_cut_keeps_its_credentials_out(tmp_path: Path) -> None:
    for k in (1, 2):
        url = f"postgresql://admin:secret{k}@{'host' * 20}"
        record(tmp_path / f"{k}", [1.0], database=url).run.end()
    said = invoke("ls", tmp_path).stdout
    assert "database='postgresql://" in said
    assert "secret" not in said


def test_neither_links_nor_hidden_directories_nor_runs_are_searched(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    record(outside / "x", [1.0]).run.end()
    root = tmp_path / "root"
    record(root / "run", [1.0]).run.end()
    record(root / "run" / "within", [1.0]).run.end()
    record(root / ".hidden" / "x", [1.0]).run.end()
    (root / "link").symlink_to(outside)
    (root / "file").write_text("")
    files = MultiNodeCheckpointManager(root).directory.files
    assert find_runs(files, str(root)) == (["run"], True)
    assert find_runs(files, str(root / "run")) == (["."], True)
    assert find_runs(files, str(root), most=1) == ([], False)


def test_directories_of_other_users_are_skipped_but_failures_are_told(root: Path) -> None:
    class Failing(PosixFiles):
        number = errno.EACCES

        def before(self, operation: str, path: str) -> None:
            if path == str(root / "a"):
                raise OSError(self.number, "not now", path)

    files = Failing()
    files.bind(str(root))
    assert sorted(find_runs(files, str(root))[0]) == ["b/c/d/running", "damaged", "stopped"]
    with pytest.raises(PermissionError):
        find_runs(files, str(root / "a"))
    files.number = errno.EIO
    with pytest.raises(OSError, match="not now"):
        find_runs(files, str(root))


def test_runs_in_an_object_store_are_found_by_a_request_for_each_directory(root: Path) -> None:
    files = FaultyObjects("s3://bucket/all", root)
    manager = MultiNodeCheckpointManager(files.root, files=files)
    found, is_whole = find_runs(files, manager.path)
    assert (sorted(found), is_whole) == (
        ["a/finished", "b/c/d/running", "damaged", "stopped"],
        True,
    )
    requests = [operation for operation, _ in files.trace]
    assert set(requests) == {"list"}
    assert len(requests) <= 10
    output = list_runs(manager.directory, RunFilter(job="kmeans", state=["finished"]))
    assert output is not None
    assert [run["state"] for run in output.data["runs"]] == ["finished"]


def test_the_table_fits_the_terminal() -> None:
    now = time.time()
    metrics = {"loss": 0.123456, "accuracy": 0.9123, "f1": 0.5}
    runs = [
        RunSummary(
            f"sweeps/of/november/{i}",
            state="running",
            job="job",
            parameters={"rate": 0.25 * i, "momentum": 0.5 + i, "name": "x" * 100, "seed": 0},
            epoch=i,
            total_epochs=1000,
            metrics=metrics,
            last_seen=now - 10**i,
        )
        for i in range(6)
    ]
    rows = [RunRow(run) for run in runs]
    for width in (80, 120):
        head, *lines, common = format_runs(rows, width)
        assert max(map(len, (head, *lines))) <= width
        whole = [line for line in lines if "loss=0.1235 accuracy=0.9123 f1=0.5" in line]
        assert len(whole) == 6
        assert common.startswith("All are runs of job with name='xxx")
        assert common.endswith(" seed=0")
    assert len(lines) == 6  # 120 columns have room for all in one line
    assert "PARAMETERS" in head
    assert len(format_runs(rows, 80)) == 14
    other = RunSummary("other", "lost", job="other", parameters={"seed": 1})
    assert format_runs([*rows, RunRow(other)])[-1].startswith("All runs of job have")


def test_columns_are_straight_whatever_the_letters_are_made_of() -> None:
    accented = "e\N{COMBINING ACUTE ACCENT}t\N{COMBINING ACUTE ACCENT}"
    rows = [("日本語", "1", "x"), ("lr=0.1", "12", "x"), (accented, "123", "x")]
    columns = [
        Column[tuple[str, str, str]]("name", lambda row: row[0]),
        Column[tuple[str, str, str]]("n", lambda row: row[1], is_number=True),
        Column[tuple[str, str, str]]("x", lambda row: row[2]),
    ]
    titles, *lines = draw_table(columns, rows)
    assert titles == "name      n  x"
    assert [count_cells(line) for line in lines] == [14, 14, 14]
    assert lines[0] == "日本語    1  x"
    assert fit_items(["損失=1", "b=2"], 8) == "損失=1 …"
    assert clip_name("日本語" * 9, 30) == "日本語日本…日本語日本語"
    long = RunSummary("日" * 30, "lost", metrics={"損失": 0.5}, parameters={"名前": "日" * 30})
    table = format_runs([RunRow(long)], 80)
    assert [count_cells(line) <= 80 for line in table] == [True] * 3


def test_what_does_not_fit_is_left_out_whole() -> None:
    assert fit_items(["a=1", "b=2"], 7) == "a=1 b=2"
    assert fit_items(["a=1", "b=2"], 6) == "a=1 …"
    assert fit_items(["a=1", "b=2"], 2) == "…"
    assert [format_age(1000.0 - it, 1000.0) for it in (-5, 0, 119, 120, 7200, 86400 * 3)] == [
        "0 s ago",
        "0 s ago",
        "119 s ago",
        "2 min ago",
        "2 h ago",
        "3 d ago",
    ]
