"""What tasks draw from the global generators of Python, NumPy and PyTorch."""

from __future__ import annotations

import contextvars
import random
import threading
from functools import partial

import numpy as np
import pytest

from jobrunner import (
    DefinitionError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Session,
    Task,
    epoch_limiter,
    pipe,
    seeded,
)
from jobrunner.data import from_records
from jobrunner.worker.task_context import FRAME
from tests.jobs import counter
from tests.worker.test_task_context import make

try:
    import torch
except ImportError:
    torch = None

NODES = [Node(f"n{i}") for i in range(3)]
BLOBS = ("x", "twice", "instances", "piped")


def draw(*_):
    drawn = (random.random(), np.random.random())
    return (*drawn, torch.rand(1).item()) if torch is not None else drawn


def walk(x, first, then):
    return [*x, first, draw(), then]


def begin():
    yield draw()


def make_job(num_epochs, *, seed_global_rng=True, wrap=lambda fn: fn):
    with Job("walk", seed_global_rng=seed_global_rng) as job:
        with job.init_group:
            Task.on_each(NODES, wrap(lambda: [draw()]), outputs="x")
        kept = {"workspace_type": "global"}
        setup = {"setup": {"first": wrap(draw)}, "instance_setup": {"then": wrap(begin)}}
        Task.on_each(NODES, wrap(walk), outputs="x", **setup)
        Task.on_each(NODES, wrap(lambda: [draw(), draw()]), outputs="twice", **kept)
        Task.on_each(NODES, wrap(draw), outputs="instances", num_instances=3, **kept)
        for node in NODES:
            Task(lambda: from_records(range(5)), outputs="reader", node=node)
            pipe("reader", wrap(draw), outputs="piped", num_threads=3, node=node, **kept)
    epoch_limiter(job, num_epochs)
    return job


@pytest.fixture(autouse=True)
def _the_generators_of_this_process_go_on():
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    yield
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def run(job, directory=None, workers=2):
    manager = None if directory is None else MultiNodeCheckpointManager(directory)
    with Session.local(workers=workers, threads_per_worker=2, processes=False) as session:
        JobRunner(job, manager).run(session)
        return {(node.name, blob): session.fetch(node[blob]) for node in NODES for blob in BLOBS}


def flat(value):
    if isinstance(value, float):
        return [value]
    return [number for item in value for number in flat(item)]


@pytest.mark.parametrize("how", ["job", "decorator"])
def test_a_resumed_run_on_other_workers_draws_what_an_uninterrupted_one_does(how, tmp_path):
    options = {} if how == "job" else {"seed_global_rng": False, "wrap": seeded}
    whole = run(make_job(4, **options), workers=1)
    for num_epochs in (2, 4):
        resumed = run(make_job(num_epochs, **options), tmp_path / "runs", workers=2)
    assert resumed == whole
    numbers = flat(list(whole.values()))
    assert len(set(numbers)) == len(numbers) > 100


def test_calls_of_a_task_draw_different_numbers_and_those_outside_of_it_whatever_comes():
    shuffle = seeded(lambda: random.random())
    token = FRAME.set([lambda step, instance: make(instance=instance), None, 0, None])
    try:
        first = [shuffle(), shuffle()]
        FRAME.set([lambda step, instance: make(instance=instance), None, 0, None])
        assert [shuffle(), shuffle()] == first
        assert first[0] != first[1]
        nested = seeded(lambda: (random.random(), shuffle(), random.random()))
        assert len({*nested(), *first}) == 5
    finally:
        FRAME.reset(token)
    state = random.getstate()
    assert shuffle() == random.Random(1).random()
    random.setstate(state)


@pytest.mark.parametrize(
    "method",
    [
        random.random,
        np.random.normal,
        partial(np.random.normal, 1),
        np.random.default_rng(1).random,
    ],
)
def test_a_method_of_a_generator_is_refused_because_workers_get_a_copy(method):
    with pytest.raises(DefinitionError, match="seeded: .* is a method of a generator"):
        seeded(method)
    with Job("drawing", seed_global_rng=True) as job:
        Task(method, inputs=(), outputs="x", node="a", name="draw")
    epoch_limiter(job, 1)
    with pytest.raises(DefinitionError, match="'a/draw' of a job with seed_global_rng: .* copy"):
        job.compile()


def test_calls_take_turns_in_a_process():
    ended = threading.Event()

    def enter():
        FRAME.set([lambda step, instance: make(), None, 1, None])
        seeded(ended.set)()

    def hold():
        thread.start()
        assert not ended.wait(0.05)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(enter,))
    token = FRAME.set([lambda step, instance: make(), None, 0, None])
    try:
        seeded(hold)()
    finally:
        FRAME.reset(token)
    thread.join()
    assert ended.is_set()


def test_a_resume_says_that_other_numbers_are_drawn(tmp_path, inproc_session):
    def runner(seed_global_rng):
        job = counter(1, seed_global_rng=seed_global_rng)
        return JobRunner(job, MultiNodeCheckpointManager(tmp_path / "runs"))

    runner(False).run(inproc_session)
    assert runner(True).plan_resume().changes == ("seed_global_rng was False and is True",)
