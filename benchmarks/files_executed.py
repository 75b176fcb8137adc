"""How many files and functions of the package run between two calls of a task's function.

    python benchmarks/files_executed.py [--list]

Client and workers share this process, so that ``sys.setprofile``, set in every thread, sees both. Each
count is of what ran between the task's calls in two epochs that follow each other: where the epoch
between is saved, where no save is due, and where nothing is saved, but the client is asked before each
epoch of two nodes on two workers. What is printed is the largest of several epochs for the first two: a
heartbeat or a deletion in the background may fall into one and not into another. For the last it is the
median, since two workers do not always take turns.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from jobrunner import (
    Job,
    JobRunner,
    KeepLast,
    MultiNodeCheckpointManager,
    Node,
    Session,
    Task,
    epoch_limiter,
)

PACKAGE = str(Path(sys.modules["jobrunner"].__file__ or "").parent)
EPOCHS = 12
WARM = 4
"""Epochs that are not counted: what runs once runs in these."""

Calls = Counter[tuple[str, str]]
"""Of functions, each by its file and name."""


class Profile:
    """The functions of the package that were called since the last `take`."""

    def __init__(self) -> None:
        self._calls: Calls = Counter()
        self.epochs: list[Calls] = []

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """For `sys.setprofile`."""
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            self._calls[file[len(PACKAGE) + 1 :], frame.f_code.co_qualname] += 1

    def take(self) -> None:
        """Begin a new epoch."""
        self.epochs.append(self._calls.copy())
        self._calls.clear()

    def in_order(self) -> list[Calls]:
        """All epochs but the first ones, those with the fewest files and calls first."""
        return sorted(self.epochs[WARM:], key=lambda calls: (len(files_of(calls)), calls.total()))


def files_of(calls: Calls) -> list[str]:
    """Their files."""
    return sorted({file for file, _ in calls})


profile = Profile()


def step(value: Any) -> Any:
    """The task's function, pickled by its name: workers find this very module."""
    profile.take()
    return value + 1


def other(value: int) -> int:
    """What the task of the other node calls."""
    return value + 1


class Asks:
    """A callback that is not passive."""

    def on_epoch(self, *details: Any) -> None:
        """Do nothing."""


def run(nodes: str, saved: bool = False) -> list[Calls]:
    """Run a job, each node on a worker of its own, and count: of an array, or of an int each."""
    profile.epochs.clear()
    start: Callable[[], Any] = partial(np.zeros, 1000)
    callbacks, options = [], {"workers": 1}
    if len(nodes) > 1:
        start = int
        callbacks.append(Asks())
        options = {"workers": 2, "threads_per_worker": 1}
    with Job("count") as job:
        for name, fn in zip(nodes, (step, other), strict=False):
            with job.init_group:
                Task(start, inputs=(), outputs="value", node=name)
            Task(fn, inputs="value", outputs="value", node=Node(name))
        epoch_limiter(job, EPOCHS)
    with tempfile.TemporaryDirectory() as path:
        threading.setprofile(profile.profile)  # for threads that start from here on
        sys.setprofile(profile.profile)
        try:
            with Session.local(**options, processes=False) as session:
                manager = None
                if saved:
                    manager = MultiNodeCheckpointManager(Path(path) / "run", keep=KeepLast(2))
                JobRunner(job, manager, callbacks=callbacks).run(session)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return profile.in_order()


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the functions, too")
    asked = parser.parse_args()
    two = run("ab")
    counted = {
        "saved": run("a", saved=True)[-1],
        "not saved": run("a")[-1],
        "two nodes, asked": two[len(two) // 2],
    }
    for what, calls in counted.items():
        files = files_of(calls)
        print(f"{len(files):3d} files, {len(calls):3d} functions, {calls.total():4d} calls: {what}")
        if asked.list:
            for (file, name), count in sorted(calls.items()):
                print(f"      {count:3d} {file}: {name}")


if __name__ == "__main__":
    from files_executed import main as importable_main

    importable_main()
