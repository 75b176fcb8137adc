"""When to save and what to keep, decided without I/O."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import pytest

from jobrunner import (
    DefinitionError,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    Position,
    SaveBefore,
    SaveEvery,
)
from jobrunner.checkpoint import Moment, SavedEpoch, epochs_until


def due(policy: Any, epochs: int, steps_per_epoch: int = 1) -> list[tuple[int, int]]:
    return [
        (epoch, step)
        for epoch in range(1, epochs + 1)
        for step in range(1, steps_per_epoch + 1)
        if policy.is_due(Moment(epoch, step, steps_per_epoch, seconds_since_save=0))
    ]


def test_epochs_and_steps_count_from_the_first_so_that_a_resume_changes_nothing() -> None:
    assert due(SaveEvery(epochs=3), 7) == [(3, 1), (6, 1)]
    assert due(SaveEvery(epochs=2), 4, steps_per_epoch=3) == [(2, 3), (4, 3)]
    both = [(1, 2), (1, 3), (2, 1), (2, 3)]  # the ends of their epochs, too
    assert due(SaveEvery(steps=2), 2, steps_per_epoch=3) == both
    assert due(SaveEvery(steps=4), 4, steps_per_epoch=3) == [(2, 1), (2, 3), (3, 2), (3, 3), (4, 3)]
    assert due(SaveEvery(steps=3), 7) == [(3, 1), (6, 1)]


def test_seconds_count_from_the_last_save() -> None:
    policy = SaveEvery(seconds=10)
    assert not policy.is_due(Moment(1, 1, 4, seconds_since_save=9.9))
    assert policy.is_due(Moment(1, 1, 4, seconds_since_save=10))


def saves_before(
    policy: Any, step_seconds: float, cost: float, is_saving: bool = False
) -> list[float]:
    """When a run saves, by the clock, from 0 on."""
    found, saved, now = [], -1e9, 0.0
    while now < 2000:
        now += step_seconds
        moment = Moment(
            *(1, 1, 1, now - saved, is_saving),
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
    policy = SaveBefore(1000, margin_seconds=0)
    assert saves_before(policy, 10, cost=7) == [990]
    assert saves_before(SaveBefore(1000, margin_seconds=60), 10, cost=7) == [930]
    assert saves_before(policy, 10, cost=25) == [970]
    assert saves_before(policy, 10, cost=7, is_saving=True) == [980]
    assert saves_before(policy, 300, cost=7) == [900]
    assert saves_before(SaveBefore(5000), 10, cost=7) == []


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
            SaveBefore(other)


@pytest.mark.parametrize("arguments", [{}, {"epochs": 1.5}, {"steps": 0}, {"seconds": math.nan}])
def test_an_invalid_interval_is_refused(arguments: Any) -> None:
    with pytest.raises(DefinitionError, match="SaveEvery"):
        SaveEvery(**arguments)


LOSSES = {0: {}, 1: {"loss": 3.0}, 2: {"loss": math.nan}, 3: {"loss": 1.0}, 4: {"loss": 2.0}}


def kept(policy: Any, metrics: Any = LOSSES) -> list[int]:
    saved = [SavedEpoch(at, metrics=reported) for at, reported in metrics.items()]
    retired = {Position.of(at) for at in policy.retires(saved)}
    return [at for at in metrics if Position.of(at) not in retired]


def test_the_best_are_kept_and_nan_or_no_metric_ranks_worst() -> None:
    assert kept(KeepBest("loss", 2)) == [3, 4]
    assert kept(KeepBest("loss", 2, mode="max")) == [1, 4]
    assert kept(KeepBest("loss", 3)) == [1, 3, 4]
    # Of equal values, the newer epoch is better.
    assert kept(KeepBest("loss"), {1: {"loss": 1.0}, 2: {"loss": 1.0}}) == [2]
    huge = {1: {"n": 10**400}, 2: {"n": 5}, 3: {"n": -(10**400)}}
    assert kept(KeepBest("n"), huge) == [3]
    assert kept(KeepBest("n", mode="max"), huge) == [1]


def test_joined_policies_keep_what_either_keeps() -> None:
    assert kept(KeepLast(1) | KeepBest("loss")) == [3, 4]
    assert kept(KeepEvery(3) | KeepLast(1)) == [0, 3, 4]
    assert kept(KeepAll() | KeepLast(1)) == [0, 1, 2, 3, 4]
    with pytest.raises(TypeError):
        KeepLast(1) | SaveEvery(epochs=1)

    class Mine:  # without a `|` of its own
        def retires(self, saved: Any) -> list[int]:
            return [0, 1, 2, 3]

    assert kept(Mine() | KeepEvery(3)) == kept(KeepEvery(3) | Mine()) == [0, 3, 4]


@pytest.mark.parametrize("steps_per_epoch", [1, 3, 4])
@pytest.mark.parametrize(
    "policy",
    [
        SaveEvery(epochs=5),
        SaveEvery(steps=7),
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
        last = epoch + count - 1
        first_due = next(moment for moment in dues if moment >= (epoch, 1))
        assert first_due >= (last, 1) if count == 1 else first_due == (last, steps_per_epoch)


def test_epochs_until_is_none_for_policies_by_time_and_1_if_undefined() -> None:
    class Mine:
        def is_due(self, moment: Moment) -> bool:
            return False

    assert epochs_until(SaveEvery(seconds=5) | SaveBefore(1e9), 3, 1) is None
    assert epochs_until(Mine(), 3, 1) == 1
    assert epochs_until(SaveEvery(seconds=5) | Mine(), 3, 1) == 1
    mine = Mine()
    assert (mine | SaveEvery(epochs=2)).policies == (mine, SaveEvery(epochs=2))
