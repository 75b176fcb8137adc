"""Kill something every few seconds while a job runs; count what it costs. Not part of the tests.

    python tests/soak/soak.py --minutes 30 --seed 1

A driver process runs a job on a scheduler and workers of its own, again and again until it is
done. Meanwhile workers are killed, stopped and continued, terminated or retired, tasks raise what
passes, the scheduler is killed and started again, and the driver is killed, interrupted or
terminated. In the end the state is compared
with that of the same job undisturbed. Exits with 1 if an epoch was lost, if a bit differs, or if
nothing was recorded for two minutes.
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
        try:
            os.unlink(flag)
        except FileNotFoundError:
            pass
        else:
            raise OSError("as asked for")
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
                transient_errors=OSError,
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
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.path = path
        self.log = (path / "dask.log").open("ab")
        self.scheduler = self._start_scheduler()
        self.workers = [self._start_worker() for _ in range(workers)]

    def _dask(self, *command):
        return subprocess.Popen(
            [sys.executable, "-m", "dask", *command, "--dashboard-address", ":0"],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "DASK_JOBRUNNER__WORKER_SILENCE_SECONDS": "2",
            },
            cwd=self.path,
            stdout=self.log,
            stderr=self.log,
        )

    def _start_scheduler(self):
        return self._dask("scheduler", "--host", "127.0.0.1", "--port", str(self.port))

    def _start_worker(self):
        return self._dask("worker", self.address, "--nthreads", "1", "--no-nanny")

    def restart_scheduler(self):
        end(self.scheduler)
        self.scheduler = self._start_scheduler()
        self.tend(all_of_them=True)

    def tend(self, all_of_them=False):
        """Start again what has gone; workers leave with their scheduler."""
        if all_of_them:
            for worker in self.workers:
                end(worker)
        self.workers = [
            self._start_worker() if worker.poll() is not None else worker for worker in self.workers
        ]

    def close(self):
        for process in (*self.workers, self.scheduler):
            end(process)
        self.log.close()


def end(process):
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
        process.kill()
    process.wait(30)


def disturb(what, cluster, driver, chance):
    worker = chance.choice(cluster.workers)
    if what == "kill worker":
        worker.kill()
    elif what == "stop worker":
        worker.send_signal(signal.SIGSTOP)
        time.sleep(chance.uniform(0.5, 5))
        with contextlib.suppress(ProcessLookupError):
            worker.send_signal(signal.SIGCONT)
    elif what == "terminate worker":
        worker.terminate()
    elif what == "retire worker":
        retire(cluster, chance)
    elif what == "transient error":
        (cluster.path / "ckpt.fail").touch()
    elif what == "kill scheduler":
        cluster.restart_scheduler()
    else:
        number = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT, "terminate": signal.SIGTERM}
        driver.send_signal(number[what.split()[0]])


def retire(cluster, chance):
    """Let the scheduler retire a worker, as adaptive scaling does; `tend` starts another."""
    with (
        contextlib.suppress(OSError, TimeoutError),  # it may just be gone
        Client(cluster.address, set_as_default=False, timeout=5) as client,
    ):
        there = sorted(client.scheduler_info(n_workers=-1)["workers"])
        if there:
            client.retire_workers([chance.choice(there)], close_workers=True)


EVENTS = {
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


def latest(manager):
    found = manager.latest()
    return -1 if found is None else found


def undisturbed(epochs, path):
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=4, processes=False, dashboard_address=":0"
        ) as c,
        Client(c, set_as_default=False) as client,
        Session(client) as session,
    ):
        JobRunner(build(epochs, 0.0), MultiNodeCheckpointManager(path)).run(session)


def state(path, epoch):
    checkpoint = MultiNodeCheckpointManager(path).open(epoch)
    return {
        node: (checkpoint[node].load("x").tobytes(), pickle.dumps(checkpoint[node].load("sums")))
        for node in checkpoint
    }


def soak(minutes, seed, every, epochs, seconds):
    """Run, disturb, count."""
    chance, counts = random.Random(seed), Counter()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        manager = MultiNodeCheckpointManager(path / "ckpt")
        cluster = Cluster(path, 3)
        command = [sys.executable, __file__, "--drive", cluster.address, str(path / "ckpt")]
        command += ["--epochs", str(epochs), "--seconds", str(seconds)]
        began = moved = time.monotonic()
        reached, driver, next_event = -1, None, began + every
        try:
            while True:
                if driver is None or driver.poll() is not None:
                    if driver is not None and driver.returncode == 0:
                        break
                    with open(path / "driver.log", "ab") as log:
                        driver = subprocess.Popen(
                            command,
                            stdout=log,
                            stderr=log,
                            env={
                                **os.environ,
                                "PYTHONPATH": str(ROOT),
                                "DASK_JOBRUNNER__WORKER_SILENCE_SECONDS": "2",
                            },
                        )
                    counts["drivers started"] += 1
                cluster.tend()
                now, found = time.monotonic(), latest(manager)
                if found < reached:
                    counts["recorded epochs lost"] += 1
                if found != reached:
                    reached, moved = found, now
                if now - moved > STUCK_SECONDS:
                    counts["hangs"] += 1
                    break
                if now - began < 60 * minutes and now >= next_event:
                    what = chance.choices(list(EVENTS), list(EVENTS.values()))[0]
                    disturb(what, cluster, driver, chance)
                    counts[what] += 1
                    next_event = time.monotonic() + chance.uniform(0.5, 1.5) * every
                elif now - began >= 60 * minutes and reached < epochs:
                    counts["epochs when the killing stopped"] = (
                        counts["epochs when the killing stopped"] or reached
                    )
                time.sleep(0.1)
        finally:
            if driver is not None:
                end(driver)
            cluster.close()
        log = (path / "driver.log").read_text(errors="replace")
        counts["moves within a driver"] = log.count("Nodes move after epoch")
        counts["recoveries within a driver"] = log.count("Beginning again from")
        counts["epochs recorded"] = reached
        if reached == epochs:
            undisturbed(epochs, path / "calm")
            counts["nodes whose bits differ"] = sum(
                state(path / "ckpt", epochs)[node] != bits
                for node, bits in state(path / "calm", epochs).items()
            )
        else:
            print(log[-5000:])
    failed = counts["recorded epochs lost"] + counts["hangs"] + counts["nodes whose bits differ"]
    for name in ("recorded epochs lost", "hangs", "nodes whose bits differ"):
        counts.setdefault(name, 0)
    for name, count in counts.items():
        print(f"{count:6} {name}")
    return bool(failed or reached < epochs)


def main():
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=5, help="seconds between two events")
    parser.add_argument("--epochs", type=int, default=0, help="0: as many as fit")
    parser.add_argument("--seconds", type=float, default=0.2, help="an epoch takes about so long")
    parser.add_argument("--drive", nargs=2, metavar=("ADDRESS", "DIRECTORY"))
    asked = parser.parse_args()
    epochs = asked.epochs or max(10, int(asked.minutes * 60 / asked.seconds / 4))
    if asked.drive:
        drive(*asked.drive, epochs, asked.seconds)
    else:
        # Or drivers would ignore it too, where a shell runs this in the background.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(soak(asked.minutes, asked.seed, asked.every, epochs, asked.seconds))


if __name__ == "__main__":
    main()
