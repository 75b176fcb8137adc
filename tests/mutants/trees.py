"""Checkpoint directories as trees in memory, and how to sign a changed one again.

A tree maps paths to contents: bytes of a file, or one of the `Odd` things a stranger may put there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

HEAD_BYTES = len('{"sha256":"') + 64 + len('","entry":')
"""Before the entry in a file of the log."""
_SEAL = 64 + len('"}}}')
"""From a root document's own digest to its end."""


@dataclass(frozen=True)
class Odd:
    """What is not a plain file."""

    kind: Literal["directory", "link", "pipe", "unreadable", "sparse"]
    to: str = ""

    def make(self, path: str) -> None:
        """Put it into a directory."""
        match self.kind:
            case "directory":
                os.makedirs(path)
            case "link":
                os.symlink(self.to, path)
            case "pipe":
                os.mkfifo(path)
            case "unreadable":
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o000))
            case "sparse":
                with open(path, "xb") as file:
                    file.truncate(1 << 40)


Tree = dict[str, "bytes | Odd"]


def read_tree(path: Path) -> Tree:
    """All files below a directory."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def write_tree(tree: Tree, path: str) -> None:
    """Make a directory of a tree; skips what has no place, such as a file below a file or link."""
    os.makedirs(path)
    odd = tuple(f"{name}/" for name, content in tree.items() if isinstance(content, Odd))
    for name, content in sorted(tree.items()):
        full = f"{path}/{name}"
        if name.startswith(odd):
            continue
        with contextlib.suppress(OSError, ValueError):
            os.makedirs(os.path.dirname(full), exist_ok=True)
            if isinstance(content, Odd):
                content.make(full)
            else:
                with open(full, "xb") as file:
                    file.write(content)


def is_root(name: str) -> bool:
    """Whether it is the root document of a store."""
    return name.count("/") == 1 and name.endswith("/zarr.json")


def dump(document: Any) -> bytes:
    """JSON as jobrunner writes it, but with anything in it."""
    return json.dumps(document, separators=(",", ":")).encode()


def split_entry(content: bytes) -> Any:
    """The entry in a file of the log."""
    return json.loads(content)["entry"]


def frame_entry(text: bytes) -> bytes:
    """A file of the log, with its digest."""
    digest = hashlib.sha256(text).hexdigest()
    return b'{"sha256":"%s","entry":%s}\n' % (digest.encode(), text)


def sign(tree: Tree, before: Tree) -> None:
    """Correct all sizes, checksums and digests that depend on the files that were changed.

    As one does who has read the format: files in root documents, the documents' own digests, their
    digests in the log, and the digests of the log's entries.
    """
    files, roots = {}, {}
    for name, old in before.items():
        new = tree.get(name)
        if isinstance(old, bytes) and isinstance(new, bytes) and old != new:
            files[_file_entry(old)] = _file_entry(new)
    for name, content in tree.items():
        old = before.get(name)
        if is_root(name) and isinstance(content, bytes) and isinstance(old, bytes):
            tree[name] = new = _seal(_replace_all(content, rb'\[\d+,"[0-9a-f]{32}"\]', files))
            roots[_digest(old)] = _digest(new)
    for name, content in tree.items():
        if name.startswith("_log/") and isinstance(content, bytes) and len(content) > HEAD_BYTES:
            text = _replace_all(content[HEAD_BYTES:-2], rb"[0-9a-f]{64}", roots)
            if content != before.get(name) or text != content[HEAD_BYTES:-2]:
                tree[name] = frame_entry(text)


def _file_entry(content: bytes) -> bytes:
    return b'[%d,"%s"]' % (len(content), xxhash.xxh3_128_hexdigest(content).encode())


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _seal(document: bytes) -> bytes:
    if document[-_SEAL - 10 : -_SEAL] != b'"sha256":"':
        return document
    return document[:-_SEAL] + _digest(document[:-_SEAL] + b"0" * 64 + b'"}}}') + b'"}}}'


def _replace_all(content: bytes, pattern: bytes, pairs: dict[bytes, bytes]) -> bytes:
    return re.sub(pattern, lambda match: pairs.get(match[0], match[0]), content)
