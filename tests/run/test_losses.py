"""Workers that die, hang and come back, spare workers, and transient errors."""

import os
import signal
import threading
import time
from pathlib import Path

import dask
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
from jobrunner.testing import Struck
from tests.jobs import Listener, count, counter
from tests.processes import await_file

NODES = 6


@pytest.fixture
def cluster():
    with LocalCluster(
        n_workers=3, threads_per_worker=1, processes=True, dashboard_address=":0"
    ) as cluster:
        yield cluster


def walk(x, *, at, flag, seconds):
    """Draws; in epoch `at` writes its process id and gives the test time to act, or dies."""
    task = current_task()
    if task.epoch == at and (flag is None or not Path(flag).exists()):
        if flag is not None:
            Path(f"{flag}.tmp").write_text(str(os.getpid()))
            os.replace(f"{flag}.tmp", flag)
        if seconds is None:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(seconds)
    return x + task.rng.standard_normal(x.size)


def build(flag, *, seconds=2.0):
    with Job("walk", seed=3) as job:
        for i in range(NODES):
            with Node(f"n{i}"):
                with job.init_group:
                    Task(lambda: np.zeros(100), outputs="x")
                kwargs = {"at": 4 if i == 1 else None, "flag": flag, "seconds": seconds}
                Task(walk, inputs="x", outputs="x", kwargs=kwargs)
    epoch_limiter(job, 8)
    return job


def state(session):
    return [session.fetch(Node(f"n{i}")["x"]).tobytes() for i in range(NODES)]


def saved(manager, epoch):
    checkpoint = manager.open(epoch)
    return [np.asarray(checkpoint[f"n{i}"]["x"]).tobytes() for i in range(NODES)]


@pytest.fixture
def undisturbed(inproc_client, tmp_path):
    (tmp_path / "free").touch()
    with Session(inproc_client) as session:
        JobRunner(build(tmp_path / "free")).run(session)
        return state(session)


def test_a_worker_that_hangs_and_comes_back_changes_nothing(cluster, tmp_path, undisturbed):
    flag, pids, listener = tmp_path / "flag", [], Listener()
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt")

    def stop():
        pids.append(int(await_file(flag)))
        os.kill(pids[0], signal.SIGSTOP)

    with (
        dask.config.set({"jobrunner.worker-silence-seconds": 1}),
        Client(cluster, set_as_default=False) as client,
        Session(client) as session,
    ):
        thread = threading.Thread(target=stop)
        thread.start()
        try:
            runner = JobRunner(build(flag, seconds=0.5), manager, callbacks=[listener])
            result = runner.run(session)
            assert (result.epoch, result.restarts) == (8, 1)
            before, after = listener.placements
            kept = {node: at for node, at in before.items() if at != before["n1"]}
            assert kept.items() <= after.items()
            assert len(set(after.values())) == 2
        finally:
            thread.join()
            os.kill(pids[0], signal.SIGCONT)
        entries = sorted(os.listdir(tmp_path / "ckpt" / "_log"))
        time.sleep(1.0)  # for the one that came back to do what it was about to
        assert sorted(os.listdir(tmp_path / "ckpt" / "_log")) == entries
        for epoch in manager.epochs():
            manager.verify(epoch)
        assert saved(manager, 8) == state(session) == undisturbed


def test_a_lost_worker_ends_the_run_within_a_second_with_advice(cluster, tmp_path, undisturbed):
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt", asynchronous=False)
    flag = tmp_path / "flag"
    with Client(cluster, set_as_default=False) as client:
        with Session(client) as session, pytest.raises(NodeLostError) as caught:
            JobRunner(build(flag, seconds=None), manager, max_restarts=0).run(session)
        ended = time.time()
        error = caught.value
        assert "n1" in error.nodes
        assert error.epoch == 4
        assert error.worker in str(error)
        assert "Run the same command again" in str(error)
        assert "epoch 3" in str(error)
        assert ended - flag.stat().st_mtime < 1.0
        assert manager.latest() == 3
        with Session(client) as session:
            result = JobRunner(build(flag), manager).run(session)
            assert (result.resumed_from, result.epoch) == (3, 8)
            assert state(session) == undisturbed


def test_a_task_that_kills_every_worker_ends_the_run_and_nothing_loops(cluster, tmp_path):
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt")
    with Client(cluster, set_as_default=False) as client, Session(client) as session:
        with pytest.raises(NodeLostError, match="max_restarts is 1") as caught:
            JobRunner(build(None, seconds=None), manager, max_restarts=1).run(session)
        assert "n1" in caught.value.nodes
        assert manager.latest() == 3


def half_change(x):
    x += 1


def flaky_job(flag, error, transient):
    with Job("flaky") as job, Node("a"):
        with job.init_group:
            Task(lambda: np.zeros(3), outputs="x")
        Task(half_change, updates="x")
        struck = Struck(half_change, epoch=3, flag=flag, how="raise", error=error("for once"))
        Task(struck, updates="x", transient_errors=transient)
    epoch_limiter(job, 5)
    return job


@pytest.mark.parametrize("saves", [True, False], ids=["checkpoints", "no-checkpoints"])
def test_after_a_transient_error_the_epoch_runs_again_from_recorded_state(
    inproc_client, tmp_path, saves
):
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt") if saves else None
    job = flaky_job(tmp_path / "flag", TimeoutError, OSError)  # a subclass counts
    with Session(inproc_client) as session:
        result = JobRunner(job, manager).run(session)
        assert (result.epoch, result.restarts) == (5, 1)
        assert session.fetch(Node("a")["x"]).tolist() == [10, 10, 10]


def test_a_struck_worker_dies_once_and_the_epoch_runs_again(cluster, tmp_path):
    job = counter(5, Struck(count, epoch=3, flag=tmp_path / "flag"))
    with Client(cluster, set_as_default=False) as client, Session(client) as session:
        result = JobRunner(job, MultiNodeCheckpointManager(tmp_path / "ckpt")).run(session)
        assert (result.epoch, result.restarts, session.fetch(Node("a")["n"])) == (5, 1, 5)
    with pytest.raises(ValueError, match="how must be"):
        Struck(len, epoch=1, flag="f", how="shout")
