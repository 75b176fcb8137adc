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

from jobrunner.checkpoint import Moment, RetentionPolicy, SavePolicy, retired_by
from jobrunner.positions import PublicPosition

_EPOCHS = (0, 1, 2, 3, 5, 8, 9, 10, 20, 21)


def _moments() -> list[Moment]:
    return [
        Moment(epoch, step, 4, seconds, cost, is_saving)
        for epoch in (1, 2, 7, 100)
        for step in (1, 3, 4)
        for seconds in (0.0, 5.0, 1e5)
        for cost in (None, 0.0, 0.1, 60.0)
        for is_saving in (False, True)
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

    def _retired(self, policy: RetentionPolicy, epochs: tuple[int, ...]) -> list[int]:
        reported: dict[PublicPosition, dict[str, Any]] = {epoch: {} for epoch in epochs}
        times: dict[PublicPosition, float] = {epoch: 60.0 * epoch for epoch in epochs}
        for epoch in epochs:
            if epoch:
                reported[epoch] = dict(self.metrics)
        retired = set(retired_by(policy, list(epochs), reported, _unfinished, times))
        return [epoch for epoch in epochs if epoch in retired]

    def test_it_is_a_retention_policy(self) -> None:
        """The manager refuses an object without the method."""
        _check(isinstance(self.policy, RetentionPolicy), "has retires(epochs, metrics)")

    def test_it_retires_recorded_epochs_only(self) -> None:
        """Of any number of epochs, none and one included."""
        for count in range(len(_EPOCHS) + 1):
            epochs = _EPOCHS[:count]
            retired = self._retired(self.policy, epochs)
            _check(set(retired) <= set(epochs), f"some of {epochs}", retired)

    def test_the_result_depends_on_epochs_and_metrics_alone(self) -> None:
        """So a restarted client keeps the same epochs."""
        first = self._retired(self.policy, _EPOCHS)
        self._retired(self.policy, _EPOCHS[:3])
        copy: RetentionPolicy = pickle.loads(pickle.dumps(self.policy))
        for policy in (self.policy, copy):
            again = self._retired(policy, _EPOCHS)
            _check(again == first, f"{first} again", again)

    def test_kept_epochs_stay_kept(self) -> None:
        """A second call, with the remaining epochs, retires none of them."""
        left = tuple(set(_EPOCHS) - set(self._retired(self.policy, _EPOCHS)))
        again = self._retired(self.policy, tuple(sorted(left)))
        _check(not again, f"nothing more of {sorted(left)}", again)


def _unfinished(epochs: Sequence[PublicPosition]) -> list[PublicPosition]:
    return [epoch for epoch in epochs if epoch == 9]


def _check(holds: bool, expected: str, found: object = "something else") -> None:
    if not holds:
        raise AssertionError(f"A policy: expected {expected}; found {found!r}.")
