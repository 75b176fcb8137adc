"""Mid-epoch checkpoints of both forms are read, and runs resume from them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jobrunner import (
    Job,
    JobRunner,
    KeepAll,
    MultiNodeCheckpointManager,
    Position,
    SaveEvery,
    Session,
    Task,
    epoch_limiter,
)

NEW, OLD = (Path(__file__).with_name(name) for name in ("format_5", "mid_epoch_4"))
AT_3 = Position(3, 1)


def test_positions_are_what_they_were() -> None:
    manager = MultiNodeCheckpointManager(NEW)
    assert manager.epochs() == [0, *(at for n in range(3) for at in (Position(n, 1), n + 1)), AT_3]
    assert manager.recorded.verify_log() == []
    assert manager.pins() == {3: ["kept"]}
    for epoch in manager.epochs():
        manager.verify(epoch)
        step = epoch.step if isinstance(epoch, Position) else 0
        assert manager.open(epoch)["a"]["n"] == 2 * int(epoch) + step
    assert (NEW / "a.3.s1" / "zarr.json").exists()


def test_a_checkpoint_under_the_number_of_its_epoch_is_what_it_was() -> None:
    manager = MultiNodeCheckpointManager(OLD)
    assert manager.epochs() == [0, 1, 2, 3, 4]
    manager.verify(4)
    assert (manager.open(4).step, manager.open(4)["a"]["n"]) == (1, 7)


@pytest.mark.parametrize("golden", [NEW, OLD])
def test_a_run_resumes(golden: Path, tmp_path: Path, inproc_session: Session) -> None:
    path = shutil.copytree(golden, tmp_path / "runs")
    with Job("j", steps_per_epoch=3) as job:  # another length, so that more than one step is left
        with job.init_group:
            Task(int, outputs="n", node="a")
        Task(lambda n: n + 1, "n", "n", node="a")
    epoch_limiter(job, 5)
    keep = KeepAll(partial=True)
    manager = MultiNodeCheckpointManager(path, save=SaveEvery(steps=1), keep=keep)
    runner = JobRunner(job, manager)
    assert "steps 2 to 3 of epoch 4" in str(runner.plan_resume())
    saved = []

    class Saves:
        def on_save(self, report: object) -> None:
            saved.append(report.epoch)  # type: ignore[attr-defined]

    runner.callbacks = (Saves(),)
    result = runner.run(inproc_session)
    assert result.resumed_from == (AT_3 if golden == NEW else 4)
    # What began under the number of its epoch goes on so.
    assert saved[:2] == ([Position(3, 2), 4] if golden == NEW else [4, 4])
    assert saved[2:] == [Position(4, 1), Position(4, 2), 5]
    assert manager.open(5)["a"]["n"] == 7 + 2 + 3
    assert manager.recorded.verify_log() == []
