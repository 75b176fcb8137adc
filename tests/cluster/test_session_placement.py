"""Placement with `Node(workers=, resources=)`, beside other sessions and tasks."""

import time

import pytest
from distributed import get_worker

from jobrunner import Job, Node, PlacementError, Session, Task
from jobrunner.worker import host
from tests.processes import own_session


@pytest.fixture(scope="module")
def cluster():
    """Two workers by the names "plain" and "gpu"; the second has two GPUs."""
    from distributed import SpecCluster, Worker
    from distributed.scheduler import Scheduler

    workers = {
        "plain": {"cls": Worker, "options": {"nthreads": 2}},
        "gpu": {"cls": Worker, "options": {"nthreads": 2, "resources": {"GPU": 2}}},
    }
    scheduler = {"cls": Scheduler, "options": {"dashboard_address": ":0", "protocol": "inproc://"}}
    with SpecCluster(workers=workers, scheduler=scheduler) as cluster:
        yield cluster


def name_of_worker():
    return str(get_worker().name)


def where(session, node):
    return session.run(Task(name_of_worker, node=node))


def job_of(*nodes):
    with Job() as job, job.init_group:
        for node in nodes:
            Task(lambda: 1, outputs="n", node=node)
    return job


def test_a_missing_worker_is_awaited_and_then_an_error_lists_the_others(session):
    plan = job_of(Node("n", workers="other")).compile()
    started = time.monotonic()
    with pytest.raises(PlacementError, match=r"'n'.*\['other'\].*'gpu'.*'plain'|'plain'.*'gpu'"):
        session.bind(plan, wait_seconds=0.3)
    assert 0.3 <= time.monotonic() - started < 3


def test_a_lease_takes_the_resources_of_all_nodes_of_its_worker(client, session):
    session.bind(job_of(*(Node(name, resources={"GPU": 1}) for name in "ab")).compile())
    with Session(client) as other, pytest.raises(PlacementError, match="other sessions.*GPU"):
        other.bind(job_of(Node("c", resources={"GPU": 1})).compile(), wait_seconds=0.3)


def test_dask_gives_other_tasks_only_the_resources_left(client, session):
    assert where(session, Node("a", resources={"GPU": 2})) == "gpu"
    future = client.submit(name_of_worker, resources={"GPU": 1}, pure=False)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.3)
    session.close()
    assert future.result(timeout=10) == "gpu"


def test_leases_take_no_thread_from_other_tasks(client, session):
    where(session, Node("n0"))
    where(session, Node("n1"))
    futures = client.map(lambda i: i, range(20), pure=False)
    assert client.gather(futures) == list(range(20))


def test_nodes_placed_later_need_no_other_lease_of_their_worker(client, session):
    for i in range(4):
        where(session, Node(f"n{i}"))
    name = session._binding.name
    leases = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks))
    assert len([key for key in leases if name in key]) == 2


def test_a_worker_that_starts_in_time_is_used():
    with own_session(0) as (cluster, _, session):
        with pytest.raises(PlacementError, match="no workers"):
            session.bind(job_of(Node("n")).compile(), wait_seconds=0)
        cluster.scale(1)
        binding = session.bind(job_of(Node("n")).compile(), wait_seconds=20)
        assert list(binding.placement) == ["n"]


def test_a_worker_in_use_is_not_scaled_away_and_the_cluster_is_not_idle():
    idle = {"idle_timeout": "300ms"}
    with own_session(1, scheduler_kwargs=idle) as (cluster, client, session):
        binding = session.bind(job_of(Node("n")).compile())
        adaptive = cluster.adapt(minimum=0, maximum=1, interval="20ms", wait_count=1)
        time.sleep(1.0)  # for both to decide many times over
        assert list(client.scheduler_info()["workers"]) == list(binding.placement.values())
        binding.run("init", epoch=0)
        adaptive.stop()


def test_nodes_go_elsewhere_if_a_worker_cannot_host_them(session, monkeypatch):
    async def host_on_plain(binding, dask_worker):
        if dask_worker.name != "plain":
            raise RuntimeError("no room")
        return await host(binding, dask_worker)

    monkeypatch.setattr("jobrunner.cluster.messenger.host", host_on_plain)
    session.bind(job_of("a", "b").compile(), wait_seconds=20)
    assert [where(session, name) for name in "ab"] == ["plain", "plain"]


def test_after_a_cut_nodes_share_workers_that_reach_each_other(session, monkeypatch):
    def find_others(addresses, wait_seconds, dask_worker):
        return [address for address in addresses if address != dask_worker.address]

    binding = session.bind(job_of("a", "b").compile())
    assert len(set(binding.placement.values())) == 2
    monkeypatch.setattr("jobrunner.cluster.leases.find_cut", find_others)
    binding._members.cut.add(binding.placement["a"])  # as a worker has reported
    assert len(set(session.bind(binding.plan).placement.values())) == 1
