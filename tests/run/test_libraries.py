"""A job whose blobs are values of other libraries: saved, resumed, read and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobrunner import Job, JobRunner, MultiNodeCheckpointManager, Node, Session, Task, epoch_limiter

pd = pytest.importorskip("pandas")
sparse = pytest.importorskip("scipy.sparse")


def start() -> tuple[Any, Any]:
    frame = pd.DataFrame({"n": [1, 2], "text": ["a", None]}, index=pd.Index([7, 8], name="id"))
    return frame, sparse.csr_array(np.eye(2))


def grow(frame: Any, weights: Any) -> tuple[Any, Any]:
    return frame.assign(n=frame["n"] + 1), weights * 2


def relabel(frame: Any) -> None:
    frame.loc[7, "text"] = f"{frame.loc[7, 'text']}!"


def job(epochs: int) -> Job:
    with Job("frames") as made, Node("a"):
        with made.init_group:
            Task(start, outputs=["frame", "weights"])
        Task(grow, inputs=["frame", "weights"], outputs=["frame", "weights"])
        Task(relabel, updates="frame")
        epoch_limiter(made, epochs)
    return made


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_job_of_frames_and_sparse_matrices_resumes(
    inproc_session: Session, tmp_path: Path, asynchronous: bool
) -> None:
    manager = MultiNodeCheckpointManager(tmp_path / "run", asynchronous=asynchronous)
    JobRunner(job(2), manager).run(inproc_session)
    result = JobRunner(job(4), manager).run(inproc_session)
    assert result.resumed_from == 2
    whole = MultiNodeCheckpointManager(tmp_path / "whole", asynchronous=asynchronous)
    JobRunner(job(4), whole).run(inproc_session)
    for node in (manager.open(4)["a"], whole.open(4)["a"]):
        expected = start()[0].assign(n=[5, 6], text=["a!!!!", None])
        pd.testing.assert_frame_equal(node["frame"], expected)
        assert node["weights"].toarray().tolist() == [[16, 0], [0, 16]]
    assert manager.open(4)["a"].digest("frame") == whole.open(4)["a"].digest("frame")
