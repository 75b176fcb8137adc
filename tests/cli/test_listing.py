"""What `ls` reads: each record that it lists once, and the end of the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobrunner import MultiNodeCheckpointManager
from jobrunner.checkpoint.log.log_writer import STATE_INTERVAL
from jobrunner.cli.listing import list_epochs
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles, FaultyObjects
from tests.saves import save_epoch

EPOCHS = 400
# The entries since the last full state, and as many that an object store reads ahead.
END = 2 * STATE_INTERVAL


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of many epochs of a job without nodes."""
    path = tmp_path_factory.mktemp("runs")
    manager = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
    manager.run.start([], {})
    for epoch in range(EPOCHS):
        save_epoch(manager, Position.of(epoch), details={"metrics": {"loss": 1 / (epoch + 1)}})
    manager.run.end()
    return path


@pytest.fixture(params=["files", "objects"])
def files(request: pytest.FixtureRequest, path: Path) -> FaultyFiles | FaultyObjects:
    if request.param == "files":
        return FaultyFiles()
    return FaultyObjects("s3://bucket/runs", path)


@pytest.fixture
def manager(path: Path, files: FaultyFiles | FaultyObjects) -> MultiNodeCheckpointManager:
    where = path if isinstance(files, FaultyFiles) else files.root
    return MultiNodeCheckpointManager(where, files=files)


def reads(files: FaultyFiles | FaultyObjects) -> list[str]:
    return [path for operation, path in files.trace if operation in ("open", "get", "head")]


def test_all_epochs_are_listed_by_one_read_of_each_record(
    manager: MultiNodeCheckpointManager, files: FaultyFiles | FaultyObjects
) -> None:
    output = list_epochs(manager.directory)
    assert [found["epoch"] for found in output.data["epochs"]] == list(range(EPOCHS))
    assert len(reads(files)) <= EPOCHS + END


def test_only_the_records_of_the_newest_epochs_are_read_to_list_these(
    manager: MultiNodeCheckpointManager, files: FaultyFiles | FaultyObjects
) -> None:
    output = list_epochs(manager.directory, last=20)
    assert [found["epoch"] for found in output.data["epochs"]] == list(range(EPOCHS - 20, EPOCHS))
    assert f"The newest 20 of {EPOCHS} epochs." in output.text
    assert len(reads(files)) <= 20 + END
