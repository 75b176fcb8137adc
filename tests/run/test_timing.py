"""Where the time of a run that still runs went."""

from __future__ import annotations

import time
from pathlib import Path

from jobrunner import Job, JobRunner, MultiNodeCheckpointManager, Node, SaveEvery, Task
from jobrunner.story import RunStory, read_story


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
    assert [len(found.epochs) for found in reader.found] == [1, 1, 2, 2]
    for found in reader.found:
        assert 0 < found.ledger.wall <= found.last_seen - found.began + 0.01
    assert reader.found[-1].ledger.compute < run.ledger.compute
