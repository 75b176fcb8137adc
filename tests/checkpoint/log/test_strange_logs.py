"""Logs that no run has written: each command ends soon, with an error that names file and field."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from jobrunner import (
    CheckpointCorruptError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Task,
)
from jobrunner.checkpoint import EpochRecord, inspect_directory, plan_repair, repair_log
from jobrunner.checkpoint.log.handler import decode_entry, frame
from jobrunner.checkpoint.log.state import State
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles
from tests.saves import NodeRun

HEAD = {"format", "number", "run", "id", "time"}
Edit = Callable[[int, Callable[[dict[str, Any]], object]], Path]


@pytest.fixture
def path(node_run: NodeRun) -> Path:
    """Two epochs, each with its own claim: entries 1 and 3 begin these, 2 and 4 record them."""
    for epoch in (0, 2):
        node_run.save(epoch, {"w": np.arange(3) + epoch}, details={"metrics": {"loss": 0.5}})
    node_run.end()
    return node_run.path


@pytest.fixture
def edit(path: Path) -> Edit:
    """Changes an entry, and its digest."""

    def edit(number: int, change: Callable[[dict[str, Any]], object]) -> Path:
        file = path / "_log" / f"{number:010d}.json"
        entry = decode_entry(file.read_bytes(), number, str(file))
        change(entry)
        file.write_bytes(frame(json.dumps(entry).encode()))
        return file

    return edit


def manager_of(path: Path) -> MultiNodeCheckpointManager:
    return MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))


def damaged(path: Path) -> dict[str, str]:
    found = inspect_directory(manager_of(path).directory)
    return {it.path: it.explanation for it in found if it.status == "damaged"}


@pytest.mark.parametrize("number", ["9" * 10, "9" * 13, "9" * 200])
def test_an_absurd_number_ends_each_command_at_once(path: Path, number: str) -> None:
    file = path / "_log" / f"{number}.json"
    file.write_bytes(b"")
    started = time.process_time()
    with pytest.raises(CheckpointCorruptError, match=rf"{file} is no entry.*found 7"):
        manager_of(path).epochs()
    with pytest.raises(CheckpointCorruptError, match="found 7"):
        repair_log(manager_of(path).directory)
    assert "move this file" in damaged(path)[f"_log/{number}.json"]
    assert time.process_time() - started < 1
    file.unlink()
    assert manager_of(path).epochs() == [0, 2]


def test_states_that_no_run_has_kept_are_not_used(path: Path) -> None:
    last = decode_entry((path / "_log" / "0000000005.json").read_bytes(), 5, "")
    state = State()
    state.number = 5
    state.last_id = last["id"]
    state.recorded = {Position(7): 4}
    whole = msgspec.json.decode(state.to_bytes())
    changes: list[dict[str, Any]] = [
        {"format": 2},
        {"number": 10**19},
        {"recorded": [[7, 6]]},
        {"recorded": [[10**18, 4]]},
        {"recorded": [["7", 4]]},
        {"pins": [[7]]},
        {"upto": "x"},
        {"surplus": 1},
        {"strangers": [[] for _ in range(100_000)]},
    ]
    file = path / "_log" / "state.json"
    for change in changes:
        file.write_bytes(frame(msgspec.json.encode({**whole, **change})))
        assert manager_of(path).epochs() == [0, 2]
    contents = [b"", b"x" * 1000, frame(b"[" * 100_000), frame(b"null")]
    state.last_id = "of another log"
    for content in (*contents, frame(state.to_bytes())):
        file.write_bytes(content)
        assert manager_of(path).epochs() == [0, 2]


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        ("claim", {"upto": 10**18, "retry": 3}, r"invalid field.*\$\.upto"),
        ("claim", {"upto": 9, "retry": 1}, "retry number 1 was used before"),
        ("pin", {"epoch": f"{10**18}.s1", "label": "x"}, "invalid field"),
    ],
)
def test_an_entry_that_no_run_can_append_is_damage(
    path: Path, edit: Edit, kind: str, fields: dict[str, Any], told: str
) -> None:
    def change(entry: dict[str, Any]) -> None:
        head = {name: entry[name] for name in HEAD}
        entry.clear()
        entry.update({**head, "kind": kind, **fields})

    file = edit(5, change)
    with pytest.raises(CheckpointCorruptError, match=told):
        manager_of(path).epochs()
    assert "_log/0000000005.json" in damaged(path)
    plan = plan_repair(manager_of(path).directory)
    assert (plan.kept, list(plan.lost)) == ([Position(0), Position(2)], [5])
    assert file.exists()


@pytest.mark.parametrize(
    ("details", "field"),
    [
        ({"replicated": {"x": []}}, r"replicated\[\.\.\.\]"),
        ({"callbacks": {"EarlyStopping": {"waited": [1]}}}, r"callbacks\[\.\.\.\]\[\.\.\.\]"),
        ({"metrics": {"loss": {"$float": []}}}, "float"),
    ],
)
def test_details_that_do_not_fit_damage_one_epoch(
    path: Path, edit: Edit, details: Any, field: str
) -> None:
    edit(4, lambda entry: entry["records"][0].update(details=details))
    manager = manager_of(path)
    with pytest.raises(CheckpointCorruptError, match=rf"entry 4 of the log.*{field}"):
        manager.record(2)
    assert manager.open(0)["a"].load("w")[2] == 2
    found = [type(it) for _, it in manager.directory.records()]
    assert found == [EpochRecord, CheckpointCorruptError]


def test_a_plan_that_does_not_fit_counts_as_unknown(path: Path, edit: Edit) -> None:
    edit(0, lambda entry: entry["info"].update(plan={"nodes": [1]}))
    with Job("j") as job:
        with job.init_group:
            Task(lambda: 1, outputs="w", node="a")
        Task(lambda w: w, inputs="w", outputs="w", node="a")
    plan = JobRunner(job, manager_of(path), num_epochs=3).plan_resume()
    assert (plan.epoch, plan.changes) == (2, ())


def test_a_directory_in_the_place_of_an_entry_damages_that_one_alone(path: Path) -> None:
    file = path / "_log" / "0000000003.json"
    file.unlink()
    file.mkdir()
    with pytest.raises(CheckpointCorruptError, match=f"{file} is a directory"):
        manager_of(path).epochs()
    assert [it for it in damaged(path) if "_log" in it] == ["_log/0000000003.json"]
    plan = plan_repair(manager_of(path).directory)
    assert (plan.kept, list(plan.lost)) == ([Position(0), Position(2)], [3])


@pytest.mark.parametrize("name", ["a.2/../../victim", "../victim", "a.2.r01", "a.1", ""])
def test_a_record_cannot_name_a_directory_elsewhere(path: Path, edit: Edit, name: str) -> None:
    """A run deletes the stores of records that the log has given up, by their names."""
    victim = path.with_name("victim")
    victim.mkdir()
    (victim / "zarr.json").write_bytes(b"mine")

    def change(entry: dict[str, Any]) -> None:
        entry["records"][0]["stores"]["a"]["name"] = name
        entry["retires"] = [0]

    edit(4, change)
    with pytest.raises(CheckpointCorruptError, match=r"0000000004.json.*(name of a store|name`)"):
        manager_of(path).run.start(["a"], {})
    assert (victim / "zarr.json").read_bytes() == b"mine"
