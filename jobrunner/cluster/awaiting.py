"""Calls that block, made from an event loop."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from jobrunner.cluster.connection import run_in_thread

Call = Callable[[], Any]
_P = ParamSpec("_P")
_T = TypeVar("_T")


def awaited(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a method of a session, or with one, return a coroutine where its client's methods do."""

    @wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        run = partial(method, *args, **kwargs)
        is_awaited = any(getattr(it, "is_awaited", False) for it in (*args, *kwargs.values()))
        return in_thread(run) if is_awaited else run()

    return call


async def in_thread(call: Call, stop: Call | None = None, abort: Call | None = None) -> Any:
    """Make a call in a thread, and wait for it while the loop goes on.

    If the waiting task is cancelled, calls `stop`, if there is one, and still waits for the call. If
    it is cancelled again, calls `abort` and waits no longer.
    """
    within = partial(contextvars.copy_context().run, call)
    work = asyncio.wrap_future(run_in_thread(within, "jobrunner-awaited"))
    work.add_done_callback(lambda it: it.cancelled() or it.exception())  # nobody may be left to ask
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        try:
            if stop is not None:
                stop()
                await asyncio.wait((work,))
        except asyncio.CancelledError:
            if abort is not None:
                run_in_thread(abort, "jobrunner-abort")
        raise
