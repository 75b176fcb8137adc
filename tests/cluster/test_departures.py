"""Workers that are retired: their nodes move between epochs, and no epoch runs twice."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

from jobrunner import (
    JobRunner,
    MultiNodeCheckpointManager,
)
from jobrunner.cluster.exchange import Member, Members
from jobrunner.cluster.leases import Leases
from jobrunner.cluster.placement import WorkerInfo
from jobrunner.cluster.scheduler import SchedulerLink
from jobrunner.story import read_story
from tests.jobs import walk_undisturbed, walked, walking
from tests.processes import await_true, own_session

NODES, EPOCHS = ["n0", "n1", "n2"], 10


def build(flag):
    """Each task leaves a line, and in epoch 4 waits until it may go on."""

    def note_and_wait(task):
        with open(f"{flag}.{task.node}", "a") as file:
            file.write(f"{task.epoch}\n")
        while task.epoch == 4 and not flag.exists():
            time.sleep(0.005)

    return walking(NODES, EPOCHS, note_and_wait)


def epochs_run(flag):
    return [Path(f"{flag}.{node}").read_text().split() for node in NODES]


def are_in_epoch_4(flag):
    are_there = all(Path(f"{flag}.{node}").exists() for node in NODES)
    return are_there and all(epochs[-1:] == ["4"] for epochs in epochs_run(flag))


def close_gracefully(client):
    """What a worker does by itself when its --lifetime is over."""

    async def leave(dask_worker):
        dask_worker.loop.add_callback(dask_worker.close_gracefully)

    address = sorted(client.scheduler_info(n_workers=-1)["workers"])[0]
    client.run(leave, workers=[address])


def test_nodes_of_a_worker_that_leaves_move_and_no_epoch_runs_twice(tmp_path, inproc_client):
    flag = tmp_path / "flag"
    with own_session(3, processes=True) as (_, client, session):

        def leave_in_epoch_4():
            await_true(lambda: are_in_epoch_4(flag), "epoch 4")
            close_gracefully(client)
            # The scheduler has let the worker go; its task is in mid-epoch.
            await_true(lambda: len(client.scheduler_info()["workers"]) == 2, "the departure")
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
        assert epochs_run(flag) == [[str(e) for e in range(1, EPOCHS + 1)]] * len(NODES)
        assert len(set(session._binding.placement.values())) == 2
        assert walked(session, NODES) == walk_undisturbed(inproc_client, NODES, EPOCHS)
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
