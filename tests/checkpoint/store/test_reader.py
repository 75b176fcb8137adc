"""Reading a directory while a run writes to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jobrunner import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    KeepLast,
    MultiNodeCheckpointManager,
)
from jobrunner.positions import Position
from tests.saves import NodeRun


@pytest.fixture
def run(tmp_path: Path) -> Iterator[NodeRun]:
    run = NodeRun(tmp_path / "k", keep=KeepLast(2))
    yield run
    run.end()


def save(run: NodeRun, *epochs: int) -> None:
    for epoch in epochs:
        run.save(epoch, {"w": np.full(5, epoch)})


@pytest.fixture
def reader(run: NodeRun) -> MultiNodeCheckpointManager:
    return MultiNodeCheckpointManager(run.manager.path)


def test_an_epoch_that_is_open_and_pinned_is_not_retired(
    run: NodeRun, reader: MultiNodeCheckpointManager
) -> None:
    save(run, 0, 1)
    with reader.open(0, pin=True) as checkpoint:
        save(run, 2, 3, 4)
        assert run.manager.epochs() == [0, 3, 4]
        assert checkpoint["a"].load("w").tolist() == [0] * 5
        with reader.open(0, pin=True):
            pass
        save(run, 5)
        assert 0 in run.manager.epochs()
    assert reader.pins() == {}
    save(run, 6)
    assert run.manager.epochs() == [5, 6]


def test_closing_twice_or_after_a_rewind_is_harmless(
    run: NodeRun, reader: MultiNodeCheckpointManager
) -> None:
    save(run, 0, 1)
    checkpoint = reader.open(1, pin=True)
    run.manager.run.rewind(Position(0), "by hand")
    checkpoint.close()
    checkpoint.close()
    reader.open(0).close()


def test_an_epoch_that_is_gone_cannot_be_pinned(
    run: NodeRun, reader: MultiNodeCheckpointManager
) -> None:
    save(run, 0, 1, 2)
    with pytest.raises(CheckpointNotFoundError, match="recorded epochs: 1, 2"):
        reader.open(0, pin=True)
    assert reader.pins() == {}


def test_an_epoch_that_cannot_be_opened_is_not_left_pinned(
    run: NodeRun, reader: MultiNodeCheckpointManager
) -> None:
    save(run, 0)
    run.manager.run.end()
    commit = Path(reader.path, "_log", "0000000002.json")
    reader.epochs()
    content = commit.read_bytes()
    commit.write_bytes(b"")
    with pytest.raises(CheckpointCorruptError):
        reader.open(0, pin=True)
    commit.write_bytes(content)
    assert MultiNodeCheckpointManager(reader.path).pins() == {}


def test_watch_yields_later_epochs_and_those_recorded_again(
    run: NodeRun, reader: MultiNodeCheckpointManager
) -> None:
    save(run, 0, 1)
    watch = reader.watch(after=0, poll_seconds=0.001)
    assert next(watch) == 1
    run.manager.run.rewind(Position(0), "by hand")
    save(run, 1, 2)
    assert [next(watch), next(watch)] == [1, 2]
    run.manager.run.end()
    assert list(watch) == []


def test_a_watch_ends_at_its_timeout(run: NodeRun, reader: MultiNodeCheckpointManager) -> None:
    assert list(reader.watch(poll_seconds=0.001, timeout_seconds=0.01)) == []
    save(run, 0)
    assert list(reader.watch(poll_seconds=0.001, timeout_seconds=0.01)) == [0]


def test_watching_from_an_epoch_that_does_not_exist_is_an_error(
    reader: MultiNodeCheckpointManager,
) -> None:
    with pytest.raises(CheckpointNotFoundError):
        next(reader.watch(after=7))
