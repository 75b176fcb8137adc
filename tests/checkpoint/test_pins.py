"""Others pin, open and watch epochs while a run writes; a pin keeps one whatever the policy says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jobrunner import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    DefinitionError,
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


@pytest.fixture
def reader(run: NodeRun) -> MultiNodeCheckpointManager:
    return MultiNodeCheckpointManager(run.path)


def save(run: NodeRun, *epochs: int) -> None:
    for epoch in epochs:
        run.save(epoch, {"w": np.full(5, epoch)})


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


def test_a_pinned_epoch_outlives_the_policy_until_it_is_unpinned(
    run: NodeRun, reader: MultiNodeCheckpointManager
) -> None:
    save(run, 0)
    for label in ("kept", "paper", "paper"):
        reader.pin(0, label)
    save(run, 1, 2, 3)
    assert run.manager.epochs() == reader.epochs() == [0, 2, 3]
    assert reader.pins() == {0: ["kept", "paper"]}
    reader.verify(0)
    assert reader.unpin(0, "kept")
    assert not reader.unpin(0, "kept")
    save(run, 4)
    assert reader.epochs() == [0, 3, 4]
    assert reader.unpin(0)
    save(run, 5)
    assert (reader.epochs(), reader.pins()) == ([4, 5], {})
    assert not (run.path / "a.0").exists()


def test_an_epoch_that_is_recorded_anew_keeps_its_pins_and_both_stores(run: NodeRun) -> None:
    save(run, 0)
    run.manager.pin(0)
    save(run, 0)
    assert (run.manager.epochs(), run.manager.pins()) == ([0], {0: ["kept"]})
    run.end()
    again = NodeRun(run.path)  # which removes what is left over
    again.manager.retention.sweeper.drain()
    assert (run.path / "a.0" / "zarr.json").exists()
    again.end()


def test_closing_twice_or_after_a_rewind_is_harmless(
    run: NodeRun, reader: MultiNodeCheckpointManager
) -> None:
    save(run, 0, 1)
    checkpoint = reader.open(1, pin=True)
    run.manager.run.rewind(Position(0), "by hand")
    save(run, 1)
    assert reader.pins() == {}  # of another epoch 1 now
    checkpoint.close()
    checkpoint.close()
    reader.open(0).close()


def test_an_epoch_that_cannot_be_opened_is_not_left_pinned(
    run: NodeRun, reader: MultiNodeCheckpointManager
) -> None:
    save(run, 0)
    run.end()
    commit = run.path / "_log" / "0000000002.json"
    reader.epochs()
    content = commit.read_bytes()
    commit.write_bytes(b"")
    with pytest.raises(CheckpointCorruptError):
        reader.open(0, pin=True)
    commit.write_bytes(content)
    assert MultiNodeCheckpointManager(run.path).pins() == {}


def test_an_epoch_that_is_not_recorded_cannot_be_pinned(tmp_path: Path) -> None:
    manager = MultiNodeCheckpointManager(tmp_path)
    for change in (manager.pin, manager.unpin, lambda epoch: manager.open(epoch, pin=True)):
        with pytest.raises(CheckpointNotFoundError, match="Epoch 3 .* is not recorded"):
            change(3)
    with pytest.raises(DefinitionError, match="label"):
        manager.pin(3, "")
    assert list(tmp_path.iterdir()) == []


def test_watch_yields_later_epochs_and_those_recorded_again(
    run: NodeRun, reader: MultiNodeCheckpointManager
) -> None:
    with pytest.raises(CheckpointNotFoundError):
        next(reader.watch(after=7))
    assert list(reader.watch(poll_seconds=0.001, timeout_seconds=0.01)) == []
    save(run, 0, 1)
    assert list(reader.watch(poll_seconds=0.001, timeout_seconds=0.01)) == [0, 1]
    watch = reader.watch(after=0, poll_seconds=0.001)
    assert next(watch) == 1
    run.manager.run.rewind(Position(0), "by hand")
    save(run, 1, 2)
    assert [next(watch), next(watch)] == [1, 2]
    run.end()
    assert list(watch) == []
