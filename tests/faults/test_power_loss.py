"""Power loss at every moment of a run's life: every state that a file system may leave is recovered.

A real life is traced. After each of its operations, the file system may have kept or lost whatever
was not synced: each such state is made, and recovered from as after any crash. Where they are more
than a thousand (with ``FAULTS=thorough``, and then after every operation instead of every tenth;
else more than three), the most telling and a random sample are taken: while many files of a save
wait to be synced one by one, there are hundreds of millions.

Leaving out any one sync must be caught by that: else it would be needless, or the test blind.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from jobrunner import JobRunnerError, KeepLast, MultiNodeCheckpointManager
from jobrunner.checkpoint.reader import StoreReader
from tests.faults.power import (
    Disk,
    Operation,
    TracingFiles,
    Tree,
    all_lost,
    count_states,
    materialize,
    states,
)
from tests.faults.test_checkpoint_sweep import (  # noqa: F401  # a fixture for here as well
    STEPS,
    Recorded,
    _quiet,
    check_recovery,
    recorded,
    take_step,
)
from tests.faults.thorough import EVERY_STATE, IS_THOROUGH

LIMIT = EVERY_STATE if IS_THOROUGH else 3
SAMPLE = 300 if IS_THOROUGH else 3


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
    manager = MultiNodeCheckpointManager(path, keep=KeepLast(2), files=files)
    moments = []
    for step in STEPS:
        moments.append(Moment(len(files.trace), step, recorded(path)))
        take_step(manager, step)
    moments.append(Moment(len(files.trace), "over", recorded(path)))
    return Life(path, files.trace, moments, files.has_syncfs)


@pytest.fixture(scope="module", params=["syncfs", "fsync"])
def life(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Life:
    root = tmp_path_factory.mktemp(request.param)
    return live(root / "runs" / "k", TracingFiles(has_syncfs=request.param == "syncfs"))


def digest(tree: Tree) -> bytes:
    found = hashlib.sha256()
    for name, node in tree.items():
        is_file = isinstance(node, bytes)
        found.update(f"{name}/{is_file}/".encode())
        found.update(digest_content(node) if is_file else digest(node))  # type: ignore[arg-type]
    return found.digest()


@functools.lru_cache(maxsize=10_000)
def digest_content(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


class Judge:
    """Recovers states, each once, and counts."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._known: set[bytes] = set()
        # Recovery writes a good deal, and none of it need last.
        self._scratch = Path(
            tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        )
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
        directory = path / "runs" / "k"
        try:
            if moment.step in ("end", "over"):
                assert MultiNodeCheckpointManager(directory).is_done()
            if moment.step == "over":
                assert MultiNodeCheckpointManager(directory).state().is_ended
            check_what_opens(directory)
            check_recovery(directory, moment.step, moment.before)
        finally:
            shutil.rmtree(path)


def check_what_opens(path: Path) -> None:
    """Before any recovery: a store that was recorded once and opens as live is whole."""
    directory = MultiNodeCheckpointManager(path)
    for entry in directory.entries():
        if entry["kind"] == "commit":
            for about in entry["stores"].values():
                if (path / about["store"] / "zarr.json").exists():
                    name, manifest = about["store"], about["manifest"]
                    StoreReader(directory.files, str(path), name, manifest).verify()


@pytest.fixture
def judge(life: Life) -> Iterator[Judge]:
    judge = Judge(life)
    yield judge
    judge.close()


def replay(life: Life, without: int | None = None) -> Iterator[tuple[Disk, Moment]]:
    """The disk after each operation, one of them left out."""
    disk = Disk(str(life.path.parents[1]))
    for count, operation in enumerate(life.trace, 1):
        if count - 1 != without:
            disk.apply(operation)
        yield disk, life.at(count)


@pytest.mark.timeout(3600)
@pytest.mark.slow
def test_every_state_that_a_power_loss_may_leave_is_recovered(life: Life, judge: Judge) -> None:
    draw = random.Random(0)
    exhausted = 0
    for count, (disk, moment) in enumerate(replay(life)):
        if not IS_THOROUGH and count % 10:
            continue
        exhausted += count_states(disk) <= LIMIT
        for tree in states(disk, LIMIT, draw, SAMPLE):
            judge.judge(tree, moment)
    print(
        f"{len(life.trace)} operations, {judge.count} states, all states there are after "
        f"{exhausted} of them, 0 losses"
    )
    assert judge.count > 100


def is_needed(life: Life, judge: Judge, without: int) -> bool:
    """Whether a state that cannot be recovered shows that one operation is missing."""
    draw = random.Random(0)
    later = itertools.islice(replay(life, without), without, None)
    for disk, moment in later:
        for tree in (all_lost(disk), *states(disk, 1, draw, 1)):
            try:
                judge.judge(tree, moment)
            except (AssertionError, JobRunnerError, OSError):
                return True
    return False


def is_excused(life: Life, number: int) -> bool:
    """Whether a sync may be left out because nothing that counts is lost."""
    made, synced = life.trace[number - 1], life.trace[number].path
    if any(done.what == "link" and done.path == synced for done in life.trace):
        return True  # its content was made durable under its first name
    if life.at(number).step != "start" or made.what != "mkdir":
        return False
    # Signs of life need not outlive the machine; nor need an empty directory outlive it, which the
    # first save's syncfs makes durable with all that is in it.
    return "_runs" in made.path or (life.has_syncfs and "_log" not in made.path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_leaving_out_any_sync_is_caught(life: Life, judge: Judge) -> None:
    syncs = [i for i, done in enumerate(life.trace) if done.what in ("fsync", "syncfs")]
    if not IS_THOROUGH:  # of those that are alike, one
        kinds = {}
        for i in syncs:
            around = [(done.what, done.path) for done in life.trace[i - 1 : i + 1]]
            kinds[re.sub(r"[0-9a-f]{32}|\d+", "", str(around))] = i
        syncs = [i for i in kinds.values() if not is_excused(life, i)][
            :: 1 if life.has_syncfs else 4
        ]
    caught = [i for i in syncs if is_needed(life, judge, i)]
    missed = [i for i in syncs if i not in caught]
    print(f"{len(syncs)} syncs, {len(caught)} needed, {judge.count} states")
    assert [life.trace[i - 1 : i + 1] for i in missed if not is_excused(life, i)] == []
    assert len(caught) > 5
