"""After a loss, surviving workers return to the last recorded epoch from memory, without a read.

To prove it, the tests destroy in storage what the surviving nodes saved.
"""

import os
import signal
from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    SaveEvery,
    Session,
    Task,
    current_task,
    epoch_limiter,
)
from tests.sampling import examples

NODES = 3
SIZE = 20_000


def walk(x, *, at, flag, how, chunks):
    task = current_task()
    if task.epoch == at and not Path(flag).exists():
        Path(flag).touch()
        for path in chunks:
            Path(path).unlink()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise TimeoutError("for once")
    return x + task.rng.standard_normal(x.size)


def drift(momentum, state):
    """Changes its arguments in place: an array, a container and its items."""
    rng = current_task().rng
    momentum *= rng.random()
    state["position"] += momentum
    state["count"] += 1
    state["seen"].append(current_task().epoch)


def build(flag, *, at=None, how="kill", chunks=(), epochs=8, sizes=(SIZE,) * NODES):
    with Job("rollback", seed=3) as job:
        for i in range(NODES):
            with Node(f"n{i}") as node:
                with job.init_group:
                    Task(partial_zeros(sizes[i]), outputs="x")
                    Task(lambda: np.ones(5), outputs="momentum")
                    Task(lambda: {"position": np.zeros(5), "count": 0, "seen": []}, outputs="state")
                Task(drift, updates=["momentum", "state"])
                strike = {"at": at if i == 1 else None, "flag": str(flag), "how": how}
                Task(
                    walk,
                    inputs=node["x"],
                    outputs="x",
                    kwargs={**strike, "chunks": [str(path) for path in chunks]},
                    transient_errors=TimeoutError,
                )
        epoch_limiter(job, epochs)
    return job


class partial_zeros:  # noqa: N801  (a function with a size)
    def __init__(self, size):
        self.size = size

    def __call__(self):
        return np.zeros(self.size)


def chunks_of(path, epoch, nodes):
    return [path / f"n{i}.{epoch}" / "x" / "c.0" for i in nodes]


def state(session):
    return [
        [repr(session.fetch(Node(f"n{i}")[name])) for name in ("x", "momentum", "state")]
        + [session.fetch(Node(f"n{i}")["x"]).tobytes()]
        for i in range(NODES)
    ]


class Warnings:
    is_passive = True

    def __init__(self):
        self.told = []

    def on_warning(self, message):
        self.told.append(message)

    @property
    def damage(self):
        return [message for message in self.told if "is damaged" in message]


@pytest.fixture(scope="module")
def undisturbed(inproc_cluster, tmp_path_factory):
    with Client(inproc_cluster, set_as_default=False) as client, Session(client) as session:
        JobRunner(build(tmp_path_factory.mktemp("calm") / "flag")).run(session)
        return state(session)


def test_workers_that_survive_a_loss_read_nothing(tmp_path, undisturbed):
    ckpt, told = tmp_path / "ckpt", Warnings()
    job = build(tmp_path / "flag", at=4, chunks=chunks_of(ckpt, 3, (0, 2)))
    with (
        LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
        Session(client) as session,
    ):
        result = JobRunner(job, MultiNodeCheckpointManager(ckpt), callbacks=[told]).run(session)
        assert (result.restarts, result.epoch) == (1, 8)
        assert told.damage == []
        assert state(session) == undisturbed


@pytest.mark.parametrize(
    ("memory", "sizes", "lacking", "is_damage"),
    [
        (0.2, (SIZE,) * NODES, (0, 1, 2), False),
        (0, (SIZE,) * NODES, (1,), True),
        # All blobs of n0 and n1 fit, and all but one of n2.
        (400_000, (SIZE, SIZE, 10 * SIZE), (0, 1), False),
        (400_000, (SIZE, SIZE, 10 * SIZE), (2,), True),
    ],
    ids=["all", "no-budget", "those-that-fit", "one-too-large"],
)
def test_after_a_transient_error_kept_states_are_not_read_from_storage(
    inproc_client, tmp_path, memory, sizes, lacking, is_damage
):
    ckpt, told = tmp_path / "ckpt", Warnings()
    job = build(
        tmp_path / "flag",
        at=4,
        how="raise",
        chunks=chunks_of(ckpt, 3, lacking),
        epochs=6,
        sizes=sizes,
    )
    with dask.config.set({"jobrunner.rollback-memory": memory}), Session(inproc_client) as session:
        manager = MultiNodeCheckpointManager(ckpt)
        result = JobRunner(job, manager, callbacks=[told]).run(session)
        assert (result.restarts, result.epoch) == (1, 6)
        assert bool(told.damage) == is_damage
        found = state(session)
    calm = build(tmp_path / "calm", epochs=6, sizes=sizes)
    with Session(inproc_client) as session:
        JobRunner(calm).run(session)
        assert state(session) == found


@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.integers(1, 8),
    every=st.integers(1, 3),
    asynchronous=st.booleans(),
    memory=st.sampled_from([0, 200_000, 0.2]),
)
def test_states_from_memory_and_from_storage_are_equal(
    inproc_client, tmp_path_factory, undisturbed, at, every, asynchronous, memory
):
    path = tmp_path_factory.mktemp("run")
    manager = MultiNodeCheckpointManager(
        path / "ckpt", save=SaveEvery(epochs=every), asynchronous=asynchronous
    )
    job = build(path / "flag", at=at, how="raise")
    with dask.config.set({"jobrunner.rollback-memory": memory}), Session(inproc_client) as session:
        result = JobRunner(job, manager).run(session)
        assert (result.restarts, result.epoch) == (1, 8)
        assert state(session) == undisturbed
