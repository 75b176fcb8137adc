"""Arrays that did not change are linked to the last epoch; yet each store is whole by itself."""

from __future__ import annotations

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
)
from jobrunner.checkpoint import Receipt, SaveQueue
from jobrunner.checkpoint.opened import store_readers
from jobrunner.checkpoint.store import store_writer
from jobrunner.checkpoint.worker_load import NodeLoad
from jobrunner.positions import Position
from jobrunner.testing.identity import assert_identical
from jobrunner.workspace import BlobUpdate
from tests.blobs import updated
from tests.saves import NodeRun, Save

BIG = 100_000


class Run(NodeRun):
    """Saves as a worker does: what it knows of the last save lasts."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self.queue = SaveQueue(self.manager.run.encoding())
        self.blobs.update(fixed=np.arange(float(BIG)), small=np.arange(5), n=1)

    def save(self, epoch: int) -> Receipt:
        save = Save(self.manager, epoch)
        save.queue = self.queue
        receipts = save.write({"a": self.workspace})
        save.commit(receipts)
        self.manager.retention.sweeper.drain()
        return receipts["a"]

    def load(self, epoch: int, blob: str = "fixed") -> Any:
        return self.manager.open(epoch)["a"].load(blob)

    def chunk(self, epoch: int, name: str = "fixed", index: str = "c.0") -> Path:
        return Path(self.manager.get_ckpt_db_name("a", epoch), name, index)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "k")
    yield run
    run.end()


def test_an_unchanged_array_is_linked_and_a_changed_one_written(run: Run) -> None:
    run.blobs["moving"] = np.zeros(BIG)
    assert run.save(0).linked_bytes == 0
    run.blobs["moving"] = np.ones(BIG)
    receipt = run.save(1)
    assert receipt.linked_bytes == 8 * BIG
    assert run.chunk(0).samefile(run.chunk(1))
    assert not run.chunk(0, "moving").samefile(run.chunk(1, "moving"))
    assert run.load(0, "moving").max() == 0
    assert run.load(1, "moving").min() == 1
    run.manager.verify(0)
    run.manager.verify(1)


@pytest.mark.parametrize("place", [0, BIG - 1])
def test_an_array_with_one_changed_bit_is_not_linked(run: Run, place: int) -> None:
    run.save(0)
    changed = run.blobs["fixed"].copy()
    changed.view(np.uint64)[place] ^= 1
    run.blobs["fixed"] = changed
    assert run.save(1).linked_bytes == 0
    assert run.load(1).tobytes() == changed.tobytes()


def test_only_chunks_that_changed_are_written(run: Run) -> None:
    big = np.zeros((9, 1 << 20))  # several chunks
    run.blobs["big"] = big
    run.save(0)
    big[8, 5] = 1
    run.blobs["big"] = big
    receipt = run.save(1)
    first, *_, second = sorted(path.name for path in run.chunk(1, "big").parent.glob("c.*"))
    assert run.chunk(1, "big", first).samefile(run.chunk(0, "big", first))
    assert not run.chunk(1, "big", second).samefile(run.chunk(0, "big", second))
    assert receipt.linked_bytes > 8 * BIG
    assert run.load(1, "big")[8, 5] == 1


def test_a_truncated_or_missing_file_is_written_anew(run: Run) -> None:
    run.save(0)
    os.truncate(run.chunk(0), 100)
    assert run.save(1).linked_bytes == 0
    run.chunk(1).unlink()
    assert run.save(2).linked_bytes == 0
    run.manager.verify(2)


def test_damage_that_epochs_share_ends_when_the_file_is_read_again(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.save(0)
    content = bytearray(run.chunk(0).read_bytes())
    content[BIG] ^= 1
    run.chunk(0).write_bytes(content)
    is_linked = [run.save(epoch).linked_bytes > 0 for epoch in range(1, 40)]
    mended = is_linked.index(False) + 1
    assert mended > 1  # at least one epoch shared the damage
    for epoch in (0, mended - 1):
        with pytest.raises(CheckpointCorruptError, match="expected xxh3_128") as caught:
            run.manager.verify(epoch)
    assert caught.value.advice.startswith("Use another epoch (a resume with 'latest'")
    assert caplog.messages == [f"{caught.value.without_advice()} Its data is written again."]
    for epoch in range(mended, 40):
        run.manager.verify(epoch)
    assert is_linked.count(False) == 1


def add_one(array: np.ndarray) -> None:
    array[BIG - 1] += 1


def updates(run: Run) -> None:
    updated(run.workspace, "fixed", add_one)


def fails_to_save(run: Run) -> None:
    def before(operation: str, path: str) -> None:
        if operation == "syncfs":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    updates(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.manager.directory.files, "before", before)
        with pytest.raises(CheckpointWriteError):
            run.save(1)


def saves_what_is_not_recorded(run: Run) -> None:
    updates(run)
    save = Save(run.manager, Position(1))
    save.write({"a": run.workspace})
    save.abandon()


@pytest.mark.parametrize("happens", [updates, fails_to_save, saves_what_is_not_recorded])
def test_an_array_that_may_have_changed_is_read(run: Run, happens: Callable[[Run], None]) -> None:
    run.save(0)
    happens(run)
    assert run.save(2).linked_bytes == 0
    assert run.load(2)[-1] == BIG


def test_a_container_that_nothing_can_have_changed_is_not_encoded_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.blobs.clear()
    run.blobs.update(
        table=[(i, i / 2) for i in range(999)],
        tree={"a": [[1, 2]] * 2, "keys": {(1, 2): "x"}},
        many=[float(i) for i in range(9_999)],
    )
    run.save(0)
    with monkeypatch.context() as patch:
        patch.setattr("jobrunner.checkpoint.encoding.encoded_blobs.Encoder", None)
        run.save(1)
    for epoch in (0, 1):
        found = run.manager.open(epoch)["a"]
        for name, value in run.blobs.items():
            assert_identical(found.load(name), value, name)
    run.manager.verify(1)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_container_that_may_have_changed_is_encoded_again(run: Run, is_replaced: bool) -> None:
    run.blobs.update(tree=[[1, 2]], box={"fixed": run.blobs.pop("fixed")})
    run.save(0)
    if is_replaced:
        run.workspace.apply(BlobUpdate({"tree": [[2, 2]]}))
    else:
        updated(run.workspace, "tree", lambda tree: tree[0].__setitem__(0, 2))
    updated(run.workspace, "box", lambda box: add_one(box["fixed"]))
    assert run.save(2).linked_bytes == 0
    assert run.load(2, "tree") == [[2, 2]]
    assert run.load(2, "box")["fixed"][-1] == BIG


def load_first(path: Path, **names: str) -> Run:
    """A new run whose node has loaded all blobs of epoch 0, as a resume does, some as others."""
    run = Run(path)
    readers = store_readers(run.manager.directory, run.manager.record(0))
    names = {name: name for name in readers["a"].read_document().blobs} | names
    load = NodeLoad([(readers["a"], names)])
    run.workspace.apply(load.update(load.read(), replaces=True))
    return run


def save_first(path: Path, **blobs: Any) -> None:
    run = Run(path)
    run.blobs.update(blobs)
    run.save(0)
    run.end()


def test_the_first_save_after_a_resume_links_what_nothing_changed_and_does_not_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fortran = np.asfortranarray(np.arange(float(BIG)).reshape(-1, 10))
    save_first(tmp_path / "k", fortran=fortran, dates=np.arange(BIG).astype(">M8[s]"))
    run = load_first(tmp_path / "k")
    del run.blobs["small"]  # it is written, because it is short
    monkeypatch.setattr(store_writer, "encode_chunk", None)
    assert run.save(2).linked_bytes == 3 * 8 * BIG  # in an epoch that reads none of them
    run.manager.verify(2)
    assert_identical(run.load(2, "fortran"), fortran)
    run.end()


@pytest.mark.parametrize("is_renamed", [False, True])
def test_what_a_load_does_not_take_as_it_is_stored_or_a_task_updates_is_read(
    tmp_path: Path, is_renamed: bool
) -> None:
    save_first(tmp_path / "k", other=np.ones(BIG))
    names = {"fixed": "other", "other": "fixed"} if is_renamed else {}
    run = load_first(tmp_path / "k", **names)
    if not is_renamed:
        updates(run)
    value = run.blobs["fixed"].copy()
    run.save(2)
    assert_identical(run.load(2), value)
    run.end()
