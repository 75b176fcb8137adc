"""Arrays that did not change are linked to the last epoch; yet each store is whole by itself."""

from __future__ import annotations

import collections
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobrunner import (
    CheckpointCorruptError,
    CheckpointWriteError,
    KeepLast,
    MultiNodeCheckpointManager,
)
from jobrunner.checkpoint import Receipt, SaveQueue
from jobrunner.checkpoint.opened import store_readers
from jobrunner.checkpoint.store import store_writer
from jobrunner.checkpoint.worker_load import NodeLoad
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles
from jobrunner.testing.identity import assert_identical
from jobrunner.workspace import BlobUpdate, Workspace
from tests.blobs import Blobs, updated
from tests.saves import Save

BIG = 100_000


class Rig:
    def __init__(self, path: Path, **options: Any) -> None:
        options.setdefault("files", FaultyFiles(sync=False))
        self.manager = MultiNodeCheckpointManager(path, **options)
        self.workspace = Workspace("a")
        self.queue: SaveQueue | None = None
        self.blobs = Blobs(self.workspace)
        self.blobs.update(fixed=np.arange(float(BIG)), small=np.arange(5), n=1)
        self.manager.run.start(["a"], {})

    def save(self, epoch: int) -> Receipt:
        save = Save(self.manager, Position.of(epoch))
        save.queue = self.queue = self.queue or save.queue
        receipts = save.write({"a": self.workspace})
        save.commit(receipts)
        self.manager.retention.sweeper.drain()
        return receipts["a"]

    def chunk(self, epoch: int, name: str = "fixed", index: str = "c.0") -> Path:
        return Path(self.manager.get_ckpt_db_name("a", epoch), name, index)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "k")
    yield rig
    rig.manager.run.end()


def test_an_unchanged_array_is_linked_and_a_changed_one_written(rig: Rig) -> None:
    rig.blobs["moving"] = np.zeros(BIG)
    assert rig.save(0).linked_bytes == 0
    rig.blobs["moving"] = np.ones(BIG)
    receipt = rig.save(1)
    assert receipt.linked_bytes == 8 * BIG
    assert rig.chunk(0).samefile(rig.chunk(1))
    assert not rig.chunk(0, "moving").samefile(rig.chunk(1, "moving"))
    assert rig.manager.open(0)["a"].load("moving").max() == 0
    assert rig.manager.open(1)["a"].load("moving").min() == 1
    rig.manager.verify(0)
    rig.manager.verify(1)


@pytest.mark.parametrize("place", [0, BIG - 1])
def test_an_array_with_one_changed_bit_is_not_linked(rig: Rig, place: int) -> None:
    rig.save(0)
    changed = rig.blobs["fixed"].copy()
    changed.view(np.uint64)[place] ^= 1
    rig.blobs["fixed"] = changed
    assert rig.save(1).linked_bytes == 0
    assert rig.manager.open(1)["a"].load("fixed").tobytes() == changed.tobytes()


def test_the_same_bytes_of_another_shape_or_dtype_are_linked_and_load_as_what_they_are(
    rig: Rig,
) -> None:
    rig.save(0)
    rig.blobs["fixed"] = rig.blobs["fixed"].view("<i8")
    assert rig.save(1).linked_bytes == 8 * BIG
    assert rig.manager.open(1)["a"].load("fixed").dtype == np.dtype("<i8")
    assert rig.manager.open(0)["a"].load("fixed").dtype == np.dtype("<f8")


def test_retiring_an_epoch_leaves_those_that_share_its_files_whole(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "k", keep=KeepLast(1))
    for epoch in range(4):
        rig.save(epoch)
    assert rig.manager.epochs() == [3]
    rig.manager.verify(3)
    assert os.stat(rig.chunk(3)).st_nlink == 1
    rig.manager.run.end()


def test_only_chunks_that_changed_are_written(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "k")
    big = np.zeros((9, 1 << 20))  # several chunks
    rig.blobs["big"] = big
    rig.save(0)
    big[8, 5] = 1
    rig.blobs["big"] = big
    receipt = rig.save(1)
    first, *_, second = sorted(path.name for path in rig.chunk(1, "big").parent.glob("c.*"))
    assert rig.chunk(1, "big", first).samefile(rig.chunk(0, "big", first))
    assert not rig.chunk(1, "big", second).samefile(rig.chunk(0, "big", second))
    assert receipt.linked_bytes > 8 * BIG
    assert rig.manager.open(1)["a"].load("big")[8, 5] == 1
    rig.manager.run.end()


def test_a_truncated_or_missing_file_is_written_anew(rig: Rig) -> None:
    rig.save(0)
    with rig.chunk(0).open("r+b") as file:
        file.truncate(100)
    assert rig.save(1).linked_bytes == 0
    rig.manager.verify(1)
    rig.chunk(1).unlink()
    assert rig.save(2).linked_bytes == 0
    rig.manager.verify(2)
    with pytest.raises(CheckpointCorruptError):
        rig.manager.verify(1)


def test_damage_that_epochs_share_ends_when_the_file_is_read_again(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.save(0)
    content = bytearray(rig.chunk(0).read_bytes())
    content[BIG] ^= 1
    rig.chunk(0).write_bytes(content)
    is_linked = [rig.save(epoch).linked_bytes > 0 for epoch in range(1, 40)]
    mended = is_linked.index(False) + 1
    assert mended > 1  # at least one epoch shared the damage
    for epoch in (0, mended - 1):
        with pytest.raises(CheckpointCorruptError, match="expected xxh3_128") as caught:
            rig.manager.verify(epoch)
    assert caught.value.advice.startswith("Resume with 'latest'")
    assert caplog.messages == [f"{caught.value.without_advice()} Its data is written again."]
    for epoch in range(mended, 40):
        rig.manager.verify(epoch)
    assert is_linked.count(False) == 1


def change_unseen(rig: Rig, place: int) -> None:
    """Change an array as nothing but code outside Python can."""
    array = rig.blobs["fixed"]
    array.flags.writeable = True
    array[place] += 1
    array.flags.writeable = False


def test_an_array_that_nothing_can_have_changed_is_read_only_now_and_then(rig: Rig) -> None:
    rig.save(0)
    change_unseen(rig, BIG - 1)
    epochs = range(1, 60)
    is_linked = [rig.save(epoch).linked_bytes > 0 for epoch in epochs]
    assert is_linked[0]  # else it was read
    found = is_linked.index(False) + 1
    assert is_linked.count(False) == 1
    assert rig.manager.open(found)["a"].load("fixed")[-1] == BIG


def updates(rig: Rig) -> None:
    def change(array: np.ndarray) -> None:
        array[BIG - 1] += 1

    updated(rig.workspace, "fixed", change)


def updates_the_container(rig: Rig) -> None:
    def change(box: dict[str, np.ndarray]) -> None:
        box["fixed"][BIG - 1] += 1

    updated(rig.workspace, "box", change)


def fails_to_save(rig: Rig) -> None:
    def before(operation: str, path: str) -> None:
        if operation == "syncfs":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    updates(rig)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.manager.directory.files, "before", before)
        with pytest.raises(CheckpointWriteError):
            rig.save(1)


def saves_what_is_not_recorded(rig: Rig) -> None:
    updates(rig)
    save = Save(rig.manager, Position(1))
    save.write({"a": rig.workspace})
    save.abandon()


@pytest.mark.parametrize(
    "happens", [updates, updates_the_container, fails_to_save, saves_what_is_not_recorded]
)
def test_an_array_that_may_have_changed_is_read(rig: Rig, happens: Callable[[Rig], None]) -> None:
    if happens is updates_the_container:
        rig.blobs["box"] = {"fixed": rig.blobs.pop("fixed")}
    rig.save(0)
    happens(rig)
    assert rig.save(2).linked_bytes == 0
    value = rig.manager.open(2)["a"].load("box" if "box" in rig.blobs else "fixed")
    assert (value["fixed"] if "box" in rig.blobs else value)[-1] == BIG


def test_a_container_that_nothing_can_have_changed_is_not_encoded_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.blobs.clear()
    rig.blobs.update(
        table=[(i, i / 2) for i in range(999)],
        tree={"a": [[1, 2]] * 2, "keys": {(1, 2): "x"}},
        many=[float(i) for i in range(9_999)],
    )
    rig.save(0)
    with monkeypatch.context() as patch:
        patch.setattr("jobrunner.checkpoint.encoding.encoded_blobs.Encoder", None)
        rig.save(1)
    for epoch in (0, 1):
        found = rig.manager.open(epoch)["a"]
        for name, value in rig.blobs.items():
            assert_identical(found.load(name), value, name)
    rig.manager.verify(1)


def updates_it(rig: Rig) -> None:
    updated(rig.workspace, "tree", lambda tree: tree[0].__setitem__(0, 2))


def replaces_it(rig: Rig) -> None:
    rig.workspace.apply(BlobUpdate({"tree": [[2, 2]]}))


@pytest.mark.parametrize("happens", [updates_it, replaces_it])
def test_a_container_that_may_have_changed_is_encoded_again(
    rig: Rig, happens: Callable[[Rig], None]
) -> None:
    rig.blobs["tree"] = [[1, 2]]
    rig.save(0)
    happens(rig)
    rig.save(2)
    assert rig.manager.open(2)["a"].load("tree") == [[2, 2]]


class Counter(collections.UserDict[str, int]):
    """An object, which a task may change without naming it."""


class RefusedLinks(FaultyFiles):
    """A file system that refuses to link chunks."""

    def __init__(self, number: int) -> None:
        super().__init__(number=number, sync=False)

    def before(self, operation: str, path: str) -> None:
        if operation == "link" and os.path.basename(path).startswith("c."):
            raise OSError(self.number, os.strerror(self.number), path)


def apply(rig: Rig, load: NodeLoad) -> None:
    verified = load.read()
    rig.workspace.apply(load.update(verified, replaces=True))


def resume(path: Path, **options: Any) -> Rig:
    """A new run whose node has loaded epoch 0, as a resume does."""
    rig = Rig(path)
    directory = rig.manager.directory
    readers = store_readers(rig.manager.directory, directory.record(Position(0)))
    names = {name: name for name in readers["a"].read_document().blobs}
    for name in options.get("values", ()):
        del names[name]
    apply(rig, NodeLoad([(readers["a"], names)], **options))
    return rig


def save_first(path: Path, **blobs: Any) -> None:
    rig = Rig(path)
    rig.blobs.update(blobs)
    rig.save(0)
    rig.manager.run.end()


def test_the_first_save_after_a_resume_links_what_nothing_changed_and_does_not_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fortran = np.asfortranarray(np.arange(float(BIG)).reshape(-1, 10))
    save_first(tmp_path / "k", fortran=fortran, dates=np.arange(BIG).astype(">M8[s]"))
    rig = resume(tmp_path / "k")
    del rig.blobs["small"]  # it is written, because it is short
    monkeypatch.setattr(store_writer, "encode_chunk", None)
    assert rig.save(2).linked_bytes == 3 * 8 * BIG  # in an epoch that reads none of them
    rig.manager.verify(2)
    assert_identical(rig.manager.open(2)["a"].load("fortran"), fortran)
    rig.manager.run.end()


def updates_after_the_load(path: Path) -> Rig:
    rig = resume(path)
    updates(rig)
    return rig


def loads_names_anew(path: Path) -> Rig:
    rig = Rig(path)
    readers = store_readers(rig.manager.directory, rig.manager.directory.record(Position(0)))
    names = {"fixed": "other", "other": "fixed"}
    apply(rig, NodeLoad([(readers["a"], names)]))
    return rig


@pytest.mark.parametrize("loaded", [updates_after_the_load, loads_names_anew])
def test_what_a_load_does_not_take_as_it_is_stored_is_read(
    tmp_path: Path, loaded: Callable[[Path], Rig]
) -> None:
    save_first(tmp_path / "k", other=np.ones(BIG))
    rig = loaded(tmp_path / "k")
    value = rig.blobs["fixed"].copy()
    rig.save(2)
    assert_identical(rig.manager.open(2)["a"].load("fixed"), value)
    rig.manager.run.end()
