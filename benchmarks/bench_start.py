"""How long until the first epoch, and how long do imports take?

A job of two nodes on a live cluster, from `JobRunner.run` to the end of its first epoch; `import
jobrunner` with all names that a job's script uses, against `import distributed`; `jobrunner --help`.

    python benchmarks/bench_start.py [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import subprocess
import sys
import time

from distributed import Client
from harness import OURS, Laps, Report, Row, alternate, arguments, counters, two_workers, write

from jobrunner import JobRunner, Session

EVERY_NAME = "from jobrunner import *"


def first_epoch(client: Client) -> float:
    laps = Laps(is_passive=False)
    with Session(client) as session:
        started = time.perf_counter()
        JobRunner(counters(2, 1), num_epochs=1, callbacks=[laps]).run(session)
    return (laps.ends[0] - started) * 1e3


def process(*command: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    args = arguments(__doc__, rounds=5)
    report = Report("How long until the first epoch, and how long do imports take?")
    with two_workers() as client:
        figures = alternate({OURS: lambda: first_epoch(client)}, args.rounds)
    report.add(Row("run to the first epoch", "ms", figures, "≤ 200 ms", figures[OURS] <= 200))
    figures = alternate(
        {
            "python": lambda: process("-c", "pass"),
            OURS: lambda: process("-c", "import jobrunner"),
            "every name": lambda: process("-c", EVERY_NAME),
            "distributed": lambda: process("-c", "import distributed"),
        },
        args.rounds,
    )
    is_met = figures[OURS] <= 1.1 * figures["distributed"]
    report.add(Row("import", "ms", figures, "≤ 1.1 × distributed", is_met))
    figures = alternate(
        {OURS: lambda: process("-m", "jobrunner", "--help")},
        args.rounds,
    )
    report.add(Row("jobrunner --help", "ms", figures, "≤ 300 ms", figures[OURS] <= 300))
    write(report, args.json)


if __name__ == "__main__":
    main()
