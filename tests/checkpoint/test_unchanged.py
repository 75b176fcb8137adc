"""Arrays that did not change are linked to the last epoch; yet each store is whole by itself."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jobrunner import CheckpointCorruptError, CheckpointWriteError
from jobrunner.checkpoint import SaveQueue
from jobrunner.checkpoint.opened import store_readers
from jobrunner.checkpoint.store import store_writer
from jobrunner.checkpoint.worker_load import NodeLoad
from jobrunner.workspace import BlobUpdate
from tests.blobs import updated
from tests.saves import NodeRun, Save

BIG = 100_000


@pytest.fixture
def run(node_run: NodeRun) -> NodeRun:
    """It has saved epoch 0."""
    node_run.save(0, {"fixed": np.arange(float(BIG)), "small": np.arange(5)})
    return node_run


def chunk(run: NodeRun, epoch: int, name: str = "fixed", index: str = "c.0") -> Path:
    return Path(run.manager.get_ckpt_db_name("a", epoch), name, index)


def add_one(array: np.ndarray) -> None:
    array[BIG - 1] += 1


def test_an_unchanged_array_is_linked_and_one_with_a_changed_bit_is_written(run: NodeRun) -> None:
    assert run.save(1).linked_bytes == 8 * BIG
    assert chunk(run, 0).samefile(chunk(run, 1))
    run.check(1)
    changed = run.blobs["fixed"].copy()
    changed.view(np.uint64)[BIG - 1] ^= 1
    assert run.save(2, {"fixed": changed}).linked_bytes == 0
    run.check(2)
    run.manager.verify(1)


def test_only_chunks_that_changed_are_written(run: NodeRun) -> None:
    big = np.zeros((9, 1 << 20))  # several chunks
    run.save(1, {"big": big})
    big[8, 5] = 1
    receipt = run.save(2, {"big": big})
    first, *_, last = sorted(path.name for path in chunk(run, 2, "big").parent.glob("c.*"))
    assert chunk(run, 2, "big", first).samefile(chunk(run, 1, "big", first))
    assert not chunk(run, 2, "big", last).samefile(chunk(run, 1, "big", last))
    assert receipt.linked_bytes > 8 * BIG
    run.check(2)


def test_a_truncated_or_missing_file_is_written_anew(run: NodeRun) -> None:
    os.truncate(chunk(run, 0), 100)
    assert run.save(1).linked_bytes == 0
    chunk(run, 1).unlink()
    assert run.save(2).linked_bytes == 0
    run.check(2)


def test_damage_that_epochs_share_ends_when_the_file_is_read_again(
    run: NodeRun, caplog: pytest.LogCaptureFixture
) -> None:
    content = bytearray(chunk(run, 0).read_bytes())
    content[BIG] ^= 1
    chunk(run, 0).write_bytes(content)
    is_linked = [run.save(epoch).linked_bytes > 0 for epoch in range(1, 40)]
    mended = is_linked.index(False) + 1
    assert mended > 1  # at least one epoch shared the damage
    for epoch in (0, mended - 1):
        with pytest.raises(CheckpointCorruptError, match="expected xxh3_128") as caught:
            run.manager.verify(epoch)
    assert caplog.messages == [f"{caught.value.without_advice()} Its data is written again."]
    for epoch in range(mended, 40):
        run.manager.verify(epoch)
    assert is_linked.count(False) == 1


def updates(run: NodeRun) -> None:
    updated(run.workspace, "fixed", add_one)


def saves_what_is_not_recorded(run: NodeRun) -> None:
    updates(run)
    save = Save(run.manager, 1)
    save.write({"a": run.workspace})
    save.abandon()


@pytest.mark.parametrize("happens", [updates, saves_what_is_not_recorded])
def test_an_array_that_may_have_changed_is_read(
    run: NodeRun, happens: Callable[[NodeRun], None]
) -> None:
    happens(run)
    assert run.save(2).linked_bytes == 0
    run.check(2)


def test_nothing_is_linked_to_what_could_not_be_flushed(
    run: NodeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before(operation: str, path: str) -> None:
        if operation == "syncfs":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    save = Save(run.manager, 1)
    with monkeypatch.context() as patch:
        patch.setattr(run.manager.directory.files, "before", before)
        with pytest.raises(CheckpointWriteError):
            save.write({"a": run.workspace})
    assert run.workspace.stored is None


def save_by(queue: SaveQueue, run: NodeRun, epoch: int) -> int:
    """Save as a worker does: what it knows of the last save lasts; returns what it linked."""
    save = Save(run.manager, epoch)
    save.queue = queue
    receipts = save.write({"a": run.workspace})
    save.commit(receipts)
    return receipts["a"].linked_bytes


def test_a_container_that_nothing_can_have_changed_is_not_encoded_again(
    node_run: NodeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_run.blobs.update(
        table=[(i, i / 2) for i in range(999)],
        tree={"a": [[1, 2]] * 2, "keys": {(1, 2): "x"}},
        many=[float(i) for i in range(9_999)],
    )
    queue = SaveQueue(node_run.manager.run.encoding())
    save_by(queue, node_run, 0)
    with monkeypatch.context() as patch:
        patch.setattr("jobrunner.checkpoint.encoding.encoded_blobs.Encoder", None)
        save_by(queue, node_run, 1)
    node_run.check(0)
    node_run.check(1)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_container_that_may_have_changed_is_encoded_again(
    run: NodeRun, is_replaced: bool
) -> None:
    run.blobs.update(tree=[[1, 2]], box={"fixed": run.blobs.pop("fixed")})
    queue = SaveQueue(run.manager.run.encoding())
    save_by(queue, run, 1)
    if is_replaced:
        run.workspace.apply(BlobUpdate({"tree": [[2, 2]]}))
    else:
        updated(run.workspace, "tree", lambda tree: tree[0].__setitem__(0, 2))
    updated(run.workspace, "box", lambda box: add_one(box["fixed"]))
    assert save_by(queue, run, 2) == 0
    run.check(2)


def resume(run: NodeRun, **names: str) -> NodeRun:
    """A new run whose node has loaded all blobs of epoch 0, some as others."""
    run.end()
    again = NodeRun(run.path)
    readers = store_readers(again.manager.directory, again.manager.record(0))
    names = {name: name for name in readers["a"].read_document().blobs} | names
    load = NodeLoad([(readers["a"], names)])
    again.workspace.apply(load.update(load.read(), replaces=True))
    return again


def test_the_first_save_after_a_resume_links_what_nothing_changed_and_does_not_read_it(
    node_run: NodeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    fortran = np.asfortranarray(np.arange(float(BIG)).reshape(-1, 10))
    dates = np.arange(BIG).astype(">M8[s]")
    node_run.save(0, {"fixed": np.arange(float(BIG)), "fortran": fortran, "dates": dates})
    run = resume(node_run)
    monkeypatch.setattr(store_writer, "encode_chunk", None)
    assert run.save(2).linked_bytes == 3 * 8 * BIG  # in an epoch that reads none of them
    run.check(2)
    run.end()


@pytest.mark.parametrize("is_renamed", [False, True])
def test_what_a_load_does_not_take_as_it_is_stored_or_a_task_updates_is_read(
    node_run: NodeRun, is_renamed: bool
) -> None:
    node_run.save(0, {"fixed": np.arange(float(BIG)), "other": np.ones(BIG)})
    names = {"fixed": "other", "other": "fixed"} if is_renamed else {}
    run = resume(node_run, **names)
    if not is_renamed:
        updates(run)
    run.save(2)
    run.check(2)
    run.end()
