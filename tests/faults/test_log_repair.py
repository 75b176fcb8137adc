"""A log that has lost entries: what is recorded stays so, and nothing else is touched."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
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
from jobrunner.checkpoint import inspect_directory, plan_repair, repair_log
from jobrunner.checkpoint.log.entries import CommitEntry
from jobrunner.checkpoint.log.handler import frame
from jobrunner.checkpoint.log.heartbeat import Patience
from jobrunner.checkpoint.log.log_writer import STATE_INTERVAL, LogWriter
from jobrunner.checkpoint.maintenance.repair import Repair
from jobrunner.testing import FaultyFiles, PowerCutError, assert_identical
from jobrunner.workspace.workspace import Workspace
from tests.faults.test_checkpoint_sweep import (
    LAST,
    NODES,
    check_epochs,
    recorded,
    save,
    take_step,
)
from tests.sampling import sampled
from tests.saves import Save, save_epoch

pytestmark = pytest.mark.usefixtures("quiet")

Damage = Callable[[Path], None]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip_two_bits(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    content[120] ^= 1
    file.write_bytes(content)


def remove(file: Path) -> None:
    file.unlink()


def neighbour(file: Path) -> Path:
    number = int(file.stem)
    other = file.with_name(f"{number + 1:010d}.json")
    return other if other.exists() else file.with_name(f"{number - 1:010d}.json")


def duplicate(file: Path) -> None:
    shutil.copyfile(neighbour(file), file)


def swap(file: Path) -> None:
    mine, theirs = file.read_bytes(), neighbour(file).read_bytes()
    file.write_bytes(theirs)
    neighbour(file).write_bytes(mine)


LIFE = ("start", "save 0", "save 1", "save 2", "rewind 1", "save 2", "save 3", "finish 3", "end")
DAMAGES = (cut, empty, flip_two_bits, remove, duplicate, swap)


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


def directory(path: Path) -> MultiNodeCheckpointManager:
    return MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))


def repaired(path: Path) -> Repair:
    """Repair the log, which needs it."""
    repair = repair_log(directory(path).directory)
    assert repair is not None
    return repair


def contents(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def check_repaired(path: Path, before: dict[Path, bytes], what: str) -> None:
    after = contents(path)
    for file, content in before.items():
        if file.name == "state.json":
            continue  # a cache, which may be false now
        kept = Path(f"{file}.damaged")
        # Nothing is written over but entries that are lost, and these are kept.
        assert after[file] == content or after[kept] == content, (what, file)
        if after[file] != content:
            assert entry_in(file)["kind"] == "lost"
    assert plan_repair(directory(path).directory) is None, what
    check_epochs(directory(path))
    damaged = [f for f in inspect_directory(directory(path).directory) if f.status == "damaged"]
    assert damaged == [], what


def entry_in(file: Path) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads(file.read_bytes())["entry"]
    return entry


def check_that_a_run_goes_on(path: Path, epochs: tuple[int, ...]) -> None:
    manager = directory(path)
    manager.run.start(NODES, {})
    save(manager, LAST + 1)
    manager.run.end()
    assert recorded(path) == (*epochs, LAST + 1)
    check_epochs(directory(path))


@sampled("every_kth", sample=9, nightly=1)
@pytest.mark.parametrize("damage", DAMAGES)
def test_whatever_becomes_of_one_entry_the_same_epochs_are_recorded_after_a_repair(
    damage: Damage, every_kth: int, copies: Iterator[Path]
) -> None:
    count = 0
    for k in range(0, len(log_of(next(copies))), every_kth):
        path = next(copies)
        file = log_of(path)[k]
        is_newest = k == len(log_of(path)) - 1
        damage(file)
        before = contents(path)
        what = f"{damage.__name__} {file.name}"
        if is_newest and damage is remove:
            continue  # nothing tells that there was an entry
        with pytest.raises(CheckpointCorruptError, match=r"fsck .*--repair"):
            recorded(path)
        repaired(path)
        assert recorded(path) == (1, 2, 3), what
        check_repaired(path, before, what)
        check_that_a_run_goes_on(path, (1, 2, 3))
        shutil.rmtree(path)
        count += 1
    print(f"{damage.__name__}: {count} entries, 0 epochs lost")


@sampled("every_kth", sample=53, nightly=1)
def test_whatever_becomes_of_two_entries_the_same_epochs_are_recorded_after_a_repair(
    every_kth: int, copies: Iterator[Path]
) -> None:
    numbers = range(len(log_of(next(copies))))
    pairs = list(itertools.combinations(numbers, 2))[::every_kth]
    for first, second in pairs:
        path = next(copies)
        files = log_of(path)
        for number in (first, second):
            cut(files[number])
        before = contents(path)
        repair_log(directory(path).directory)
        assert recorded(path) == (1, 2, 3), (first, second)
        check_repaired(path, before, f"{first} and {second}")
        shutil.rmtree(path)
    print(f"two entries: {len(pairs)} pairs, 0 epochs lost")


@pytest.mark.parametrize("change", [{"format": 99}, {"kind": "merge"}])
def test_what_a_later_version_wrote_is_not_lost(
    change: dict[str, object], copies: Iterator[Path]
) -> None:
    path = next(copies)
    file = log_of(path)[-2]
    file.write_bytes(frame(json.dumps({**entry_in(file), **change}).encode()))
    before = contents(path)
    with pytest.raises(CheckpointCorruptError, match="Use a later version"):
        repair_log(directory(path).directory)
    assert contents(path) == before


def at(*epochs: int) -> list[Position]:
    return [Position(epoch) for epoch in epochs]


def test_a_log_that_is_gone_is_made_again_from_the_stores(copies: Iterator[Path]) -> None:
    path = next(copies)
    details = {epoch: directory(path).record(epoch).details.to_json() for epoch in (1, 2, 3)}
    shutil.rmtree(path / "_log")
    assert directory(path).directory.unclaimed() == at(1, 2, 3)
    repair = repaired(path)
    assert (repair.kept, list(repair.rebuilt)) == ([], at(1, 2, 3))
    assert recorded(path) == (1, 2, 3)
    assert directory(path).directory.unclaimed() == []
    assert {
        epoch: directory(path).record(epoch).details.to_json() for epoch in (1, 2, 3)
    } == details
    assert directory(path).directory.info_of(directory(path).record(3).run_number) == {}
    check_that_a_run_goes_on(path, (1, 2, 3))


@pytest.mark.parametrize("left", [0, 1])
def test_newest_entries_that_are_gone_are_made_again_from_the_stores(
    left: int, copies: Iterator[Path]
) -> None:
    """Those of an attempt, with its ``begin`` or without."""
    path = next(copies)
    kinds = [entry_in(file)["kind"] for file in log_of(path)]
    last_begin = len(kinds) - 1 - kinds[::-1].index("begin")
    for file in log_of(path)[last_begin + left :]:
        file.unlink()
    repair = repaired(path)
    assert list(repair.rebuilt) == at(2, 3)
    assert recorded(path) == (1, 2, 3)
    check_epochs(directory(path))


def go_back(path: Path) -> list[str]:
    """Save 1 to 3, go back to 1, and save another 2; returns the kinds of the entries."""
    manager = directory(path)
    manager.run.start(NODES, {})
    for epoch in (1, 2, 3):
        save(manager, epoch)
    manager.run.rewind(Position(1), "a test")
    save(manager, 2)
    manager.run.end()
    assert recorded(path) == (1, 2)
    return [entry_in(file)["kind"] for file in log_of(path)]


def test_what_was_set_aside_and_its_labels_stay_so_if_the_whole_log_is_gone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "k"
    go_back(path)
    before = {name.name for name in path.iterdir()}
    shutil.rmtree(path / "_log")
    repaired(path)
    assert recorded(path) == (1, 2)
    stores = directory(path).record(2).stores
    assert [store.name for store in stores.values()] == ["a.2.r2", "b.2.r2"]
    again = directory(path)
    again.run.start(NODES, {})
    save(again, 2)
    again.run.end()
    assert before < {name.name for name in path.iterdir()}
    assert recorded(path) == (1, 2)
    check_epochs(directory(path))


@pytest.mark.parametrize("more", [(), ("commit",), ("begin", "commit")])
def test_what_was_set_aside_stays_so_if_the_rewind_is_lost(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    """What was written after it, below what was there, proves it."""
    path = tmp_path / "k"
    kinds = go_back(path)
    rewind = kinds.index("rewind")
    assert kinds[rewind : rewind + 3] == ["rewind", "begin", "commit"]
    for number in (rewind, *(rewind + ("begin", "commit").index(kind) + 1 for kind in more)):
        cut(log_of(path)[number])
    repair = repaired(path)
    assert list(repair.given_up) == at(3)
    assert recorded(path) == (1, 2)
    stores = directory(path).record(2).stores
    assert [store.name for store in stores.values()] == ["a.2.r2", "b.2.r2"]
    check_that_a_run_goes_on(path, (1, 2))


def test_an_abandoned_save_is_not_recorded_though_its_stores_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "k"
    manager = directory(path)
    manager.run.start(NODES, {})
    save(manager, 1)
    begun = Save(manager, Position(2))
    begun.write({node: Workspace(node) for node in NODES})
    manager.run.leave()  # as if it was killed
    cut(log_of(path)[0])
    repair = repaired(path)
    assert not repair.rebuilt  # no entry after its `begin` is lost
    assert recorded(path) == (1,)
    check_that_a_run_goes_on(path, (1,))


def test_an_epoch_without_all_stores_or_with_one_that_is_not_whole_is_not_recorded(
    copies: Iterator[Path],
) -> None:
    for how in ("cut", "missing"):
        path = next(copies)
        shutil.rmtree(path / "_log")
        told = str(path / "a.3.r2" / "w" / "zarr.json")
        if how == "cut":
            Path(told).write_bytes(Path(told).read_bytes()[:-1])
        else:
            shutil.rmtree(path / "b.3.r2")
            told = "those of b are missing"
        repair = repaired(path)
        assert list(repair.rebuilt) == at(1, 2)
        assert told in repair.unproven["a.3.r2"]
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
        repair = plan_repair(directory(path).directory)
        assert repair is not None
        assert list(repair.rebuilt) == at(1, 2), i
        assert str(manifest) in repair.unproven["a.3.r2"], i


def test_a_pin_that_is_left_is_kept(copies: Iterator[Path]) -> None:
    path = next(copies)
    directory(path).pin(2, "paper")
    directory(path).pin(3, "other")
    cut(log_of(path)[-1])
    repair_log(directory(path).directory)
    assert directory(path).pins() == {2: ["paper"]}


def test_a_live_run_is_not_repaired_beneath(tmp_path: Path) -> None:
    run = directory(tmp_path / "k")
    run.run.start(NODES, {})
    save(run, 0)
    cut(log_of(tmp_path / "k")[0])  # not even its own entry is left
    beats = (tmp_path / "k" / "_runs").glob("*/heartbeat")
    heartbeat = next(beats)
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds
        heartbeat.write_bytes(f"{now[0]}".encode())

    with pytest.raises(CommitConflictError, match="alive"):
        repair_log(directory(tmp_path / "k").directory, Patience(clock=lambda: now[0], wait=wait))
    save(run, 1)
    run.run.end()
    kinds = [entry_in(file)["kind"] for file in log_of(tmp_path / "k")[1:]]
    assert kinds == ["begin", "commit", "commit", "end"]


def test_a_run_that_was_repaired_beneath_is_over(tmp_path: Path) -> None:
    """As if it had been silent for long: what it does next is refused."""
    run = directory(tmp_path / "k")
    run.run.start(NODES, {})
    save(run, 0)
    cut(log_of(tmp_path / "k")[1])
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds + 1

    repair_log(directory(tmp_path / "k").directory, Patience(clock=lambda: now[0], wait=wait))
    with pytest.raises(CommitConflictError, match="taken"):
        save(run, 1)
    run.run.end()
    assert recorded(tmp_path / "k") == (0,)


def remove_last_attempt(file: Path) -> None:
    """Remove the newest entries from the ``begin`` of an attempt on: nothing tells that they were."""
    files = log_of(file.parent.parent)
    kinds = [entry_in(file)["kind"] for file in files]
    for gone in files[len(kinds) - 1 - kinds[::-1].index("begin") :]:
        gone.unlink()


def kinds_of(path: Path) -> list[str]:
    return [entry_in(file)["kind"] for file in log_of(path)]


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
            repair_log(directory(path).directory)
    assert kinds_of(path)[count:] == ["run"]
    with pytest.raises(CheckpointCorruptError, match="repair has not ended"):
        recorded(path)
    assert not list((path / "_runs").iterdir())
    repair_log(directory(path).directory)
    assert recorded(path) == (1, 2, 3)


@pytest.mark.parametrize("num_recorded", [0, 1])
def test_a_repair_claims_names_once_all_is_recorded(
    num_recorded: int, copies: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it dies before, the names still tell the next repair that entries were lost."""
    path = next(copies)
    remove_last_attempt(log_of(path)[-1])
    append = LogWriter.append
    commits = 0

    def die(log: LogWriter, kind: type[Any], **fields: Any) -> Any:
        nonlocal commits
        if kind is CommitEntry:
            if commits == num_recorded:
                raise PowerCutError
            commits += 1
        return append(log, kind, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(LogWriter, "append", die)
        with pytest.raises(PowerCutError):
            repair_log(directory(path).directory)
    repair_log(directory(path).directory)
    assert recorded(path) == (1, 2, 3)


@sampled("every_kth", sample=31, nightly=1)
@pytest.mark.parametrize("how", ["fail", "die"])
@pytest.mark.parametrize("damage", [cut, remove, remove_last_attempt])
def test_a_repair_can_fail_at_any_operation_and_be_repeated(
    how: str, damage: Damage, every_kth: int, copies: Iterator[Path]
) -> None:
    for k in itertools.count(1, every_kth):
        path = next(copies)
        damage(log_of(path)[4])
        before = contents(path)
        files = FaultyFiles(k, how, sync=False)  # type: ignore[arg-type]
        with contextlib.suppress(PowerCutError, CheckpointError):
            repair_log(MultiNodeCheckpointManager(path, files=files).directory)
        repair_log(directory(path).directory)
        assert recorded(path) == (1, 2, 3), k
        check_repaired(path, before, str(k))
        shutil.rmtree(path)
        if files.count < k:
            print(f"repair, {damage.__name__}, {how}: {files.count} operations, 0 losses")
            return


def test_damage_before_a_kept_state_costs_at_most_the_record_of_its_epoch(tmp_path: Path) -> None:
    path = tmp_path / "k"
    run = directory(path)
    run.run.start(["a"], {})
    workspace = Workspace("a")
    for epoch in range(STATE_INTERVAL + 5):
        workspace.globals["w"] = np.full(3, epoch)
        save_epoch(run, Position.of(epoch), {"a": workspace})
    run.run.end()
    assert (path / "_log" / "state.json").exists()
    epochs = run.positions()
    (path / "_log" / "0000000006.json").unlink()  # the commit of epoch 4
    again = directory(path)
    assert again.positions() == epochs
    with pytest.raises(CheckpointCorruptError, match="fsck"):
        again.record(4)
    again.verify(5)
    repair = repair_log(again.directory)
    assert repair is not None
    assert list(repair.rebuilt) == at(4)
    assert directory(path).positions() == epochs
    assert_identical(np.full(3, 4), directory(path).open(4)["a"].load("w"))
    assert directory(path).directory.verify_log() == [6]


def test_a_directory_that_is_whole_is_left_alone(copies: Iterator[Path]) -> None:
    path = next(copies)
    before = contents(path)
    assert repair_log(directory(path).directory) is None
    assert contents(path) == before
    (path / "notes.7").write_text("not a store")
    assert directory(path).directory.unclaimed() == []
