"""Records of time that no run has written: an error that names the field, or they are left out."""

from __future__ import annotations

import shutil
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from jobrunner import CheckpointCorruptError, MultiNodeCheckpointManager
from jobrunner.checkpoint.log.handler import decode_entry, encode_entry
from jobrunner.story import read_story

GOLDEN = Path(__file__).parents[1] / "golden" / "log_1"
RUN, FIRST, LAST = 0, 2, 4

STRANGE: list[tuple[Any, str]] = [
    ({"compute": -1}, "compute"),
    ({"losses": [{"at": 1, "text": "x" * 1001}]}, r"losses\[0\]\.text"),
    ([], ""),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN, tmp_path / "k")


def edit(path: Path, number: int, **fields: Any) -> None:
    file = path / "_log" / f"{number:010d}.json"
    entry = dict(decode_entry(file.read_bytes(), number, str(file)))
    file.write_bytes(encode_entry({**entry, **fields}))


def edit_details(path: Path, number: int, timing: Any) -> None:
    file = path / "_log" / f"{number:010d}.json"
    records = decode_entry(file.read_bytes(), number, str(file))["records"]
    edit(path, number, records=[{**records[0], "details": {"timing": timing}}])


@pytest.mark.parametrize(("timing", "field"), STRANGE)
def test_a_record_with_a_strange_time_is_corrupt_and_left_out_of_the_story(path, timing, field):
    edit_details(path, LAST, timing)
    manager = MultiNodeCheckpointManager(path)
    with pytest.raises(CheckpointCorruptError, match=rf"entry {LAST}.*timing.*{field}"):
        manager.record(2)
    [run] = read_story(path).runs
    assert [epoch.epoch for epoch in run.epochs] == [0]


def test_times_that_contradict_each_other_give_no_negative_part(path):
    edit_details(path, FIRST, {"compute": 1e9, "save_wait": 1e9})
    edit(path, RUN, time="5000-01-01T00:00:00+00:00")
    edit(path, LAST, time="yesterday")
    [run] = read_story(path).runs
    assert min(astuple(run.ledger)) >= 0
