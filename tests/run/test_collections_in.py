"""Dask collections, `Delayed` objects and futures as arguments of init tasks."""

import os
from collections import Counter
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import wait

from jobrunner import (
    Blob,
    DefinitionError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    PlacementError,
    Session,
    Task,
    TaskFailedError,
    epoch_limiter,
)
from tests.jobs import Listener
from tests.processes import own_session

CALLS = Counter()
NODES = ["n0", "n1", "n2", "n3"]
X = np.random.default_rng(0).random((8, 3))


def count(block, name):
    CALLS[name] += 1
    return block + 0.0


def counted(name):
    """An array whose four blocks count how often they are computed."""
    CALLS.pop(name, None)
    return da.from_array(X, chunks=(2, 3)).map_blocks(count, name, meta=X[:0])


def keep(part):
    return part


def double(part):
    part *= 2


def job_of(epochs=2, part="part", make=keep, **argument):
    """Each node keeps an argument, and doubles it at each epoch."""
    with Job("collected") as job:
        with job.init_group:
            Task.on_each(NODES, make, outputs=part, **argument)
        Task.on_each(NODES, double, updates="part")
        epoch_limiter(job, epochs)
    return job


def blocks_of(x):
    return {"kwargs": lambda i: {"part": x.blocks[i]}}


def parts_in(session):
    return np.concatenate([session.fetch(Node(name)["part"]) for name in NODES])


def test_blocks_of_a_persisted_array_are_taken_where_they_lie(inproc_session, inproc_client):
    x = inproc_client.persist(da.from_array(X, chunks=(2, 3)))
    with inproc_client.as_current():
        wait(x)
    before = {key: set(where) for key, where in inproc_client.who_has(x).items()}
    seen = Listener()
    JobRunner(job_of(**blocks_of(x)), callbacks=[seen]).run(inproc_session)
    assert np.array_equal(parts_in(inproc_session), X * 4)
    # The collection has the memory that its blocks had, unchanged.
    assert np.array_equal(inproc_client.compute(x).result(), X)
    homes = [before[x.name, i, 0] for i in range(4)]
    at_home = [seen.placements[0][name] in home for name, home in zip(NODES, homes, strict=True)]
    assert sum(at_home) >= 2  # each worker has its share of the nodes


def test_a_resume_computes_only_what_init_tasks_need_that_run_again(inproc_session, tmp_path):
    x, y = counted("saved"), counted("transient")

    def job(epochs):
        job = job_of(epochs, **blocks_of(x))
        with job.init_group:
            blob = Blob("other", transient=True)
            Task.on_each(NODES, keep, outputs=blob, name="hold", **blocks_of(y))
        return job

    manager = MultiNodeCheckpointManager(tmp_path)
    JobRunner(job(1), manager).run(inproc_session)
    assert CALLS["saved"] == CALLS["transient"] == 4
    JobRunner(job(3), manager).run(inproc_session)
    assert (CALLS["saved"], CALLS["transient"]) == (4, 8)
    assert np.array_equal(parts_in(inproc_session), X * 8)
    assert np.array_equal(inproc_session.fetch(Node("n3")["other"]), X[6:])


def look(value, deep, plain, frame=None):
    assert plain == [1, 2]
    value += deep["a"][0][1]  # it is the task's own
    return {"sum": value.sum(), "deep": deep, "named": type(frame).__name__}


def test_what_lies_deep_in_containers_arrives_too_and_is_computed_once(
    inproc_session, inproc_client
):
    x, future = counted("deep"), inproc_client.submit(lambda: 7)
    total = x.sum()
    argument = {
        "deep": {"a": [(0, total), dask.delayed(len)([1, 2])], "b": future},
        "value": x.blocks[0],
        "plain": [1, 2],
    }
    with Job("deep") as job:
        with job.init_group:
            Task.on_each(NODES[:2], look, outputs="out", kwargs=argument)
        epoch_limiter(job, 1)
    JobRunner(job).run(inproc_session)
    out = inproc_session.fetch(Node("n1")["out"])
    assert out["sum"] == pytest.approx(X[:2].sum() + 6 * X.sum())
    assert out["deep"] == {"a": [(0, pytest.approx(X.sum())), 2], "b": 7}
    assert CALLS["deep"] == 4


def rename(table):
    table["a"] += 1
    return table


def test_a_data_frame_is_the_tasks_own(inproc_session, inproc_client):
    pandas = pytest.importorskip("pandas")
    frame = inproc_client.scatter(pandas.DataFrame({"a": [1, 2]}), hash=False)
    with Job("frame") as job:
        with job.init_group:
            Task.on_each(NODES, rename, outputs="table", kwargs={"table": frame})
        epoch_limiter(job, 1)
    JobRunner(job).run(inproc_session)
    assert [list(inproc_session.fetch(Node(name)["table"]).a) for name in NODES] == [[2, 3]] * 4
    assert list(frame.result().a) == [1, 2]


def test_elsewhere_a_collection_is_refused_with_advice(inproc_session, tmp_path):
    x = counted("never")
    with Job("j") as job:
        Task(keep, kwargs={"part": {"a": [x]}}, node="n0")
        epoch_limiter(job, 1)
    says = "keep'.*'part' is a Dask Array.*only keyword arguments of init tasks are computed"
    for refuse in (job.compile, lambda: inproc_session.run(Task(keep, kwargs={"part": [x]}))):
        with pytest.raises(DefinitionError, match=says):
            refuse()
    with Job("j") as job:
        with job.init_group:
            Task(lambda: da.ones(3), outputs="lazy", node="n0", name="make")
        epoch_limiter(job, 1)
    with pytest.raises(DefinitionError, match="only keyword arguments of init tasks"):
        JobRunner(job, MultiNodeCheckpointManager(tmp_path)).run(inproc_session)
    assert not CALLS["never"]


class WrongError(Exception):
    pass


def fail_once(block):
    CALLS["failed"] += 1
    if CALLS["failed"] == 1:
        raise WrongError("the disk is upset")
    return block


def test_an_error_of_a_collection_is_that_of_its_task_and_may_be_transient(inproc_session):
    x = da.from_array(X, chunks=(8, 3)).map_blocks(fail_once, meta=X[:0])

    def run(transient_errors):
        CALLS["failed"] = 0
        with Job("j") as job:
            with job.init_group:
                about = {"kwargs": {"part": [x]}, "transient_errors": transient_errors}
                Task(keep, outputs="part", node="n0", **about)
            epoch_limiter(job, 1)
        return JobRunner(job).run(inproc_session)

    with pytest.raises(
        TaskFailedError, match="Task n0/keep: 'part'.*WrongError: the disk"
    ) as caught:
        run(transient_errors=())
    assert isinstance(caught.value.__cause__, WrongError)
    assert (caught.value.node, caught.value.task, caught.value.group) == ("n0", "keep", "init")
    assert run(transient_errors=WrongError).epoch == 1
    assert CALLS["failed"] > 1


def test_data_of_another_cluster_are_named(inproc_session):
    with Session.local(workers=1, processes=False) as other:
        client = other.client
        x = client.persist(da.from_array(X, chunks=(2, 3)))
        with pytest.raises(DefinitionError, match="its data lie on the cluster of") as caught:
            JobRunner(job_of(**blocks_of(x))).run(inproc_session)
        assert client.scheduler.address in str(caught.value)


def test_a_run_that_cannot_load_what_it_decided_on_computes_what_it_needs(inproc_session, tmp_path):
    x = counted("afresh")
    JobRunner(job_of(1, **blocks_of(x)), MultiNodeCheckpointManager(tmp_path)).run(inproc_session)
    for path in [path for path in tmp_path.rglob("c*") if path.is_file()]:
        path.write_bytes(path.read_bytes()[::-1])
    manager, seen = MultiNodeCheckpointManager(tmp_path), Listener()
    runner = JobRunner(job_of(2, **blocks_of(x)), manager, callbacks=[seen])
    assert runner.plan_resume().epoch == 1
    result = runner.run(inproc_session)
    assert (result.resumed_from, CALLS["afresh"]) == (None, 8)
    assert len(seen.placements) == 2  # no node holds resources meanwhile
    assert np.array_equal(parts_in(inproc_session), X * 4)


def test_a_collection_may_ask_for_the_resource_that_nodes_hold(monkeypatch):
    monkeypatch.setattr("jobrunner.cluster.arrivals.LEAST_IDLE_SECONDS", 0.0)

    def job():
        with dask.annotate(resources={"GPU": 1}):
            x = da.from_array(X, chunks=(2, 3)).map_blocks(count, "gpu", meta=X[:0])
        with Job("j") as job:
            with job.init_group:
                node = Node("n0", resources={"GPU": 1})
                Task(keep, outputs=Blob("part", transient=True), node=node, kwargs={"part": x})
            epoch_limiter(job, 2)
        return job

    with dask.config.set({"optimization.fuse.active": False}):
        with own_session(1, resources={"GPU": 1}) as (_, _, session):
            JobRunner(job()).run(session)
            JobRunner(job()).run(session)  # the binding before holds it until then
        with (
            own_session(1) as (_, _, session),
            pytest.raises(PlacementError, match=r"No worker has computed anything for 0.2 s"),
        ):
            JobRunner(job(), worker_wait_seconds=0.2).run(session)


class Deadly:
    """Kills the process that copies it, the first time."""

    def __init__(self, flag):
        self.flag = flag

    def __reduce__(self):
        if not os.path.exists(self.flag):
            Path(self.flag).touch()
            os._exit(1)
        return Deadly, (self.flag,)


def test_a_worker_that_dies_while_a_value_is_delivered_costs_only_time(tmp_path):
    flag = str(tmp_path / "died")
    with Job("deadly") as job:
        with job.init_group:
            kwargs = {"part": dask.delayed(Deadly)(flag)}
            Task.on_each(NODES, lambda part: 1, outputs="part", kwargs=kwargs, name="one")
        epoch_limiter(job, 1)
    with Session.local(workers=2, threads_per_worker=1) as session:
        result = JobRunner(job, MultiNodeCheckpointManager(tmp_path / "run")).run(session)
    assert Path(flag).exists()
    assert result.restarts == 1
