"""Commands on single epochs: `diff`, `verify`, `pin`, `restore` and `copy`."""

import itertools
import shutil

import numpy as np
import pytest

from jobrunner import CheckpointNotFoundError, MultiNodeCheckpointManager
from jobrunner.checkpoint import Directory
from jobrunner.cli.checkpoints import copy_epochs, verify_epochs
from jobrunner.cli.show import describe_checkpoint
from jobrunner.positions import Position
from jobrunner.testing import assert_identical
from tests.cli.directories import PrunedMeanwhile, ask, begin, invoke, lengthen_log, recorded, save
from tests.sampling import sampled


def test_diff_names_each_blob_that_differs_and_by_how_much(tmp_path):
    manager = begin(tmp_path / "k")
    save(manager, 0, {"u": np.array([1.0, 2.0, np.nan]), "gone": 1, "same": [1, {"x": "y"}]})
    save(manager, 1, {"u": np.array([1.0, 2.5, np.nan]), "new": 1, "same": [1, {"x": "y"}]})
    manager.run.end()
    result = invoke("diff", f"{tmp_path}/k@0", "@1")
    assert result.exit_code == 11
    assert "only in A: a/gone\nonly in A: b/gone\nonly in B: a/new\n" in result.stdout
    assert "a/u: 1 of 3 elements differ, by at most 0.5" in result.stdout
    assert result.stdout.endswith("4 blobs are equal, 4 differ.\n")
    assert invoke("diff", f"{tmp_path}/k@9", "@1").exit_code == 6


def test_restore_records_an_epoch_again_that_a_rewind_set_aside(runs):
    again = begin(runs)
    again.run.rewind(None, "start afresh")
    save(again, 0, {"other": 1})
    again.run.end()
    assert ask("restore", runs, 3)["stores"] == {"a": "a.3", "b": "b.3"}
    manager = MultiNodeCheckpointManager(runs)
    manager.verify(3)
    assert manager.record(3).details.to_json() == {"metrics": {"loss": 2.0}}
    assert manager.directory.info_of(manager.record(3).run_number) == {"plan": {"job": "p"}}
    assert_identical(np.arange(6.0), manager.open(3)["a"].load("w"))
    for epoch, exit_code in ((3, 2), (7, 6), (0, 2)):
        assert invoke("restore", runs, epoch).exit_code == exit_code
    assert "Epoch 2, first saved 2" in invoke("restore", runs, 2).stdout
    assert [row["epoch"] for row in manager.past_epochs()] == [0, 2, 3]


def test_damage_is_found_before_anything_is_restored_or_copied(runs, tmp_path):
    chunk = runs / "a.2" / "w" / "c.0"
    chunk.write_bytes(chunk.read_bytes()[::-1])
    target = tmp_path / "copy"
    assert invoke("copy", runs, 2, target).exit_code == 7
    assert recorded(target) == []
    result = invoke("copy", runs, "all", target)  # what is whole is copied
    assert result.exit_code == 7
    assert f"Epoch 2 is not copied: {chunk} is not what was written" in result.stdout
    assert recorded(target) == [0, 1, 3]
    document = runs / "a.0" / "zarr.json"
    document.unlink()
    document.mkdir()  # which cannot be read as a file
    other = tmp_path / "other"
    told = ask("copy", runs, "all", other)
    assert (told["epochs"], list(told["left_out"]), recorded(other)) == ([1, 3], ["0", "2"], [1, 3])
    again = begin(runs)
    again.run.rewind(Position(1), "test")
    again.run.end()
    assert invoke("restore", runs, 2).exit_code == 7
    assert recorded(runs) == [0, 1]
    assert not (runs / "a.2.r1").exists()


def test_copies_are_complete_checkpoints(runs, tmp_path):
    again = begin(runs)
    again.run.finish(Position(3))
    again.run.end()
    target = tmp_path / "copy"
    assert ask("copy", runs, 1, target)["epochs"] == [1]
    assert "There already: 1" in invoke("copy", runs, "all", target).stdout  # it goes on
    assert invoke("verify", target, "--deep").exit_code == 0
    one, other = MultiNodeCheckpointManager(runs), MultiNodeCheckpointManager(target)
    assert other.directory.snapshot().is_done
    for epoch in range(4):
        record, copied = one.record(epoch), other.record(epoch)
        info = one.directory.info_of(record.run_number)
        assert {**info, "command": "copy"} == other.directory.info_of(copied.run_number)
        assert record.details.to_json().keys() == copied.details.to_json().keys()
    assert invoke("diff", f"{runs}@2", target).exit_code == 11
    assert invoke("diff", f"{runs}@2", f"{target}@2").stdout == "4 blobs are equal, 0 differ.\n"
    shutil.rmtree(runs)
    for epoch in range(4):
        assert other.open(epoch)["b"].load("step") == epoch
    other = begin(tmp_path / "other")
    save(other, 1, {"another": 5})
    other.run.end()
    assert invoke("copy", target, "all", tmp_path / "other").exit_code == 2
    assert recorded(tmp_path / "other") == [1]


@sampled("every_kth", sample=4, nightly=1)
@pytest.mark.parametrize("command", ["copy", "info", "pin"])
def test_an_epoch_may_be_deleted_at_any_operation(runs, tmp_path, command, every_kth):
    commands = {
        "copy": lambda manager, copy: copy_epochs(manager.directory, [Position(0)], str(copy)),
        "info": lambda manager, copy: describe_checkpoint(manager.directory, Position(0)),
        "pin": lambda manager, copy: manager.pin(3, "paper"),  # which stays
    }
    saved = shutil.copytree(runs, tmp_path / "saved")
    outcomes = set()
    for count in itertools.count(1, every_kth):
        shutil.rmtree(runs)
        shutil.copytree(saved, runs)
        files = PrunedMeanwhile(runs, str(runs), count)
        manager = MultiNodeCheckpointManager(runs, files=files)
        try:
            commands[command](manager, tmp_path / f"copy{count}")
        except CheckpointNotFoundError as error:
            outcomes.add("retired while" in str(error))
        if command == "pin":
            assert MultiNodeCheckpointManager(runs).pins() == {3: ["paper"]}
        if files.left > 0:
            break
    assert outcomes == (set() if command == "pin" else {False, True})


def test_verify_and_copy_of_all_epochs_skip_those_that_are_deleted_meanwhile(runs, tmp_path):
    again, target = shutil.copytree(runs, tmp_path / "again"), str(tmp_path / "copy")
    epochs = MultiNodeCheckpointManager(runs).positions()
    directory = Directory(runs, files=PrunedMeanwhile(runs, "/a.0/"))
    output = verify_epochs(directory, epochs, is_all=True)
    assert output.exit_code == 0
    assert output.text.startswith("whole: 2, 3\ndeleted meanwhile: 0, 1\nChecked 2 epochs ")
    with pytest.raises(CheckpointNotFoundError):
        verify_epochs(directory, [Position(0)])
    directory = Directory(again, files=PrunedMeanwhile(again, "/a.0/"))
    output = copy_epochs(directory, epochs, target, is_all=True)
    assert output.data["epochs"] == [2, 3] == recorded(tmp_path / "copy")


def test_verify_names_each_damaged_epoch_and_entry_and_exits_with_7(runs):
    whole = invoke("verify", runs)
    assert (whole.exit_code, whole.stdout.startswith("whole: 0 to 3\n")) == (0, True)
    chunk = runs / "a.1" / "w" / "c.0"
    chunk.write_bytes(chunk.read_bytes()[::-1])
    result = invoke("verify", runs)
    assert result.exit_code == 7
    assert f"epoch 1: {chunk} is not what was written: expected xxh3_128" in result.stdout
    told = ask("verify", runs)["epochs"]
    assert [epoch["is_whole"] for epoch in told] == [True, False, True, True]
    assert ask("verify", runs, 2, "--deep")["log"]["is_whole"]
    lengthen_log(runs)
    (runs / "_log" / "0000000003.json").write_bytes(b"")  # of epoch 1
    result = invoke("verify", runs, 2, "--deep")
    assert result.exit_code == 7
    damage, epochs, *_ = result.stdout.splitlines()
    assert ("0000000003.json, is empty" in damage, epochs) == (True, "whole: 2")
    log = ask("verify", runs, 2, "--deep")["log"]
    assert log == {"is_whole": False, "error": damage.removeprefix("log: "), "repaired": []}
    assert invoke("fsck", runs, "--repair").exit_code == 0
    assert ask("verify", runs, 2, "--deep")["log"]["repaired"] == [3]


def test_copy_refuses_a_target_within_or_above_a_checkpoint_directory(runs, tmp_path):
    (tmp_path / "link").symlink_to(runs / "a.0")
    before = sorted(tmp_path.rglob("*"))
    for target, says in (
        (runs / "a.0" / "deep", "would be within the checkpoint directory"),
        (tmp_path / "link", "would be within the checkpoint directory"),
        (tmp_path, "is no checkpoint directory, but contains some"),
    ):
        result = invoke("copy", runs, 1, target)
        assert (result.exit_code, says in result.stderr) == (2, True)
    assert sorted(tmp_path.rglob("*")) == before
