"""Entries that no version of jobrunner writes: one error, which names the file and the field."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from jobrunner import CheckpointCorruptError
from jobrunner.checkpoint.log.entries import (
    ClaimEntry,
    CommitEntry,
    DoneEntry,
    EndEntry,
    LogEntry,
    LostEntry,
    PinEntry,
    Record,
    RetireEntry,
    RewindEntry,
    RunEntry,
    Store,
    UnpinEntry,
    entry_to_json,
    parse_entry,
)
from jobrunner.checkpoint.log.handler import decode_entry
from jobrunner.checkpoint.log.log_writer import make_entry
from jobrunner.positions import Position

AT = Position(4, 2)
RECORD = Record(AT, {"a": Store("a.4.s2", "0" * 64, 1)}, contents=3, details={"x": 1})
BODIES: dict[str, tuple[type[LogEntry], dict[str, Any]]] = {
    "run": (RunEntry, {"nodes": ["a"], "info": {}}),
    "claim": (ClaimEntry, {"upto": AT, "retry": 1, "strangers": [(Position(3), 2)]}),
    "commit": (CommitEntry, {"claim": 1, "records": [RECORD], "retires": [Position(0)]}),
    "rewind": (RewindEntry, {"after": AT, "reason": "test"}),
    "retire": (RetireEntry, {"epochs": [Position(0), AT]}),
    "pin": (PinEntry, {"epoch": AT, "label": "x"}),
    "unpin": (UnpinEntry, {"epoch": AT, "label": None}),
    "done": (DoneEntry, {"epoch": AT}),
    "end": (EndEntry, {"upto": AT}),
    "lost": (LostEntry, {}),
}
STORE = {"name": "a.1", "sha256": "0" * 64, "nbytes": 1}


def tree_of(kind: str) -> dict[str, Any]:
    of, body = BODIES[kind]
    return entry_to_json(make_entry(of, 7, "r", **body))


@pytest.mark.parametrize("kind", BODIES)
def test_a_field_that_is_missing_or_unknown_is_named(kind: str) -> None:
    tree = tree_of(kind)
    for key in ("format", "number", "run", "id", "time"):
        cut = {other: value for other, value in tree.items() if other != key}
        with pytest.raises(CheckpointCorruptError, match=f"a/7.json.*`{key}`"):
            parse_entry(cut, "a/7.json")
    with pytest.raises(CheckpointCorruptError, match=r"a/7.json.*`surplus`"):
        parse_entry({**tree, "surplus": 1}, "a/7.json")


def record(**fields: Any) -> dict[str, Any]:
    return {"records": [{"at": 1, "stores": {"a": STORE}, **fields}]}


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


@pytest.mark.parametrize("content", [b"", b"garbage \xff"])
def test_a_file_that_is_not_one_of_a_log_is_named(content: bytes) -> None:
    with pytest.raises(
        CheckpointCorruptError, match="a/7.json, is empty, or not what jobrunner writes"
    ):
        decode_entry(content, 7, "a/7.json")


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
