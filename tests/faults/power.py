"""What a file system may look like after a power loss, told from a trace of real operations.

POSIX promises little: until a file is synced its content may be there, in part or not at all, and
until its directory is synced so may its name. `Disk` replays a trace and knows, for each moment, all
states that are left to choose from; `states` walks through them.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c

from jobrunner.checkpoint.files import PosixFiles

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
        self.trace: list[Operation] = []
        self._has_syncfs = has_syncfs
        self._temporary = ""

    @property
    def has_syncfs(self) -> bool:
        return self._has_syncfs

    def _sync_file_system(self, descriptor: int) -> int:
        return 0

    def _sync_path(self, path: str) -> None:
        self.before("fsync", path)

    def before(self, operation: str, path: str) -> None:
        if operation == "link":
            self.trace.append(Operation("link", path, self._temporary))
        elif operation in ("mkdir", "create", "fsync", "syncfs", "unlink", "rmdir"):
            self.trace.append(Operation(operation, path))

    def write(
        self,
        path: str,
        buffers: Sequence[bytes | memoryview],
        padding_bytes: int = 0,
        digest: Callable[[memoryview, int], int] = crc32c,
    ) -> int:
        found = super().write(path, buffers, padding_bytes, digest)
        self.trace.append(Operation("write", path, Path(path).read_bytes()))
        return found

    def overwrite(self, path: str, data: bytes) -> None:
        if not os.path.exists(path):
            self.trace.append(Operation("create", path))
        super().overwrite(path, data)
        self.trace.append(Operation("write", path, Path(path).read_bytes()))

    def create_whole(self, path: str, data: bytes, temporary: str) -> bool:
        self._temporary = temporary
        return super().create_whole(path, data, temporary)

    def link(self, source: str, target: str, nbytes: int) -> bool:
        self._temporary = source
        return super().link(source, target, nbytes)

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self.trace.append(Operation("rename", source, target))


@dataclass(slots=True)
class _File:
    content: bytes = b""
    flushed: bytes = b""

    def sync(self) -> None:
        self.flushed = self.content

    def build(self, choose: Choose) -> bytes:
        half = self.content[: len(self.content) // 2]
        ways = list(dict.fromkeys((self.flushed, half, self.content)))
        return self.content if self.content == self.flushed else ways[choose(len(ways))]


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
        return {name: names[name].build(choose) for name in sorted(names) if names[name]}  # type: ignore[union-attr]

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
            node.content = bytes(detail)  # type: ignore[arg-type]
        elif what in ("unlink", "rmdir") and node is not None:
            parent.change({name: None})
        elif what == "link" and node is None:
            parent.change({name: self._find(str(detail))})
        elif what == "rename" and node is not None:
            parent.change({name: None, os.path.basename(str(detail)): node})

    def build(self, choose: Choose) -> Tree:
        """One state that a power loss may leave."""
        return self._top.build(choose)


def states(disk: Disk, limit: int, draw: random.Random, sample: int) -> Iterator[Tree]:
    """All states that a power loss may leave; of more than `limit`, the telling ones and a sample.

    Telling are: nothing lost, all lost, one thing lost, one thing kept.
    """
    kept = _arities(disk.build, lambda ways: ways - 1)
    if count_states(disk) <= limit:
        yield from _every(disk.build)
        return
    for base in ([ways - 1 for ways in kept], [0] * len(kept)):
        yield disk.build(_follow(base))
        for i, ways in enumerate(kept):
            for other in range(ways):
                yield disk.build(_follow([*base[:i], other, *base[i + 1 :]]))
    for _ in range(sample):
        yield disk.build(draw.randrange)


def count_states(disk: Disk) -> int:
    """How many states there are, at most."""
    return math.prod(_arities(disk.build, lambda ways: ways - 1))


def all_lost(disk: Disk) -> Tree:
    """What is left where everything goes that may."""
    return disk.build(lambda ways: 0)


def _every(build: Callable[[Choose], Tree]) -> Iterator[Tree]:
    """One tree for each sequence of choices, the kept ones first."""
    choices: list[int] = []
    while True:
        arities: list[int] = []

        def choose(ways: int, arities: list[int] = arities) -> int:
            arities.append(ways)
            if len(choices) < len(arities):
                choices.append(0)
            return ways - 1 - choices[len(arities) - 1]

        yield build(choose)
        while choices and choices[-1] + 1 >= arities[len(choices) - 1]:
            choices.pop()
        if not choices:
            return
        choices[-1] += 1


def _arities(build: Callable[[Choose], Tree], choose: Choose) -> list[int]:
    found: list[int] = []

    def note(ways: int) -> int:
        found.append(ways)
        return choose(ways)

    build(note)
    return found


def _follow(choices: Sequence[int]) -> Choose:
    """Choose as listed; what was not foreseen is kept."""
    listed = iter(choices)
    return lambda ways: min(next(listed, ways - 1), ways - 1)


def materialize(tree: Tree, path: Path) -> None:
    """Make a state real."""
    path.mkdir()
    for name, node in tree.items():
        if isinstance(node, bytes):
            (path / name).write_bytes(node)
        else:
            materialize(node, path / name)
