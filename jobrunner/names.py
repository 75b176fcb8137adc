"""What jobs, nodes, blobs and tasks may be called, and how a node's epoch is named on disk.

The only place that formats or parses ``node.epoch``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from jobrunner.errors import DefinitionError

MAX_NAME_LENGTH = 128
"""Longest name, in characters: escaped and suffixed it must fit 255 bytes on every file system."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Refused by some file system or meaningful to a path; "%" itself so that escaping can be undone.
_UNSAFE = re.compile(r'[%/\\<>"|?*\x00-\x1f\x7f]')
_UNSAFE_WINDOWS = re.compile(r'[%/\\<>"|?*:\x00-\x1f\x7f]')
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com[0-9]|lpt[0-9])(\.|$)")
_STORE = re.compile(r"(?P<stem>.+)\.(?P<epoch>0|[1-9][0-9]*)(?:\.r(?P<retry>[1-9][0-9]*))?", re.S)


def check_name(name: object, what: str) -> str:
    """Return `name` if it may name a `what` ("node", "blob", "task", "job").

    Any printable text of 1 to 128 characters will do that does not begin or end with a space
    and is not ``.`` or ``..``; `/` separates a node from its task, so only jobs may not be told
    apart by it and no name holds one.

    Raises
    ------
    DefinitionError
        Saying which rule the name breaks.
    """
    if not isinstance(name, str):
        raise DefinitionError(
            f"The name of a {what} is a str; got {type(name).__name__} ({name!r:.80})."
        )
    problem = None
    if not name:
        problem = "is empty"
    elif len(name) > MAX_NAME_LENGTH:
        problem = f"has {len(name)} characters, and at most {MAX_NAME_LENGTH} are allowed"
    elif _CONTROL.search(name):
        problem = "holds a control character"
    elif not name.isprintable():
        problem = "holds a character that cannot be printed"
    elif "/" in name:
        problem = "holds a '/', which separates a node from its tasks"
    elif name != name.strip():
        problem = "begins or ends with a space"
    elif name in (".", ".."):
        problem = "means a directory"
    elif len(escape(name).encode()) > 200:
        problem = "is longer than 200 bytes once escaped for file systems"
    if problem:
        raise DefinitionError(
            f"{name[:80]!r} cannot name a {what}: it {problem}. Choose printable text of 1 to "
            f"{MAX_NAME_LENGTH} characters without '/'."
        )
    return name


def check_distinct(names: Iterable[str], what: str) -> None:
    """Refuse names that some file systems would take for one another.

    Raises
    ------
    DefinitionError
        Naming the first two names that differ only in case.
    """
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            raise DefinitionError(
                f"The {what} {other!r} and {name!r} differ only in case, and file systems that "
                f"fold case would keep one of them. Rename one."
            )


@lru_cache(maxsize=1 << 14)
def escape(name: str) -> str:
    """Write a name so that every file system keeps it; `unescape` gives it back."""
    unsafe = _UNSAFE_WINDOWS if os.name == "nt" else _UNSAFE
    text = unsafe.sub(lambda match: f"%{ord(match[0]):02X}", name)
    if _RESERVED.match(text) or text.startswith((".", "_")) or text in ("zarr.json", "c"):
        text = f"%{ord(text[0]):02X}{text[1:]}"
    if text.endswith((".", " ")):
        text = f"{text[:-1]}%{ord(text[-1]):02X}"
    return text


def unescape(text: str) -> str:
    """Read a name that `escape` wrote."""
    return re.sub(r"%([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), text)


class StoreName(NamedTuple):
    """The parts of ``trainer:0.5`` or, claimed a second time, ``trainer:0.5.r1``."""

    node: str
    epoch: int
    retry: int = 0


def format_store_name(node: str, epoch: int, retry: int = 0) -> str:
    """Name of the directory that holds `node` at `epoch`, of the `retry`-th claim on that name.

    Raises
    ------
    TypeError, ValueError
        One is not of the type that it should be: a log may say anything, and no name leads elsewhere.
    """
    suffix = f".r{retry:d}" if retry else ""
    return f"{escape(node)}.{epoch:d}{suffix}"


def parse_store_name(text: str) -> StoreName | None:
    """Read a store's name; None for whatever `format_store_name` does not write."""
    match = _STORE.fullmatch(text)
    if match is None:
        return None
    found = StoreName(unescape(match["stem"]), int(match["epoch"]), int(match["retry"] or 0))
    return found if format_store_name(*found) == text else None
