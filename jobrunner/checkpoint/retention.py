"""Gives up recorded epochs: what the retention policy does not keep, and what a run sets aside."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jobrunner.checkpoint.epochs import Epochs
from jobrunner.checkpoint.log import AnyEntry, Claim, State, nodes_of, store_names
from jobrunner.checkpoint.policies import (
    KeepAll,
    RetentionPolicy,
    find_unreported,
    name_reported,
)
from jobrunner.checkpoint.sweeper import Sweeper
from jobrunner.errors import CheckpointCorruptError, CheckpointError, DefinitionError

logger = logging.getLogger(__name__)

Stores = tuple[Claim, list[str]]
"""A claim, and the names of its stores."""


class Retention:
    """Decides by a policy which epochs go, records it, and lets their stores be deleted.

    Parameters
    ----------
    recorded : Epochs
    policy : RetentionPolicy, optional

    Notes
    -----
    Runs on the client. The log entry comes first; the sweeper then hides or deletes the stores in
    the background. Only the run that holds the directory may give epochs up.
    """

    def __init__(self, recorded: Epochs, policy: RetentionPolicy | None = None) -> None:
        self.policy = KeepAll() if policy is None else policy
        if not isinstance(self.policy, RetentionPolicy):
            raise DefinitionError(
                f"keep must be a RetentionPolicy such as KeepLast(3); got {policy!r}."
            )
        self.sweeper = Sweeper(recorded.files, recorded.path)
        self._recorded = recorded
        self._metrics: dict[int, Mapping[str, Any]] = {}  # by place of the commit entry
        self._has_warned = False  # in this run

    def start_run(self) -> None:
        """Hide and delete what earlier runs left undone."""
        self._has_warned = False
        # Nothing is undone if another run has just taken over: `check_held` raises.
        for claim, chore in self._recorded.log.check_held().chores.items():
            try:
                stores = self._stores_of(claim, chore.source)
            except CheckpointError as error:
                logger.warning("Stores of epoch %s cannot be named: %s", claim.epoch, error)
                continue
            self.sweeper.add(claim, chore.action, stores)

    def append(self, kind: str, body: Mapping[str, Any]) -> AnyEntry:
        """Append an entry of the run, which also says which stores need no more work."""
        settled = [list(claim) for claim in self.sweeper.take_settled()]
        return self._recorded.log.append(kind, {**body, "settled": settled} if settled else body)

    def retirable(self) -> list[int]:
        """The recorded epochs that the policy would give up now, in ascending order."""
        return self._choose(self._recorded.log.refresh())

    def retire(self) -> list[int]:
        """Give up what the policy does not keep; every commit does this.

        Returns
        -------
        list of int
            The epochs, in ascending order. They are deleted in the background.
        """
        if type(self.policy) is KeepAll:
            return []
        state = self._recorded.log.check_held()
        retired = self._choose(state)
        if retired:
            self._warn_of_unreported(state)
            self.give_up(state, retired, "retire", {"epochs": retired})
        return retired

    def give_up(
        self, state: State, epochs: Sequence[int], kind: str, body: Mapping[str, Any]
    ) -> None:
        """Append the entry that gives epochs up, then let their stores be hidden or deleted."""

        def name(epoch: int) -> Stores | None:
            try:
                return self.name_stores(state, epoch)
            except CheckpointError as error:
                logger.warning("The stores of epoch %d cannot be named: %s", epoch, error)
                return None

        named = [found for found in self._recorded.files.each(name, epochs) if found is not None]
        self.append(kind, body)
        for stores in named:
            self.sweep(stores)

    def sweep(self, stores: Stores) -> None:
        """Hide or delete stores as the log says; what was pinned in the meantime stays."""
        claim, names = stores
        chore = self._recorded.log.known().chores.get(claim)
        if chore is not None:
            self.sweeper.add(claim, chore.action, names)

    def name_stores(self, state: State, epoch: int) -> Stores:
        """The claim of a recorded epoch, and the names of its stores."""
        claim = Claim(epoch, state.retries[epoch])
        return claim, self._stores_of(claim, state.commit_number(epoch))

    def _stores_of(self, claim: Claim, source: int) -> list[str]:
        """The names of a claim's stores, by the entry that names its nodes."""
        entry = self._recorded.log.read_entry(source)
        try:
            return list(store_names(nodes_of(entry, claim.epoch), *claim).values())
        except ValueError as error:
            raise CheckpointCorruptError(
                f"{self._recorded.path}: entry {source} of the log does not name the stores of "
                f"claim {list(claim)}: {error}."
            ) from error

    def _choose(self, state: State) -> list[int]:
        epochs = state.recorded.keys_in_order()
        kept = {state.latest, self._recorded.loaded, *state.pins}
        metrics = _RecordedMetrics(self._recorded, state, self._metrics)
        proposed = self.policy.retires(epochs, metrics)
        return sorted(e for e in proposed if e not in kept and e in state.recorded)

    def _warn_of_unreported(self, state: State) -> None:
        """Warn, once a run, if epochs are deleted because their metric was never reported."""
        metrics = _RecordedMetrics(self._recorded, state, self._metrics)
        if self._has_warned or not (names := find_unreported(self.policy, metrics)):
            return
        self._has_warned = True
        logger.warning(
            "%s: no recorded epoch has reported %s, so KeepBest keeps no epoch for it, and all "
            "that nothing else keeps are deleted. Reported: %s. Is the name mistyped?",
            self._recorded.path,
            " or ".join(map(repr, names)),
            name_reported(metrics),
        )


class _RecordedMetrics(Mapping[int, Mapping[str, Any]]):
    """What tasks reported at recorded epochs; read from the log when asked for."""

    def __init__(self, recorded: Epochs, state: State, known: dict[int, Mapping[str, Any]]) -> None:
        self._recorded = recorded
        self._state = state
        self._known = known

    def __getitem__(self, epoch: int) -> Mapping[str, Any]:
        places, known = self._state.recorded, self._known
        place = places[epoch]
        if place not in known:
            # A policy that asks for the first epoch will ask for the others.
            epochs = [epoch] if known else list(places)
            found = self._recorded.files.each(self._read, epochs)
            known |= zip((places[e] for e in epochs), found, strict=True)
        return known[place]

    def _read(self, epoch: int) -> Mapping[str, Any]:
        try:
            record = self._recorded.read_record(epoch, self._state.commit_number(epoch))
        except CheckpointError as error:
            logger.warning("The metrics of epoch %d cannot be read: %s", epoch, error)
            return {}
        metrics: Mapping[str, Any] = record["details"].get("metrics", {})
        return metrics

    def __iter__(self) -> Iterator[int]:
        return iter(self._state.recorded)

    def __len__(self) -> int:
        return len(self._state.recorded)
