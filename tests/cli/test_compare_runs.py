"""`compare` finds the first epoch whose metrics, or blobs, differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobrunner import MultiNodeCheckpointManager
from jobrunner.checkpoint.log.handler import decode_entry, encode_entry
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.workspace import Workspace
from tests.cli.directories import ask, invoke
from tests.saves import save_epoch

PLAN = {"job": "walk", "seed": 0, "python": "3.11", "nodes": {"a": ["x"], "b": ["x"]}}


def record(
    path: Path, values: Sequence[float], code: str = "1", first: int = 0, **parameters: Any
) -> None:
    """A run whose blob b/x has these values, epoch by epoch; a/x is always the same."""
    manager = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
    plan = {**PLAN, "structure": {"epoch:a/t": "1"}, "code": {"epoch:a/t": code}}
    manager.run.start(["a", "b"], {"plan": {**plan, "parameters": parameters}})
    for epoch, value in enumerate(values, first):
        workspaces = {node: Workspace(node) for node in "ab"}
        workspaces["a"].globals["x"] = np.arange(6.0)
        workspaces["b"].globals["x"] = np.full(3, value)
        metrics = {"loss": value, "nan": float("nan"), "note": "text"}
        save_epoch(manager, Position.of(epoch), workspaces, {"metrics": metrics})
    manager.run.end()


def compare(path: Path) -> Mapping[str, Any]:
    return ask("compare", path / "a", path / "b")


def test_equal_runs_are_equal(tmp_path: Path) -> None:
    for name in "ab":
        record(tmp_path / name, [1.0, 2.0, 3.0], k=1)
    result = invoke("compare", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 0
    assert result.stdout.endswith("The blobs of 3 common epochs are equal.\n")
    found = compare(tmp_path)
    assert (found["is_equal"], found["differ_at"], found["metrics_differ_at"]) == (True, None, None)
    assert (found["num_compared"], found["changes"]) == (3, [])


def test_runs_that_part_and_meet_again_differ_first_where_they_part(tmp_path: Path) -> None:
    record(tmp_path / "a", [1, 2, 3, 4, 5, 6, 7, 8], k=1, lr=0.1)
    record(tmp_path / "b", [1, 2, 9, 4, 5, 6, 7, 8], code="2", k=2, lr=0.1)
    result = invoke("compare", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 11
    lines = result.stdout.splitlines()
    assert "From A to B, parameter 'k' was 1 and is 2" in lines
    assert "From A to B, task epoch:a/t has other code" in lines
    assert "The metrics of 8 common epochs first differ at epoch 2." in lines
    assert (
        "The blobs of 2 common epochs are equal. The first blobs that differ are those of epoch 2:"
        in lines
    )
    assert lines[-2] == "b/x: 3 of 3 elements differ, by at most 6 (relative 0.667)"
    assert ["2", "3", "9", "nan", "nan"] in [line.split() for line in lines]
    found = compare(tmp_path)
    assert (found["differ_at"], found["metrics_differ_at"], found["num_compared"]) == (2, 2, 3)
    assert found["metrics"][2] == {
        "epoch": 2,
        "a": {"loss": 3, "nan": None, "note": "text"},
        "b": {"loss": 9, "nan": None, "note": "text"},
    }
    assert [(it["node"], it["blob"]) for it in found["difference"]["differences"]] == [("b", "x")]


def test_runs_without_a_common_epoch_are_not_equal(tmp_path: Path) -> None:
    record(tmp_path / "a", [1.0, 2.0])
    record(tmp_path / "b", [1.0], first=2)
    result = invoke("compare", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 11
    assert "No epoch is recorded in both" in result.stdout
    assert compare(tmp_path)["is_equal"] is False


def test_many_differences_are_shortened(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        manager = MultiNodeCheckpointManager(tmp_path / name, files=FaultyFiles(sync=False))
        manager.run.start(["a"], {})
        workspace = Workspace("a")
        workspace.globals.update({f"x{i}": value for i in range(30)})
        save_epoch(manager, Position(0), {"a": workspace})
        manager.run.end()
    lines = invoke("compare", tmp_path / "a", tmp_path / "b").stdout.splitlines()
    assert lines[-2] == f"... and 20 more: jobrunner diff {tmp_path}/a@0 {tmp_path}/b@0"
    assert len(lines) < 20
    assert "What their jobs were is not recorded." in lines


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    record(tmp_path / "a", [1.0])
    result = invoke("compare", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 6
    assert str(tmp_path / "b") in result.output


@pytest.mark.parametrize("field", ["code", "structure", "nodes", "python", "parameters"])
def test_runs_are_compared_whatever_their_plans_lack(field: str, tmp_path: Path) -> None:
    for name in "ab":
        record(tmp_path / name, [1.0])
    forged = tmp_path / "b" / "_log" / "0000000000.json"
    entry = dict(decode_entry(forged.read_bytes(), 0, str(forged)))
    del entry["info"]["plan"][field]
    entry["info"]["plan"]["fingerprint"] = "0" * 32
    forged.write_bytes(encode_entry(entry))
    for pair in (("a", "b"), ("b", "a")):
        result = invoke("compare", *(tmp_path / name for name in pair))
        assert result.exit_code == 0, (result.output, result.exception)
    found = compare(tmp_path)["changes"]
    assert (not found) == (field in ("python", "parameters")), found
