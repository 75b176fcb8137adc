"""Stop a run on SIGINT or SIGTERM: after its epoch at the first signal, at once at the second."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType

SEND_AGAIN_SECONDS = 1.0


class TerminatedError(KeyboardInterrupt):
    """A SIGTERM that ends a run at once, as a second Ctrl-C does."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise TerminatedError


_REPLACEABLE = (signal.default_int_handler, signal.SIG_DFL, _terminate)


@contextlib.contextmanager
def stop_on_signals(
    request: Callable[[str], None], grace_seconds: float | None = None
) -> Iterator[None]:
    """Turn the first SIGINT and the first SIGTERM into a request to stop while the block runs.

    The signal handler calls `request` with ``"SIGINT"`` or ``"SIGTERM"``, so it must not raise or
    take a lock. A second SIGINT raises `KeyboardInterrupt` in the block; a second SIGTERM, or the
    end of `grace_seconds` after the first, raises `TerminatedError`.

    Does nothing outside the main thread, nor for a signal that is ignored or has another handler.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main:
        yield
        return
    received: set[int] = set()
    is_over = False
    ended = threading.Event()
    gate = threading.Lock()

    def send_again(seconds: float) -> None:
        """Send SIGTERM again until the block ends; this also wakes a main thread that waits."""
        while not ended.wait(seconds):
            with gate:
                if ended.is_set():  # by now the default handler would end the process
                    return
                signal.pthread_kill(main.ident or 0, signal.SIGTERM)
            seconds = SEND_AGAIN_SECONDS  # the exception may be lost, for example in a destructor

    def handle(number: int, frame: FrameType | None) -> None:
        if is_over:
            return
        if number in received:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise TerminatedError
        received.add(number)
        if number == signal.SIGTERM and grace_seconds is not None:
            threading.Thread(
                target=send_again, args=(grace_seconds,), name="jobrunner-grace", daemon=True
            ).start()
        request(signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    replaced = [number for number, handler in before.items() if handler in _REPLACEABLE]
    for number in replaced:
        signal.signal(number, handle)
    try:
        try:
            yield
        finally:
            is_over = True  # from here on, the handler does not raise
    finally:
        is_over = True  # again: a signal may have raised just before the line above
        with gate:
            ended.set()
        for number in replaced:
            signal.signal(number, before[number])


@contextlib.contextmanager
def handled(name: str, handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle a signal in the block, where the system has it and this is the main thread."""
    try:
        before = signal.signal(getattr(signal, name), handler)
    except (AttributeError, ValueError):
        yield
        return
    try:
        yield
    finally:
        signal.signal(getattr(signal, name), before)


def terminated_as_interrupt() -> AbstractContextManager[None]:
    """Raise `TerminatedError` at SIGTERM, unless a `stop_on_signals` block handles it."""
    return handled("SIGTERM", _terminate)
