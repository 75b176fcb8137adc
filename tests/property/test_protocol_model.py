"""The protocol, every order of events: two runs, a reader who pins, crashes, answers that are lost.

The journal, the meaning of the entries and the retention policy are the real ones; the storage is a
model in which each operation is one step. Runs take over from each other at any moment, alive or
not, as if silence were always misjudged. All reachable states are visited, and in each:

- the log can be read, and every epoch that is recorded is whole on disk;
- no store is written by two runs;
- what was acknowledged (a commit, a pin) is kept;
- every store that counts for nothing is known to the log as something to be deleted.

Mutants of the protocol, each with one rule left out, must be found out by the same walk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import pytest

from jobrunner import CheckpointCorruptError, CheckpointError, CommitConflictError, KeepLast
from jobrunner.checkpoint.journal import Journal
from jobrunner.checkpoint.records import Claim, Entry, State, fold, make_entry

IS_THOROUGH = os.environ.get("FAULTS") == "thorough"
Mutant = Literal[
    "overwrites",
    "ignores a take-over",
    "uses names again",
    "commits before all is written",
    "deletes before the entry",
    "deletes after a lost answer",
    "deletes what was pinned",
    "cleans up for another",
]
Status = Literal["part", "whole", "hidden"]


@dataclass(frozen=True)
class World:
    """All there is: the log, the stores, and what each actor has seen so far."""

    log: tuple[str, ...]
    stores: frozenset[tuple[str, Status, str]] = frozenset()
    seen: tuple[tuple[Any, ...], ...] = ()
    gone: frozenset[int] = frozenset()
    losses: int = 0
    pinned: frozenset[int] = frozenset()

    def status(self, name: str) -> tuple[Status, str] | None:
        return next(((s, by) for n, s, by in self.stores if n == name), None)

    def with_store(self, name: str, status: Status | None, by: str) -> World:
        others = frozenset(store for store in self.stores if store[0] != name)
        return replace(self, stores=others | ({(name, status, by)} if status else set()))


def without(world: World, actor: int) -> World:
    """An actor has ended, or was killed; what it knew makes no difference any more."""
    seen = tuple(() if i == actor else known for i, known in enumerate(world.seen))
    return replace(world, gone=world.gone | {actor}, seen=seen)


class SuspendedError(BaseException):
    """The actor has done its one step."""


class BrokenError(AssertionError):
    """The protocol does not hold."""


class Storage:
    """What an actor does to the world, one step beyond what it has seen already."""

    def __init__(self, model: Model, world: World, actor: int, *, is_lost: bool) -> None:
        self._model = model
        self.world = world
        self._actor = actor
        self._is_lost = is_lost
        self._position = 0
        self.could_be_lost = False

    def _step(self, do: Callable[[], Any]) -> Any:
        seen = self.world.seen[self._actor]
        if self._position < len(seen):
            self._position += 1
            return seen[self._position - 1]
        if self._position > self._limit:
            raise SuspendedError
        answer = do()
        everyone = list(self.world.seen)
        everyone[self._actor] = (*seen, answer)
        self.world = replace(self.world, seen=tuple(everyone))
        self._position += 1
        return answer

    def start(self) -> None:
        self._limit = len(self.world.seen[self._actor])

    # --- the metadata handler

    def append(self, entry: Any) -> bool:
        # What says the same counts as the same, whatever way led to it.
        told = {key: value for key, value in entry.items() if key not in ("id", "time")}
        entry["id"] = f"{self._actor}:{self._position}:{json.dumps(told, sort_keys=True)}"

        def do() -> Any:
            self._model.entries[entry["id"]] = entry
            log, number = self.world.log, entry["number"]
            self.could_be_lost = True
            if number < len(log) and self._model.mutant != "overwrites":
                return False
            self.world = replace(self.world, log=(*log[:number], entry["id"], *log[number + 1 :]))
            if self._is_lost:
                self.world = replace(self.world, losses=self.world.losses + 1)
                return "lost"
            return True

        answer = self._step(do)
        if answer == "lost":
            raise OSError("the answer was lost")
        return bool(answer)

    def write(self, epoch: int, record: Entry) -> bool:
        return self.append(record)

    def last_number(self) -> int:
        return int(self._step(lambda: len(self.world.log) - 1))

    def entries(self, first: int = 0) -> Iterator[Entry]:
        found = self._step(lambda: self.world.log[first:])
        return iter([self._model.entries[name] for name in found])

    # --- the stores

    def put(self, name: str, status: Status, by: str) -> None:
        def do() -> None:
            there = self.world.status(name)
            if there is not None and there[1] != by:
                raise BrokenError(f"{name} is written by {by} over what {there[1]} has written")
            self.world = self.world.with_store(name, status, by)

        self._step(do)

    def hide(self, name: str) -> None:
        def do() -> None:
            there = self.world.status(name)
            if there is not None:
                self.world = self.world.with_store(name, "hidden", there[1])

        self._step(do)

    def delete(self, name: str) -> None:
        self._step(lambda: setattr(self, "world", self.world.with_store(name, None, "")))

    def acknowledge_pin(self, epoch: int) -> None:
        self.world = replace(self.world, pinned=self.world.pinned | {epoch})


class HeedlessJournal(Journal):
    """A mutant's: goes on after it was taken over."""

    def _check_held(self) -> None:
        pass


class Model:
    """The actors' programs, and the walk through all their orders."""

    def __init__(self, mutant: Mutant | None = None) -> None:
        self.mutant = mutant
        self.entries: dict[str, Entry] = {}
        self.visited = 0

    # --- programs

    def run(self, name: str, storage: Storage) -> None:
        """What a manager does: take the directory, clean up, save an epoch, retire, leave."""
        kind = HeedlessJournal if self.mutant == "ignores a take-over" else Journal
        journal = kind(storage, "k")  # type: ignore[arg-type]
        try:
            journal.take(name, {"nodes": ["a"], "info": {}, "process": {}}, lambda state: None)
            if self.mutant == "cleans up for another":
                state = journal.refresh()
            else:
                state = journal.check_held()
            for claim, chore in list(state.chores.items()):
                self._sweep(storage, claim, chore.action)
            self._save(storage, journal, name)
            journal.append("end", {})
        except CommitConflictError:
            pass  # this run is over
        except CheckpointError as error:
            if isinstance(error, CheckpointCorruptError):
                raise BrokenError(str(error)) from error

    def _save(self, storage: Storage, journal: Journal, name: str) -> None:
        state = journal.check_held()
        epoch = 0 if state.latest is None else state.latest + 1
        retry = 0 if self.mutant == "uses names again" else state.claims.get(epoch, 0)
        claim = Claim(epoch, retry)
        begun = {"epoch": epoch, "retry": retry}
        journal.append("begin", begun)
        storage.put(store_of(claim), "part", name)
        if self.mutant != "commits before all is written":
            storage.put(store_of(claim), "whole", name)
        journal.check_held()
        try:
            journal.append("commit", {**begun, "stores": {"a": {}}})
        except CommitConflictError:
            raise
        except CheckpointError:
            # What a manager's `abandon` does: the commit may be there all the same.
            is_careless = self.mutant == "deletes after a lost answer"
            if is_careless or claim in journal.check_held().chores:
                self._sweep(storage, claim, "delete")
        if self.mutant == "commits before all is written":
            storage.put(store_of(claim), "whole", name)
        self._retire(storage, journal)

    def _retire(self, storage: Storage, journal: Journal) -> None:
        state = journal.check_held()
        kept = {state.latest, *state.pins}
        epochs = [e for e in KeepLast(1).retires(list(state.recorded), {}) if e not in kept]
        if not epochs:
            return
        claims = [Claim(epoch, state.retries[epoch]) for epoch in epochs]
        if self.mutant == "deletes before the entry":
            self._sweep_all(storage, claims)
        journal.append("retire", {"epochs": epochs})
        left = journal.known().chores
        if self.mutant == "deletes what was pinned":
            self._sweep_all(storage, claims)
        self._sweep_all(storage, [claim for claim in claims if claim in left])

    def _sweep_all(self, storage: Storage, claims: list[Claim]) -> None:
        for claim in claims:
            self._sweep(storage, claim, "delete")

    def _sweep(self, storage: Storage, claim: Claim, action: str) -> None:
        storage.hide(store_of(claim))
        if action == "delete":
            storage.delete(store_of(claim))

    def pin(self, name: str, storage: Storage) -> None:
        """What a reader does: pin the newest epoch."""
        journal = Journal(storage, "k")  # type: ignore[arg-type]
        chosen: list[int] = []

        def decide(state: State) -> dict[str, Any] | None:
            if not chosen:
                chosen.append(state.recorded.keys_in_order()[0])
            if chosen[0] not in state.recorded:
                return None
            return {"epoch": chosen[0], "label": name}

        try:
            done = journal.note("pin", decide)
        except CheckpointError:
            return  # the answer was lost
        if done is not None:
            storage.acknowledge_pin(chosen[0])

    # --- the walk

    def first(self) -> World:
        """Epoch 0 is recorded, by a run that was killed while it saved epoch 1."""
        said: list[tuple[str, dict[str, Any]]] = [
            ("run", {"nodes": ["a"], "info": {}, "process": {}}),
            ("begin", {"epoch": 0, "retry": 0}),
            ("commit", {"epoch": 0, "retry": 0, "stores": {"a": {}}}),
            ("begin", {"epoch": 1, "retry": 0}),
        ]
        for number, (kind, body) in enumerate(said):
            self.entries[f"first {number}"] = make_entry(number, kind, "first", body)
        log = tuple(f"first {number}" for number in range(len(said)))
        return (
            World(log, seen=((), (), ()))
            .with_store("a.0", "whole", "first")
            .with_store("a.1", "part", "first")
        )

    def walk(self, limit: int, actors: set[int], losses: int) -> int:
        """Visit all states with these actors and so many lost answers; returns how many."""
        programs = (self.run, self.run, self.pin)
        names = ("one", "two", "reader")
        found = {replace(self.first(), gone=frozenset({0, 1, 2} - actors))}
        waiting = list(found)
        while waiting:
            world = waiting.pop()
            self.visited += 1
            self.check(world)
            for actor, program in enumerate(programs):
                if actor in world.gone:
                    continue
                nexts = [without(world, actor)]  # killed
                storage = self._advance(program, names[actor], world, actor, is_lost=False)
                nexts.append(storage.world)
                if storage.could_be_lost and world.losses < losses:
                    lost = self._advance(program, names[actor], world, actor, is_lost=True)
                    nexts.append(lost.world)
                for after in nexts:
                    if after not in found and len(found) < limit:
                        found.add(after)
                        waiting.append(after)
        return len(found)

    def _advance(
        self,
        program: Callable[[str, Storage], None],
        name: str,
        world: World,
        actor: int,
        *,
        is_lost: bool,
    ) -> Storage:
        storage = Storage(self, world, actor, is_lost=is_lost)
        storage.start()
        try:
            program(name, storage)
        except SuspendedError:
            return storage
        storage.world = without(storage.world, actor)
        return storage

    def check(self, world: World) -> None:
        """What must hold at every moment, whoever is killed next."""
        try:
            state = fold(self.entries[name] for name in world.log)
        except CheckpointCorruptError as error:
            raise BrokenError(f"the log cannot be read: {error}") from error
        known = {store_of(claim) for claim in state.chores}
        for epoch in state.recorded:
            name = store_of(Claim(epoch, state.retries[epoch]))
            known.add(name)
            entry = self.entries[world.log[state.commit_number(epoch)]]
            if world.status(name) != ("whole", entry["run"]):
                raise BrokenError(f"epoch {epoch} is recorded, and {name} is {world.status(name)}")
        for epoch in world.pinned:
            if epoch not in state.recorded:
                raise BrokenError(f"epoch {epoch} was pinned, and is gone")
        for name, _, _ in world.stores:
            if name not in known:
                raise BrokenError(f"nothing in the log speaks of {name}")


def store_of(claim: Claim) -> str:
    return f"a.{claim.epoch}" + (f".r{claim.retry}" if claim.retry else "")


CASES = {
    "a run and a reader": ({0, 2}, 1),
    "two runs": ({0, 1}, 0),
    "two runs and an answer that is lost": ({0, 1}, 1),
    "two runs and a reader": ({0, 1, 2}, 0),
}
LIMIT = 10_000_000 if IS_THOROUGH else 2_000


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES)
def test_in_every_order_of_events_what_is_recorded_is_whole(case: str) -> None:
    """Really every order with ``FAULTS=thorough``; else as many states as take a second."""
    count = Model().walk(LIMIT, *CASES[case])
    print(f"{case}: {count} states, 0 losses")
    assert 100 < count < 10_000_000


def walk_all(model: Model, limit: int) -> None:
    for actors, losses in CASES.values():
        model.walk(limit, actors, losses)


# Those that take a minute to be found out are tried with the thorough run.
MUTANTS = [m for m in get_args(Mutant) if IS_THOROUGH or m != "cleans up for another"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_protocol_with_one_rule_left_out_is_found_out(mutant: Mutant) -> None:
    model = Model(mutant)
    with pytest.raises(BrokenError):
        walk_all(model, 30_000)
    print(f"{mutant}: found out after {model.visited} states")
