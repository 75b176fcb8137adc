"""Everything that reads a checkpoint directory, as users call it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import numpy as np

from jobrunner import JobRunner, KeepLast, MultiNodeCheckpointManager
from jobrunner.checkpoint import (
    KeepAny,
    KeepBest,
    inspect_directory,
    repair_log,
    restore_epoch,
)
from jobrunner.checkpoint.log.heartbeat import Patience
from jobrunner.cli import checkpoints, maintenance, show
from jobrunner.cli.command import CommandOutput
from jobrunner.cli.options import open_directory
from jobrunner.define import Job
from jobrunner.errors import JobRunnerError
from jobrunner.json_output import to_json
from jobrunner.positions import Position
from jobrunner.run import Replay, compare_checkpoints
from jobrunner.story import LiveRuns, best_of, read_story, summarize_run, to_page
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.workspace import Workspace
from tests.mutants.watch import TimeIsUpError
from tests.saves import Save

Check = Callable[[str, str, Any], None]
"""Gets the digest of a manifest, the name of a blob and its value, which was verified."""


class Clock:
    """Time that passes only while one waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.now > 600:
            raise TimeIsUpError


class Case:
    """One mutant, and all that can be done with it."""

    def __init__(
        self,
        path: str,
        copy: str,
        job: Job,
        check: Check,
        whole: str = "",
    ) -> None:
        self.path, self.copy, self.job, self._check = path, copy, job, check
        self._whole = whole or path  # what the mutant was before

    # ---- parts

    def manager(self, path: str = "", **options: Any) -> MultiNodeCheckpointManager:
        clock = Clock()
        files = FaultyFiles(sync=False)
        manager = MultiNodeCheckpointManager(path or self.path, files=files, **options)
        manager.run.patience = Patience(15, clock, clock.wait)
        return manager

    def epochs(self) -> list[Position]:
        """Two recorded epochs, at most."""
        return self.manager().positions()[-2:]

    def each(self, act: Callable[[MultiNodeCheckpointManager, Position], object]) -> None:
        """Do something with several epochs; an error in one hides none in the others."""
        error: JobRunnerError | None = None
        for epoch in self.epochs():
            try:
                act(self.manager(), epoch)
            except JobRunnerError as caught:
                error = caught
        if error is not None:
            raise error

    # ---- commands

    def ls(self) -> None:
        _print(show.list_epochs(open_directory(self.path), 5))

    def ls_runs(self) -> None:
        manager = self.manager()
        json.dumps(
            to_json(show.describe_run(summarize_run(manager.directory, "x"))), allow_nan=False
        )
        best_of(manager.directory, KeepBest("loss"))

    def top(self) -> None:
        LiveRuns(FaultyFiles(), str(self.path)).look()

    def compare(self) -> None:
        whole = self.manager(self._whole).directory
        _print(show.compare(self.manager().directory, whole))
        _print(show.compare(whole, self.manager().directory))

    def info(self) -> None:
        self.each(lambda manager, epoch: _print(show.describe_checkpoint(manager.directory, epoch)))

    def verify_deep(self) -> None:
        recorded = self.manager().directory
        epochs = recorded.snapshot().epochs
        _print(checkpoints.verify_epochs(recorded, epochs, is_all=True, is_deep=True))

    def diff(self) -> None:
        manager = self.manager()
        epochs = manager.positions()[-2:]
        if epochs:
            with manager.open(epochs[0]) as one, manager.open(epochs[-1]) as other:
                data, text = compare_checkpoints(one, other)
            _print(CommandOutput(data, text.splitlines()))

    def fsck(self) -> None:
        _print(maintenance.inspect(self.manager().directory))

    def fsck_repair(self) -> None:
        clock = Clock()
        if repair_log(self.manager().directory, Patience(15, clock, clock.wait)) is not None:
            self.manager().epochs()

    def prune(self) -> None:
        manager = self.manager(keep=KeepLast(1))
        manager.run.start([], {"command": "prune"})
        try:
            manager.retention.retire()
        finally:
            manager.run.end()

    def prune_best(self) -> None:
        policy = KeepAny((KeepLast(2), KeepBest("loss")))
        manager = self.manager(keep=policy)
        maintenance.find_retirable(manager, policy)

    def pin(self) -> None:
        self.each(lambda manager, epoch: manager.pin(epoch, "x"))
        self.each(lambda manager, epoch: manager.unpin(epoch))

    def restore(self) -> None:
        recorded = self.manager().directory
        aside = [f for f in inspect_directory(recorded) if f.status == "aside"]
        for finding in aside[:2]:
            epoch = finding.path.split(".")[1]
            if epoch.isdecimal():
                # Else it waits in real time for a sign of the run that holds the directory.
                restore_epoch(recorded, Position.of(int(epoch)), take_over=True)

    def copy_all(self) -> None:
        recorded = self.manager().directory
        epochs = recorded.snapshot().epochs[-3:]
        _print(checkpoints.copy_epochs(recorded, epochs, self.copy, is_all=True))

    def report(self) -> None:
        story = read_story(self.manager())
        page = to_page(story)
        ElementTree.fromstring(page.partition("\n")[2])

    # ---- Python

    def load(self) -> None:
        def act(manager: MultiNodeCheckpointManager, epoch: Position) -> None:
            checkpoint = manager.open(epoch)
            for node in checkpoint.values():
                for blob in node:
                    reader, _ = node._find(blob)
                    self._check(reader.sha256, blob, node.load(blob))

        self.each(act)

    def look(self) -> None:
        def act(manager: MultiNodeCheckpointManager, epoch: Position) -> None:
            checkpoint = manager.open(epoch)
            repr(checkpoint)
            for blob in list(checkpoint.record.details.partitions):
                repr(checkpoint.array(blob))  # to compute it, Dask pickles its own graph
            for node in checkpoint.values():
                repr(node)
                for blob in node:
                    node.outline(blob)
                    node.digest(blob)

        self.each(act)

    def look_lazily(self) -> None:
        def act(manager: MultiNodeCheckpointManager, epoch: Position) -> None:
            for node in manager.open(epoch).values():
                for blob in list(node)[:12]:
                    node[blob]

        self.each(act)

    def ask(self) -> None:
        manager = self.manager()
        manager.latest()
        manager.pins()
        list(manager.directory.records())
        manager.get_ckpt_db_name("a", 2)
        manager.directory.unclaimed()
        snapshot = manager.directory.snapshot()
        assert not snapshot.is_done or snapshot.recorded
        manager.directory.held_by(snapshot)
        list(manager.watch(timeout_seconds=0))

    def plan_epoch(self) -> None:
        def act(manager: MultiNodeCheckpointManager, epoch: Position) -> None:
            runner = JobRunner(self.job, manager, num_epochs=20, resume_from_epoch=epoch)
            str(runner.plan_resume())

        self.each(act)

    def replay(self) -> None:
        self.each(lambda manager, epoch: Replay(self.job, manager.directory, epoch).check())

    def load_in_run(self) -> None:
        """What a worker does when a run resumes."""

        def act(manager: MultiNodeCheckpointManager, epoch: Position) -> None:
            for task in manager.load(epoch).tasks():
                if "read" in (task.name or ""):
                    task.fn()
            parts = manager.record(epoch).details.partitions
            if parts:
                again = {name: ["a", "b", "c"] for name in parts}
                blobs = {node: list(parts) for node in "abc"}
                for task in manager.load(epoch, blobs=blobs, partitions=again).tasks():
                    if "read" in (task.name or ""):
                        task.fn()

        self.each(act)

    def resume(self) -> None:
        """What a run writes: it takes the directory, removes leftovers, saves an epoch."""
        manager = self.manager(keep=KeepLast(2))
        manager.run.start(["a"], {"plan": {}})
        try:
            latest = manager.latest()
            if latest is not None:
                manager.run.rewind(Position.of(latest), "resumed")
            save = Save(manager, Position.of((latest or 0) + 1))
            workspace = Workspace("a")
            workspace.globals.update(w=np.arange(9000.0), big=np.arange(9000.0), n=1)
            save.commit(save.write({"a": workspace}))
        finally:
            manager.run.end()


READING = (
    *("ls", "info", "verify_deep", "diff", "fsck", "prune_best", "report"),
    *("ls_runs", "top", "compare"),
    *("load", "look", "look_lazily", "ask", "plan_epoch", "replay", "load_in_run"),
)
WRITING = ("fsck_repair", "prune", "pin", "restore", "copy_all", "resume")


def operate(case: Case, name: str) -> None:
    """Do one of them."""
    getattr(case, name)()


def _print(output: CommandOutput) -> None:
    json.dumps(to_json(output.data), allow_nan=False)
    output.text.encode(errors="replace")
