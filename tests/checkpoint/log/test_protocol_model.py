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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

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


class World(NamedTuple):
    """All that lies on storage, and how many operations have failed."""

    log: tuple[str, ...]
    """The ids of the entries."""
    stores: frozenset[StoreThere]
    failures: int = 0

    def find(self, name: str) -> StoreThere | None:
        return next((store for store in self.stores if store.name == name), None)

    def with_store(self, name: str, found: StoreThere | None) -> World:
        others = frozenset(store for store in self.stores if store.name != name)
        return self._replace(stores=others | {found} if found else others)


class Place(NamedTuple):
    """Where an actor stands: all that what it does next depends on.

    A stage begins with its arguments and what the writer knows; how that came to be known makes no
    difference. Within it, the answers to what it has asked so far tell the rest.
    """

    name: str
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


class BrokenError(AssertionError):
    """The protocol does not hold."""


class ModelWriter(LogWriter):
    """Makes entries whose id is their content, whatever way led to them: nobody says it twice."""

    def _make(self, kind: type[Any], run: str, fields: Mapping[str, Any]) -> Any:
        entry = super()._make(kind, self.handler.name, fields)
        entry = msgspec.structs.replace(entry, time="", id="")
        content = json.dumps(entry_to_json(entry), sort_keys=True)
        return msgspec.structs.replace(entry, id=content)


class HeedlessWriter(ModelWriter):
    """A mutant's: goes on after it was taken over."""

    def _held(self, state: State) -> State:
        return state


class Storage:
    """What an actor sees of storage: the answers that it has had; the next request suspends it.

    It is the handler of the actor's log, too.
    """

    def __init__(self, model: Model, name: str, answers: tuple[Any, ...]) -> None:
        self.name = name
        self.request: Request | None = None
        self._model = model
        self._answers = iter(answers)
        is_heedless = model.mutant == "ignores a take-over"
        self.writer = (HeedlessWriter if is_heedless else ModelWriter)(self, "k")

    def _ask(self, what: Any, detail: Any = None) -> Any:
        for answer in self._answers:
            if answer == "error":
                raise OSError("it failed, or its answer was lost")
            return answer
        self.request = Request(what, detail)
        raise SuspendedError

    def set_params(self, path: str, node_names: Sequence[str]) -> None:
        pass

    def append(self, entry: Entry) -> bool:
        self._model.entries[entry["id"]] = entry
        return bool(self._ask("append", entry["id"]))

    def last_number(self) -> int:
        return int(self._ask("last"))

    def entries(self, first: int = 0) -> Iterator[Entry]:
        found = [self._model.entries[key] for key in self._ask("entries", first)]
        if self._model.mutant == "does not know its own entries":
            found = [{**entry, "id": ""} for entry in found]
        state = self.writer._state
        if state is not None and state.number == first:
            # The directory is never replaced here, so what was read last is still there.
            found[:1] = [{"id": state.last_id}]
        return iter(found)

    def names(self) -> list[str]:
        return list(self._ask("names"))

    def put(self, name: str, status: Status, claim: int) -> None:
        self._ask("put", StoreThere(name, status, f"{self.name} {claim}"))

    def delete(self, name: str) -> None:
        self._ask("delete", name)


def record_of(at: Position, name: str) -> Record:
    return Record(at, {"a": Store(name, "0", 0)})


class Actor:
    """The programs: each method is a stage, and gives the next one."""

    def __init__(self, model: Model, place: Place) -> None:
        self.storage = Storage(model, place.name, place.answers)
        self.late = place.late
        self.ordered = place.ordered
        self.promised = place.promised
        self._name = place.name
        self._mutant = model.mutant
        self._writer = self.storage.writer
        if place.known:
            self._writer._state = State.from_bytes(place.known.encode())
            self._writer._run = place.name

    def known(self) -> str:
        """What the writer knows, but for what nothing depends on: ids."""
        state = self._writer._state
        if state is None:
            return ""
        state.last_id = ""
        return state.to_bytes().decode()

    # --- what a manager does: take the directory, clean up, save groups, retire, leave

    def take(self, groups: tuple[int, ...]) -> Stage:
        # Nobody is ever believed to be alive.
        self._writer.take(self._name, lambda state: {"nodes": ["a"], "info": {}})
        return Stage("clean_up", (groups,))

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

    def pin(self) -> None:
        """Pin the oldest epoch."""
        epoch: Position | None = None

        def decide(state: State) -> dict[str, Any] | None:
            nonlocal epoch
            epoch = epoch or state.epochs[0]
            return {"epoch": epoch, "label": self._name} if epoch in state.recorded else None

        done = self._writer.note(PinEntry, decide)
        if done is not None:
            self.promised |= {done.id}


def _after(at: Position | None, count: int) -> Position:
    """The epoch that comes `count` after another."""
    return Position(count - 1 if at is None else at.epoch + count)


class Model:
    """The walk through all orders of what the actors do.

    A state is a world and the place of each actor.
    """

    def __init__(
        self, actors: Sequence[Stage], failures: int, mutant: Mutant | None = None
    ) -> None:
        self.mutant = mutant
        self.entries: dict[str, Entry] = {}
        self._failures = failures
        self._serve = functools.cache(self._find_answers)
        self._tell = functools.cache(self._go_on)
        self._check = functools.cache(self._check_world)
        places = [Place(f"{i} {stage.name}", stage) for i, stage in enumerate(actors)]
        self._first = (self._first_world(), *map(self._settle, places))

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

    def walk(self) -> int:
        """Visit all states; returns how many there are."""
        found = {self._first}
        waiting = [self._first]
        while waiting:
            state = waiting.pop()
            world, *places = state
            self._check(world, frozenset().union(*(place.promised for place in places)))
            for after in self._nexts(world, places):
                if after not in found:
                    found.add(after)
                    waiting.append(after)
        return len(found)

    def _nexts(self, world: World, places: Sequence[Place]) -> Iterator[tuple[Any, ...]]:
        for i, place in enumerate(places):
            if place.request is not None:
                for after, answer in self._serve(world, place.request):
                    yield (after, *places[:i], self._tell(place, answer), *places[i + 1 :])

    # --- what storage does

    def _find_answers(self, world: World, request: Request) -> list[tuple[World, Any]]:
        """What may come of a request: the world after it, and the answer."""
        after, answer = self._do(world, request)
        ways = [(after, answer)]
        if world.failures < self._failures:
            ways.append((world._replace(failures=world.failures + 1), "error"))
            if after != world:
                done = after._replace(failures=world.failures + 1)
                ways.append((done, "error"))
                if request.what == "append":
                    # Tried again by what is below the handler: it finds what it has written.
                    ways.append((done, False))
        return ways

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
            return world._replace(log=(*log[:number], detail, *log[number + 1 :])), True
        if what == "names":
            return world, tuple(sorted(store.name for store in world.stores))
        if what == "put":
            there = world.find(detail.name)
            if there is not None and there.by != detail.by:
                raise BrokenError(f"{detail.name} is written by {detail.by} over {there}")
            return world.with_store(detail.name, detail), None
        return world.with_store(detail, None), None

    # --- what actors do

    def _go_on(self, place: Place, answer: Any) -> Place:
        """Where an actor stands once it has had an answer."""
        return self._settle(place._replace(answers=(*place.answers, answer)))

    def _settle(self, place: Place) -> Place:
        """Let an actor go on to its next request, or its end."""
        actor, stage = Actor(self, place), place.stage
        while stage is not None:
            try:
                stage = getattr(actor, stage.name)(*stage.arguments)
            except SuspendedError:
                return place._replace(promised=actor.promised, request=actor.storage.request)
            except CheckpointCorruptError as error:
                raise BrokenError(str(error)) from error
            except (CheckpointError, OSError):
                break  # this actor is over
            if stage is not None:
                known = actor.known()
                place = Place(place.name, stage, known, actor.late, actor.ordered, actor.promised)
                actor = Actor(self, place)
        return Place(place.name, promised=actor.promised)

    def _check_world(self, world: World, promised: frozenset[str]) -> None:
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
        num_states = Model(actors, failures).walk()
        assert num_states > 100, case


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", get_args(Mutant))
def test_a_protocol_without_one_of_its_rules_fails(mutant: Mutant) -> None:
    with pytest.raises(BrokenError):  # noqa: PT012
        for actors, failures in (CASES | MORE_CASES).values():
            Model(actors, failures, mutant).walk()
