"""The ledgers of runs with losses and a kill add up, and agree with another clock."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    SaveEvery,
    Task,
    current_task,
    epoch_limiter,
    read_story,
)
from tests.story.eventful import EPOCHS, KILLED_AFTER, LOSSES


def sleepy(flags: Path, epochs: int) -> Job:
    def step(n: int) -> int:
        epoch = current_task().epoch
        time.sleep(0.01)
        flag = flags / str(epoch)
        if epoch in (3, 6) and not flag.exists():
            flag.touch()
            raise ConnectionError("not this time")
        return n + 1

    with Job("sleepy") as job, Node("a"):
        with job.init_group:
            Task(lambda: 0, outputs="n", name="zero")
        Task(step, inputs="n", outputs="n", transient_errors=(ConnectionError,))
        epoch_limiter(job, epochs)
    return job


def test_the_ledger_of_a_run_with_losses_and_of_its_resume_adds_up(inproc_session, tmp_path):
    manager = MultiNodeCheckpointManager(tmp_path / "k", save=SaveEvery(epochs=2))
    called = time.time()
    JobRunner(sleepy(tmp_path, 7), manager).run(inproc_session)
    returned = time.time()
    JobRunner(sleepy(tmp_path, 8), manager, 4).run(inproc_session)
    one, two = read_story(manager).runs
    for run in (one, two):
        assert min(astuple(run.ledger)) >= 0
    assert one.ledger.wall == pytest.approx(returned - called, abs=0.2)
    assert one.ledger.compute >= 0.04  # 1 to 4; 5 to 7 ran again in the second run
    assert one.ledger.redone >= 0.06  # 3 and 5 and 6 by the losses, 5 to 7 by the resume
    assert one.ledger.recovery > 0
    assert [(loss.text, loss.resumed_from) for loss in one.losses] == [
        (loss.text, epoch) for loss, epoch in zip(one.losses, (2, 4), strict=True)
    ]
    assert all("not this time" in loss.text for loss in one.losses)
    assert (two.resumed_from, two.losses, two.ledger.redone) == (4, (), 0)
    assert two.ledger.compute >= 0.04


class Truth:
    """What the events of a run say of its time."""

    def __init__(self, events: list[list[Any]], ended: float) -> None:
        self.wall = ended - events[0][0]
        self.began = events[0][0]
        self.epochs: list[tuple[int, float]] = []  # each run of an epoch to its end
        self.recovery = 0.0
        self.save_waits: list[float] = []
        self.start = next(at for at, event, _ in events if event == "epoch") - self.began
        lost = started = saving = 0.0
        for at, event, epoch in events:
            if event == "epoch":
                self.recovery += at - lost if lost else 0.0
                lost, started = 0.0, at
            elif event == "end":
                self.epochs.append((epoch, at - started))
            elif event == "loss":
                lost = at
            elif event == "save":
                saving = at
            elif event == "saved":
                self.save_waits.append(at - saving)
                if not self.epochs and not lost:
                    self.start -= at - saving


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_run_that_lost_two_workers_and_was_killed_is_told_within_a_hundredth(tmp_path):
    command = [sys.executable, "-m", "tests.story.eventful", str(tmp_path)]
    root = Path(__file__).parents[2]
    killed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    death = time.time()
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    subprocess.run(command, cwd=root, capture_output=True, check=True)
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    second = [event for _, event, _ in events].index("run", 1)
    last = events[second - 1][0]
    assert last < death
    one, two = read_story(tmp_path / "k").runs
    assert (one.state, two.state, len(one.losses)) == ("lost", "finished", len(LOSSES))
    assert (two.resumed_from, two.epochs[-1].epoch) == (KILLED_AFTER // 4 * 4, EPOCHS)
    counts = dict.fromkeys(range(EPOCHS + 1), 0.0)
    first = Truth(events[:second], last)
    later = Truth(events[second:], events[-1][0])
    counts |= dict(first.epochs) | dict(later.epochs)
    compute = sum(counts[epoch] for epoch in range(two.resumed_from + 1))
    del first.save_waits[-1]  # it ended after the last record, like all that was lost
    for run, truth, computed in (
        (one, first, compute),
        (two, later, sum(seconds for _, seconds in later.epochs)),
    ):
        ledger, slack = run.ledger, 0.01 * truth.wall
        assert ledger.start == pytest.approx(truth.start, abs=slack)
        assert ledger.compute == pytest.approx(computed, abs=slack)
        assert ledger.recovery == pytest.approx(truth.recovery, abs=slack)
        assert ledger.save_wait == pytest.approx(sum(truth.save_waits), abs=slack)
        assert 0 <= ledger.idle <= 0.1
    assert two.ledger.wall == pytest.approx(later.wall, rel=0.01)
    # It was killed within an epoch, half of which had passed.
    assert first.wall <= one.ledger.wall <= first.wall + 0.2
    assert one.ledger.redone >= 0.2 * (KILLED_AFTER % 4)
