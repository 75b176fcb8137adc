"""A pause of Python's garbage collector, for the few places that make very many objects at once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pauses:
    """The pauses of all threads of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.was_enabled = False  # before the first of them


_pauses = _Pauses()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's garbage collector while many small objects are made, none of them garbage.

    A plan of 100,000 tasks is millions of objects: collections would take half of the time to compile.
    Pauses may overlap in several threads; the last one to end resumes the collector.
    """
    # Without the lock, one thread sees the collector off, because another has paused it. The other
    # resumes it, then the first one turns it off: and nobody would turn it on any more.
    with _pauses.lock:
        if _pauses.count == 0:
            _pauses.was_enabled = gc.isenabled()
            gc.disable()
        _pauses.count += 1
    try:
        yield
    finally:
        with _pauses.lock:
            _pauses.count -= 1
            if _pauses.count == 0 and _pauses.was_enabled:
                gc.enable()
