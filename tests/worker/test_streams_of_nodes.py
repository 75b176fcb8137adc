"""`Job(capture_rng=True)`: each node goes on with one stream of the global generators."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jobrunner import (
    DefinitionError,
    GlobalRNG,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    PlanMismatchError,
    Position,
    SaveEvery,
    Session,
    Task,
    TaskFailedError,
    current_task,
    epoch_limiter,
    pipe,
)
from jobrunner.data import from_records

try:
    import torch
except ImportError:
    torch = None

NAMES = ("n0", "n1", "n2")
BLOBS = ("x", "start", "many", "piped", "exit")


def draw(*_):
    drawn = (random.random(), random.gauss(), np.random.normal())
    return (*drawn, torch.rand(1).item()) if torch is not None else drawn


def note(x, made=None):
    return [*x, draw()]


def draw_beside(made):
    return draw() + made


def nothing():
    pass


def make_job(num_epochs, fail=nothing, names=NAMES, capture_rng=True):
    nodes = [Node(name, uid=uid) for name, uid in zip(names, NAMES, strict=True)]
    made = {"workspace_type": "global"}
    with Job("walk", seed=3, capture_rng=capture_rng, steps_per_epoch=2) as job:
        with job.init_group:
            Task.on_each(nodes, list, (), "x")
            Task.on_each(nodes, draw, (), "start")
            Task.on_each(nodes, lambda: from_records(range(3)), outputs="reader")
        Task.on_each(nodes, note, outputs="x", name="one")
        Task.on_each(nodes, note, outputs="x", name="two", setup={"made": draw})
        own = {"num_instances": 2, "instance_setup": {"made": draw}}
        Task.on_each(nodes, draw_beside, (), "many", **own, **made)
        for node in nodes:
            pipe("reader", draw, outputs="piped", num_threads=2, node=node, **made)
        Task(fail, node=nodes[1], name="fail")
        with job.epoch_end_group:
            Task.on_each(nodes, note, outputs="x")
        with job.exit_group:
            Task.on_each(nodes, draw, (), "exit", **made)
    epoch_limiter(job, num_epochs)
    return job


def run(job, manager=None, workers=1, **options):
    nodes = list(dict.fromkeys(task.node for task in job.init_group.tasks()))
    with Session.local(workers=workers, threads_per_worker=2, processes=False) as session:
        JobRunner(job, manager, **options).run(session)
        return [{blob: session.fetch(node[blob]) for blob in BLOBS} for node in nodes]


@pytest.fixture(autouse=True)
def _the_generators_of_this_process_go_on():
    before = random.getstate(), np.random.get_state()[1].tolist()
    yield
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


@pytest.fixture(scope="module")
def whole():
    """What an uninterrupted run draws, on one worker."""
    return run(make_job(4))


def test_a_resumed_run_on_other_workers_draws_what_an_uninterrupted_one_does(whole, tmp_path):
    manager = MultiNodeCheckpointManager(tmp_path / "runs", save=SaveEvery(steps=1))

    def fail():
        if (current_task().epoch, current_task().step) == (3, 1):
            raise OSError("gone")

    run(make_job(2), manager, workers=3)
    with pytest.raises(TaskFailedError, match="gone"):
        run(make_job(4, fail), manager, workers=2)
    assert manager.positions()[-1] == Position(2, 1)
    assert run(make_job(4), manager, workers=2) == whole


def test_a_node_draws_one_stream_in_order_of_definition_and_no_number_twice(whole, tmp_path):
    manager = MultiNodeCheckpointManager(tmp_path / "runs")
    run(make_job(1), manager)
    for name, drawn in zip(NAMES, whole, strict=True):
        stream = GlobalRNG()
        stream.load_state_dict(manager.open(0)[name].load("global_rng"))
        with stream:
            assert drawn["x"] == [draw() for _ in range(4 * (2 * 2 + 1))]
    numbers = np.concatenate([np.ravel(blob) for drawn in whole for blob in drawn.values()])
    assert len(set(numbers.tolist())) == numbers.size > 200


def test_a_recovered_run_goes_on_from_the_recorded_states(whole, tmp_path):
    def fail():
        if (current_task().epoch, current_task().attempt) == (3, 0):
            raise OSError("gone")

    job = make_job(4, fail)
    job.epoch_group.find("n1", "fail").transient_errors = (OSError,)
    assert run(job, MultiNodeCheckpointManager(tmp_path / "runs"), workers=2) == whole


def test_a_renamed_node_goes_on_with_its_stream(whole, tmp_path):
    manager = MultiNodeCheckpointManager(tmp_path / "runs")
    run(make_job(2), manager)
    assert run(make_job(4, names=("n0", "other", "n2")), manager) == whole


def test_a_job_that_captures_from_some_epoch_on_makes_the_streams_then(tmp_path):
    manager = MultiNodeCheckpointManager(tmp_path / "runs")
    with GlobalRNG():  # lets the generators of this process go on afterwards
        run(make_job(1, capture_rng=False), manager)
    with pytest.raises(PlanMismatchError, match=r"lacks blob 'global_rng' .* \(missing='init'"):
        run(make_job(2), manager)
    plan = JobRunner(make_job(2), manager, missing="init").plan_resume()
    assert "capture_rng is now True" in plan.changes
    run(make_job(2), manager, missing="init")
    fresh = run(make_job(1))[0]["x"]
    assert run(make_job(3), manager)[0]["x"][5:10] == fresh


def test_what_cannot_be_exact_is_refused():
    with pytest.raises(DefinitionError, match="got seed_global_rng and capture_rng. Choose one"):
        Job(seed_global_rng=True, capture_rng=True)
    with pytest.raises(DefinitionError, match="capture_rng: expected a bool|capture_rng must be"):
        Job(capture_rng=1)
    refused = {
        r"'a/draw' of a job with capture_rng: random is a method of a generator": [
            {"fn": random.random, "inputs": (), "name": "draw"}
        ],
        r"'a/note' of a job with capture_rng: gauss is a method of a generator": [
            {"fn": note, "setup": {"made": random.gauss}}
        ],
        r"'a/draw' names blob 'global_rng', in which a job with capture_rng": [
            {"fn": draw, "inputs": (), "outputs": "global_rng"}
        ],
        "wait for each other: 'a/draw' after 'a/note' after 'a/draw'": [
            {"fn": draw, "inputs": (), "after": "note"},
            {"fn": note},
        ],
    }
    for message, tasks in refused.items():
        with Job("refused", capture_rng=True) as job, Node("a"):
            with job.init_group:
                Task(list, (), "x")
            for task in tasks:
                Task(**task)
        with pytest.raises(DefinitionError, match=message):
            job.compile()


def test_nodes_that_are_not_saved_draw_the_same_numbers_and_have_no_stream(tmp_path):
    def make(num_epochs):
        with Job("half", capture_rng=True, nodes_to_checkpoint=["kept"]) as job:
            with job.init_group:
                Task(list, (), "x", node="kept")
                Task(draw, (), "start", node="free")
            drawn = Task(draw, (), node="free")
            Task(lambda x, its: [*x, its, draw()], {"its": drawn}, "x", node="kept", name="note")
        epoch_limiter(job, num_epochs)
        return job

    def run_to(num_epochs, manager=None):
        with Session.local(workers=2, processes=False) as session:
            JobRunner(make(num_epochs), manager).run(session)
            return session.fetch(Node("kept")["x"]), session.fetch(Node("free")["start"])

    whole, manager = run_to(3), MultiNodeCheckpointManager(tmp_path / "runs")
    run_to(1, manager)
    assert list(manager.open(1)) == ["kept"]
    assert run_to(3, manager) == whole
    assert len(set(np.ravel([whole[0]]).tolist())) == 6 * len(whole[1])
