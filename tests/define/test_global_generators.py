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
from jobrunner.define import global_generators

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


def test_a_block_that_cannot_begin_lets_others_begin_and_changes_nothing():
    rng = GlobalRNG(1)
    good, rng._states = rng._states, {**rng._states, "numpy": {"state": 1}}
    random.seed(3)
    before = random.getstate()
    with pytest.raises(ValueError, match="not valid"), rng:
        pytest.fail("the block has begun")
    assert random.getstate() == before
    found = []
    thread = threading.Thread(target=lambda: found.append(draw_in(GlobalRNG(2))), daemon=True)
    thread.start()
    thread.join(20)
    assert found == [draw_in(GlobalRNG(2))]
    rng._states = good
    assert draw_in(rng) == draw_in(GlobalRNG(1))


class Tensor:
    def __init__(self, values):
        self.values = values

    def numpy(self):
        return np.array(self.values, np.uint64)


class Torch:
    """As PyTorch with a GPU: it queues what it is told before CUDA is in use, the last seed last.

    A generator is its seed, and how many numbers it has drawn.
    """

    from_numpy = Tensor

    def __init__(self, monkeypatch, has_cuda=True):
        self.cuda = self.default_generator = self
        self.cpu, self.gpu = [11, 0], [12, 0]
        self.is_on, self.queued, self.seeds = False, [], []
        monkeypatch.setattr(global_generators, "_torch", lambda: self)
        monkeypatch.setattr(global_generators, "_has_cuda", lambda: has_cuda)

    def get_rng_state(self):
        return Tensor(self.cpu)

    def set_rng_state(self, state):
        self.cpu = state.numpy().tolist()

    def manual_seed(self, seed):
        self.cpu = [seed, 0]

    def initial_seed(self):
        return self.cpu[0]

    def is_initialized(self):
        return self.is_on

    def device_count(self):
        return 1

    def init(self):
        for state in [] if self.is_on else self.queued + self.seeds:
            self.gpu = list(state)
        self.is_on = True

    def get_rng_state_all(self):
        self.init()
        return [Tensor(self.gpu)]

    def set_rng_state_all(self, states):
        self.queued.append(states[0].numpy().tolist())
        self.gpu = self.queued[-1] if self.is_on else self.gpu

    def manual_seed_all(self, seed):
        self.seeds = [[seed, 0]]
        self.gpu = [seed, 0] if self.is_on else self.gpu

    def draw(self):
        self.init()
        self.gpu[1] += 1
        return tuple(self.gpu)

    def draw_in(self, rng):
        with rng:
            return self.draw()


def test_streams_on_cuda_are_of_their_own_seeds_also_if_they_began_before_cuda(monkeypatch):
    alone = []
    for seed in (1, 2):
        torch, rng = Torch(monkeypatch), GlobalRNG(seed)
        alone.append([torch.draw_in(rng) for _ in range(2)])
    assert alone[0][0] != alone[1][0]
    torch = Torch(monkeypatch)
    streams = [GlobalRNG(1), GlobalRNG(2)]
    torch.manual_seed(5)
    for i in range(2):
        assert [torch.draw_in(rng) for rng in streams] == [each[i] for each in alone]
    assert torch.draw() == (5, 1)


@pytest.mark.parametrize("is_in_use", [False, True])
def test_streams_on_cuda_go_on_in_a_new_process_also_after_one_without_cuda(monkeypatch, is_in_use):
    torch, rng = Torch(monkeypatch), GlobalRNG(1)
    first = torch.draw_in(rng)
    state = rng.state_dict()
    following = torch.draw_in(rng)

    Torch(monkeypatch, has_cuda=False)
    rng = GlobalRNG(1)
    rng.load_state_dict(state)
    with rng:
        pass
    state = rng.state_dict()

    torch, rng = Torch(monkeypatch), GlobalRNG(1)
    if is_in_use:
        torch.init()
    rng.load_state_dict(state)
    assert np.array_equal(rng.state_dict()["cuda"], state["cuda"])
    assert torch.draw_in(rng) == following != first
