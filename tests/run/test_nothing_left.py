"""A run leaves nothing behind on the cluster or in its driver, however it ends."""

import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from distributed import Client

from jobrunner import (
    ExecutionError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    RunStoppedError,
    Session,
    Task,
    TaskFailedError,
    current_task,
    epoch_limiter,
)
from tests.processes import await_true

PATIENCE_SECONDS = 20


def step(x, how, flag):
    epoch = current_task().epoch
    if epoch == 2 and how == "raise":
        raise ValueError("as asked for")
    if epoch == 2 and how in ("hang", "wait"):
        Path(flag).touch()
        time.sleep(0.6 if how == "hang" else 2)
    return x + 1


def build(how="", flag="", limit=3):
    with Job("left") as job:
        for name, other in (("a", "b"), ("b", "a")):
            with Node(name):
                with job.init_group:
                    Task(lambda: 0, outputs="x", name="zero")
                kwargs = {"how": how if name == "a" else "", "flag": str(flag)}
                Task(step, inputs="x", outputs="x", kwargs=kwargs, name="step")
                Task(lambda x, y: None, ["x", Node(other)["x"]], name="read")
                job.epoch_group.report_step(lambda: None, interval_seconds=0.005)
    epoch_limiter(job, limit)
    return job


def on_the_scheduler(dask_scheduler):
    topics = dask_scheduler._broker._topics
    return {
        "tasks": sorted(map(str, dask_scheduler.tasks)),
        "plugins": [
            sorted(plugins)
            for plugins in (
                dask_scheduler.plugins,
                dask_scheduler.worker_plugins,
                dask_scheduler.nanny_plugins,
            )
        ],
        "handlers": sorted([*dask_scheduler.handlers, *dask_scheduler.stream_handlers]),
        "clients": len(dask_scheduler.clients),
        "names": sorted(
            str(name)
            for name in (*topics, *dask_scheduler.extensions["variables"].variables)
            if "jobrunner" in str(name)
        ),
        "subscriptions": sorted(
            (name, who)
            for name, topic in topics.items()
            for who in topic.subscribers
            # Dask forgets a client that is gone, but not its subscriptions.
            if name in dask_scheduler.workers and who in dask_scheduler.clients
        ),
    }


def on_a_worker(dask_worker):
    return {
        "plugins": sorted(dask_worker.plugins),
        "messages": sorted(name for name in dask_worker.handlers if "jobrunner" in name),
        "switch interval": sys.getswitchinterval(),
        "data": sorted(map(str, dask_worker.data)),
        "tasks": sorted(map(str, dask_worker.state.tasks)),
        "threads": sorted(t.name for t in threading.enumerate() if "jobrunner" in t.name),
        "files": sorted(
            os.path.join(root, name)
            for root, _, names in os.walk(dask_worker.local_directory)
            for name in names
        ),
    }


def measure(client):
    return {"scheduler": client.run_on_scheduler(on_the_scheduler), **client.run(on_a_worker)}


@pytest.fixture
def left(process_cluster):
    """A function that waits until the cluster is as before, or fails with what is left."""
    with Client(process_cluster, set_as_default=False) as client:
        clients = measure(client)["scheduler"]["clients"]
        # What Dask starts once per process stays.
        with Session.connect(process_cluster.scheduler_address) as session:
            JobRunner(build()).run(session)
        # The scheduler hears a moment later that a client is gone.
        await_true(
            lambda: measure(client)["scheduler"]["clients"] == clients, "the end of the session"
        )
        before = measure(client)
        workers = [found for address, found in before.items() if address != "scheduler"]
        assert before["scheduler"]["tasks"] == []
        assert all(w["messages"] == w["threads"] == [] for w in workers)
        assert "jobrunner" not in str([found["plugins"] for found in before.values()])

        def check():
            deadline = time.monotonic() + PATIENCE_SECONDS
            while (now := measure(client)) != before and time.monotonic() < deadline:
                time.sleep(0.05)
            assert now == before

        yield check


def names_of_new_threads(before):
    names = [thread.name for thread in set(threading.enumerate()) - before]
    return [name for name in names if not name.startswith("Dask-Offload")]


def end_well(session, manager, flag):
    assert JobRunner(build(), manager).run(session).epoch == 3


def fail(session, manager, flag):
    with pytest.raises(TaskFailedError):
        JobRunner(build("raise"), manager).run(session)


def stop(session, manager, flag):
    # Workers may have begun a batch of epochs: there must be some after it.
    runner = JobRunner(build("hang", flag, limit=100_000), manager)

    def ask():
        while not flag.exists():
            time.sleep(0.005)
        runner.stop()

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(RunStoppedError):
        runner.run(session)
    thread.join()


def miss_a_deadline(session, manager, flag):
    with pytest.raises(ExecutionError, match=r"within 0\.2 s.*a/step"):
        JobRunner(build("wait", flag), manager, epoch_deadline_seconds=0.2).run(session)


@pytest.mark.parametrize("end", [end_well, fail, stop, miss_a_deadline])
def test_a_run_leaves_nothing_behind(process_cluster, left, tmp_path, end):
    before = set(threading.enumerate())
    with Session.connect(process_cluster.scheduler_address) as session:
        end(session, MultiNodeCheckpointManager(tmp_path / "ckpt"), tmp_path / "flag")
    left()
    await_true(lambda: not names_of_new_threads(before), "the end of the run's threads")


def drive(address, path):
    with Session.connect(address) as session:
        job = build("wait", path / "flag")
        JobRunner(job, MultiNodeCheckpointManager(path / "ckpt")).run(session)


def test_a_driver_that_is_killed_leaves_nothing_behind(process_cluster, left, tmp_path):
    driver = multiprocessing.get_context("forkserver").Process(
        target=drive, args=(process_cluster.scheduler_address, tmp_path)
    )
    driver.start()
    try:
        await_true((tmp_path / "flag").exists, "epoch 2")
    finally:
        driver.kill()
        driver.join()
    left()
