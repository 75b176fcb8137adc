"""When to save and what to keep, decided without I/O."""

from __future__ import annotations

import math
import pickle
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

import pytest

from jobrunner import (
    DefinitionError,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    Moment,
    Position,
    SaveBefore,
    SavedEpoch,
    SaveEvery,
)
from jobrunner.checkpoint import epochs_until
from jobrunner.checkpoint.save_policies import Pace


def due(policy: Any, epochs: int, steps_per_epoch: int = 1) -> list[tuple[int, int]]:
    return [
        (epoch, step)
        for epoch in range(1, epochs + 1)
        for step in range(1, steps_per_epoch + 1)
        if policy.is_due(Moment(epoch, step, steps_per_epoch, seconds_since_save=0))
    ]


def test_a_moment_says_how_long_ago_the_last_save_began() -> None:
    pace = Pace(100.0)
    pace.start(101.0, 0)
    pace.begin_save(105.0)
    moment = pace.look(112.0, Moment(1, 1, 1))
    assert moment.seconds_since_save == 7.0


def test_epochs_count_by_their_number_so_that_a_resume_changes_nothing() -> None:
    assert due(SaveEvery(epochs=3), 7) == [(3, 1), (6, 1)]
    assert due(SaveEvery(epochs=2), 4, steps_per_epoch=3) == [(2, 3), (4, 3)]


def test_steps_count_across_epochs() -> None:
    both = [(1, 2), (1, 3), (2, 1), (2, 3)]  # the ends of their epochs, too
    assert due(SaveEvery(steps=2), 2, steps_per_epoch=3) == both
    assert due(SaveEvery(steps=4), 4, steps_per_epoch=3) == [(2, 1), (2, 3), (3, 2), (3, 3), (4, 3)]
    assert due(SaveEvery(steps=3), 7) == [(3, 1), (6, 1)]


def test_joined_policies_save_when_either_does() -> None:
    assert due(SaveEvery(epochs=2) | SaveEvery(epochs=3), 6) == [(2, 1), (3, 1), (4, 1), (6, 1)]
    assert due(SaveEvery(epochs=2) | SaveEvery(epochs=3) | SaveEvery(epochs=5), 5)[-1] == (5, 1)


def test_seconds_count_from_the_last_save() -> None:
    policy = SaveEvery(seconds=10)
    assert not policy.is_due(Moment(1, 1, 4, seconds_since_save=9.9))
    assert policy.is_due(Moment(1, 1, 4, seconds_since_save=10))


def test_auto_keeps_the_wait_within_its_share_of_the_time() -> None:
    policy = SaveEvery("auto", max_overhead=0.1)
    assert not policy.is_due(Moment(1, 1, 2, 0.0))
    assert policy.is_due(Moment(1, 2, 2, 0.0))  # what a save costs is not known yet
    assert not policy.is_due(Moment(5, 1, 1, 9.9, seconds_to_save=1.0))
    assert policy.is_due(Moment(5, 1, 1, 10.0, seconds_to_save=1.0))


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_auto_keeps_its_share_if_some_saves_cost_much_more_than_others(slow: int) -> None:
    policy = SaveEvery("auto", max_overhead=0.1)
    costs = [10.0 if n % 5 < slow else 0.1 for n in range(400)]
    now = began = waited = 0.0
    for n, cost in enumerate(costs):
        lately = fmean(costs[max(0, n - 5) : n]) if n else None
        while not policy.is_due(Moment(1, 1, 1, now - began, lately)):
            now += 0.25
        began = now
        now += cost
        waited += cost
    assert 0.09 < waited / now < 0.101


def test_auto_waits_for_no_save_that_is_still_written() -> None:
    policy = SaveEvery("auto", max_overhead=0.1)
    assert not policy.is_due(Moment(5, 1, 1, 1e9, seconds_to_save=1.0, is_saving=True))
    assert not policy.is_due(Moment(1, 1, 1, 1e9, is_saving=True))
    assert SaveEvery(epochs=1).is_due(Moment(5, 1, 1, 0.0, is_saving=True))


def lose(policy: Any, cost: float, lost_after: list[float], hours: float) -> float:
    """Run steps of 20 seconds until `hours` of work are recorded; returns the hours it took.

    `lost_after` are the times of losses, in hours.
    """
    times = [hour * 3600 for hour in lost_after]
    now = began = recorded = done = 0.0
    losses = 0
    while recorded < hours * 3600:
        now += 20
        done += 20
        if times and now >= times[0]:
            times.pop(0)
            losses += 1
            done = recorded
            began = now
        moment = Moment(1, 1, 1, now - began, cost, seconds_running=now, losses=losses)
        if policy.is_due(moment):
            began = now
            now += cost
            recorded = done
    return now / 3600


def test_auto_loses_about_as_little_time_as_the_best_fixed_interval() -> None:
    lost_after = [3.1 * n + 1.3 for n in range(20)]

    def hours(policy: Any) -> float:
        return lose(policy, 5, lost_after, hours=30)

    took = hours(SaveEvery("auto"))
    assert took < 1.01 * min(hours(SaveEvery(seconds=s)) for s in (240, 320, 480, 960))
    assert took < min(hours(SaveEvery(seconds=s)) for s in (20, 7200)) - 1


def test_auto_saves_at_youngs_interval_or_as_its_share_allows() -> None:
    policy = SaveEvery("auto")

    def interval(cost: float, running: float, losses: int = 0) -> int:
        return next(
            s
            for s in range(100_000)
            if policy.is_due(Moment(1, 1, 1, s, cost, seconds_running=running, losses=losses))
        )

    assert interval(10, running=0) == 500  # 2 % of the time
    assert interval(10, running=180_000) == math.ceil(math.sqrt(2 * 10 * 180_000))
    assert interval(10, running=180_000, losses=9) == math.ceil(math.sqrt(2 * 10 * 18_000))
    assert interval(10, running=180_000, losses=99) == 500
    assert not policy.is_due(Moment(1, 1, 1, 1e9, 1.0, is_saving=True))
    assert policy.is_due(Moment(1, 1, 1, 0.0))  # what a save costs is not known yet


def test_auto_may_be_joined_with_other_intervals() -> None:
    policy = SaveEvery("auto", steps=3)
    assert policy.is_due(Moment(1, 3, 4, 0.0, 1e9))
    assert not policy.is_due(Moment(1, 2, 4, 0.0, 1e9))
    assert epochs_until(policy, 1, 1) == 3
    assert epochs_until(SaveEvery("auto"), 1, 1) is None


def saves_before(
    policy: Any, step_seconds: float, cost: float, is_saving: bool = False
) -> list[float]:
    """When a run saves, by the clock, from 0 on."""
    found, saved, now = [], -1e9, 0.0
    while now < 2000:
        now += step_seconds
        moment = Moment(
            *(1, 1, 1, now - saved, cost, is_saving),
            seconds_to_record=cost,
            seconds_to_next=step_seconds,
            time=now,
        )
        if policy.is_due(moment):
            saved = now
            now += cost
            found.append(saved)
    return found


def test_a_save_before_a_deadline_is_the_last_that_is_recorded_in_time() -> None:
    assert saves_before(SaveBefore(1000, margin_seconds=0), 10, cost=7) == [990]
    assert saves_before(SaveBefore(1000, margin_seconds=60), 10, cost=7) == [930]
    assert saves_before(SaveBefore(1000, margin_seconds=0), 10, cost=25) == [970]
    assert saves_before(SaveBefore(1000, margin_seconds=0), 10, 7, is_saving=True) == [980]
    assert saves_before(SaveBefore(1000, margin_seconds=0), 300, cost=7) == [900]
    assert saves_before(SaveBefore(5000), 10, cost=7) == []


def test_a_deadline_long_past_asks_for_nothing() -> None:
    assert not SaveBefore(1000).is_due(Moment(1, 1, 1, 50.0, 1.0, time=1e9))


def test_a_deadline_is_a_time_a_date_or_that_of_slurm(monkeypatch: Any) -> None:
    when = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert SaveBefore(when).deadline == SaveBefore(when.timestamp()).deadline == 1893553445
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1893553445")
    assert SaveBefore("slurm").deadline == 1893553445
    for wrong in ("", "soon", "-5"):
        monkeypatch.setenv("SLURM_JOB_END_TIME", wrong)
        with pytest.raises(DefinitionError, match=f"SLURM_JOB_END_TIME .* got '{wrong}'"):
            SaveBefore("slurm")
    for other in ("pbs", -1, math.nan, None):
        with pytest.raises(DefinitionError, match="SaveBefore: deadline"):
            SaveBefore(other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"epochs": "often"},
        {"epochs": 1, "max_overhead": 0.1},
        {"epochs": "auto", "max_overhead": 1.0},
        *({"epochs": n} for n in (0, 1.5, True)),
        {"steps": -1},
        *({"seconds": s} for s in (0, math.nan, math.inf, "5")),
    ],
)
def test_an_invalid_interval_is_refused(arguments: Any) -> None:
    with pytest.raises(DefinitionError, match="SaveEvery"):
        SaveEvery(**arguments)


@pytest.mark.parametrize("share", [0, 1, -0.1, math.nan, "a", True])
def test_an_invalid_share_is_refused(share: Any) -> None:
    with pytest.raises(DefinitionError, match="SaveEvery: max_overhead"):
        SaveEvery("auto", max_overhead=share)


LOSSES = {0: {}, 1: {"loss": 3.0}, 2: {"loss": math.nan}, 3: {"loss": 1.0}, 4: {"loss": 2.0}}


def kept(policy: Any, metrics: Any = LOSSES) -> list[int]:
    saved = [SavedEpoch(at, metrics=reported) for at, reported in metrics.items()]
    retired = {Position.of(at) for at in policy.retires(saved)}
    return [at for at in metrics if Position.of(at) not in retired]


def test_the_best_are_kept_and_nan_or_no_metric_ranks_worst() -> None:
    assert kept(KeepBest("loss", 2)) == [3, 4]
    assert kept(KeepBest("loss", 2, mode="max")) == [1, 4]
    assert set(kept(KeepBest("loss", 3))) == {1, 3, 4}


def test_of_equal_values_the_newer_epoch_is_better() -> None:
    assert kept(KeepBest("loss"), {1: {"loss": 1.0}, 2: {"loss": 1.0}}) == [2]
    losses = {2: {"loss": 1.0}, Position(2, 1): {"loss": 1.0}, Position(2, 3): {"loss": 1.0}}
    assert kept(KeepBest("loss", partial=True), losses) == [Position(2, 3)]


def test_a_metric_that_is_no_number_ranks_worst() -> None:
    assert kept(KeepBest("loss"), {1: {"loss": 9.0}, 2: {"loss": "low"}, 3: {"loss": None}}) == [1]


def test_ints_too_large_for_a_float_rank_as_infinities() -> None:
    huge = {1: {"n": 10**400}, 2: {"n": 5}, 3: {"n": -(10**400)}}
    assert kept(KeepBest("n"), huge) == [3]
    assert kept(KeepBest("n", mode="max"), huge) == [1]


def test_a_threshold_must_be_reached() -> None:
    assert kept(KeepBest("loss", None, threshold=2.0)) == [3, 4]
    assert kept(KeepBest("loss", 1, threshold=2.0)) == [3]
    assert kept(KeepBest("loss", 3, threshold=0.5)) == []
    assert kept(KeepBest("loss", None, mode="max", threshold=2.0)) == [1, 4]


def test_a_function_of_all_metrics_may_rank_epochs() -> None:
    metrics = {1: {"f1": 0.5, "loss": 9}, 2: {"f1": 0.5, "loss": 1}, 3: {"f1": 0.9}, 4: {}}
    assert kept(KeepBest(lambda m: m["f1"] - m["loss"], mode="max"), metrics) == [2]
    assert kept(KeepBest(lambda m: m.get("f1"), mode="max"), metrics) == [3]
    with pytest.raises(ZeroDivisionError):
        kept(KeepBest(lambda m: 1 / 0), metrics)


TIMES = {0: 0.0, 1: 9.0, 2: 10.0, 3: 12.0, 4: 25.0, 5: 3.0, 6: 4.0, 7: math.nan, 8: 12.0, 9: 13.0}


def test_epochs_are_kept_by_the_time_of_their_records() -> None:
    def spaced(**options: Any) -> list[int]:
        saved = [SavedEpoch(epoch, time) for epoch, time in TIMES.items()]
        retired = KeepEvery(seconds=10, **options).retires(saved)
        return [epoch for epoch in TIMES if Position(epoch) not in retired]

    assert spaced() == [0, 2, 4, 5, 7, 9]  # the clock was set back after 4; the time of 7 is lost
    assert spaced(n=3) == [0, 2, 3, 4, 5, 6, 7, 9]


def test_what_is_kept_by_time_stays_kept() -> None:
    saved: list[SavedEpoch] = []
    for epoch in range(100):
        saved.append(SavedEpoch(epoch, 7.0 * epoch))
        retired = KeepEvery(seconds=30).retires(saved)
        # The newest stays.
        saved = [row for row in saved if row.at not in retired or row.epoch == epoch]
    assert [row.epoch for row in saved] == [*range(0, 100, 5), 99]


def test_joined_policies_keep_what_either_keeps() -> None:
    assert kept(KeepLast(1) | KeepBest("loss")) == [3, 4]
    assert kept(KeepEvery(3) | KeepLast(1)) == [0, 3, 4]
    assert kept(KeepAll() | KeepLast(1)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepLast(0),
        lambda: KeepBest(lambda metrics, epoch: 0),  # type: ignore[arg-type,misc]
        lambda: KeepEvery(0),
        lambda: KeepEvery(1.5),  # type: ignore[arg-type]
        lambda: KeepBest(""),
        lambda: KeepBest("loss", 0),
        lambda: KeepBest("loss", mode="best"),  # type: ignore[arg-type]
        lambda: KeepBest("loss", None),
        lambda: KeepBest("loss", threshold=math.nan),
        lambda: KeepBest(3),  # type: ignore[arg-type]
        lambda: KeepEvery(),
        lambda: KeepEvery(seconds=0),
    ],
)
def test_invalid_arguments_of_policies_are_refused(make: Any) -> None:
    with pytest.raises(DefinitionError):
        make()


def test_only_policies_can_be_joined() -> None:
    with pytest.raises(TypeError):
        KeepLast(1) | 3  # type: ignore[operator]
    with pytest.raises(TypeError):
        SaveEvery(epochs=1) | KeepLast(1)  # type: ignore[operator]


@pytest.mark.parametrize("steps_per_epoch", [1, 3, 4])
@pytest.mark.parametrize(
    "policy",
    [
        SaveEvery(epochs=5),
        SaveEvery(steps=12),
        SaveEvery(epochs=7, steps=24),
        SaveEvery(epochs=5) | SaveEvery(epochs=3),
        SaveEvery(epochs=4, seconds=1),
    ],
    ids=str,
)
def test_no_save_is_due_before_epochs_until_says_to_ask(policy: Any, steps_per_epoch: int) -> None:
    dues = due(policy, 100, steps_per_epoch)
    for epoch in range(1, 60):
        count = epochs_until(policy, epoch, steps_per_epoch)
        assert count is not None
        last = epoch + count - 1
        first_due = next(moment for moment in dues if moment >= (epoch, 1))
        assert first_due >= (last, 1) if count == 1 else first_due == (last, steps_per_epoch)


def test_epochs_until_is_none_for_policies_by_time_and_1_if_undefined() -> None:
    class Mine:
        def is_due(self, moment: Moment) -> bool:
            return False

    assert epochs_until(SaveEvery(seconds=5) | SaveEvery("auto"), 3, 1) is None
    assert epochs_until(Mine(), 3, 1) == 1
    assert epochs_until(SaveEvery(seconds=5) | Mine(), 3, 1) == 1


def test_of_equal_values_the_newest_epoch_is_the_best() -> None:
    saved = [SavedEpoch(epoch, metrics={"loss": 1.0}) for epoch in (1, 2)]
    assert KeepBest("loss").choose(saved) == Position(2)


def test_the_mode_is_not_guessed_from_the_name() -> None:
    accuracy = {1: {"accuracy": 0.9}, 2: {"accuracy": 0.5}}
    assert kept(KeepBest("accuracy"), accuracy) == [2]
    assert kept(KeepBest("accuracy", mode="max"), accuracy) == [1]
    with pytest.raises(DefinitionError, match="mode"):
        KeepBest("accuracy", mode="auto")  # type: ignore[arg-type]


def test_epochs_steps_and_seconds_may_be_combined() -> None:
    policy = SaveEvery(epochs=2, steps=3, seconds=60)
    assert due(policy, 6) == [(2, 1), (3, 1), (4, 1), (6, 1)]
    assert policy.is_due(Moment(1, 1, 1, seconds_since_save=60))


def test_a_minute_apart_128_steps_of_7_seconds_have_14_checkpoints() -> None:
    saved = 0.0
    count = 0
    for step in range(1, 129):
        if SaveEvery(seconds=60).is_due(Moment(1, 1, 1, seconds_since_save=7 * step - saved)):
            saved = 7.0 * step
            count += 1
    assert count == 14


@pytest.mark.parametrize(
    "policy",
    [
        SaveEvery(epochs=2) | SaveEvery(seconds=60) | SaveBefore(1e9),
        KeepLast(2) | KeepBest("loss", 3, mode="max") | KeepEvery(5),
    ],
    ids=str,
)
def test_policies_can_be_pickled(policy: Any) -> None:
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_chosen_epochs_are_saved_by_a_policy_of_four_lines() -> None:
    class SaveAt:
        def is_due(self, moment: Moment) -> bool:
            return moment.epoch in (1, 3, 5)

    policy = SaveEvery(epochs=10_000) | SaveAt()
    assert [epoch for epoch, _ in due(policy, 6)] == [1, 3, 5]


def test_chosen_epochs_are_kept_by_a_policy_of_four_lines() -> None:
    class KeepThese:
        def retires(self, saved: Any) -> Any:
            return [row.at for row in saved if row.epoch not in (0, 2, 3)]

    assert kept(KeepThese()) == [0, 2, 3]
    assert kept(KeepLast(1) | KeepThese()) == [0, 2, 3, 4]


def test_the_epochs_of_the_last_hours_are_kept_by_a_policy_of_four_lines() -> None:
    class KeepRecent:
        def retires(self, saved: Any) -> Any:
            return [row.at for row in saved if row.time < -24.0]

    saved = [SavedEpoch(epoch, time) for epoch, time in enumerate((-30.0, -25.0, -23.0, -10.0))]
    assert [Position.of(at) for at in KeepRecent().retires(saved)] == [Position(0), Position(1)]


def keep_as_recorded(policy: Any, saved: list[SavedEpoch]) -> list[int]:
    """The epochs that are left when the policy is asked after each; the newest always stays."""
    left: list[SavedEpoch] = []
    for row in saved:
        left.append(row)
        retired = policy.retires(left)
        left = [other for other in left if other.at not in retired or other is row]
    return [row.epoch for row in left]


def test_the_newest_two_and_one_in_three_hours_are_kept_also_after_a_restart() -> None:
    policy = KeepLast(2) | KeepEvery(seconds=3 * 3600)
    hourly = [SavedEpoch(epoch, 3600.0 * epoch) for epoch in range(20)]
    assert keep_as_recorded(policy, hourly[:10]) == [0, 3, 6, 8, 9]
    assert keep_as_recorded(policy, hourly) == [0, 3, 6, 9, 12, 15, 18, 19]
    resumed = [row for row in hourly if row.epoch in (0, 3, 6, 8, 9) or row.epoch >= 10]
    assert keep_as_recorded(policy, resumed) == [0, 3, 6, 9, 12, 15, 18, 19]
