"""Copies of stores, and what a power loss leaves of them."""

import pytest
import zarr

from jobrunner import CheckpointCorruptError, CopyTo, MultiNodeCheckpointManager
from jobrunner.checkpoint.storage.posix import PosixFiles
from tests.cli.directories import begin, save


class Traced(PosixFiles):
    """Notes what is done, in order."""

    has_syncfs = True

    def __init__(self):
        super().__init__()
        self.trace = []

    def before(self, operation, path):
        self.trace.append((operation, path))

    def sync_path(self, path):
        self.before("fsync", path)

    def _sync_file_system(self, descriptor):
        return 0


def test_a_copy_opens_only_when_all_of_it_is_durable(tmp_path):
    run = begin(tmp_path / "k")
    save(run, 1)
    run.run.end()
    files = Traced()
    manager = MultiNodeCheckpointManager(tmp_path / "k", files=files)
    task, _ = CopyTo(tmp_path / "copy").build(1, manager).tasks()
    for _ in "ab":  # the second replaces the first
        files.trace.clear()
        task.fn()
        store = str(tmp_path / "copy" / "a.1")
        (shown,) = [at for at, (what, _) in enumerate(files.trace) if what == "rename"]
        *chunks, root = [at for at, (what, _) in enumerate(files.trace) if what == "write"]
        (synced,) = [at for at, (what, _) in enumerate(files.trace) if what == "syncfs"]
        assert max(chunks) < synced < root < shown
        assert "fsync" in [what for what, _ in files.trace[root:shown]]
        assert ("fsync", store) in files.trace[shown:]
    hidden = files.trace.index(("unlink", f"{store}/zarr.json"))
    assert files.trace[hidden + 1] == ("fsync", store)  # before anything else is removed
    assert zarr.open_group(store, mode="r")["w"][5] == 5


def test_a_damaged_store_is_an_error_and_no_reader_opens_its_copy(tmp_path):
    run = begin(tmp_path / "k")
    save(run, 1)
    run.run.end()
    manager = MultiNodeCheckpointManager(tmp_path / "k")
    task, _ = CopyTo(tmp_path / "copy").build(1, manager).tasks()
    task.fn()
    chunk = tmp_path / "k" / "a.1" / "w" / "c.0"
    data = bytearray(chunk.read_bytes())
    data[-1] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match="c.0"):
        task.fn()
    assert not (tmp_path / "copy" / "a.1" / "zarr.json").exists()
