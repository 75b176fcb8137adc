"""What does the record of where time goes cost an epoch, and how much does it write?

Short epochs (no work) and long ones (0.05 s), each with ``jobrunner.timing`` on and off in turn, on one
worker process: the time of an epoch, and the processor time of client and worker for one.

    python benchmarks/bench_timing.py [--rounds 9] [--seconds 3]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import dask
from distributed import Client, LocalCluster
from harness import Laps

from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Session,
    Task,
    read_story,
)

TASKS = 4


def cpu_seconds() -> float:
    return time.process_time()


def step(n: int, seconds: float) -> int:
    if seconds:
        time.sleep(seconds)
    return n + 1


def build(seconds: float) -> Job:
    """One node, whose tasks take that long together."""
    with Job("timed") as job, Node("a"):
        for k in range(TASKS):
            with job.init_group:
                Task(lambda: 0, outputs=f"v{k}", name=f"zero{k}")
            kwargs = {"seconds": seconds / TASKS}
            Task(step, inputs=f"v{k}", outputs=f"v{k}", name=f"t{k}", kwargs=kwargs)
    return job


def lap(client: Client, job: Job, epochs: int, path: Path | None) -> tuple[float, float]:
    """Milliseconds of an epoch, by the clock and by processors."""
    laps = Laps(is_passive=True)
    manager = None if path is None else MultiNodeCheckpointManager(path)
    before = sum(client.run(cpu_seconds).values()) + time.process_time()
    with Session(client) as session:
        JobRunner(job, manager, num_epochs=epochs, callbacks=[laps]).run(session)
    spent = sum(client.run(cpu_seconds).values()) + time.process_time() - before
    return laps.median_seconds(min(10, epochs // 4)) * 1e3, spent / epochs * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a round of each case")
    asked = parser.parse_args()
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
        tempfile.TemporaryDirectory() as directory,
    ):
        for name, seconds, saves in (
            ("epoch of 0.2 ms", 0.0, False),
            ("epoch of 50 ms", 0.05, False),
            ("saved epoch, no work", 0.0, True),
        ):
            epochs = int(asked.seconds / (seconds or (0.01 if saves else 0.0003)))
            found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            job = build(seconds)
            for turn in range(asked.rounds + 1):
                for is_on in (True, False) if turn % 2 else (False, True):
                    path = Path(directory) / f"{name}{turn}{is_on}" if saves else None
                    with dask.config.set({"jobrunner.timing": is_on}):
                        figures = lap(client, job, epochs, path)
                    if turn:
                        found[is_on].append(figures)
                        if path is not None and turn == 1:
                            entries = sorted(path.glob("_log/*.json"))
                            nbytes = sum(entry.stat().st_size for entry in entries)
                            spans = sum(len(run.spans) for run in read_story(path).runs)
                            print(
                                f"  log {'on' if is_on else 'off'}: {nbytes / epochs:.0f} bytes an "
                                f"epoch, {spans} spans in {epochs} epochs"
                            )
            for what, i in (("wall", 0), ("cpu", 1)):
                ratios = [a[i] / b[i] for a, b in zip(found[True], found[False], strict=True)]
                on, off = (
                    statistics.median(it[i] for it in found[which]) for which in (True, False)
                )
                print(
                    f"{name}, {what}: on {on:.4f} ms, off {off:.4f} ms, "
                    f"median of pairs {statistics.median(ratios) - 1:+.1%}"
                )


if __name__ == "__main__":
    main()
