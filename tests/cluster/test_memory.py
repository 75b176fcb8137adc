"""A job that does not fit ends with figures, and its worker lives on."""

import numpy as np
import pytest
from distributed import LocalCluster

from jobrunner import ExecutionError, Job, JobRunner, Node, Session, Task
from jobrunner.memory import MemoryMeter, out_of_memory, workspace_bytes
from jobrunner.workspace import Workspace


def test_what_blobs_take_is_counted_through_containers():
    space = Workspace("a", frozenset())
    space.globals.update(x=np.zeros(1000), y=[np.zeros(500), {"k": np.zeros(250)}], s="text")
    space.private["p"] = np.zeros(125)
    assert 15_000 <= workspace_bytes(space) < 15_100


def test_the_error_names_the_largest_nodes_the_limit_and_what_to_do():
    spaces = {f"n{i}": Workspace(f"n{i}", frozenset()) for i in range(12)}
    spaces["n7"].globals["x"] = np.zeros(1 << 20)
    text = str(out_of_memory("tcp://w", MemoryMeter(lambda: 95 << 20, 100 << 20, 0.9), spaces))
    assert "tcp://w uses 95 MiB of its limit of 100 MiB, more than 90%" in text
    assert "12 nodes take 8 MiB: 'n7' 8 MiB" in text
    assert "and 2 more" in text
    assert "more workers" in text


@pytest.mark.parametrize(("limit", "share"), [(0, 0.9), (100, 0.0)])
def test_without_a_limit_or_a_share_nobody_looks(limit, share):
    assert not MemoryMeter(lambda: 1000, limit, share).is_on


def grow(blocks):
    import time

    # Slower than from the guard's share of the limit to the nanny's, 30 MiB, between two looks.
    time.sleep(0.02)
    return [*blocks, np.ones(1 << 18)]


@pytest.mark.slow
def test_a_job_that_outgrows_its_worker_ends_with_figures_and_no_worker_is_killed():
    with Job("grows") as job, Node("a"):
        with job.init_group:
            Task(lambda: [np.ones(32 << 20)], outputs="blocks", name="start")
        Task(grow, inputs="blocks", outputs="blocks")
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, memory_limit="600MiB", dashboard_address=":0"
        ) as cluster,
        cluster.get_client() as client,
        Session(client) as session,
    ):
        before = set(client.scheduler_info()["workers"])
        with pytest.raises(ExecutionError, match="of its limit of 600 MiB") as caught:
            JobRunner(job, num_epochs=1000, max_restarts=0).run(session)
        assert "'a' " in str(caught.value)
        assert set(client.scheduler_info()["workers"]) == before
        # Its workspaces go with the next job, and then there is room again.
        assert session.bind(Job("empty").compile()) is not None
