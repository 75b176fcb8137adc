"""`GlobalRNG`: streams of the global generators that go on from block to block."""

from __future__ import annotations

import pickle
import random
import threading

import numpy as np
import pytest

from jobrunner import (
    GlobalRNG,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Session,
    Task,
    epoch_limiter,
)

try:
    import torch
except ImportError:
    torch = None


def draw():
    drawn = (random.random(), random.gauss(), np.random.normal())
    return (*drawn, torch.rand(1).item()) if torch is not None else drawn


def draw_in(rng):
    with rng:
        return draw()


def walk(x, rng):
    return [*x, draw_in(rng)]


def make_job(num_epochs):
    with Job("walk") as job:
        for i in range(3):
            with Node(f"n{i}"):
                with job.init_group:
                    Task(list, outputs="x")
                    Task(GlobalRNG, kwargs={"seed": i}, outputs="rng")
                for name in ("first", "second"):
                    Task(walk, inputs="x", updates="rng", outputs="x", name=name)
    epoch_limiter(job, num_epochs)
    return job


def run(num_epochs, workers, directory=None):
    manager = None if directory is None else MultiNodeCheckpointManager(directory)
    with Session.local(workers=workers, threads_per_worker=2, processes=False) as session:
        JobRunner(make_job(num_epochs), manager).run(session)
        return [session.fetch(Node(f"n{i}")["x"]) for i in range(3)]


def test_streams_go_on_in_a_resumed_run_as_in_one_that_never_stopped(tmp_path):
    whole = run(3, workers=1)
    for num_epochs in (1, 3):
        resumed = run(num_epochs, 2, tmp_path / "runs")
    assert resumed == whole
    for i, drawn in enumerate(whole):
        with GlobalRNG(i):
            assert drawn == [draw() for _ in range(6)]
    assert len({number for drawn in whole for row in drawn for number in row}) == 18 * len(
        whole[0][0]
    )


def test_a_block_leaves_the_generators_as_they_were_also_after_an_error():
    random.seed(3)
    np.random.seed(3)
    expected = (random.random(), np.random.normal())
    random.seed(3)
    np.random.seed(3)
    rng, other = GlobalRNG(1), GlobalRNG(1)
    drawn = []

    def fail():
        with rng:
            drawn.append(draw())
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fail()
    assert (random.random(), np.random.normal()) == expected
    with other:
        assert drawn == [draw()]
        with other:  # goes on
            second = draw()
        assert second != drawn[0]
    assert second == draw_in(rng)


def test_its_state_is_where_the_last_block_ended_and_what_is_none_changes_nothing():
    rng = GlobalRNG()
    draw_in(rng)
    copies = [pickle.loads(pickle.dumps(rng)), GlobalRNG(5)]
    copies[1].load_state_dict(rng.state_dict())
    before = random.getstate()
    state = rng.state_dict()
    wrong = [{}, {**state, "python": np.zeros(3, np.uint32)}, {**state, "numpy": {"state": 1}}]
    for each in wrong:
        with pytest.raises((KeyError, ValueError, TypeError, AttributeError)):
            rng.load_state_dict(each)
    assert random.getstate() == before
    assert draw_in(rng) == draw_in(copies[0]) == draw_in(copies[1])


def test_blocks_take_turns_in_a_process():
    entered, found = threading.Event(), []

    def other():
        entered.set()
        found.append(draw_in(GlobalRNG(2)))

    thread = threading.Thread(target=other)
    with GlobalRNG(1):
        thread.start()
        entered.wait()
        own = [draw(), draw()]
    thread.join()
    with GlobalRNG(1):
        assert own == [draw(), draw()]
    with GlobalRNG(2):
        assert found == [draw()]
