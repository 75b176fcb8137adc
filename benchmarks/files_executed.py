"""How many files of the package run between two calls of a task's function.

    python benchmarks/files_executed.py [--list]

Client and worker share this process, so that ``sys.setprofile``, set in every thread, sees both. Each
count is of the files in which any function ran between the task's calls in two epochs that follow each other: where
the epoch between is saved, and where no save is due. What is printed is the largest of several epochs: a heartbeat or a
deletion in the background may fall into one and not into another.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
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


class Files:
    """The files of the package that ran since the last `take`."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self.epochs: list[frozenset[str]] = []

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """For `sys.setprofile`."""
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self._seen.add(frame.f_code.co_filename[len(PACKAGE) + 1 :])

    def take(self) -> None:
        """Begin a new epoch's files."""
        self.epochs.append(frozenset(self._seen))
        self._seen.clear()

    def largest(self) -> list[str]:
        """Files of the epoch that ran through the most, first epochs left out."""
        return sorted(max(self.epochs[WARM:], key=len))


files = Files()


def step(value: np.ndarray) -> np.ndarray:
    """The task's function, pickled by its name: workers find this very module."""
    files.take()
    return value + 1


def run(saved: bool) -> list[str]:
    """Run a job of one node and count."""
    files.epochs.clear()
    with Job("count") as job:
        node = Node("a")
        with job.init_group:
            Task(partial(np.zeros, 1000), outputs="value", node=node)
        Task(step, inputs="value", outputs="value", node=node)
        epoch_limiter(job, EPOCHS)
    with tempfile.TemporaryDirectory() as path:
        threading.setprofile(files.profile)  # for threads that start from here on
        sys.setprofile(files.profile)
        try:
            with Session.local(workers=1, processes=False) as session:
                manager = (
                    MultiNodeCheckpointManager(Path(path) / "run", keep=KeepLast(2))
                    if saved
                    else None
                )
                JobRunner(job, manager).run(session)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return files.largest()


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the files, too")
    asked = parser.parse_args()
    for saved in (True, False):
        found = run(saved)
        print(f"{len(found):3d} files, {'saved' if saved else 'not saved'}")
        if asked.list:
            print(*(f"      {name}" for name in found), sep="\n")


if __name__ == "__main__":
    from files_executed import main as importable_main

    importable_main()
