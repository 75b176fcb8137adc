"""Signals that tell a run to stop: once, and it ends in order; twice, and it ends now."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

AGAIN_SECONDS = 1.0


class TerminatedError(KeyboardInterrupt):
    """SIGTERM that cannot wait any longer: ends a run at once, as a second Ctrl-C does."""


@contextlib.contextmanager
def stop_on_signals(
    request: Callable[[str], None], grace_seconds: float | None = None
) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into requests to stop, while the block runs.

    Parameters
    ----------
    request : callable
        Told ``"SIGINT"`` or ``"SIGTERM"`` at the first signal, in the main thread, wherever it
        is: it must not raise or take a lock.
    grace_seconds : float, optional
        How long after SIGTERM the block may take. None: as long as it takes.

    Raises
    ------
    KeyboardInterrupt
        In the block, at the second SIGINT.
    TerminatedError
        In the block, at the second SIGTERM and when the grace period ends.

    Notes
    -----
    Does nothing outside the main thread, and leaves a signal alone that is ignored or that
    somebody else handles.
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
        """Call the handler again in the main thread, and wake it from whatever it waits for."""
        while not ended.wait(seconds):
            with gate:
                if ended.is_set():  # or the signal would find nobody who handles it
                    return
                signal.pthread_kill(main.ident or 0, signal.SIGTERM)
            seconds = AGAIN_SECONDS  # an exception may be lost, as in a destructor

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
            is_over = True  # from here on nothing raises in between
    finally:
        is_over = True  # here too: a signal may have raised just before it was
        with gate:
            ended.set()
        for number in taken:
            signal.signal(number, before[number])
    for number in late:  # it came when the block had ended, and is for whoever comes next
        signal.raise_signal(number)


@contextlib.contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """Raise `TerminatedError` at SIGTERM, where no block of `stop_on_signals` has it."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TerminatedError

    stop.yields = True  # type: ignore[attr-defined]  # to a run inside the block
    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread, so not ours to handle
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
