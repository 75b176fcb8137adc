"""Links and pipes in a checkpoint directory, which a stranger may have put there."""

import os
import shutil

import pytest

from jobrunner import CheckpointError, KeepLast, MultiNodeCheckpointManager
from tests.cli.directories import invoke, save

COMMANDS = [
    ["ls", "DIR"],
    ["info", "DIR", 1],
    ["verify", "DIR", "--deep"],
    ["diff", "DIR@1", "@2"],
    ["fsck", "DIR"],
    ["copy", "DIR", 1, "OTHER"],
    ["pin", "DIR", 2],
    ["prune", "DIR", "--keep-last", 1],
    ["fsck", "DIR", "--repair"],
]
PLACES = [
    *("_runs", "_runs/x", "_log", "_log/0000000003.json"),
    *("a.1", "a.1/w", "a.1/w/zarr.json", "a.1/w/c.0", "a.1/zarr.json"),
    "a.1/stray",
]


def tree(path):
    """All that is in a directory, with what a program could have changed."""
    found = {}
    for at in sorted(path.rglob("*")):
        about = at.lstat()
        content = at.read_bytes() if at.is_file() else None
        found[str(at)] = (about.st_mode, about.st_mtime_ns, about.st_nlink, content)
    return found


@pytest.fixture
def outside(tmp_path):
    """What nobody may touch."""
    path = tmp_path / "outside"
    (path / "empty").mkdir(parents=True)
    (path / "precious").write_text("0")
    (path / "0000000000.json").write_text("{}")
    return path


def move_and_link(path, outside):
    """Put a link to what was there, or to a directory, in its place."""
    target = outside
    if path.exists():
        target = outside / "moved"
        shutil.move(path, target)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)


def run_all(runs):
    """What each command says, and what a run that resumes there says."""
    said = {}
    for command in COMMANDS:
        there = {"DIR": runs, "DIR@1": f"{runs}@1", "OTHER": runs.parent / "other"}
        result = invoke(*(there.get(str(word), word) for word in command))
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert "Usage:" not in result.output
        said[" ".join(map(str, command))] = result.output
    manager = MultiNodeCheckpointManager(runs, keep=KeepLast(1), take_over=True)
    try:
        manager.run.start(["a", "b"], {})
        save(manager, 7)
        manager.load(7)
    except CheckpointError as error:
        said["resume"] = str(error)
    finally:
        manager.run.end()
    return said


@pytest.mark.parametrize("place", PLACES)
def test_what_a_link_leads_to_is_not_touched(place, runs, outside):
    move_and_link(runs / place, outside)
    before = tree(outside)
    said = run_all(runs)
    if place.startswith("_"):  # a copy is not put through it either
        (runs.parent / "to").mkdir()
        (runs.parent / "to" / place.partition("/")[0]).symlink_to(outside)
        assert invoke("copy", runs, 1, runs.parent / "to").exit_code != 0
    assert tree(outside) == before
    if place == "a.1":
        pruned = said["prune DIR --keep-last 1"]
        assert pruned.startswith("deleted: 0 (")
        assert "not deleted yet (the next run tries again): 1\n" in pruned
    if place not in ("_runs/x", "a.1/stray"):
        assert any(f"{runs / place} is a symbolic link" in text for text in said.values())


@pytest.mark.parametrize("place", ["_log/0000000003.json", "_runs/x/heartbeat", "a.1/w/c.0"])
def test_nobody_waits_for_the_other_end_of_a_pipe(place, runs):
    path = runs / place
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    texts = run_all(runs).values()
    assert path.name == "heartbeat" or any(f"{path} is a pipe" in text for text in texts)


def test_a_file_with_another_name_elsewhere_is_replaced(runs, outside):
    manager = MultiNodeCheckpointManager(runs)
    manager.run.start(["a", "b"], {})
    try:
        (probe,) = (runs / "_runs").glob("*")
        os.link(outside / "precious", probe / "probe")
        manager.run.probe()
        assert (outside / "precious").read_text() == "0"
        assert (probe / "probe").read_text() == probe.name
    finally:
        manager.run.end()
