"""Faults at every operation while histories grow: no recorded row is lost, changed or doubled."""

from __future__ import annotations

import contextlib
import gc
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from jobrunner import CheckpointError, KeepLast, MultiNodeCheckpointManager
from jobrunner.testing import FaultyFiles, FaultyObjects, PowerCutError
from tests.faults.history_life import ROWS_OF_A_CHUNK, Sampler, check_epoch
from tests.faults.power import Disk, TracingFiles, all_kept, all_lost, materialize, some_state
from tests.sampling import sampled

How = Literal["fail", "die"]

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LEAST_BYTES", "_MOST_BYTES"):
        monkeypatch.setattr(f"jobrunner.checkpoint.history_writer.{name}", 16 * ROWS_OF_A_CHUNK)
    monkeypatch.setattr("jobrunner.checkpoint.history_writer.PUBLISH_SECONDS", 0)


def live(manager: MultiNodeCheckpointManager) -> None:
    """Two runs of three groups. After a failed save, a run goes on to the next group."""
    for _ in range(2):
        with contextlib.suppress(CheckpointError):
            sampler = Sampler(manager)
            for count in (2, 1, 3):
                with contextlib.suppress(CheckpointError):
                    sampler.run_epochs(count)
            sampler.end()
        manager.run.end()
        manager.retention.sweeper.drain()


def check(manager: MultiNodeCheckpointManager) -> list[int]:
    for epoch in manager.epochs():
        check_epoch(manager, epoch)
    return manager.epochs()


def go_on(manager: MultiNodeCheckpointManager) -> None:
    """The next run goes on from what is recorded."""
    before = check(manager)
    sampler = Sampler(manager)
    sampler.run_epochs(2)
    sampler.end()
    assert check(manager)[-1] == (before[-1] if before else 0) + 2


Faulty = FaultyFiles | FaultyObjects


def faulty_files(path: Path, at: int | None = None, how: How = "fail") -> tuple[str, Faulty]:
    return str(path), FaultyFiles(at, how, sync=False)


def faulty_objects(path: Path, at: int | None = None, how: How = "fail") -> tuple[str, Faulty]:
    return "s3://bucket/k", FaultyObjects("s3://bucket/k", path, at, how)


@pytest.mark.parametrize("make", [faulty_files, faulty_objects])
@pytest.mark.parametrize("how", ["fail", "die"])
@sampled("every", sample=173, nightly=1)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_at_any_operation_loses_no_row(
    every: int, how: How, make: Callable[..., tuple[str, Faulty]], tmp_path: Path
) -> None:
    k = 1 + (every > 1) * (how == "die") * 11
    while True:
        path, files = make(tmp_path / str(k), k, how)
        manager = MultiNodeCheckpointManager(path, keep=KeepLast(3), files=files, take_over=True)
        with contextlib.suppress(PowerCutError):
            live(manager)
        if how == "die":
            del manager
            gc.collect()  # the process is gone, and with it the manager and its heartbeat
        _, well = make(tmp_path / str(k))
        manager = MultiNodeCheckpointManager(path, files=well)
        if files.count < k:
            break
        go_on(manager)
        k += every
    assert check(manager)[-1] == 12


@sampled("every", sample=100, nightly=2)
def test_a_power_loss_at_any_moment_loses_no_recorded_row(every: int, tmp_path: Path) -> None:
    path = tmp_path / "k"
    files = TracingFiles()
    live(MultiNodeCheckpointManager(path, keep=KeepLast(2), files=files))
    assert check(MultiNodeCheckpointManager(path))[-1] == 12
    draw = random.Random(0)
    disk = Disk(str(tmp_path))
    newest = -1
    for i, operation in enumerate(files.trace):
        disk.apply(operation)
        if draw.randrange(every) and i < len(files.trace) - 1:
            continue
        trees = [all_lost(disk), all_kept(disk), some_state(disk, draw)]
        for j, tree in enumerate(trees):
            left = tree.get("k")
            if isinstance(left, dict):
                target = tmp_path / f"{i}-{j}"
                materialize(left, target)
                newest = max(newest, *check(MultiNodeCheckpointManager(target)), -1)
    assert newest == 12


@pytest.mark.nightly
def test_killed_processes_lose_no_row() -> None:
    command = [sys.executable, "-m", "tests.faults.history_killed", "50"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert "no row lost or doubled" in ended.stdout, ended.stderr[-2000:]
