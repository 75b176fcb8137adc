"""Sees what a process does while it reads a mutant: code that runs, files outside, time, memory."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.mutants.mutations import CANARY

SECONDS = 2.0
"""Of processor time; five times as long by the clock, since other programs share the machine."""
MEMORY_BYTES = 256 << 20

_CODE = {
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen"),
    *("pickle.find_class", "ctypes.dlopen", "code.__new__", "socket.connect", "socket.bind"),
}
_NEVER = {CANARY, "antigravity", "this", "idlelib", "turtle", "turtledemo", "pty"}
_WRITES = {
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "os.chown", "os.utime", "shutil.rmtree", "shutil.move", "os.setxattr"),
}
_IN_OPEN, _IN_ACCESS, _IN_DIRECTORY = 0x20, 0x1, 0x40000000
_IN_CHANGE = 0x2 | 0x4 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800


class TimeIsUpError(BaseException):
    """Not an `Exception`: nothing catches it."""


class Watch:
    """Watches a process from now on; `canary` is a directory that nobody may touch."""

    def __init__(self, canary: Path) -> None:
        self.found: list[tuple[str, str]] = []
        self.roots: tuple[str, ...] = ()
        self._is_on = False
        places = {*sys.path, sys.prefix, sys.base_prefix} - {""}
        self._libraries = (
            *(str(Path(place).resolve()) for place in places),
            *("/proc/", "/dev/", "/sys/", "/usr/", "/etc/localtime", "/etc/mime", "/lib"),
        )
        libc = ctypes.CDLL(None, use_errno=True)
        self._inotify = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._add_watch = libc.inotify_add_watch
        self._canary = canary
        self.renew()
        sys.addaudithook(self._audit)
        signal.signal(signal.SIGALRM, self._end)
        signal.signal(signal.SIGPROF, self._end)

    def renew(self) -> None:
        """Make the canary new, and watch it."""
        shutil.rmtree(self._canary, ignore_errors=True)
        for name in ("file", "zarr.json", "heartbeat", "store/zarr.json", "store/w/c.0"):
            path = self._canary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"canary")
        for path in (self._canary, *sorted(self._canary.rglob("*"))):
            self._add_watch(self._inotify, os.fsencode(path), _IN_OPEN | _IN_ACCESS | _IN_CHANGE)
        list(self.touched())

    def _end(self, number: int, frame: Any) -> None:
        if self._is_on:
            _set_timers(0.5)  # again, if something has caught it
            raise TimeIsUpError

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & os.O_PATH:
                return  # it reads nothing; a copy looks so for checkpoints above its target
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            self._look(path, "write outside" if writes else "read outside", event)
        elif event in ("os.listdir", "os.scandir"):
            self._look(arguments[0], "read outside", event)
        elif event in _WRITES:
            for path in arguments[:2]:
                self._look(path, "write outside", event)
        elif event in _CODE:
            self.found.append(("code", f"{event} {arguments!r:.200}"))
        elif event == "import":
            if arguments[0].partition(".")[0] in _NEVER:
                self.found.append(("code", f"import {arguments[0]}"))
        elif event in ("exec", "compile") and not _is_ours():
            self.found.append(("code", f"{event} {arguments!r:.200}"))

    def _look(self, path: Any, what: str, event: str) -> None:
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str):
            return
        full = os.path.normpath(path)
        if not full.startswith("/"):
            is_outside = full.startswith("..")  # below an open directory
        else:
            allowed = self.roots if what == "write outside" else self.roots + self._libraries
            is_outside = not full.startswith(allowed)
        if is_outside:
            self.found.append((what, f"{event} {path}"))

    def touched(self) -> Iterator[tuple[str, str]]:
        """What was done to the canary."""
        try:
            data = os.read(self._inotify, 1 << 16)
        except BlockingIOError:
            return
        at = 0
        while at < len(data):
            _, mask, _, length = struct.unpack_from("iIII", data, at)
            name = data[at + 16 : at + 16 + length].rstrip(b"\0").decode(errors="replace")
            at += 16 + length
            if mask == _IN_OPEN | _IN_DIRECTORY:
                continue  # reads nothing; `os.fwalk` does so before it knows that it is a link
            yield ("write outside" if mask & _IN_CHANGE else "read outside"), f"canary {name}"

    @contextmanager
    def during(self, *roots: str) -> Iterator[list[tuple[str, str]]]:
        """Watch a block that may access only what is below `roots`; gives what is wrong."""
        self.found = []
        self.roots = roots
        peak = _peak_bytes()
        before = threading.active_count()
        _set_timers(SECONDS)
        self._is_on = True
        found = self.found
        try:
            yield found
        finally:
            self._is_on = False
            _set_timers(0)
        if _peak_bytes() - peak > MEMORY_BYTES // 2:
            found.append(("memory", f"{(_peak_bytes() - peak) >> 20} MiB more"))
        if threading.active_count() > before:
            for thread in threading.enumerate()[before:]:
                thread.join(1)
            if threading.active_count() > before + 1:
                found.append(("hang", f"threads {[it.name for it in threading.enumerate()]}"))
        touched = dict.fromkeys(self.touched())
        if touched:
            found += touched
            self.renew()


def _set_timers(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 5 * seconds)


def limit_memory() -> None:
    """Let this process have no more than a little more memory than it has now."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    limit = now + 2 * MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _is_ours() -> bool:
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith("<frozen importlib") or name.endswith("/msgspec/_utils.py"):
            return True  # the second evaluates annotations of classes
        frame = frame.f_back  # type: ignore[assignment]
    return False
