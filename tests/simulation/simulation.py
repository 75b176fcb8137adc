"""Driver, workers, network and store in one thread, in an order that a seed decides.

The decisions (`jobrunner.run.decisions`), the client's questions about a run
(`jobrunner.cluster.exchange`) and the meaning of the log (`jobrunner.checkpoint.log.state`) are the
real ones. Everything that can go wrong around them is
simulated: messages arrive late and in any order; workers die or cannot reach each other; workers
and drivers stop and come back; a driver is killed and started again. A node's state is a hash of
all its epochs, so an epoch that is lost, run twice or mixed with another attempt's shows.

    python tests/simulation/simulation.py 5000          seeds 0 to 4999
    python tests/simulation/simulation.py --seed 1234   one of them, with its story
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable

from jobrunner.checkpoint.log.entries import (
    ClaimEntry,
    CommitEntry,
    DoneEntry,
    EndEntry,
    LogEntry,
    Record,
    RunEntry,
    record_in,
)
from jobrunner.checkpoint.log.entries import Store as RecordedStore
from jobrunner.checkpoint.log.log_writer import make_entry
from jobrunner.checkpoint.log.state import Claim, State
from jobrunner.cluster.exchange import (
    Action,
    Ask,
    Heard,
    Member,
    Members,
    Request,
    exchange,
)
from jobrunner.cluster.placement import WorkerInfo, within_reach
from jobrunner.errors import NodeLostError
from jobrunner.positions import Position
from jobrunner.run.decisions import Losses, next_decision

NODES = ("a", "b", "c")
EPOCHS = 6
"""How often the epoch group runs; every other time in the middle of an epoch of two steps."""
MAX_EVENTS = 20_000


def fold(entries: Iterable[LogEntry]) -> State:
    """The state that `entries` give."""
    state = State()
    for entry in entries:
        state.apply(entry)
    return state


def recorded_stores(
    log: list[LogEntry], state: State, position: Position
) -> dict[str, RecordedStore]:
    """The stores of a recorded epoch, by node."""
    return dict(record_in(log[state.recorded[position]], position).stores or {})


def at(runs: int) -> Position:
    """The epoch or position after that many runs of the epoch group."""
    return Position(*divmod(runs, 2))


def runs_in(position: Position) -> int:
    """Undo `at`."""
    return 2 * position.epoch + position.step


def after_epoch(state: str, node: str, epoch: int) -> str:
    """A node's state after one more epoch."""
    return hashlib.sha1(f"{state} {node} {epoch}".encode()).hexdigest()[:12]


def expected(node: str, epoch: int) -> str:
    """The state of a node that nothing ever disturbed."""
    state = "init"
    for e in range(1, epoch + 1):
        state = after_epoch(state, node, e)
    return state


class LostError(Exception):
    """A worker is gone, or silent."""


class TakenOverError(Exception):
    """Another driver holds the directory."""


class Store:
    """The log, created if absent entry by entry, and the stores' contents."""

    def __init__(self) -> None:
        self.log: list[LogEntry] = []
        self.files: dict[str, str] = {}

    def append(self, number: int, entry: LogEntry) -> bool:
        """Whether `number` was free."""
        if number != len(self.log):
            return False
        self.log.append(entry)
        return True


class Part:
    """A worker's part of an epoch: it is done once it has the values of those before it."""

    def __init__(self) -> None:
        self.peers: list[str] | None = None  # None: not started
        self.epoch = 0
        self.arrived: set[str] = set()
        self.reply: dict | None = None

    def finish(self, reply: dict) -> None:
        """Set the reply, as `worker.hosted_nodes.Operation` does."""
        if self.reply is None or (self.reply["status"] == "done" and "suspect" in reply):
            self.reply = reply


class Worker:
    """Hosts workspaces by binding; messages that arrive while it is stopped are handled later."""

    def __init__(self, name: str, world: World) -> None:
        self.name, self.world = name, world
        self.bindings: dict[str, dict[str, str]] = {}
        self.parts: dict[tuple[str, int], Part] = {}  # by binding and number of the run
        self.is_stopped = False

    def do(self, message: dict) -> object:
        """Carry a message out and give the answer; None: there is none yet."""
        kind, binding = message["kind"], message["binding"]
        if kind == "bind":
            self.bindings[binding] = {}
            return "done"
        spaces = self.bindings.get(binding)
        if spaces is None:
            return "unknown"
        if kind == "release":
            del self.bindings[binding]
        elif kind == "init":
            spaces.update(dict.fromkeys(message["nodes"], "init"))
        elif kind == "load":
            files = self.world.store.files
            spaces.update({node: files[name] for node, name in message["stores"].items()})
        elif kind in ("run", "value", "unsent", "abort"):
            part = self.parts.setdefault((binding, message["number"]), Part())
            return self.take_part(kind, part, message, spaces)
        elif kind == "save":
            written = {message["stores"][node]: state for node, state in spaces.items()}
            self.world.store.files.update(written)
            return {node: spaces[node] for node in spaces}
        return "done"

    def take_part(self, kind: str, part: Part, message: dict, spaces: dict) -> object:
        """Handle a message about a run, in the order in which `worker.hosted_nodes` does."""
        if kind == "run" and part.peers is None:
            part.epoch, part.peers = message["epoch"], message["peers"]
            later = part.peers[part.peers.index(self.name) + 1 :]
            for peer in later if part.reply is None else ():
                self.world.pass_on("value", self.name, peer, message)
        elif kind == "value":
            part.arrived.add(message["sender"])
        elif kind == "abort":
            part.finish({"status": "aborted", "reason": message["reason"]})
        elif kind == "unsent":
            reason = f"{self.name} could not send values to {message['to']}"
            part.finish({"status": "aborted", "reason": reason, "suspect": message["to"]})
        earlier = part.peers[: part.peers.index(self.name)] if part.peers else [None]
        if part.reply is None and part.arrived >= set(earlier):
            for node in spaces:
                spaces[node] = after_epoch(spaces[node], node, part.epoch)
            part.finish({"status": "done"})
        if part.reply is None and kind == "run" and self.world.chance.random() < 0.3:
            return {"status": "running", "tasks": []}
        return part.reply


class Driver:
    """The loop of a runner, as a generator that waits for replies."""

    def __init__(self, name: str, world: World) -> None:
        self.name, self.world, self.store = name, world, world.store
        self.number = 0
        self.stop_asked = ""
        self.is_stopped = False
        self.loop = self.run()
        self.waits_for: dict[str, object | None] = {}  # worker -> its answer
        self.lost: set[str] = set()
        self.is_cut = False
        self.runs = 0

    # ---- the log

    def append(self, kind: type[LogEntry], **fields: object) -> None:
        """As `LogWriter.append`: the next number, unless somebody else has it."""
        while True:
            entry = make_entry(kind, self.state.number + 1, self.name, **fields)
            if self.store.append(self.state.number + 1, entry):
                self.state.apply(entry)
                return
            self.state = fold(self.store.log)
            if kind is not RunEntry and self.state.holder.run != self.name:
                raise TakenOverError

    # ---- the loop

    def run(self) -> Generator[None, None, None]:
        """Take the directory; then go on until the job is done, or told to stop."""
        self.state: State = fold(self.store.log)
        self.append(RunEntry, nodes=list(NODES), info={})
        losses, epoch, lost = Losses(limit=4), 0, True
        while True:
            try:
                if lost:
                    yield from self.bind()
                    epoch = yield from self.start()
                    lost = False
                step = next_decision(
                    stopped_by="limit" if epoch >= EPOCHS else "",
                    stop_asked=self.stop_asked,
                    is_recorded=self.state.latest == at(epoch),
                    is_leaving=bool(self.leaving()),
                )
                if step == "finish":
                    self.append(DoneEntry, epoch=at(epoch))
                    return
                if step == "stop":
                    self.append(EndEntry)
                    return
                if step == "move":
                    self.world.counts["moves"] += 1
                    lost = True
                    continue
                yield from self.run_epoch(epoch + 1)
                epoch += 1
                yield from self.save(epoch)
                losses = losses.after_record()
            except LostError:
                losses = losses.after_loss()
                self.world.counts["losses"] += 1
                if losses.are_too_many:
                    return
                lost = True

    def leaving(self) -> set[str]:
        """Workers in use that have said that they leave."""
        return self.world.leaving & set(self.placement.values())

    def bind(self) -> Generator[None, None, None]:
        """Place the nodes on workers that are there, under a new name."""
        while not (there := sorted(set(self.world.workers) - self.world.leaving - self.lost)):
            self.lost &= set(self.world.workers)
            self.lost -= set(list(self.lost)[:1])  # as one that answers again
            self.world.add_worker()
            yield
        infos = [WorkerInfo(name, name, "", 1) for name in there]
        there = [w.name for w in within_reach(infos, self.world.cuts if self.is_cut else ())[0]]
        self.number += 1
        self.binding = f"{self.name}-{self.number}" if self.world.fresh_bindings else "always"
        self.placement = {node: there[i % len(there)] for i, node in enumerate(NODES)}
        yield from self.tell("bind")

    def start(self) -> Generator[None, None, int]:
        """Load the last recorded epoch, or init and save epoch 0."""
        latest = self.state.latest
        if latest is None:
            yield from self.tell("init")
            yield from self.save(0)
            return 0
        stores = recorded_stores(self.store.log, self.state, latest)
        for store in stores.values():
            if self.store.files[store.name] != store.sha256:
                raise AssertionError(f"the store {store.name} is not what was recorded")
        yield from self.tell("load", stores={node: store.name for node, store in stores.items()})
        return runs_in(latest)

    def save(self, epoch: int) -> Generator[None, None, None]:
        """Claim names, let the workers write, record."""
        position = at(epoch)
        self.append(ClaimEntry, upto=position, retry=self.state.last_retry + 1)
        claim = self.state.claim
        names = {node: self.world.name(claim, node, position) for node in NODES}
        receipts = yield from self.tell("save", stores=names)
        stores = {
            node: RecordedStore(names[node], state, 0)
            for answer in receipts.values()
            for node, state in answer.items()
        }
        self.append(CommitEntry, claim=claim.number, records=[Record(position, stores)])

    def tell(self, kind: str, **details: object) -> Generator[None, None, dict]:
        """Send every worker in use its part, and wait for all answers."""
        by_worker: dict[str, list[str]] = {}
        for node, worker in self.placement.items():
            by_worker.setdefault(worker, []).append(node)
        self.waits_for = dict.fromkeys(by_worker)
        for worker, nodes in by_worker.items():
            told = dict(details)
            if "stores" in told:
                told["stores"] = {node: told["stores"][node] for node in nodes}
            place = {"binding": self.binding, "nodes": nodes, "peers": list(by_worker)}
            self.world.send(self, worker, {"kind": kind, **place, **told})
        while any(answer is None for answer in self.waits_for.values()):
            yield
            if self.lost & set(by_worker) or "unknown" in self.waits_for.values():
                raise LostError
        return dict(self.waits_for)

    def run_epoch(self, epoch: int) -> Generator[None, None, None]:
        """Run one epoch, as `Messenger.call` does; an error other than a loss ends the simulation."""
        workers = list(dict.fromkeys(self.placement.values()))
        members = Members(self.placement)
        members.workers.update((w, Member(WorkerInfo(w, w, "", 1), "")) for w in workers)
        self.runs += 1
        request = Request("run", {"epoch": epoch, "peers": workers}, number=self.runs)
        steps, heard = exchange(request, workers, members, 0.0), None
        while True:
            try:
                action = steps.send(heard)
            except StopIteration as end:
                if (failure := request.failure(end.value, "job")) is not None:
                    raise failure from None
                return
            except NodeLostError:
                if members.cut:
                    self.world.counts["losses to a cut"] += 1
                    self.is_cut = True
                raise LostError from None
            heard = yield from self.carry_out(action, members)

    def carry_out(self, action: Action, members: Members) -> Generator[None, None, Heard]:
        """Do what an exchange asks for, as `Messenger` does."""
        if not isinstance(action, Ask):
            for worker in getattr(action, "addresses", ()):  # of an `Abort`
                about = {"kind": "abort", "number": self.runs, "reason": action.reason}
                self.world.send(self, worker, {**about, "binding": self.binding})
            yield
            members.lost.update(dict.fromkeys(self.lost & set(members.workers), "it is gone"))
            return Heard(0.0)
        self.waits_for = waits_for = dict.fromkeys(action.addresses)
        for message, workers in action.mailings:
            for worker in workers:
                about = {"kind": message["call"], "binding": self.binding}
                self.world.send(self, worker, {**message, **about})
        while None in waits_for.values():
            yield
            if gone := self.lost & set(members.workers):
                members.lost.update(dict.fromkeys(gone, "it is gone"))
                return Heard(0.0)
        return Heard(0.0, dict(waits_for))


class World:
    """The cluster, the store and the order of events."""

    def __init__(
        self,
        seed: int,
        *,
        name: Callable[[Claim, str, Position], str] = Claim.store_name,
        fresh_bindings: bool = True,
        tells: bool = False,
    ) -> None:
        self.chance = random.Random(seed)
        self.name, self.fresh_bindings, self.tells = name, fresh_bindings, tells
        self.store = Store()
        self.workers: dict[str, Worker] = {}
        self.leaving: set[str] = set()
        self.cuts: set[frozenset[str]] = set()  # pairs of workers
        self.counts: Counter[str] = Counter()
        self.in_flight: list[tuple] = []
        self.drivers: list[Driver] = []
        for _ in range(3):
            self.add_worker()
        self.trouble = self.chance.uniform(0.0, 0.15)  # how likely an event is a fault

    def say(self, *what: object) -> None:
        """Tell the story."""
        if self.tells:
            print(*what)

    def add_worker(self) -> None:
        """One more, of a name that none had before."""
        self.counts["workers"] += 1
        name = f"w{self.counts['workers']}"
        self.workers[name] = Worker(name, self)

    def send(self, driver: Driver, worker: str, message: dict) -> None:
        """Put a message on its way; it arrives when chance picks it."""
        answers = {} if message["kind"] == "abort" else driver.waits_for
        self.in_flight.append((driver, worker, message, answers))

    def pass_on(self, kind: str, sender: str, to: str, about: dict) -> None:
        """Put a message between workers on its way; the sender of a value hears if it is lost."""
        message = {**about, "kind": kind, "sender": sender}
        if frozenset((sender, to)) in self.cuts or to not in self.workers:
            if kind != "value":
                return
            to, message = sender, {**message, "kind": "unsent", "to": to}
        self.in_flight.append((None, to, message, {}))

    def run(self) -> Counter[str]:
        """Let things happen until the job is done; raises AssertionError where a promise breaks."""
        reached = Position(0)
        for _ in range(MAX_EVENTS):
            if not any(driver.loop is not None for driver in self.drivers):
                self.counts["drivers"] += 1
                self.drivers = [*self.drivers[-2:], Driver(f"d{self.counts['drivers']}", self)]
            if self.chance.random() < self.trouble and self.counts["events"] < 1_500:
                self.go_wrong()
            else:
                self.go_on()
            self.counts["events"] += 1
            state = fold(self.store.log)
            latest = state.latest or Position(0)
            assert latest >= reached, f"epoch {reached} was recorded, and now {latest} is the last"
            reached = latest
            if state.done is not None:
                break
        else:
            raise AssertionError("it does not end")
        assert state.done == at(EPOCHS)
        for epoch in range(EPOCHS + 1):
            for node, store in recorded_stores(self.store.log, state, at(epoch)).items():
                found = self.store.files[store.name]
                assert found == expected(node, epoch), f"{store.name} differs"
        return self.counts

    def go_on(self) -> None:
        """Deliver a message, or let a driver take note."""
        ready = [
            item
            for item in self.in_flight
            if item[1] not in self.workers or not self.workers[item[1]].is_stopped
        ]
        if ready and self.chance.random() < 0.6:
            item = self.chance.choice(ready)
            self.in_flight.remove(item)
            driver, name, message, answers = item
            if name in self.workers:
                answer = self.workers[name].do(message)
                if answer is None and name in answers:
                    self.in_flight.append(item)
                    return
                self.say(name, "did", message["kind"], message["binding"], "->", answer)
                if name in answers:
                    answers[name] = answer
            elif driver is not None:
                driver.lost.add(name)
            elif message["kind"] == "value":
                self.pass_on("value", message["sender"], name, message)
            return
        awake = [d for d in self.drivers if d.loop is not None and not d.is_stopped]
        if awake:
            self.step(self.chance.choice(awake))

    def step(self, driver: Driver) -> None:
        """Let a driver go on to where it waits next."""
        for name in driver.waits_for:
            worker = self.workers.get(name)
            if worker is None or (worker.is_stopped and self.chance.random() < 0.05):
                driver.lost.add(name)  # the scheduler's word, or silence
        try:
            next(driver.loop)
        except StopIteration:
            driver.loop = None
        except TakenOverError:
            self.counts["taken over"] += 1
            self.say(driver.name, "finds that it was taken over")
            driver.loop = None

    def go_wrong(self) -> None:
        """A fault."""
        what = self.chance.choice(
            ["kill worker", "stop worker", "continue worker", "retire worker", "add worker"] * 2
            + ["cut workers", "cut workers", "mend network"]
            + ["kill driver", "stop driver", "continue driver", "ask to stop"]
        )
        self.counts[what] += 1
        self.say("---", what)
        name = self.chance.choice(sorted(self.workers)) if self.workers else None
        drivers = [d for d in self.drivers if d.loop is not None]
        driver = self.chance.choice(drivers) if drivers else None
        if what == "add worker" and len(self.workers) < 5:
            self.add_worker()
        elif what == "cut workers" and len(self.workers) > 1:
            self.cuts.add(frozenset(self.chance.sample(sorted(self.workers), 2)))
        elif what == "mend network":
            self.cuts.clear()
        elif what == "continue worker":
            for worker in self.workers.values():
                worker.is_stopped = False
        elif what == "continue driver":
            for stopped in self.drivers:
                stopped.is_stopped = False
        elif what == "kill worker" and name:
            del self.workers[name]
            self.leaving.discard(name)
        elif what == "stop worker" and name:
            self.workers[name].is_stopped = True
        elif what == "retire worker" and name:
            self.leaving.add(name)
        elif what == "kill driver" and driver:
            driver.loop = None
        elif what == "stop driver" and driver:
            # Taken for dead, it is replaced, and comes back later.
            driver.is_stopped = True
            self.counts["drivers"] += 1
            self.drivers = [*self.drivers[-2:], Driver(f"d{self.counts['drivers']}", self)]
        elif what == "ask to stop" and driver:
            driver.stop_asked = "SIGTERM"


def main() -> None:
    """Run seeds and say how many failed, and which."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", nargs="?", type=int, default=2_000)
    parser.add_argument("--seed", type=int)
    asked = parser.parse_args()
    if asked.seed is not None:
        print(dict(World(asked.seed, tells=True).run()))
        return
    totals: Counter[str] = Counter()
    failed = []
    for seed in range(asked.seeds):
        try:
            totals += World(seed).run()
        except Exception as error:
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}")
    for name, count in totals.items():
        print(f"{count:9} {name}")
    print(f"{asked.seeds} seeds, {len(failed)} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
