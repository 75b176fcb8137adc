"""Entries that no version of jobrunner writes: one error, which names the file and the field."""

from __future__ import annotations

import gc
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from jobrunner import CheckpointCorruptError, FileMetadataHandler, MultiNodeCheckpointManager
from jobrunner.checkpoint.log import each_entry
from jobrunner.checkpoint.log.epoch_map import EpochMap
from jobrunner.checkpoint.log.handler import decode_entry, encode_entry
from jobrunner.checkpoint.log.state import State, entry_to_json, make_entry, parse_entry
from jobrunner.checkpoint.storage import PosixFiles
from jobrunner.testing import FaultyFiles

STORE = {"store": "a.0", "manifest": "0" * 64, "nbytes": 1, "seconds": 0.5}
COMMIT = {"epoch": 0, "retry": 0, "run_number": 0, "stores": {"a": STORE}, "details": {}}
SUMMARY = State().to_json()
BODIES: dict[str, dict[str, Any]] = {
    "run": {"nodes": ["a"], "info": {}, "process": {"pid": 1}, "heartbeat_seconds": 2.0},
    "begin": {"epoch": 0, "retry": 0},
    "commit": COMMIT,
    "rewind": {"after": None, "reason": "test"},
    "retire": {"epochs": [0, 1]},
    "pin": {"epoch": 0, "label": "x"},
    "unpin": {"epoch": 0, "label": None},
    "done": {"epoch": 0},
    "end": {},
    "state": {"state": SUMMARY},
    "repair": {
        "state": SUMMARY,
        "commits": [{**COMMIT, "run": "r", "time": "then"}],
        "lost": [3],
    },
    "gap": {},
}


def tree_of(kind: str) -> dict[str, Any]:
    return {**entry_to_json(make_entry(7, kind, "r", BODIES[kind]))}


@pytest.mark.parametrize("kind", BODIES)
def test_an_entry_is_written_as_its_fields_were_given(kind: str) -> None:
    found = json.loads(json.dumps(tree_of(kind)))
    assert list(found)[:6] == ["format", "number", "kind", "run", "id", "time"]
    assert list(found)[6:] == list(BODIES[kind])
    assert entry_to_json(parse_entry(found, "p")) == found


@pytest.mark.parametrize("kind", BODIES)
def test_what_is_settled_comes_last(kind: str) -> None:
    entry = make_entry(7, kind, "r", {**BODIES[kind], "settled": [[3, 1]]})
    found = entry_to_json(entry)
    assert list(found)[-1] == "settled"
    assert found["settled"] == [[3, 1]]


@pytest.mark.parametrize("kind", BODIES)
def test_a_field_that_is_missing_or_unknown_is_named(kind: str) -> None:
    tree = tree_of(kind)
    optional = ("process", "heartbeat_seconds", "reason", "lost", "after")
    for key in tree.keys() - set(optional):
        cut = {other: value for other, value in tree.items() if other != key}
        with pytest.raises(CheckpointCorruptError, match=f"a/7.json.*`{key}`"):
            parse_entry(cut, "a/7.json")
    with pytest.raises(CheckpointCorruptError, match=r"a/7.json.*`surplus`"):
        parse_entry({**tree, "surplus": 1}, "a/7.json")


@pytest.mark.parametrize(
    ("kind", "change", "field"),
    [
        ("run", {"number": -1}, r"\$\.number"),
        ("run", {"number": True}, r"\$\.number"),
        ("run", {"format": "1"}, r"\$\.format"),
        ("run", {"nodes": ["a", 1]}, r"\$\.nodes\[1\]"),
        ("run", {"process": {"pid": "1"}}, r"\$\.process\.pid"),
        ("run", {"kind": 3}, r"\$\.kind"),
        ("begin", {"epoch": 1.5}, r"\$\.epoch"),
        ("begin", {"settled": [[0]]}, r"\$\.settled\[0\]"),
        ("commit", {"stores": {"a": {**STORE, "nbytes": -1}}}, r"\$\.stores\[\.\.\.\]\.nbytes"),
        ("commit", {"stores": {"a": {**STORE, "manifest": ""}}}, r"\$\.stores\[\.\.\.\]\.manifest"),
        ("commit", {"details": []}, r"\$\.details"),
        ("rewind", {"only": 1}, "either `after` or `only`"),
        ("retire", {"epochs": [0, None]}, r"\$\.epochs\[1\]"),
        ("pin", {"label": ""}, r"\$\.label"),
        ("state", {"state": {**SUMMARY, "recorded": [[0, 0, 1, 0, 0]]}}, "`recorded`"),
        ("state", {"state": {**SUMMARY, "chores": [[0, 0, "keep", 0]]}}, r"\$\.state\.chores"),
        ("repair", {"commits": [{}]}, r"\$\.commits\[0\]"),
    ],
)
def test_a_field_of_another_type_or_out_of_range_is_named(
    kind: str, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(CheckpointCorruptError, match=f"a/7.json.*{field}"):
        parse_entry({**tree_of(kind), **change}, "a/7.json")


def test_an_entry_of_a_later_version_says_so() -> None:
    for change in ({"format": 99}, {"format": 99, "new": 1}, {"kind": "merge"}):
        with pytest.raises(CheckpointCorruptError, match=r"a/7.json.*Use a later version"):
            parse_entry({**tree_of("end"), **change}, "a/7.json")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"number":7,"number":7}', "'number' appears twice"),
        ('{"number":NaN}', "NaN"),
        ("[" * 100_000, "nested too deep|not valid JSON"),
        ("[1]", "contains entry None"),
        ('{"number":"7"}', "contains entry 7"),
    ],
)
def test_a_file_that_is_not_the_json_of_an_entry_is_named(text: str, why: str) -> None:
    content = f'{{"sha256":"{hashlib.sha256(text.encode()).hexdigest()}","entry":{text}}}\n'
    with pytest.raises(CheckpointCorruptError, match=f"a/7.json.*({why})"):
        decode_entry(content.encode(), 7, "a/7.json")


def test_summaries_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        EpochMap([[0, 2, 3, 0, 1], [3, 1, 1, 0, 0]])
    for pins in ([["x", "y"]], [[1, 2]]):
        with pytest.raises(CheckpointCorruptError, match="entry 1.*an epoch and its labels"):
            make_entry(1, "state", "r", {"state": {**SUMMARY, "pins": pins}})


def test_a_directory_with_a_malformed_entry_is_not_opened(tmp_path: Path) -> None:
    manager = MultiNodeCheckpointManager(tmp_path / "k", files=FaultyFiles(sync=False))
    manager.run.start(["a"], {})
    manager.run.end()
    path = tmp_path / "k" / "_log" / "0000000002.json"
    path.write_bytes(encode_entry({**tree_of("done"), "number": 2, "epoch": "0"}))
    with pytest.raises(CheckpointCorruptError, match=rf"{path.name}.*\$\.epoch.*fsck .*--repair"):
        MultiNodeCheckpointManager(tmp_path / "k").epochs()


def test_a_long_entry_is_not_taken_for_one_that_another_thread_reads(tmp_path: Path) -> None:
    class Meanwhile(PosixFiles):
        def read_span(self, path: str, start: int, size: int) -> tuple[int, bytes]:
            found = super().read_span(path, start, size)
            handler.entry(1)  # as another thread does
            return found

    handler = FileMetadataHandler(Meanwhile())
    handler.set_params(str(tmp_path), ())
    for number, length in enumerate((100_000, 1)):
        assert handler.append({"number": number, "id": "00ff", "text": "x" * length})
    assert [next(handler.entries())["number"] for _ in range(3)] == [0, 0, 0]
    handler.entry(0)
    assert next(handler.entries())["number"] == 0


def test_the_garbage_collector_runs_while_entries_are_used(tmp_path: Path) -> None:
    manager = MultiNodeCheckpointManager(tmp_path)
    manager.run.start([], {}, None)
    manager.run.end()
    entries = each_entry(manager.recorded.handler)
    for number, _ in entries:
        assert gc.isenabled()
        if number == 1:
            break
    else:
        pytest.fail("the log has one entry")
    assert gc.isenabled()
