"""Warn of a disk that will soon be full: short epochs write thousands of files a second."""

from __future__ import annotations

import math
import os
import time

LOOK_SECONDS = 60.0
"""Between two looks."""

SHORT_SECONDS = 600.0
"""What is free is short if it lasts no longer at the present pace."""


class DiskWatch:
    """Compares how much is free at two times. Warns once; one thread looks, another one warns."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._looked = time.monotonic()
        self._free: dict[str, int] = {}
        self._warning = ""

    def look(self) -> None:
        """Look if it is time to."""
        now = time.monotonic()
        seconds = now - self._looked
        if seconds < LOOK_SECONDS:
            return
        try:
            disk = os.statvfs(self._path)
        except OSError:  # a save says so; and an object store has no disk
            return
        before, self._looked = self._free, now
        self._free = {"bytes": disk.f_bavail * disk.f_frsize, "names of files": disk.f_favail}
        for resource, free in self._free.items():
            used = before.get(resource, 0) - free
            if used > 0 and free * seconds < SHORT_SECONDS * used:
                self._looked = math.inf
                self._warning = (
                    f"The file system of {self._path} has free {resource} for "
                    f"{free * seconds / used:.0f} s more at the present pace. Save less often "
                    f"(SaveEvery(seconds=10), --save-every 10s), or keep less (KeepLast(n), "
                    f"--keep-last N)."
                )
                return

    def take_warning(self) -> str:
        """Return what is to be said, once; empty if there is nothing."""
        warning, self._warning = self._warning, ""
        return warning
