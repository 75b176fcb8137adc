"""Dask's scheduler dies during a run, and returns at the same address or does not."""

import os
import signal
import socket
import threading
import time

import dask
import pytest
from distributed import Client

from jobrunner import (
    JobRunner,
    MultiNodeCheckpointManager,
    SchedulerLostError,
    Session,
)
from tests.jobs import Listener, walk_undisturbed, walked, walking
from tests.processes import await_file, await_true, fork_dask

EPOCHS = 8


def build(flag):
    def wait(task):
        if task.epoch == 4 and not flag.exists():
            flag.write_text("4")
            time.sleep(3)  # the scheduler dies meanwhile

    return walking("a", EPOCHS, wait)


@pytest.fixture
def undisturbed(inproc_client):
    return walk_undisturbed(inproc_client, "a", EPOCHS)


class Dask:
    """A scheduler at one port and a worker, as processes."""

    def __init__(self):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.address = f"tcp://127.0.0.1:{found.getsockname()[1]}"
        self.processes = []

    def start(self):
        port = self.address.rpartition(":")[2]
        self.scheduler = self._run("scheduler", "--host", "127.0.0.1", "--port", port)
        self._run("worker", self.address, "--nthreads", "1", "--no-nanny")

    def _run(self, *command):
        process = fork_dask(*command, "--dashboard-address", ":0")
        self.processes.append(process)
        return process

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.processes.clear()


@pytest.fixture
def dask_processes():
    processes = Dask()
    processes.start()
    yield processes
    processes.kill()


@pytest.mark.parametrize(
    "gives_up", [pytest.param(True, marks=pytest.mark.nightly), False], ids=["closed", "waiting"]
)
def test_the_run_continues_when_the_scheduler_is_back(
    dask_processes, tmp_path, undisturbed, gives_up
):
    """A user's client waits for it; one that the session made is closed by then, and replaced."""
    flag, listener = tmp_path / "flag", Listener()

    def restart():
        await_file(flag)
        dask_processes.kill()
        if gives_up:
            await_true(lambda: session.client.status == "closed", "the end of the client")
        dask_processes.start()

    thread = threading.Thread(target=restart)
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt", asynchronous=False)
    if gives_up:
        client = session = Session.connect(dask_processes.address, timeout=20)
        session.client._timeout = 0.5  # the client's patience with a scheduler that is gone
    else:
        client = Client(dask_processes.address, set_as_default=False)
        session = Session(client)
    with client, session:
        thread.start()
        result = JobRunner(build(flag), manager, callbacks=[listener]).run(session)
        thread.join()
        assert (result.epoch, result.restarts) == (EPOCHS, 1)
        assert walked(session, "a") == undisturbed
    assert any("Beginning again from epoch 3" in warning for warning in listener.warnings)


def test_a_scheduler_that_stays_away_ends_the_run_with_advice(dask_processes, tmp_path):
    flag = tmp_path / "flag"

    def end():
        await_file(flag)
        dask_processes.kill()

    thread = threading.Thread(target=end)
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt", asynchronous=False)
    with Session.connect(dask_processes.address, timeout=10) as session:
        thread.start()
        with pytest.raises(SchedulerLostError, match="1 s") as caught:
            JobRunner(build(flag), manager, scheduler_wait_seconds=1).run(session)
        thread.join()
    assert "Run the same command again to resume from epoch 3" in str(caught.value)
    assert manager.latest() == 3


def test_a_run_does_not_wait_for_ever_for_a_hanging_scheduler(
    dask_processes, tmp_path, undisturbed
):
    (tmp_path / "flag").touch()
    warnings = []

    class Stops:
        def on_epoch(self, epoch, seconds, metrics):
            if epoch == 4 and not warnings:
                os.kill(dask_processes.scheduler.pid, signal.SIGSTOP)

        def on_warning(self, message):
            warnings.append(message)
            if "The scheduler is lost" in message:
                os.kill(dask_processes.scheduler.pid, signal.SIGCONT)

    manager = MultiNodeCheckpointManager(tmp_path / "ckpt", asynchronous=False)
    with dask.config.set({"jobrunner.worker-silence-seconds": 1}):
        session = Session.connect(dask_processes.address, timeout=20)
    try:
        job = build(tmp_path / "flag")
        assert JobRunner(job, manager, callbacks=[Stops()]).run(session).epoch == EPOCHS
        assert walked(session, "a") == undisturbed
    finally:
        os.kill(dask_processes.scheduler.pid, signal.SIGCONT)
        session.close()
    assert "The scheduler is lost" in warnings[0]
