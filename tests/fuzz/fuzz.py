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
import itertools
import logging
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Sequence
from functools import cache, partial
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
from tests.fuzz.calls import CACHE, FAULTS, KEPT, Call
from tests.fuzz.changes import Change, draw_change, names_of
from tests.fuzz.jobs import NODES, build, draw
from tests.fuzz.rules import Rules
from tests.fuzz.values import portrait
from tests.fuzz.ways import Way, draw_way, smallest, tell

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where checkpoints are written: nothing is tested here that needs a disk."""

TOGETHER = 8
"""Seeds that run as one job, because starting a run takes longer than a small job."""


class DifferenceError(AssertionError):
    """What a job gave differs from what the rules give."""


class Watcher:
    """Notes which epochs ended, and the blobs after each if it is not passive."""

    is_essential = True

    def __init__(self, session: Session, rules: Rules, *, is_passive: bool) -> None:
        self.session, self.rules, self.is_passive = session, rules, is_passive
        self.epochs: list[int] = []
        self.seen: dict[int, dict[tuple[str, str], Any]] = {}

    def on_epoch(self, epoch: int, seconds: float, metrics: Any) -> None:
        """Fetch what is there."""
        self.epochs.append(epoch)
        if not self.is_passive:
            self.seen[epoch] = fetch_all(self.session, self.rules)

    def repeated_from(self) -> int | None:
        """The epoch that a recovery loaded, if that shows."""
        pairs = itertools.pairwise(self.epochs)
        return next((later - 1 for before, later in pairs if later <= before), None)


def fetch_all(session: Session, rules: Rules) -> dict[tuple[str, str], Any]:
    """Portraits of all global blobs."""
    return {
        (node, name): portrait(session.fetch(Node(node)[name]))
        for node, name in sorted(rules.global_names & rules.existing)
    }


@cache
def addresses_of(session: Session) -> list[str]:
    """The three workers, which no job may lose."""
    return sorted(session.client.scheduler_info()["workers"])


class Trial:
    """One job, run in one way."""

    def __init__(self, session: Session, calls: Sequence[Call], way: Way, path: str) -> None:
        self.session, self.calls, self.way, self.path = session, calls, way, path
        self.change: Change | None = None  # that the next run brings
        if way.changes and way.story != "recover":
            self.change = draw_change(calls, way)
            self.calls = self.change.before
        self.addresses = addresses_of(session)
        for memory in (CACHE, FAULTS, KEPT):
            memory.clear()
        self.rules = Rules(self.calls, way.steps)
        self.is_new, self.is_stopped = True, False

    def run(self) -> None:
        """Run the job, and raise `DifferenceError` where it breaks a rule."""
        way = self.way
        with dask.config.set({"jobrunner.batch-seconds": way.batch_seconds}):
            if way.story == "extend":
                self.go(way.at, way.workers)
                if not self.is_stopped:
                    self.go(way.epochs, way.then)
                return
            if way.story in ("fail", "recover"):
                self.arm()
            if way.story == "fail" and FAULTS:
                self.go(way.epochs, way.workers)
                if not self.is_stopped:
                    self.go(way.epochs, way.then)
            else:
                self.go(way.epochs, way.workers)

    def arm(self) -> None:
        """Let one task of the epoch group raise, once."""
        chance = random.Random(repr(self.way))
        if tasks := [call for call in self.calls if call.group == "epoch"]:
            self.victim = chance.choice(tasks)
            FAULTS.add((self.victim.name, self.way.at, self.way.at_step))

    def go(self, limit: int, placed: Sequence[int]) -> None:
        """One run of a runner, and the same by the rules."""
        way, rules = self.way, self.rules
        will_crash = bool(FAULTS)
        recovers = way.story == "recover"
        change = None if self.is_new else self.change
        self.calls = self.calls if change is None else change.after
        workers = {node: self.addresses[i] for node, i in zip(NODES, placed, strict=True)}
        workers = {n: workers.get(n, self.addresses[0]) for n in names_of(self.calls)} | workers
        job, tasks = build(self.calls, way.steps, workers, recovers=recovers)
        options = {} if change is None else {"rename": change.rename(), "missing": "init"}
        manager = None
        if way.manager:
            kind, number = way.saves.split("=")
            manager = MultiNodeCheckpointManager(
                self.path,
                asynchronous=way.manager == "async",
                allow_pickle=True,
                save=SaveEvery(**{kind: int(number)}),
            )
        watcher = Watcher(self.session, rules, is_passive=not way.watches)
        # What exit tasks alone make does not exist while epochs run.
        early = {(c.node, n) for c in self.calls if c.group != "exit" for n in c.outputs}
        rules.define(self.calls)
        rules.existing = early
        runner = JobRunner(job, manager, num_epochs=limit, callbacks=[watcher], **options)
        try:
            result = runner.run(self.session)
        except TaskFailedError as error:
            if recovers or not will_crash or FAULTS:
                raise DifferenceError(f"{error}") from error
            self.follow(limit, crash=True, recovers=False)
            self.is_new = False
            return
        if not self.is_new:
            self.resume(result.resumed_from, change)
        self.follow(limit, crash=will_crash, recovers=recovers, watcher=watcher)
        self.is_new = False
        self.compare(result, watcher, tasks, manager)

    def follow(
        self, limit: int, *, crash: bool, recovers: bool, watcher: Watcher | None = None
    ) -> None:
        """Do by the rules what a run did."""
        rules, way = self.rules, self.way
        while rules.steps_done % way.steps or not (
            rules.epoch >= limit or (rules.steps_done and rules.stopped_by())
        ):
            if crash and rules.steps_done == (way.at - 1) * way.steps + way.at_step:
                if not recovers:
                    return
                crash = False
                if not way.manager:
                    rules.start()
                elif way.manager == "async" and watcher and watcher.repeated_from() is not None:
                    rules.load(watcher.repeated_from() * way.steps)
                else:
                    rules.load(self.recorded())
                continue
            rules.step()

    def steps_in(self, epoch: int | Position) -> int:
        """How many steps an epoch or a position contains."""
        position = Position.of(epoch)
        return position.epoch * self.way.steps + position.step

    def recorded(self) -> int:
        """The steps done in the newest checkpoint, if saves are not asynchronous."""
        rules, way = self.rules, self.way
        kind, number = way.saves.split("=")
        every = int(number) * (way.steps if kind == "epochs" else 1)
        return rules.steps_done // every * every

    def resume(self, epoch: int | Position | None, change: Change | None) -> None:
        """Continue by the rules from where a run says that it resumed."""
        rules, way = self.rules, self.way
        if way.manager == "async":
            if epoch is None and way.story == "fail":
                rules.define(self.calls)
                rules.start()
            elif epoch is None or self.steps_in(epoch) > rules.steps_done:
                raise DifferenceError(f"resumed from epoch {epoch} after epoch {rules.epoch}")
            else:
                rules.load(self.steps_in(epoch), change)
            return
        done = rules.steps_done if way.story == "extend" else self.recorded()
        if epoch is None or self.steps_in(epoch) != done:
            raise DifferenceError(f"resumed from epoch {epoch}, and {done} steps were recorded")
        rules.load(done, change)

    def compare(self, result: Any, watcher: Watcher, tasks: Any, manager: Any) -> None:
        """Compare everything that a user can see."""
        rules = self.rules
        if (result.epoch, "/" in result.stopped_by) != (rules.epoch, bool(rules.stopped_by())):
            raise DifferenceError(
                f"ended at epoch {result.epoch} by {result.stopped_by}, expected {rules.epoch} by "
                f"{rules.stopped_by() or 'the limit'}"
            )
        for epoch, seen in watcher.seen.items():
            state = rules.checkpoints[epoch * self.way.steps]
            for key, found in seen.items():
                differ(f"epoch {epoch}: {'/'.join(key)}", state[key], found)
        if manager is not None:
            self.compare_stores(manager)
        epoch_results = {
            number: value
            for number, value in rules.results.items()
            if rules.by_number[number[0]].group.startswith("epoch")
        }
        self.is_stopped = bool(rules.stopped_by())
        rules.run("exit")
        found = fetch_all(self.session, rules)
        for key, seen in found.items():
            differ(f"at the end: {'/'.join(key)}", rules.blobs[key], seen)
        rules.results.update(epoch_results)
        for call in self.calls:
            for part in range(max(1, len(call.outputs)) if call.is_fetched else 0):
                if (call.number, part) in rules.results:
                    value = tasks[call.number].output(part).fetch()
                    differ(
                        f"output {part} of {call.node}/{call.name}",
                        rules.results[call.number, part],
                        portrait(value),
                    )

    def compare_stores(self, manager: MultiNodeCheckpointManager) -> None:
        """Compare what is on disk."""
        rules = self.rules
        for epoch in manager.positions():
            checkpoint = manager.open(epoch)
            state = rules.checkpoints[self.steps_in(epoch)]
            for (node, name), value in state.items():
                if (node, name) not in rules.transient:
                    found = checkpoint[node].load(name)
                    differ(f"on disk, epoch {epoch}: {node}/{name}", value, portrait(found))


def differ(where: str, expected: Any, found: Any) -> None:
    """Raise if a value has not the portrait that was found."""
    wanted = portrait(expected)
    if wanted == found:
        return
    trail = ""
    while isinstance(wanted, tuple) and isinstance(found, tuple) and len(wanted) == len(found):
        pairs = zip(wanted, found, strict=True)
        i, (wanted, found) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        trail += f" {i}"
    raise DifferenceError(
        f"{where}{trail and ' at'}{trail}\n  expected {wanted}\n  found    {found}"
    )


# ---- many seeds


def start_workers() -> LocalCluster:
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
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        try:
            Trial(session, calls, way, directory + "/checkpoint").run()
        except DifferenceError as error:
            return str(error)
        except Exception:
            return traceback.format_exc()
    return ""


def failures(session: Session, seeds: range, *, most: int | None = None) -> dict[int, str]:
    """What is wrong with which seeds, by the first of those that ran together; at most `most`."""
    found: dict[int, str] = {}
    for first in range(seeds.start, seeds.stop, TOGETHER):
        together = range(first, min(first + TOGETHER, seeds.stop))
        way = draw_way(first)
        if wrong := attempt(session, jobs_of(together, way), way):
            found[first] = wrong
            if len(found) == most:
                break
    return found


def main() -> None:
    """Run seeds and say which failed; or make a failing one small."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", nargs="?", type=int, default=2_000)
    parser.add_argument("--seed", type=int)
    asked = parser.parse_args()
    logging.getLogger("jobrunner").setLevel(logging.ERROR)
    with (
        start_workers() as cluster,
        Client(cluster, set_as_default=False) as client,
        Session(client) as session,
    ):
        if asked.seed is None:
            found = failures(session, range(asked.seeds))
            for first, wrong in found.items():
                print(f"seed {first}: {wrong:.600}")
            print(f"{asked.seeds} seeds, {len(found)} failed")
            sys.exit(bool(found))
        first = asked.seed // TOGETHER * TOGETHER
        way = draw_way(first)
        calls = jobs_of(range(first, first + TOGETHER), way)
        if not attempt(session, calls, way):
            print("nothing differs")
            return
        calls = smallest(partial(attempt, session), calls, way)
        print(tell(calls, way))
        print(attempt(session, calls, way))
        sys.exit(1)


if __name__ == "__main__":
    main()
