"""A run's lock on a checkpoint directory: take it, keep it alive, probe it, release it."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jobrunner.checkpoint.log.entries import Holder, RunEntry
from jobrunner.checkpoint.log.heartbeat import (
    HEARTBEAT,
    RUNS_DIRECTORY,
    SILENT_BEATS,
    Heartbeat,
    Patience,
    is_known_dead,
    is_left_behind,
    own_process,
)
from jobrunner.checkpoint.log.shared_probe import Probe
from jobrunner.checkpoint.log.state import State
from jobrunner.checkpoint.log.writer import LogWriter
from jobrunner.checkpoint.storage import Files
from jobrunner.errors import CheckpointError, CommitConflictError

logger = logging.getLogger(__name__)


class RunLock:
    """A run's lock on a checkpoint directory; `beat_seconds` is the interval of its heartbeat."""

    def __init__(
        self,
        files: Files,
        path: str,
        log: LogWriter,
        nodes: Sequence[str],
        beat_seconds: float,
    ) -> None:
        self._files = files
        self._path = path
        self._log = log
        self._beat_seconds = beat_seconds
        self.nodes = tuple(nodes)
        self.run = uuid.uuid4().hex
        self.number = -1  # of the run's entry, once the lock is taken
        self._heartbeat = Heartbeat(files, path, self.run, beat_seconds)
        self.probe = Probe(files, self._heartbeat.directory, self.run.encode())

    def take(self, info: Any, patience: Patience, *, take_over: bool) -> None:
        """Append the ``run`` entry with `info` (JSON), unless another run is alive.

        Raises
        ------
        CommitConflictError
            Another run is alive; `take_over` takes the lock from it.
        CheckpointWriteError, OSError
            The directory cannot be written.
        """
        overruled: set[str] = set()

        def judge(state: State) -> None:
            holder, number = state.run, state.number
            if holder is None or state.is_ended:
                return
            if not take_over:
                refuse_if_alive(
                    self._files,
                    self._path,
                    holder,
                    patience,
                    lambda: self._log.refresh().number == number,
                )
            elif holder.run not in overruled:  # else it is the same run, which has appended
                overruled.add(holder.run)
                logger.warning("Taking %s over from %s, as requested.", self._path, holder)

        body = {
            "nodes": list(self.nodes),
            "info": info,
            "process": own_process(),
            "heartbeat_seconds": self._beat_seconds,
        }
        # The heartbeat must exist before the entry, after which others look for it.
        self._files.make_directories(self._path)
        self._heartbeat.start()
        try:
            self._files.prove_creation(self._heartbeat.directory)
            self.number = self._log.take(self.run, body, judge)
            self._heartbeat.restore()
        except BaseException:
            self._stop()
            raise
        # Without `leave`, the heartbeat stops when the manager is collected.
        weakref.finalize(self, self._heartbeat.stop)

    def remove_traces_of_others(self) -> None:
        """Remove the heartbeats and probes of earlier runs, not of one that waits or is later."""
        runs = os.path.join(self._path, RUNS_DIRECTORY)
        try:
            others = [name for name in self._files.list_names(runs) if name != self.run]
            earlier: set[str] | None = None
            for name in others:
                path = os.path.join(runs, name)
                if not is_left_behind(self._files, path):
                    earlier = self._earlier_runs() if earlier is None else earlier
                    if name not in earlier:
                        continue
                self._files.remove_tree(path)
        except (OSError, CheckpointError) as error:
            logger.warning("Cannot remove the files of earlier runs in %s: %s", runs, error)

    def _earlier_runs(self) -> set[str]:
        found = set()
        for entry in self._log.read_entries():
            if entry.number >= self.number:
                break
            if isinstance(entry, RunEntry):
                found.add(entry.run)
        return found

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
    heartbeat = os.path.join(path, RUNS_DIRECTORY, holder.run, HEARTBEAT)
    silence_seconds = max(patience.silence_seconds, SILENT_BEATS * holder.heartbeat_seconds)
    pause_seconds = min(0.25, silence_seconds / 10)
    logger.warning(
        "%s is held by %s: waiting up to %g s for a heartbeat.", path, holder, silence_seconds
    )
    first = files.read_if_there(heartbeat)
    started = patience.clock()
    while patience.clock() - started < silence_seconds:
        patience.wait(pause_seconds)
        beat = files.read_if_there(heartbeat)
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
    logger.warning("Taking %s over from %s, silent for %g s.", path, holder, silence_seconds)
