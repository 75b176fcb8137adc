"""2 compile: the garbage collector held off while many small objects are made.

Plans of 100,000 tasks are millions of objects, none of them garbage; looking through them again and
again took half of the time of compiling, and more the larger the plan.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_holders = 0
_was_enabled = False


@contextmanager
def gc_paused() -> Iterator[None]:
    """Hold the collector off within, in all threads; nests, and leaves it as it was."""
    global _holders, _was_enabled
    with _lock:
        if not _holders:
            _was_enabled = gc.isenabled()
            gc.disable()
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if not _holders and _was_enabled:
                gc.enable()
