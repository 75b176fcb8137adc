"""The contract of metadata handlers: derive a test class, make the handler, run pytest.

Examples
--------
>>> class TestMyHandler(MetadataHandlerContract):
...     @staticmethod
...     def make_handler(directory):
...         return FileMetadataHandler(directory)
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any

from jobrunner.checkpoint import (
    Entry,
    MetadataHandler,
    MultiNodeCheckpointManager,
    RunEntry,
    entry_to_json,
    make_entry,
)

_RIVALS = 4
_ENTRIES_A_RIVAL = 10
_PATIENCE_SECONDS = 60


class MetadataHandlerContract:
    """What every `MetadataHandler` must do.

    Notes
    -----
    `make_handler` must be a static method of an importable class, because other processes call it.
    """

    @staticmethod
    def make_handler(directory: str) -> MetadataHandler:
        """Make a handler; all handlers for one `directory` share their storage.

        The tests then call `set_params` with a path below `directory`.
        """
        raise TypeError("Override make_handler of MetadataHandlerContract.")

    def _open(self, tmp_path: Path) -> MetadataHandler:
        return _open(self.make_handler, tmp_path)

    def _manager(self, tmp_path: Path) -> MultiNodeCheckpointManager:
        return MultiNodeCheckpointManager(_path(tmp_path), self.make_handler(str(tmp_path)))

    def test_a_new_log_is_empty_and_has_touched_nothing(self, tmp_path: Path) -> None:
        """Neither making a handler nor `set_params` creates the checkpoint directory."""
        handler = self._open(tmp_path)
        assert isinstance(handler, MetadataHandler), "the handler lacks methods of the protocol"
        _same(-1, handler.last_number(), "last_number() of an empty log")
        _same([], list(handler.entries()), "entries() of an empty log")
        _same(False, os.path.exists(_path(tmp_path)), "existence of the checkpoint directory")

    def test_entries_come_back_in_order_and_unchanged(self, tmp_path: Path) -> None:
        """From any number on, in every handler."""
        handler = self._open(tmp_path)
        kept = [_entry(number, "é\0") for number in range(5)]
        for entry in kept:
            _same(True, handler.append(entry), f"append of entry {entry['number']}")
        for reader in (handler, self._open(tmp_path)):
            _same(4, reader.last_number(), "last_number() after 5 entries")
            for first in range(6):
                entries = [dict(entry) for entry in reader.entries(first)]
                _same(list(map(dict, kept[first:])), entries, f"entries({first})")

    def test_a_number_is_appended_once(self, tmp_path: Path) -> None:
        """A second append under the same number returns False and changes nothing."""
        handler, rival = self._open(tmp_path), self._open(tmp_path)
        first, second = _entry(0, "a"), _entry(0, "b")
        _same(True, handler.append(first), "append to an empty log")
        _same(False, rival.append(second), "append under a number that is taken")
        _same([dict(first)], list(map(dict, rival.entries())), "entries() after that")

    def test_one_of_several_processes_gets_each_number(self, tmp_path: Path) -> None:
        """The log contains the entry of the process whose `append` returned True."""
        server = multiprocessing.get_context("forkserver")
        won = []
        with server.Manager() as manager, ProcessPoolExecutor(_RIVALS, server) as pool:
            start = manager.Barrier(_RIVALS)
            rivals = []
            for i in range(_RIVALS):
                arguments = self.make_handler, tmp_path, start, f"rival {i}"
                rivals.append(pool.submit(_compete, *arguments))
            for rival in rivals:
                won += rival.result()
        won.sort(key=itemgetter("number"))
        _same(_RIVALS * _ENTRIES_A_RIVAL, len(won), "entries that were acknowledged")
        entries = [dict(entry) for entry in self._open(tmp_path).entries()]
        _same(won, entries, "entries() after the race")

    def test_a_manager_finds_what_another_wrote(self, tmp_path: Path) -> None:
        """Managers work with the handler as with the default one."""
        manager = self._manager(tmp_path)
        manager.run.start(["a"], {"why": "contract"})
        manager.run.end()
        directory = self._manager(tmp_path).directory
        _same({"why": "contract"}, directory.info_of(0), "info_of")
        _same(True, directory.snapshot().is_ended, "the end of the first run")


def _compete(
    make_handler: Callable[[str], MetadataHandler],
    tmp_path: Path,
    start: Any,
    rival: str,
) -> list[dict[str, Any]]:
    """Append entries in competition with others; return those that were appended."""
    handler = _open(make_handler, tmp_path)
    start.wait(_PATIENCE_SECONDS)
    won: list[dict[str, Any]] = []
    while len(won) < _ENTRIES_A_RIVAL:
        entry = _entry(handler.last_number() + 1, rival)
        if handler.append(entry):
            won.append(dict(entry))
    return won


def _path(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoints")


def _open(make_handler: Callable[[str], MetadataHandler], tmp_path: Path) -> MetadataHandler:
    handler = make_handler(str(tmp_path))
    handler.set_params(_path(tmp_path), ("a",))
    return handler


def _entry(number: int, run: str) -> Entry:
    return entry_to_json(make_entry(RunEntry, number, run, nodes=["a"], info={"text": run}))


def _same(expected: object, actual: object, name: str) -> None:
    if expected != actual:
        raise AssertionError(f"{name}: expected {expected!r:.500}, found {actual!r:.500}")
