"""Rules for the names of jobs, nodes, blobs and tasks, and the names of stores on disk.

Only this module formats or parses ``node.epoch``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from jobrunner.errors import DefinitionError
from jobrunner.positions import Position, parse_position

MAX_NAME_LENGTH = 128
"""In characters. An escaped name with its suffix must fit into 255 bytes on every file system."""

LOG_DIRECTORY = "_log"
"""The log's directory in a checkpoint directory, by which one is known."""

ROOT_DOCUMENT = "zarr.json"
"""The document of a store, written last, by which a whole one is known."""

HISTORIES = "_histories"
"""The directory of all histories in a checkpoint directory; no node can have this name."""

BlobKey = tuple[str, str]
"""A blob: its node and its own name."""

_MAX_NAME_BYTES = 200

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Characters that some file systems refuse or that paths use, and "%", which begins an escape.
_UNSAFE = re.compile(r'[%/\\<>"|?*\x00-\x1f\x7f]')
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com[0-9]|lpt[0-9])(\.|$)")
_STORE = re.compile(
    r"(?P<stem>.+)\.(?P<epoch>(?:0|[1-9][0-9]{0,17})(?:\.s[1-9][0-9]{0,17})?)"
    r"(?:\.r(?P<retry>[1-9][0-9]{0,17}))?",
    re.S,
)


def check_name(name: object, kind: str) -> str:
    """Return `name` if it can be that of a `kind` ("node", "blob", "task" or "job").

    A name is printable text of 1 to 128 characters. It contains no ``/``, does not begin or end
    with a space, and is not ``.`` or ``..``. Raises `DefinitionError` otherwise.
    """
    if not isinstance(name, str):
        raise DefinitionError(
            f"The name of a {kind} must be a str; got {type(name).__name__} ({name!r:.80})."
        )
    problem = None
    if not name:
        problem = "is empty"
    elif len(name) > MAX_NAME_LENGTH:
        problem = f"has {len(name)} characters, more than {MAX_NAME_LENGTH}"
    elif _CONTROL.search(name):
        problem = "contains a control character"
    elif not name.isprintable():
        problem = "contains a character that cannot be printed"
    elif "/" in name:
        problem = "contains a '/', which separates nodes from tasks and blobs"
    elif name != name.strip():
        problem = "begins or ends with a space"
    elif name in (".", ".."):
        problem = "is a directory in every path"
    elif len(escape(name).encode()) > _MAX_NAME_BYTES:
        problem = f"has more than {_MAX_NAME_BYTES} bytes once escaped for file systems"
    if problem:
        raise DefinitionError(
            f"{name[:80]!r} cannot name a {kind}: it {problem}. Choose printable text of 1 to "
            f"{MAX_NAME_LENGTH} characters without '/'."
        )
    return name


def check_distinct(names: Iterable[str], kind: str) -> None:
    """Raise `DefinitionError` if two names are the same on a file system that ignores case."""
    by_folded_name: dict[str, str] = {}
    for name in names:
        first = by_folded_name.setdefault(name.casefold(), name)
        if first != name:
            raise DefinitionError(
                f"The {kind} {first!r} and {name!r} differ only in case. A file system that "
                f"ignores case would keep only one of them. Rename one."
            )


@lru_cache(maxsize=1 << 14)
def escape(name: str) -> str:
    """Escape a name for file systems; `unescape` undoes it."""
    text = _UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", name)
    if _RESERVED.match(text) or text.startswith((".", "_")) or text in ("zarr.json", "c"):
        text = f"%{ord(text[0]):02X}{text[1:]}"
    if text.endswith((".", " ")):
        text = f"{text[:-1]}%{ord(text[-1]):02X}"
    return text


def unescape(text: str) -> str:
    """Undo `escape`."""
    return re.sub(r"%([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), text)


class StoreName(NamedTuple):
    """The parts of ``trainer:0.5``, its second save ``trainer:0.5.r1``, or ``trainer:0.4.s200``."""

    node: str
    epoch: Position
    retry: int = 0

    @property
    def key(self) -> tuple[Position, int]:
        """What all stores of one save have in common."""
        return self.epoch, self.retry


def format_store_name(node: str, epoch: Position, retry: int = 0) -> str:
    """Name of the directory that contains `node` at `epoch`; `retry` tells repeated saves apart."""
    suffix = f".r{retry:d}" if retry else ""
    return f"{escape(node)}.{epoch}{suffix}"


def parse_store_name(text: str) -> StoreName | None:
    """Parse a store's name; None for anything that `format_store_name` does not write."""
    match = _STORE.fullmatch(text)
    if match is None:
        return None
    epoch = parse_position(match["epoch"])
    assert epoch is not None  # the pattern allows nothing else
    name = StoreName(unescape(match["stem"]), epoch, int(match["retry"] or 0))
    return name if format_store_name(*name) == text else None


def child_names(keys: Iterable[object]) -> list[str]:
    """Return distinct names that every file system allows; the keys themselves if possible."""
    names: list[str] = []
    used: set[str] = set()
    for i, key in enumerate(keys):
        name = f"_{i}"  # `escape` never begins with "_"
        if isinstance(key, str) and key and key.isprintable():
            escaped = escape(key)
            if escaped.casefold() not in used and len(escaped.encode()) <= _MAX_NAME_BYTES:
                name = escaped
        used.add(name.casefold())
        names.append(name)
    return names


def is_clean(text: str) -> bool:
    """Whether the text has no lone surrogates, which not every JSON reader keeps."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def described_nodes(description: Mapping[str, Any]) -> tuple[str, ...]:
    """The nodes that the description of a plan names; it calls tasks ``group:node/task``."""
    nodes = dict.fromkeys(description.get("nodes", {}))
    for name in description.get("structure", {}):
        _, _, task = name.partition(":")
        node, _, _ = task.partition("/")
        nodes[node] = None
    return tuple(nodes)
