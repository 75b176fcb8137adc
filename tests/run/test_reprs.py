"""What a prompt and a notebook show for jobs, plans, sessions, results and checkpoints."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from jobrunner import (
    Blob,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    ResumePlan,
    RunResult,
    Session,
    Task,
    epoch_limiter,
)


def build() -> Job:
    with Job("a <b>&job") as job, Node("<i>n&"):
        with job.init_group:
            Task(lambda: np.zeros((4, 3)), outputs=Blob("w", partition=0), name="make")
        Task(lambda w: w + 1, inputs="w", outputs="w", name="<u>add")
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
        open_session = ET.fromstring(session._repr_html_())
    checkpoint = manager.open(3)
    made = [job, runner.plan_resume(), job.compile(), result, session, checkpoint]
    made += [checkpoint["<i>n&"], checkpoint.array("w")]
    return {type(it).__name__: it for it in made} | {"open session": open_session}


KINDS = {
    "Job": ("<Job 'a <b>&job'", "repeated"),
    "Plan": ("<Plan of 'a <b>&job': 1 node, tasks init 1, epoch 1", "saved nodes: <i>n&"),
    "ResumePlan": ("<ResumePlan from epoch 3: it is the last epoch", "runs (1)"),
    "RunResult": ("<RunResult: epoch 3, stopped by epoch_limiter, epochs run 3, saves 4>", "saves"),
    "Session": ("<closed Session of ", "closed"),
    "Checkpoint": ("<Checkpoint of epoch 3: <i>n&>", "1 node"),
    "NodeCheckpoint": ("<NodeCheckpoint ", "float64[4 x 3]"),
    "PartitionedArray": ("<PartitionedArray 'w' float64[4, 3], 1 parts>", "1 along axis 0"),
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


def test_an_open_session_shows_which_nodes_are_on_which_worker(shown: dict[str, Any]) -> None:
    assert "1 node on 1 worker" in "".join(shown["open session"].itertext())


def test_long_results_and_plans_stay_short_on_the_screen() -> None:
    metrics = [{"epoch": epoch, "loss": 1 / epoch} for epoch in range(1, 10_000)]
    result = RunResult(9999, None, "epoch_limiter", 2, metrics, [], [])
    assert repr(result) == (
        "<RunResult: epoch 9999, stopped by epoch_limiter, restarts 2, epochs run 9999>"
    )
    assert len(result._repr_html_()) < 10_000
    plan = ResumePlan(None, "x" * 5000, steps=("run",) * 10_000)
    assert len(plan._repr_html_()) < 10_000


def test_a_value_that_cannot_be_read_does_not_break_the_table(shown: dict[str, Any]) -> None:
    node = shown["Checkpoint"]["<i>n&"]
    blobs = dict(node._manifest.blobs)
    later = structs.replace(blobs["w"], value={"$": "of a later version"})
    node._manifest = structs.replace(node._manifest, blobs={"w": later})
    assert "Error: " in node._repr_html_()
