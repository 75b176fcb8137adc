"""The heartbeat of a run, which shows that it is alive without comparing clocks."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import psutil

from jobrunner.checkpoint.log.entries import Natural, Process
from jobrunner.checkpoint.storage import Files, join_path
from jobrunner.texts import get_logger

logger = get_logger(__name__)

RUNS_DIRECTORY = "_runs"
HEARTBEAT = "heartbeat"
SILENT_BEATS = 5
_THREAD_NAME = "jobrunner-heartbeat-{run}"
_SILENCE_SECONDS = 15.0
_MOST_BYTES = 64 << 10
_STATUS_BYTES = 16_000
_CORRECTION_SECONDS = 3


def own_process() -> Process:
    """Identify this process, also after it has ended."""
    # Two containers may have one host name and one boot, and each its own process 7: without the
    # namespace, one would take over from the other while that lives.
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return Process(
        host=socket.gethostname(),
        boot=str(round(psutil.boot_time())),
        namespace=namespace,
        pid=os.getpid(),
        started=_start_of(os.getpid()),
    )


def is_known_dead(process: Process, run: str) -> bool:
    """Whether a process has certainly ended, or `run` within this process."""
    own = own_process()
    if not process.pid:
        return False
    if (process.host, process.boot, process.namespace) != (own.host, own.boot, own.namespace):
        return False  # another machine or container: its processes cannot be seen
    try:
        # The PID may have been given again. Clocks are corrected by a second or so meanwhile.
        if abs(float(_start_of(process.pid)) - float(process.started)) > _CORRECTION_SECONDS:
            return True
        if process.pid == own.pid:
            name = _THREAD_NAME.format(run=run)
            return all(thread.name != name for thread in threading.enumerate())
        return bool(psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, ValueError):
        return False  # the system does not tell, or the heartbeat


def _start_of(pid: int) -> str:
    """When a process started, in seconds since its machine did.

    Both times follow the clock when that is set, so only their difference stays the same.
    """
    return f"{psutil.Process(pid).create_time() - psutil.boot_time():.2f}"


class Status(msgspec.Struct, frozen=True):
    """How far a run is, as its heartbeat says."""

    epoch: Natural  # the last that ended
    num_ended: Natural  # epochs that this run has ended
    metrics: Mapping[str, float | None] = {}


class Beat(msgspec.Struct, frozen=True):
    """What the last heartbeat of a run says, and its file."""

    time: float = 0.0
    """When it was, as a Unix time by the run's clock; 0 if that is not known."""
    process: Process = Process()
    status: Status | None = None

    @property
    def seconds_ago(self) -> float:
        """How old it is, as the run's clock and this machine's say, which may differ."""
        return time.time() - self.time


_decoder = msgspec.json.Decoder(Beat)


def read_beat(files: Files, path: str, run: str) -> Beat:
    """The last heartbeat of a run in a checkpoint directory; an unknown one if there is none."""
    with contextlib.suppress(ValueError, RecursionError):
        return _decoder.decode(files.read(_beat_path(path, run), _MOST_BYTES) or b"")
    return Beat()


def _beat_path(path: str, run: str) -> str:
    return join_path(path, f"{RUNS_DIRECTORY}/{run}/{HEARTBEAT}")


def may_live(silent_seconds: float, process: Process, run: str, beat_seconds: float) -> bool:
    """Whether a run that has not ended, and whose last heartbeat is so old, may be alive."""
    if is_known_dead(process, run):
        return False
    return silent_seconds < max(_SILENCE_SECONDS, SILENT_BEATS * beat_seconds)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a heartbeat, and by which clock."""

    silence_seconds: float = _SILENCE_SECONDS
    """A run without a heartbeat for this long counts as dead."""
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
        self.directory = join_path(path, f"{RUNS_DIRECTORY}/{run}")
        self._path = _beat_path(path, run)
        self._interval_seconds = interval_seconds
        self._process = own_process()
        self._status = status
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._beat_on, name=_THREAD_NAME.format(run=run), daemon=True
        )

    def start(self) -> None:
        """Write the first heartbeat, and start the thread; raises OSError if it cannot write."""
        self.beat()
        self._thread.start()

    def stop(self) -> None:
        """Stop writing; removes nothing."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _beat_on(self) -> None:
        while not self._stopped.wait(self._interval_seconds):
            try:
                self.beat()
            except Exception as error:  # whatever it is, the run is alive
                logger.warning("Cannot write the heartbeat in %s: %s", self.directory, error)

    def beat(self) -> None:
        """Write a heartbeat."""
        # A run that cleans up may remove the directory before it contains a heartbeat: a directory
        # without one looks like that of a run that never began.
        self._files.make_directories(self.directory)
        beat = Beat(time.time(), self._process, self._ask_status())
        self._files.put(self._path, msgspec.json.encode(beat))

    def _ask_status(self) -> Status | None:
        """How far the run is, without metrics if they do not fit; None if JSON cannot say it."""
        if self._status is None:
            return None
        # Whatever the job reported, the run is alive.
        with contextlib.suppress(ValueError, ArithmeticError):
            status = self._status()
            if len(msgspec.json.encode(status)) > _STATUS_BYTES:
                status = msgspec.structs.replace(status, metrics={})
            return status
        return None
