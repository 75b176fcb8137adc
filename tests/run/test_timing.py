"""Calls of tasks' functions are noted in some epochs, batched or not, and not if timing is off."""

from __future__ import annotations

import time
from dataclasses import astuple
from pathlib import Path

import dask
import pytest

from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    RunStory,
    SaveEvery,
    Task,
    read_story,
)


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def build(*, steps: int = 1) -> Job:
    with Job("naps", steps_per_epoch=steps) as job:
        for name, seconds in (("a", 0.002), ("b", 0.004)):
            with Node(name):
                with job.init_group:
                    Task(lambda seconds=seconds: seconds, outputs="s", name="begin")
                Task(nap, inputs="s", outputs="s", name="nap")
    return job


@pytest.mark.parametrize(("steps", "stint"), [(1, 0.05), (1, 0), (3, 0)])
def test_sampled_calls_lie_in_their_epochs(inproc_session, tmp_path, steps, stint):
    manager = MultiNodeCheckpointManager(tmp_path, save=SaveEvery(epochs=5))
    with dask.config.set({"jobrunner.stint-seconds": stint}):
        JobRunner(build(steps=steps), manager, num_epochs=60 // steps).run(inproc_session)
    [run] = read_story(manager).runs
    naps = [span for span in run.spans if span.task == "nap"]
    assert {(span.node, span.epoch > 0) for span in naps} == {("a", True), ("b", True)}
    assert {span.epoch for span in run.spans if span.task == "begin"} == {0}
    ends = {epoch.number: epoch.ended for epoch in run.epochs}
    for span in naps:
        assert span.seconds >= (0.002 if span.node == "a" else 0.004)
        later = min(number for number in ends if number >= span.epoch)
        earlier = max(number for number in ends if number < span.epoch)
        assert ends[earlier] - 0.001 <= span.began
        assert span.began + span.seconds <= ends[later] + 0.001


def test_no_call_is_noted_without_a_record_to_tell_it(inproc_session):
    found = []

    class Look:
        def on_setup(self, runner):
            found.append(runner._run.watch.is_sample_due())

    JobRunner(build(), num_epochs=1, callbacks=[Look()]).run(inproc_session)
    assert found == [False]


class Reader:
    """Reads the story of the run while it runs."""

    def __init__(self, path: Path) -> None:
        self.path, self.found = path, list[RunStory]()

    def on_epoch_start(self, epoch: int) -> None:
        self.found += read_story(self.path).runs


def test_a_run_that_still_runs_is_told_up_to_its_last_save(inproc_session, tmp_path):
    reader = Reader(tmp_path)
    manager = MultiNodeCheckpointManager(tmp_path, save=SaveEvery(epochs=2), asynchronous=False)
    JobRunner(build(), manager, num_epochs=4, callbacks=[reader]).run(inproc_session)
    [run] = read_story(tmp_path).runs
    assert (run.state, [found.state for found in reader.found]) == ("finished", ["running"] * 4)
    assert [len(found.saves) for found in reader.found] == [1, 1, 2, 2]
    for found in reader.found:
        wall, *parts = astuple(found.ledger)
        assert sum(parts) == pytest.approx(wall)
        assert 0 < wall <= found.last_seen - found.began + 0.01
    assert reader.found[-1].ledger.compute < run.ledger.compute
