"""What a prompt and a notebook show for jobs, plans, sessions, results and checkpoints."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobrunner import (
    Blob,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Session,
    Task,
    TaskFailedError,
    current_task,
    epoch_limiter,
)
from jobrunner.run import RunResult


def add(w: Any) -> Any:
    current_task().report(loss=1 / 3)
    return w + 1


def build() -> Job:
    with Job("a <b>&job") as job, Node("<i>n&"):
        with job.init_group:
            Task(lambda: np.zeros((4, 3)), outputs=Blob("w", partition=0), name="make")
        Task(add, inputs="w", outputs="w", name="<u>add")
    epoch_limiter(job, 3)
    return job


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One object of each kind, of a job whose names are HTML."""
    path = tmp_path_factory.mktemp("run")
    job, manager = build(), MultiNodeCheckpointManager(path)
    with Session.local(workers=1, processes=False) as session:
        runner = JobRunner(job, manager)
        result = runner.run(session)
    checkpoint = manager.open(3)
    made = [job, runner, manager, runner.plan_resume(), result]
    return {type(it).__name__: it for it in made} | {"Checkpoint": checkpoint}


KINDS = {
    "Job": ("<Job 'a <b>&job'", "saved nodes"),
    "MultiNodeCheckpointManager": ("<MultiNodeCheckpointManager of /", "3, the newest of 4"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_is_one_line_at_a_prompt_and_a_table_in_a_notebook(
    shown: dict[str, Any], kind: str
) -> None:
    start, text = KINDS[kind]
    line = repr(shown[kind])
    assert line.startswith(start)
    assert "\n" not in line
    root = ET.fromstring(shown[kind]._repr_html_())  # names that were tags would be elements of it
    assert not {it.tag for it in root.iter()} & {"i", "b", "u"}
    assert text in "".join(root.itertext())


def test_a_manager_whose_directory_cannot_be_read_shows_why(tmp_path: Path) -> None:
    (tmp_path / "_log").mkdir()
    (tmp_path / "_log" / "0000000000.json").write_text("no entry")
    assert "cannot be read" in MultiNodeCheckpointManager(tmp_path)._repr_html_()
    missing = MultiNodeCheckpointManager(tmp_path / "none")
    assert "none" in missing._repr_html_()


def test_a_failed_task_shows_a_notebook_the_frames_of_its_own_code(
    inproc_session: Session,
) -> None:
    with Job("fails") as job:
        Task(lambda: 1 // 0, node=Node("a"), name="divide")
    epoch_limiter(job, 1)
    with pytest.raises(TaskFailedError) as caught:
        JobRunner(job).run(inproc_session)
    error: Any = caught.value
    text = "\n".join(error._render_traceback_())
    assert text.startswith("TaskFailedError: Task 'divide' (node 'a'")
    assert "in <lambda>\nZeroDivisionError" in text
    assert text.count("File ") == 1


def test_a_long_result_stays_one_line() -> None:
    metrics = [{"epoch": epoch, "loss": 1 / epoch} for epoch in range(1, 10_000)]
    result = RunResult(9999, None, "epoch_limiter", 2, metrics, [], [])
    assert repr(result) == (
        "<RunResult: epoch 9999, stopped by epoch_limiter, restarts 2, epochs run 9999>"
    )
