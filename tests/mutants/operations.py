"""Everything that reads a checkpoint directory, as users call it."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from click.testing import CliRunner

from jobrunner import JobRunner, KeepLast, MultiNodeCheckpointManager, errors
from jobrunner.checkpoint import (
    digest_blob,
    encode_blobs,
    repair_log,
)
from jobrunner.checkpoint.log.heartbeat import Patience
from jobrunner.cli import main
from jobrunner.define import Job
from jobrunner.positions import Position
from jobrunner.run import Replay
from jobrunner.story import LiveRuns
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.workspace import Workspace
from tests.mutants.watch import TimeIsUpError
from tests.saves import Save


class CommandError(errors.JobRunnerError):
    """An error of ours that a command has told."""


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


def open_manager(path: str, **options: Any) -> MultiNodeCheckpointManager:
    """A manager that waits for other runs without losing time."""
    manager = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False), **options)
    manager.run.patience = patience()
    return manager


def patience() -> Patience:
    clock = Clock()
    return Patience(15, clock, clock.wait)


class Case:
    """One mutant, and all that can be done with it."""

    def __init__(self, path: str, copy: str, whole: str, job: Job) -> None:
        self.path, self.copy, self.job = path, copy, job
        self.whole = whole  # what the mutant was before
        self.loaded: dict[str, str] = {}  # epoch, node and blob -> digest of the value

    def manager(self, **options: Any) -> MultiNodeCheckpointManager:
        return open_manager(self.path, **options)

    def command(self, words: str) -> None:
        """A command as one types it, for people and for programs."""
        names = {"DIR": self.path, "ROOT": os.path.dirname(self.path), "COPY": self.copy}
        names["WHOLE"] = self.whole
        arguments = [names.get(word, word) for word in words.split()]
        for more in ([], ["--json"]):
            result = CliRunner().invoke(main, arguments + more)
            if not isinstance(result.exception, SystemExit | None):
                raise result.exception
        described = json.loads(result.stdout)
        if "error" in described:
            kind, message = described["error"]["type"], described["error"]["message"]
            assert not hasattr(builtins, kind), f"{kind}: {message}"
            raise CommandError(message)

    def each(self, act: Callable[[MultiNodeCheckpointManager, Position], object]) -> None:
        """Do something with all epochs; an error in one hides none in the others."""
        error: errors.JobRunnerError | None = None
        for epoch in self.manager().positions():
            try:
                act(self.manager(), epoch)
            except errors.JobRunnerError as caught:
                error = caught
        if error is not None:
            raise error

    # ---- reading

    def top(self) -> None:
        LiveRuns(FaultyFiles(), self.path).look()

    def load(self) -> None:
        def act(manager: MultiNodeCheckpointManager, epoch: Position) -> None:
            for name, node in manager.open(epoch).items():
                for blob in node:
                    value = node.load(blob)
                    encoded = encode_blobs("", {"": value}, (), allow_pickle=True)[""]
                    self.loaded[f"{epoch}/{name}/{blob}"] = digest_blob(encoded)

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

    def plan(self) -> None:
        def act(manager: MultiNodeCheckpointManager, epoch: Position) -> None:
            runner = JobRunner(self.job, manager, num_epochs=20, resume_from_epoch=epoch)
            str(runner.plan_resume())

        self.each(act)

    def replay(self) -> None:
        self.each(lambda manager, epoch: Replay(self.job, manager.directory, epoch).check())

    def load_in_run(self) -> None:
        """What a worker does when a run resumes, also on more nodes."""

        def act(manager: MultiNodeCheckpointManager, epoch: Position) -> None:
            groups = [manager.load(epoch)]
            parts = list(manager.record(epoch).details.partitions)
            if parts:
                again = {name: ["a", "b", "c"] for name in parts}
                blobs = dict.fromkeys("abc", parts)
                groups.append(manager.load(epoch, blobs=blobs, partitions=again))
            for task in (task for group in groups for task in group.tasks()):
                if "read" in (task.name or ""):
                    task.fn()

        self.each(act)

    # ---- writing

    def repair(self) -> None:
        if repair_log(self.manager().directory, patience()) is not None:
            self.manager().epochs()

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
    *("ls DIR --last 5", "ls ROOT", "ls ROOT --best loss", "stats DIR", "info DIR latest"),
    *("verify DIR --deep", "diff DIR DIR", "fsck DIR", "compare DIR WHOLE", "compare WHOLE DIR"),
    *("prune DIR --keep-last 2 --keep-best loss --dry-run", "report DIR --output COPY"),
    *("top", "load", "look", "ask", "plan", "replay", "load_in_run"),
)
WRITING = (
    *("pin DIR latest", "unpin DIR latest", "copy DIR all COPY --take-over"),
    *("prune DIR --keep-last 1 --take-over", "restore DIR 0 --take-over"),
    *("restore DIR 2 --take-over", "repair", "resume"),
)


def operate(case: Case, name: str) -> None:
    """Do one of them."""
    if " " in name:
        case.command(name)
    else:
        getattr(case, name)()
