"""Kill something every few seconds while a job runs; count what it costs.

    python tests/soak/soak.py --minutes 30 --seed 1

The command line runs a job on a scheduler and workers of its own, again and again until it is done.
Meanwhile workers, scheduler and driver are killed, stopped, terminated or retired, and tasks raise
what passes. In the end the state is compared with that of the same job undisturbed. Exits with 1 if
an epoch was lost, if a bit differs, or if nothing was recorded for two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from distributed import Client

from jobrunner import (
    Blob,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Session,
    Task,
    current_task,
    job,
)
from tests.processes import kill

ROOT = Path(__file__).parents[2]
NODES, WORKERS = 4, 3
STUCK_SECONDS = 120.0


def walk(x, seconds, flag):
    """Draws; once for each file that lies at `flag` it raises what passes."""
    time.sleep(seconds)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(flag)
        raise InterruptedError("as asked for")
    return x + current_task().rng.standard_normal(x.size)


def add_up(x, sums):
    """Changes in place what saves and kept states refer to."""
    sums[0] = 0.5 * sums[0] + np.resize(x, sums[0].size)
    sums[1]["last"][: x.size] = x


@job
def build(seconds: float = 0.0, flag: str = ""):
    nodes = [Node(f"n{i}") for i in range(NODES)]
    samples = Blob("samples", history="extend")
    with Job("soak", seed=11) as made:
        for i, node in enumerate(nodes):
            with node:
                with made.init_group:
                    Task(np.zeros, outputs="x", kwargs={"shape": 10_000}, name="x")
                    start = [np.zeros(30_000), {"last": np.zeros(20_000)}]
                    Task(lambda start=start: start, inputs=(), outputs="sums", name="sums")
                arguments = {"seconds": seconds, "flag": flag}
                walked = Task(
                    walk, "x", outputs="y", kwargs=arguments, transient_errors=InterruptedError
                )
                Task(
                    lambda y, z: 0.9 * y + 0.1 * z,
                    [walked.output(), nodes[i - 1]["x"]],
                    outputs="x",
                )
                Task(add_up, "x", updates="sums")
                Task(lambda x: x[:6].reshape(3, 2).copy(), "x", outputs=samples)
    return made


def recorded(path, epoch):
    """Digests of the blobs of an epoch, and all rows of the history."""
    manager = MultiNodeCheckpointManager(path)
    manager.verify(epoch)
    nodes = manager.open(epoch)
    digests = {(node, blob): nodes[node].digest(blob) for node in nodes for blob in nodes[node]}
    return digests, manager.history_of("samples").compute().tobytes()


class Processes:
    """A scheduler at one address, workers and a driver, all of which may end at any time."""

    def __init__(self, path, command):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.path, self.command = path, [*command, "--scheduler", self.address]
        self.started = {}
        self.tend()

    def tend(self):
        """Start what is not there; False once the job is done."""
        driver = self.started.get("driver")
        if driver is not None and driver.poll() == 0:
            return False
        worker = ("dask", "worker", self.address, "--nthreads", "1", "--no-nanny")
        commands = {
            "scheduler": ("dask", "scheduler", "--host", "127.0.0.1", "--port", str(self.port)),
            **{f"worker {i}": worker for i in range(WORKERS)},
        }
        commands = {name: (*each, "--dashboard-address", ":0") for name, each in commands.items()}
        for name, command in {**commands, "driver": self.command}.items():
            process = self.started.get(name)
            if process is None or process.poll() is not None:
                self.started[name] = self._start(name, command)
        return True

    def _start(self, name, command):
        with open(self.path / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "DASK_JOBRUNNER__WORKER_SILENCE_SECONDS": "2",
                },
                cwd=self.path,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, *names):
        for name in names or self.started:
            kill(self.started[name])

    def disturb(self, event, chance):
        worker = f"worker {chance.randrange(WORKERS)}"
        if event == "transient error":
            (self.path / "flag").touch()
        elif event == "kill worker":
            self.kill(worker)
        elif event == "stop worker":
            self.started[worker].send_signal(signal.SIGSTOP)
            time.sleep(chance.uniform(0.5, 5))
            self.started[worker].send_signal(signal.SIGCONT)
        elif event == "terminate worker":
            self.started[worker].terminate()
        elif event == "retire worker":
            self.retire(chance)
        elif event == "kill scheduler":
            # Workers leave with their scheduler.
            self.kill(*(name for name in self.started if name != "driver"))
        elif event == "kill driver":
            self.kill("driver")
        elif event == "kill everything":
            self.kill()
        elif event == "interrupt driver":
            self.started["driver"].send_signal(signal.SIGINT)
        else:
            self.started["driver"].terminate()

    def retire(self, chance):
        """Let the scheduler retire a worker, as adaptive scaling does."""
        with (
            contextlib.suppress(OSError, TimeoutError),  # it may just be gone
            Client(self.address, set_as_default=False, timeout=5) as client,
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
    "kill driver": 1,
    "kill everything": 1,
    "interrupt driver": 1,
    "terminate driver": 1,
}
FAILURES = ("recorded epochs lost", "hangs", "states that differ")


def disturb_until_done(processes, options, counts):
    """Gives the last epoch that was recorded."""
    manager = MultiNodeCheckpointManager(processes.path / "ckpt")
    chance = random.Random(options.seed)
    began = moved = time.monotonic()
    next_event = began + options.every
    reached = -1
    while processes.tend() and not counts["hangs"]:
        now = time.monotonic()
        latest = manager.latest()
        epoch = -1 if latest is None else latest
        if epoch < reached:
            counts["recorded epochs lost"] += 1
        if epoch != reached:
            reached, moved = epoch, now
        if now - moved > STUCK_SECONDS:
            counts["hangs"] += 1
        if next_event <= now < began + 60 * options.minutes:
            [event] = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
            processes.disturb(event, chance)
            counts[event] += 1
            next_event = time.monotonic() + chance.uniform(0.5, 1.5) * options.every
        time.sleep(0.1)
    return reached


def soak(options, path):
    """Run, disturb, count."""
    counts = Counter(dict.fromkeys(FAILURES, 0))
    command = ["jobrunner", "run", f"{Path(__file__).resolve()}:build", "--checkpoint", "ckpt"]
    command += ["--param", f"seconds={options.seconds}", "--param", f"flag={path / 'flag'}"]
    command += ["--epochs", str(options.epochs), *(["--sync"] if options.seed % 2 else [])]
    processes = Processes(path, command)
    try:
        counts["epochs recorded"] = disturb_until_done(processes, options, counts)
    finally:
        processes.kill()
    log = (path / "driver.log").read_text(errors="replace")
    counts["moves within a driver"] = log.count("Nodes move after epoch")
    counts["recoveries within a driver"] = log.count("Beginning again from")
    if counts["epochs recorded"] != options.epochs:
        counts["hangs"] = 1
        print(log[-5000:])
    else:
        with Session.local(1, threads_per_worker=4, processes=False) as session:
            manager = MultiNodeCheckpointManager(path / "calm")
            JobRunner(build(), manager, num_epochs=options.epochs).run(session)
        states = [recorded(path / name, options.epochs) for name in ("calm", "ckpt")]
        counts["states that differ"] = states[0] != states[1]
    return counts


def main():
    """Read the arguments."""
    # Or drivers would ignore it too, where a shell runs this in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=5, help="seconds between two events")
    parser.add_argument("--epochs", type=int, default=0, help="0: as many as fit")
    parser.add_argument("--seconds", type=float, default=0.2, help="an epoch takes about so long")
    options = parser.parse_args()
    options.epochs = options.epochs or max(10, int(options.minutes * 60 / options.seconds / 4))
    with tempfile.TemporaryDirectory() as directory:
        counts = soak(options, Path(directory))
    for name, count in counts.items():
        print(f"{count:6} {name}")
    sys.exit(any(counts[name] for name in FAILURES))


if __name__ == "__main__":
    main()
