"""The protocol, every order of events: runs, a reader who pins, crashes, operations that fail.

The journal, the meaning of the entries and the retention policy are the real ones; the storage is a
model in which each operation is one step. Runs take over from each other at any moment, alive or
not, as if silence were always misjudged. A run that is killed is one that takes no further step,
which nobody can tell from one that is slow; so each state is also that of a crash. All reachable
states are visited (of the larger cases by ``pytest -m nightly``), and in each:

- the log can be read, and every epoch that is recorded is whole on disk;
- no store is written by two runs;
- what was acknowledged (a commit, a pin) is in the log, and what was pinned is recorded;
- every store that counts for nothing is known to the log as something to be deleted, but for those
  that a run writes late, which had been taken over.

Mutants of the protocol, each with one rule left out, must be found out by the same walk.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

import msgspec
import pytest

from jobrunner import (
    CheckpointCorruptError,
    CheckpointError,
    CommitConflictError,
    KeepLast,
    SavedEpoch,
)
from jobrunner.checkpoint.log.entries import Claim, Entry, LogEntry, Summary
from jobrunner.checkpoint.log.state import (
    Chore,
    State,
    entry_to_json,
    make_entry,
    parse_entry,
)
from jobrunner.checkpoint.log.writer import LogWriter
from jobrunner.positions import Position, position_from_json
from tests.sampling import sampled

Mutant = Literal[
    "overwrites",
    "ignores a take-over",
    "does not know its own entries",
    "uses names again",
    "commits before all is written",
    "deletes before the entry",
    "deletes after a lost answer",
    "deletes what was pinned",
    "cleans up for another",
    "settles what is not deleted",
]
Status = Literal["part", "whole", "hidden"]
DELETE, HIDE = Chore("delete", source=0), Chore("hide", source=0)
Item = TypeVar("Item", bound=Hashable)


class Store(NamedTuple):
    """What lies under a name, and which run has written it."""

    name: str
    status: Status
    by: str


class Request(NamedTuple):
    """An operation on storage: ``what``, with what."""

    what: Literal["append", "last", "entries", "put", "hide", "delete"]
    detail: Any = None


class Stage(NamedTuple):
    """The method of an `Actor` that comes next, and what it is called with."""

    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class World:
    """All that lies on storage, and how many operations have failed."""

    log: tuple[str, ...]
    stores: frozenset[Store] = frozenset()
    failures: int = 0

    def find(self, name: str) -> Store | None:
        return next((store for store in self.stores if store.name == name), None)

    def with_store(self, name: str, found: Store | None) -> World:
        others = frozenset(store for store in self.stores if store.name != name)
        return replace(self, stores=others | {found} if found else others)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor stands: all that what it does next depends on.

    A stage begins with its arguments and what the journal knows; how that came to be known makes no
    difference. Within it, the answers to what it has asked so far tell the rest.
    """

    actor: int
    stage: Stage | None = None
    known: str = ""
    settled: tuple[Claim, ...] = ()
    promised: frozenset[str] = frozenset()
    answers: tuple[Any, ...] = ()
    request: Request | None = None


class SuspendedError(BaseException):
    """The actor waits for an answer."""


class AnewError(BaseException):
    """The journal has read on and begins a round anew: all that it knows is its state."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage


STORE = {"store": "a", "manifest": "0", "nbytes": 0, "seconds": 0.0}
COMMIT = {"run_number": 0, "stores": {"a": STORE}, "details": {}}


class BrokenError(AssertionError):
    """The protocol does not hold."""


class Storage:
    """What an actor sees of storage: the answers that it has had; the next request suspends it."""

    def __init__(self, model: Model, name: str, answers: tuple[Any, ...]) -> None:
        self._model = model
        self._name = name
        self._answers = iter(answers)
        self.request: Request | None = None

    def _ask(self, request: Request) -> Any:
        for answer in self._answers:
            if answer == "error":
                raise OSError("it failed, or its answer was lost")
            return answer
        self.request = request
        raise SuspendedError

    # --- the metadata handler

    def append(self, entry: Entry) -> bool:
        self._model.entries[entry["id"]] = entry
        return bool(self._ask(Request("append", entry["id"])))

    def write(self, epoch: int, record: Entry) -> bool:
        return self.append(record)

    def last_number(self) -> int:
        return int(self._ask(Request("last")))

    def entries(self, first: int = 0) -> Iterator[Entry]:
        found = [self._model.entries[key] for key in self._ask(Request("entries", first))]
        if self._model.mutant == "does not know its own entries":
            found = [{**entry, "id": ""} for entry in found]
        return iter(found)

    # --- the stores

    def put(self, claim: Claim, status: Status) -> None:
        self._ask(Request("put", Store(store_of(claim), status, self._name)))

    def hide(self, claim: Claim) -> None:
        self._ask(Request("hide", store_of(claim)))

    def delete(self, claim: Claim) -> None:
        self._ask(Request("delete", store_of(claim)))


class ModelWriter(LogWriter):
    """Makes entries whose id is their content, whatever way led to them: nobody says it twice."""

    def __init__(self, storage: Storage, name: str) -> None:
        super().__init__(storage, "k")  # type: ignore[arg-type]
        self._name = name

    def _make(self, kind: str, run: str, body: Mapping[str, Any]) -> LogEntry:
        entry = msgspec.structs.replace(super()._make(kind, self._name, body), time="", id="")
        return msgspec.structs.replace(entry, id=json.dumps(entry_to_json(entry), sort_keys=True))


class HeedlessWriter(ModelWriter):
    """A mutant's: goes on after it was taken over."""

    def _held(self, state: State) -> State:
        return state


class Actor:
    """The programs: each method is a stage, and gives the next one."""

    def __init__(self, model: Model, place: Place) -> None:
        name = model.names[place.actor]
        self.storage = Storage(model, name, place.answers)
        self.settled = place.settled
        self.promised = place.promised
        self._name = name
        self._mutant = model.mutant
        self._is_reduced = model.is_reduced
        self._rounds = 0
        kind = HeedlessWriter if self._mutant == "ignores a take-over" else ModelWriter
        self._writer = kind(self.storage, name)
        if place.known:
            number, body = json.loads(place.known)
            self._writer._state = State.from_json(msgspec.convert(body, Summary))
            self._writer._state.number = number
            self._writer._run = name

    def known(self) -> str:
        """What the writer knows, but for what nothing depends on: the id and time of a run."""
        state = self._writer._state
        if state is None:
            return ""
        body = state.to_json()
        body["run"] = body["run"] and {**body["run"], "id": "", "time": ""}
        for name in ("recorded", "retries", "claims"):
            body[name] = [[at.epoch, 1, 1, n, 0] for at, n in getattr(state, name).items()]
        return json.dumps([state.number, body], sort_keys=True)

    # --- what a manager does: take the directory, clean up, save epochs, retire, leave

    def take(self, saves: int, rewinds: bool = False) -> Stage:
        def judge(state: State) -> None:
            """Nobody is ever believed to be alive."""
            self._begin_round(Stage("take", (saves, rewinds)))

        self._writer.take(self._name, {"nodes": ["a"], "info": {}, "process": {}}, judge)
        return Stage("clean_up", (saves, rewinds))

    def _begin_round(self, stage: Stage) -> None:
        self._rounds += 1
        if self._rounds > 1 and self._is_reduced:
            raise AnewError(stage)

    def clean_up(self, saves: int, rewinds: bool) -> Stage:
        if self._mutant == "cleans up for another":
            state = self._writer.refresh()
        else:
            state = self._writer.check_held()
        return self._sweep_all(state.chores, Stage("rewind" if rewinds else "begin", (saves,)))

    def rewind(self, saves: int) -> Stage:
        state = self._writer.check_held()
        first, *later = state.recorded
        chores = {Claim(Position.of(epoch), state.retries[epoch]): HIDE for epoch in later}
        if later:
            self._append("rewind", {"after": first, "reason": "test"})
        return self._sweep_all(chores, Stage("begin", (saves,)))

    def begin(self, saves: int) -> Stage:
        if not saves:
            return Stage("end")
        state = self._writer.check_held()
        epoch = Position(0)
        if state.latest is not None:
            epoch = Position(state.latest.epoch + 1)
        retry = 0 if self._mutant == "uses names again" else state.claims.get(epoch, 0)
        self._append("begin", {"epoch": epoch, "retry": retry})
        return Stage("write", (Claim(Position.of(epoch), retry), saves))

    def write(self, claim: Claim, saves: int) -> Stage:
        try:
            self.storage.put(claim, "part")
            if self._mutant != "commits before all is written":
                self.storage.put(claim, "whole")
        except OSError:
            return Stage("abandon", (claim, saves))
        return Stage("commit", (claim, saves))

    def commit(self, claim: Claim, saves: int) -> Stage:
        try:
            self._writer.check_held()
            self._append("commit", {**claim._asdict(), **COMMIT})
        except CommitConflictError:
            raise
        except CheckpointError:
            return Stage("abandon", (claim, saves))
        if self._mutant == "commits before all is written":
            self.storage.put(claim, "whole")
        return Stage("retire", (saves - 1,))

    def abandon(self, claim: Claim, saves: int) -> Stage:
        after = Stage("begin", (saves - 1,))
        is_careless = self._mutant == "deletes after a lost answer"
        if is_careless or claim in self._writer.check_held().chores:
            # A slow worker may still write, so the claim is not settled.
            return Stage("sweep", (claim, "delete", False, after))
        return after

    def retire(self, saves: int) -> Stage:
        state = self._writer.check_held()
        kept = {state.latest, *state.pins}
        saved = [SavedEpoch(at) for at in sorted(state.recorded)]
        epochs = [at for at in KeepLast(1).retires(saved) if at not in kept]
        claims = [Claim(epoch, state.retries[epoch]) for epoch in epochs]
        if self._mutant == "deletes before the entry":
            for claim in claims:
                self.storage.delete(claim)
        if epochs:
            self._append("retire", {"epochs": epochs})
        chores = self._writer.known().chores
        if self._mutant != "deletes what was pinned":
            claims = [claim for claim in claims if claim in chores]
        return self._sweep_all(dict.fromkeys(claims, DELETE), Stage("begin", (saves,)))

    def end(self) -> None:
        self._append("end", {})

    def _append(self, kind: str, body: dict[str, Any]) -> None:
        settled, self.settled = self.settled, ()
        if settled:
            body["settled"] = [list(claim) for claim in settled]
        entry = self._writer.append(kind, body)
        if kind == "commit":
            self.promised |= {entry.id}

    def _sweep_all(self, chores: Mapping[Claim, Chore], after: Stage) -> Stage:
        for claim, chore in reversed(chores.items()):
            after = Stage("sweep", (claim, chore.action, True, after))
        return after

    def sweep(self, claim: Claim, action: str, is_final: bool, after: Stage) -> Stage:
        if self._mutant == "settles what is not deleted":
            self.settled += (claim,)
        try:
            self.storage.hide(claim)
            if action == "delete":
                self.storage.delete(claim)
        except OSError:
            return after  # it is left for the next run
        if is_final:
            self.settled += (claim,)
        return after

    # --- what a reader does

    def pin(self, epoch: Position | None = None) -> None:
        """Pin the oldest epoch."""

        def decide(state: State) -> dict[str, Any] | None:
            nonlocal epoch
            epoch = next(iter(state.recorded)) if epoch is None else epoch
            self._begin_round(Stage("pin", (epoch,)))
            return {"epoch": epoch, "label": self._name} if epoch in state.recorded else None

        done = self._writer.note("pin", decide)
        if done is not None:
            self.promised |= {done.id}


class Numbers(Generic[Item]):
    """Numbers for what is long to compare."""

    def __init__(self) -> None:
        self._numbers: dict[Item, int] = {}
        self.items: list[Item] = []

    def of(self, item: Item) -> int:
        number = self._numbers.setdefault(item, len(self.items))
        if number == len(self.items):
            self.items.append(item)
        return number


class Model:
    """The walk through all orders of what the actors do.

    A state is a world and the place of each actor, by their numbers.
    """

    def __init__(
        self,
        actors: Sequence[Stage],
        failures: int,
        mutant: Mutant | None = None,
        *,
        is_reduced: bool = True,
    ) -> None:
        self.mutant = mutant
        self.is_reduced = is_reduced
        self.names = [f"{i} {stage.name}" for i, stage in enumerate(actors)]
        self.entries: dict[str, Entry] = {}
        self.visited = 0
        self._failures = failures
        self._worlds: Numbers[World] = Numbers()
        self._places: Numbers[Place] = Numbers()
        starts = [Place(i, stage) for i, stage in enumerate(actors)]
        self._first = (
            self._worlds.of(self._first_world()),
            *(self._places.of(self._settle(place)) for place in starts),
        )
        self._served = functools.cache(self._serve)
        self._told = functools.cache(self._tell)
        self.sights: set[tuple[World, frozenset[str]]] = set()

    def _first_world(self) -> World:
        """Epoch 0 is recorded, by a run that was killed while it saved epoch 1."""
        said: list[tuple[str, dict[str, Any]]] = [
            ("run", {"nodes": ["a"], "info": {}, "process": {}}),
            ("begin", {"epoch": 0, "retry": 0}),
            ("commit", {"epoch": 0, "retry": 0, **COMMIT}),
            ("begin", {"epoch": 1, "retry": 0}),
        ]
        for number, (kind, body) in enumerate(said):
            self.entries[f"first {number}"] = entry_to_json(make_entry(number, kind, "first", body))
        stores = {Store("a.0", "whole", "first"), Store("a.1", "part", "first")}
        return World(tuple(self.entries), frozenset(stores))

    def walk(self) -> None:
        """Visit all states."""
        found = {self._first}
        waiting = [self._first]
        while waiting:
            state = waiting.pop()
            self.visited += 1
            self._check(state)
            for after in self._nexts(state):
                if after not in found:
                    found.add(after)
                    waiting.append(after)

    def _nexts(self, state: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        world, *places = state
        for i, place in enumerate(places, 1):
            request = self._places.items[place].request
            if request is not None:
                for after, answer in self._served(world, request):
                    yield (after, *state[1:i], self._told(place, answer), *state[i + 1 :])

    # --- what storage does

    def _serve(self, number: int, request: Request) -> list[tuple[int, Any]]:
        """What may come of a request: the world after it, and the answer."""
        world = self._worlds.items[number]
        after, answer = self._do(world, request)
        ways = [(after, answer)]
        if world.failures < self._failures:
            failed = replace(world, failures=world.failures + 1)
            ways.append((failed, "error"))
            if after != world:
                done = replace(after, failures=world.failures + 1)
                ways.append((done, "error"))
                if request.what == "append":
                    # Tried again by what is below the handler: it finds what it has written.
                    ways.append((done, False))
        return [(self._worlds.of(world), answer) for world, answer in ways]

    def _do(self, world: World, request: Request) -> tuple[World, Any]:
        what, detail = request
        if what == "last":
            return world, len(world.log) - 1
        if what == "entries":
            return world, world.log[detail:]
        if what == "append":
            log, number = world.log, self.entries[detail]["number"]
            if number < len(log) and self.mutant != "overwrites":
                assert log[number] != detail, "two entries are taken for one"
                return world, False
            return replace(world, log=(*log[:number], detail, *log[number + 1 :])), True
        name = detail.name if what == "put" else detail
        there = world.find(name)
        if what == "put":
            if there is not None and there.by != detail.by:
                raise BrokenError(f"{name} is written by {detail.by} over {there}")
            return world.with_store(name, detail), None
        if what == "hide":
            return world.with_store(name, there and there._replace(status="hidden")), None
        return world.with_store(name, None), None

    # --- what actors do

    def _tell(self, number: int, answer: Any) -> int:
        """Where an actor stands once it has had an answer."""
        place = self._places.items[number]
        return self._places.of(self._settle(replace(place, answers=(*place.answers, answer))))

    def _settle(self, place: Place) -> Place:
        """Let an actor go on to its next request, or its end."""
        actor, stage = Actor(self, place), place.stage
        while stage is not None:
            answers: tuple[Any, ...] = ()
            try:
                stage = getattr(actor, stage.name)(*stage.arguments)
            except SuspendedError:
                return replace(place, promised=actor.promised, request=actor.storage.request)
            except AnewError as anew:
                stage = anew.stage
                answers = ((),)  # it has just read, and there is nothing new
            except CheckpointCorruptError as error:
                raise BrokenError(str(error)) from error
            except CheckpointError:
                break  # this actor is over
            if self.is_reduced and stage is not None:
                place = Place(
                    place.actor, stage, actor.known(), actor.settled, actor.promised, answers
                )
                actor = Actor(self, place)
        return Place(place.actor, promised=actor.promised)

    # --- what must hold

    def _check(self, state: tuple[int, ...]) -> None:
        promised = frozenset[str]().union(*(self._places.items[n].promised for n in state[1:]))
        sight = (self._worlds.items[state[0]], promised)
        if sight not in self.sights:
            self.sights.add(sight)
            self.check(*sight)

    def check(self, world: World, promised: frozenset[str]) -> None:
        """What must hold at every moment, whoever is killed next."""
        try:
            state = State()
            for key in world.log:
                state.apply(parse_entry(self.entries[key], key))
        except CheckpointCorruptError as error:
            raise BrokenError(f"the log cannot be read: {error}") from error
        known = {store_of(claim) for claim in state.chores}
        for epoch in state.recorded:
            name = store_of(Claim(Position.of(epoch), state.retries[epoch]))
            known.add(name)
            entry = self.entries[world.log[state.commit_number(Position.of(epoch))]]
            if world.find(name) != (name, "whole", entry["run"]):
                raise BrokenError(f"epoch {epoch} is recorded, and {name} is {world.find(name)}")
        for key in promised:
            entry = self.entries[key]
            if key not in world.log:
                raise BrokenError(f"{entry['kind']} was acknowledged, and is not in the log")
            if entry["kind"] == "pin" and position_from_json(entry["epoch"]) not in state.recorded:
                raise BrokenError(f"epoch {entry['epoch']} was pinned, and is gone")
        holder = state.run.run if state.run else None
        for store in world.stores:
            if store.name not in known and store.by in ("first", holder):
                raise BrokenError(f"nothing in the log speaks of {store.name}")


def store_of(claim: Claim) -> str:
    return f"a.{claim.epoch}" + (f".r{claim.retry}" if claim.retry else "")


RUN, READER = Stage("take", (1,)), Stage("pin")
RUN_OF_TWO, REWINDING_RUN = Stage("take", (2,)), Stage("take", (1, True))
CASES = {
    "a run and a reader, one failure": ([RUN, READER], 1),
    "two runs, one failure": ([RUN, RUN], 1),
}
MORE_CASES = {
    "a run, one that rewinds, and a reader": ([RUN, REWINDING_RUN, READER], 0),
    "two runs and a reader": ([RUN, RUN, READER], 0),
    "two runs and a reader, one failure": ([RUN, RUN, READER], 1),
    "two runs of two saves, one failure": ([RUN_OF_TWO, RUN_OF_TWO], 1),
    "two runs of two saves and a reader": ([RUN_OF_TWO, RUN_OF_TWO, READER], 0),
    "three runs": ([RUN, RUN, RUN], 0),
}


@sampled("cases", sample=CASES, nightly=CASES | MORE_CASES)
def test_in_every_order_of_events_what_is_recorded_is_whole(
    cases: dict[str, tuple[list[Stage], int]],
) -> None:
    for case, (actors, failures) in cases.items():
        model = Model(actors, failures)
        model.walk()
        print(f"{case}: {model.visited} states, {len(model.sights)} of storage, 0 losses")
        assert len(model.sights) > 100, case


@sampled("actors", sample=[RUN, READER], nightly=[RUN, RUN])
def test_what_counts_as_the_same_place_leads_to_the_same_states_of_storage(
    actors: list[Stage],
) -> None:
    reduced = Model(actors, int(READER in actors))
    whole = Model(actors, int(READER in actors), is_reduced=False)
    reduced.walk()
    whole.walk()
    print(f"{whole.visited} states, {reduced.visited} of them are not the same")
    assert whole.sights == reduced.sights
    assert whole.visited > reduced.visited


@pytest.mark.parametrize("mutant", get_args(Mutant))
def test_a_protocol_without_one_of_its_rules_fails(mutant: Mutant) -> None:
    visited = 0
    with pytest.raises(BrokenError):  # noqa: PT012
        for actors, failures in (CASES | MORE_CASES).values():
            model = Model(actors, failures, mutant)
            try:
                model.walk()
            finally:
                visited += model.visited
    print(f"{mutant}: found out after {visited} states")
