"""Logs that no run has written: each command ends soon, with an error that names file and field."""

from __future__ import annotations

import hashlib
import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobrunner import (
    CheckpointCorruptError,
    CheckpointWriteError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Task,
)
from jobrunner.checkpoint import inspect_directory, plan_repair, repair_log
from jobrunner.checkpoint.log.entries import frame
from jobrunner.checkpoint.log.handler import (
    FileMetadataHandler,
    decode_entry,
    encode_entry,
    read_content,
    read_state,
)
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.workspace import Workspace

BEGIN = {"format", "number", "run", "id", "time", "epoch", "retry"}
Edit = Callable[[int, Callable[[dict[str, Any]], object]], Path]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two epochs: entries 2 and 4 record them."""
    path = tmp_path / "k"
    manager = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
    manager.run.start(["a"], {"plan": {"nodes": {"a": ["w"]}}})
    for epoch in (0, 1):
        workspace = Workspace("a")
        workspace.globals["w"] = np.arange(3) + epoch
        save = manager.commits.begin(Position.of(epoch))
        manager.commits.commit(save, save.write({"a": workspace}), {"metrics": {"loss": 0.5}})
    manager.run.end()
    return path


@pytest.fixture
def edit(path: Path) -> Edit:
    """Changes an entry, and its digest."""

    def edit(number: int, change: Callable[[dict[str, Any]], object]) -> Path:
        file = path / "_log" / f"{number:010d}.json"
        entry = decode_entry(file.read_bytes(), number, str(file))
        change(entry)
        file.write_bytes(encode_entry(entry))
        return file

    return edit


def manager_of(path: Path) -> MultiNodeCheckpointManager:
    return MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))


def damaged(path: Path) -> dict[str, str]:
    found = inspect_directory(manager_of(path).recorded)
    return {it.path: it.explanation for it in found if it.status == "damaged"}


@pytest.mark.parametrize("number", ["9" * 10, "9" * 13, "9" * 200])
def test_an_absurd_number_ends_each_command_at_once(path: Path, number: str) -> None:
    file = path / "_log" / f"{number}.json"
    file.write_bytes(b"")
    started = time.process_time()
    with pytest.raises(CheckpointCorruptError, match=rf"{file} is no entry.*found 7"):
        manager_of(path).epochs()
    with pytest.raises(CheckpointCorruptError, match="found 7"):
        repair_log(manager_of(path).recorded)
    assert "move this file" in damaged(path)[f"_log/{number}.json"]
    assert time.process_time() - started < 1
    file.unlink()
    assert manager_of(path).epochs() == [0, 1]


@pytest.mark.parametrize("name", ["00000000000009.json", "٠٠٠٠٠٠٠٠٠٩.json", "9.json"])
def test_a_name_that_is_almost_an_entrys_is_ignored(path: Path, name: str) -> None:
    (path / "_log" / name).write_bytes(b"x")
    assert manager_of(path).epochs() == [0, 1]
    statuses = {it.path: it.status for it in inspect_directory(manager_of(path).recorded)}
    assert statuses[f"_log/{name}"] == "stray"


def summary(**fields: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {"recorded": [], "retries": [], "claims": [], "chores": []}
    return {"run": None, "is_ended": True, **empty, "done": None, **fields}


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"recorded": [[0, 1, 10**15, 0, 1]], "retries": [[0, 1, 10**15, 0, 0]]}, "before 5"),
        ({"recorded": [[0, 1, 10**15, 0, 0]], "retries": [[0, 1, 10**15, 0, 0]]}, "before 5"),
        ({"recorded": [[n * 10**5, 1, 10**5, 4, 0] for n in range(9)]}, "900000 epochs"),
        ({"recorded": [[0, 1, 1, 99, 0]], "retries": [[0, 1, 1, 0, 0]]}, "before 5"),
        ({"recorded": [[0, 1, 1, -1, 0]], "retries": [[0, 1, 1, 0, 0]]}, "before 5"),
        ({"recorded": [[0, 1, 2, 2, 2]], "retries": [[0, 1, 1, 0, 0]]}, "different epochs"),
        ({"recorded": [[0, 1, 2, 2, 2]], "retries": [[0, 2, 2, 0, 0]]}, "different epochs"),
        ({"claims": [[10**30, 1, 1, 0, 0]]}, r"\$\.state\.claims\[0\]\[0\]"),
        ({"claims": [[10**18, 1, 1, 0, 0]]}, "`claims`: .* 18 digits"),
        ({"claims": [[0, 10**17, 11, 0, 0]]}, "`claims`: .* 18 digits"),
        ({"claims": [[0, 1, 1, 0, 0, 10**18]]}, "`claims`: .* 18 digits"),
        ({"claims": [[0, 1, 1, 2**63, 0]]}, r"\$\.state\.claims\[0\]\[3\]"),
        ({"chores": [[10**18, 0, "hide", 0]]}, r"\$\.state\.chores\[0\]\[0\]"),
        ({"pins": [[]]}, "an epoch and its labels"),
        ({"pins": [[0, *"abcdefghij"]]}, "`pins` has 11 items; the entries so far allow 10"),
        ({"claims": [[n, 1, 1, 0, 0] for n in range(40_000)]}, "`claims` has 40000 items"),
        ({"chores": [[7, 0, "hide", 0]] * 40_000}, "`chores` has 40000 items"),
        ({"claims": [[0, 1, 1, 0, 0, 5], [9, 1, 1, 0, 0]]}, "`claims`: .* overlap"),
    ],
)
def test_a_state_that_its_entry_cannot_contain_is_damage(
    path: Path, edit: Edit, state: Any, told: str
) -> None:
    body = {"kind": "repair", "state": summary(**state), "commits": []}
    file = edit(5, lambda entry: entry.update(body))
    with pytest.raises(CheckpointCorruptError, match=told) as caught:
        manager_of(path).epochs()
    assert str(file) in str(caught.value)
    assert list(damaged(path)) == ["_log/0000000005.json", "a.0", "a.1"]
    plan = plan_repair(manager_of(path).recorded)
    assert plan is not None
    assert (plan.kept, list(plan.lost)) == ([Position(0), Position(1)], [5])


def test_a_log_of_very_many_steps_is_read_soon(path: Path, edit: Edit) -> None:
    """Here they are not recorded by the entry that the log names."""
    steps = [[0, 1, 1, 4, 0, step] for step in range(1, 35_001)]
    state = summary(recorded=steps, retries=steps, claims=steps[:9])
    edit(5, lambda entry: entry.update(kind="repair", state=state, commits=[]))
    started = time.process_time()
    with pytest.raises(CheckpointCorruptError, match="entry 4, a commit, records 35,000 epochs"):
        manager_of(path).epochs()
    plan = plan_repair(manager_of(path).recorded)
    assert plan is not None
    assert (plan.kept, len(plan.given_up), plan.rebuilt) == ([], 35_000, [Position(0), Position(1)])
    assert time.process_time() - started < 2


def test_stores_that_a_log_names_and_that_are_not_there_cost_nothing(
    path: Path, edit: Edit
) -> None:
    edit(0, lambda entry: entry.update(nodes=["a", *map(str, range(50_000))]))
    (path / "a.9").mkdir()
    (path / "z.8").mkdir()
    recorded = [[0, 1, 2, 2, 2]], [[0, 1, 2, 0, 0]], [[0, 1, 2, 1, 0]]
    state = summary(**dict(zip(("recorded", "retries", "claims"), recorded, strict=True)))
    state["chores"] = [[n, 0, "delete", 0] for n in range(5, 3000)]
    edit(5, lambda entry: entry.update(kind="repair", state=state, commits=[]))
    manager = manager_of(path)
    started = time.process_time()
    manager.run.start(["a"], {})
    manager.run.end()
    assert time.process_time() - started < 2
    assert manager.recorded.log.refresh().chores == {}
    assert sorted(it.name for it in path.glob("?.*")) == ["a.0", "a.1", "z.8"]


@pytest.mark.parametrize("number", [0, 4])
def test_an_entry_records_no_more_epochs_than_it_has_records_of(
    path: Path, edit: Edit, number: int
) -> None:
    rows = [[0, 1, 2, number, 0]], [[0, 1, 2, 0, 0]]
    state = summary(recorded=rows[0], retries=rows[1], claims=[[0, 1, 2, 1, 0]])
    edit(5, lambda entry: entry.update(kind="repair", state=state, commits=[]))
    with pytest.raises(CheckpointCorruptError, match=rf"that entry {number}, .* records 2 epochs"):
        manager_of(path).epochs()


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        ("begin", {"epoch": 10**18, "retry": 0}, r".*\$\.epoch"),
        ("begin", {"epoch": 0, "retry": 2**63}, r".*\$\.retry"),
        ("pin", {"epoch": f"{10**18}.s1", "label": "x"}, r".*\$\.epoch"),
        ("retire", {"epochs": [f"{n}.s1" for n in range(40_000)]}, "`epochs` has 40000 items"),
        ("end", {"settled": [[n, 0] for n in range(40_000)]}, "`settled` has 40000 items"),
        ("repair", {"state": summary(), "commits": [], "lost": [0] * 6}, "`lost` has 6 items"),
    ],
)
def test_an_entry_names_no_more_than_the_entries_before_it_allow(
    path: Path, edit: Edit, kind: str, fields: dict[str, Any], told: str
) -> None:
    file = edit(5, lambda entry: entry.update(kind=kind, **fields))
    with pytest.raises(CheckpointCorruptError, match=f"{file}, has an invalid field: {told}"):
        manager_of(path).epochs()


def test_an_entry_of_too_many_values_is_neither_read_nor_written(path: Path) -> None:
    file = path / "_log" / "0000000005.json"
    text = b'{"number":5,"x":[' + b"[]," * 600_000 + b"0]}"
    file.write_bytes(frame(text, hashlib.sha256(text).hexdigest()))
    with pytest.raises(CheckpointCorruptError, match=f"{file} is no entry.*more than 1,000,000"):
        manager_of(path).epochs()
    assert read_content(file.read_bytes()) is None
    with pytest.raises(CheckpointWriteError, match=r"would be too large: it has more than"):
        encode_entry(json.loads(text) | {"kind": "run"})


@pytest.mark.parametrize(
    ("details", "field"),
    [
        ({"replicated": {"x": []}}, r"replicated\[\.\.\.\]"),
        ({"replicated": 5}, "replicated"),
        ({"partitions": {"x": {"axis": -1, "nodes": ["a"]}}}, r"partitions\[\.\.\.\]\.axis"),
        ({"partitions": {"x": {"axis": 0}}}, r"partitions\[\.\.\.\]"),
        ({"callbacks": {"EarlyStopping": {"waited": [1]}}}, r"callbacks\[\.\.\.\]\[\.\.\.\]"),
        ({"metrics": {"loss": []}}, r"metrics\[\.\.\.\]"),
        ({"metrics": {"loss": {"$float": []}}}, "float"),
        ({"stopped_by": "x"}, "stopped_by"),
        ({"step": "1"}, "step"),
        ({"\ud800": 1}, "surrogates not allowed"),
    ],
)
def test_details_that_do_not_fit_damage_one_epoch(
    path: Path, edit: Edit, details: Any, field: str
) -> None:
    edit(4, lambda entry: entry.update(details=details))
    manager = manager_of(path)
    with pytest.raises(CheckpointCorruptError, match=rf"entry 4 of the log.*{field}"):
        manager.record(1)
    assert manager.open(0)["a"].load("w")[2] == 2
    assert [type(it) for _, it in manager.records()] == [dict, CheckpointCorruptError]


@pytest.mark.parametrize("plan", [5, {"nodes": [1]}, {"structure": {"x": 1}}, {"code": ""}])
def test_a_plan_that_does_not_fit_counts_as_unknown(path: Path, edit: Edit, plan: Any) -> None:
    edit(0, lambda entry: entry["info"].update(plan=plan))
    with Job("j") as job:
        with job.init_group:
            Task(lambda: 1, outputs="w", node="a")
        Task(lambda w: w, inputs="w", outputs="w", node="a")
    plan = JobRunner(job, manager_of(path), num_epochs=3).plan_resume()
    assert (plan.epoch, plan.changes) == (1, ())


def test_a_field_with_a_lone_surrogate_is_damage(path: Path, edit: Edit) -> None:
    file = edit(4, lambda entry: entry.update({"\ud800": 1}))
    with pytest.raises(CheckpointCorruptError, match=f"{file}, has an invalid field: .*surrogates"):
        manager_of(path).epochs()


def test_a_directory_in_the_place_of_an_entry_damages_that_one_alone(path: Path) -> None:
    file = path / "_log" / "0000000003.json"
    file.unlink()
    file.mkdir()
    with pytest.raises(CheckpointCorruptError, match=f"{file} is a directory"):
        manager_of(path).epochs()
    assert [it for it in damaged(path) if "_log" in it] == ["_log/0000000003.json"]
    plan = plan_repair(manager_of(path).recorded)
    assert plan is not None
    assert (plan.kept, list(plan.lost)) == ([Position(0), Position(1)], [3])


def test_a_long_entry_is_read_again_only_if_it_has_changed(
    path: Path, edit: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lengthen(char: str) -> Path:
        return edit(4, lambda entry: entry["details"].update(metadata={"x": char * 70_000}))

    file = lengthen("a")
    handler = FileMetadataHandler()
    handler.set_params(str(path), ())
    before = handler.entry(4)
    read, seen = handler.read_file, []
    monkeypatch.setattr(handler, "read_file", lambda it: seen.append(it) or read(it))
    assert next(handler.entries(4)) is before
    assert str(file) not in seen
    lengthen("b")  # as long as before
    assert next(handler.entries(4))["details"]["metadata"]["x"][0] == "b"
    file.unlink()
    with pytest.raises(CheckpointCorruptError, match="Entry 4 of the log is missing"):
        next(handler.entries(4))


def test_the_records_of_a_repair_are_read_once(path: Path, edit: Edit) -> None:
    head = {"retry": 0, "run": "r", "run_number": None, "time": "", "stores": {}, "details": {}}
    commits = [{"epoch": epoch, **head} for epoch in range(1500)]
    edit(5, lambda entry: entry.update(kind="repair", state=summary(), commits=commits))
    manager = manager_of(path)
    started = time.process_time()
    assert [manager.record(epoch)["epoch"] for epoch in manager.epochs()] == [*range(1500)]
    assert time.process_time() - started < 2


@pytest.mark.parametrize("has_ends", [True, False])
def test_holes_are_not_read_as_entries_for_long(path: Path, has_ends: bool) -> None:
    begins = b'{"sha256":"' + b"0" * 64 + b'","entry":' if has_ends else b""
    for number in range(6, 100):
        with (path / "_log" / f"{number:010d}.json").open("wb") as file:
            file.write(begins)
            file.seek(12 << 20)
            file.write(b"}\n")
    started = time.process_time()
    with pytest.raises(CheckpointCorruptError, match="Entry 6 of the log"):
        manager_of(path).epochs()
    assert "was not read, because damaged entries" in damaged(path)["_log/0000000099.json"]
    plan = plan_repair(manager_of(path).recorded)
    assert plan is not None
    assert (plan.kept, len(plan.lost)) == ([Position(0), Position(1)], 94)
    assert time.process_time() - started < 2


@pytest.mark.nightly
def test_wrong_bits_are_not_looked_for_in_more_than_a_few_long_entries(path: Path) -> None:
    """Each takes a second."""
    started = time.process_time()
    for number in range(6, 40):
        text = json.dumps({"number": number, "x": "y" * 15_000}).encode()
        content = b'{"sha256":"%s","entry":%s}\n' % (b"0" * 64, text)
        (path / "_log" / f"{number:010d}.json").write_bytes(content)
    assert len([it for it in damaged(path) if "_log" in it]) == 34
    assert time.process_time() - started < 8


def test_one_long_entry_is_in_memory_at_a_time(path: Path, edit: Edit) -> None:
    first = json.loads((path / "_log" / "0000000004.json").read_text())["entry"]
    for number in range(6, 26, 2):
        for i, kind in enumerate(("begin", "commit")):
            entry = {**first, "number": number + i, "id": f"{number + i}", "epoch": number}
            if kind == "begin":
                entry = {k: v for k, v in entry.items() if k in BEGIN} | {"kind": kind}
            else:
                entry["details"] = {"metrics": {f"m{i}": i for i in range(20_000)}}
            (path / "_log" / f"{number + i:010d}.json").write_bytes(encode_entry(entry))
    handler = FileMetadataHandler()
    handler.set_params(str(path), ["a"])
    tracemalloc.start()
    try:
        assert read_state(handler).latest == Position(24)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_a_file_in_place_of_the_log_is_no_empty_log(tmp_path: Path) -> None:
    (tmp_path / "_log").write_text("no directory")
    with pytest.raises(CheckpointCorruptError, match="_log is a file; expected a directory"):
        MultiNodeCheckpointManager(tmp_path).epochs()
