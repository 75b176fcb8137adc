"""Files that users name are written whole, and none is put into a checkpoint directory."""

import os
import stat
from pathlib import Path

import pytest

from jobrunner import DefinitionError
from jobrunner.callbacks import EpochLog
from jobrunner.story import write_report
from tests.cli.directories import invoke


def _log(runs, path):
    log = EpochLog(path)
    log.on_group("init", 0, 0.1)
    log.on_epoch(1, 0.1, {"loss": 1.0})


WRITERS = {
    "report.html": write_report,
    "log.csv": _log,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_replaced_whole_and_keeps_its_rights(name, runs, tmp_path, monkeypatch):
    target = tmp_path / "here" / name
    target.parent.mkdir()
    WRITERS[name](runs, target)
    before = target.read_bytes()
    target.chmod(0o600)
    WRITERS[name](runs, target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left on device") as error:
        WRITERS[name](runs, target)
    assert error.value.filename == str(target)
    result = invoke("report", runs, "-o", target)
    assert result.exit_code == 2
    assert f"Cannot write {target}: No space left on device. Name a file" in result.stderr
    assert target.read_bytes() == before
    assert os.listdir(target.parent) == [name]
    monkeypatch.undo()
    link = target.with_name(f"link-{name}")  # to what somebody else needs
    link.symlink_to(target)
    WRITERS[name](runs, link)
    assert (link.is_symlink(), target.read_bytes()) == (False, before)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("runs/report.html", "within the checkpoint directory"),
        ("runs/a.1/report.html", "within the checkpoint directory"),
        ("link/report.html", "within the checkpoint directory"),
        ("here", "is no file"),
        ("pipe", "is no file"),
        ("none/report.html", "there is no directory"),
        (f"{'long' * 100}/report.html", "there is no directory"),  # nor may anybody look for one
        ("s3://KEY:CANARY/x@bucket/dir", "Cannot write to a URL, which may contain credentials"),
    ],
)
def test_what_cannot_be_written_is_refused_first(path, why, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    os.mkfifo("pipe")
    Path("link").symlink_to(runs)
    before = sorted(tmp_path.rglob("*"))
    result = invoke("report", runs, "-o", path)
    assert (result.exit_code, why in result.stderr, "CANARY" in result.output) == (2, True, False)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_directory_in_which_this_user_may_not_write_is_refused_first(runs, tmp_path, monkeypatch):
    locked = tmp_path / "locked"
    locked.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked)
    with pytest.raises(DefinitionError, match=f"may not make files in {locked}"):
        write_report(runs, locked / "report.html")


def test_the_default_outputs_and_new_jobs_are_not_put_into_a_checkpoint_directory(
    runs, tmp_path, monkeypatch
):
    monkeypatch.chdir(runs)
    for command in (("report", "."), ("new", "a.1/heat")):
        result = invoke(*command)
        assert result.exit_code == 2
        assert "within the checkpoint directory" in result.output
    monkeypatch.chdir(tmp_path)
    assert invoke("report", "runs").exit_code == 0
