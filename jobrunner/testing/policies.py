"""Contracts of save and retention policies: derive a test class, set the policy, run pytest.

Examples
--------
>>> class TestMyPolicy(SavePolicyContract):
...     policy = SaveEvery(seconds=7200)
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from jobrunner.checkpoint import Moment, RetentionPolicy, SavedEpoch, SavePolicy
from jobrunner.positions import Position

_WITHIN_EPOCH_9 = Position(8, 2)
_POSITIONS = sorted([*map(Position, (0, 1, 2, 3, 5, 8, 10, 20, 21)), _WITHIN_EPOCH_9])


def _moments() -> list[Moment]:
    return [
        Moment(epoch, step, 4, seconds, cost, is_saving, metrics=metrics)
        for epoch in (1, 2, 7, 100)
        for step in (1, 3, 4)
        for seconds in (0.0, 5.0, 1e5)
        for cost in (None, 0.0, 0.1, 60.0)
        for is_saving in (False, True)
        for metrics in ({}, {"loss": 0.5}, {"loss": float("nan")})
    ] + [
        Moment(
            *(7, 4, 4, since, 1.0),
            seconds_to_record=cost,
            seconds_to_next=5.0,
            seconds_running=running,
            losses=losses,
            time=time,
        )
        for since in (0.0, 500.0)
        for cost in (1.0, 60.0)
        for running, losses in ((10.0, 0), (1e6, 3))
        for time in (0.0, 900.0, 1.8e9)
    ]


class SavePolicyContract:
    """What every `SavePolicy` must do."""

    policy: SavePolicy
    """What is tested."""

    def test_it_is_a_save_policy(self) -> None:
        """The manager refuses an object without the method."""
        _check(isinstance(self.policy, SavePolicy), "has is_due(moment)")

    def test_it_returns_a_bool_at_every_moment(self) -> None:
        """Within an epoch and at its end, before the first save and after a long one."""
        for moment in _moments():
            is_due = self.policy.is_due(moment)
            _check(isinstance(is_due, bool), f"a bool for {moment}", is_due)

    def test_the_result_depends_on_the_moment_alone(self) -> None:
        """So a resumed run saves when an uninterrupted one would."""
        forward = [self.policy.is_due(moment) for moment in _moments()]
        backward = [self.policy.is_due(moment) for moment in reversed(_moments())]
        _check(forward == backward[::-1], "the same results in another order")


class RetentionPolicyContract:
    """What every `RetentionPolicy` must do."""

    policy: RetentionPolicy
    """What is tested."""
    metrics: dict[str, Any] = {"loss": 0.5}  # noqa: RUF012  # users set it on their class
    """What every epoch but the first reports."""

    def _retired(self, policy: RetentionPolicy, positions: Sequence[Position]) -> list[Position]:
        saved = []
        for at in positions:
            metrics = dict(self.metrics) if at.epoch else {}
            saved.append(SavedEpoch(at, time=60.0 * at.epoch + at.step, metrics=metrics))
        return sorted(Position.of(at) for at in policy.retires(saved))

    def test_it_is_a_retention_policy(self) -> None:
        """The manager refuses an object without the method."""
        _check(isinstance(self.policy, RetentionPolicy), "has retires(saved)")

    def test_it_retires_recorded_epochs_only(self) -> None:
        """Of any number of epochs, none and one included."""
        for count in range(len(_POSITIONS) + 1):
            positions = _POSITIONS[:count]
            retired = self._retired(self.policy, positions)
            _check(set(retired) <= set(positions), f"some of {positions}", retired)

    def test_the_result_depends_on_the_saved_epochs_alone(self) -> None:
        """So a restarted client keeps the same epochs."""
        first = self._retired(self.policy, _POSITIONS)
        self._retired(self.policy, _POSITIONS[:3])
        copy: RetentionPolicy = pickle.loads(pickle.dumps(self.policy))
        for policy in (self.policy, copy):
            retired = self._retired(policy, _POSITIONS)
            _check(retired == first, f"{first} again", retired)

    def test_kept_epochs_stay_kept(self) -> None:
        """A second call, with the remaining epochs, retires none of them."""
        kept = sorted(set(_POSITIONS) - set(self._retired(self.policy, _POSITIONS)))
        retired = self._retired(self.policy, kept)
        _check(not retired, f"nothing more of {kept}", retired)


def _check(holds: bool, expected: str, found: object = "something else") -> None:
    if not holds:
        raise AssertionError(f"A policy: expected {expected}; found {found!r}.")
