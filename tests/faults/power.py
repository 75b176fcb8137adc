"""What a file system may look like after a power loss, told from a trace of real operations.

POSIX promises little: until a file is synced its content may be there, in part or not at all, and
until its directory is synced so may its name. `Disk` replays a trace and knows, for each moment, all
states that are left to choose from.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jobrunner.checkpoint.storage.posix import PosixFiles

Tree = dict[str, "bytes | Tree"]
Choose = Callable[[int], int]
"""Picks one of so many ways, in which 0 loses most and the last one loses nothing."""


class Operation(NamedTuple):
    """``what`` happened to ``path``; ``detail`` is the content, or the other name."""

    what: str
    path: str
    detail: bytes | str = b""


class TracingFiles(PosixFiles):
    """Does everything but sync, and keeps a trace of what it did."""

    def __init__(self, *, has_syncfs: bool = True) -> None:
        super().__init__()
        self.trace: list[Operation] = []
        self._has_syncfs = has_syncfs

    @property
    def has_syncfs(self) -> bool:
        return self._has_syncfs

    def _sync_file_system(self, descriptor: int) -> int:
        return 0

    def sync_path(self, path: str) -> None:
        self.before("fsync", path)

    def before(self, operation: str, path: str) -> None:
        if operation in ("mkdir", "create", "fsync", "syncfs", "unlink", "rmdir"):
            self.trace.append(Operation(operation, path))

    def write(self, path: str, buffers: Sequence[bytes | memoryview]) -> str:
        digest = super().write(path, buffers)
        self.trace.append(Operation("write", path, Path(path).read_bytes()))
        return digest

    def write_at(
        self, path: str, start: int, buffers: Sequence[bytes | memoryview], nbytes: int
    ) -> None:
        self.trace.append(Operation("create", path))
        super().write_at(path, start, buffers, nbytes)
        self.trace.append(Operation("write", path, Path(path).read_bytes()))

    def _link(self, source: str, target: str) -> os.stat_result:
        self.trace.append(Operation("link", target, source))
        return super()._link(source, target)

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self.trace.append(Operation("rename", source, target))


@dataclass(slots=True)
class _File:
    content: bytes = b""
    flushed: bytes = b""

    def sync(self) -> None:
        self.flushed = self.content

    def _ways(self) -> list[bytes]:
        if self.content == self.flushed:
            return [self.content]
        middle = len(self.content) // 2
        half = self.content[:middle]
        if len(self.flushed) == len(self.content):
            half += self.flushed[middle:]  # it was written in place
        return list(dict.fromkeys((self.flushed, half, self.content)))

    def build(self, choose: Choose) -> bytes:
        ways = self._ways()
        return ways[choose(len(ways))] if len(ways) > 1 else ways[0]


Change = dict[str, "_File | _Directory | None"]


@dataclass(slots=True)
class _Directory:
    names: Change = field(default_factory=dict)
    flushed: Change = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def change(self, change: Change) -> None:
        self.names.update(change)
        self.pending.append(change)

    def sync(self) -> None:
        self.flushed = dict(self.names)
        self.pending = []

    def sync_all(self) -> None:
        self.sync()
        for child in self.names.values():
            if isinstance(child, _Directory):
                child.sync_all()
            elif child is not None:
                child.sync()

    def build(self, choose: Choose) -> Tree:
        names = dict(self.flushed)
        for group in self._groups():
            # Of changes to one name, the later ones are not there without the earlier.
            for change in group[: choose(len(group) + 1)]:
                names.update(change)
        return {
            name: node.build(choose) for name, node in sorted(names.items()) if node is not None
        }

    def _groups(self) -> list[list[Change]]:
        """Changes that share names, in order; a rename is one change of two names."""
        groups: list[list[Change]] = []
        for change in self.pending:
            touched = [group for group in groups if any(change.keys() & one for one in group)]
            groups = [group for group in groups if group not in touched]
            groups.append([*itertools.chain(*touched), change])
        return groups


class Disk:
    """A file system below `root` on which a trace is replayed."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._top = _Directory()

    def _find(self, path: str) -> _File | _Directory | None:
        found: _File | _Directory | None = self._top
        relative = os.path.relpath(path, self._root)
        for name in () if relative == "." else relative.split(os.sep):
            found = found.names.get(name) if isinstance(found, _Directory) else None
        return found

    def apply(self, operation: Operation) -> None:
        """Take in what happened next; what had failed, because of what was there, changes nothing."""
        what, path, detail = operation
        parent, name = self._find(os.path.dirname(path)), os.path.basename(path)
        node = self._find(path)
        if what == "syncfs":
            self._top.sync_all()
        elif what == "fsync":
            if path == self._root or node is not None:
                (node or self._top).sync()
        elif not isinstance(parent, _Directory):
            return
        elif what in ("mkdir", "create") and node is None:
            parent.change({name: _Directory() if what == "mkdir" else _File()})
        elif what == "write" and isinstance(node, _File):
            node.content = bytes(detail)
        elif what in ("unlink", "rmdir") and node is not None:
            parent.change({name: None})
        elif what == "link" and node is None:
            parent.change({name: self._find(str(detail))})
        elif what == "rename" and node is not None:
            parent.change({name: None, os.path.basename(str(detail)): node})

    def build(self, choose: Choose) -> Tree:
        """One state that a power loss may leave."""
        return self._top.build(choose)


def telling_states(disk: Disk) -> Iterator[Tree]:
    """What a power loss leaves that loses one thing only, or keeps one thing only."""
    arities: list[int] = []

    def note(ways: int) -> int:
        arities.append(ways)
        return ways - 1

    disk.build(note)
    for base in ([ways - 1 for ways in arities], [0] * len(arities)):
        for i, ways in enumerate(arities):
            for choice in range(ways):
                yield disk.build(_follow([*base[:i], choice, *base[i + 1 :]]))


def _follow(choices: Sequence[int]) -> Choose:
    """Choose as listed; what was not foreseen is kept."""
    listed = iter(choices)
    return lambda ways: min(next(listed, ways - 1), ways - 1)


def some_state(disk: Disk, draw: random.Random) -> Tree:
    return disk.build(lambda ways: draw.randrange(ways))


def all_lost(disk: Disk) -> Tree:
    return disk.build(lambda ways: 0)


def all_kept(disk: Disk) -> Tree:
    return disk.build(lambda ways: ways - 1)


def materialize(tree: Tree, path: Path) -> None:
    path.mkdir()
    for name, node in tree.items():
        if isinstance(node, bytes):
            (path / name).write_bytes(node)
        else:
            materialize(node, path / name)
