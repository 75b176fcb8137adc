"""A run that loses a worker twice and is killed, or what resumes it: a program that notes each event.

python -m tests.story.eventful DIRECTORY
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import dask

from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    SaveEvery,
    Session,
    Task,
    current_task,
    epoch_limiter,
)

EPOCHS, LOSSES, KILLED_AFTER = 40, (7, 18), 29
EPOCH_SECONDS = 0.2


class Notes:
    """Appends each event to a file, with the time."""

    is_passive = False

    called = 0.0

    def __init__(self, path: Path) -> None:
        self._file = (path / "events").open("a")

    def note(self, event: str, epoch: int = 0, at: float | None = None) -> None:
        self._file.write(json.dumps([time.time() if at is None else at, event, epoch]) + "\n")
        self._file.flush()

    def on_setup(self, runner: JobRunner) -> None:
        self.note("run", at=self.called)

    def on_epoch_start(self, epoch: int) -> None:
        self.note("epoch", epoch)

    def on_epoch(self, epoch: int, seconds: float, metrics: object) -> None:
        self.note("end", epoch)

    def on_loss(self, error: Exception) -> None:
        self.note("loss")

    def on_save_start(self, epoch: int, step: int) -> None:
        self.note("save", epoch)

    def on_save(self, report: object) -> None:
        self.note("saved")


def step(n: int, flags: str) -> int:
    epoch = current_task().epoch
    flag = Path(flags) / f"lost-{epoch}"
    time.sleep(EPOCH_SECONDS / 2)
    if epoch in LOSSES and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if epoch == KILLED_AFTER and not (client := Path(flags) / "client").exists():
        client.touch()
        os.kill(int((Path(flags) / "pid").read_text()), signal.SIGKILL)
    time.sleep(EPOCH_SECONDS / 2)
    return n + 1


def main(path: Path) -> None:
    with Job("eventful") as job, Node("a"):
        with job.init_group:
            Task(lambda: 0, outputs="n", name="zero")
        Task(step, inputs="n", outputs="n", kwargs={"flags": str(path)})
        epoch_limiter(job, EPOCHS)
    notes = Notes(path)
    (path / "pid").write_text(str(os.getpid()))
    manager = MultiNodeCheckpointManager(path / "k", save=SaveEvery(epochs=4))
    with (
        dask.config.set({"jobrunner.checkpoint.heartbeat-seconds": 0.02}),
        Session.local(workers=2, threads_per_worker=1) as session,
    ):
        runner = JobRunner(job, manager, callbacks=[notes])
        notes.called = time.time()
        runner.run(session)
        notes.note("returned")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
