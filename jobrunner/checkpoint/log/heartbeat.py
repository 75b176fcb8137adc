"""The heartbeat of a run, which shows that it is alive without comparing clocks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from jobrunner.checkpoint.encoding import described
from jobrunner.checkpoint.log.entries import Natural, Process
from jobrunner.checkpoint.storage import Files
from jobrunner.texts import get_logger

logger = get_logger(__name__)

RUNS_DIRECTORY = "_runs"
HEARTBEAT = "heartbeat"
_THREAD_NAME = "jobrunner-heartbeat-{run}"
SILENT_BEATS = 5
_SILENCE_SECONDS = 15.0
_MOST_BYTES = 64 << 10
_STATUS_BYTES = 1000


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


class Status(msgspec.Struct, frozen=True):
    """How far a run is, as its heartbeat says."""

    epoch: Natural  # the last that ended
    num_ended: Natural  # epochs that this run has ended
    metrics: Mapping[str, float | None] = {}


class Beat(NamedTuple):
    """What the last heartbeat of a run says."""

    time: float = 0.0
    """When it was, as a Unix time by the run's clock; 0 if that is not known."""
    status: Status | None = None

    @property
    def seconds_ago(self) -> float:
        """How old it is, as the run's clock and this machine's say, which may differ."""
        return time.time() - self.time


def read_beat(files: Files, path: str, run: str) -> Beat:
    """The last heartbeat of a run in a checkpoint directory."""
    at = os.path.join(path, RUNS_DIRECTORY, run, HEARTBEAT)
    data = files.read(at, _MOST_BYTES) or b""
    digits, _, text = data.partition(b"\n")[0].partition(b" ")
    status = None
    with contextlib.suppress(ValueError, RecursionError):  # those of earlier versions have none
        status = msgspec.json.decode(text, type=Status)
    return Beat(int(digits) / 1e9 if len(digits) == 20 and digits.isdigit() else 0.0, status)


def may_live(silent_seconds: float, process: Process | None, run: str, beat_seconds: float) -> bool:
    """Whether a run that has not ended, and whose last heartbeat is so old, may be alive."""
    if is_known_dead(process, run):
        return False
    return silent_seconds < max(_SILENCE_SECONDS, SILENT_BEATS * beat_seconds)


def _encode(ask: Callable[[], Status]) -> bytes:
    """The status as JSON, always of the same length; without its last metrics if it would be longer.

    Empty if a metric is no JSON number, or its name no JSON: the run is alive all the same.
    """
    data = b""
    with contextlib.suppress(ValueError, ArithmeticError):
        status = ask()
        while len(data := msgspec.json.encode(status)) > _STATUS_BYTES:
            fewer = dict([*status.metrics.items()][: len(status.metrics) // 2])
            status = msgspec.structs.replace(status, metrics=fewer)
    return data.ljust(_STATUS_BYTES)


def is_left_behind(files: Files, directory: str) -> bool:
    """Whether the run that made a heartbeat's directory has certainly ended, or never began."""
    data = files.read(os.path.join(directory, HEARTBEAT))
    return not data or is_known_dead(read_process(data), os.path.basename(directory))


def read_process(data: bytes) -> Process | None:
    """The process that wrote a heartbeat; None if the file is damaged."""
    with contextlib.suppress(ValueError, RecursionError):
        return msgspec.json.decode(data.partition(b"\n")[2], type=described(Process))
    return None


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

    silence_seconds: float = (
        _SILENCE_SECONDS  # a run without a heartbeat for this long counts as dead
    )
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep


class Heartbeat:
    """Writes a file at an interval, from its own thread, while a run is alive.

    `status`, which that thread calls, says how far the run is.
    """

    def __init__(
        self,
        files: Files,
        path: str,
        run: str,
        interval_seconds: float,
        status: Callable[[], Status] | None = None,
    ) -> None:
        self._files = files
        self.directory = os.path.join(path, RUNS_DIRECTORY, run)
        self._path = os.path.join(self.directory, HEARTBEAT)
        self._interval_seconds = interval_seconds
        self._process = json.dumps(msgspec.to_builtins(own_process())).encode()
        self._status = status
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
            except Exception as error:  # whatever it is, the run is alive
                logger.warning("Cannot write the heartbeat in %s: %s", self.directory, error)

    def _write(self) -> None:
        # The process has a line of its own, where all versions look for it.
        status = b"" if self._status is None else b" " + _encode(self._status)
        data = b"%020d%s\n%s" % (time.time_ns(), status, self._process)
        try:
            self._files.put(self._path, data)
        except FileNotFoundError:
            # Another run may have removed the directory before it contained a heartbeat.
            self._files.make_directories(self.directory)
            self._files.put(self._path, data)
