"""A log that has lost entries: what is recorded stays so, and nothing else is touched."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobrunner import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointWriteError,
    CommitConflictError,
    KeepLast,
    MultiNodeCheckpointManager,
    Position,
)
from jobrunner.checkpoint import Directory, inspect_directory, plan_repair, repair_log
from jobrunner.checkpoint.log.handler import frame
from jobrunner.checkpoint.log.heartbeat import Patience
from jobrunner.checkpoint.log.log_writer import STATE_INTERVAL
from jobrunner.checkpoint.maintenance.repair import Repair
from jobrunner.testing import FaultyFiles, PowerCutError, assert_identical
from jobrunner.workspace.workspace import Workspace
from tests.faults.life import LAST, NODES, Place, check_epochs, save, take_step
from tests.sampling import sampled
from tests.saves import Save, save_epoch

pytestmark = pytest.mark.usefixtures("quiet")

Damage = Callable[[Path], None]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def remove(file: Path) -> None:
    file.unlink()


def duplicate(file: Path) -> None:
    other = file.with_name(f"{abs(int(file.stem) - 1):010d}.json")
    shutil.copyfile(other, file)


LIFE = ("start", "save 0", "save 1", "save 2", "rewind 1", "save 2", "save 3", "finish 3", "end")


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory 1 to 3 of a job that has ended; 0 was retired, an older 2 set aside."""
    path = tmp_path_factory.mktemp("lived") / "k"
    manager = MultiNodeCheckpointManager(path, keep=KeepLast(2), files=FaultyFiles(sync=False))
    for step in LIFE:
        take_step(manager, step)
    assert recorded(path) == (1, 2, 3)
    return path


@pytest.fixture
def copies(lived: Path, tmp_path: Path) -> Iterator[Path]:
    """Copies of it without end."""
    return (Path(shutil.copytree(lived, tmp_path / str(i))) for i in itertools.count())


def log_of(path: Path) -> list[Path]:
    return sorted((path / "_log").glob("[0-9]*.json"))


def recorded(path: Path) -> tuple[int, ...]:
    return Place(path).recorded()


def manager_of(path: Path) -> MultiNodeCheckpointManager:
    return Place(path).manager()


def repair(path: Path, *patience: Patience) -> Repair | None:
    return repair_log(manager_of(path).directory, *patience)


def plan(path: Path) -> Repair | None:
    return plan_repair(manager_of(path).directory)


def contents(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def check_repaired(path: Path, before: dict[Path, bytes]) -> None:
    after = contents(path)
    for file, content in before.items():
        if file.name == "state.json":
            continue  # a cache, which may be false now
        kept = Path(f"{file}.damaged")
        # Nothing is written over but entries that are lost, and these are kept.
        assert after[file] == content or after[kept] == content, file
        if after[file] != content:
            assert entry_in(file)["kind"] == "lost"
    assert plan(path) is None
    check_epochs(manager_of(path))
    assert "damaged" not in {it.status for it in inspect_directory(manager_of(path).directory)}


def entry_in(file: Path) -> dict[str, Any]:
    return json.loads(file.read_bytes())["entry"]


def kinds_of(path: Path) -> list[str]:
    return [entry_in(file)["kind"] for file in log_of(path)]


def last_claim(path: Path) -> int:
    """The number of the newest ``claim``."""
    kinds = kinds_of(path)
    return len(kinds) - 1 - kinds[::-1].index("claim")


def check_that_a_run_goes_on(path: Path, epochs: tuple[int, ...]) -> None:
    manager = manager_of(path)
    manager.run.start(NODES, {})
    save(manager, LAST + 1)
    manager.run.end()
    assert recorded(path) == (*epochs, LAST + 1)
    check_epochs(manager_of(path))


# The second stands for the entry of a run and a `commit` of that run.
@sampled("lost", sample=[(4,), (0, 3), (7, 8)], nightly=[])
@pytest.mark.parametrize("damage", [cut, remove, duplicate])
def test_whatever_becomes_of_two_entries_the_same_epochs_are_recorded_after_a_repair(
    damage: Damage, lost: Sequence[tuple[int, ...]], copies: Iterator[Path]
) -> None:
    numbers = range(len(log_of(next(copies))))
    everything = [*itertools.combinations(numbers, 1), *itertools.combinations(numbers, 2)]
    for choice in lost or everything:
        if damage is remove and numbers[-1] in choice:
            continue  # nothing tells that there was an entry
        path = next(copies)
        for number in choice:
            damage(path / "_log" / f"{number:010d}.json")
        before = contents(path)
        with pytest.raises(CheckpointCorruptError, match=r"fsck .*--repair"):
            recorded(path)
        repair(path)
        assert recorded(path) == (1, 2, 3), choice
        check_repaired(path, before)
        check_that_a_run_goes_on(path, (1, 2, 3))


@pytest.mark.parametrize("change", [{"format": 99}, {"kind": "merge"}])
def test_what_a_later_version_wrote_is_not_lost(
    change: dict[str, object], copies: Iterator[Path]
) -> None:
    path = next(copies)
    file = log_of(path)[-2]
    file.write_bytes(frame(json.dumps({**entry_in(file), **change}).encode()))
    before = contents(path)
    with pytest.raises(CheckpointCorruptError, match="Use a later version"):
        repair(path)
    assert contents(path) == before


def at(*epochs: int) -> list[Position]:
    return [Position(epoch) for epoch in epochs]


def test_a_log_that_is_gone_is_made_again_from_the_stores(copies: Iterator[Path]) -> None:
    path = next(copies)
    details = manager_of(path).record(2).details
    shutil.rmtree(path / "_log")
    assert manager_of(path).directory.unclaimed() == at(1, 2, 3)
    found = repair(path)
    assert (found.kept, list(found.rebuilt)) == ([], at(1, 2, 3))
    assert recorded(path) == (1, 2, 3)
    assert manager_of(path).directory.unclaimed() == []
    assert manager_of(path).record(2).details == details
    check_that_a_run_goes_on(path, (1, 2, 3))


def go_back(path: Path) -> list[str]:
    """Save 1 to 3, go back to 1, and save another 2; returns the kinds of the entries."""
    manager = manager_of(path)
    manager.run.start(NODES, {})
    for epoch in (1, 2, 3):
        save(manager, epoch)
    manager.run.rewind(Position(1), "a test")
    save(manager, 2)
    manager.run.end()
    assert recorded(path) == (1, 2)
    return kinds_of(path)


def test_what_was_set_aside_and_its_names_stay_so_if_the_whole_log_is_gone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "k"
    go_back(path)
    before = {name.name for name in path.iterdir()}
    shutil.rmtree(path / "_log")
    repair(path)
    assert recorded(path) == (1, 2)
    stores = manager_of(path).record(2).stores
    assert [store.name for store in stores.values()] == ["a.2.r2", "b.2.r2"]
    again = manager_of(path)
    again.run.start(NODES, {})
    save(again, 2)
    again.run.end()
    assert before < {name.name for name in path.iterdir()}
    assert recorded(path) == (1, 2)
    check_epochs(manager_of(path))


@pytest.mark.parametrize("more", [(), ("commit",), ("claim", "commit")])
def test_what_was_set_aside_stays_so_if_the_rewind_is_lost(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    """What was written after it, below what was there, proves it."""
    path = tmp_path / "k"
    kinds = go_back(path)
    rewind = kinds.index("rewind")
    assert kinds[rewind : rewind + 3] == ["rewind", "claim", "commit"]
    for number in (rewind, *(rewind + ("claim", "commit").index(kind) + 1 for kind in more)):
        cut(log_of(path)[number])
    found = repair(path)
    assert list(found.given_up) == at(3)
    assert recorded(path) == (1, 2)
    stores = manager_of(path).record(2).stores
    assert [store.name for store in stores.values()] == ["a.2.r2", "b.2.r2"]
    check_that_a_run_goes_on(path, (1, 2))


def test_an_abandoned_save_is_not_recorded_though_its_stores_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "k"
    manager = manager_of(path)
    manager.run.start(NODES, {})
    save(manager, 1)
    begun = Save(manager, Position(2))
    begun.write({node: Workspace(node) for node in NODES})
    manager.run.leave()  # as if it was killed
    cut(log_of(path)[0])
    found = repair(path)
    assert not found.rebuilt  # no entry after its `claim` is lost
    assert recorded(path) == (1,)
    check_that_a_run_goes_on(path, (1,))


@pytest.mark.parametrize("is_there", [True, False], ids=["cut", "missing"])
def test_an_epoch_without_all_stores_or_with_one_that_is_not_whole_is_not_recorded(
    is_there: bool, copies: Iterator[Path]
) -> None:
    path = next(copies)
    shutil.rmtree(path / "_log")
    told = "those of b are missing"
    if is_there:
        told = str(path / "a.3.r2" / "w" / "zarr.json")
        cut(Path(told))
    else:
        shutil.rmtree(path / "b.3.r2")
    found = repair(path)
    assert list(found.rebuilt) == at(1, 2)
    assert told in found.unproven["a.3.r2"]
    assert recorded(path) == (1, 2)


def test_a_manifest_with_a_wrong_bit_proves_nothing(copies: Iterator[Path]) -> None:
    path = next(copies)
    shutil.rmtree(path / "_log")
    manifest = path / "a.3.r2" / "zarr.json"
    whole = manifest.read_bytes()
    for i in range(0, len(whole), 97):
        damaged = bytearray(whole)
        damaged[i] ^= 1 << i % 8
        manifest.write_bytes(damaged)
        found = plan(path)
        assert list(found.rebuilt) == at(1, 2), i
        assert str(manifest) in found.unproven["a.3.r2"], i


def test_a_pin_that_is_left_is_kept(copies: Iterator[Path]) -> None:
    path = next(copies)
    manager_of(path).pin(2, "paper")
    manager_of(path).pin(3, "other")
    cut(log_of(path)[-1])
    repair(path)
    assert manager_of(path).pins() == {2: ["paper"]}


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_log_is_repaired_beneath_no_run_that_is_alive_and_one_that_was_silent_is_over(
    is_alive: bool, tmp_path: Path
) -> None:
    path = tmp_path / "k"
    run = manager_of(path)
    run.run.start(NODES, {})
    save(run, 0)
    cut(log_of(path)[0])  # not even its own entry is left
    heartbeat = next((path / "_runs").glob("*/heartbeat"))
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds
        if is_alive:
            heartbeat.write_bytes(f"{now[0]}".encode())

    patience = Patience(clock=lambda: now[0], wait=wait)
    if is_alive:
        with pytest.raises(CommitConflictError, match="alive"):
            repair(path, patience)
        save(run, 1)
    else:
        repair(path, patience)
        with pytest.raises(CommitConflictError, match="taken"):
            save(run, 1)
        assert recorded(path) == (0,)
    run.run.end()
    left = ["claim", "commit", "commit", "end"] if is_alive else ["claim", "commit"]
    assert [entry_in(file)["kind"] for file in log_of(path)[1 : 1 + len(left)]] == left


def remove_last_claim(file: Path) -> None:
    """Remove the newest entries from the last ``claim`` on: nothing tells that they were."""
    path = file.parent.parent
    for gone in log_of(path)[last_claim(path) :]:
        gone.unlink()


def test_a_repair_whose_start_fails_does_not_end(
    copies: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An `end` would say that the log is sure again, though nothing was recorded anew."""
    path = next(copies)
    count = len(log_of(path))
    cut(log_of(path)[4])

    def fail(*args: Any) -> None:
        raise OSError("test")

    with monkeypatch.context() as patch:
        patch.setattr("jobrunner.checkpoint.retention.Retention.start_run", fail)
        with pytest.raises(CheckpointWriteError, match="leftovers"):
            repair(path)
    assert kinds_of(path)[count:] == ["run"]
    with pytest.raises(CheckpointCorruptError, match="repair has not ended"):
        recorded(path)
    assert not list((path / "_runs").iterdir())
    repair(path)
    assert recorded(path) == (1, 2, 3)


@sampled("every_kth", sample=31, nightly=1)
@pytest.mark.parametrize("how", ["fail", "die"])
@pytest.mark.parametrize("damage", [cut, remove, remove_last_claim])
def test_a_repair_can_fail_at_any_operation_and_be_repeated(
    how: str, damage: Damage, every_kth: int, copies: Iterator[Path]
) -> None:
    for k in itertools.count(1, every_kth):
        path = next(copies)
        damage(log_of(path)[4])
        before = contents(path)
        files = FaultyFiles(k, how, sync=False)
        with contextlib.suppress(PowerCutError, CheckpointError):
            repair_log(Directory(path, files=files))
        repair(path)
        assert recorded(path) == (1, 2, 3), k
        check_repaired(path, before)
        if files.count < k:
            return


def test_damage_before_a_kept_state_costs_at_most_the_record_of_its_epoch(tmp_path: Path) -> None:
    path = tmp_path / "k"
    run = manager_of(path)
    run.run.start(["a"], {})
    workspace = Workspace("a")
    for epoch in range(STATE_INTERVAL + 5):
        workspace.globals["w"] = np.full(3, epoch)
        save_epoch(run, Position.of(epoch), {"a": workspace})
    run.run.end()
    assert (path / "_log" / "state.json").exists()
    epochs = run.positions()
    (path / "_log" / "0000000006.json").unlink()  # the commit of epoch 4
    again = manager_of(path)
    assert again.positions() == epochs
    with pytest.raises(CheckpointCorruptError, match="fsck"):
        again.record(4)
    again.verify(5)
    found = repair(path)
    assert list(found.rebuilt) == at(4)
    assert manager_of(path).positions() == epochs
    assert_identical(np.full(3, 4), manager_of(path).open(4)["a"].load("w"))
    assert manager_of(path).directory.verify_log() == [6]


def test_a_directory_that_is_whole_is_left_alone(copies: Iterator[Path]) -> None:
    path = next(copies)
    before = contents(path)
    assert repair(path) is None
    assert contents(path) == before
    (path / "notes.7").write_text("not a store")
    assert manager_of(path).directory.unclaimed() == []
