"""Workers that are retired: their nodes move between epochs, and no epoch runs twice."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Session,
    Task,
    current_task,
    epoch_limiter,
)
from jobrunner.cluster.exchange import Member, Members
from jobrunner.cluster.leases import Leases
from jobrunner.cluster.placement import WorkerInfo
from jobrunner.cluster.scheduler import SchedulerLink
from jobrunner.story import read_story
from tests.processes import own_session

NODES, EPOCHS = 3, 10


def walk(x, flag):
    """Draws, leaves a line for every run, and in epoch 4 waits until it may go on."""
    task = current_task()
    with open(f"{flag}.{task.node}", "a") as file:
        file.write(f"{task.epoch}\n")
    while task.epoch == 4 and not Path(flag).exists():
        time.sleep(0.005)
    return x + task.rng.standard_normal(x.size)


def build(flag):
    with Job("walk", seed=3) as job:
        for i in range(NODES):
            with Node(f"n{i}"):
                with job.init_group:
                    Task(lambda: np.zeros(100), outputs="x")
                Task(walk, inputs="x", outputs="x", kwargs={"flag": str(flag)})
    epoch_limiter(job, EPOCHS)
    return job


def state(session):
    return [session.fetch(Node(f"n{i}")["x"]).tobytes() for i in range(NODES)]


def epochs_run(flag):
    return [Path(f"{flag}.n{i}").read_text().split() for i in range(NODES)]


def await_epoch(flag, epoch):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if all(Path(f"{flag}.n{i}").exists() for i in range(NODES)) and all(
            ran[-1] == str(epoch) for ran in epochs_run(flag)
        ):
            return
        time.sleep(0.005)
    raise AssertionError(f"epoch {epoch} did not begin")


@pytest.fixture
def undisturbed(inproc_client, tmp_path):
    (tmp_path / "free").touch()
    with Session(inproc_client) as session:
        JobRunner(build(tmp_path / "free")).run(session)
        return state(session)


def close_gracefully(client):
    """What a worker does by itself when its --lifetime is over."""

    async def leave(dask_worker):
        dask_worker.loop.add_callback(dask_worker.close_gracefully)

    address = sorted(client.scheduler_info(n_workers=-1)["workers"])[0]
    client.run(leave, workers=[address])


def test_nodes_of_a_worker_that_leaves_move_and_no_epoch_runs_twice(tmp_path, undisturbed):
    flag = tmp_path / "flag"
    with own_session(3, processes=True) as (_, client, session):

        def leave_in_epoch_4():
            await_epoch(flag, 4)
            close_gracefully(client)
            # The scheduler has let the worker go; its task is in mid-epoch.
            while len(client.scheduler_info(n_workers=-1)["workers"]) == 3:
                time.sleep(0.01)
            flag.touch()

        thread = threading.Thread(target=leave_in_epoch_4)
        thread.start()
        result = JobRunner(
            build(flag),
            # Or workers would run the other epochs at once, in a batch.
            MultiNodeCheckpointManager(tmp_path / "ckpt", asynchronous=False),
            num_epochs=EPOCHS,
        ).run(session)
        thread.join()
        assert (result.epoch, result.restarts) == (EPOCHS, 0)
        assert epochs_run(flag) == [[str(e) for e in range(1, EPOCHS + 1)]] * NODES
        assert len(set(session._binding.placement.values())) == 2
        assert state(session) == undisturbed
        [run] = read_story(tmp_path / "ckpt").runs
        assert (run.losses, run.ledger.recovery > 0) == ((), True)


def test_the_lease_of_a_worker_that_retires_is_not_waited_for(inproc_client):
    """The scheduler waits with it for the worker to come back."""
    link, members = SchedulerLink(inproc_client), Members({"n": "tcp://127.0.0.1:1"})
    lease = inproc_client.submit(int, workers=["tcp://127.0.0.1:1"], pure=False)
    info = WorkerInfo("tcp://127.0.0.1:1", "gone", "gone", 1)
    members.workers["tcp://127.0.0.1:1"] = Member(info, "incarnation", [lease])
    members.leaving["tcp://127.0.0.1:1"] = "the scheduler retires it"
    messenger = SimpleNamespace(scheduler=link, members=members)
    leases = Leases(messenger, doubted=(), is_cut=False, near={})
    started = time.monotonic()
    leases.release(wait_seconds=30)
    assert time.monotonic() - started < 5
    assert members.workers["tcp://127.0.0.1:1"].leases == []
