"""The heartbeat of a run, which shows that it is alive without comparing clocks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from jobrunner.checkpoint.encoding import described
from jobrunner.checkpoint.log.entries import Process
from jobrunner.checkpoint.storage import Files
from jobrunner.texts import get_logger

logger = get_logger(__name__)

RUNS_DIRECTORY = "_runs"
HEARTBEAT = "heartbeat"
_THREAD_NAME = "jobrunner-heartbeat-{run}"
SILENT_BEATS = 5


def own_process() -> Process:
    """Identify this process, also after it has ended."""
    return Process(
        host=socket.gethostname(),
        boot=_read("/proc/sys/kernel/random/boot_id"),
        namespace=_read_link("/proc/self/ns/pid"),
        pid=os.getpid(),
        started=_start_of(os.getpid()),
    )


def is_known_dead(process: Process | None, run: str) -> bool:
    """Whether a process has certainly ended, or `run` within this process."""
    own = own_process()
    if process is None or process.pid is None:
        return False
    if (process.host, process.boot, process.namespace) != (own.host, own.boot, own.namespace):
        return False  # another machine or container: its processes cannot be seen
    if (process.pid, process.started) == (own.pid, own.started):
        name = _THREAD_NAME.format(run=run)
        return all(thread.name != name for thread in threading.enumerate())
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it exists, under another user
    started = _start_of(process.pid)
    return started is not None and started != process.started


def is_left_behind(files: Files, directory: str) -> bool:
    """Whether the run that made a heartbeat's directory has certainly ended, or never began."""
    data = files.read_if_there(os.path.join(directory, HEARTBEAT))
    return not data or is_known_dead(read_process(data), os.path.basename(directory))


def read_process(data: bytes) -> Process | None:
    """The process that wrote a heartbeat; None if the file is damaged."""
    with contextlib.suppress(ValueError, RecursionError):
        return msgspec.json.decode(data.partition(b"\n")[2], type=described(Process))
    return None


def last_beat(files: Files, path: str, run: str) -> float:
    """When a run last showed that it is alive, as a Unix time; 0 if that is not known."""
    data = files.read_if_there(os.path.join(path, RUNS_DIRECTORY, run, HEARTBEAT)) or b""
    digits = data.partition(b"\n")[0]
    return int(digits) / 1e9 if len(digits) == 20 and digits.isdigit() else 0.0


def _start_of(pid: int) -> str | None:
    """When the process started, as the kernel writes it; "gone" for a zombie."""
    text = _read(f"/proc/{pid}/stat")
    if text is None:
        return None
    # The second field is the program's name in parentheses, which may contain any character.
    fields = text.rpartition(")")[2].split()
    return "gone" if fields[0] in "ZX" else fields[19]


def _read(path: str) -> str | None:
    with contextlib.suppress(OSError), open(path) as file:
        return file.read().strip()
    return None


def _read_link(path: str) -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return None


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a heartbeat, and by which clock."""

    silence_seconds: float = 15.0  # a run without a heartbeat for this long counts as dead
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep


class Heartbeat:
    """Writes a file at an interval, from its own thread, while a run is alive."""

    def __init__(self, files: Files, path: str, run: str, interval_seconds: float) -> None:
        self._files = files
        self.directory = os.path.join(path, RUNS_DIRECTORY, run)
        self._path = os.path.join(self.directory, HEARTBEAT)
        self._interval_seconds = interval_seconds
        self._process = json.dumps(msgspec.to_builtins(own_process())).encode()
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, name=_THREAD_NAME.format(run=run), daemon=True
        )

    def start(self) -> None:
        """Write the first heartbeat, and start the thread; raises OSError if it cannot write."""
        self._files.make_directories(self.directory)
        self._write()
        self._thread.start()

    def restore(self) -> None:
        """Write the heartbeat again if a process removed it as that of a dead run."""
        if not self._files.is_taken(self._path):
            self._write()

    def stop(self) -> None:
        """Stop writing; removes nothing."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _beat(self) -> None:
        while not self._stopped.wait(self._interval_seconds):
            try:
                self._write()
            except OSError as error:
                logger.warning("Cannot write the heartbeat in %s: %s", self.directory, error)

    def _write(self) -> None:
        # The length never changes: readers never see a partial file.
        data = b"%020d\n" % time.time_ns() + self._process
        try:
            self._files.overwrite(self._path, data)
        except FileNotFoundError:
            # Another run may have removed the directory before it contained a heartbeat.
            self._files.make_directories(self.directory)
            self._files.overwrite(self._path, data)
