"""Kills processes while their histories grow: ``python -m tests.faults.history_killed 500 [SEED]``.

Each process takes the directory over, goes on from the newest epoch or from an earlier one, and
appends rows in groups of epochs, until it is killed at some operation. Some are stopped instead, and
go on when another one has the directory. After each, all rows that are recorded must be there once.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable

import numpy as np
import zarr

from jobrunner import CheckpointError, KeepAll, KeepLast, MultiNodeCheckpointManager
from jobrunner.checkpoint import history_writer
from jobrunner.testing import FaultyFiles
from tests.faults.history_life import NODES, ROWS_OF_A_CHUNK, Sampler, check_epoch, expected

MOST_OPERATIONS = 250
MOST_EPOCHS = 60
"""In one directory."""


class StoppingFiles(FaultyFiles):
    """The process stops at an operation, until somebody lets it go on."""

    stops_at = -1

    def before(self, operation: str, path: str) -> None:
        super().before(operation, path)
        if 0 < self.stops_at <= self.count:  # another thread may have come between
            self.stops_at = -1
            os.kill(os.getpid(), signal.SIGSTOP)


def live(path: str, files: FaultyFiles, draw: random.Random) -> None:
    """Append to the histories, until this process is killed."""
    keep = KeepAll() if draw.random() < 0.5 else KeepLast(2)
    manager = MultiNodeCheckpointManager(path, keep=keep, files=files, take_over=True)
    at = None
    recorded = manager.positions()
    if recorded and draw.random() < 0.3:
        at = draw.choice(recorded)
    sampler = Sampler(manager, at)
    while True:
        sampler.run_epochs(draw.randint(1, 3))


def check(path: str, draw: random.Random) -> int:
    """Compare what is recorded with what was put; returns how many epochs are recorded."""
    manager = MultiNodeCheckpointManager(path)
    epochs = manager.epochs()
    for epoch in {*epochs[-2:], *draw.sample(epochs, min(2, len(epochs)))}:
        check_epoch(manager, epoch)
    for root, _, names in os.walk(os.path.join(path, "_histories")):
        node = os.path.basename(root)
        if "zarr.json" in names and node in NODES:
            rows = zarr.open_array(root, mode="r")[:]
            # It may be of a run that was set aside: the same rows, perhaps more of them.
            known = expected(node, 1000)[: len(rows)]
            assert np.array_equal(rows, known), (root, len(rows), rows[np.any(rows != known, 1)])
    return len(epochs)


def fork(run: Callable[[], None]) -> int:
    """Run something in a new process."""
    pid = os.fork()
    if pid:
        return pid
    try:
        run()
    except CheckpointError:
        os._exit(3)  # it was stopped, and another process has the directory
    except BaseException as error:
        print("A process fails:", repr(error), file=sys.stderr)
        os._exit(1)
    os._exit(0)


def end(pid: int) -> None:
    """Kill a process."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def main(kills: int, seed: int) -> None:
    draw = random.Random(seed)
    stopped: list[int] = []
    count = continued = 0
    with tempfile.TemporaryDirectory() as root:
        path = f"{root}/0"
        while count < kills:
            files = StoppingFiles(draw.randint(1, MOST_OPERATIONS), "kill", sync=False)
            if draw.random() < 0.2:
                # The next process may be stopped before it takes the directory: then this one goes on.
                files.stops_at, files.at = files.at or 0, MOST_OPERATIONS + (files.at or 0)
            own = random.Random(draw.random())
            pid = fork(lambda path=path, files=files, own=own: live(path, files, own))  # type: ignore[misc]
            _, status = os.waitpid(pid, os.WUNTRACED)
            if os.WIFSTOPPED(status):
                stopped.append(pid)
            else:
                assert os.WIFSIGNALED(status), status
                count += 1
            while len(stopped) > 1:
                pid = stopped.pop(0)
                os.kill(pid, signal.SIGCONT)
                _, status = os.waitpid(pid, 0)
                assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 3, status
                continued += 1
            if check(path, draw) > MOST_EPOCHS:
                path = f"{root}/{count}"
                while stopped:
                    end(stopped.pop())
        while stopped:
            end(stopped.pop())
    print(
        f"seed {seed}: {count} kills, {continued} stopped processes went on: no row lost or doubled"
    )


if __name__ == "__main__":
    row_bytes = 2 * np.dtype(float).itemsize
    for name in ("_LEAST_BYTES", "_MOST_BYTES"):
        setattr(history_writer, name, ROWS_OF_A_CHUNK * row_bytes)
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
