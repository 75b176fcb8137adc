"""The commands that compare, prune, pin, bring back, copy and explain checkpoints."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from jobrunner import CheckpointNotFoundError, KeepLast, MultiNodeCheckpointManager
from jobrunner.checkpoint.log.state import STATE_INTERVAL, Claim, make_entry
from jobrunner.checkpoint.maintenance.inspect import _History
from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.cli.checkpoints import copy_epochs, verify_epochs
from jobrunner.cli.command import main
from jobrunner.cli.listing import describe_checkpoint
from jobrunner.run.replay.compare import compare_values
from jobrunner.testing import FaultyFiles, assert_identical
from jobrunner.workspace.workspace import Workspace


def invoke(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def ask(*args: object) -> Any:
    return json.loads(invoke(*args, "--json").stdout)


def begin(path: Path, **options: Any) -> MultiNodeCheckpointManager:
    manager = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False), **options)
    manager.run.start(["a", "b"], {"plan": "p"})
    return manager


def save(
    manager: MultiNodeCheckpointManager, epoch: int, extra: Mapping[str, Any] | None = None
) -> None:
    workspaces = {node: Workspace(node) for node in "ab"}
    for workspace in workspaces.values():
        workspace.globals.update(w=np.arange(6.0), step=epoch, **(extra or {}))
    save = manager.commits.begin(epoch)
    loss = {0: 3.0, 1: 1.0, 2: float("nan")}.get(epoch, 2.0)
    manager.commits.commit(save, save.write(workspaces), {"metrics": {"loss": loss}})
    manager.retention.sweeper.drain()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Epochs 0 to 3, and the run has left."""
    manager = begin(tmp_path / "runs")
    for epoch in range(4):
        save(manager, epoch)
    manager.run.end()
    return tmp_path / "runs"


def _lengthen_log(path: Path) -> None:
    """Let there be a full state, so that what is recorded is known without the entries before."""
    manager = MultiNodeCheckpointManager(path)
    for _ in range(STATE_INTERVAL // 2):
        manager.pin(3)
        manager.unpin(3)


def recorded(path: Path) -> list[int]:
    return MultiNodeCheckpointManager(path).epochs()


# --- diff


def test_diff_names_each_blob_that_differs_and_by_how_much(tmp_path: Path) -> None:
    manager = begin(tmp_path / "k")
    save(manager, 0, {"u": np.array([1.0, 2.0, np.nan]), "gone": 1, "same": [1, {"x": "y"}]})
    save(manager, 1, {"u": np.array([1.0, 2.5, np.nan]), "new": 1, "same": [1, {"x": "y"}]})
    manager.run.end()
    result = invoke("diff", f"{tmp_path}/k@0", "@1")
    assert result.exit_code == 11
    assert "only in A: a/gone\nonly in A: b/gone\nonly in B: a/new\n" in result.stdout
    assert "a/u: 1 of 3 elements differ, by at most 0.5 (relative 0.2)" in result.stdout
    assert "a/step: 1 of 1 elements differ, by at most 1 (relative 1)" in result.stdout
    assert result.stdout.endswith("4 blobs are equal, 4 differ.\n")
    found = ask("diff", f"{tmp_path}/k@0", f"{tmp_path}/k")
    assert (found["is_equal"], found["num_equal"]) == (False, 4)
    first = found["differences"][0]
    assert (first["node"], first["blob"], first["max_abs"]) == ("a", "step", 1.0)


def test_diff_of_equal_checkpoints_exits_with_0_deep_or_not(runs: Path, tmp_path: Path) -> None:
    assert invoke("copy", runs, 2, tmp_path / "copy").exit_code == 0
    for options in ([], ["--deep"]):
        result = invoke("diff", f"{runs}@2", tmp_path / "copy", *options)
        assert (result.exit_code, result.stdout) == (0, "4 blobs are equal, 0 differ.\n")
    assert invoke("diff", "@1", f"{runs}@2").exit_code == 2
    assert invoke("diff", f"{runs}@9", f"{runs}@2").exit_code == 6


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1, 1.0, "type: int and float"),
        (np.zeros(2), np.zeros(3), "shape: (2,) and (3,)"),
        (np.zeros(2), np.zeros(2, np.float32), "dtype: float64 and float32"),
        ("a", "b", "value: 'a' and 'b'"),
        ([1], [1, 2], "length: 1 and 2"),
        ({"x": 1}, {"y": 1}, "only in A"),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}, "order of the keys"),
        (0.0, -0.0, "elements"),
        (np.array([0.0]), np.array([-0.0]), "elements"),
        (0j, complex(0.0, -0.0), "elements"),
        (np.array([0j]), np.array([complex(0.0, -0.0)]), "elements"),
        (np.array([1, np.nan]), np.array([np.nan, 1]), "elements"),
        (np.array(["a", "b"]), np.array(["a", "c"]), "elements"),
        (np.array([True]), np.array([False]), "elements"),
        (10**400, 10**400 + 1, "elements"),
    ],
)
def test_every_kind_of_difference_is_told(one: Any, other: Any, expected: str) -> None:
    assert expected in [found["what"] for found in compare_values(one, other)]
    assert list(compare_values(one, one)) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array([2**62]), np.array([2**62 + 1])),
        (np.ones(1, np.longdouble), np.ones(1, np.longdouble) + np.finfo(np.longdouble).eps),
    ],
    ids=["int64", "longdouble"],
)
def test_what_is_closer_than_doubles_can_tell_is_apart_all_the_same(one: Any, other: Any) -> None:
    (found,) = compare_values(one, other)
    assert found["max_abs"] == float((other - one)[0])


def test_the_second_of_two_epochs_is_sought_where_the_first_is(runs: Path, tmp_path: Path) -> None:
    moved = runs.rename(tmp_path / "k@home")
    assert ask("diff", moved, "@1") == {**ask("diff", f"{moved}@3", "@1"), "a": str(moved)}
    assert ask("diff", f"{moved}@latest", "@1")["is_equal"] is False


# --- prune, pin


def test_prune_says_what_it_would_do_and_does_that(runs: Path) -> None:
    before = sorted(runs.rglob("*"))
    dry = ask("prune", runs, "--keep-last", 2, "--dry-run")
    assert (dry["retired"], dry["kept"], dry["dry_run"]) == ([0, 1], [2, 3], True)
    assert sorted(runs.rglob("*")) == before
    assert dry["nbytes"] > 0
    done = ask("prune", runs, "--keep-last", 2)
    assert done == {**dry, "dry_run": False}
    assert recorded(runs) == [2, 3]
    assert not (runs / "a.0").exists()
    assert "Nothing deleted" in invoke("prune", runs, "--keep-last", 2).stdout


def test_prune_keeps_what_any_option_keeps_the_pinned_and_the_newest(runs: Path) -> None:
    def kept(*options: object) -> list[int]:
        return list(ask("prune", runs, "--dry-run", *options)["kept"])

    assert kept("--keep-every", 2) == [0, 2, 3]
    assert kept("--keep-best", "loss") == [1, 3]
    assert kept("--keep-best", "loss:max:1", "--keep-last", 1) == [0, 3]
    assert invoke("pin", runs, 2, "--label", "paper").exit_code == 0
    assert kept("--keep-best", "loss:2") == [1, 2, 3]
    assert "Epoch 2 is pinned: paper." in invoke("ls", runs).stdout
    assert [epoch["pins"] for epoch in ask("ls", runs)["epochs"]] == [[], [], ["paper"], []]
    assert ask("unpin", runs, 2) == {
        "path": str(runs),
        "epoch": 2,
        "was_pinned": True,
        "pins": [],
    }
    assert "was not pinned" in invoke("unpin", runs, 2).stdout
    assert invoke("pin", runs, 9).exit_code == 6
    assert invoke("prune", runs).exit_code == 2
    assert invoke("prune", runs, "--keep-best", "loss:least").exit_code == 2


def test_prune_by_a_metric_that_nobody_has_reported_is_refused(runs: Path) -> None:
    result = invoke("prune", runs, "--keep-best", "los")
    assert result.exit_code == 2
    assert "reported 'los'" in result.stderr
    assert "Reported metrics: loss" in result.stderr
    assert recorded(runs) == [0, 1, 2, 3]


def test_prune_gives_nothing_up_where_a_record_it_goes_by_cannot_be_read(runs: Path) -> None:
    _lengthen_log(runs)
    (runs / "_log" / "0000000004.json").write_bytes(b"")  # of epoch 1
    assert "Epoch 1 is damaged" in invoke("ls", runs).stdout
    before = sorted(runs.rglob("*"))
    for options in (["--keep-best", "loss"], ["--keep-last", 2], ["--keep-last", 2, "--dry-run"]):
        result = invoke("prune", runs, *options)
        assert result.exit_code == 7
        assert "the record of epoch 1 cannot be read" in result.stderr
        assert "0000000004.json, is empty" in result.stderr
        assert sorted(runs.rglob("*")) == before
    # That of an epoch that stays tells only its metrics.
    assert ask("prune", runs, "--keep-last", 3, "--dry-run")["retired"] == [0]
    (runs / "_log" / "0000000008.json").write_bytes(b"")  # of epoch 3, the newest
    assert ask("prune", runs, "--keep-last", 3)["retired"] == [0]
    result = invoke("prune", runs, "--keep-best", "loss:5")
    assert result.exit_code == 7
    assert "the records of epochs 1, 3 cannot be read" in result.stderr
    assert recorded(runs) == [1, 2, 3]


def test_prune_writes_nothing_where_there_is_no_log(tmp_path: Path) -> None:
    for options in (["--keep-last", 1], ["--keep-best", "loss"], ["--keep-last", 1, "--dry-run"]):
        assert ask("prune", tmp_path, *options)["retired"] == []
    assert list(tmp_path.iterdir()) == []


def test_prune_tells_epochs_as_ranges(runs: Path) -> None:
    result = invoke("prune", runs, "--keep-last", 1)
    assert result.stdout.startswith("deleted: 0 to 2 (")
    assert result.stdout.endswith("\nkept: 3\n")


def test_prune_of_a_directory_that_a_run_holds_is_refused_and_pin_is_not(tmp_path: Path) -> None:
    run = begin(tmp_path / "k", keep=KeepLast(1))
    save(run, 0)
    assert invoke("prune", tmp_path / "k", "--keep-last", 1).exit_code == 9
    assert invoke("pin", tmp_path / "k", 0).exit_code == 0
    save(run, 1)
    assert run.epochs() == [0, 1]
    run.run.end()


# --- restore, copy


def test_an_epoch_that_a_rewind_set_aside_is_brought_back_whole(runs: Path) -> None:
    again = begin(runs)
    again.run.rewind(None, "start afresh")
    save(again, 0, {"other": 1})
    again.run.end()
    aside = [found["path"] for found in ask("fsck", runs)["objects"] if found["status"] == "aside"]
    assert aside == [f"{node}.{epoch}" for node in "ab" for epoch in range(4)]
    found = ask("restore", runs, 3)
    assert found["stores"] == {"a": "a.3.r1", "b": "b.3.r1"}
    assert recorded(runs) == [0, 3]
    manager = MultiNodeCheckpointManager(runs)
    manager.verify(3)
    assert manager.record(3)["details"] == {"metrics": {"loss": 2.0}}
    assert manager.recorded.run_info(3) == {"plan": "p"}
    assert_identical(np.arange(6.0), manager.open(3)["a"].load("w"))
    assert invoke("restore", runs, 3).exit_code == 2
    assert invoke("restore", runs, 7).exit_code == 6
    assert invoke("restore", runs, 0).exit_code == 2
    assert invoke("restore", runs, 2, "--commit", 3).exit_code == 6


def test_damage_is_found_before_anything_is_restored_or_copied(runs: Path, tmp_path: Path) -> None:
    chunk = runs / "a.2" / "w" / "c.0"
    chunk.write_bytes(chunk.read_bytes()[::-1])
    assert invoke("copy", runs, 2, tmp_path / "copy").exit_code == 7
    assert recorded(tmp_path / "copy") == []
    again = begin(runs)
    again.run.rewind(1, "test")
    again.run.end()
    result = invoke("restore", runs, 2)
    assert result.exit_code == 7
    assert str(chunk) in result.stderr
    assert recorded(runs) == [0, 1]
    assert not (runs / "a.2.r1").exists()


def test_copies_are_checkpoints_like_their_originals(runs: Path, tmp_path: Path) -> None:
    again = begin(runs)
    again.run.finish(3)
    again.run.end()
    target = tmp_path / "copy"
    assert ask("copy", runs, "all", target)["epochs"] == [0, 1, 2, 3]
    assert invoke("verify", target, "--deep").exit_code == 0
    one, other = MultiNodeCheckpointManager(runs), MultiNodeCheckpointManager(target)
    assert other.recorded.is_done()
    for epoch in range(4):
        assert one.recorded.run_info(epoch) == other.recorded.run_info(epoch)
        assert one.record(epoch)["details"].keys() == other.record(epoch)["details"].keys()
    shutil.rmtree(runs)
    for epoch in range(4):
        assert other.open(epoch)["b"].load("step") == epoch
    assert invoke("copy", target, 0, target).exit_code == 2


# --- verify --deep, fsck


class PrunedMeanwhile(PosixFiles):
    """A directory in which epochs are given up at the n-th operation on such a path."""

    def __init__(self, path: Path, at: str, count: int = 1) -> None:
        self.path, self.at, self.left = path, at, count

    def before(self, operation: str, path: str) -> None:
        self.left -= self.at in path
        if self.at in path and self.left == 0:
            assert invoke("prune", self.path, "--keep-last", 2).exit_code == 0


@pytest.mark.parametrize("at", ["/_log/", "/a.0/"])
def test_verify_of_all_leaves_out_what_is_given_up_meanwhile(runs: Path, at: str) -> None:
    manager = MultiNodeCheckpointManager(runs, files=PrunedMeanwhile(runs, at))
    epochs = MultiNodeCheckpointManager(runs).epochs()
    output = verify_epochs(manager, epochs, is_all=True)
    assert output.exit_code == 0
    assert [found["epoch"] for found in output.data["epochs"]] == [2, 3]
    assert output.text.startswith("epoch 0: deleted meanwhile\nepoch 1: deleted meanwhile\n")
    with pytest.raises(CheckpointNotFoundError):
        verify_epochs(manager, [0])


@pytest.mark.parametrize("command", ["copy", "info"])
def test_an_epoch_that_is_given_up_at_any_time_is_told_as_that(
    runs: Path, tmp_path: Path, command: str
) -> None:
    shutil.copytree(runs, tmp_path / "saved")
    told = set()
    for count in range(1, 1000):
        shutil.rmtree(runs)
        shutil.copytree(tmp_path / "saved", runs)
        files = PrunedMeanwhile(runs, str(runs), count)
        manager = MultiNodeCheckpointManager(runs, files=files)
        try:
            if command == "copy":
                copy_epochs(manager, [0], str(tmp_path / f"copy{count}"))
            else:
                describe_checkpoint(manager, 0)
        except CheckpointNotFoundError as error:
            told.add("retired while" in str(error))
        if files.left > 0:
            break
    assert told == {False, True}


def test_a_pin_is_made_whatever_another_writer_does_meanwhile(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path / "saved")
    for count in range(1, 1000):
        shutil.rmtree(runs)
        shutil.copytree(tmp_path / "saved", runs)
        files = PrunedMeanwhile(runs, str(runs), count)
        manager = MultiNodeCheckpointManager(runs, files=files)
        manager.pin(3, "paper")
        assert MultiNodeCheckpointManager(runs).pins() == {3: ["paper"]}
        if files.left > 0:
            break


def test_a_copy_of_all_leaves_out_what_is_given_up_meanwhile(runs: Path, tmp_path: Path) -> None:
    manager = MultiNodeCheckpointManager(runs, files=PrunedMeanwhile(runs, "/a.0/"))
    target = str(tmp_path / "copy")
    output = copy_epochs(manager, manager.epochs(), target, is_all=True)
    assert output.data["epochs"] == [2, 3] == recorded(tmp_path / "copy")
    assert output.text == f"Copied to {target}: 2, 3 (deleted meanwhile: 0, 1)"
    with pytest.raises(CheckpointNotFoundError):
        copy_epochs(manager, [0], str(tmp_path / "other"))


def test_a_copy_of_all_epochs_where_there_are_none_is_no_success(tmp_path: Path) -> None:
    result = invoke("copy", tmp_path, "all", tmp_path / "copy")
    assert result.exit_code == 6
    assert "No epoch is recorded" in result.stderr


def test_verify_deep_reads_the_log_from_its_first_entry(runs: Path) -> None:
    assert invoke("verify", runs, "--deep").stdout.startswith("log: whole\nepoch 0: whole\n")
    entry = runs / "_log" / "0000000001.json"
    entry.write_bytes(entry.read_bytes()[:-2])
    assert invoke("verify", runs, "--deep").exit_code == 7


def test_verify_deep_tells_of_the_log_as_json_what_it_tells_as_text(runs: Path) -> None:
    assert ask("verify", runs)["log"] is None
    assert ask("verify", runs, "--deep")["log"] == {"is_whole": True, "error": None, "repaired": []}
    _lengthen_log(runs)
    (runs / "_log" / "0000000004.json").write_bytes(b"")  # of epoch 1
    result = invoke("verify", runs, 2, "--deep")
    assert result.exit_code == 7
    first, second, *_ = result.stdout.splitlines()
    assert second == "epoch 2: whole"  # whatever the log is like
    told = ask("verify", runs, 2, "--deep")
    assert told["log"] == {"is_whole": False, "error": first.removeprefix("log: "), "repaired": []}
    assert "0000000004.json, is empty" in first
    assert [epoch["is_whole"] for epoch in told["epochs"]] == [True]
    assert invoke("fsck", runs, "--repair").exit_code == 0
    result = invoke("verify", runs, "--deep")
    assert result.exit_code == 0
    assert result.stdout.startswith("log: whole, except for the repaired entries 4\n")
    told = ask("verify", runs, "--deep")["log"]
    assert told == {"is_whole": True, "error": None, "repaired": [4]}


def test_fsck_of_a_directory_without_strays_shows_none(runs: Path) -> None:
    result = invoke("fsck", runs)
    assert (result.exit_code, result.stdout) == (0, f"{runs}: 18 live.\n")


def test_fsck_explains_every_object(runs: Path) -> None:
    again = begin(runs)
    again.run.rewind(2, "a try")
    save = again.commits.begin(3)
    (runs / save.stores["a"]).mkdir()  # a save that is under way
    for stray in ("notes.txt", "z.7", "a.0/more", "_log/x", "_log/00000000001.json"):
        (runs / stray).write_text("?")
    (runs / "_log" / ".0000000099.ab.tmp").write_text("{")
    (runs / "_save_now").touch()
    (runs / "a.1" / "w" / "c.0").unlink()
    shutil.rmtree(runs / "b.2")
    found = {finding["path"]: finding for finding in ask("fsck", runs)["objects"]}
    status = {path: about["status"] for path, about in found.items()}
    run = next(path for path in status if path.startswith("_runs/"))
    expected = {
        "notes.txt": "stray",
        "z.7": "stray",
        "a.0/more": "stray",
        "_log/x": "stray",
        "_log/00000000001.json": "stray",
        "_log/.0000000099.ab.tmp": "pending",
        "_save_now": "pending",
        run: "pending",
        "a.3": "aside",
        "b.3": "aside",
        "a.3.r1": "pending",
        "a.1/w/c.0": "damaged",
        "b.2": "damaged",
        "a.0": "live",
        "_log/0000000001.json": "live",
    }
    assert {path: status[path] for path in expected} == expected
    assert "a try" in found["a.3"]["explanation"]
    assert "No entry of the log claims this name" in found["z.7"]["explanation"]
    assert "not recorded: a run is writing it" in found["a.3.r1"]["explanation"]
    assert "expected 48 bytes, found missing" in found["a.1/w/c.0"]["explanation"]
    result = invoke("fsck", runs, "--brief")
    assert result.exit_code == 7
    assert "notes.txt" in result.stdout
    assert "_save_now" not in result.stdout
    again.run.end()


def test_a_store_set_aside_for_its_missing_root_document_is_no_stray(runs: Path) -> None:
    root = runs / "a.3" / "zarr.json"
    content = root.read_bytes()
    root.unlink()
    again = begin(runs)
    again.run.set_aside(3, "a.3/zarr.json is missing.")
    again.run.end()
    found = {finding["path"]: finding for finding in ask("fsck", runs)["objects"]}
    assert [found[name]["status"] for name in ("a.3", "b.3")] == ["aside", "aside"]
    assert "is missing. To record it again, run `jobrunner restore" in found["a.3"]["explanation"]
    root.write_bytes(content)
    assert invoke("restore", runs, 3).exit_code == 0
    assert recorded(runs) == [0, 1, 2, 3]


@pytest.mark.parametrize("is_missing", [True, False], ids=["missing", "damaged"])
def test_fsck_of_a_damaged_log_says_so_of_each_entry_and_store(
    runs: Path, is_missing: bool
) -> None:
    entry = runs / "_log" / "0000000002.json"
    if is_missing:
        entry.unlink()
    else:
        entry.write_text("{}")
    found = {finding["path"]: finding for finding in ask("fsck", runs)["objects"]}
    assert found["_log/0000000002.json"]["status"] == "damaged"
    assert found["_log/0000000003.json"]["status"] == "live"
    assert found["a.0"]["explanation"].startswith("The log is damaged")
    result = invoke("fsck", runs)
    assert result.exit_code == 7
    assert "a.0 ... a.3" in result.stdout  # not a line for each
    assert "(4 alike) The log is damaged" in result.stdout
    assert f"`jobrunner fsck {runs} --repair` would do this:" in result.stdout
    assert "epochs recorded anew, from stores" in result.stdout
    assert ask("fsck", runs)["repair"]["rebuilt"] == [0]


def test_fsck_repairs_a_damaged_log_once(runs: Path) -> None:
    entry = runs / "_log" / "0000000002.json"
    entry.write_text("{}")
    repaired = ask("fsck", runs, "--repair")["repair"]
    assert list(repaired["lost"]) == ["2"]
    assert (repaired["kept"], repaired["rebuilt"]) == ([1, 2, 3], [0])
    assert (repaired["given_up"], repaired["unproven"]) == ({}, {})
    assert entry.read_text() == "{}"
    assert recorded(runs) == [0, 1, 2, 3]
    result = invoke("fsck", runs)
    assert result.exit_code == 0
    assert "Damaged or lost; entry 10 replaces it. It stays as it is." in result.stdout
    again = invoke("fsck", runs, "--repair")
    assert (again.exit_code, again.stdout) == (0, f"{runs}: nothing to repair.\n")
    assert invoke("verify", runs, "--deep").stdout.startswith(
        "log: whole, except for the repaired entries 2\n"
    )


def test_copies_without_a_log_become_a_checkpoint_directory(runs: Path, tmp_path: Path) -> None:
    for node in "ab":  # what CopyTo leaves
        shutil.copytree(runs / f"{node}.3", tmp_path / "copies" / f"{node}.3")
    assert invoke("fsck", tmp_path / "copies").exit_code == 0
    assert invoke("fsck", tmp_path / "copies", "--repair").exit_code == 0
    assert recorded(tmp_path / "copies") == [3]
    assert MultiNodeCheckpointManager(tmp_path / "copies").open(3)["a"].load("step") == 3


# --- what programs read


def documented(command: str) -> tuple[set[str], dict[str, set[str]]]:
    """The keys that the guide names for a command, and those of what some of them hold."""
    guide = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    found = re.search(rf"^\| `{command}` \| (`path`.*|`a`.*) \|$", guide, re.M)
    assert found is not None, command
    each = dict(re.findall(r"`(\w+)` \(each ([^)]*)\)", found[1]))
    keys = re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", found[1]))
    return set(keys), {key: set(re.findall(r"`(\w+)`", text)) for key, text in each.items()}


def test_every_command_answers_in_the_keys_that_the_guide_names(runs: Path, tmp_path: Path) -> None:
    again = begin(runs)
    again.run.rewind(2, "a try")
    again.run.end()
    for command, *arguments in (
        ("ls", runs),
        ("info", runs, 2),
        ("verify", runs, "--deep"),
        ("diff", f"{runs}@1", "@2"),
        ("pin", runs, 1),
        ("unpin", runs, 1),
        ("restore", runs, 3),
        ("copy", runs, 3, tmp_path / "copy"),
        ("prune", runs, "--keep-last", 2),
        ("fsck", runs),
    ):
        keys, each = documented(command)
        told = ask(command, *arguments)
        assert set(told) == keys, command
        for key, expected in each.items():
            items = list(told[key].values() if isinstance(told[key], dict) else told[key])
            assert items, (command, key)
            assert all(set(item) <= expected for item in items), (command, key)


def test_fsck_looks_up_what_an_entry_gives_up_and_does_not_walk_all_epochs() -> None:
    class Recorded(dict[int, Claim]):
        def __iter__(self) -> Any:
            raise AssertionError("with each entry, it would be quadratic")

    history = _History()
    bodies: list[tuple[str, dict[str, Any]]] = [("run", {"nodes": ["a"], "info": {}})]
    for epoch in range(3):
        claim = {"epoch": epoch, "retry": 0}
        bodies.append(("begin", claim))
        bodies.append(("commit", {**claim, "run_number": 0, "stores": {}, "details": {}}))
    bodies += [("retire", {"epochs": [0]}), ("rewind", {"only": 2, "reason": "damage"})]
    for number, (kind, body) in enumerate(bodies):
        history.recorded = Recorded(history.recorded.items())
        history.take_in(make_entry(number, kind, "r", body))
    assert list(history.recorded.items()) == [(1, Claim(1, 0))]
