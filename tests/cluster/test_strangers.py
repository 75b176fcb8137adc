"""Workers of others, which cannot import jobrunner, live and work beside sessions."""

import os
import subprocess
import sys

import pytest
from distributed import Client, LocalCluster

from jobrunner import Job, JobRunner, Node, PlacementError, Session, Task

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
        plugins = client.run(lambda dask_worker: sorted(dask_worker.plugins))
        assert not any("jobrunner" in name for a in self.addresses for name in plugins[a])
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
    def ours(epoch):
        assert os.getpid() == here
        return epoch + 1

    here = os.getpid()
    with Job("count") as job:
        for name in "abc":
            with Node(name):
                with job.init_group:
                    Task(lambda: 0, outputs="x", name="zero")
                Task(ours, inputs="x", outputs="x", name="add")

    strangers.join()
    with Session(client) as session:
        plan = job.compile()
        with pytest.raises(PlacementError, match="no worker of the cluster can run") as caught:
            session.bind(plan, wait_seconds=0)
        assert f"{strangers.addresses[0]}: jobrunner is not installed there" in str(caught.value)
    strangers.check(client)

    cluster.scale(2)
    client.wait_for_workers(3, timeout=20)
    caplog.clear()

    class Join:
        def on_epoch(self, epoch, seconds, metrics):
            if epoch == 1:
                strangers.join()

    with Session(client) as session:
        JobRunner(job, num_epochs=3, callbacks=[Join()]).run(session)
        JobRunner(job, num_epochs=1).run(session)
        assert session.fetch(Node("a")["x"]) == 1
        # Each placement names those that it found.
        warned = [r.getMessage() for r in caplog.records if r.name == "jobrunner.cluster.leases"]
        assert warned[0].count("not installed there") == 1
        assert warned[-1].count("not installed there") == 2
    strangers.join()
    strangers.check(client)
    registered = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.worker_plugins)
    assert [name for name in registered if "jobrunner" in name] == []
