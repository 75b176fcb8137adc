"""The ledgers of a run with losses and of its resume add up."""

from __future__ import annotations

import time
from dataclasses import astuple
from pathlib import Path

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
)
from jobrunner.story import read_story


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
