"""The contract of metadata handlers, shown by ours and by one that is quite different."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from jobrunner import FileMetadataHandler
from jobrunner.checkpoint import read_state
from jobrunner.checkpoint.records import Entry
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

    def write(self, epoch: int, record: Entry) -> bool:
        return self.append(record)

    def last_number(self) -> int:
        with self._connect() as connection:
            (number,) = connection.execute("SELECT max(number) FROM log").fetchone()
        return -1 if number is None else number

    def entries(self, first: int = 0) -> Iterator[Entry]:
        query = "SELECT entry FROM log WHERE number >= ? ORDER BY number"
        with self._connect() as connection:
            for (text,) in connection.execute(query, (first,)):
                yield json.loads(text)

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        recorded = read_state(self).recorded
        if user_epoch is not None:
            return user_epoch if user_epoch in recorded else None
        return max(recorded, default=None)

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        pass

    def accessible(self, epoch: int | None = None) -> bool:
        state = read_state(self)
        return state.number >= 0 and (epoch is None or epoch in state.recorded)


class TestFileMetadataHandler(MetadataHandlerContract):
    @staticmethod
    def make_handler(directory: str) -> FileMetadataHandler:
        return FileMetadataHandler()


class TestSqliteMetadataHandler(MetadataHandlerContract):
    @staticmethod
    def make_handler(directory: str) -> SqliteMetadataHandler:
        return SqliteMetadataHandler(Path(directory) / "log.sqlite")


class TestFileMetadataHandlerOnObjects(MetadataHandlerContract):
    @staticmethod
    def make_handler(directory: str) -> FileMetadataHandler:
        return FileMetadataHandler(FaultyObjects(directory, f"{directory}/objects"))
