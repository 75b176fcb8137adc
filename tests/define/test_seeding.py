"""Seeding the global random generators for one call."""

import random

import numpy as np
import pytest

from jobrunner.define import seeded_generators, seeding

KEY, OTHER = bytes(range(32)), bytes(32)


def draw():
    return random.random(), random.gauss(0, 1), float(np.random.normal())


def test_afterwards_the_generators_are_as_they_were_also_after_an_error():
    draw()  # of two numbers of `gauss`, the second is kept
    states = random.getstate(), np.random.get_state(legacy=False)
    expected = draw()
    random.setstate(states[0])
    np.random.set_state(states[1])
    drawn = []

    def fail(key):
        with seeded_generators(key):
            drawn.append(draw())
            raise OSError("gone")

    for key in (KEY, OTHER, KEY):
        with pytest.raises(OSError, match="gone"):
            fail(key)
    assert drawn[0] == drawn[2] != drawn[1]
    assert draw() == expected


class Torch:
    """As PyTorch with a GPU: CUDA is seeded when it is first in use. A generator is its seed."""

    def __init__(self):
        self.cuda = self.default_generator = self
        self.cpu, self.gpu = 11, 12
        self.is_on = False
        self.gpu_seed = 12  # once CUDA is in use

    def get_rng_state(self):
        return self.cpu

    def set_rng_state(self, state):
        self.cpu = state

    def manual_seed(self, seed):
        self.cpu = seed

    def initial_seed(self):
        return self.cpu

    def is_initialized(self):
        return self.is_on

    def get_rng_state_all(self):
        return [self.gpu]

    def set_rng_state_all(self, states):
        self.gpu = states[0]

    def manual_seed_all(self, seed):
        self.gpu_seed = seed
        if self.is_on:
            self.gpu = seed

    def use_cuda(self):
        if not self.is_on:
            self.is_on, self.gpu = True, self.gpu_seed
        return self.gpu


@pytest.mark.parametrize("is_in_use", [False, True])
def test_cuda_is_seeded_also_if_the_call_is_the_first_to_use_it(monkeypatch, is_in_use):
    torch = Torch()
    monkeypatch.setattr(seeding, "_torch", lambda: torch)
    monkeypatch.setattr(seeding, "_has_cuda", lambda: True)
    if is_in_use:
        torch.use_cuda()
    seed = int.from_bytes(KEY[:8], "little")
    with seeded_generators(KEY):
        assert (torch.cpu, torch.use_cuda()) == (seed, seed)
    assert (torch.cpu, torch.use_cuda()) == (11, 12 if is_in_use else 11)
