"""Our policies fulfil the contracts of policies; broken policies are caught."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from jobrunner import (
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
from jobrunner.testing.policies import RetentionPolicyContract, SavePolicyContract


class TestSaveEvery(SavePolicyContract):
    policy = SaveEvery(epochs=2, seconds=10)


class TestJoined(SavePolicyContract):
    policy = SaveEvery(steps=3) | SaveEvery("auto")


class UnlessNaN:
    def is_due(self, moment: Moment) -> bool:
        loss = moment.metrics.get("loss", 0.0)
        return moment.seconds_since_save >= 300 and not math.isnan(loss)


class TestUnlessNaN(SavePolicyContract):
    policy = UnlessNaN()


class TestSaveEveryAuto(SavePolicyContract):
    policy = SaveEvery("auto", max_overhead=0.1)


class TestSaveBefore(SavePolicyContract):
    policy = SaveBefore(1000.0) | SaveEvery(steps=5)


class TestKeepAll(RetentionPolicyContract):
    policy = KeepAll()


class TestKeepLast(RetentionPolicyContract):
    policy = KeepLast(3)


class TestKeepEvery(RetentionPolicyContract):
    policy = KeepEvery(5, seconds=120, partial=True)


class TestKeepBest(RetentionPolicyContract):
    policy = KeepBest("loss", n=None, mode="max", threshold=0.4)


def loss_of(metrics: Any) -> float:
    return -float(metrics["loss"])


class TestKeepBestByAFunction(RetentionPolicyContract):
    policy = KeepBest(loss_of, 3)


class TestKeepJoined(RetentionPolicyContract):
    policy = KeepEvery(5) | KeepEvery(seconds=300) | KeepBest("loss", 2) | KeepLast(2)


class Counts:
    """Broken: the result depends on the number of calls."""

    def __init__(self) -> None:
        self.asked = 0

    def is_due(self, moment: Moment) -> bool:
        self.asked += 1
        return self.asked % 7 == 0

    def retires(self, saved: Sequence[SavedEpoch]) -> Collection[Position]:
        self.asked += 1
        return [row.at for row in saved[: self.asked]]


def test_a_policy_that_counts_its_calls_is_caught() -> None:
    class Save(SavePolicyContract):
        policy = Counts()

    class Keep(RetentionPolicyContract):
        policy = Counts()

    with pytest.raises(AssertionError, match="another order"):
        Save().test_the_result_depends_on_the_moment_alone()
    with pytest.raises(AssertionError, match="again"):
        Keep().test_the_result_depends_on_the_saved_epochs_alone()
