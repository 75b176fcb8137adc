"""Power loss at every moment of a run's life: what a file system may leave is recovered.

A real life is traced. After each of its operations, the file system may have kept or lost whatever
was not synced: such states are made, and recovered from as after any crash. Every day, that is done
after some of the operations; nightly after each, also for all states that lose or keep one thing only.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from jobrunner import KeepLast
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
    """What a run did on a disk, and what it was told to do when."""

    disk: Path
    trace: list[Operation]
    moments: list[Moment]

    def at(self, count: int) -> Moment:
        """The step that was under way after `count` operations."""
        return [moment for moment in self.moments if moment.start <= count][-1]


@pytest.fixture(scope="module", autouse=True)
def without_rows() -> Iterator[None]:
    """A stack is files like others, and each file more has states of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.faults.life.ROWS", 0)
        yield


@pytest.fixture(scope="module", params=["syncfs", "fsync"])
def life(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Life:
    disk = tmp_path_factory.mktemp(request.param)
    place = Place(disk / "runs" / "k")
    files = TracingFiles(has_syncfs=request.param == "syncfs")
    manager = place.manager(keep=KeepLast(2), files=files)
    moments = []
    for step in STEPS:
        moments.append(Moment(len(files.trace), step, place.recorded()))
        take_step(manager, step)
    moments.append(Moment(len(files.trace), "over", place.recorded()))
    return Life(disk, files.trace, moments)


def digest(tree: Tree) -> bytes:
    found = hashlib.sha256()
    for name, node in tree.items():
        content = node if isinstance(node, bytes) else digest(node)
        found.update(f"{name}/{type(node)}/".encode() + hashlib.sha256(content).digest())
    return found.digest()


def check(tree: Tree, moment: Moment, path: Path) -> None:
    """The state is recovered."""
    materialize(tree, path)
    place = Place(path / "runs" / "k")
    if moment.step in ("end", "over"):
        assert place.manager().directory.snapshot().is_done
    if moment.step == "over":
        assert place.manager().directory.log.refresh().is_ended
    check_what_opens(place)
    check_recovery(place, moment.step, moment.before)
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


@sampled("every_kth, drawn", sample=(10, 2), nightly=(1, 20))
def test_what_a_power_loss_may_leave_at_any_moment_is_recovered(
    every_kth: int, drawn: int, life: Life, tmp_path: Path
) -> None:
    draw = random.Random(0)
    disk = Disk(str(life.disk))
    known: set[tuple[bytes, Moment]] = set()
    for number, operation in enumerate(life.trace):
        disk.apply(operation)
        if number % every_kth:
            continue
        trees = [all_kept(disk), all_lost(disk), *(some_state(disk, draw) for _ in range(drawn))]
        if every_kth == 1:
            trees += telling_states(disk)
        for tree in trees:
            state = digest(tree), life.at(number + 1)
            if state not in known:
                known.add(state)
                check(tree, state[1], tmp_path / str(len(known)))
    print(f"{len(life.trace)} operations, {len(known)} states recovered, 0 losses")
    assert len(known) > len(life.trace) / every_kth
