"""Says how far a command is that takes long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import click

from jobrunner.texts import printable

TELL_SECONDS = 2.0
"""How often it is said."""


@contextlib.contextmanager
def told_while_slow(state: Callable[[], str]) -> Iterator[None]:
    """Say on stderr, every few seconds, how far the block is; another thread calls `state`."""
    has_ended = threading.Event()

    def tell() -> None:
        # Without a reader of stderr, nobody need be told any more.
        with contextlib.suppress(OSError, ValueError):
            while not has_ended.wait(TELL_SECONDS):
                click.echo(f"{printable(state(), kept='')} ...", err=True)

    teller = threading.Thread(target=tell, name="jobrunner-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        has_ended.set()
        teller.join()  # or its line could follow the result
