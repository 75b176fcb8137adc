"""The contract of metadata handlers, shown by ours, and caught by ones that break it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from jobrunner import JobRunnerError
from jobrunner.checkpoint import FileMetadataHandler
from jobrunner.checkpoint.log.entries import Entry
from jobrunner.testing import FaultyObjects
from jobrunner.testing.contracts import MetadataHandlerContract


class TestFileMetadataHandler(MetadataHandlerContract):
    @staticmethod
    def make_handler(directory: str) -> FileMetadataHandler:
        return FileMetadataHandler()

    @pytest.mark.nightly  # every day, threads compete for a file
    def test_one_of_several_processes_gets_each_number(self, tmp_path: Path) -> None:
        super().test_one_of_several_processes_gets_each_number(tmp_path)


class TestFileMetadataHandlerOnObjects(TestFileMetadataHandler):
    @staticmethod
    def make_handler(directory: str) -> FileMetadataHandler:
        return FileMetadataHandler(FaultyObjects(directory, f"{directory}/objects"))


class Overwrites(FileMetadataHandler):
    def append(self, entry: Entry) -> bool:
        Path(self.path_of(entry["number"])).unlink(missing_ok=True)
        return super().append(entry)


class LooksFirst(Overwrites):
    def append(self, entry: Entry) -> bool:
        if self.last_number() >= entry["number"]:
            return False
        time.sleep(0.02)  # others may look meanwhile, and find the number free as well
        return super().append(entry)


class Backwards(FileMetadataHandler):
    def entries(self, first: int = 0) -> Iterator[Entry]:
        return iter([*super().entries(first)][::-1])


class MakesTheDirectory(FileMetadataHandler):
    def set_params(self, path: str, node_names: Sequence[str]) -> None:
        super().set_params(path, node_names)
        Path(path).mkdir(exist_ok=True)


class StartsAnew(FileMetadataHandler):
    def set_params(self, path: str, node_names: Sequence[str]) -> None:
        super().set_params(path, node_names)
        shutil.rmtree(path, ignore_errors=True)


BROKEN = {
    "test_a_new_log_is_empty_and_has_touched_nothing": MakesTheDirectory,
    "test_entries_come_back_in_order_and_unchanged": Backwards,
    "test_a_number_is_appended_once": Overwrites,
    "test_one_of_several_processes_gets_each_number": LooksFirst,
    "test_a_manager_finds_what_another_wrote": StartsAnew,
}


def make_broken(name: str, directory: str) -> FileMetadataHandler:
    """A function that other processes find by its name."""
    return BROKEN[name]()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] if "processes" in name else [])
        for name in vars(MetadataHandlerContract)
        if name.startswith("test_")
    ],
)
def test_a_broken_handler_fails_the_contract(name: str, tmp_path: Path) -> None:
    broken = MetadataHandlerContract()
    broken.make_handler = partial(make_broken, name)
    with pytest.raises((AssertionError, JobRunnerError)):
        getattr(broken, name)(tmp_path)


def test_a_damaged_entry_is_kept_when_it_is_replaced(tmp_path: Path) -> None:
    handler = FileMetadataHandler()
    handler.set_params(str(tmp_path), ())
    for number in range(2):
        assert handler.append({"number": number, "id": f"{number}", "kind": "x"})
    handler.keep_state(b"{}")
    file = tmp_path / "_log" / "0000000000.json"
    for content in (b"damaged", b"damaged in a second repair"):
        file.write_bytes(content)
        handler.replace({"number": 0, "id": "new", "kind": "lost"})
    assert [entry["id"] for entry in handler.entries()] == ["new", "1"]
    assert (tmp_path / "_log" / "0000000000.json.damaged").read_bytes() == b"damaged"
    assert handler.state() is None
