"""What all runs of a directory have recorded: metrics and metadata, by epoch."""

import numpy as np
import pytest

from jobrunner import (
    CheckpointManager,
    DefinitionError,
    JobRunner,
    KeepLast,
    MultiNodeCheckpointManager,
    Position,
    current_task,
)
from jobrunner.checkpoint import repair_log
from jobrunner.cli.show import describe_checkpoint
from tests.jobs import counter


def step(n):
    current_task().report(n=n + 1, time=float("nan"))
    return n + 1


@pytest.fixture
def run(inproc_session, tmp_path):
    def run(limit, *, resume="latest", job=None, callbacks=(), **options):
        manager = MultiNodeCheckpointManager(tmp_path / "k", **options)
        runner = JobRunner(job or counter(limit, step), manager, resume, callbacks=callbacks)
        return manager, runner.run(inproc_session)

    return run


def brief(rows):
    return [(row["epoch"], row["metrics"].get("n")) for row in rows]


def test_the_history_has_the_epochs_of_all_runs_also_removed_ones(run):
    run(2, keep=KeepLast(1))
    manager, last = run(4, keep=KeepLast(1))
    assert manager.epochs() == [2, 4]
    assert brief(manager.past_epochs()) == [(0, None), (1, 1), (2, 2), (3, 3), (4, 4)]
    assert len({row["run"] for row in manager.past_epochs()}) == 2
    assert [row["n"] for row in last.metrics] == [3, 4]
    assert run(4)[1].metrics == []  # a finished job runs nothing


def test_epochs_that_were_run_again_count_once(run):
    run(3)
    manager, _ = run(4, resume=1)
    assert brief(manager.past_epochs()) == [(0, None), (1, 1), (2, 2), (3, 3), (4, 4)]
    manager, _ = run(1, resume=None)
    assert brief(manager.past_epochs()) == [(0, None), (1, 1)]


def test_metrics_are_a_table_with_a_row_for_each_epoch(run):
    pandas = pytest.importorskip("pandas")
    manager, _ = run(2)
    frame = manager.metrics()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == ["n", "time"]
    assert frame.index.name == "epoch"
    assert frame["n"].tolist()[1:] == [1, 2]
    assert np.isnan(frame["time"][2])


def test_the_history_goes_on_after_a_repair_of_the_log(run, tmp_path):
    manager, _ = run(4, keep=KeepLast(2), asynchronous=False)
    for entry in list(manager.directory.log.read_entries()):
        for record in getattr(entry, "records", ()):
            if record.at in (Position(1), Position(3)):
                (tmp_path / "k" / "_log" / f"{entry.number:010d}.json").unlink()
    repair_log(MultiNodeCheckpointManager(tmp_path / "k").directory)
    manager, _ = run(6)
    # The store of epoch 3 says what its record did; that of epoch 1 was removed.
    assert brief(manager.past_epochs()) == [(0, None), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6)]


def test_metadata_is_recorded_and_shown(run):
    manager, _ = run(1, metadata={"data": "digits-2", "sizes": [1, 2]})
    assert manager.record(1).details.metadata == {"data": "digits-2", "sizes": [1, 2]}
    shown = describe_checkpoint(manager.directory, Position(1))
    assert "metadata data='digits-2'" in shown.text
    assert shown.data["metadata"] == {"data": "digits-2", "sizes": [1, 2]}


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ([1], r"metadata must be a mapping"),
        ({1: 2}, r"metadata must be a mapping of str"),
        ({"a": np.zeros(1)}, r"must be JSON"),
        ({"a": -(10**1000)}, r"must be JSON .* an int has more than 1,000 digits"),
        ({"a": "x" * 70_000}, r"takes 70\d\d\d bytes, and at most 65536"),
    ],
)
def test_metadata_that_cannot_be_recorded_is_refused(tmp_path, metadata, why):
    with pytest.raises(DefinitionError, match=why):
        CheckpointManager(tmp_path / "one", "a", metadata=metadata)
