"""A pause of Python's garbage collector, for the few places that make very many objects at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's garbage collector while many small objects are made, none of them garbage.

    A plan of 100,000 tasks is millions of objects: collections would take half of the time to compile.
    If pauses overlap in several threads, the first one to end may resume it early, which costs only time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
