"""Keepers capture the workspaces between two epochs, and say how much they can take."""

import threading

import numpy as np
import pytest

from jobrunner import Job, Node, Session, Task
from jobrunner.errors import DefinitionError, ExecutionError
from jobrunner.positions import Position
from jobrunner.workspace import capture, view

closed_with = []


class Captures:
    """Keeps the blobs of each captured position."""

    def __init__(self):
        self.kept = {}

    def capture(self, workspaces, *, at):
        assert threading.current_thread().name.startswith("jobrunner-")
        for space in workspaces.values():
            self.kept[at] = {name: capture(value) for name, value in space.globals.items()}

    def capture_bytes(self):
        return 8 * len(self.kept)

    def close(self):
        closed_with.append(sorted(self.kept))


class Refusing(Captures):
    def capture(self, workspaces, *, at):
        raise DefinitionError(f"cannot keep {at}")


def kept_values(keeper, workspaces):
    return {at.epoch: view(blobs["x"]).tolist() for at, blobs in keeper.kept.items()}


def add_one(x):
    x += 1


@pytest.fixture
def session():
    with Session.local(workers=1, processes=False) as session:
        yield session


def bind(session, *, steps=1):
    node = Node("a")
    with Job("job", steps_per_epoch=steps) as job:
        with job.init_group:
            Task(lambda: np.zeros(1), outputs="x", node=node)
        Task(add_one, updates=["x"], node=node)
    binding = session.bind(job.compile())
    binding.run("init", epoch=0)
    return binding


def kept(binding):
    [values] = binding.apply(kept_values, to_keeper=True, channel="keeper").values()
    return {at: value for at, [value] in values.items()}


def batch(binding, first, count, **options):
    return [epoch for epoch, _ in binding.run_epochs(first, count, 60, **options)]


def test_due_epochs_of_a_batch_are_captured_before_the_next_begins(session):
    binding = bind(session)
    binding.keep(Captures)
    assert batch(binding, 1, 7, captures=(2, 3)) == [1, 2, 3, 4, 5, 6, 7]
    assert kept(binding) == {2: 2.0, 5: 5.0}
    assert list(binding.capture_bytes.values()) == [16]
    binding = bind(session, steps=3)
    binding.keep(Captures)
    for epoch in (1, 2):
        batch(binding, epoch, 1, captures=(2, 1))
    assert kept(binding) == {2: 6.0}


def test_without_a_keeper_nothing_is_captured_and_calls_say_so(session):
    binding = bind(session)
    batch(binding, 1, 2, captures=(1, 1))
    assert binding.capture_bytes == {}
    with pytest.raises(ExecutionError, match=r"Binding\.keep"):
        kept(binding)


def test_an_error_of_a_capture_ends_the_run_at_its_epoch(session):
    binding = bind(session)
    binding.keep(Refusing)
    with pytest.raises(DefinitionError, match="cannot keep 2"):
        batch(binding, 1, 5, captures=(2, 1))
    assert session.fetch(Node("a")["x"]) == 2.0


def test_a_keeper_is_closed_when_another_comes_and_when_the_binding_ends(session):
    closed_with.clear()
    binding = bind(session)
    for _ in range(2):
        binding.keep(Captures)
        batch(binding, 1, 1, captures=(1, 1))
    assert closed_with == [[Position(1)]]
    binding.release()
    assert closed_with == [[Position(1)]] * 2
