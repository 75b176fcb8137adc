"""Logs of format 1 are read: epochs, and where the time of their run went."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobrunner import MultiNodeCheckpointManager
from jobrunner.story import read_story
from tests.golden.make_log_1 import LOSS

GOLDEN = Path(__file__).with_name("log_1")


def test_the_time_of_the_run_is_what_it_was() -> None:
    manager = MultiNodeCheckpointManager(GOLDEN)
    for epoch in manager.epochs():
        manager.verify(epoch)
        assert manager.open(epoch)["a"]["n"] == epoch
    [run] = read_story(manager).runs
    ledger = run.ledger
    assert (run.job, run.state) == ("golden", "finished")
    assert (ledger.start, ledger.compute, ledger.redone, ledger.recovery) == (3.0, 2.0, 1.5, 1.75)
    assert ledger.save_wait == 0.75
    assert 10 <= ledger.wall < 12
    [loss] = run.losses
    times = (loss.time - run.began, loss.resumed - run.began)
    assert times == pytest.approx((LOSS["at"], LOSS["resumed"]))
    assert (loss.text, loss.resumed_from) == (LOSS["text"], 0)
    assert [it.epoch for it in run.epochs] == [0, 2]
    last = sorted(GOLDEN.glob("_log/[0-9]*.json"))[-1]
    assert json.loads(last.read_text())["entry"]["format"] == 1
