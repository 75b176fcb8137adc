"""Whether the run that holds a directory is still alive, without comparing clocks."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jobrunner.checkpoint.log.state import Entry
from jobrunner.checkpoint.log.writer import describe_holder
from jobrunner.checkpoint.storage import PosixFiles
from jobrunner.errors import CommitConflictError

logger = logging.getLogger(__name__)

RUNS_DIRECTORY = "_runs"
HEARTBEAT = "heartbeat"
_THREAD_NAME = "jobrunner-heartbeat-{run}"
_SILENT_BEATS = 5


def own_process() -> dict[str, Any]:
    """What tells this process from every other, before and after: JSON."""
    return {
        "host": socket.gethostname(),
        "boot": _read("/proc/sys/kernel/random/boot_id"),
        "namespace": _read_link("/proc/self/ns/pid"),
        "pid": os.getpid(),
        "started": _start_of(os.getpid()),
    }


def is_known_dead(process: Mapping[str, Any], run: str) -> bool:
    """Whether a process is certainly gone, or no longer does what it did for `run`.

    Parameters
    ----------
    process : mapping
        What `own_process` gave in that process.
    run : str
        The run that it held a directory for.
    """
    own = own_process()
    if any(process.get(key) != own[key] for key in ("host", "boot", "namespace")):
        return False  # another machine, or another container: its processes cannot be seen
    pid = process.get("pid")
    if not isinstance(pid, int):
        return False
    if (pid, process.get("started")) == (own["pid"], own["started"]):
        name = _THREAD_NAME.format(run=run)
        return all(thread.name != name for thread in threading.enumerate())
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it exists, and is somebody else's
    started = _start_of(pid)
    return started is not None and started != process.get("started")


def left_by_the_dead(files: PosixFiles, directory: str) -> bool:
    """Whether whoever made a heartbeat's directory is certainly gone, or never got to beat."""
    beat = files.read_if_there(os.path.join(directory, HEARTBEAT))
    if not beat:
        return True
    try:
        process = json.loads(beat.partition(b"\n")[2])
    except ValueError:
        return False
    return isinstance(process, dict) and is_known_dead(process, os.path.basename(directory))


def _start_of(pid: int) -> str | None:
    """When the process started, in the kernel's words; "gone" if it only waits to be reaped."""
    text = _read(f"/proc/{pid}/stat")
    if text is None:
        return None
    # The second field is the program's name in parentheses, and may hold anything.
    fields = text.rpartition(")")[2].split()
    return "gone" if fields[0] in "ZX" else fields[19]


def _read(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return None


def _read_link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a newcomer waits for a sign of life, and by which clock.

    Parameters
    ----------
    silence_seconds : float
        Without a heartbeat for so long, a run counts as dead.
    clock : callable
        Seconds that only grow.
    wait : callable
        Waits so many seconds.
    """

    silence_seconds: float = 15.0
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep


def refuse_if_alive(
    files: PosixFiles,
    path: str,
    run: Entry,
    patience: Patience,
    take_over: bool,
    still_holds: Callable[[], bool] = lambda: True,
) -> None:
    """Wait until it is clear whether the run that holds `path` is alive, or no longer holds it.

    Parameters
    ----------
    files : PosixFiles
    path : str
    run : Entry
        Its ``run`` entry.
    patience : Patience
    take_over : bool
        Ask nobody.
    still_holds : callable
        Looks at the log again; asked when the heartbeat is gone.

    Raises
    ------
    CommitConflictError
        It is.
    """
    who = describe_holder(run)
    if take_over:
        logger.warning("%s is taken over from %s, as told.", path, who)
        return
    if is_known_dead(run.get("process", {}), run["run"]):
        logger.info("%s is taken over from %s, which is gone.", path, who)
        return
    heartbeat = os.path.join(path, RUNS_DIRECTORY, run["run"], HEARTBEAT)
    beat_seconds = float(run.get("heartbeat_seconds", 0))
    silence_seconds = max(patience.silence_seconds, _SILENT_BEATS * beat_seconds)
    pause_seconds = min(0.25, silence_seconds / 10)
    logger.warning(
        "%s is held by %s: waiting, for at most %g s, for a sign of life.",
        path,
        who,
        silence_seconds,
    )
    first = files.read_if_there(heartbeat)
    started = patience.clock()
    while patience.clock() - started < silence_seconds:
        patience.wait(pause_seconds)
        beat = files.read_if_there(heartbeat)
        if beat is None and first is not None:
            # It has left, or was followed by another: no sign of life, whatever it was.
            if not still_holds():
                return
            first = None
        if beat != first:
            raise CommitConflictError(
                f"{path} is held by another run ({who}), and it is alive. Wait until it has "
                f"ended, or stop it, or choose another directory. To take the directory away "
                f"from it: take_over=True for the checkpoint manager, --take-over on the command "
                f"line."
            )
    logger.warning("%s is taken over from %s, silent for %g s.", path, who, silence_seconds)


class Heartbeat:
    """Writes a sign of life at an interval, from a thread of its own.

    Parameters
    ----------
    files : PosixFiles
    path : str
        The checkpoint directory.
    run : str
    interval_seconds : float
    """

    def __init__(self, files: PosixFiles, path: str, run: str, interval_seconds: float) -> None:
        self._files = files
        self.directory = os.path.join(path, RUNS_DIRECTORY, run)
        self._interval_seconds = interval_seconds
        self._process = json.dumps(own_process()).encode()
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, name=_THREAD_NAME.format(run=run), daemon=True
        )

    def start(self) -> None:
        """Write the first sign of life, and go on from a thread.

        Raises
        ------
        OSError
            It cannot be written.
        """
        self._files.make_directories(self.directory)
        self._show(0)
        self._thread.start()

    def restore(self) -> None:
        """Make the directory again, if somebody took it for a dead run's."""
        if not self._files.is_taken(os.path.join(self.directory, HEARTBEAT)):
            self._make_again(0)

    def stop(self) -> None:
        """Give no more signs; nothing is removed."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _beat(self) -> None:
        count = 0
        while not self._stopped.wait(self._interval_seconds):
            count += 1
            try:
                self._show(count)
            except OSError as error:
                logger.warning("No sign of life could be written: %s", error)

    def _show(self, count: int) -> None:
        try:
            self._write(count)
        except FileNotFoundError:
            # Whoever cleans up may have looked before there was a heartbeat.
            self._make_again(count)

    def _make_again(self, count: int) -> None:
        self._files.make_directories(self.directory)
        self._write(count)

    def _write(self, count: int) -> None:
        # The count alone changes, and keeps its length: a file that is read meanwhile is whole.
        path = os.path.join(self.directory, HEARTBEAT)
        self._files.overwrite(path, b"%020d\n" % count + self._process)
