"""A run that fails saves the last state in which an epoch or step had ended."""

import numpy as np
import pytest

from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Position,
    SaveEvery,
    Task,
    TaskFailedError,
    current_task,
    epoch_limiter,
)
from jobrunner.checkpoint import inspect_directory


class Model:
    """An object that is saved by its state, and changes in place."""

    def __init__(self):
        self.weights = np.zeros(50)

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights[...] = state["weights"]


def change(big, small, model, log):
    big += current_task().rng.random()
    small[1] += 1
    model.weights += current_task().rng.random(50)
    log["epochs"].append(current_task().epoch)


def build(limit, fails_at=None, error=ZeroDivisionError, transient=(), **options):
    """Both nodes change all their blobs in each step; then `b` fails at (epoch, step)."""

    def fail(big, other):
        me = current_task()
        if (me.epoch, me.step) == fails_at and not me.attempt:
            raise error("by hand")

    with Job("changing", **options) as job:
        for name in "ab":
            with Node(name), job.init_group:
                Task(lambda: np.zeros(200_000), outputs="big", name="big")
                Task(lambda: np.zeros(3), outputs="small", name="small")
                Task(Model, outputs="model", name="model")
                Task(lambda: {"epochs": []}, outputs="log", name="log")
            with Node(name):
                Task(change, updates=["big", "small", "model", "log"])
        Task(fail, inputs=["big", Node("a")["big"]], node="b", transient_errors=transient)
        epoch_limiter(job, limit)
    return job


def content(manager, epoch):
    checkpoint = manager.open(epoch)
    return {
        (node, name): checkpoint[node].load(name)
        for node in checkpoint.nodes
        for name in checkpoint[node]
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_equal(found[key], value, err_msg=str(key))


@pytest.fixture
def runs(inproc_session, tmp_path):
    def run(directory, *args, fails=None, runner=(), **options):
        job = build(*args, **{k: options.pop(k) for k in ("steps_per_epoch",) if k in options})
        manager = MultiNodeCheckpointManager(tmp_path / directory, **options)
        if fails is None:
            return manager, JobRunner(job, manager).run(inproc_session)
        with pytest.raises(fails):
            JobRunner(job, manager, **dict(runner)).run(inproc_session)
        return manager, None

    return run


def test_the_state_before_the_failed_epoch_is_saved(runs):
    every, _ = runs("every", 9)
    options = {"save": SaveEvery(epochs=5)}
    manager, _ = runs("without", 9, (8, 0), fails=TaskFailedError, **options)
    assert manager.epochs() == [0, 5]
    options["save_on_failure"] = True
    manager, _ = runs("with", 9, (8, 0), fails=TaskFailedError, **options)
    assert manager.epochs() == [0, 5, 7]
    manager.verify(7)
    assert_same(content(manager, 7), content(every, 7))
    manager, result = runs("with", 9, **options)
    assert result.resumed_from == 7
    assert_same(content(manager, 9), content(every, 9))
    assert {finding.status for finding in inspect_directory(manager.directory)} == {"live"}


def test_with_saves_in_the_background_the_newest_copy_is_saved(runs):
    every, _ = runs("every", 9)
    options = {"save": SaveEvery(epochs=100), "asynchronous": True, "save_on_failure": True}
    manager, _ = runs("with", 9, (8, 0), fails=TaskFailedError, **options)
    # Nothing is copied while epoch 0 is being written.
    newest = manager.positions()[-1]
    assert manager.positions() in ([Position(0)], [Position(0), newest])
    assert_same(content(manager, newest), content(every, newest))


def test_the_state_before_the_failed_step_is_saved(runs):
    every, _ = runs("every", 2, steps_per_epoch=4, save=SaveEvery(steps=1))
    options = {"steps_per_epoch": 4, "save": SaveEvery(epochs=5), "save_on_failure": True}
    manager, _ = runs("with", 2, (2, 2), fails=TaskFailedError, **options)
    assert manager.positions() == [Position(0), Position(1, 2)]
    manager, _ = runs("with", 2, **options)
    assert_same(content(manager, 2), content(every, 2))


def test_a_state_that_is_recorded_is_not_saved_again(runs):
    manager, _ = runs("k", 9, (6, 0), fails=TaskFailedError, save_on_failure=True)
    assert manager.epochs() == [0, 1, 2, 3, 4, 5]
    assert len(manager.history()) == 6


def test_a_transient_error_costs_one_epoch_only(inproc_session, tmp_path):
    every = MultiNodeCheckpointManager(tmp_path / "every")
    JobRunner(build(9), every).run(inproc_session)

    class Told:
        def on_recovery(self, epoch, step, seconds):
            self.at = epoch

    told = Told()
    manager = MultiNodeCheckpointManager(
        tmp_path / "k", save=SaveEvery(epochs=100), save_on_failure=True
    )
    job = build(9, (8, 0), OSError, transient=(OSError,))
    result = JobRunner(job, manager, callbacks=[told]).run(inproc_session)
    assert (told.at, result.restarts, manager.epochs()) == (7, 1, [0, 7, 9])
    assert_same(content(manager, 9), content(every, 9))


def test_claims_of_states_that_were_not_needed_are_settled(runs):
    manager, _ = runs("k", 30, save=SaveEvery(epochs=100), save_on_failure=True)
    assert manager.epochs() == [0, 30]
    assert not manager.directory.log.refresh().chores
