"""An entry of the log as the content of a file, its digest included, and back. Pure: no I/O."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from jobrunner.checkpoint.log.state import Entry
from jobrunner.errors import CheckpointCorruptError

_MENDED_BYTES = 16 << 10
_PLAIN_BYTES = range(0x20, 0x80)  # JSON escapes all others


def way_out(path: str) -> str:
    """What the user can do where the file of an entry is damaged or gone."""
    directory = os.path.dirname(os.path.dirname(path))
    return (
        f"Restore the file from a copy, or let `jobrunner fsck {directory}` tell what can be "
        f"proven without it, and `jobrunner fsck {directory} --repair` go on from that."
    )


def encode_entry(entry: Entry) -> bytes:
    """An entry as the content of a file, its digest included."""
    text = json.dumps(entry, allow_nan=False, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"sha256":"{digest}","entry":{text}}}\n'.encode()


def decode_entry(data: bytes, number: int, path: str) -> Entry:
    """Check a file's content and give its entry.

    Raises
    ------
    CheckpointCorruptError
        Naming `path`, what was expected and what was found.
    """
    found, text, expected = _take_apart(data)
    if data != _frame(text, expected):
        if not data:
            what = "is empty"
        elif not data.endswith(b"}\n"):
            what = f"is cut, or was written over: its {len(data)} bytes have no end"
        else:
            what = f"is not what was written: expected SHA-256 {found!r}, found {expected}"
        raise CheckpointCorruptError(
            f"Entry {number} of the log, {path}, {what}. {way_out(path)}", path=path
        )
    entry: dict[str, Any] = json.loads(text)
    if entry["number"] != number:
        raise CheckpointCorruptError(
            f"{path} holds entry {entry['number']} of a log: expected {number}. {way_out(path)}",
            path=path,
        )
    return entry


def read_content(data: bytes) -> Entry | None:
    """The entry in a file, whatever its number; None where it is not whole."""
    _, text, digest = _take_apart(data)
    if data != _frame(text, digest):
        return None
    entry: dict[str, Any] = json.loads(text)
    return entry


def _take_apart(data: bytes) -> tuple[str, bytes, str]:
    """The digest that a file names, its entry's text, and that text's own digest."""
    start = len('{"sha256":"')
    text = data[start + 64 + len('","entry":') : -2]
    named = data[start : start + 64].decode("ascii", "replace")
    return named, text, hashlib.sha256(text).hexdigest()


def _frame(text: bytes, digest: str) -> bytes:
    return f'{{"sha256":"{digest}","entry":'.encode() + text + b"}\n"


def mend_bit(data: bytes) -> bytes | None:
    """What was written, if a single bit of it is wrong; the digest proves it.

    Notes
    -----
    A byte that no entry holds is the wrong one. Without one, every bit is tried, so long files
    (more than 16 KiB) are then left as they are.
    """
    named, text, digest = _take_apart(data)
    framed = _frame(text, digest)
    if len(framed) != len(data):
        return None
    if sum((a ^ b).bit_count() for a, b in zip(framed, data, strict=True)) == 1:
        return framed  # the text is whole, and so is all of its digest but that bit
    if data != _frame(text, named):
        return None
    wrong = [at for at, byte in enumerate(text) if byte not in _PLAIN_BYTES]
    if len(wrong) > 1 or (not wrong and len(data) > _MENDED_BYTES):
        return None
    before = hashlib.sha256()
    done = 0
    for at in wrong or range(len(text)):
        before.update(text[done:at])
        done = at
        for bit in range(8):
            byte = text[at] ^ 1 << bit
            if byte in _PLAIN_BYTES:
                tried = before.copy()
                tried.update(bytes([byte]) + text[at + 1 :])
                if tried.hexdigest() == named:
                    return _frame(text[:at] + bytes([byte]) + text[at + 1 :], named)
    return None
