"""A worker in a network namespace of its own, whose cable is pulled and put back."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import Client

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

HERE, THERE = "10.231.77.1", "10.231.77.2"
SPACE, OURS, THEIRS = "jr-test", "jr-ours", "jr-theirs"
EPOCHS = 8


def ip(*command):
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True)


@pytest.fixture
def cable():
    """A namespace at the other end of a cable; gives what pulls it (False) and puts it back."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2) on this machine")
    try:
        ip("netns", "add", SPACE)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
    try:
        ip("link", "add", OURS, "type", "veth", "peer", "name", THEIRS, "netns", SPACE)
        ip("addr", "add", f"{HERE}/30", "dev", OURS)
        ip("link", "set", OURS, "up")
        ip("-n", SPACE, "addr", "add", f"{THERE}/30", "dev", THEIRS)
        ip("-n", SPACE, "link", "set", "lo", "up")
        ip("-n", SPACE, "link", "set", THEIRS, "up")
    except subprocess.CalledProcessError as error:
        ip("netns", "del", SPACE)
        pytest.skip(f"no cable into a network namespace here: {error.stderr.strip()}")
    yield lambda is_in: ip("-n", SPACE, "link", "set", THEIRS, "up" if is_in else "down")
    ip("netns", "del", SPACE)  # and the cable with it


@pytest.fixture
def scheduler(cable, tmp_path):
    """A scheduler here with a worker here and one there; gives its address."""
    python = [sys.executable, "-m", "dask"]
    address = f"tcp://{HERE}:18786"
    worker = ["worker", address, "--nthreads", "1", "--no-nanny", "--no-dashboard", "--host"]
    commands = [
        [*python, "scheduler", "--host", HERE, "--port", "18786", "--dashboard-address", ":0"],
        [*python, *worker, HERE, "--name", "here"],
        ["ip", "netns", "exec", SPACE, *python, *worker, THERE, "--name", "there"],
    ]
    with (tmp_path / "dask.log").open("ab") as log:
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": os.getcwd()},
                cwd=tmp_path,
                stdout=log,
                stderr=log,
            )
            for command in commands
        ]
        yield address
        for process in processes:
            process.kill()
            process.wait(20)


def walk(x, flag):
    task = current_task()
    if task.epoch == 4 and flag and not Path(flag).exists():
        Path(flag).touch()
        time.sleep(1)  # the cable is pulled meanwhile
    return x + task.rng.standard_normal(x.size)


def mix(x, other):
    return (x + other) / 2


def build(flag):
    with Job("walk", seed=3) as job:
        for name, other in (("a", "b"), ("b", "a")):
            with job.init_group:
                Task(lambda: np.zeros(100), outputs="x", node=name)
            kwargs = {"flag": str(flag) if name == "b" else ""}
            walked = Task(walk, inputs="x", outputs="y", node=name, kwargs=kwargs)
            Task(mix, [walked.output(), Node(other)["x"]], outputs="x", node=name)
    epoch_limiter(job, EPOCHS)
    return job


def test_a_worker_that_is_cut_off_is_replaced_and_changes_nothing_when_it_is_back(
    scheduler, cable, tmp_path, inproc_client
):
    flag, manager = tmp_path / "flag", MultiNodeCheckpointManager(tmp_path / "ckpt")

    def pull():
        while not flag.exists():
            time.sleep(0.005)
        cable(False)

    with (
        dask.config.set({"jobrunner.worker-silence-seconds": 1}),
        Client(scheduler, set_as_default=False, timeout=30) as client,
        Session(client) as session,
    ):
        client.wait_for_workers(2, timeout=30)
        thread = threading.Thread(target=pull)
        thread.start()
        result = JobRunner(build(flag), manager).run(session)
        thread.join()
        assert (result.epoch, result.restarts) == (EPOCHS, 1)
        entries = sorted(os.listdir(tmp_path / "ckpt" / "_log"))
        cable(True)
        time.sleep(2.0)  # for the one that is back to do what it was about to
        assert sorted(os.listdir(tmp_path / "ckpt" / "_log")) == entries
        for epoch in manager.epochs():
            manager.verify(epoch)
        state = [session.fetch(Node(name)["x"]).tobytes() for name in "ab"]
    flag.touch()
    with Session(inproc_client) as session:
        JobRunner(build(flag)).run(session)
        assert state == [session.fetch(Node(name)["x"]).tobytes() for name in "ab"]
