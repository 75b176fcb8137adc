"""Asynchronous saves: epochs wait only for a copy, and every failure is reported."""

import os
import threading
import time

import numpy as np
import pytest

from jobrunner import (
    DefinitionError,
    Job,
    JobRunner,
    KeepLast,
    MultiNodeCheckpointManager,
    Node,
    SaveEvery,
    Task,
    TaskFailedError,
    current_task,
    epoch_limiter,
)
from jobrunner.checkpoint import CommitEntry
from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.positions import Position
from jobrunner.workspace import Workspace
from tests.blobs import Blobs
from tests.jobs import Listener, count, counter
from tests.saves import Save

GATE = threading.Event()
"""Open: files may be written."""


class GatedFiles(PosixFiles):
    """Writes chunks once the gate is open."""

    def before(self, operation, path):
        if operation == "create" and os.path.basename(path).startswith("c."):
            assert GATE.wait(30)


@pytest.fixture(autouse=True)
def gate():
    GATE.set()
    yield GATE
    GATE.set()


def growing(limit):
    def grow(w):
        w += 1

    with Job("growing") as job:
        for node in (Node("a"), Node("b")):
            with job.init_group:
                Task(lambda: np.zeros((300, 500)), outputs="w", name="zero", node=node)
            # In place: without a copy, the write would see the next epoch's numbers.
            Task(grow, updates="w", node=node)
        epoch_limiter(job, limit)
    return job


def manager_of(tmp_path, **options):
    options = {"asynchronous": True, "files": GatedFiles(), **options}
    return MultiNodeCheckpointManager(tmp_path / "ckpt", **options)


def values(manager, epoch):
    checkpoint = manager.open(epoch)
    return [set(np.unique(checkpoint[node]["w"][:])) for node in ("a", "b")]


def test_epochs_run_during_a_save_and_do_not_change_it(inproc_session, tmp_path, gate):
    class Watch:
        def on_epoch(self, epoch, seconds, metrics):
            while epoch == 1 and manager.latest() != 0:
                time.sleep(0.01)  # epoch 0 is being written
            if epoch == 2:
                gate.clear()  # the save of epoch 2 cannot be written
            if epoch == 4:
                seen.append(manager.epochs())
                gate.set()

    seen = []
    manager = manager_of(tmp_path, save=SaveEvery(epochs=2))
    result = JobRunner(growing(4), manager, callbacks=[Watch()]).run(inproc_session)
    assert seen == [[0]]
    assert manager.epochs() == [0, 2, 4]
    assert [values(manager, epoch) for epoch in (2, 4)] == [[{2.0}] * 2, [{4.0}] * 2]
    assert [report.epoch for report in result.saves] == [0, 2, 4]
    for epoch in (0, 2, 4):
        manager.verify(epoch)


def tiny(limit, fn=count):
    """Epochs that workers run in batches."""
    return counter(limit, fn, nodes="ab")


def commits_of(manager):
    entries = manager.directory.log.read_entries()
    return [entry for entry in entries if isinstance(entry, CommitEntry)]


@pytest.mark.processes
def test_many_short_epochs_are_recorded_in_groups_each_with_its_own_state(session, tmp_path):
    manager, heard = MultiNodeCheckpointManager(tmp_path), Listener()
    result = JobRunner(tiny(150), manager, callbacks=[heard]).run(session)
    assert manager.epochs() == heard.saved == list(range(151))
    assert [report.epoch for report in result.saves] == heard.saved
    assert len(commits_of(manager)) < 75
    for epoch in (1, 2, 70, 149):
        assert [manager.open(epoch)[node]["n"] for node in "ab"] == [epoch] * 2
    again = JobRunner(tiny(160), manager).run(session)
    assert (again.resumed_from, session.fetch(Node("b")["n"])) == (150, 160)


def test_epochs_that_the_policy_passes_over_have_their_metrics_in_the_history(session, tmp_path):
    manager, heard = MultiNodeCheckpointManager(tmp_path, keep=KeepLast(1)), Listener()
    JobRunner(tiny(150), manager, callbacks=[heard]).run(session)
    assert manager.epochs() == [150]
    assert [row["epoch"] for row in manager.past_epochs()] == list(range(151))
    assert heard.saved == sorted(heard.saved)
    assert heard.saved[-1] == 150
    assert len(heard.saved) < 150


def test_a_callback_that_waits_for_saves_reads_what_has_ended(session, tmp_path):
    class Reads:
        def on_setup(self, runner):
            self.runner = runner

        def on_epoch(self, epoch, seconds, metrics):
            self.runner.wait_for_saves()
            seen.append(manager.latest())

    seen = []
    manager = MultiNodeCheckpointManager(tmp_path)
    JobRunner(tiny(4), manager, callbacks=[Reads()]).run(session)
    assert seen == [0, 1, 2, 3]  # it is called before its epoch is saved


@pytest.mark.parametrize("budget_bytes", [0, 1_300_000])
def test_blobs_beyond_the_budget_are_written_before_the_next_epoch(
    inproc_session, tmp_path, budget_bytes
):
    manager = manager_of(tmp_path, budget_bytes=budget_bytes)
    JobRunner(growing(3), manager).run(inproc_session)
    assert [values(manager, epoch) for epoch in (1, 2, 3)] == [[{e}] * 2 for e in (1, 2, 3)]


class NoMemory(PosixFiles):
    """Storage that fails with an unexpected error, from epoch 1 on."""

    def before(self, operation, path):
        if operation == "create" and "/a.1/" in path:
            raise MemoryError("by hand")


def test_a_failed_task_is_reported_even_if_a_save_fails_too(inproc_session, tmp_path):
    job = growing(3)
    Task(fail_at_epoch_2, name="fail", node="a", group=job.epoch_group)
    with pytest.raises(TaskFailedError, match="by hand"):
        JobRunner(job, manager_of(tmp_path, files=NoMemory())).run(inproc_session)
    assert manager_of(tmp_path).directory.held_by(manager_of(tmp_path).directory.snapshot()) is None


def fail_at_epoch_2():
    if current_task().epoch == 2:
        raise ZeroDivisionError("by hand")


def test_a_blob_that_cannot_be_saved_any_more_ends_the_run_at_its_epoch(inproc_session, tmp_path):
    def spoil(n):
        return threading.Lock() if current_task().epoch == 5 else n + 1

    manager = MultiNodeCheckpointManager(tmp_path)
    with pytest.raises(DefinitionError, match="'n'"):
        JobRunner(tiny(9, spoil), manager).run(inproc_session)
    assert manager.latest() == 4


LARGE_BYTES = 1 << 20


class Model:
    """An object with an array, of which nobody knows what changes it."""

    def __init__(self):
        self.array = np.zeros(LARGE_BYTES // 8)

    def state_dict(self):
        return {"array": self.array}

    def load_state_dict(self, state):
        self.array = state["array"]


@pytest.mark.parametrize("budget_bytes", [LARGE_BYTES, LARGE_BYTES - 1])
def test_an_object_is_copied_at_once_unless_that_exceeds_the_budget(tmp_path, budget_bytes):
    model, manager = Model(), manager_of(tmp_path)
    workspaces = {"a": Workspace("a")}
    Blobs(workspaces["a"]).update({"x": [model]})
    manager.run.start(["a"], {})
    save = Save(manager, Position(0))
    captured = save.queue.capture(workspaces, at=save.at, budget_bytes=budget_bytes)
    assert captured == LARGE_BYTES
    model.array += 1
    save.commit(save.write_captured(workspaces))
    manager.run.end()
    assert manager.open(0)["a"].load("x")[0]["array"].max() == (captured > budget_bytes)
