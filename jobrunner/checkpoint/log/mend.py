"""Corrects one wrong bit in an entry's file. Pure: no I/O."""

from __future__ import annotations

import hashlib

from jobrunner.checkpoint.log.entries import frame, split_file

_TRIED_BYTES = 16 << 10
_PLAIN_BYTES = range(0x20, 0x80)  # JSON escapes all others


def mend_bit(data: bytes) -> bytes | None:
    """The file as it was written, if one bit of `data` is wrong; the digest proves it.

    A byte that JSON escapes must be the wrong one. Without one, every bit is tried, but only in
    files up to 16 KiB.
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
