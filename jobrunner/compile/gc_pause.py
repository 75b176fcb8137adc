"""Pause Python's garbage collector while many small objects are made.

A plan of 100,000 tasks is millions of objects, none of them garbage. Without a pause, collections
take more than half of the time to compile.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import call
from typing import Any

_lock = threading.Lock()
_num_pauses = 0
_was_enabled = False
_has_frozen = False  # somebody has called `gc.freeze`


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the collector in all threads. The last of several pauses to end restores it."""
    global _num_pauses, _was_enabled
    with _lock:
        if not _num_pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_pauses += 1
    try:
        yield
    finally:
        with _lock:
            _num_pauses -= 1
            if not _num_pauses and _was_enabled:
                gc.enable()


def made_unseen(make: Callable[[], Any], num_made: int) -> Any:
    """Return what a function of C makes: so many containers, at which the collector need not look.

    It would look at each twice, when the processor no longer has it at hand, and find it in use. So
    they become old at once: only a look at all objects finds them. What was dropped before does not
    become old with them, because it is collected first, and no other thread runs until the end.
    """
    with gc_paused():
        looks = _looks_before_full(num_made)
        if not looks:
            return make()
        at_once: list[Callable[[], Any]] = [_collect_young, make, gc.freeze, gc.unfreeze]
        made = list(map(call, at_once))[1]
        for _ in range(looks):  # which `freeze` has forgotten
            _collect_young()
        return made


def _looks_before_full(num_made: int) -> int:
    """How many looks at young objects bring the next one at all of them as near as it is now.

    0 if so many new containers had better be looked at.
    """
    global _has_frozen
    young, times, looks = gc.get_count()
    threshold, _, most_looks = gc.get_threshold()
    looks = min(looks, most_looks) + 1
    if num_made < _MANY or young + times * threshold > num_made or looks > _MOST_LOOKS:
        return 0
    if not (_was_enabled and threshold and _HAS_GENERATIONS) or _has_frozen:
        return 0
    _has_frozen = gc.get_freeze_count() >= _FROZEN  # which `unfreeze` would undo
    return 0 if _has_frozen else looks


_collect_young = partial(gc.collect, 1)
_HAS_GENERATIONS = sys.version_info < (3, 14) and "t" not in sys.abiflags
_MANY = 4_096
_MOST_LOOKS = 100
_FROZEN = 1_000
"""`gc.freeze` freezes more; Python 3.12 itself freezes a few hundred objects."""
