"""Kill something every few seconds while a job runs; count what it costs. Not part of the tests.

    python tests/soak/soak.py --minutes 30 --seed 1

A driver process runs a job on a scheduler and workers of its own, again and again until it is
done. Meanwhile workers, scheduler and driver are killed, stopped, terminated or retired, and tasks
raise what passes. In the end the state is compared with that of the same job undisturbed. Exits
with 1 if an epoch was lost, if a bit differs, or if nothing was recorded for two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
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

ROOT = Path(__file__).parents[2]
NODES = 4
STUCK_SECONDS = 120.0


def walk(x, seconds, flag=""):
    """Draws; once for each file that lies at `flag` it raises what passes."""
    time.sleep(seconds)
    if flag:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(flag)
            raise InterruptedError("as asked for")
    return x + current_task().rng.standard_normal(x.size)


def add_up(x, sums):
    """Changes in place what saves and kept states refer to."""
    sums[0] = 0.5 * sums[0] + np.resize(x, sums[0].size)
    sums[1]["last"][: x.size] = x


def build(epochs, seconds, flag=""):
    nodes = [Node(f"n{i}") for i in range(NODES)]
    with Job("soak", seed=11) as job:
        for i, node in enumerate(nodes):
            with job.init_group:
                Task(lambda: np.zeros(10_000), outputs="x", node=node)
                Task(
                    lambda: [np.zeros(30_000), {"last": np.zeros(20_000)}],
                    outputs="sums",
                    node=node,
                )
            drift = Task(
                walk,
                inputs="x",
                outputs="y",
                node=node,
                kwargs={"seconds": seconds, "flag": flag},
                transient_errors=InterruptedError,
            )
            Task(
                lambda y, other: 0.9 * y + 0.1 * other,
                [drift.output(), nodes[i - 1]["x"]],
                outputs="x",
                node=node,
            )
            Task(add_up, inputs="x", updates="sums", node=node)
    epoch_limiter(job, epochs)
    return job


def drive(address, path, epochs, seconds):
    """The driver process: exits with 0 when the job is done."""
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("jobrunner.run").setLevel(logging.INFO)
    with Session.connect(address, timeout=30) as session:
        manager = MultiNodeCheckpointManager(path, asynchronous=os.getpid() % 2 == 0)
        job = build(epochs, seconds, f"{path}.fail")
        result = JobRunner(job, manager, max_restarts=20).run(session)
    print(f"restarts {result.restarts}", flush=True)


class Cluster:
    """A scheduler at one address and workers, all processes that may die."""

    def __init__(self, path, workers):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.path = path
        self.scheduler = self._start_scheduler()
        self.workers = [self._start_worker() for _ in range(workers)]

    def _dask(self, *command):
        return start(self.path, "dask.log", "-m", "dask", *command, "--dashboard-address", ":0")

    def _start_scheduler(self):
        return self._dask("scheduler", "--host", "127.0.0.1", "--port", str(self.port))

    def _start_worker(self):
        return self._dask("worker", self.address, "--nthreads", "1", "--no-nanny")

    def restart_scheduler(self):
        """Workers leave with their scheduler."""
        self.close()
        self.scheduler = self._start_scheduler()
        self.tend()

    def tend(self):
        """Start workers again that have gone."""
        self.workers = [
            self._start_worker() if worker.poll() is not None else worker for worker in self.workers
        ]

    def close(self):
        for process in (*self.workers, self.scheduler):
            end(process)


def start(path, log, *command):
    """Start Python in a directory, as a process that writes to a log there."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment["DASK_JOBRUNNER__WORKER_SILENCE_SECONDS"] = "2"
    command = [sys.executable, *command]
    with open(path / log, "ab") as file:
        return subprocess.Popen(command, env=environment, cwd=path, stdout=file, stderr=file)


def end(process):
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
        process.kill()
    process.wait(30)


def disturb(event, cluster, driver, chance):
    worker = chance.choice(cluster.workers)
    if event == "kill worker":
        worker.kill()
    elif event == "stop worker":
        worker.send_signal(signal.SIGSTOP)
        time.sleep(chance.uniform(0.5, 5))
        worker.send_signal(signal.SIGCONT)
    elif event == "terminate worker":
        worker.terminate()
    elif event == "retire worker":
        retire(cluster, chance)
    elif event == "transient error":
        (cluster.path / "ckpt.fail").touch()
    elif event == "kill scheduler":
        cluster.restart_scheduler()
    elif event == "kill driver":
        driver.kill()
    elif event == "interrupt driver":
        driver.send_signal(signal.SIGINT)
    else:
        driver.terminate()


def retire(cluster, chance):
    """Let the scheduler retire a worker, as adaptive scaling does; `tend` starts another."""
    with (
        contextlib.suppress(OSError, TimeoutError),  # it may just be gone
        Client(cluster.address, set_as_default=False, timeout=5) as client,
    ):
        there = sorted(client.scheduler_info(n_workers=-1)["workers"])
        if there:
            client.retire_workers([chance.choice(there)], close_workers=True)


WEIGHTS = {
    "kill worker": 6,
    "stop worker": 2,
    "terminate worker": 2,
    "retire worker": 3,
    "transient error": 2,
    "kill scheduler": 1,
    "kill driver": 2,
    "interrupt driver": 1,
    "terminate driver": 1,
}
FAILURES = ("recorded epochs lost", "hangs", "nodes whose bits differ")


def disturb_until_done(cluster, command, options, chance, counts):
    """Start the driver until it ends by itself; gives the last epoch that was recorded."""
    manager = MultiNodeCheckpointManager(cluster.path / "ckpt")
    driver = None
    began = moved = time.monotonic()
    next_event = began + options.every
    reached = -1
    try:
        while True:
            if driver is None or driver.poll() is not None:
                if driver is not None and driver.returncode == 0:
                    return reached
                driver = start(cluster.path, "driver.log", *command)
                counts["drivers started"] += 1
            cluster.tend()
            now = time.monotonic()
            latest = manager.latest()
            epoch = -1 if latest is None else latest
            if epoch < reached:
                counts["recorded epochs lost"] += 1
            if epoch != reached:
                reached, moved = epoch, now
            if now - moved > STUCK_SECONDS:
                counts["hangs"] += 1
                return reached
            if next_event <= now < began + 60 * options.minutes:
                event = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
                disturb(event, cluster, driver, chance)
                counts[event] += 1
                next_event = time.monotonic() + chance.uniform(0.5, 1.5) * options.every
            time.sleep(0.1)
    finally:
        if driver is not None:
            end(driver)
        cluster.close()


def undisturbed(epochs, path):
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=4, processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
        Session(client) as session,
    ):
        JobRunner(build(epochs, 0.0), MultiNodeCheckpointManager(path)).run(session)


def state(path, epoch):
    checkpoint = MultiNodeCheckpointManager(path).open(epoch)
    return {
        node: (checkpoint[node].load("x").tobytes(), pickle.dumps(checkpoint[node].load("sums")))
        for node in checkpoint
    }


def soak(options, epochs):
    """Run, disturb, count; whether something failed."""
    counts = Counter(dict.fromkeys(FAILURES, 0))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        cluster = Cluster(path, 3)
        command = [str(Path(__file__).resolve()), "--drive", cluster.address, str(path / "ckpt")]
        command += ["--epochs", str(epochs), "--seconds", str(options.seconds)]
        reached = disturb_until_done(cluster, command, options, random.Random(options.seed), counts)
        log = (path / "driver.log").read_text(errors="replace")
        counts["moves within a driver"] = log.count("Nodes move after epoch")
        counts["recoveries within a driver"] = log.count("Beginning again from")
        counts["epochs recorded"] = reached
        if reached == epochs:
            undisturbed(epochs, path / "calm")
            calm, disturbed = state(path / "calm", epochs), state(path / "ckpt", epochs)
            for node, bits in calm.items():
                counts["nodes whose bits differ"] += disturbed[node] != bits
        else:
            print(log[-5000:])
    for name, count in counts.items():
        print(f"{count:6} {name}")
    return reached < epochs or any(counts[name] for name in FAILURES)


def main():
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=5, help="seconds between two events")
    parser.add_argument("--epochs", type=int, default=0, help="0: as many as fit")
    parser.add_argument("--seconds", type=float, default=0.2, help="an epoch takes about so long")
    parser.add_argument("--drive", nargs=2, metavar=("ADDRESS", "DIRECTORY"))
    options = parser.parse_args()
    epochs = options.epochs or max(10, int(options.minutes * 60 / options.seconds / 4))
    if options.drive:
        drive(*options.drive, epochs, options.seconds)
    else:
        # Or drivers would ignore it too, where a shell runs this in the background.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(soak(options, epochs))


if __name__ == "__main__":
    main()
