"""Departures as batch systems and long-lived clusters know them. Takes a minute; has a command of its own.

python -m pytest tests/cluster/long_departures.py
"""

import contextlib
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
from tests.cluster.processes import dask_process

NODES, EPOCHS = 2, 60


def walk(x, flag):
    """Draws, and leaves a line for every run of an epoch."""
    task = current_task()
    with open(f"{flag}.{task.node}", "a") as file:
        file.write(f"{task.epoch}\n")
    time.sleep(0.1)
    return x + task.rng.standard_normal()


def build(flag, nodes=NODES):
    with Job("walk", seed=3) as job:
        for i in range(nodes):
            with Node(f"n{i}"):
                with job.init_group:
                    Task(lambda: 0.0, outputs="x")
                Task(walk, inputs="x", outputs="x", kwargs={"flag": str(flag)})
    epoch_limiter(job, EPOCHS)
    return job


def epochs_run(flag, nodes=NODES):
    return [[int(n) for n in Path(f"{flag}.n{i}").read_text().split()] for i in range(nodes)]


def run(client, tmp_path, nodes=NODES):
    with Session(client) as session:
        manager = MultiNodeCheckpointManager(tmp_path / "ckpt")
        result = JobRunner(build(tmp_path / "flag", nodes), manager).run(session)
        return result, dict(session._binding.placement)


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
        result, placement = run(client, tmp_path)
        assert (result.epoch, result.restarts) == (EPOCHS, 0)
        assert epochs_run(tmp_path / "flag") == [list(range(1, EPOCHS + 1))] * NODES
        there = set(client.scheduler_info(n_workers=-1)["workers"])
        assert len(set(placement.values())) == 2
        assert there == set(placement.values())


def test_workers_whose_lifetime_ends_are_replaced_and_no_epoch_runs_twice(scheduler, tmp_path):
    worker = ["worker", *scheduler, "--no-nanny"]
    short = [*worker, "--lifetime", "4s", "--lifetime-stagger", "1s"]
    with (
        dask_process(*short, "--name", "a", cwd=tmp_path),
        dask_process(*short, "--name", "b", cwd=tmp_path),
        dask_process(*worker, "--name", "stays", cwd=tmp_path),
        Client(scheduler_file=scheduler[1], set_as_default=False, timeout=30) as client,
    ):
        client.wait_for_workers(3, timeout=30)
        result, placement = run(client, tmp_path, 3)
        assert (result.epoch, result.restarts) == (EPOCHS, 0)
        assert epochs_run(tmp_path / "flag", 3) == [list(range(1, EPOCHS + 1))] * 3
        there = client.scheduler_info(n_workers=-1)["workers"]
        assert [worker["name"] for worker in there.values()] == ["stays"]
        assert set(placement.values()) == set(there)


JOB = """
import sys
sys.path.insert(0, {root!r})
from tests.cluster.long_departures import build
job = build({flag!r})
"""


def test_the_end_of_the_walltime_loses_nothing_and_the_next_run_goes_on(tmp_path):
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
        deadline = time.monotonic() + 60
        while (manager.latest() or 0) < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
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
