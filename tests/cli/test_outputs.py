"""Files that users name are written whole, and nothing else is: no link, no pipe, no checkpoint."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from jobrunner import DefinitionError, Job, Node, Task, write_report
from jobrunner.callbacks import EpochLog
from tests.cli.directories import invoke


def _draw(runs: Path, path: Path) -> None:
    with Job("j") as job:
        Task(int, node=Node("n"))
    job.visualize(path)


def _log(runs: Path, path: Path) -> None:
    log = EpochLog(path)
    log.on_group("init", 0, 0.1)
    log.on_epoch(1, 0.1, {"loss": 1.0})


WRITERS: Mapping[str, Callable[[Path, Path], object]] = {
    "report.html": write_report,
    "job.dot": _draw,
    "log.csv": _log,
    "log.jsonl": _log,
}
EACH = pytest.mark.parametrize("name", WRITERS)


@EACH
def test_no_link_is_followed_and_no_pipe_waited_for(name: str, runs: Path, tmp_path: Path) -> None:
    precious, target = tmp_path / "precious", tmp_path / "here" / name
    precious.write_text("")  # which a log takes for its own
    target.parent.mkdir()
    for make in (target.symlink_to, lambda _: os.mkfifo(target)):
        make(precious)
        with pytest.raises(DefinitionError, match=f"Cannot write {target}, which is"):
            WRITERS[name](runs, target)
        assert not stat.S_ISREG(target.lstat().st_mode)
        target.unlink()
    target.hardlink_to(precious)
    WRITERS[name](runs, target)
    assert target.read_text()
    target.unlink()
    # Nor is a name guessed of what is written before it replaces the file.
    (target.parent / f"{name}.new").symlink_to(precious)
    WRITERS[name](runs, target)
    assert precious.read_text() == ""


@EACH
def test_a_file_is_replaced_whole_and_keeps_its_rights(
    name: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "here" / name
    target.parent.mkdir()
    WRITERS[name](runs, target)
    before = target.read_bytes()
    target.chmod(0o600)
    WRITERS[name](runs, target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=f"No space left on device: '{target}'"):
        WRITERS[name](runs, target)
    assert target.read_bytes() == before
    assert os.listdir(target.parent) == [name]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("runs/report.html", "within the checkpoint directory"),
        ("runs/_log/0000000001.json", "within the checkpoint directory"),
        ("link/report.html", "within the checkpoint directory"),
        ("here", "is no file"),
        ("none/report.html", "there is no directory"),
        ("x" * 300, "File name too long"),
        ("s3://KEY:CANARY/x@bucket/dir", "it is a URL"),
    ],
)
def test_what_cannot_be_written_is_refused_first(
    path: str, why: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    Path("link").symlink_to(runs)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DefinitionError, match=why):
        write_report(runs, path)
    for command in (
        ("report", runs, "-o", path),
        ("run", "job.py", "--checkpoint", "other", "--report", path),
    ):
        result = invoke(*command)
        assert (result.exit_code, "CANARY" in result.output) == (2, False), result.output
    assert sorted(tmp_path.rglob("*")) == before


def test_a_directory_called_as_the_log_is_none_without_entries(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "_log").mkdir()
    (tmp_path / "_log" / "2026.json").touch()
    write_report(runs, tmp_path / "report.html")
    (tmp_path / "_log" / "0000000000.json").touch()
    with pytest.raises(DefinitionError, match="within the checkpoint directory"):
        write_report(runs, tmp_path / "report.html")


def test_the_default_outputs_and_new_jobs_are_not_put_into_a_checkpoint_directory(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    for command in (("report", "."), ("new", "heat"), ("new", "a.1/heat")):
        result = invoke(*command)
        assert result.exit_code == 2
        assert "within the checkpoint directory" in result.output
    monkeypatch.chdir(tmp_path)
    assert invoke("report", "runs").exit_code == 0
