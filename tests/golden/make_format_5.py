"""Made ``format_5/``, which every later version must read. Not to be run again.

python -m tests.golden.make_format_5 tests/golden/format_5

What is new against format 4: checkpoints in the middle of an epoch under their position, in the log
too (entries of format 2). ``mid_epoch_4/`` is of the version before, which recorded one under the
number of the epoch in progress; the same job made it, but with `SaveEvery(steps=1)` alone.
"""

from __future__ import annotations

import sys

from jobrunner import (
    Job,
    JobRunner,
    KeepAll,
    MultiNodeCheckpointManager,
    SaveEvery,
    Session,
    Task,
    current_task,
    epoch_limiter,
)
from tests.golden.making import anonymize


def count(n: int) -> int:
    """Fail once, in step 2 of epoch 4."""
    task = current_task()
    if (task.epoch, task.step) == (4, 1):
        raise KeyboardInterrupt
    return n + 1


def job() -> Job:
    """Two steps an epoch."""
    with Job("j", steps_per_epoch=2) as made:
        with made.init_group:
            Task(int, outputs="n", node="a")
        Task(count, "n", "n", node="a")
    epoch_limiter(made, 20)
    return made


if __name__ == "__main__":
    keep = KeepAll(partial=True)
    manager = MultiNodeCheckpointManager(sys.argv[1], save=SaveEvery(steps=1), keep=keep)
    with Session.local(workers=1, processes=False) as session:
        try:
            JobRunner(job(), manager).run(session)
        except BaseException as error:
            print(repr(error))
    manager.pin(3, "kept")
    anonymize(sys.argv[1])
