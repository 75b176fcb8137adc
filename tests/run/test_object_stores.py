"""Runs that save to object stores: workers are killed; a server speaks S3."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

from jobrunner import (
    CheckpointError,
    Job,
    JobRunner,
    KeepLast,
    MultiNodeCheckpointManager,
    Node,
    Session,
    Task,
    current_task,
    epoch_limiter,
)
from jobrunner.testing import FaultyObjects, Struck, assert_identical
from tests.processes import own_session

URL = "s3://bucket/runs/walk"


def wander(x):
    return x + current_task().rng.standard_normal(x.size)


def walk(epochs, *, flag=None, init=lambda: np.zeros(20_000)):
    with Job("walk", seed=5) as job:
        for i in range(2):
            with Node(f"n{i}"):
                with job.init_group:
                    Task(init, outputs="x", name="init")
                    Task(lambda: np.arange(20_000.0), outputs="fixed", name="fix")
                step = wander if flag is None or i else Struck(wander, epoch=3, flag=flag)
                Task(step, inputs="x", outputs="x", name="step")
        epoch_limiter(job, epochs)
    return job


def must_not_run():
    raise AssertionError("a resumed job makes nothing anew")


def test_a_lost_worker_and_a_new_run_resume_from_objects(tmp_path):
    files = FaultyObjects(URL, tmp_path / "objects")

    def manager():
        return MultiNodeCheckpointManager(URL, keep=KeepLast(2), files=files)

    with own_session(2, processes=True) as (_, client, _):
        with Session(client) as session:
            result = JobRunner(walk(4, flag=tmp_path / "flag"), manager()).run(session)
            assert (result.epoch, result.restarts) == (4, 1)
        with Session(client) as session:
            result = JobRunner(walk(6, init=must_not_run), manager()).run(session)
            assert (result.epoch, result.resumed_from) == (6, 4)
            found = [session.fetch(Node(f"n{i}")["x"]) for i in range(2)]
        with Session(client) as session:
            JobRunner(walk(6)).run(session)
            expected = [session.fetch(Node(f"n{i}")["x"]) for i in range(2)]
    assert_identical(expected, found)
    assert manager().epochs() == [4, 5, 6]  # the one resumed from is kept
    manager().verify(6)


def test_a_store_that_other_processes_do_not_see_is_refused(process_client):
    with (
        Session(process_client) as session,
        pytest.raises(CheckpointError, match="is not shared"),
    ):
        JobRunner(walk(2), MultiNodeCheckpointManager(f"memory://{uuid.uuid4().hex}")).run(session)


def test_a_run_in_s3_is_recorded_resumed_and_read(s3, inproc_client):
    url = f"{s3.url}/runs/walk"

    def manager():
        return MultiNodeCheckpointManager(url, keep=KeepLast(1))

    with Session(inproc_client) as session:
        assert JobRunner(walk(2), manager()).run(session).epoch == 2
    with Session(inproc_client) as session:
        assert JobRunner(walk(4, init=must_not_run), manager()).run(session).resumed_from == 2
        expected = session.fetch(Node("n1")["x"])
    assert manager().epochs() == [2, 4]  # the one resumed from is kept
    manager().verify(4)
    checkpoint = manager().open(4)
    assert_identical(expected, checkpoint["n1"].load("x"))
    assert checkpoint["n0"]["x"].shape == (20_000,)
    with pytest.raises(CheckpointError, match="no bucket"):
        MultiNodeCheckpointManager("s3://nowhere/k").run.start(["a"], {})
