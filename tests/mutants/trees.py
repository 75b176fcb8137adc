"""Checkpoint directories as trees in memory, and how to sign a changed one again.

A tree maps paths to contents: bytes of a file, or one of the `Odd` things a stranger may put there.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

ROOT_DOCUMENT = "zarr.json"
HEAD_BYTES = len('{"sha256":"') + 64 + len('","entry":')
"""Before the entry in a file of the log."""
_SEAL = 64 + len('"}}}')


@dataclass(frozen=True)
class Odd:
    """What is not a plain file."""

    kind: Literal["directory", "link", "pipe", "unreadable", "sparse"]
    to: str = ""


Tree = dict[str, "bytes | Odd"]


def read_tree(path: Path) -> Tree:
    """All files below a directory."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def write_tree(tree: Tree, path: str) -> None:
    """Make a directory of a tree; skips what has no place, such as a file below a file or link."""
    made = {path}
    os.mkdir(path)
    odd = tuple(f"{name}/" for name, content in tree.items() if isinstance(content, Odd))
    for name, content in sorted(tree.items()):
        if name.startswith(odd):
            continue
        full = f"{path}/{name}"
        with contextlib.suppress(OSError, ValueError):
            parent = os.path.dirname(full)
            if parent not in made:
                os.makedirs(parent, exist_ok=True)
                made.add(parent)
            if isinstance(content, Odd):
                _put(content, full)
            else:
                with open(full, "xb") as file:
                    file.write(content)


def _put(odd: Odd, path: str) -> None:
    match odd.kind:
        case "directory":
            os.makedirs(path)
        case "link":
            os.symlink(odd.to, path)
        case "pipe":
            os.mkfifo(path)
        case "unreadable":
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o000))
        case "sparse":
            with open(path, "xb") as file:
                file.truncate(1 << 40)


# ---- digests


def split_entry(content: bytes) -> Any:
    """The entry in a file of the log; raises ValueError if there is none."""
    document = json.loads(content)
    if not isinstance(document, dict) or not isinstance(document.get("entry"), dict):
        raise ValueError("no entry")
    return document["entry"]


def frame_entry(text: bytes) -> bytes:
    """A file of the log, with its digest."""
    digest = hashlib.sha256(text).hexdigest()
    return b'{"sha256":"%s","entry":%s}\n' % (digest.encode(), text)


def dump(document: Any) -> bytes:
    """JSON as jobrunner writes it, but with anything in it."""
    return json.dumps(document, separators=(",", ":")).encode()


def seal(document: bytes) -> bytes:
    """A root document, whose own digest, at its end, is 64 zeros."""
    digest = hashlib.sha256(document).hexdigest().encode()
    return document[:-_SEAL] + digest + b'"}}}'


def sign(tree: Tree, changed: set[str]) -> None:
    """Correct all sizes, checksums and digests that depend on the files that were changed.

    As one does who has read the format: files in root documents, the documents' own digests, their
    digests in the log, and the digests of the log's entries.
    """
    stores = {name.split("/")[0] for name in changed if not name.startswith("_")}
    for store in stores:
        root = tree.get(f"{store}/{ROOT_DOCUMENT}")
        if isinstance(root, bytes):
            with contextlib.suppress(
                ValueError, RecursionError, LookupError, TypeError, AttributeError
            ):
                tree[f"{store}/{ROOT_DOCUMENT}"] = _sign_root(tree, store, root)
    digests = {
        name.split("/")[0]: hashlib.sha256(content).hexdigest()
        for name, content in tree.items()
        if name.count("/") == 1
        and name.endswith(f"/{ROOT_DOCUMENT}")
        and isinstance(content, bytes)
    }
    for name, content in tree.items():
        if name.startswith("_log/") and isinstance(content, bytes) and len(content) > HEAD_BYTES:
            tree[name] = _sign_entry(content, digests, stores, is_changed=name in changed)


def _sign_root(tree: Tree, store: str, content: bytes) -> bytes:
    document = json.loads(content)
    entry = document["attributes"]["/jobrunner"]
    if not isinstance(entry, dict):
        return content
    before = copy.deepcopy(document)
    for array in _arrays(entry):
        _sign_array(tree, store, array)
    is_sealed = "sha256" in entry and content[-_SEAL - 10 : -_SEAL] == b'"sha256":"'
    if document == before:  # it may be odd JSON, which would not survive
        return seal(content[:-_SEAL] + b"0" * 64 + b'"}}}') if is_sealed else content
    entry["sha256"] = "0" * 64
    return seal(dump(document))


def _arrays(entry: Any) -> Iterator[dict[str, Any]]:
    stacks = entry.get("stacks")
    blobs = entry.get("blobs")
    found = list(stacks) if isinstance(stacks, list) else []
    if isinstance(blobs, dict):
        for blob in blobs.values():
            if isinstance(blob, dict) and isinstance(blob.get("arrays"), list):
                found += blob["arrays"]
    yield from (it for it in found if isinstance(it, dict) and isinstance(it.get("path"), str))


def _sign_array(tree: Tree, store: str, array: dict[str, Any]) -> None:
    files = array.get("files")
    there = sorted(
        name
        for name in tree
        if name.startswith(f"{store}/{array['path']}/c") and isinstance(tree[name], bytes)
    )
    if isinstance(files, list) and len(files) == len(there):
        for i, name in enumerate(there):
            content = tree[name]
            assert isinstance(content, bytes)
            files[i] = [len(content), xxhash.xxh3_128_hexdigest(content)]


def _sign_entry(
    content: bytes, digests: dict[str, str], stores: set[str], *, is_changed: bool
) -> bytes:
    is_stale = False
    with contextlib.suppress(ValueError, RecursionError, LookupError, AttributeError, TypeError):
        entry = split_entry(content)
        for record in entry.get("records") or ():
            for store in (record.get("stores") or {}).values():
                digest = digests.get(store["name"], store["sha256"])
                if store["name"] in stores and store["sha256"] != digest:
                    store["sha256"] = digest
                    is_stale = True
    if is_stale:
        return frame_entry(dump(entry))
    return frame_entry(content[HEAD_BYTES:-2]) if is_changed else content
