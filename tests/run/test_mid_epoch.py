"""A mid-epoch checkpoint is shown as what it is, and kept only if asked to be."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobrunner import (
    JobRunner,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    MultiNodeCheckpointManager,
    Position,
    SaveEvery,
    TaskFailedError,
    current_task,
)
from jobrunner.cli.command import main
from tests.jobs import counter


def train(session, path, every, last, **options):
    """Epochs of two steps; save every `every` steps; fail in step 2 of epoch `last`."""

    def step(n):
        task = current_task()
        if (task.epoch, task.step) == (last, 1):
            raise ValueError
        task.report(loss=10 * task.epoch + task.step)
        return n + 1

    job = counter(20, step, steps_per_epoch=2)
    manager = MultiNodeCheckpointManager(path, save=SaveEvery(steps=every), **options)
    with pytest.raises(TaskFailedError):
        JobRunner(job, manager).run(session)


def recorded(manager):
    return [at.public for at in manager.positions()]


def invoke(*args):
    words = [str(arg) for arg in args]
    text = CliRunner().invoke(main, words).stdout
    return text, json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)


def test_commands_show_whole_epochs_and_the_step(inproc_session, tmp_path):
    runs = tmp_path / "runs"
    train(inproc_session, runs, every=1, last=4)
    manager = MultiNodeCheckpointManager(runs)
    assert manager.epochs() == [0, 1, 2, 3]
    assert recorded(manager) == [0, 1, 2, 3, Position(3, 1)]
    text, data = invoke("ls", runs)
    assert [line.split()[0] for line in text.splitlines()[1:6]] == ["0", "1", "2", "3", "3.s1"]
    *_, whole, last = data["epochs"]
    assert (whole["epoch"], whole["whole_epochs"], whole["step"]) == (3, 3, 0)
    assert (last["epoch"], last["whole_epochs"], last["step"]) == ("3.s1", 3, 1)
    assert last["steps_per_epoch"] == 2
    text, data = invoke("info", runs, "latest")
    assert text.startswith("epoch 3.s1 (3 whole epochs and step 1 of 2) of ")
    assert data["nodes"]["a"]["store"] == "a.3.s1"
    text, data = invoke("verify", runs)
    assert "whole: 0 to 3, 3.s1" in text
    assert data["epochs"][-1]["step"] == 1
    _, data = invoke("diff", f"{runs}@3", f"{runs}@3.s1")
    assert [blob["blob"] for blob in data["differences"]] == ["n"]
    text, _ = invoke("pin", runs, "3.s1")
    assert "Epoch 3.s1 is pinned: kept." in text
    assert (manager.open(Position(3, 1)).step, manager.open(3).step) == (1, 0)
    CliRunner().invoke(main, ["copy", str(runs), "3.s1", str(runs.parent / "copy")])
    text, _ = invoke("info", runs.parent / "copy", "latest")
    assert text.startswith("epoch 3.s1 (3 whole")
    text, data = invoke("info", runs, "3.s2")
    assert "Epoch 3.s2" in data["error"]["message"]


AT_1, AT_4, AT_7 = (Position(epoch, 1) for epoch in (1, 4, 7))


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (KeepAll(), [0, 2, 3, 5, 6, AT_7]),
        (KeepAll(partial=True), [0, AT_1, 2, 3, AT_4, 5, 6, AT_7]),
        (KeepLast(1), [6, AT_7]),
        (KeepLast(2), [5, 6, AT_7]),
        (KeepEvery(2), [0, 2, 6, AT_7]),
        (KeepBest("loss"), [2, AT_7]),
    ],
    ids=repr,
)
def test_policies_rank_whole_epochs(keep, kept, tmp_path, inproc_session):
    # Every third step is saved, and the end of each epoch with such a step.
    train(inproc_session, tmp_path, every=3, last=8, keep=keep)
    assert recorded(MultiNodeCheckpointManager(tmp_path)) == kept


def test_a_position_is_set_aside_restored_and_recorded_again(tmp_path, inproc_session):
    path = tmp_path / "runs"
    keep = KeepAll(partial=True)
    train(inproc_session, path, every=1, last=3, keep=keep, asynchronous=False)
    manager = MultiNodeCheckpointManager(path)
    kept = [0, Position(0, 1), 1, Position(1, 1), 2, Position(2, 1)]
    assert recorded(manager) == kept
    whole = Path(shutil.copytree(path, tmp_path / "whole"))
    manager.run.start(["a"], {})
    manager.run.rewind(Position(1), "a test")
    manager.run.end()
    assert recorded(manager) == kept[:3]
    words = ["restore", str(path), "1.s1", "--json"]
    data = json.loads(CliRunner().invoke(main, words).stdout)
    assert (data["epoch"], data["stores"]) == ("1.s1", {"a": "a.1.s1"})
    manager.verify(Position(1, 1))
    # Without its record, a repair finds the position in its store.
    for entry in sorted((whole / "_log").iterdir()):
        if '"1.s1"' in entry.read_text():
            entry.unlink()
    data = json.loads(CliRunner().invoke(main, ["fsck", str(whole), "--repair", "--json"]).stdout)
    assert data["repair"]["rebuilt"] == ["1.s1"]
    again = MultiNodeCheckpointManager(whole)
    assert recorded(again) == kept
    assert again.open(Position(1, 1))["a"]["n"] == 3
