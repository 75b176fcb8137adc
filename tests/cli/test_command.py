"""The command line without a cluster: help, usage, exit codes, `ls`, `info` and `verify`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from jobrunner import errors
from jobrunner.checkpoint import MultiNodeCheckpointManager
from jobrunner.cli.command import (
    DIFFERENT,
    EXIT_CODES,
    SAVES_FAILED,
    Command,
    Output,
    exit_code_of,
    main,
)
from jobrunner.positions import Position
from jobrunner.workspace.workspace import Workspace
from tests.saves import save_epoch


def _invoke(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def _json(*args: object) -> Any:
    return json.loads(_invoke(*args, "--json").stdout)


def _save(directory: Path, epochs: Mapping[int, Mapping[str, Any]], *, done: bool = False) -> None:
    """Record epochs of the nodes ``a`` and ``b``, with these details."""
    manager = MultiNodeCheckpointManager(directory)
    manager.run.start(["a", "b"], {})
    try:
        for epoch, details in epochs.items():
            workspaces = {node: Workspace(node) for node in ("a", "b")}
            workspaces["a"].globals.update(weights=np.full((3, 4), epoch, np.float32), step=epoch)
            workspaces["b"].globals.update(text="x" * 100)
            save_epoch(manager, Position.of(epoch), workspaces, details)
        if done:
            manager.run.finish(max(epochs))
    finally:
        manager.run.end()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory with epochs 0, 1, 2; the job has ended."""
    directory = tmp_path / "runs"
    details = {"metrics": {"loss": float("nan"), "n": 3}, "stopped_by": ["a/stop"]}
    _save(directory, {0: {}, 1: {}, 2: details}, done=True)
    return directory


def test_without_a_command_the_help_is_shown_as_it_is_written() -> None:
    result = _invoke()
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert lines[0] == "Usage: jobrunner [OPTIONS] COMMAND [ARGS]..."
    assert "Exit codes:" in result.stderr
    assert "\\n" not in result.stderr
    assert "..." not in "\n".join(lines[1:])  # what a command does is not cut


# --- ls


def test_ls_shows_each_epoch_and_whether_the_job_has_finished(runs: Path) -> None:
    result = _invoke("ls", runs)
    assert result.exit_code == 0
    header, *rows, disk, end = result.stdout.splitlines()
    assert header.split() == ["EPOCH", "SAVED", "NODES", "SIZE", "TIME", "METRICS"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]
    assert rows[2].endswith("loss=nan n=3")
    assert disk.endswith("with what epochs share counted once.")
    assert end == "The job has finished."


def test_ls_json_has_the_same_in_strict_json(runs: Path) -> None:
    found = _json("ls", runs)
    assert (found["path"], found["is_done"]) == (str(runs), True)
    assert [epoch["epoch"] for epoch in found["epochs"]] == [0, 1, 2]
    assert found["epochs"][2]["metrics"] == {"loss": None, "n": 3}
    assert found["epochs"][2]["stopped_by"] == ["a/stop"]
    assert found["epochs"][0]["nodes"] == ["a", "b"]
    assert found["epochs"][0]["nbytes"] > 48


def test_ls_of_an_unfinished_job_says_so(tmp_path: Path) -> None:
    _save(tmp_path / "runs", {0: {}})
    assert "The job has not finished." in _invoke("ls", tmp_path / "runs").stdout


def test_ls_of_an_empty_directory_is_no_error_but_of_a_missing_one_is(tmp_path: Path) -> None:
    empty = _invoke("ls", tmp_path)
    assert (empty.exit_code, empty.stdout) == (0, f"No epoch is recorded in {tmp_path}.\n")
    none = _invoke("ls", tmp_path / "tpyo")
    assert (none.exit_code, none.stdout) == (6, "")
    assert none.stderr.startswith("Error: There is no directory")
    unset = _invoke("ls", "")
    assert (unset.exit_code, unset.stderr) == (
        2,
        "Error: The name of the directory is empty. Is a variable not set?\n",
    )
    (tmp_path / "file").write_text("")
    file = _invoke("ls", tmp_path / "file")
    assert (file.exit_code, file.stdout) == (6, "")
    assert "but a file" in file.stderr


# --- info


def test_info_shows_the_record_and_the_blobs(runs: Path) -> None:
    text = _invoke("info", runs, "latest").stdout
    for part in (
        f"epoch 2 of {runs}",
        "stopped by a/stop",
        "(a.2, ",
        "  weights  float32  3 x 4",
        "  step     int      2",
        "  text  str  'xxxx",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) < 100


def test_info_json_has_whole_values(runs: Path) -> None:
    found = _json("info", runs, 1)
    assert found["epoch"] == 1
    assert found["nodes"]["a"]["store"] == "a.1"
    assert found["nodes"]["a"]["blobs"] == {
        "weights": {"type": "array", "shape": [3, 4], "dtype": "float32"},
        "step": {"type": "int", "value": "1"},
    }
    assert found["nodes"]["b"]["blobs"]["text"]["value"] == repr("x" * 100)


def test_info_shows_arrays_of_every_kind_as_numpy_does(tmp_path: Path) -> None:
    blobs = {
        "scalar": np.array(3.5),
        "big": np.zeros((2, 3), ">f8"),
        "fields": np.zeros(4, [("a", ">i4"), ("b", "f4")]),
        "fortran": np.asfortranarray(np.zeros((2, 5))),
        "nested": {"layers": [np.ones(5), np.zeros((2, 2), ">i2")], "n": 1},
    }
    workspace = Workspace("a")
    workspace.globals.update(blobs)
    manager = MultiNodeCheckpointManager(tmp_path / "runs")
    manager.run.start(["a"], {})
    save_epoch(manager, Position(0), {"a": workspace})
    manager.run.end()
    text = _invoke("info", tmp_path / "runs", 0).stdout
    for part in (
        "scalar   float64                       no axes: 3.5",
        "big      >f8                           2 x 3",
        "fields   [('a', '>i4'), ('b', '<f4')]  4",
        "fortran  float64                       2 x 5",
        "nested   dict                          {'layers': [float64[5], >i2[2 x 2]], 'n': 1}",
    ):
        assert part in text
    found = _json("info", tmp_path / "runs", 0)["nodes"]["a"]["blobs"]
    assert found["scalar"] == {"type": "array", "shape": [], "dtype": "float64", "value": "3.5"}
    assert found["big"] == {"type": "array", "shape": [2, 3], "dtype": ">f8"}


def test_info_of_an_epoch_that_is_not_recorded_exits_with_6(runs: Path, tmp_path: Path) -> None:
    missing = _invoke("info", runs, 7)
    assert missing.exit_code == 6
    assert "Epoch 7" in missing.stderr
    assert _invoke("info", tmp_path, "latest").exit_code == 6
    assert _invoke("info", runs, "last").exit_code == 2


# --- verify


def _damage(store: Path) -> None:
    chunk = max((path for path in store.rglob("c*") if path.is_file()), key=lambda p: p.name)
    data = bytearray(chunk.read_bytes())
    data[0] ^= 1
    chunk.write_bytes(data)


def test_verify_of_an_empty_directory_exits_with_6(tmp_path: Path) -> None:
    result = _invoke("verify", tmp_path)
    assert (result.exit_code, result.stdout) == (6, f"No epoch is recorded in {tmp_path}.\n")


def test_verify_of_whole_epochs_exits_with_0(runs: Path) -> None:
    result = _invoke("verify", runs)
    assert result.exit_code == 0
    assert result.stdout == "epoch 0: whole\nepoch 1: whole\nepoch 2: whole\n"
    assert _invoke("verify", runs, 1).stdout == "epoch 1: whole\n"


def test_verify_names_each_damaged_epoch_and_exits_with_7(runs: Path) -> None:
    _damage(runs / "a.1")
    result = _invoke("verify", runs)
    assert result.exit_code == 7
    assert "epoch 0: whole\nepoch 1: " in result.stdout
    assert "expected xxh3_128" in result.stdout
    assert "epoch 2: whole" in result.stdout
    found = _json("verify", runs)
    assert [epoch["is_whole"] for epoch in found["epochs"]] == [True, False, True]
    assert _invoke("verify", runs, "latest").exit_code == 0


# --- usage, errors, exit codes


@pytest.mark.parametrize(
    "args",
    [
        ["frobnicate"],
        ["run", "job.py"],
        ["run", "job.py", "--checkpoint", "d", "--resume", "last"],
        ["run", "job.py", "--checkpoint", "d", "--resume", "-1"],
        ["run", "job.py", "--checkpoint", "d", "--epochs", "0"],
        ["run", "job.py", "--checkpoint", "d", "--scheduler", "tcp://h:1", "--workers", "2"],
        ["run", "job.py", "--checkpoint", "d"],
        ["run", "no such job", "--checkpoint", "d"],
        ["run", "job.py", "--checkpoint", "d", "--resume", "9" * 5000],
        ["info", ".", "9" * 5000],
        ["prune", ".", "--keep-best", "m:" + "9" * 5000],
        ["ls"],
    ],
    ids=lambda args: " ".join(args)[:80],
)
def test_wrong_usage_exits_with_2_and_no_traceback(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = _invoke(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr
    assert "Traceback" not in result.stderr
    told = json.loads(_invoke(*args, "--json").stdout)
    assert told["exit_code"] == 2
    assert told["error"]["type"] in ("UsageError", "DefinitionError")
    assert told["error"]["message"].splitlines()[0] in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_url_of_no_object_store_is_refused() -> None:
    assert _invoke("ls", "http://host/runs").exit_code == 2


def test_every_error_of_jobrunner_has_an_exit_code() -> None:
    def all_of(kind: type[BaseException]) -> set[type[BaseException]]:
        return {kind}.union(*map(all_of, kind.__subclasses__()))

    codes = {kind.__name__: exit_code_of(kind("x")) for kind in all_of(errors.JobRunnerError)}
    del codes["JobRunnerError"]
    assert 1 not in codes.values(), codes
    assert codes["BlobNotFoundError"] == codes["TaskFailedError"] == 3
    # They are OSErrors too: the most derived class decides.
    assert codes["CheckpointNotFoundError"] == 6
    assert codes["CheckpointCorruptError"] == 7


def test_the_exit_codes_are_in_the_help_and_in_the_guide() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    for code in {0, 1, DIFFERENT, SAVES_FAILED, 130, 143, *EXIT_CODES.values()}:
        assert f"| {code} |" in guide
        assert str(code) in _invoke("--help").stdout


def test_a_bug_is_not_hidden() -> None:
    @click.command("broken", cls=Command)
    def broken() -> Output:
        raise ZeroDivisionError

    assert isinstance(CliRunner().invoke(broken).exception, ZeroDivisionError)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from jobrunner.cli.command import main\n"
        "main(['run', '--help'], standalone_mode=False)\n"
        "heavy = {'numpy', 'zarr', 'dask', 'distributed', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'help imported {heavy}' if heavy else 0)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--checkpoint DIR" in done.stdout


def test_listing_loads_only_what_reads_the_log(runs: Path) -> None:
    code = (
        "import sys\n"
        "from jobrunner.__main__ import main\n"
        f"main(['ls', {str(runs)!r}], standalone_mode=False)\n"
        "heavy = {'numpy', 'zarr', 'dask', 'distributed', 'rich'}\n"
        "heavy |= {f'jobrunner.{name}' for name in ('worker', 'cluster', 'run', 'view', 'compile')}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'ls imported {heavy}' if heavy else 0)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "EPOCH" in done.stdout


def test_a_closed_pipe_is_no_failure(runs: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "jobrunner", "ls", str(runs), "--json"]
    with subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        told = process.stderr.read()
    assert (process.returncode, told) == (0, "")


def test_the_version_is_that_of_the_package() -> None:
    import jobrunner

    assert _invoke("--version").stdout == f"jobrunner, version {jobrunner.__version__}\n"
