"""Epochs that workers run in batches give the same results, reported epoch by epoch."""

import dask
import numpy as np
import pytest

from jobrunner import (
    Job,
    JobRunner,
    Node,
    Task,
    TaskFailedError,
    current_task,
)
from jobrunner.worker.epoch_batch import WINDOW_RUNS
from tests.jobs import counter


class Watcher:
    is_passive = is_essential = True

    def __init__(self):
        self.epochs, self.metrics = [], []

    def on_epoch(self, epoch, seconds, metrics):
        assert seconds >= 0
        self.epochs.append(epoch)
        self.metrics.append(metrics)


def advance(x, other):
    task = current_task()
    task.report(**{f"seen_{task.node}": task.epoch * 10 + task.step})
    return x + 0.5 * other + task.rng.standard_normal(x.size)


def build(*, nodes=4, steps=1, stops_at=None, fails_at=None):
    everyone = [Node(f"n{i}") for i in range(nodes)]
    with Job("walk", seed=5, steps_per_epoch=steps) as job:
        for i, node in enumerate(everyone):
            with job.init_group:
                Task(lambda: np.zeros(20), outputs="x", node=node)
            # With the ring no node gets ahead; without it no node waits for another.
            Task(advance, inputs=["x", everyone[i - 1]["x"]], outputs="x", node=node)

        def judge():
            if current_task().epoch == fails_at:
                raise ValueError("by hand")
            return current_task().epoch == stops_at

        job.add_stop_condition(Task(judge, name="judge", node=everyone[1]).output())
    return job


def run(session, job, *, epochs, batch_seconds, **options):
    watcher = Watcher()
    with dask.config.set({"jobrunner.batch-seconds": batch_seconds}):
        result = JobRunner(job, num_epochs=epochs, callbacks=[watcher], **options).run(session)
    return result, watcher


def state(session, nodes=4):
    return [session.fetch(Node(f"n{i}")["x"]).tobytes() for i in range(nodes)]


@pytest.mark.parametrize("steps", [1, pytest.param(3, marks=pytest.mark.processes)])
def test_epoch_batches_give_the_same_bits_and_the_same_metrics(session, steps):
    found = []
    for seconds in (0, 60):
        result, watcher = run(session, build(steps=steps), epochs=40, batch_seconds=seconds)
        assert result.epoch == 40
        assert watcher.epochs == list(range(1, 41))
        assert result.metrics == [
            {**metrics, "epoch": epoch}
            for epoch, metrics in zip(watcher.epochs, watcher.metrics, strict=True)
        ]
        assert watcher.metrics[-1]["seen_n3"] == 400 + steps - 1
        found.append((state(session), result.metrics))
    assert found[0] == found[1]


@pytest.mark.parametrize("stops_at", [1, 2, 30])
def test_a_stop_condition_ends_a_batch_after_its_epoch(session, stops_at):
    result, watcher = run(session, build(stops_at=stops_at), epochs=40, batch_seconds=60)
    assert (result.stopped_by, result.epoch) == ("n1/judge", stops_at)
    assert watcher.epochs == list(range(1, stops_at + 1))


def test_conditions_on_several_workers_end_the_job_after_their_epoch(session):
    job = build(stops_at=30)
    with job:
        judge = Task(lambda: current_task().epoch == 5, name="another", node=Node("n3"))
    job.add_stop_condition(judge.output())
    assert run(session, job, epochs=40, batch_seconds=60)[0].epoch == 5


def test_nodes_that_share_nothing_end_after_the_same_epoch(session):
    result, watcher = run(session, counter(nodes="abcd"), epochs=203, batch_seconds=0.01)
    assert result.epoch == 203
    assert watcher.epochs == list(range(1, 204))
    assert [session.fetch(Node(node)["n"]) for node in "abcd"] == [203] * 4


def grow(x):
    x += 1


def note(seen, x):
    return [*seen, int(x.min()), int(x.max())]


@pytest.mark.processes
def test_slow_readers_do_not_see_changes_of_the_next_run(session):
    """The writer does not wait for the reader; it runs up to one window ahead."""
    with Job("in place") as job:
        writer, reader = Node("n0"), Node("n1")
        with job.init_group:
            Task(lambda: np.zeros(20_000), outputs="x", node=writer)
            Task(list, outputs="seen", node=reader)
        Task(grow, updates="x", node=writer)
        Task(note, inputs=["seen", writer["x"]], outputs="seen", node=reader)
    run(session, job, epochs=150, batch_seconds=60)
    assert session.fetch(reader["seen"]) == [n for n in range(1, 151) for _ in range(2)]


@pytest.mark.processes
def test_a_failure_names_its_epoch_and_earlier_epochs_are_reported(session):
    watcher = Watcher()
    with dask.config.set({"jobrunner.batch-seconds": 60}), pytest.raises(TaskFailedError) as caught:
        JobRunner(build(fails_at=103), num_epochs=120, callbacks=[watcher]).run(session)
    assert caught.value.epoch == 103
    assert "at epoch 103" in str(caught.value)
    # Only epochs that ended on all workers; some workers may lag behind the one that failed.
    told = len(watcher.epochs)
    assert 102 - WINDOW_RUNS <= told <= 102
    assert watcher.epochs == list(range(1, told + 1))
    # The session still works.
    assert run(session, build(), epochs=5, batch_seconds=60)[0].epoch == 5
