"""Checkpoints and logs of format 1 are read: values, epochs, and where the time of a run went."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobrunner import MultiNodeCheckpointManager
from jobrunner.story import read_story
from jobrunner.testing import assert_identical
from tests.golden.make import LAST_SAVE_WAIT, LOSS, SPENT, blobs

GOLDEN = Path(__file__).parent


def test_every_value_is_what_it_was() -> None:
    manager = MultiNodeCheckpointManager(GOLDEN / "format_1")
    manager.verify(0)
    checkpoint = manager.open(0)["a"]
    for name, value in blobs().items():
        assert_identical(value, checkpoint.load(name))
    document = json.loads((GOLDEN / "format_1" / "a.0" / "zarr.json").read_text())
    assert document["attributes"]["/jobrunner"]["format"] == 1


def test_the_time_of_the_run_is_what_it_was() -> None:
    manager = MultiNodeCheckpointManager(GOLDEN / "log_1")
    for epoch in manager.epochs():
        manager.verify(epoch)
        assert manager.open(epoch)["a"]["n"] == epoch
    [run] = read_story(manager).runs
    ledger = run.ledger
    assert (run.job, run.state) == ("golden", "finished")
    spent = {name: getattr(ledger, name) for name in SPENT}
    assert spent == SPENT | {"save_wait": LAST_SAVE_WAIT}
    assert 10 <= ledger.wall < 12
    [loss] = run.losses
    times = (loss.time - run.began, loss.resumed - run.began)
    assert times == pytest.approx((LOSS["at"], LOSS["resumed"]))
    assert (loss.text, loss.resumed_from) == (LOSS["text"], 0)
    assert [it.epoch for it in run.epochs] == [0, 2]
    entries = sorted((GOLDEN / "log_1").glob("_log/[0-9]*.json"))
    assert json.loads(entries[-1].read_text())["entry"]["format"] == 1
