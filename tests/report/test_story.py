"""What a directory's log tells of its runs: epochs, saves, and where their time went."""

from __future__ import annotations

import datetime as dt
from dataclasses import astuple
from typing import Any

import pytest

from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Task,
    current_task,
    epoch_limiter,
)
from jobrunner.checkpoint.log.entries import Entry
from jobrunner.checkpoint.log.state import entry_to_json, make_entry
from jobrunner.report import Story, read_story

NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)


class Log:
    """A log in memory, whose entries a test appends, each at a time that it chooses."""

    def __init__(self) -> None:
        self.trees: list[dict[str, Any]] = []

    def add(self, run: str, kind: str, at: float, **body: Any) -> None:
        entry = entry_to_json(make_entry(len(self.trees), kind, run, body))
        time = NOON + dt.timedelta(seconds=at)
        self.trees.append({**entry, "time": time.isoformat(timespec="milliseconds")})

    def run(self, run: str, at: float) -> None:
        self.add(run, "run", at, nodes=["a"], info={"plan": {"job": "j", "parameters": {"x": 1}}})

    def save(self, run: str, epoch: int, at: float, seconds: float, **details: Any) -> None:
        store = {"store": f"a.{epoch}", "manifest": "0" * 64, "nbytes": 8, "seconds": seconds}
        claim = {"epoch": epoch, "retry": sum(it["kind"] == "begin" for it in self.trees)}
        self.add(run, "begin", at - seconds, **claim)
        about = {"run_number": 0, "stores": {"a": store}, "details": details}
        self.add(run, "commit", at, **claim, **about)

    def tell(self) -> Story:
        return read_story(MultiNodeCheckpointManager("/nowhere", self))

    # ---- the protocol of handlers

    def set_params(self, path: str, node_names: object) -> None: ...
    def append(self, entry: Entry) -> bool: ...
    def write(self, epoch: int, record: Entry) -> bool: ...
    def last_epoch(self, user_epoch: int | None = None) -> int | None: ...
    def report(self, action: str, stats: object) -> None: ...
    def accessible(self, epoch: int | None = None) -> bool: ...

    def last_number(self) -> int:
        return len(self.trees) - 1

    def entries(self, first: int = 0) -> Any:
        return iter(self.trees[first:])


@pytest.fixture
def log() -> Log:
    return Log()


def count(limit: int) -> Job:
    def step(n: int) -> int:
        current_task().report(n=n + 1)
        return n + 1

    with Job("count") as job, Node("a"):
        with job.init_group:
            Task(lambda: 0, outputs="n", name="zero")
        Task(step, inputs="n", outputs="n")
        epoch_limiter(job, limit)
    return job


def test_the_runs_of_a_directory_are_told_with_their_epochs_and_saves(inproc_session, tmp_path):
    for limit in (2, 3):
        JobRunner(count(limit), MultiNodeCheckpointManager(tmp_path / "k")).run(inproc_session)
    story = read_story(tmp_path / "k")
    first, second = story.runs
    assert (first.number, first.job, first.state, first.resumed_from) == (
        1,
        "count",
        "finished",
        None,
    )
    assert (second.number, second.state, second.resumed_from) == (2, "finished", 2)
    assert [(it.number, it.metrics.get("n")) for it in first.epochs] == [(0, None), (1, 1), (2, 2)]
    assert [(save.epoch, save.step) for save in second.saves] == [(3, 0)]
    assert first.began < first.epochs[0].ended <= first.saves[0].ended < first.last_seen
    assert first.last_seen <= second.began
    for ledger in (first.ledger, second.ledger, story.ledger):
        wall, *parts = astuple(ledger)
        assert 0 < sum(parts) == pytest.approx(wall)


def test_time_before_a_resume_from_an_earlier_epoch_was_spent_in_vain(log):
    log.run("one", 0)
    for epoch in range(5):
        log.save("one", epoch, 10 * (epoch + 1), 1)
    log.add("one", "end", 50)
    log.run("two", 100)
    log.add("two", "rewind", 100, after=2)
    log.save("two", 3, 110, 1)
    log.add("two", "done", 111, epoch=3)
    log.add("two", "end", 112)
    one, two = log.tell().runs
    assert one.ledger.wall == 50
    assert (one.ledger.start, one.ledger.compute, one.ledger.redone) == (9, 18, 18)
    assert [it.number for it in one.epochs if it.is_set_aside] == [3, 4]
    assert [it.seconds for it in one.epochs] == [0, 9, 9, 9, 9]
    assert (one.state, two.state, two.resumed_from) == ("stopped", "finished", 2)
    assert (two.ledger.wall, two.ledger.save_wait, two.ledger.idle) == (12, 1, 2)


def test_a_run_that_vanished_is_lost_and_has_lost_what_came_after_its_last_save(log):
    log.run("one", 0)
    log.save("one", 0, 2, 1)
    log.save("one", 1, 10, 1)
    log.add("one", "begin", 18, epoch=2, retry=2)
    [one] = log.tell().runs
    assert (one.state, one.ended) == ("lost", None)
    assert (one.last_seen - one.began, one.ledger.wall, one.ledger.redone) == (18, 18, 8)
    assert (one.job, one.parameters) == ("j", {"x": 1})
