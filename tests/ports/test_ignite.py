"""What the tests of Ignite's `Checkpoint` assert, in our words."""

import numpy as np
import pytest

from jobrunner import (
    DefinitionError,
    Job,
    JobRunner,
    KeepAll,
    KeepBest,
    KeepLast,
    Node,
    SaveEvery,
    Task,
    TaskFailedError,
    epoch_limiter,
)
from jobrunner.callbacks import EarlyStopping
from tests.ports.counting import counter, kept, manager_of


class Momentum:
    """An optimizer that changes the weights that it was made for."""

    def __init__(self, weights):
        self.weights, self.velocity, self.steps = weights, np.zeros(3), 0

    def step(self):
        self.steps += 1
        self.velocity = 0.9 * self.velocity + self.weights - 1
        self.weights -= 0.1 * self.velocity

    def state_dict(self):
        return {"velocity": self.velocity, "steps": self.steps}

    def load_state_dict(self, state):
        self.velocity, self.steps = state["velocity"], state["steps"]


def fit(weights, optimizer):
    optimizer.weights = weights
    optimizer.step()


def fitting(epochs, shape=3):
    with Job("fitting") as job, Node("a"):
        with job.init_group:
            Task(lambda: np.full(shape, 5.0), outputs="weights", name="weights")
            Task(Momentum, inputs="weights", outputs="optimizer", name="optimizer")
        Task(fit, updates=["weights", "optimizer"])
        epoch_limiter(job, epochs)
    return job


def test_what_has_no_state_to_save_is_named_before_epoch_1(inproc_session, tmp_path):
    ran = []
    with Job("wrong") as job, Node("a"):
        with job.init_group:
            Task(object, outputs="model", name="make")
        Task(lambda: ran.append(1), name="train")
        epoch_limiter(job, 1)
    with pytest.raises(DefinitionError, match="'model'"):
        JobRunner(job, manager_of(tmp_path)).run(inproc_session)
    assert not ran


@pytest.mark.parametrize(("policy", "expected"), [(KeepLast(2), [7, 8]), (KeepAll(), range(9))])
def test_the_last_n_or_all_are_kept(policy, expected):
    assert kept(policy, {epoch: {} for epoch in range(9)}, after_each=True) == list(expected)


def test_the_best_n_by_a_score_are_kept():
    scores = {1: 1.2, 2: -2.0, 3: 3.1, 4: -4.0}
    metrics = {epoch: {"score": score} for epoch, score in scores.items()}
    assert kept(KeepBest("score", 2, mode="max"), metrics) == [1, 3]
    assert kept(KeepBest("score", 2, mode="max"), metrics, after_each=True) == [1, 3, 4]


def test_equal_scores_are_removed_once_each_and_the_newer_is_better():
    metrics = {epoch: {"score": score} for epoch, score in enumerate([0, 1, 1, 2, 3])}
    assert kept(KeepBest("score", 2, mode="max"), metrics, after_each=True) == [3, 4]
    same = {epoch: {"score": 1} for epoch in range(4)}
    assert kept(KeepBest("score", 2, mode="max"), same, after_each=True) == [2, 3]


def test_a_score_that_is_no_number_is_refused_where_it_is_reported(inproc_session, tmp_path):
    job = counter(1, losses={1: {"1": 1}})
    with pytest.raises(TaskFailedError, match="'loss' as dict; a metric must be a number"):
        JobRunner(job, manager_of(tmp_path, keep=KeepBest("loss"))).run(inproc_session)
    assert kept(KeepBest("loss"), {1: {"loss": 1.0}, 2: {"loss": "a word"}}) == [1]


def test_the_sign_of_a_score_is_its_mode():
    metrics = {1: {"acc": 0.9, "loss": 0.123}, 2: {"acc": 0.8, "loss": 0.1}}
    assert kept(KeepBest("acc", mode="max"), metrics) == [1]
    assert kept(KeepBest("loss"), metrics) == [2]
    assert kept(KeepBest(lambda it: -it["loss"], mode="max"), metrics) == [2]


def test_weights_and_optimizer_continue_together(inproc_session, tmp_path):
    weights = Node("a")["weights"]
    JobRunner(fitting(6), manager_of(tmp_path / "once")).run(inproc_session)
    expected = inproc_session.fetch(weights)
    for epochs in (2, 6):
        manager = manager_of(tmp_path, keep=KeepLast(1))
        JobRunner(fitting(epochs), manager).run(inproc_session)
    np.testing.assert_array_equal(inproc_session.fetch(weights), expected)
    assert manager.open(6)["a"]["optimizer"]["steps"] == 6
    assert manager.epochs() == [2, 6]  # and the epoch that the run began from


def test_early_stopping_resumes_with_its_patience(inproc_session, tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.0, 5: 2.0}
    ended = []
    for name, limits in (("once", [9]), ("in parts", [3, 9])):
        for limit in limits:
            job = counter(limit, losses=losses)
            stopping = EarlyStopping("loss", patience=2)
            runner = JobRunner(job, manager_of(tmp_path / name), callbacks=[stopping])
            result = runner.run(inproc_session)
        ended.append(result.epoch)
    assert ended == [4, 4]


def test_some_objects_load_into_another_job(inproc_session, tmp_path):
    manager = manager_of(tmp_path)
    JobRunner(fitting(2), manager).run(inproc_session)
    saved = manager.open(2)["a"].load("weights")
    with Job("larger") as larger, Node("a"):
        with larger.init_group:
            Task(lambda: saved, outputs="weights", name="weights")
            Task(lambda: np.zeros(7), outputs="head", name="head")
        Task(lambda weights, head: head + weights.sum(), outputs="head", name="train")
        epoch_limiter(larger, 1)
    JobRunner(larger).run(inproc_session)
    assert (inproc_session.fetch(Node("a")["head"]) == saved.sum()).all()


class Unwilling(Momentum):
    def state_dict(self):
        if self.steps == 2:
            raise OSError("no room")
        return super().state_dict()


def test_a_save_that_fails_leaves_the_one_before(inproc_session, tmp_path):
    with Job("failing") as job, Node("a"):
        with job.init_group:
            Task(lambda: np.zeros(3), outputs="weights", name="weights")
            Task(Unwilling, inputs="weights", outputs="optimizer", name="optimizer")
        Task(fit, updates=["weights", "optimizer"])
        epoch_limiter(job, 2)
    manager = manager_of(tmp_path)
    with pytest.raises(DefinitionError, match="no room"):
        JobRunner(job, manager).run(inproc_session)
    assert manager.epochs() == [0, 1]
    manager.verify(1)


def test_each_save_is_told(inproc_session, tmp_path):
    class Saved:
        def __init__(self):
            self.epochs = []

        def on_save(self, report):
            self.epochs.append(report.epoch)

    saved = Saved()
    manager = manager_of(tmp_path, save=SaveEvery(epochs=2), keep=KeepLast(2))
    JobRunner(counter(5), manager, callbacks=[saved]).run(inproc_session)
    assert (saved.epochs, manager.epochs()) == ([0, 2, 4, 5], [4, 5])
