"""What does an epoch cost in one process, against Caffe2's own JobRunner?

Both run one node of trivial tasks. Ours: `Session.local(workers=1, processes=False)`, with the
client asked after every epoch ("asking") and in batches. Caffe2 1.10: its `JobRunner` over a
`LocalSession`, in a Python 3.9 of its own, named by CAFFE2_PYTHON; its first epochs, for it gets
slower as they pass.

    python benchmarks/bench_in_process.py [--rounds 3] [--epochs 300] [--json FILE]
"""

from __future__ import annotations

import subprocess
import sys

from harness import (
    OURS,
    Laps,
    Report,
    Row,
    alternate,
    arguments,
    caffe2_python,
    counters,
    write,
)

from jobrunner import JobRunner, Session

CAFFE2 = """
import statistics, sys, time
from caffe2.python import core, workspace
from caffe2.python.checkpoint import Job, JobRunner, epoch_limiter
from caffe2.python.net_builder import ops
from caffe2.python.session import LocalSession
from caffe2.python.task import Node, Task, TaskGroup, WorkspaceType

tasks, epochs = int(sys.argv[1]), int(sys.argv[2])
ends = []

class Timed(LocalSession):
    def _run_compiled(self, compiled):
        super()._run_compiled(compiled)
        ends.append(time.perf_counter())

with Job() as job:
    with Node("node"):
        with job.init_group:
            net = core.Net("init")
            blobs = [net.ConstantFill([], shape=[1], value=0.0) for _ in range(tasks)]
            with Task():
                ops.net(net)
        for k, blob in enumerate(blobs):
            step = core.Net("add")
            step.Scale([blob], [blob], scale=1.0)
            with Task():
                ops.net(step)
    epoch_limiter(job, epochs)
job.compile(Timed)
JobRunner(job).train(Timed(workspace.C.Workspace()))
laps = [b - a for a, b in zip(ends[10:], ends[11:])]
print(statistics.median(laps) * 1e3)
"""


def ours(session: Session, tasks: int, epochs: int, *, is_passive: bool) -> float:
    laps = Laps(is_passive=is_passive)
    JobRunner(counters(1, tasks), num_epochs=epochs + 10, callbacks=[laps]).run(session)
    return laps.median_seconds(10) * 1e3


def caffe2(python: str, tasks: int, epochs: int) -> float:
    ran = subprocess.run(
        [python, "-c", CAFFE2, str(tasks), str(epochs)], capture_output=True, text=True
    )
    if ran.returncode:
        sys.exit(f"Caffe2 failed:\n{ran.stderr}")
    return float(ran.stdout.split()[-1])


def main() -> None:
    args = arguments(__doc__, rounds=3, epochs=300)
    report = Report("What does an epoch cost in one process, against Caffe2's own JobRunner?")
    python, reason = caffe2_python()
    if args.no_peers or reason:
        report.skip("Caffe2 1.10", reason or "--no-peers")
    with Session.local(workers=1, threads_per_worker=1, processes=False) as session:
        for tasks, share in ((1, 1.0), (10, 0.4), (100, 0.1)):
            contenders = {
                OURS: lambda tasks=tasks: ours(session, tasks, 5 * args.epochs, is_passive=True),
                "asking": lambda tasks=tasks: ours(session, tasks, args.epochs, is_passive=False),
            }
            if python and not args.no_peers:
                contenders["Caffe2"] = lambda tasks=tasks: caffe2(python, tasks, 110)
            figures = alternate(contenders, args.rounds)
            peer = figures.get("Caffe2")
            is_met = None if peer is None else figures[OURS] <= share * peer
            target = f"≤ {share:g} of Caffe2"
            report.add(Row(f"1 node × {tasks} tasks, one process", "ms", figures, target, is_met))
    write(report, args.json)


if __name__ == "__main__":
    main()
