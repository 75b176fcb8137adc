"""Logs that no run has written: each command ends soon, with an error that names file and field."""

from __future__ import annotations

import hashlib
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
from jobrunner.checkpoint.log.entries import parse_entry
from jobrunner.checkpoint.log.handler import decode_entry, frame
from jobrunner.checkpoint.log.state import State
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles
from tests.saves import NodeRun

HEAD = {"format": 1, "number": 7, "run": "r", "id": "x", "time": "then"}
STORE = {"name": "a.1", "sha256": "0" * 64, "nbytes": 1}
FIELDS: dict[str, dict[str, Any]] = {
    "run": {"nodes": ["a"], "info": {}},
    "claim": {"upto": "4.s2", "retry": 1, "strangers": [[3, 2]]},
    "commit": {"claim": 1, "records": [{"at": 1, "stores": {"a": STORE}}], "retires": [0]},
    "rewind": {"after": "4.s2", "reason": "test"},
    "retire": {"epochs": [0, "4.s2"]},
    "pin": {"epoch": "4.s2", "label": "x"},
    "unpin": {"epoch": 4, "label": None},
    "done": {"epoch": 4},
    "end": {"upto": "4.s2"},
    "lost": {},
}


def tree_of(kind: str) -> dict[str, Any]:
    return {"kind": kind, **HEAD, **FIELDS[kind]}


def record(**fields: Any) -> dict[str, Any]:
    return {"records": [{"at": 1, "stores": {"a": STORE}, **fields}]}


@pytest.mark.parametrize("kind", FIELDS)
def test_a_field_that_is_missing_or_unknown_is_named(kind: str) -> None:
    tree = tree_of(kind)
    assert parse_entry(tree, "a/7.json").kind == kind
    for key in HEAD:
        cut = {other: value for other, value in tree.items() if other != key}
        with pytest.raises(CheckpointCorruptError, match=f"a/7.json.*`{key}`"):
            parse_entry(cut, "a/7.json")
    with pytest.raises(CheckpointCorruptError, match=r"a/7.json.*`surplus`"):
        parse_entry({**tree, "surplus": 1}, "a/7.json")


@pytest.mark.parametrize(
    ("kind", "change", "field"),
    [
        ("run", {"number": -1}, r"\$\.number"),
        ("run", {"nodes": ["a", "../b"]}, r"\$\.nodes\[1\]"),
        ("run", {"process": {"pid": "1"}}, r"\$\.process\.pid"),
        ("run", {"run": ".."}, r"\$\.run"),
        ("claim", {"upto": 10**18}, r"\$\.upto"),
        ("claim", {"upto": f"{10**18}.s1"}, "no position in an epoch"),
        ("claim", {"retry": 0}, r"\$\.retry"),
        ("claim", {"strangers": [["x", 1]]}, "no position in an epoch"),
        ("commit", record(stores={"a": {**STORE, "nbytes": -1}}), r"stores\[\.\.\.\]\.nbytes"),
        ("commit", record(stores={"b": STORE}), "'a.1' is not the name of a store of 'b' at 1"),
        ("commit", record(stores={"a": {**STORE, "name": "a.1.r0"}}), "not the name of a store"),
        ("commit", record(stores={"a/b": STORE}), r"`str` matching.*\$\.records\[0\]\.stores"),
        ("commit", record(details=[]), r"\$\.records\[0\]\.details"),
        ("rewind", {"only": []}, r"\$\.only"),
        ("retire", {"epochs": [0, None]}, r"\$\.epochs\[1\]"),
        ("pin", {"label": ""}, r"\$\.label"),
        ("end", {"outcome": "lost"}, r"\$\.outcome"),
        ("end", {"format": 99, "new": 1}, "Use a later version"),
        ("end", {"kind": "merge"}, "Use a later version"),
    ],
)
def test_a_field_of_another_type_or_out_of_range_is_named(
    kind: str, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(CheckpointCorruptError, match=f"a/7.json.*{field}"):
        parse_entry({**tree_of(kind), **change}, "a/7.json")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"number":NaN}', "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1]", "contains entry None"),
        ('{"number":"7"}', "contains entry 7"),
        ('{"number":true}', "contains entry True"),
    ],
)
def test_a_file_that_is_not_the_json_of_an_entry_is_named(text: str, why: str) -> None:
    content = f'{{"sha256":"{hashlib.sha256(text.encode()).hexdigest()}","entry":{text}}}\n'
    with pytest.raises(CheckpointCorruptError, match=f"a/7.json.*({why})"):
        decode_entry(content.encode(), 7, "a/7.json")


# --- in a directory

Edit = Callable[[int, dict[str, Any]], Path]


@pytest.fixture
def path(node_run: NodeRun) -> Path:
    """Two epochs, each with its own claim: entries 1 and 3 begin these, 2 and 4 record them."""
    for epoch in (0, 2):
        node_run.save(epoch, {"w": np.arange(3) + epoch}, details={"metrics": {"loss": 0.5}})
    node_run.end()
    return node_run.path


def entry_of(path: Path, number: int) -> dict[str, Any]:
    return decode_entry((path / "_log" / f"{number:010d}.json").read_bytes(), number, "")


def put_entry(path: Path, entry: dict[str, Any]) -> Path:
    """Write an entry, with its digest."""
    file = path / "_log" / f"{entry['number']:010d}.json"
    file.write_bytes(frame(json.dumps(entry).encode()))
    return file


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
    state = State()
    state.number = 5
    state.last_id = entry_of(path, 5)["id"]
    state.recorded = {Position(7): 4}
    whole = msgspec.json.decode(state.to_bytes())
    changes: list[dict[str, Any]] = [
        {"format": 2},
        {"number": 10**19},
        {"recorded": [[7, 6]]},
        {"recorded": [["7", 4]]},
        {"surplus": 1},
        {"strangers": [[] for _ in range(100_000)]},
    ]
    contents = [frame(msgspec.json.encode({**whole, **change})) for change in changes]
    state.last_id = "of another log"
    contents += [b"", frame(b"[" * 100_000), frame(b"null"), frame(state.to_bytes())]
    for content in contents:
        (path / "_log" / "state.json").write_bytes(content)
        assert manager_of(path).epochs() == [0, 2]


def contradict(file: Path) -> None:
    claim = {**HEAD, "kind": "claim", "number": 3, "upto": 9, "retry": 1}
    claim["run"] = entry_of(file.parents[1], 3)["run"]
    put_entry(file.parents[1], claim)


def make_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("damage", "told"),
    [(contradict, "retry number 1 was used before"), (make_directory, "is a directory")],
)
def test_an_entry_that_no_run_can_append_is_damage(
    path: Path, damage: Callable[[Path], None], told: str
) -> None:
    file = path / "_log" / "0000000003.json"
    damage(file)
    with pytest.raises(CheckpointCorruptError, match=told):
        manager_of(path).epochs()
    assert [it for it in damaged(path) if "_log" in it] == ["_log/0000000003.json"]
    plan = plan_repair(manager_of(path).directory)
    assert (plan.kept, list(plan.lost)) == ([Position(0), Position(2)], [3])
    assert file.exists()


@pytest.mark.parametrize(
    ("details", "field"),
    [
        ({"replicated": {"x": []}}, r"replicated\[\.\.\.\]"),
        ({"callbacks": {"EarlyStopping": {"waited": [1]}}}, r"callbacks\[\.\.\.\]\[\.\.\.\]"),
        ({"metrics": {"loss": {"$float": []}}}, "float"),
    ],
)
def test_details_that_do_not_fit_damage_one_epoch(path: Path, details: Any, field: str) -> None:
    entry = entry_of(path, 4)
    entry["records"][0]["details"] = details
    put_entry(path, entry)
    manager = manager_of(path)
    with pytest.raises(CheckpointCorruptError, match=rf"entry 4 of the log.*{field}"):
        manager.record(2)
    assert manager.open(0)["a"].load("w")[2] == 2
    found = [type(it) for _, it in manager.directory.records()]
    assert found == [EpochRecord, CheckpointCorruptError]


def test_a_plan_that_does_not_fit_counts_as_unknown(path: Path) -> None:
    entry = entry_of(path, 0)
    entry["info"]["plan"] = {"nodes": [1]}
    put_entry(path, entry)
    with Job("j") as job:
        with job.init_group:
            Task(lambda: 1, outputs="w", node="a")
        Task(lambda w: w, inputs="w", outputs="w", node="a")
    plan = JobRunner(job, manager_of(path), num_epochs=3).plan_resume()
    assert (plan.epoch, plan.changes) == (2, ())


@pytest.mark.parametrize("name", ["a.2/../../victim", "../victim", "a.2.r01", "a.1", ""])
def test_a_record_cannot_name_a_directory_elsewhere(path: Path, name: str) -> None:
    """A run deletes the stores of records that the log has given up, by their names."""
    victim = path.with_name("victim")
    victim.mkdir()
    (victim / "zarr.json").write_bytes(b"mine")
    entry = entry_of(path, 4)
    entry["records"][0]["stores"]["a"]["name"] = name
    entry["retires"] = [0]
    put_entry(path, entry)
    with pytest.raises(CheckpointCorruptError, match=r"0000000004.json.*(name of a store|name`)"):
        manager_of(path).run.start(["a"], {})
    assert (victim / "zarr.json").read_bytes() == b"mine"
