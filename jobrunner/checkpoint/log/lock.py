"""A run's lock on a checkpoint directory: take it, keep it alive, release it."""

from __future__ import annotations

import contextlib
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobrunner.checkpoint.log.entries import Holder
from jobrunner.checkpoint.log.heartbeat import (
    HEARTBEAT,
    RUNS_DIRECTORY,
    SILENT_BEATS,
    Heartbeat,
    Patience,
    Status,
    is_known_dead,
    own_process,
    read_beat,
)
from jobrunner.checkpoint.log.log_writer import LogWriter
from jobrunner.checkpoint.log.state import State
from jobrunner.checkpoint.storage import Files, join_path, others_may_write
from jobrunner.errors import CheckpointError, CheckpointWriteError, CommitConflictError
from jobrunner.names import LOG_DIRECTORY
from jobrunner.texts import get_logger

logger = get_logger(__name__)


class RunLock:
    """A run's lock on a checkpoint directory.

    `beat_seconds` is the interval of its heartbeat, `status` what that says of the run.
    """

    def __init__(
        self,
        files: Files,
        path: str,
        log: LogWriter,
        nodes: Sequence[str],
        beat_seconds: float,
        status: Callable[[], Status] | None = None,
    ) -> None:
        self._files = files
        self._path = path
        self._log = log
        self._beat_seconds = beat_seconds
        self.nodes = tuple(nodes)
        self.run = uuid.uuid4().hex
        self.number = -1  # of the run's entry, once the lock is taken
        self._former: Holder | None = None  # which had not ended when this run took the lock
        self._heartbeat = Heartbeat(files, path, self.run, beat_seconds, status)
        probe_path = join_path(self._heartbeat.directory, "probe")
        self.probe = Probe(files, path, probe_path, self.run.encode())

    def take(self, info: Any, patience: Patience, *, take_over: bool) -> None:
        """Append the ``run`` entry with `info` (JSON).

        Raises CommitConflictError if another run is alive, unless `take_over`, and
        CheckpointWriteError or OSError if the directory cannot be written.
        """
        fields = {
            "nodes": list(self.nodes),
            "info": info,
            "process": own_process(),
            "heartbeat_seconds": self._beat_seconds,
            "is_repair": self._log.repairs,
        }

        # It waits for a heartbeat, up to many seconds, in which others go on: the run that holds the
        # directory may append, or end, or a third one may take it. Then the log decides anew.
        def decide(state: State) -> Mapping[str, Any]:
            holder, number = state.holder, state.number
            if holder is None or state.is_ended:
                return fields
            if not take_over:
                refuse_if_alive(
                    self._files,
                    self._path,
                    holder,
                    patience,
                    lambda: self._log.refresh().number == number,
                )
            elif holder != self._former:  # else that run has only appended meanwhile
                logger.warning("Taking %s over from %s, as requested.", self._path, holder)
            self._former = holder
            return fields

        self._warn_of_others()
        # The heartbeat must exist before the entry, after which others look for it.
        self._files.make_directories(self._path)
        self._heartbeat.start()
        try:
            self._files.prove_creation(self._heartbeat.directory)
            self.number = self._log.take(self.run, decide)
            self._heartbeat.beat()  # another run may have removed the first as that of a dead one
        except BaseException:
            self._stop()
            raise
        # Without `leave`, the heartbeat stops when the manager is collected.
        weakref.finalize(self, self._heartbeat.stop)

    def prove_appending(self) -> None:
        """Check that the storage can append to files; raises OSError if not."""
        self._files.prove_appending(self._heartbeat.directory)

    def _warn_of_others(self) -> None:
        """Warn of a directory that everybody may write to."""
        log, runs = join_path(self._path, LOG_DIRECTORY), join_path(self._path, RUNS_DIRECTORY)
        for path in (self._path, log, runs):
            if others_may_write(path):
                logger.warning(
                    "Everybody may write to %s, and so change what the next run loads. Take the "
                    "right away: chmod -R o-w %s",
                    path,
                    self._path,
                )

    def remove_traces_of_others(self) -> None:
        """Remove the heartbeats of runs that have ended and of the run before, which was taken over.

        Other runs may wait for the directory, or have taken it over already.
        """
        runs = join_path(self._path, RUNS_DIRECTORY)
        former = "" if self._former is None else self._former.run
        try:
            for name in self._files.list_names(runs):
                process = read_beat(self._files, self._path, name).process
                # A heartbeat is replaced whole: a power loss has left one that names no process.
                is_over = not process.pid or is_known_dead(process, name)
                if name == former or (name != self.run and is_over):
                    self._files.remove_tree(join_path(runs, name))
        except OSError as error:
            logger.warning("Cannot remove the files of earlier runs in %s: %s", runs, error)

    def leave(self) -> None:
        """Stop the heartbeat and remove its files."""
        self._log.leave()
        self._stop()

    def _stop(self) -> None:
        self._heartbeat.stop()
        with contextlib.suppress(OSError):
            self._files.remove_tree(self._heartbeat.directory)


def refuse_if_alive(
    files: Files,
    path: str,
    holder: Holder,
    patience: Patience,
    still_holds: Callable[[], bool] = lambda: True,
) -> None:
    """Wait until it is clear whether the run that holds `path` is alive.

    `still_holds` reads the log again when the heartbeat disappears. Raises CommitConflictError if
    the run is alive.
    """
    if is_known_dead(holder.process, holder.run):
        logger.info("Taking %s over from %s, which has ended.", path, holder)
        return
    heartbeat = join_path(path, f"{RUNS_DIRECTORY}/{holder.run}/{HEARTBEAT}")
    silence_seconds = max(patience.silence_seconds, SILENT_BEATS * holder.heartbeat_seconds)
    pause_seconds = min(0.25, silence_seconds / 10)
    logger.warning(
        "%s is held by %s: waiting up to %g s for a heartbeat.", path, holder, silence_seconds
    )
    # A heartbeat that changes while we wait proves a run that is alive. When it was written, by a clock
    # that may be wrong, proves nothing.
    first = files.read(heartbeat)
    started = patience.clock()
    while patience.clock() - started < silence_seconds:
        patience.wait(pause_seconds)
        beat = files.read(heartbeat)
        if beat is None and first is not None:
            # The run has ended, or another has taken over: both remove the heartbeat.
            if not still_holds():
                return
            first = None
        if beat != first:
            raise CommitConflictError(
                f"{path} is held by another run ({holder}), which is alive. Wait until it has "
                f"ended, stop it, or choose another directory. To take the directory over: "
                f"take_over=True for the checkpoint manager, --take-over on the command line."
            )
    logger.warning(
        "Taking %s over from %s, silent for %g s. If it was only suspended, it records nothing more "
        "when it wakes, and ends with CommitConflictError.",
        path,
        holder,
        silence_seconds,
    )


@dataclass(frozen=True, slots=True)
class Probe:
    """Called on each worker, in a thread: checks that it may read and write the client's directory.

    Picklable. That the client reads what workers write is checked by the first commit.
    """

    files: Files
    directory: str
    path: str  # of the client's file
    token: bytes  # its content, which no other run has

    def __call__(self, workspaces: Mapping[str, Any]) -> CheckpointError | None:
        """Read the client's file; returns what is wrong with the directory."""
        try:
            content = self.files.read(self.path)
        except OSError as error:
            return CheckpointWriteError(
                f"{type(error).__name__}: {error}. Its user needs permission to read and write there."
            )
        if content != self.token:
            return CheckpointError(
                "it is not shared: expected to find the client's file there. Use a directory that "
                "the client and all workers share."
            )
        if not self.files.is_writable(self.directory):
            return CheckpointWriteError(
                "its user may not make directories for stores there. Give it permission to read "
                "and write there, or name another directory."
            )
        return None
