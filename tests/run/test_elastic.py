"""Workers that join a run get nodes, and a cluster that adapts starts them."""

import time

import pytest

from jobrunner import (
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    RunStoppedError,
)
from jobrunner.cluster.wish import MOST_WAIT_SECONDS, SETTLED_SECONDS, Joins
from tests.jobs import counter
from tests.processes import own_session


def work(n):
    time.sleep(0.05)
    return n + 1


def build(epochs):
    return counter(epochs, work, nodes="ab")


class Placements:
    """Where the nodes were; a worker joins after epoch 2."""

    def __init__(self, join=lambda: None):
        self.join = join
        self.used = []
        self.joined = self.moved = None
        self.stop = lambda: None

    def on_placement(self, placement):
        self.used.append(len(set(placement.values())))
        if self.used[-1] > 1:
            self.moved = time.monotonic()

    def on_epoch(self, epoch, seconds, metrics):
        if epoch == 2:
            self.joined = time.monotonic()
            self.join()
        if self.moved is not None:
            self.stop()


def test_workers_that_join_get_nodes_at_the_end_of_an_epoch(tmp_path):
    with own_session(1) as (cluster, _, session):
        placements = Placements(lambda: cluster.scale(2))
        manager = MultiNodeCheckpointManager(tmp_path / "ckpt")
        runner = JobRunner(build(200), manager, callbacks=[placements])
        placements.stop = runner.stop
        with pytest.raises(RunStoppedError):
            runner.run(session)
        assert placements.used == [1, 2]
        assert placements.moved - placements.joined < 5
        # No epoch ran twice.
        assert [session.fetch(Node(node)["n"]) for node in "ab"] == [manager.latest()] * 2


def test_a_run_starts_on_a_cluster_without_workers_that_adapts(tmp_path):
    with own_session(0) as (cluster, _, session):
        cluster.adapt(minimum=0, maximum=2, interval="50ms")
        placements = Placements()
        manager = MultiNodeCheckpointManager(tmp_path / "ckpt")
        runner = JobRunner(build(3), manager, wanted_workers=2, callbacks=[placements])
        result = runner.run(session)
        assert (result.epoch, result.restarts) == (3, 0)
        assert placements.used == [2]
        # Nobody asks for workers any more.
        assert "wanted-worker" not in str(list(cluster.scheduler.tasks))


def test_a_run_whose_nodes_cannot_move_begins_with_fewer_workers_and_asks_for_no_more():
    tasks = []

    class Tasks:
        def on_epoch(self, epoch, seconds, metrics):
            tasks.append(str(list(cluster.scheduler.tasks)))

    with own_session(0) as (cluster, _, session):
        cluster.adapt(minimum=0, maximum=1, interval="50ms")
        result = JobRunner(build(2), wanted_workers=2, callbacks=[Tasks()]).run(session)
        assert (result.epoch, result.restarts) == (2, 0)
        assert "lease-" in tasks[0]
        assert "wanted-worker" not in "".join(tasks)


def test_nodes_wait_until_no_other_worker_joins_but_not_for_ever():
    joins = Joins()
    assert not joins.are_over(100.0)
    joins.note(100.0)
    assert not joins.are_over(100.0 + SETTLED_SECONDS / 2)
    joins.note(100.0 + SETTLED_SECONDS / 2)
    assert not joins.are_over(100.0 + SETTLED_SECONDS)
    assert joins.are_over(100.0 + 1.5 * SETTLED_SECONDS)
    for second in range(int(MOST_WAIT_SECONDS / SETTLED_SECONDS * 2) + 1):
        joins.note(100.0 + second * SETTLED_SECONDS / 2)
    assert joins.are_over(100.0 + MOST_WAIT_SECONDS)
