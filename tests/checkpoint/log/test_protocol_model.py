"""The protocol, every order of events: runs, a reader who pins, crashes, operations that fail.

The log writer, the meaning of the entries and the names of stores are the real ones; the storage is
a model in which each operation is one step. A run saves groups of epochs, each recorded by one entry
that also retires others and claims the names of the next group. Runs take over from each other at
any moment, alive or not, as if silence were always misjudged. A run that is killed is one that takes
no further step, which nobody can tell from one that is slow; so each state is also that of a crash.
All reachable states are visited (of the larger cases by ``pytest -m nightly``), and in each:

- the log can be read, and every epoch that is recorded is whole on disk;
- no store is written by two claims;
- what was acknowledged (a commit, a pin) is in the log, and what was pinned is recorded;
- every store that counts for nothing is known to the log as something to be deleted, and what another
  program made stays.

Mutants of the protocol, each with one rule left out, must be found out by the same walk.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

import msgspec
import pytest

from jobrunner import CheckpointCorruptError, CheckpointError, CommitConflictError
from jobrunner.checkpoint.log.entries import (
    ClaimEntry,
    CommitEntry,
    EndEntry,
    Entry,
    LogEntry,
    PinEntry,
    Record,
    RunEntry,
    Store,
    entry_to_json,
    parse_entry,
    record_in,
)
from jobrunner.checkpoint.log.log_writer import LogWriter, make_entry
from jobrunner.checkpoint.log.state import Claim, State
from jobrunner.names import parse_store_name
from jobrunner.positions import Position
from tests.sampling import sampled

Mutant = Literal[
    "overwrites",
    "ignores a take-over",
    "does not know its own entries",
    "uses names again",
    "gives back names in use",
    "writes above its claim",
    "commits before all is written",
    "deletes before the entry",
    "deletes after a lost answer",
    "deletes what was pinned",
    "deletes what others made",
]
Status = Literal["part", "whole"]
Item = TypeVar("Item", bound=Hashable)


class StoreThere(NamedTuple):
    """What lies under a name, and by which claim of which run it was written."""

    name: str
    status: Status
    by: str


class Request(NamedTuple):
    """An operation on storage: ``what``, with what."""

    what: Literal["append", "last", "entries", "names", "put", "delete"]
    detail: Any = None


class Stage(NamedTuple):
    """The method of an `Actor` that comes next, and what it is called with."""

    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class World:
    """All that lies on storage, and how many operations have failed."""

    log: tuple[str, ...]
    stores: frozenset[StoreThere] = frozenset()
    failures: int = 0

    def find(self, name: str) -> StoreThere | None:
        return next((store for store in self.stores if store.name == name), None)

    def with_store(self, name: str, found: StoreThere | None) -> World:
        others = frozenset(store for store in self.stores if store.name != name)
        return replace(self, stores=others | {found} if found else others)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor stands: all that what it does next depends on.

    A stage begins with its arguments and what the writer knows; how that came to be known makes no
    difference. Within it, the answers to what it has asked so far tell the rest.
    """

    actor: int
    stage: Stage | None = None
    known: str = ""
    late: tuple[str, ...] = ()
    """Stores of an abandoned save that a slow worker still writes."""
    ordered: int = -1
    """The last epoch that workers were told to write."""
    promised: frozenset[str] = frozenset()
    """Ids of entries that were acknowledged."""
    answers: tuple[Any, ...] = ()
    request: Request | None = None


class SuspendedError(BaseException):
    """The actor waits for an answer."""


class AnewError(BaseException):
    """The writer has read on and begins a round anew: all that it knows is its state."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage


class BrokenError(AssertionError):
    """The protocol does not hold."""


class Storage:
    """What an actor sees of storage: the answers that it has had; the next request suspends it."""

    def __init__(self, model: Model, name: str, answers: tuple[Any, ...]) -> None:
        self._model = model
        self._name = name
        self._answers = iter(answers)
        self.request: Request | None = None
        self.writer: LogWriter | None = None

    def _ask(self, request: Request) -> Any:
        for answer in self._answers:
            if answer == "error":
                raise OSError("it failed, or its answer was lost")
            return answer
        self.request = request
        raise SuspendedError

    # --- the metadata handler

    def set_params(self, path: str, node_names: Sequence[str]) -> None:
        pass

    def append(self, entry: Entry) -> bool:
        self._model.entries[entry["id"]] = entry
        return bool(self._ask(Request("append", entry["id"])))

    def last_number(self) -> int:
        return int(self._ask(Request("last")))

    def entries(self, first: int = 0) -> Iterator[Entry]:
        found = [self._model.entries[key] for key in self._ask(Request("entries", first))]
        if self._model.mutant == "does not know its own entries":
            found = [{**entry, "id": ""} for entry in found]
        state = self.writer._state if self.writer else None
        if state is not None and state.number == first:
            # The directory is never replaced here, so what was read last is still there.
            found[:1] = [{"id": state.last_id}]
        return iter(found)

    # --- the stores

    def names(self) -> list[str]:
        return list(self._ask(Request("names")))

    def put(self, name: str, status: Status, claim: int) -> None:
        self._ask(Request("put", StoreThere(name, status, f"{self._name} {claim}")))

    def delete(self, name: str) -> None:
        self._ask(Request("delete", name))


class ModelWriter(LogWriter):
    """Makes entries whose id is their content, whatever way led to them: nobody says it twice."""

    def __init__(self, storage: Storage, name: str) -> None:
        super().__init__(storage, "k")
        storage.writer = self
        self._name = name

    def _make(self, kind: type[Any], run: str, fields: Mapping[str, Any]) -> Any:
        entry = super()._make(kind, self._name, fields)
        entry = msgspec.structs.replace(entry, time="", id="")
        content = json.dumps({**entry_to_json(entry), "id": ""}, sort_keys=True)
        entry = msgspec.structs.replace(entry, id=str(self.numbers.of(content)))
        return entry


class HeedlessWriter(ModelWriter):
    """A mutant's: goes on after it was taken over."""

    def _held(self, state: State) -> State:
        return state


def record_of(at: Position, name: str) -> Record:
    return Record(at, {"a": Store(name, "0", 0)})


class Actor:
    """The programs: each method is a stage, and gives the next one."""

    def __init__(self, model: Model, place: Place) -> None:
        name = model.names[place.actor]
        self.storage = Storage(model, name, place.answers)
        self.late = place.late
        self.ordered = place.ordered
        self.promised = place.promised
        self._name = name
        self._mutant = model.mutant
        self._rounds = 0
        kind = HeedlessWriter if self._mutant == "ignores a take-over" else ModelWriter
        self._writer = kind(self.storage, name)
        self._writer.numbers = model.contents
        if place.known:
            self._writer._state = State.from_bytes(place.known.encode())
            self._writer._run = name

    def known(self) -> str:
        """What the writer knows, but for what nothing depends on: ids."""
        state = self._writer._state
        if state is None:
            return ""
        state.last_id = ""
        return state.to_bytes().decode()

    # --- what a manager does: take the directory, clean up, save groups, retire, leave

    def take(self, groups: tuple[int, ...]) -> Stage:
        def decide(state: State) -> dict[str, Any]:
            """Nobody is ever believed to be alive."""
            self._begin_round(Stage("take", (groups,)))
            return {"nodes": ["a"], "info": {}}

        self._writer.take(self._name, decide)
        return Stage("clean_up", (groups,))

    def _begin_round(self, stage: Stage) -> None:
        self._rounds += 1
        if self._rounds > 1:
            raise AnewError(stage)

    def clean_up(self, groups: tuple[int, ...]) -> Stage:
        state = self._writer.check_held()
        if self._mutant == "deletes what others made":
            state.strangers, state.upto = set(), Position(9)
        return self._sweep(state, self.storage.names(), Stage("begin", (groups,)))

    def _sweep(self, state: State, names: Iterable[str], after: Stage) -> Stage:
        """Delete those of these stores that count for nothing."""
        stores = [(name, parse_store_name(name)) for name in names]
        doomed = [name for name, store in stores if store is not None and state.is_left_over(store)]
        return Stage("sweep", (tuple(doomed), after))

    def _name_in_log(self, commit: int, at: Position) -> str:
        return record_in(self._writer.read_entry(commit), at).stores["a"].name

    def sweep(self, names: tuple[str, ...], after: Stage) -> Stage:
        if not names:
            return after
        try:
            self.storage.delete(names[0])
        except OSError:
            return after  # it is left for the next run
        return Stage("sweep", (names[1:], after))

    def begin(self, groups: tuple[int, ...]) -> Stage:
        if not groups:
            return Stage("write_late", ())
        state = self._writer.check_held()
        first = _after(state.latest, 1).epoch
        claim = self._writer.claim(_after(state.latest, groups[0]), ["a.4"])
        return Stage("write", (claim, first, groups))

    def write(self, claim: Claim, first: int, groups: tuple[int, ...]) -> Stage:
        """Write the stores of a group, which no entry needs to claim."""
        epochs = [Position(first + i) for i in range(groups[0])]
        self.ordered = max(self.ordered, epochs[-1].epoch)
        names = [self._store_name(claim, epoch) for epoch in epochs]
        if self._mutant == "writes above its claim":
            names.append(self._store_name(claim, Position(first + groups[0])))
        try:
            for name in names:
                self.storage.put(name, "part", claim.number)
            if self._mutant != "commits before all is written":
                for name in names:
                    self.storage.put(name, "whole", claim.number)
        except OSError:
            return Stage("abandon", (claim, first, groups))
        return Stage("commit", (claim, first, groups))

    def _store_name(self, claim: Claim, at: Position) -> str:
        return f"a.{at}" if self._mutant == "uses names again" else claim.store_name("a", at)

    def commit(self, claim: Claim, first: int, groups: tuple[int, ...]) -> Stage:
        """Record a group, retire all others, and claim the names of the next group."""
        try:
            state = self._writer.check_held()
            epochs = [Position(first + i) for i in range(groups[0])]
            records = [record_of(epoch, self._store_name(claim, epoch)) for epoch in epochs]
            retires = [at for at in state.epochs if at not in state.pins]
            stores = [self._name_in_log(state.recorded[at], at) for at in retires]
            if self._mutant == "deletes before the entry":
                for name in stores:
                    self.storage.delete(name)
            self._append(
                CommitEntry,
                claim=claim.number,
                records=records,
                retires=retires,
                upto=_after(epochs[-1], groups[1]) if len(groups) > 1 else None,
            )
        except CommitConflictError:
            raise
        except CheckpointError:
            return Stage("abandon", (claim, first, groups))
        if self._mutant == "commits before all is written":
            for epoch in epochs:
                self.storage.put(self._store_name(claim, epoch), "whole", claim.number)
        after = Stage("write_late")
        if len(groups) > 1:
            after = Stage("write", (claim, first + groups[0], groups[1:]))
        if self._mutant == "deletes what was pinned":
            return Stage("sweep", (tuple(stores), after))
        return self._sweep(self._writer.known(), stores, after)

    def abandon(self, claim: Claim, first: int, groups: tuple[int, ...]) -> Stage:
        epochs = [Position(first + i) for i in range(groups[0])]
        names = [self._store_name(claim, epoch) for epoch in epochs]
        after = Stage("begin", (groups[1:],))
        state = self._writer.check_held()
        if self._mutant == "deletes after a lost answer":
            return Stage("sweep", (tuple(names), after))
        if epochs[-1] not in state.recorded:
            # A slow worker may still write.
            self.late = (*names, str(claim.number))
        return self._sweep(state, names, after)

    def write_late(self) -> Stage:
        """What a slow worker does that was told of no abandoned save."""
        if self.late:
            *names, claim = self.late
            for name in names:
                self.storage.put(name, "part", int(claim))
        return Stage("end")

    def end(self) -> None:
        state = self._writer.known()
        upto = None
        if state.claim is not None:
            upto = Position(self.ordered)
            if self._mutant == "gives back names in use":
                upto = state.claim.last or state.claim.after
        self._append(EndEntry, upto=upto)

    def _append(self, kind: type[Any], **fields: Any) -> LogEntry:
        entry: LogEntry = self._writer.append(kind, **fields)
        if isinstance(entry, CommitEntry):
            self.promised |= {entry.id}
        return entry

    # --- what a reader does

    def pin(self, epoch: int | None = None) -> None:
        """Pin the oldest epoch."""

        def decide(state: State) -> dict[str, Any] | None:
            nonlocal epoch
            epoch = state.epochs[0].epoch if epoch is None else epoch
            self._begin_round(Stage("pin", (epoch,)))
            is_recorded = Position(epoch) in state.recorded
            return {"epoch": Position(epoch), "label": self._name} if is_recorded else None

        done = self._writer.note(PinEntry, decide)
        if done is not None:
            self.promised |= {done.id}


def _after(at: Position | None, count: int) -> Position:
    """The epoch that comes `count` after another."""
    return Position(count - 1 if at is None else at.epoch + count)


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
        self, actors: Sequence[Stage], failures: int, mutant: Mutant | None = None
    ) -> None:
        self.mutant = mutant
        self.names = [f"{i} {stage.name}" for i, stage in enumerate(actors)]
        self.entries: dict[str, Entry] = {}
        self.contents: Numbers[str] = Numbers()
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
        zero, one = Position(0), Position(1)
        said: list[tuple[type[Any], dict[str, Any]]] = [
            (RunEntry, {"nodes": ["a"], "info": {}}),
            (ClaimEntry, {"upto": zero, "retry": 1}),
            (CommitEntry, {"claim": 1, "records": [record_of(zero, "a.0")], "upto": one}),
        ]
        for number, (kind, body) in enumerate(said):
            entry = make_entry(kind, number, "first", **body)
            self.entries[f"first {number}"] = entry_to_json(entry)
        stores = [
            StoreThere("a.0", "whole", "first 1"),
            StoreThere("a.1", "part", "first 1"),
            StoreThere("a.4", "whole", "another program"),
        ]
        return World(tuple(self.entries), frozenset(stores))

    def walk(self) -> None:
        """Visit all states."""
        found = {self._first}
        waiting = [self._first]
        while waiting:
            state = waiting.pop()
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
        if what == "names":
            return world, tuple(sorted(store.name for store in world.stores))
        if what == "put":
            there = world.find(detail.name)
            if there is not None and there.by != detail.by:
                raise BrokenError(f"{detail.name} is written by {detail.by} over {there}")
            return world.with_store(detail.name, detail), None
        return world.with_store(detail, None), None

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
            except (CheckpointError, OSError):
                break  # this actor is over
            if stage is not None:
                told = (actor.late, actor.ordered, actor.promised)
                place = Place(place.actor, stage, actor.known(), *told, answers)
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
        state = State()
        entries = [parse_entry(self.entries[key], key) for key in world.log]
        try:
            for entry in entries:
                state.apply(entry)
        except CheckpointCorruptError as error:
            raise BrokenError(f"the log cannot be read: {error}") from error
        kept = {"a.4": "another program"}  # or recorded -> who wrote them
        for at, number in state.recorded.items():
            commit = entries[number]
            kept[record_in(commit, at).stores["a"].name] = f"{commit.run} {commit.claim}"
        for name, by in kept.items():
            if world.find(name) != (name, "whole", by):
                raise BrokenError(f"{name} is recorded, and is {world.find(name)}")
        for key in promised:
            entry = parse_entry(self.entries[key], key)
            if key not in world.log:
                raise BrokenError(f"{entry.kind} was acknowledged, and is not in the log")
            if isinstance(entry, PinEntry) and entry.epoch not in state.recorded:
                raise BrokenError(f"epoch {entry.epoch} was pinned, and is gone")
        for store in world.stores:
            name = parse_store_name(store.name)
            if store.name not in kept and not state.is_left_over(name):
                raise BrokenError(f"nothing in the log speaks of {store.name}")


RUN, READER = Stage("take", ((1,),)), Stage("pin")
RUN_OF_TWO, RUN_OF_GROUPS = Stage("take", ((1, 1),)), Stage("take", ((2, 1),))
CASES = {
    "a run and a reader, one failure": ([RUN, READER], 1),
    "two runs, one failure": ([RUN, RUN], 1),
    "a run of two groups, one failure": ([RUN_OF_GROUPS], 1),
}
MORE_CASES = {
    "two runs and a reader, one failure": ([RUN, RUN, READER], 1),
    "two runs of two saves, one failure": ([RUN_OF_TWO, RUN_OF_TWO], 1),
    "two runs of two saves and a reader": ([RUN_OF_TWO, RUN_OF_TWO, READER], 0),
    "a run of groups, a run, one failure": ([RUN_OF_GROUPS, RUN], 1),
    "a run of groups, a run and a reader": ([RUN_OF_GROUPS, RUN, READER], 0),
    "two runs of groups": ([RUN_OF_GROUPS, RUN_OF_GROUPS], 0),
    "three runs": ([RUN, RUN, RUN], 0),
}


@sampled("cases", sample=CASES, nightly=CASES | MORE_CASES)
def test_in_every_order_of_events_what_is_recorded_is_whole(
    cases: dict[str, tuple[list[Stage], int]],
) -> None:
    for case, (actors, failures) in cases.items():
        model = Model(actors, failures)
        model.walk()
        assert len(model.sights) > 50, case


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", get_args(Mutant))
def test_a_protocol_without_one_of_its_rules_fails(mutant: Mutant) -> None:
    with pytest.raises(BrokenError):  # noqa: PT012
        for actors, failures in (CASES | MORE_CASES).values():
            Model(actors, failures, mutant).walk()
