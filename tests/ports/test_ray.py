"""What the tests of Ray Train's checkpoint manager assert, in our words."""

import random

import numpy as np
import pytest

from jobrunner import (
    Blob,
    CheckpointError,
    DefinitionError,
    Job,
    JobRunner,
    KeepAll,
    KeepBest,
    KeepLast,
    Node,
    Task,
    current_task,
    epoch_limiter,
)
from tests.ports.counting import counter, kept, manager_of

TEN = {epoch: {"iter": epoch} for epoch in range(10)}


def test_without_a_limit_all_are_kept():
    assert kept(KeepAll(), TEN, after_each=True) == list(range(10))


def test_without_a_score_the_latest_are_kept():
    assert kept(KeepLast(2), TEN, after_each=True) == [8, 9]


def test_to_keep_none_is_refused():
    with pytest.raises(DefinitionError):
        KeepLast(0)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_and_the_latest_are_kept(mode):
    scores = random.Random(0).sample(range(100), 10)
    metrics = {epoch: {"score": score} for epoch, score in enumerate(scores)}
    best = sorted(metrics, key=lambda it: scores[it], reverse=mode == "max")[:2]
    found = kept(KeepBest("score", 2, mode=mode), metrics, after_each=True)
    assert found == sorted({*best, 9})


def test_the_latest_stays_until_the_next_however_bad(inproc_session, tmp_path):
    policy = KeepBest("loss", 2, mode="max")
    for limit, expected in ((3, [1, 2, 3]), (4, [1, 2, 3, 4])):  # 3: where the run began
        job = counter(limit, losses={1: 3.0, 2: 2.0, 3: 1.0, 4: 0.0})
        manager = manager_of(tmp_path, keep=policy)
        JobRunner(job, manager).run(inproc_session)
        assert manager.epochs() == expected
    uninterrupted = manager_of(tmp_path / "2", keep=policy)
    job = counter(4, losses={1: 3.0, 2: 2.0, 3: 1.0, 4: 0.0})
    JobRunner(job, uninterrupted).run(inproc_session)
    assert uninterrupted.epochs() == [1, 2, 4]


def test_a_score_may_have_slashes_in_its_name(inproc_session, tmp_path):
    def step(n):
        current_task().report(**{"nested/sub/attr": -n})
        return n + 1

    with Job("nested") as job, Node("a"):
        with job.init_group:
            Task(int, outputs="n", name="zero")
        Task(step, outputs="n")
    epoch_limiter(job, 3)
    manager = manager_of(tmp_path, keep=KeepBest("nested/sub/attr", mode="max"))
    JobRunner(job, manager).run(inproc_session)
    assert manager.epochs() == [1, 3]


def test_another_manager_of_the_directory_is_as_good(inproc_session, tmp_path):
    options = {"keep": KeepBest("loss", 1, mode="max")}
    for limit in (1, 2):
        manager = manager_of(tmp_path, **options)
        JobRunner(counter(limit), manager).run(inproc_session)
        other = manager_of(tmp_path, **options)
        assert (other.epochs(), other.latest()) == (manager.epochs(), limit)
        assert other.record(limit) == manager.record(limit)


@pytest.mark.parametrize("text", ['{"dummy": "1"}', '{"dummy": "1", "dict": {"key": '])
def test_a_damaged_log_is_refused(inproc_session, tmp_path, text):
    manager = manager_of(tmp_path)
    JobRunner(counter(1), manager).run(inproc_session)
    for entry in (tmp_path / "ckpt" / "_log").iterdir():
        entry.write_text(text)
    with pytest.raises(CheckpointError, match="_log"):
        JobRunner(counter(2), manager_of(tmp_path)).run(inproc_session)


def test_all_nodes_begin_with_the_latest_checkpoint(inproc_session, tmp_path):
    def build(limit):
        with Job("replicas") as job:
            for i in range(4):
                with Node(f"trainer:{i}"):
                    with job.init_group:
                        Task(lambda: np.zeros(2), outputs=Blob("w", replicated=True), name="w")
                    Task(lambda w: w + 1, outputs="w", name="train")
        epoch_limiter(job, limit)
        return job

    manager = manager_of(tmp_path)
    assert JobRunner(build(2), manager).run(inproc_session).resumed_from is None
    assert JobRunner(build(3), manager).run(inproc_session).resumed_from == 2
    for i in range(4):
        np.testing.assert_array_equal(inproc_session.fetch(Node(f"trainer:{i}")["w"]), [3, 3])


def test_an_epoch_whose_score_arrives_later_is_pinned_then(inproc_session, tmp_path):
    manager = manager_of(tmp_path, keep=KeepLast(2))
    scores, best = {1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0}, 0
    for epoch, score in scores.items():
        JobRunner(counter(epoch + 1), manager).run(inproc_session)  # the run is one epoch ahead
        if score < scores.get(best, np.inf):
            other = manager_of(tmp_path)  # of the validation, in another process
            other.pin(epoch, "best")
            if best:
                other.unpin(best, "best")
            best = epoch
    assert (best, manager.epochs()) == (2, [2, 4, 5])
