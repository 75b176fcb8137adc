"""Pins keep an epoch whatever the retention policy says, and may be made during a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobrunner import (
    CheckpointNotFoundError,
    DefinitionError,
    KeepLast,
    MultiNodeCheckpointManager,
)
from tests.saves import NodeRun


def test_a_pinned_epoch_outlives_the_policy_until_it_is_unpinned(tmp_path: Path) -> None:
    run = NodeRun(tmp_path, keep=KeepLast(1))
    reader = MultiNodeCheckpointManager(tmp_path)
    run.save(0)
    reader.pin(0)
    reader.pin(0, "paper")
    reader.pin(0, "paper")
    for epoch in (1, 2):
        run.save(epoch)
    assert run.manager.epochs() == reader.epochs() == [0, 2]
    assert reader.pins() == {0: ["kept", "paper"]}
    reader.verify(0)
    assert reader.unpin(0, "kept")
    assert not reader.unpin(0, "kept")
    run.save(3)
    assert reader.epochs() == [0, 3]
    assert reader.unpin(0)
    run.save(4)
    assert (reader.epochs(), reader.pins()) == ([4], {})
    assert not (tmp_path / "a.0").exists()
    run.end()


def test_the_replaced_store_of_a_pinned_epoch_is_set_aside(tmp_path: Path) -> None:
    run = NodeRun(tmp_path)
    run.save(0)
    run.manager.pin(0)
    run.save(0)
    assert (tmp_path / "a.0" / "zarr.json").exists()
    assert (run.manager.epochs(), run.manager.pins()) == ([0], {})
    run.end()
    again = NodeRun(tmp_path)  # which removes what is left over
    again.manager.retention.sweeper.drain()
    assert (tmp_path / "a.0" / "zarr.json").exists()
    again.end()


def test_an_epoch_that_is_not_recorded_cannot_be_pinned(tmp_path: Path) -> None:
    manager = MultiNodeCheckpointManager(tmp_path)
    for change in (manager.pin, manager.unpin):
        with pytest.raises(CheckpointNotFoundError, match="Epoch 3 .* is not recorded"):
            change(3)
    with pytest.raises(DefinitionError, match="label"):
        manager.pin(3, "")
    assert list(tmp_path.iterdir()) == []
