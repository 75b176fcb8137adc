"""What a directory's log tells of its runs: epochs, saves, and where their time went."""

import datetime as dt
import os
from dataclasses import astuple

import pytest

from jobrunner import (
    CheckpointCorruptError,
    JobRunner,
    MultiNodeCheckpointManager,
    SaveEvery,
)
from jobrunner.checkpoint.log.details import Timing
from jobrunner.checkpoint.log.entries import (
    ClaimEntry,
    CommitEntry,
    DoneEntry,
    EndEntry,
    Record,
    RewindEntry,
    RunEntry,
    Store,
    entry_to_json,
)
from jobrunner.checkpoint.log.log_writer import make_entry
from jobrunner.positions import Position
from jobrunner.run.decisions import Stopwatch
from jobrunner.story import RunStory, read_story
from tests.cli.directories import begin, invoke, save
from tests.jobs import counter
from tests.saves import save_epoch

NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)


class Log:
    """A log in memory, whose entries a test appends, each at a time that it chooses."""

    def __init__(self):
        self.trees = []

    def add(self, run, kind, at, **body):
        entry = entry_to_json(make_entry(kind, len(self.trees), run, **body))
        time = NOON + dt.timedelta(seconds=at)
        self.trees.append({**entry, "time": time.isoformat(timespec="milliseconds")})

    def run(self, run, at, **info):
        info |= {"plan": {"job": "j", "parameters": {"x": 1}}}
        self.add(run, RunEntry, at, nodes=["a"], info=info)

    def save(self, run, epoch, at, seconds, **details):
        self.add(run, ClaimEntry, at - seconds, upto=Position(epoch), retry=len(self.trees))
        stores = {"a": Store(f"a.{epoch}", "0" * 64, 8, seconds)}
        records = [Record(Position(epoch), stores, details=details)]
        claim = len(self.trees) - 1
        self.add(run, CommitEntry, at, claim=claim, records=records, run_number=0)

    def tell(self):
        return read_story(MultiNodeCheckpointManager("/nowhere", self))

    # ---- the protocol of handlers

    def set_params(self, path, node_names): ...
    def append(self, entry): ...

    def last_number(self):
        return len(self.trees) - 1

    def entries(self, first=0):
        return iter(self.trees[first:])


@pytest.fixture
def log():
    return Log()


def test_the_runs_of_a_directory_are_told_with_their_epochs_and_saves(inproc_session, tmp_path):
    for limit in (2, 3):
        JobRunner(counter(limit), MultiNodeCheckpointManager(tmp_path / "k")).run(inproc_session)
    story = read_story(tmp_path / "k")
    first, second = story.runs
    assert (first.number, first.job, first.state) == (1, "counter", "finished")
    assert first.resumed_from is None
    assert (second.number, second.state, second.resumed_from) == (2, "finished", 2)
    assert [(it.epoch, it.metrics.get("n")) for it in first.epochs] == [(0, None), (1, 1), (2, 2)]
    assert [it.epoch for it in second.epochs] == [3]
    assert first.began < first.epochs[0].recorded < first.last_seen
    assert first.last_seen <= second.began
    for ledger in (first.ledger, second.ledger, story.ledger):
        assert ledger.wall > 0
        assert min(astuple(ledger)) >= 0


class Reader:
    """Reads the story of the run while it runs."""

    def __init__(self, path):
        self.path, self.found = path, list[RunStory]()

    def on_epoch_start(self, epoch):
        self.found += read_story(self.path).runs


def test_a_run_that_still_runs_is_told_up_to_its_last_save(inproc_session, tmp_path):
    reader = Reader(tmp_path)
    manager = MultiNodeCheckpointManager(tmp_path, save=SaveEvery(epochs=2), asynchronous=False)
    JobRunner(counter(4), manager, callbacks=[reader]).run(inproc_session)
    [run] = read_story(tmp_path).runs
    assert (run.state, [found.state for found in reader.found]) == ("finished", ["running"] * 4)
    assert [len(found.epochs) for found in reader.found] == [1, 1, 2, 2]
    for found in reader.found:
        assert 0 < found.ledger.wall <= found.last_seen - found.began + 0.01
    assert reader.found[-1].ledger.compute < run.ledger.compute


def test_time_before_a_resume_from_an_earlier_epoch_was_spent_in_vain(log):
    log.run("one", 0)
    for epoch in range(5):
        timing = {"start": 9, "compute": 9 * epoch, "save_wait": epoch}
        log.save("one", epoch, 10 * (epoch + 1), 1, timing=timing)
    log.add("one", EndEntry, 50, timing=Timing(start=9, compute=36, save_wait=5))
    log.run("two", 100)
    log.add("two", RewindEntry, 100, after=Position(2))
    log.save("two", 3, 110, 1, timing={"compute": 9})
    log.add("two", DoneEntry, 111, epoch=Position(3))
    log.add("two", EndEntry, 112, timing=Timing(compute=9, save_wait=1))
    log.run("three", 200)
    log.add("three", RewindEntry, 200, after=Position(1))
    log.add("three", EndEntry, 201, timing=Timing(start=1))
    one, two, three = log.tell().runs
    assert one.ledger.wall == 50
    assert (one.ledger.start, one.ledger.compute, one.ledger.redone) == (9, 9, 27)
    assert [it.epoch for it in one.epochs if it.is_set_aside] == [2, 3, 4]
    assert [it.epoch for it in one.epochs if it.is_kept] == [0, 1]
    assert (one.state, two.state, two.resumed_from) == ("stopped", "finished", 2)
    assert (two.ledger.wall, two.ledger.save_wait, two.ledger.idle) == (12, 1, 2)
    assert (two.ledger.compute, two.ledger.redone, three.resumed_from) == (0, 9, 1)


def test_a_run_that_was_lost_or_before_one_that_began_afresh_computed_in_vain(log):
    log.run("one", 0)
    log.save("one", 0, 10, 1, timing={"compute": 9})
    log.run("two", 20)
    log.save("two", 1, 30, 1, timing={"compute": 5})
    log.run("three", 100)
    log.add("three", RewindEntry, 100, after=None)
    log.save("three", 0, 110, 1, timing={"compute": 8})
    log.add("three", ClaimEntry, 130, upto=Position(1), retry=9)
    runs = log.tell().runs
    assert [run.state for run in runs] == ["lost"] * 3
    assert [run.ledger.compute for run in runs] == [0, 0, 8]
    assert [run.ledger.redone for run in runs] == [10, 10, 22]


def test_epochs_that_a_loss_undid_or_that_were_not_saved_are_counted_as_redone():
    now = 0.0
    watch = Stopwatch(now, clock=lambda: now)
    now += 2
    watch.enter("compute")
    now += 10
    watch.capture(Position(1))
    with watch.spending("save_wait"):
        now += 1
    now += 5
    watch.lose("lost")
    now += 3
    watch.go_back(Position(1))
    watch.enter("compute")
    now += 6
    timing = watch.end("stopped", Position(1))["timing"]
    del timing["losses"]
    parts = {"start": 2, "compute": 10, "save_wait": 1, "recovery": 3, "redone": 5 + 6}
    assert timing == parts


@pytest.mark.parametrize("kind", ["link", "hole", "empty"])
def test_a_log_of_which_nothing_can_be_read_has_no_story(kind, tmp_path):
    path = tmp_path / "runs" / "_log" / "0000000000.json"
    path.parent.mkdir(parents=True)
    if kind == "link":
        path.symlink_to("/dev/tty")
    else:
        path.touch()
        os.truncate(path, 1 << 40 if kind == "hole" else 0)
    result = invoke("report", tmp_path / "runs", "-o", tmp_path / "out")
    assert (result.exit_code, "0000000000.json" in result.output) == (7, True), result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("timing", "field"),
    [({"compute": -1}, "compute"), ({"losses": [{"at": 1, "text": "x" * 1001}]}, "text"), ([], "")],
)
def test_a_record_with_a_strange_time_is_corrupt_and_left_out_of_the_story(timing, field, tmp_path):
    manager = MultiNodeCheckpointManager(tmp_path)
    manager.run.start([], {})
    save_epoch(manager, 0, details={"timing": timing})
    manager.run.end()
    with pytest.raises(CheckpointCorruptError, match=rf"timing.*{field}"):
        manager.record(0)
    [run] = read_story(tmp_path).runs
    assert not run.epochs


def test_times_that_contradict_each_other_give_no_negative_part(log):
    log.run("one", 10**9)
    log.save("one", 0, 1, 1, timing={"compute": 1e9, "save_wait": 1e9})
    log.trees[-1]["time"] = "yesterday"
    log.add("one", EndEntry, 2, timing=Timing(compute=5))
    [run] = log.tell().runs
    assert min(astuple(run.ledger)) >= 0


def test_what_a_damaged_entry_said_is_told_to_be_missing(tmp_path, caplog):
    manager = begin(tmp_path / "runs")
    save(manager, 0)
    manager.run.end()
    (tmp_path / "runs" / "_log" / "0000000002.json").write_bytes(b"")
    [run] = read_story(tmp_path / "runs").runs
    assert not run.epochs
    assert "0000000002.json" in caplog.text


def test_that_the_run_before_was_killed_is_told_by_ls(inproc_session, tmp_path):
    manager = MultiNodeCheckpointManager(tmp_path / "k")
    JobRunner(counter(2), manager).run(inproc_session)
    killed = begin(manager.path)
    killed.run.lock.leave()  # as a killed process does
    assert "The last run ended without a word" in invoke("ls", manager.path).output
    JobRunner(counter(3), MultiNodeCheckpointManager(manager.path)).run(inproc_session)
    assert "without a word" not in invoke("ls", manager.path).output
