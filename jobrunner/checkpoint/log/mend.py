"""An entry's file with one wrong bit, as it was written. Pure: no I/O."""

from __future__ import annotations

import hashlib

_TRIED_BYTES = 16 << 10
_PLAIN_BYTES = range(0x20, 0x80)  # JSON escapes all others


def split_file(data: bytes) -> tuple[str, bytes, str]:
    """The digest that a file of the log names, its entry's text, and the digest of that text."""
    start = len('{"sha256":"')
    text = data[start + 64 + len('","entry":') : -2]
    named = data[start : start + 64].decode("ascii", "replace")
    return named, text, hashlib.sha256(text).hexdigest()


def frame(text: bytes, digest: str) -> bytes:
    """The content of a file of the log."""
    return f'{{"sha256":"{digest}","entry":'.encode() + text + b"}\n"


def mend_bit(data: bytes) -> bytes | None:
    """What was written, if one bit of it is wrong; the digest proves it.

    Notes
    -----
    A byte that no entry contains is the wrong one. Without one, every bit is tried, so files above
    16 KiB are not mended then.
    """
    named, text, digest = split_file(data)
    whole = frame(text, digest)
    if len(whole) == len(data) and _count_bits(whole, data) == 1:
        return whole  # the wrong bit is outside the entry
    if data != frame(text, named):
        return None
    suspects = [at for at, byte in enumerate(text) if byte not in _PLAIN_BYTES]
    if len(suspects) > 1 or (not suspects and len(data) > _TRIED_BYTES):
        return None
    for at in suspects or range(len(text)):
        before = hashlib.sha256(text[:at])
        for byte in (text[at] ^ 1 << bit for bit in range(8)):
            tried = before.copy()
            tried.update(bytes([byte]) + text[at + 1 :])
            if byte in _PLAIN_BYTES and tried.hexdigest() == named:
                return frame(text[:at] + bytes([byte]) + text[at + 1 :], named)
    return None


def _count_bits(one: bytes, other: bytes) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))
