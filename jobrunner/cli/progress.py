"""Says what a command does that takes long, and how far it is."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import click

from jobrunner.texts import printable

TELL_SECONDS = 2.0
"""How often it is said, at most."""


@contextlib.contextmanager
def told_while_slow(state: Callable[[], str]) -> Iterator[None]:
    """Say on stderr how far the block is, every few seconds if that is new.

    Another thread calls `state`.
    """
    has_ended = threading.Event()

    def tell() -> None:
        said = ""
        # Without a reader of stderr, nobody need be told any more.
        with contextlib.suppress(OSError, ValueError):
            while not has_ended.wait(TELL_SECONDS):
                text = printable(state(), kept="")
                if text != said:
                    click.echo(f"{text} ...", err=True)
                    said = text

    teller = threading.Thread(target=tell, name="jobrunner-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        has_ended.set()
        teller.join()  # or its line could follow the result
