"""Power loss at every moment of a run's life: what a file system may leave is recovered.

A real life is traced. After each of its operations, the file system may have kept or lost whatever
was not synced: such states are made, and recovered from as after any crash. Every day, that is done
after some of the operations; nightly after each, also for all states that lose or keep one thing only.

Leaving out any one sync must be caught by that: else it would be needless, or the test blind.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from jobrunner import JobRunnerError, KeepLast
from jobrunner.checkpoint.log.entries import CommitEntry
from jobrunner.checkpoint.store.store_reader import StoreReader
from tests.faults.life import STEPS, Place, Recorded, check_recovery, take_step
from tests.faults.power import (
    Disk,
    Operation,
    TracingFiles,
    Tree,
    all_kept,
    all_lost,
    materialize,
    some_state,
    telling_states,
)
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("quiet")


class Moment(NamedTuple):
    """From operation `start` on, a step is under way; `before` was recorded at its start."""

    start: int
    step: str
    before: Recorded


class Life(NamedTuple):
    """What a run did, and what it was told to do when."""

    path: Path
    trace: list[Operation]
    moments: list[Moment]
    has_syncfs: bool

    def at(self, count: int) -> Moment:
        """The step that was under way after `count` operations."""
        return [moment for moment in self.moments if moment.start <= count][-1]


def live(path: Path, files: TracingFiles) -> Life:
    place = Place(path)
    manager = place.manager(keep=KeepLast(2), files=files)
    moments = []
    for step in STEPS:
        moments.append(Moment(len(files.trace), step, place.recorded()))
        take_step(manager, step)
    moments.append(Moment(len(files.trace), "over", place.recorded()))
    return Life(path, files.trace, moments, files.has_syncfs)


@pytest.fixture(scope="module", autouse=True)
def without_rows() -> Iterator[None]:
    """A stack is files like others, and each file more has states of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.faults.life.ROWS", 0)
        yield


@pytest.fixture(scope="module", params=["syncfs", "fsync"])
def life(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Life:
    root = tmp_path_factory.mktemp(request.param)
    return live(root / "runs" / "k", TracingFiles(has_syncfs=request.param == "syncfs"))


def digest(tree: Tree) -> bytes:
    found = hashlib.sha256()
    for name, node in tree.items():
        content = node if isinstance(node, bytes) else digest(node)
        found.update(f"{name}/{type(node)}/".encode() + hashlib.sha256(content).digest())
    return found.digest()


class Judge:
    """Recovers states, each once, and counts."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()
        # Recovery writes a good deal, and none of it need last.
        directory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self._scratch = Path(tempfile.mkdtemp(dir=directory))
        self.count = 0

    def close(self) -> None:
        shutil.rmtree(self._scratch)

    def judge(self, tree: Tree, moment: Moment) -> None:
        key = digest(tree) + repr(moment).encode()
        if key in self._known:
            return
        self._known.add(key)
        self.count += 1
        path = self._scratch / str(self.count)
        materialize(tree, path)
        place = Place(path / "runs" / "k")
        try:
            if moment.step in ("end", "over"):
                assert place.manager().directory.snapshot().is_done
            if moment.step == "over":
                assert place.manager().directory.log.refresh().is_ended
            check_what_opens(place)
            check_recovery(place, moment.step, moment.before)
        finally:
            shutil.rmtree(path)


def check_what_opens(place: Place) -> None:
    """Before any recovery: a store that was recorded once and opens as live is whole."""
    directory = place.manager().directory
    for entry in directory.log.read_entries():
        if isinstance(entry, CommitEntry):
            for record in entry.records:
                for store in (record.stores or {}).values():
                    if (place.directory / store.name / "zarr.json").exists():
                        files = directory.files
                        StoreReader(files, place.path, store.name, store.sha256).verify()


@pytest.fixture
def judge() -> Iterator[Judge]:
    judge = Judge()
    yield judge
    judge.close()


def replay(life: Life, without: int | None = None) -> Iterator[tuple[Disk, Moment]]:
    """The disk after each operation, one of them left out."""
    disk = Disk(str(life.path.parents[1]))
    for count, operation in enumerate(life.trace, 1):
        if count - 1 != without:
            disk.apply(operation)
        yield disk, life.at(count)


@sampled("every_kth, drawn", sample=(10, 2), nightly=(1, 20))
def test_what_a_power_loss_may_leave_at_any_moment_is_recovered(
    every_kth: int, drawn: int, life: Life, judge: Judge
) -> None:
    draw = random.Random(0)
    for number, (disk, moment) in enumerate(replay(life)):
        if number % every_kth:
            continue
        judge.judge(all_kept(disk), moment)
        judge.judge(all_lost(disk), moment)
        for _ in range(drawn):
            judge.judge(some_state(disk, draw), moment)
        for tree in telling_states(disk) if every_kth == 1 else ():
            judge.judge(tree, moment)
    print(f"{len(life.trace)} operations, {judge.count} states recovered, 0 losses")
    assert judge.count > len(life.trace) / every_kth


def is_needed(life: Life, judge: Judge, without: int) -> bool:
    """Whether a state that cannot be recovered shows that one operation is missing."""
    later = itertools.islice(replay(life, without), without, None)
    for disk, moment in later:
        for tree in itertools.chain([all_lost(disk)], telling_states(disk)):
            try:
                judge.judge(tree, moment)
            except (AssertionError, JobRunnerError, OSError):
                return True
    return False


def is_excused(life: Life, number: int) -> bool:
    """Whether a sync may be left out because nothing that counts is lost."""
    made, synced = life.trace[number - 1], life.trace[number].path
    disk, _ = next(itertools.islice(replay(life), number - 1, None))
    if disk.is_synced(synced):
        return True  # nothing waits, as with a file that was made durable under its first name
    if life.at(number).step != "start" or made.what != "mkdir":
        return False
    # Signs of life need not outlive the machine; nor need an empty directory outlive it, which the
    # first save's syncfs makes durable with all that is in it.
    return "_runs" in made.path or (life.has_syncfs and "_log" not in made.path)


@pytest.mark.nightly
def test_leaving_out_any_sync_is_caught(life: Life, judge: Judge) -> None:
    syncs = [i for i, done in enumerate(life.trace) if done.what in ("fsync", "syncfs")]
    needed = [i for i in syncs if not is_excused(life, i)]
    missed = [life.trace[i - 1 : i + 1] for i in needed if not is_needed(life, judge, i)]
    print(f"{len(needed)} of {len(syncs)} syncs are needed; {judge.count} states")
    assert missed == []
    assert len(needed) > 30
