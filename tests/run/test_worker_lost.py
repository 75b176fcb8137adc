"""Workers die under a running job."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from distributed import Client, LocalCluster

from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    NodeLostError,
    Session,
    Task,
    current_task,
    epoch_limiter,
)

NODES = 3


@pytest.fixture
def cluster():
    with LocalCluster(
        n_workers=3, threads_per_worker=1, processes=True, dashboard_address=":0"
    ) as cluster:
        yield cluster


def walk(x, *, dies_at, flag):
    task = current_task()
    if task.epoch == dies_at and (flag is None or not Path(flag).exists()):
        if flag is not None:
            Path(flag).write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    return x + task.rng.standard_normal(x.size)


def build(*, dies_at=None, flag=None, epochs=8):
    with Job("walk", seed=3) as job:
        for i in range(NODES):
            with Node(f"n{i}"):
                with job.init_group:
                    Task(lambda: np.zeros(100), outputs="x")
                dies = dies_at if i == 1 else None
                Task(walk, inputs="x", outputs="x", kwargs={"dies_at": dies, "flag": flag})
        epoch_limiter(job, epochs)
    return job


def state(session):
    return [session.fetch(Node(f"n{i}")["x"]).tobytes() for i in range(NODES)]


@pytest.fixture
def undisturbed(inproc_client):
    with Session(inproc_client) as session:
        JobRunner(build()).run(session)
        return state(session)


def test_a_lost_worker_ends_the_run_within_a_second_with_advice(cluster, tmp_path, undisturbed):
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt", asynchronous=False)
    flag = tmp_path / "flag"
    with Client(cluster, set_as_default=False) as client:
        with Session(client) as session:
            job = build(dies_at=4, flag=str(flag))
            with pytest.raises(NodeLostError) as caught:
                JobRunner(job, manager, max_restarts=0).run(session)
            ended = time.time()
        error = caught.value
        assert (error.nodes, error.epoch) == (("n1",), 4)
        assert error.worker in str(error)
        assert "Run the same command again" in str(error)
        assert "epoch 3" in str(error)
        assert ended - float(flag.read_text()) < 1.0
        assert manager.latest() == 3
        with Session(client) as session:
            result = JobRunner(build(), manager).run(session)
            assert (result.resumed_from, result.epoch) == (3, 8)
            assert state(session) == undisturbed


@pytest.mark.parametrize(
    "saves",
    [
        pytest.param(True, id="checkpoints"),
        pytest.param(False, id="no-checkpoints", marks=pytest.mark.nightly),
    ],
)
def test_the_run_begins_again_by_itself_and_ends_with_the_same_bits(
    cluster, tmp_path, undisturbed, saves
):
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt") if saves else None
    job = build(dies_at=4, flag=str(tmp_path / "flag"))
    with Client(cluster, set_as_default=False) as client, Session(client) as session:
        result = JobRunner(job, manager).run(session)
        assert (result.restarts, result.epoch, result.resumed_from) == (1, 8, None)
        assert [metrics["epoch"] for metrics in result.metrics] == list(range(1, 9))
        assert state(session) == undisturbed


def test_a_task_that_kills_every_worker_ends_the_run_and_nothing_loops(cluster, tmp_path):
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt")
    with Client(cluster, set_as_default=False) as client, Session(client) as session:
        with pytest.raises(NodeLostError, match="max_restarts is 1") as caught:
            JobRunner(build(dies_at=4), manager, max_restarts=1).run(session)
        assert "n1" in caught.value.nodes
        assert manager.latest() == 3
