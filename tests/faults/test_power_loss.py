"""Power loss at every moment of a run's life: every state that a file system may leave is recovered.

A real life is traced. After each of its operations, the file system may have kept or lost whatever
was not synced: each such state is made, and recovered from as after any crash (every day, only after
some of the operations, and only the telling ones of more than three).

What was written of a store that no record names makes no difference, but for the name of the store
and of its root document: recovery moves that away, and removes the tree, whatever is in it. So it is
kept once and lost once, for each state of all the rest, and drawn at random besides; and recovery is
watched, that it opens no file there.

Leaving out any one sync must be caught by that: else it would be needless, or the test blind.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import random
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jobrunner import (
    CheckpointCorruptError,
    JobRunnerError,
    KeepLast,
    MultiNodeCheckpointManager,
)
from jobrunner.checkpoint.log.entries import CommitEntry
from jobrunner.checkpoint.log.handler import decode_entry
from jobrunner.checkpoint.store.document import ROOT_DOCUMENT
from jobrunner.checkpoint.store.store_reader import StoreReader
from jobrunner.testing import FaultyFiles
from tests.faults.power import (
    Disk,
    Matters,
    Operation,
    TracingFiles,
    Tree,
    all_kept,
    all_lost,
    materialize,
    some_state,
    states,
)
from tests.faults.test_checkpoint_sweep import (
    STEPS,
    Recorded,
    check_recovery,
    recorded,
    take_step,
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
    manager = MultiNodeCheckpointManager(path, keep=KeepLast(2), files=files)
    moments = []
    for step in STEPS:
        moments.append(Moment(len(files.trace), step, recorded(path)))
        take_step(manager, step)
    moments.append(Moment(len(files.trace), "over", recorded(path)))
    return Life(path, files.trace, moments, files.has_syncfs)


@pytest.fixture(scope="module", autouse=True)
def without_rows() -> Iterator[None]:
    """A stack is files like others, and each file more doubles the states there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.faults.test_checkpoint_sweep.ROWS", 0)
        yield


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

    def judge(self, tree: Tree, moment: Moment, unread: Collection[str] = ()) -> None:
        """Recover a state; whatever is in the stores that are `unread` must not be looked at."""
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
                assert MultiNodeCheckpointManager(directory).directory.snapshot().is_done
            if moment.step == "over":
                assert MultiNodeCheckpointManager(directory).directory.log.refresh().is_ended
            files = FaultyFiles(sync=False)
            check_what_opens(directory, files)
            check_recovery(directory, moment.step, moment.before, files)
            for operation, at in files.trace:
                store = os.path.relpath(at, directory).partition(os.sep)[0]
                assert operation in _BLIND or store not in unread, (operation, at)
        finally:
            shutil.rmtree(path)


_BLIND = ("rename", "fsync", "syncfs", "list", "unlink", "rmdir")
"""Operations that go by names, and by nothing that a file holds."""


def check_what_opens(path: Path, files: FaultyFiles) -> None:
    """Before any recovery: a store that was recorded once and opens as live is whole."""
    directory = MultiNodeCheckpointManager(path, files=files)
    for entry in directory.directory.log.read_entries():
        if isinstance(entry, CommitEntry):
            for record in entry.records:
                for store in (record.stores or {}).values():
                    if (path / store.name / "zarr.json").exists():
                        files = directory.directory.files
                        StoreReader(files, str(path), store.name, store.sha256).verify()


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


def unrecorded(life: Life, disk: Disk) -> set[str]:
    """The stores that no record names, whatever was lost."""
    found: Any = all_kept(disk)
    for name in life.path.relative_to(life.path.parents[1]).parts:
        found = found.get(name, {})
    named = set()
    for name, content in found.get("_log", {}).items():
        if not re.fullmatch(r"[0-9]+\.json", name):
            continue
        with contextlib.suppress(CheckpointCorruptError):
            entry = decode_entry(content, int(name[:-5]), name)
            for record in entry.get("records", ()):
                stores = record["stores"] or {}  # an epoch that was passed over has none
                named |= {store["name"] for store in stores.values()}
    return {name for name in found if not name.startswith("_")} - named


def matters_beside(unread: Collection[str]) -> Matters:
    """Of the stores that are `unread`, the names and those of their root documents matter."""

    def matters(path: str) -> bool:
        store, *below = path.split("/")[2:] or [""]
        is_free = store in unread and below not in ([], [ROOT_DOCUMENT])
        return not is_free

    return matters


@sampled("every_kth, limit, drawn", sample=(40, 3, 3), nightly=(1, None, 10))
def test_every_state_that_a_power_loss_may_leave_is_recovered(
    every_kth: int, limit: int | None, drawn: int, life: Life, judge: Judge
) -> None:
    draw = random.Random(0)
    for number, (disk, moment) in enumerate(replay(life)):
        if number % every_kth:
            continue
        unread = unrecorded(life, disk)
        for tree in states(disk, matters_beside(unread), limit):
            judge.judge(tree, moment, unread)
        for _ in range(drawn):
            judge.judge(some_state(disk, draw), moment, unread)
    print(f"{len(life.trace)} operations, {judge.count} states recovered, 0 losses")
    assert judge.count > 1000 / every_kth


def is_needed(life: Life, judge: Judge, without: int) -> bool:
    """Whether a state that cannot be recovered shows that one operation is missing."""
    draw = random.Random(0)
    later = itertools.islice(replay(life, without), without, None)
    for disk, moment in later:
        telling = states(disk, matters_beside(unrecorded(life, disk)), 1)
        for tree in (all_lost(disk), *telling, some_state(disk, draw)):
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
    caught = [i for i in syncs if is_needed(life, judge, i)]
    missed = [i for i in syncs if i not in caught]
    print(f"{len(syncs)} syncs, {len(caught)} needed, {judge.count} states")
    assert [life.trace[i - 1 : i + 1] for i in missed if not is_excused(life, i)] == []
    assert len(caught) > 30
