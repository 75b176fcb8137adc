"""Runs that save to object stores; a server speaks S3."""

import uuid

import numpy as np
import pytest

from jobrunner import (
    CheckpointError,
    JobRunner,
    KeepLast,
    MultiNodeCheckpointManager,
    Node,
    Session,
)
from tests.jobs import counter


def test_a_store_that_other_processes_do_not_see_is_refused(process_client):
    manager = MultiNodeCheckpointManager(f"memory://{uuid.uuid4().hex}")
    with (
        Session(process_client) as session,
        pytest.raises(CheckpointError, match="is not shared"),
    ):
        JobRunner(counter(2), manager).run(session)


def test_a_run_in_s3_is_recorded_resumed_and_read(s3, inproc_client):
    def manager():
        return MultiNodeCheckpointManager(f"{s3.url}/runs/walk", keep=KeepLast(1))

    for epochs in (2, 4):
        job = counter(epochs, lambda array: array + 1, nodes="ab", start=np.zeros(20_000))
        with Session(inproc_client) as session:
            result = JobRunner(job, manager()).run(session)
            assert session.fetch(Node("b")["n"]).tolist() == [epochs] * 20_000
    assert result.resumed_from == 2
    assert manager().epochs() == [2, 4]  # the one resumed from is kept
    manager().verify(4)
    assert manager().open(4)["b"].load("n").tolist() == [4] * 20_000
    with pytest.raises(CheckpointError, match="no bucket"):
        MultiNodeCheckpointManager("s3://nowhere/k").run.start(["a"], {})
