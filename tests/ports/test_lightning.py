"""What the tests of Lightning's `ModelCheckpoint` assert, in our words."""

import math
import pickle

import pytest
from click.testing import CliRunner

from jobrunner import (
    DefinitionError,
    Job,
    JobRunner,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    Moment,
    MultiNodeCheckpointManager,
    Node,
    SaveBefore,
    SaveEvery,
    Task,
    current_task,
    epoch_limiter,
    job,
)
from jobrunner.cli import main
from tests.ports.counting import N, counter, due, kept, manager_of

NAN = math.nan


class StepLR:
    """A schedule with a state, stepped once an epoch."""

    def __init__(self):
        self.rate = 0.1

    def step(self):
        self.rate *= 2

    def state_dict(self):
        return {"rate": self.rate}

    def load_state_dict(self, state):
        self.rate = state["rate"]


def scheduled(epochs, validate_every=1):
    """Four batches an epoch; `validate` reports a score and sees the rate of the epoch."""
    with Job("scheduled", steps_per_epoch=4) as made, Node("a"):
        with made.init_group:
            Task(int, outputs="n", name="zero")
            Task(StepLR, outputs="schedule", name="schedule")
        Task(lambda n: n + 1, outputs="n", name="train")
        Task(lambda n: current_task().report(score=n), every=validate_every, name="validate")
        with made.epoch_end_group:
            Task(StepLR.step, updates={"self": "schedule"}, name="step the schedule")
    epoch_limiter(made, epochs)
    return made


def test_a_checkpoint_has_the_score_and_the_schedule_of_its_epoch(inproc_session, tmp_path):
    manager = manager_of(tmp_path)
    JobRunner(scheduled(3), manager).run(inproc_session)
    assert [line["metrics"]["score"] for line in manager.history()[1:]] == [4, 8, 12]
    for epoch in (1, 2, 3):
        assert manager.open(epoch)["a"]["schedule"]["rate"] == 0.1 * 2**epoch


def test_validated_within_an_epoch_each_validation_has_a_checkpoint(inproc_session, tmp_path):
    manager = manager_of(tmp_path, save=SaveEvery(steps=2), keep=KeepAll(partial=True))
    JobRunner(scheduled(2, validate_every=2), manager).run(inproc_session)
    assert [str(at) for at in manager.positions()] == ["0", "0.s2", "1", "1.s2", "2"]
    rates = [manager.open(it)["a"]["schedule"]["rate"] for it in manager.positions()]
    assert rates == [0.1, 0.1, 0.2, 0.2, 0.4]  # the schedule steps at the end of an epoch


def test_all_are_kept_and_the_last_is_found(inproc_session, tmp_path):
    manager = manager_of(tmp_path)
    JobRunner(counter(3), manager).run(inproc_session)
    assert (manager.epochs(), manager.latest()) == ([0, 1, 2, 3], 3)
    assert manager.open(manager.latest())["a"]["n"] == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepBest("loss", -3),
        lambda: KeepBest(None, 3),
        lambda: KeepBest("loss", mode="unknown_option"),
        lambda: KeepLast(-1),
        lambda: SaveEvery(epochs=-3),
        lambda: SaveEvery(steps=-3),
    ],
)
def test_wrong_options_are_refused(make):
    with pytest.raises(DefinitionError):
        make()


def test_epochs_steps_and_seconds_may_be_combined():
    policy = SaveEvery(epochs=2, steps=3, seconds=60)
    assert due(policy, 6) == [(2, 1), (3, 1), (4, 1), (6, 1)]
    assert policy.is_due(Moment(1, 1, 1, seconds_since_save=60))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_nth_epoch_is_saved(n):
    assert [epoch for epoch, _ in due(SaveEvery(epochs=n), 5)] == [
        epoch for epoch in range(1, 6) if epoch % n == 0
    ]


def test_every_nth_step_is_saved():
    moments = due(SaveEvery(steps=16), 2, steps_per_epoch=64)
    assert [64 * (epoch - 1) + step for epoch, step in moments] == list(range(16, 129, 16))


def test_a_minute_apart_128_steps_of_7_seconds_have_14_checkpoints():
    saved, count = 0.0, 0
    for step in range(1, 129):
        if SaveEvery(seconds=60).is_due(Moment(1, 1, 1, seconds_since_save=7 * step - saved)):
            saved, count = 7.0 * step, count + 1
    assert count == 14


def test_only_the_last_is_kept(inproc_session, tmp_path):
    manager = manager_of(tmp_path, keep=KeepLast(1))
    JobRunner(counter(2), manager).run(inproc_session)
    assert manager.epochs() == [2]


def test_by_default_all_epochs_are_kept():
    metrics = {epoch: {"loss": 1.0} for epoch in range(3)}
    assert kept(KeepAll(), metrics) == [0, 1, 2]
    assert kept(KeepLast(1), metrics, after_each=True) == [2]  # Lightning's default


def test_all_scores_are_recorded_and_rank_the_epochs(inproc_session, tmp_path):
    manager = manager_of(tmp_path)
    JobRunner(counter(3, losses={1: 0.1, 2: 0.2, 3: 0.3}), manager).run(inproc_session)
    scores = {line["epoch"]: line["metrics"]["loss"] for line in manager.history()[1:]}
    assert scores == {1: 0.1, 2: 0.2, 3: 0.3}
    assert kept(KeepBest("loss", mode="max"), {e: {"loss": s} for e, s in scores.items()}) == [3]


@pytest.mark.parametrize(("mode", "losses"), [("max", [NAN, 5, 7, 8]), ("min", [NAN, 8, 7, 5])])
def test_nan_first_does_not_stay_the_best(mode, losses):
    metrics = {epoch: {"loss": loss} for epoch, loss in enumerate(losses)}
    assert kept(KeepBest("loss", mode=mode), metrics, after_each=True) == [3]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_alone_ranks_worst(mode):
    metrics = {1: {"loss": 1e308 if mode == "min" else -1e308}, 2: {"loss": NAN}}
    assert kept(KeepBest("loss", mode=mode), metrics) == [1]


def test_a_job_that_has_ended_writes_nothing_more(inproc_session, tmp_path):
    manager = manager_of(tmp_path)
    JobRunner(counter(2), manager).run(inproc_session)
    for _ in range(2):
        again = JobRunner(counter(2), manager).run(inproc_session)
        assert (again.epoch, again.saves, again.metrics) == (2, [], [])
        assert inproc_session.fetch(N) == 2
    assert manager.epochs() == [0, 1, 2]


def test_a_second_run_in_the_directory_continues_the_first(inproc_session, tmp_path):
    manager = manager_of(tmp_path)
    JobRunner(counter(2), manager).run(inproc_session)
    longer = JobRunner(counter(4), manager_of(tmp_path)).run(inproc_session)
    assert (longer.resumed_from, manager.epochs()) == (2, [0, 1, 2, 3, 4])
    afresh = JobRunner(counter(1), manager_of(tmp_path), resume_from_epoch=None)
    assert afresh.run(inproc_session).resumed_from is None
    assert manager.epochs() == [0, 1]


def test_epochs_without_a_validation_are_no_candidates():
    metrics = {1: {}, 2: {"loss": 2.0}, 3: {}, 4: {"loss": 4.0}, 5: {}}
    assert kept(KeepBest("loss", 2), metrics) == [2, 4]


def test_a_run_that_begins_from_another_directory_deletes_nothing_there(inproc_session, tmp_path):
    old = MultiNodeCheckpointManager(tmp_path / "old", keep=KeepLast(2))
    JobRunner(counter(3), old).run(inproc_session)
    new = MultiNodeCheckpointManager(tmp_path / "new", load_path=old.path, keep=KeepLast(1))
    assert JobRunner(counter(6), new).run(inproc_session).resumed_from == 3
    assert old.epochs() == [2, 3]


def test_policies_can_be_pickled():
    for policy in (
        SaveEvery(epochs=2) | SaveEvery(seconds=60) | SaveBefore(1e9),
        KeepLast(2) | KeepBest("loss", 3, mode="max") | KeepEvery(5),
    ):
        assert pickle.loads(pickle.dumps(policy)) == policy


def test_hyperparameters_are_recorded_with_their_types(inproc_session, tmp_path):
    @job
    def with_parameters(limit: int = 1, rate: float = 0.1, units: tuple[int, ...] = (4, 2)) -> Job:
        return counter(limit)

    manager = manager_of(tmp_path)
    JobRunner(with_parameters(rate=0.5), manager).run(inproc_session)
    plan = JobRunner(with_parameters(units=(4, 3)), manager).plan_resume()
    assert plan.changes == (
        "parameter 'rate' was 0.5 and is 0.1",
        "parameter 'units' was [4, 2] and is [4, 3]",
    )


def test_two_nodes_are_saved_once_an_epoch(inproc_session, tmp_path):
    with Job("two") as two:
        for name in "ab":
            with Node(name):
                with two.init_group:
                    Task(int, outputs="n", name="zero")
                Task(lambda n: n + 1, outputs="n", name="count")
    epoch_limiter(two, 4)
    result = JobRunner(two, manager_of(tmp_path)).run(inproc_session)
    assert [report.epoch for report in result.saves] == [0, 1, 2, 3, 4]


def test_an_epoch_is_found_by_its_metrics_and_copied_under_a_name_with_them(
    inproc_session, tmp_path
):
    manager = manager_of(tmp_path)
    JobRunner(counter(3, losses={1: 0.5, 2: 0.25, 3: 1.0}), manager).run(inproc_session)
    best = min(manager.history()[1:], key=lambda row: row["metrics"]["loss"])
    copied = tmp_path / f"epoch={best['epoch']}-loss={best['metrics']['loss']:.2f}"
    CliRunner().invoke(main, ["copy", manager.path, str(best["epoch"]), str(copied)])
    assert copied.name == "epoch=2-loss=0.25"
    assert MultiNodeCheckpointManager(copied).open(2)["a"].load("n") == 2
