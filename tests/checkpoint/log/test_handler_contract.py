"""The contract of metadata handlers, shown by ours and another, and caught by ones that break it."""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from jobrunner import JobRunnerError
from jobrunner.checkpoint import FileMetadataHandler
from jobrunner.checkpoint.log.entries import Entry
from jobrunner.testing import FaultyObjects
from jobrunner.testing.contracts import MetadataHandlerContract


class SqliteMetadataHandler:
    """The log as a table; its primary key is what lets nobody share a number."""

    def __init__(self, database: Path) -> None:
        self._database = database

    def _connect(self) -> closing[sqlite3.Connection]:
        connection = sqlite3.connect(self._database, timeout=60)
        connection.execute("CREATE TABLE IF NOT EXISTS log (number INTEGER PRIMARY KEY, entry)")
        return closing(connection)

    def set_params(self, path: str, node_names: Sequence[str]) -> None:
        pass

    def append(self, entry: Entry) -> bool:
        row = (entry["number"], json.dumps(entry))
        with self._connect() as connection, connection:
            done = connection.execute("INSERT OR IGNORE INTO log VALUES (?, ?)", row)
            return done.rowcount == 1

    def last_number(self) -> int:
        with self._connect() as connection:
            (number,) = connection.execute("SELECT max(number) FROM log").fetchone()
        return -1 if number is None else number

    def entries(self, first: int = 0) -> Iterator[Entry]:
        query = "SELECT entry FROM log WHERE number >= ? ORDER BY number"
        with self._connect() as connection:
            for (text,) in connection.execute(query, (first,)):
                yield json.loads(text)


class Contract(MetadataHandlerContract):
    @pytest.mark.nightly  # every day, threads compete for a file
    def test_one_of_several_processes_gets_each_number(self, tmp_path: Path) -> None:
        super().test_one_of_several_processes_gets_each_number(tmp_path)


class TestFileMetadataHandler(Contract):
    @staticmethod
    def make_handler(directory: str) -> FileMetadataHandler:
        return FileMetadataHandler()


class TestSqliteMetadataHandler(Contract):
    @staticmethod
    def make_handler(directory: str) -> SqliteMetadataHandler:
        return SqliteMetadataHandler(Path(directory) / "log.sqlite")


class TestFileMetadataHandlerOnObjects(Contract):
    @staticmethod
    def make_handler(directory: str) -> FileMetadataHandler:
        return FileMetadataHandler(FaultyObjects(directory, f"{directory}/objects"))


class Overwrites(SqliteMetadataHandler):
    def append(self, entry: Entry) -> bool:
        with self._connect() as connection, connection:
            row = (entry["number"], json.dumps(entry))
            connection.execute("INSERT OR REPLACE INTO log VALUES (?, ?)", row)
        return True


class LooksFirst(Overwrites):
    def append(self, entry: Entry) -> bool:
        if self.last_number() >= entry["number"]:
            return False
        time.sleep(0.02)  # others may look meanwhile, and find the number free as well
        return super().append(entry)


class Backwards(SqliteMetadataHandler):
    def entries(self, first: int = 0) -> Iterator[Entry]:
        return iter([*super().entries(first)][::-1])


class MakesTheDirectory(SqliteMetadataHandler):
    def set_params(self, path: str, node_names: Sequence[str]) -> None:
        Path(path).mkdir(exist_ok=True)


class StartsAnew(SqliteMetadataHandler):
    """What it keeps, it keeps to itself."""

    def __init__(self, database: Path) -> None:
        super().__init__(database.with_name(f"{uuid.uuid4().hex}.sqlite"))


BROKEN = {
    "test_a_new_log_is_empty_and_has_touched_nothing": MakesTheDirectory,
    "test_entries_come_back_in_order_and_unchanged": Backwards,
    "test_a_number_is_appended_once": Overwrites,
    "test_one_of_several_processes_gets_each_number": LooksFirst,
    "test_a_manager_finds_what_another_wrote": StartsAnew,
}


def make_broken(name: str, directory: str) -> SqliteMetadataHandler:
    """A function that other processes find by its name."""
    return BROKEN[name](Path(directory) / "log.sqlite")


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
