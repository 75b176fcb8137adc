"""Corrects one wrong bit of an entry's file. Pure: no I/O."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from itertools import islice

from jobrunner.checkpoint.log.entries import frame, split_file

MOST_TRIED_BYTES = 16 << 10
_NOT_PLAIN = re.compile(rb"[^\x20-\x7f]")  # JSON escapes these


def mend_bit(data: bytes, most_bytes: int = MOST_TRIED_BYTES) -> bytes | None:
    """An entry's file as it was written, if one bit of `data` is wrong; the digest proves it.

    A byte that JSON escapes must be the wrong one. Without one, every bit is tried, but only in
    files up to `most_bytes`: the time grows with their square.
    """
    mend = _mend_bit if len(data) <= MOST_TRIED_BYTES else _mend_bit.__wrapped__
    return mend(data, most_bytes)


@lru_cache(maxsize=256)
def _mend_bit(data: bytes, most_bytes: int) -> bytes | None:
    around, text = split_file(data)
    digest = hashlib.sha256(text).hexdigest()
    right = frame(b"", digest)
    wrong = int.from_bytes(around) ^ int.from_bytes(right)
    if len(around) == len(right) and wrong.bit_count() == 1:
        return frame(text, digest)
    named = around[len('{"sha256":"') :][:64].decode("ascii", "replace")
    if around != frame(b"", named):
        return None
    suspects = [found.start() for found in islice(_NOT_PLAIN.finditer(text), 2)]
    if len(suspects) > 1 or (not suspects and len(data) > most_bytes):
        return None
    for at in suspects or range(len(text)):
        before = hashlib.sha256(text[:at])
        for byte in (bytes([text[at] ^ 1 << bit]) for bit in range(8)):
            tried = before.copy()
            tried.update(byte + text[at + 1 :])
            if not _NOT_PLAIN.match(byte) and tried.hexdigest() == named:
                return frame(text[:at] + byte + text[at + 1 :], named)
    return None
