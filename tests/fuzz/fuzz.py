"""Random jobs against the documented rules: every blob of every epoch, bit by bit.

Each seed draws a job (`jobs.draw`). Several seeds run as one job, beside each other on the same
nodes, in a way that the first seed draws (`Way`): on some of three workers, with or without a
manager, with a crash or a resume on other workers. `rules.Rules` says what must come out.

    python tests/fuzz/fuzz.py 5000            seeds 0 to 4999
    python tests/fuzz/fuzz.py --seed 1234     the seeds that run together with that one; says
                                              which job fails, made as small as possible
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import dask
from distributed import Client, LocalCluster

from jobrunner import (
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Position,
    SaveEvery,
    Session,
    TaskFailedError,
)
from tests.checkpoint.encoding.kinds_of_values import describe
from tests.fuzz.calls import FAULTS, KEPT, MEMORY, Call
from tests.fuzz.jobs import NODES, build, draw
from tests.fuzz.rules import Rules

IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where checkpoints are written: nothing is tested here that needs a disk."""

TOGETHER = 8
"""Seeds that run as one job, because starting a run takes longer than a small job."""


@dataclass(frozen=True)
class Way:
    """How a job runs."""

    epochs: int
    steps: int
    workers: tuple[int, ...]  # of each node
    then: tuple[int, ...]  # the same after a resume
    manager: str  # "", "sync" or "async"
    saves: dict[str, int]  # the arguments of `SaveEvery`
    story: str  # "straight", "extend", "fail" or "recover"
    at: int  # where: the epoch, and the step
    at_step: int
    watches: bool  # the client looks at all blobs after each epoch
    batch_seconds: float


def draw_way(seed: int) -> Way:
    """Draw how the seeds that begin with this one run."""
    chance = random.Random(f"way {seed}")
    epochs, steps = chance.randint(2, 4), chance.choice([1, 1, 2, 3])
    manager = chance.choice(["", "", "", "sync", "async"])
    stories = {
        "": ["straight", "straight", "recover"],
        "sync": ["extend", "fail", "recover"],
        "async": ["extend", "fail"],
    }
    every_step = [] if manager == "async" else [{"steps": 1}]
    return Way(
        epochs,
        steps,
        workers=_placed(chance),
        then=_placed(chance),
        manager=manager,
        saves=chance.choice([{"epochs": 1}, {"epochs": 1}, {"epochs": 2}, *every_step]),
        story=chance.choice(stories[manager]),
        at=chance.randint(1, epochs - 1),
        at_step=chance.randrange(steps),
        watches=chance.random() < 0.4,
        batch_seconds=chance.choice([0.0, 0.05]),
    )


def _placed(chance: random.Random) -> tuple[int, ...]:
    count, first = chance.randint(1, 3), chance.randrange(3)
    return tuple((first + i % count) % 3 for i in range(3))


class DifferenceError(AssertionError):
    """What a job gave differs from what the rules give."""


class Watcher:
    """Notes the blobs after each epoch."""

    is_essential = True

    def __init__(self, session: Session, rules: Rules) -> None:
        self.session, self.rules = session, rules
        self.seen: dict[int, dict[tuple[str, str], Any]] = {}

    def on_epoch(self, epoch: int, seconds: float, metrics: Any) -> None:
        # What exit tasks alone make does not exist while epochs run.
        self.seen[epoch] = fetch_all(self.session, self.rules, but="exit")


def fetch_all(session: Session, rules: Rules, but: str = "") -> dict[tuple[str, str], Any]:
    """All global blobs that other groups than one make."""
    made = {(call.node, name) for call in rules.calls if call.group != but for name in call.outputs}
    names = sorted(rules.global_names & made)
    return {(node, name): session.fetch(Node(node)[name]) for node, name in names}


class Trial:
    """One job, run in one way."""

    def __init__(self, session: Session, calls: Sequence[Call], way: Way, path: str) -> None:
        self.session, self.calls, self.way, self.path = session, calls, way, path
        self.addresses = sorted(session.client.scheduler_info()["workers"])
        for memory in (MEMORY, FAULTS, KEPT):
            memory.clear()
        self.rules = Rules(self.calls, way.steps)
        self.is_new = True

    def run(self) -> None:
        """Run the job, and raise `DifferenceError` where it breaks a rule."""
        way = self.way
        first, is_continued = way.epochs, False
        if way.story == "extend":
            first, is_continued = way.at, True
        if way.story in ("fail", "recover"):
            tasks = [call for call in self.calls if call.group == "epoch"]
            if tasks:
                victim = random.Random(repr(way)).choice(tasks)
                FAULTS.add((victim.name, way.at, way.at_step))
                is_continued = way.story == "fail"
        with dask.config.set({"jobrunner.batch-seconds": way.batch_seconds}):
            self.go(first, way.workers)
            if is_continued:
                self.go(way.epochs, way.then)

    def go(self, limit: int, placed: Sequence[int]) -> None:
        """One run of a runner, and the same by the rules."""
        way, rules = self.way, self.rules
        will_crash, recovers = bool(FAULTS), way.story == "recover"
        workers = {node: self.addresses[i] for node, i in zip(NODES, placed, strict=True)}
        job, tasks = build(self.calls, way.steps, workers, recovers=recovers)
        manager = None
        if way.manager:
            manager = MultiNodeCheckpointManager(
                self.path,
                asynchronous=way.manager == "async",
                allow_pickle=True,
                save=SaveEvery(**way.saves),
            )
        watcher = Watcher(self.session, rules)
        callbacks = [watcher] if way.watches else []
        runner = JobRunner(job, manager, num_epochs=limit, callbacks=callbacks)
        try:
            result = runner.run(self.session)
        except TaskFailedError as error:
            if recovers or not will_crash or FAULTS:
                raise DifferenceError(f"{error}") from error
            self.follow(limit, crash=True, recovers=False)
            self.is_new = False
            return
        if not self.is_new:
            self.resume(result.resumed_from)
        self.follow(limit, crash=will_crash, recovers=recovers)
        self.is_new = False
        if result.epoch != limit:
            raise DifferenceError(f"ended at epoch {result.epoch} instead of {limit}")
        self.compare(watcher, tasks, manager)

    def follow(self, limit: int, *, crash: bool, recovers: bool) -> None:
        """Do by the rules what a run did."""
        rules, way = self.rules, self.way
        while rules.steps_done < limit * way.steps:
            if crash and rules.steps_done == (way.at - 1) * way.steps + way.at_step:
                if not recovers:
                    return
                crash = False
                if way.manager:
                    rules.load(self.recorded())
                else:
                    rules.start()
            else:
                rules.step()

    def steps_in(self, epoch: int | Position) -> int:
        """How many steps an epoch or a position contains."""
        position = Position.of(epoch)
        return position.epoch * self.way.steps + position.step

    def recorded(self) -> int:
        """The steps done in the newest checkpoint, if saves are not asynchronous."""
        [(kind, number)] = self.way.saves.items()
        every = number * (self.way.steps if kind == "epochs" else 1)
        return self.rules.steps_done // every * every

    def resume(self, epoch: int | Position | None) -> None:
        """Continue by the rules from where a run says that it resumed."""
        rules, way = self.rules, self.way
        done = rules.steps_done if way.story == "extend" else self.recorded()
        if epoch is None and way.manager == "async" and way.story == "fail":
            rules.start()
            return
        found = -1 if epoch is None else self.steps_in(epoch)
        if found != done and not (way.manager == "async" and 0 <= found <= rules.steps_done):
            raise DifferenceError(f"resumed from epoch {epoch}, and {done} steps were recorded")
        rules.load(found)

    def compare(self, watcher: Watcher, tasks: Any, manager: Any) -> None:
        """Compare everything that a user can see."""
        rules = self.rules
        for epoch, seen in watcher.seen.items():
            differ(f"epoch {epoch}", rules.checkpoints[epoch * self.way.steps], seen)
        for epoch in manager.positions() if manager else ():
            checkpoint = manager.open(epoch)
            state = rules.checkpoints[self.steps_in(epoch)]
            names = [name for name in state if name not in rules.transient]
            found = {(node, name): checkpoint[node].load(name) for node, name in names}
            differ(f"on disk, epoch {epoch}", state, found)
        epoch_results = {
            number: value
            for number, value in rules.results.items()
            if rules.by_number[number[0]].group.startswith("epoch")
        }
        rules.run("exit")
        differ("at the end", rules.blobs, fetch_all(self.session, rules))
        rules.results.update(epoch_results)
        outputs = [
            (call.number, part)
            for call in self.calls
            for part in range(max(1, len(call.outputs)))
            if call.is_fetched and (call.number, part) in rules.results
        ]
        fetched = {(number, part): tasks[number].output(part).fetch() for number, part in outputs}
        differ("outputs", rules.results, fetched)


def differ(where: str, expected: Any, found: Any) -> None:
    """Raise if one of the values that were found is not what is expected."""
    for key, value in found.items():
        if describe(expected[key]) != describe(value):
            raise DifferenceError(
                f"{where}, {key}\n  expected {describe(expected[key])}\n  found    {describe(value)}"
            )


# ---- many seeds


def three_workers() -> LocalCluster:
    """Three workers in this process."""
    return LocalCluster(n_workers=3, threads_per_worker=2, processes=False, dashboard_address=None)


def jobs_of(seeds: Sequence[int], way: Way) -> list[Call]:
    """The tasks of several seeds' jobs, as one job."""
    # In a store, what is pickled has no ties with what is not.
    drawn = [
        draw(seed, first=1000 * i, has_objects=not way.manager) for i, seed in enumerate(seeds)
    ]
    order = ("init", "epoch", "epoch_end", "exit")
    return [call for group in order for calls in drawn for call in calls if call.group == group]


def attempt(session: Session, calls: Sequence[Call], way: Way) -> str:
    """Run a job in one way, and say what is wrong; "" if nothing is."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as directory:
        try:
            Trial(session, calls, way, directory + "/checkpoint").run()
        except DifferenceError as error:
            return str(error)
        except Exception:
            return traceback.format_exc()
    return ""


def failures(cluster: LocalCluster, seeds: range) -> dict[int, str]:
    """What is wrong with which seeds, by the first of those that ran together."""
    found: dict[int, str] = {}
    with Client(cluster, set_as_default=False) as client, Session(client) as session:
        for first in range(seeds.start, seeds.stop, TOGETHER):
            way = draw_way(first)
            if wrong := attempt(session, jobs_of(range(first, first + TOGETHER), way), way):
                found[first] = wrong
    return found


def smallest(session: Session, calls: Sequence[Call], way: Way) -> list[Call]:
    """Leave out each task without which the job still fails."""
    calls = list(calls)
    for call in reversed(calls):
        others = [other for other in calls if other.number != call.number]
        fewer = [
            replace(other, after=tuple(n for n in other.after if n != call.number))
            for other in others
        ]
        try:
            rules = Rules(fewer)
            rules.step()
            rules.run("exit")
        except KeyError:  # what a task reads does not exist any more
            continue
        if attempt(session, fewer, way):
            calls = fewer
    return calls


def main() -> None:
    """Run seeds and say which failed; or make a failing one small."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", nargs="?", type=int, default=2_000)
    parser.add_argument("--seed", type=int)
    asked = parser.parse_args()
    logging.getLogger("jobrunner").setLevel(logging.ERROR)
    with three_workers() as cluster:
        if asked.seed is None:
            found = failures(cluster, range(asked.seeds))
            for first, wrong in found.items():
                print(f"seed {first}: {wrong:.600}")
            print(f"{asked.seeds} seeds, {len(found)} failed")
            sys.exit(bool(found))
        first = asked.seed // TOGETHER * TOGETHER
        way = draw_way(first)
        calls = jobs_of(range(first, first + TOGETHER), way)
        with Client(cluster, set_as_default=False) as client, Session(client) as session:
            if not attempt(session, calls, way):
                print("nothing differs")
                return
            calls = smallest(session, calls, way)
            print(way, *calls, attempt(session, calls, way), sep="\n")
            sys.exit(1)


if __name__ == "__main__":
    main()
