"""Stop a run on SIGINT or SIGTERM: after its epoch at the first signal, at once at the second."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

AGAIN_SECONDS = 1.0


class TerminatedError(KeyboardInterrupt):
    """SIGTERM that ends a run at once, as a second Ctrl-C does."""


@contextlib.contextmanager
def stop_on_signals(
    request: Callable[[str], None], grace_seconds: float | None = None
) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into requests to stop while the block runs.

    Parameters
    ----------
    request : callable
        Called with ``"SIGINT"`` or ``"SIGTERM"`` at the first signal, in the signal handler: it
        must not raise or take a lock.
    grace_seconds : float, optional
        How long the block may go on after SIGTERM. None: without limit.

    Raises
    ------
    KeyboardInterrupt
        In the block, at the second SIGINT.
    TerminatedError
        In the block, at the second SIGTERM and when the grace period ends.

    Notes
    -----
    Does nothing outside the main thread. A signal that is ignored or has another handler is left
    as it is.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main:
        yield
        return
    seen: set[int] = set()
    late: list[int] = []
    is_over = False
    ended = threading.Event()
    gate = threading.Lock()

    def press(seconds: float) -> None:
        """Raise SIGTERM again until the block ends; it also wakes a main thread that waits."""
        while not ended.wait(seconds):
            with gate:
                if ended.is_set():  # by now the default handler would end the process
                    return
                signal.pthread_kill(main.ident or 0, signal.SIGTERM)
            seconds = AGAIN_SECONDS  # the exception may be lost, for example in a destructor

    def handle(number: int, frame: FrameType | None) -> None:
        is_first = number not in seen
        seen.add(number)
        if is_over:
            if is_first:
                late.append(number)
            return
        if number == signal.SIGINT:
            if not is_first:
                raise KeyboardInterrupt
        elif not is_first:
            raise TerminatedError
        elif grace_seconds is not None:
            threading.Thread(
                target=press, args=(grace_seconds,), name="jobrunner-grace", daemon=True
            ).start()
        request(signal.Signals(number).name)

    ours: dict[int, object] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    before = {number: signal.getsignal(number) for number in ours}
    taken = [n for n in ours if before[n] is ours[n] or getattr(before[n], "yields", False)]
    for number in taken:
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
        for number in taken:
            signal.signal(number, before[number])
    for number in late:  # it arrived after the block: for the handler restored above
        signal.raise_signal(number)


@contextlib.contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """Raise `TerminatedError` at SIGTERM, unless a `stop_on_signals` block handles it."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TerminatedError

    stop.yields = True  # type: ignore[attr-defined]  # `stop_on_signals` may replace it
    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
