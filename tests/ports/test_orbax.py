"""What the tests of Orbax' `CheckpointManager` and its policies assert, in our words."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from jobrunner import (
    CheckpointNotFoundError,
    DefinitionError,
    JobRunner,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    MultiNodeCheckpointManager,
    SaveEvery,
)
from tests.ports.counting import N, counter, due, kept, manager_of

FIVE = {epoch: {} for epoch in range(5)}


@pytest.mark.parametrize(("n", "expected"), [(3, [2, 3, 4]), (15, [0, 1, 2, 3, 4])])
def test_the_latest_n_are_kept(n, expected):
    assert kept(KeepLast(n), FIVE) == expected
    assert kept(KeepAll(), FIVE) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("seconds", "expected"), [(1, [0, 1, 2, 3, 4]), (3, [0, 3, 4]), (6, [0, 4])]
)
def test_one_is_kept_every_n_seconds_and_the_newest(seconds, expected):
    times = {epoch: float(epoch) for epoch in FIVE}
    assert kept(KeepEvery(seconds=seconds), FIVE, times, after_each=True) == expected


@pytest.mark.parametrize(("n", "expected"), [(1, [0, 1, 2, 4]), (3, [0]), (6, [0])])
def test_every_nth_is_kept_by_its_number(n, expected):
    assert kept(KeepEvery(n), {epoch: {} for epoch in (0, 1, 2, 4)}) == expected


@pytest.mark.parametrize("make", [lambda: KeepEvery(0), lambda: KeepLast(0)])
def test_an_interval_of_0_and_a_policy_that_keeps_none_are_refused(make):
    with pytest.raises(DefinitionError):
        make()


@dataclass(frozen=True)
class KeepThese:
    epochs: frozenset

    def retires(self, saved):
        return [row.at for row in saved if row.epoch not in self.epochs]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [([0, 2, 3], [0, 2, 3]), ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), ([14, 13], [])],
)
def test_chosen_epochs_are_kept_by_a_policy_of_four_lines(chosen, expected):
    assert kept(KeepThese(frozenset(chosen)), FIVE) == expected


@dataclass(frozen=True)
class KeepRecent:
    seconds: float
    now: float

    def retires(self, saved):
        return [row.at for row in saved if row.time < self.now - self.seconds]


@pytest.mark.parametrize(
    ("hours", "expected"), [(24, [2, 3]), (28, [1, 2, 3]), (5, []), (100, [0, 1, 2, 3])]
)
def test_the_epochs_of_the_last_hours_are_kept_by_a_policy_of_four_lines(hours, expected):
    times = {0: -30.0, 1: -25.0, 2: -23.0, 3: -10.0}
    assert kept(KeepRecent(hours, now=0.0), {epoch: {} for epoch in times}, times) == expected


@pytest.mark.parametrize(("n", "expected"), [(1, [2]), (2, [2, 4]), (3, [0, 2, 4])])
def test_the_best_n_are_kept_by_a_function_and_those_without_metrics_are_not(n, expected):
    metrics = {0: {"loss": 7}, 1: {}, 2: {"loss": 4}, 3: {}, 4: {"loss": 5}}
    assert kept(KeepBest(lambda it: it["loss"], n), metrics) == expected


def test_joined_policies_keep_what_any_keeps():
    losses = [5, None, 4, None, 3, None, 11, None, None, 8, 12, None]
    metrics = {e: {} if loss is None else {"loss": loss} for e, loss in enumerate(losses)}
    times = {epoch: float(epoch) for epoch in metrics}
    joined = KeepLast(3) | KeepEvery(6) | KeepEvery(seconds=5) | KeepBest("loss", 2)
    joined |= KeepThese(frozenset({0, 3}))
    assert kept(joined, metrics, times) == [0, 2, 3, 4, 5, 6, 9, 10, 11]


def test_what_a_save_has_left_behind_is_no_epoch(inproc_session, tmp_path):
    (tmp_path / "ckpt" / "a.1").mkdir(parents=True)
    (tmp_path / "ckpt" / "a.1" / "part").write_text("torn")
    manager = manager_of(tmp_path)
    assert (manager.epochs(), manager.latest()) == ([], None)
    JobRunner(counter(2), manager).run(inproc_session)
    assert manager.epochs() == [0, 1, 2]
    assert manager.open(1)["a"]["n"] == 1


def test_every_manager_sees_at_once_what_another_has_recorded(inproc_session, tmp_path):
    manager, other = manager_of(tmp_path), manager_of(tmp_path)
    JobRunner(counter(1), manager).run(inproc_session)
    assert other.epochs() == [0, 1]
    JobRunner(counter(3), other).run(inproc_session)
    assert manager.epochs() == [0, 1, 2, 3]


def test_a_resume_loads_the_latest_that_was_saved(inproc_session, tmp_path):
    manager = manager_of(tmp_path, save=SaveEvery(epochs=2))
    JobRunner(counter(4), manager).run(inproc_session)
    assert (manager.epochs(), manager.latest()) == ([0, 2, 4], 4)
    inproc_session.run(manager.load(manager.latest()))
    assert inproc_session.fetch(N) == 4
    with pytest.raises(CheckpointNotFoundError, match="3"):
        manager.open(3)


def test_an_epoch_that_exists_is_not_overwritten(inproc_session, tmp_path):
    manager = manager_of(tmp_path)
    JobRunner(counter(2), manager).run(inproc_session)
    first = manager.get_ckpt_db_name("a", 2)
    afresh = JobRunner(counter(2), manager, resume_from_epoch=1).run(inproc_session)
    assert afresh.resumed_from == 1
    assert manager.get_ckpt_db_name("a", 2) != first  # another store, recorded in its place


def test_old_saves_are_removed(inproc_session, tmp_path):
    manager = manager_of(tmp_path, keep=KeepLast(2), asynchronous=True)
    JobRunner(counter(4), manager).run(inproc_session)
    assert manager.epochs() == [3, 4]
    assert sorted(p.name for p in (tmp_path / "ckpt").glob("a.*")) == ["a.3", "a.4"]


def test_old_saves_are_removed_but_for_every_nth():
    saved = {epoch: {} for epoch in range(0, 12, 2)}
    assert kept(KeepLast(2) | KeepEvery(4), saved, after_each=True) == [0, 4, 8, 10]


HOURLY = {epoch: epoch * 3600.0 for epoch in range(20)}


def test_old_saves_are_removed_but_for_one_in_three_hours_also_after_a_restart():
    policy = KeepLast(2) | KeepEvery(seconds=3 * 3600)
    ten = {epoch: {} for epoch in range(10)}
    assert kept(policy, ten, HOURLY, after_each=True) == [0, 3, 6, 8, 9]
    twenty = {epoch: {} for epoch in range(20)}
    assert kept(policy, twenty, HOURLY, after_each=True) == [0, 3, 6, 9, 12, 15, 18, 19]
    resumed = {epoch: {} for epoch in (0, 3, 6, 8, 9, *range(10, 20))}
    assert kept(policy, resumed, HOURLY, after_each=True) == [0, 3, 6, 9, 12, 15, 18, 19]


def test_the_best_and_one_in_three_hours_are_kept():
    policy = KeepBest("loss", 3) | KeepEvery(seconds=3 * 3600)
    losses = {epoch: {"loss": epoch} for epoch in range(10)}
    assert kept(policy, losses, HOURLY, after_each=True) == [0, 1, 2, 3, 6, 9]


def test_chosen_epochs_are_saved_by_a_policy_of_four_lines():
    @dataclass(frozen=True)
    class SaveAt:
        epochs: frozenset

        def is_due(self, moment):
            return moment.epoch in self.epochs

    policy = SaveEvery(epochs=10_000) | SaveAt(frozenset({1, 3, 5}))
    assert [epoch for epoch, _ in due(policy, 6)] == [1, 3, 5]


def test_records_have_their_time_and_the_metadata_of_the_run(inproc_session, tmp_path):
    began = datetime.now(UTC) - timedelta(seconds=1)
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt", metadata={"lr": 0.1})
    JobRunner(counter(1), manager).run(inproc_session)
    init, first = manager.history()
    times = [datetime.fromisoformat(it["time"]) for it in (init, first)]
    assert began <= times[0] <= times[1] <= datetime.now(UTC)
    assert first["metadata"] == {"lr": 0.1}
