"""Departures as batch systems and long-lived clusters know them. Takes a minute; has a command of its own.

A run goes on until what it is about has happened, and for some epochs more.

python -m pytest tests/cluster/long_departures.py
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distributed import Client, LocalCluster

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
from tests.processes import await_true, dask_process

NODES, EPOCHS, MORE_EPOCHS = 2, 60, 20
MOST_EPOCHS = 900


def walk(x, flag):
    """Draws, and leaves a line for every run of an epoch."""
    task = current_task()
    with open(f"{flag}.{task.node}", "a") as file:
        file.write(f"{task.epoch}\n")
    time.sleep(0.1)
    return x + task.rng.standard_normal()


def build(flag, nodes=NODES, epochs=EPOCHS):
    with Job("walk", seed=3) as job:
        for i in range(nodes):
            with Node(f"n{i}"):
                with job.init_group:
                    Task(lambda: 0.0, outputs="x")
                Task(walk, inputs="x", outputs="x", kwargs={"flag": str(flag)})
        job.add_stop_condition(Task(Path(f"{flag}.stop").exists, node="n0", name="stop").output())
    epoch_limiter(job, epochs)
    return job


def epochs_run(flag, nodes=NODES):
    return [[int(n) for n in Path(f"{flag}.n{i}").read_text().split()] for i in range(nodes)]


class Until:
    """Lets a run go on for some epochs after the workers that are there are as they should be."""

    def __init__(self, flag, session, is_so):
        self.flag, self.session, self.is_so = flag, session, is_so
        self.last = math.inf
        self.placements = []

    def on_epoch(self, epoch, seconds, metrics):
        workers = self.session.client.scheduler_info(n_workers=-1)["workers"]
        there = {worker["name"]: address for address, worker in workers.items()}
        self.placements.append(set(self.session._binding.placement.values()))
        if self.last == math.inf and self.is_so(there, self.placements[-1]):
            self.last = epoch + MORE_EPOCHS
        if epoch >= self.last - 1:
            Path(f"{self.flag}.stop").touch()


def run(client, tmp_path, nodes, is_so):
    """Run until the workers by name, and those in use, are as they should be; where nodes were."""
    flag = tmp_path / "flag"
    with Session(client) as session:
        until = Until(flag, session, is_so)
        manager = MultiNodeCheckpointManager(tmp_path / "ckpt")
        runner = JobRunner(build(flag, nodes, MOST_EPOCHS), manager, callbacks=[until])
        result = runner.run(session)
    assert (result.epoch, result.restarts) == (until.last, 0)
    assert epochs_run(flag, nodes) == [list(range(1, result.epoch + 1))] * nodes
    return until.placements


@pytest.fixture
def scheduler(tmp_path):
    file = tmp_path / "scheduler.json"
    command = ["scheduler", "--scheduler-file", str(file), "--port", "0"]
    with dask_process(*command, "--host", "127.0.0.1", "--dashboard-address", ":0", cwd=tmp_path):
        yield ["--scheduler-file", str(file), "--nthreads", "1", "--dashboard-address", ":0"]


def test_adaptive_scaling_leaves_leased_workers_alone_and_takes_the_idle_one(tmp_path):
    with (
        LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        cluster.adapt(minimum=1, maximum=3, interval="100ms", wait_count=2)
        first, *others = run(client, tmp_path, 2, lambda there, used: {*there.values()} == used)
        assert len(first) == 2
        assert all(placement == first for placement in others)


def test_workers_whose_lifetime_ends_are_replaced_and_no_epoch_runs_twice(scheduler, tmp_path):
    worker = ["worker", *scheduler, "--no-nanny"]
    short = [*worker, "--lifetime", "10s", "--lifetime-stagger", "1s"]
    with (
        dask_process(*short, "--name", "a", cwd=tmp_path),
        dask_process(*short, "--name", "b", cwd=tmp_path),
        dask_process(*worker, "--name", "stays", cwd=tmp_path),
        Client(scheduler_file=scheduler[1], set_as_default=False, timeout=30) as client,
    ):
        client.wait_for_workers(3, timeout=30)
        first, *_, last = run(client, tmp_path, 3, lambda there, used: there.keys() == {"stays"})
        assert (len(first), len(last)) == (3, 1)


JOB = """
import sys
sys.path.insert(0, {root!r})
from tests.cluster.long_departures import build
job = build({flag!r})
"""


def test_the_end_of_the_walltime_loses_nothing_and_the_next_run_resumes(tmp_path):
    """SIGTERM to every process of the step, as Slurm sends it, and SIGKILL some seconds later."""
    script = tmp_path / "job.py"
    script.write_text(JOB.format(root=os.getcwd(), flag=str(tmp_path / "flag")))
    command = [sys.executable, "-m", "jobrunner", "run", str(script), "--workers", "2"]
    command += ["--checkpoint", str(tmp_path / "ckpt"), "--grace", "5"]

    def start():
        return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)

    manager = MultiNodeCheckpointManager(tmp_path / "ckpt")
    driver = start()
    try:
        await_true(lambda: (manager.latest() or 0) >= 5, "epoch 5", driver)
        os.killpg(driver.pid, signal.SIGTERM)
        assert driver.wait(20) == 75
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait(20)
    reached = manager.latest()
    assert 5 <= reached < EPOCHS
    again = start()
    assert again.wait(120) == 0
    assert epochs_run(tmp_path / "flag") == [list(range(1, EPOCHS + 1))] * NODES
