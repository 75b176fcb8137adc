"""Workers that die, hang and come back, spare workers, and transient errors."""

import os
import signal
import threading
import time
from pathlib import Path

import dask
import numpy as np
import pytest

from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    NodeLostError,
    Session,
    Task,
    epoch_limiter,
)
from jobrunner.testing import Struck
from tests.jobs import Listener, count, counter, walk_undisturbed, walked, walking
from tests.processes import await_file, own_session

NODES, EPOCHS = [f"n{i}" for i in range(6)], 8


@pytest.fixture
def client():
    """Of three worker processes of the test's own."""
    with own_session(3, processes=True) as (_, client, _):
        yield client


def build(flag=None, *, seconds=2.0):
    """In epoch 4, node n1 writes its process id and gives the test time to act, or dies."""

    def act(task):
        if (task.node, task.epoch) != ("n1", 4) or (flag is not None and flag.exists()):
            return
        if flag is not None:
            Path(f"{flag}.tmp").write_text(str(os.getpid()))
            os.replace(f"{flag}.tmp", flag)
        if seconds is None:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(seconds)

    return walking(NODES, EPOCHS, act)


def saved(manager, epoch):
    checkpoint = manager.open(epoch)
    return [np.asarray(checkpoint[node]["x"]).tobytes() for node in NODES]


@pytest.fixture
def undisturbed(inproc_client):
    return walk_undisturbed(inproc_client, NODES, EPOCHS)


def test_a_worker_that_hangs_and_comes_back_changes_nothing(client, tmp_path, undisturbed):
    flag, pids, listener = tmp_path / "flag", [], Listener()
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt")

    def stop():
        pids.append(int(await_file(flag)))
        os.kill(pids[0], signal.SIGSTOP)

    with dask.config.set({"jobrunner.worker-silence-seconds": 1}), Session(client) as session:
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
        assert saved(manager, 8) == walked(session, NODES) == undisturbed


def test_a_lost_worker_ends_the_run_within_a_second_with_advice(client, tmp_path, undisturbed):
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt", asynchronous=False)
    flag = tmp_path / "flag"
    with Session(client) as session, pytest.raises(NodeLostError) as caught:
        JobRunner(build(flag, seconds=None), manager, max_restarts=0).run(session)
    ended = time.time()
    error = caught.value
    assert "n1" in error.nodes
    assert error.epoch == 4
    for part in (error.worker, "Run the same command again", "epoch 3"):
        assert part in str(error)
    assert ended - flag.stat().st_mtime < 1.0
    assert manager.latest() == 3
    with Session(client) as session:
        result = JobRunner(build(flag), manager).run(session)
        assert (result.resumed_from, result.epoch) == (3, 8)
        assert walked(session, NODES) == undisturbed


def test_a_task_that_kills_every_worker_ends_the_run_and_nothing_loops(client, tmp_path):
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt")
    with (
        Session(client) as session,
        pytest.raises(NodeLostError, match="max_restarts is 1") as lost,
    ):
        JobRunner(build(seconds=None), manager, max_restarts=1).run(session)
    assert "n1" in lost.value.nodes
    assert manager.latest() == 3


def half_change(x):
    x += 1


@pytest.mark.parametrize("saves", [True, False], ids=["checkpoints", "no-checkpoints"])
def test_after_a_transient_error_the_epoch_runs_again_from_recorded_state(
    inproc_session, tmp_path, saves
):
    with Job("flaky") as job, Node("a"):
        with job.init_group:
            Task(lambda: np.zeros(3), outputs="x")
        Task(half_change, updates="x")
        error = TimeoutError("for once")  # an OSError
        struck = Struck(half_change, epoch=3, flag=tmp_path / "flag", how="raise", error=error)
        Task(struck, updates="x", transient_errors=OSError)
    epoch_limiter(job, 5)
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt") if saves else None
    result = JobRunner(job, manager).run(inproc_session)
    assert (result.epoch, result.restarts) == (5, 1)
    assert inproc_session.fetch(Node("a")["x"]).tolist() == [10, 10, 10]


def test_a_struck_worker_dies_once_and_the_epoch_runs_again(client, tmp_path):
    job = counter(5, Struck(count, epoch=3, flag=tmp_path / "flag"))
    with Session(client) as session:
        result = JobRunner(job, MultiNodeCheckpointManager(tmp_path / "ckpt")).run(session)
        assert (result.epoch, result.restarts, session.fetch(Node("a")["n"])) == (5, 1, 5)
    with pytest.raises(ValueError, match="how must be"):
        Struck(len, epoch=1, flag="f", how="shout")
