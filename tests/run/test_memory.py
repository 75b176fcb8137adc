"""A job that does not fit into memory ends with figures, and its worker survives."""

import dask
import numpy as np
import pytest
from distributed import LocalCluster

from jobrunner import (
    ExecutionError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    PlacementError,
    Session,
    Task,
)


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, memory_limit="600MiB", dashboard_address=":0"
        ) as cluster,
        cluster.get_client() as client,
    ):
        yield client


def grow(blocks):
    import time

    # At most 50 MiB a second, so that the guard looks many times between its share of the limit and
    # the nanny's, however busy the machine.
    time.sleep(0.02)
    blocks.append(np.ones(1 << 17))


def test_a_job_that_outgrows_its_worker_ends_with_figures_and_no_worker_is_killed(client):
    workers = set(client.scheduler_info()["workers"])
    with Job("grows") as job, Node("a"):
        with job.init_group:
            Task(lambda: [np.ones(45 << 20)], outputs="blocks", name="start")
        Task(grow, updates="blocks")
    with Session(client) as session:
        with pytest.raises(ExecutionError, match="of its limit of 600.00 MiB") as caught:
            JobRunner(job, num_epochs=1000, max_restarts=0).run(session)
        assert set(client.scheduler_info()["workers"]) == workers
        # The next job replaces the workspaces, which makes room again.
        assert session.bind(Job("empty").compile()) is not None
    assert "is about to exceed its memory limit" in str(caught.value)
    assert "'a' " in str(caught.value)


def keep(x):
    return x


def test_an_epoch_that_does_not_fit_the_workers_is_not_loaded(client, tmp_path):
    def runner(num_epochs):
        with Job("large") as job:
            for name in "ab":
                with Node(name):
                    with job.init_group:
                        Task(lambda: np.ones(1 << 20), outputs="x")
                    Task(keep, inputs="x", outputs="x")
        manager = MultiNodeCheckpointManager(str(tmp_path))
        return JobRunner(job, manager, num_epochs=num_epochs)

    with Session(client) as session:
        assert runner(1).run(session).epoch == 1
    with dask.config.set({"jobrunner.memory-share": 0.02}), Session(client) as session:
        with pytest.raises(PlacementError, match="Epoch 1 of .* does not fit") as caught:
            runner(2).run(session)
        with pytest.raises(PlacementError, match="Epoch 0 of .* does not fit"):
            runner(2).replay(session, 1)
        assert "16.00 MiB in 2 nodes and a limit of 600.00 MiB: 'a' 8.00 MiB, 'b' 8.00 MiB" in str(
            caught.value
        )
    with Session(client) as session:
        assert runner(2).run(session).resumed_from == 1
