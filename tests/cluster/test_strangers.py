"""Workers of others, which cannot import jobrunner, live and work beside sessions."""

import os
import subprocess
import sys

import pytest
from distributed import Client, LocalCluster

from jobrunner import JobRunner, Node, PlacementError, Session
from tests.jobs import At, counter

STRANGERS = """
import asyncio, importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "jobrunner":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())

from distributed import Worker

async def main():
    workers = []
    while await asyncio.to_thread(sys.stdin.readline):
        workers.append(await Worker(sys.argv[1], nthreads=1, dashboard=False, name=f"stranger-{len(workers)}"))
        print(workers[-1].address, flush=True)
    for worker in workers:
        await worker.close()

asyncio.run(main())
"""


class Strangers:
    """A process whose workers cannot import jobrunner."""

    def __init__(self, scheduler, log):
        self._log = log
        with log.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-c", STRANGERS, scheduler],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
        self.addresses = []

    def join(self):
        """One more worker joins the cluster."""
        self.process.stdin.write("join\n")
        self.process.stdin.flush()
        self.addresses.append(self.process.stdout.readline().strip())

    def check(self, client):
        """All workers live, know nothing of us, and have not warned of us."""
        for address in self.addresses:
            work = client.submit(os.getpid, workers=[address], pure=False)
            assert work.result(timeout=20) == self.process.pid
        plugins = client.run(lambda dask_worker: str(dask_worker.plugins), workers=self.addresses)
        assert "jobrunner" not in str(plugins)
        said = self._log.read_text()
        assert "Error" not in said
        assert "WARNING" not in said


@pytest.fixture
def cluster():
    """A scheduler without workers, in this process."""
    with LocalCluster(
        n_workers=0, processes=False, protocol="tcp://", dashboard_address=":0"
    ) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    with Client(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture
def strangers(cluster, tmp_path):
    strangers = Strangers(cluster.scheduler_address, tmp_path / "said")
    yield strangers
    with strangers.process as process:
        process.stdin.close()
        assert process.wait(20) == 0


def test_workers_without_jobrunner_work_on_and_get_no_nodes(cluster, client, strangers, caplog):
    def count_here(n):
        assert os.getpid() == here
        return n + 1

    here, job = os.getpid(), counter(3, count_here, nodes="abc")
    strangers.join()
    with (
        Session(client) as session,
        pytest.raises(PlacementError, match="tcp.*: jobrunner is not installed there"),
    ):
        session.bind(job.compile(), wait_seconds=0)
    strangers.check(client)

    cluster.scale(2)
    client.wait_for_workers(3, timeout=20)
    caplog.clear()
    with Session(client) as session:
        JobRunner(job, callbacks=[At(1, strangers.join)]).run(session)
        JobRunner(job).run(session)
        assert session.fetch(Node("a")["n"]) == 3
        # Each placement names those that it found.
        warned = [r.getMessage() for r in caplog.records if r.name == "jobrunner.cluster.leases"]
        assert [text.count("not installed there") for text in warned] == [1, 2]
    strangers.check(client)
    registered = client.run_on_scheduler(lambda dask_scheduler: str(dask_scheduler.worker_plugins))
    assert "jobrunner" not in registered
