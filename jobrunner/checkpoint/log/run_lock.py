"""A run's lock on a checkpoint directory: take it, keep it alive, probe it, release it."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from jobrunner.checkpoint.log.entries import RunEntry
from jobrunner.checkpoint.log.heartbeat import (
    RUNS_DIRECTORY,
    Heartbeat,
    Patience,
    is_left_behind,
    own_process,
    refuse_if_alive,
)
from jobrunner.checkpoint.log.shared_probe import Probe
from jobrunner.checkpoint.log.state import State
from jobrunner.checkpoint.log.writer import LogWriter
from jobrunner.checkpoint.storage import Files
from jobrunner.errors import CheckpointError, DefinitionError

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
        self._probe: Probe | None = None

    def take(self, info: Any, patience: Patience, *, take_over: bool) -> None:
        """Append the ``run`` entry with `info` (JSON), unless another run is alive.

        Raises
        ------
        CommitConflictError
            Another run is alive; `take_over` takes the lock from it.
        CheckpointWriteError, OSError
            The directory cannot be written.
        """
        seen: set[str] = set()

        def judge(state: State) -> None:
            if state.run is not None and not state.is_ended:
                if take_over and state.run.run in seen:
                    return  # the same run, which has appended meanwhile
                seen.add(state.run.run)
                number = state.number

                def still_holds() -> bool:
                    return self._log.refresh().number == number

                refuse_if_alive(
                    self._files, self._path, state.run, patience, take_over, still_holds
                )

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

    def ask(self) -> Probe:
        """Write the file that every worker must read, and return the call for the workers."""
        self._probe = Probe.ask(self._files, self._heartbeat.directory)
        return self._probe

    def check_answers(self, answers: Mapping[str, Any]) -> None:
        """Judge the workers' answers; see `Probe.check`."""
        if self._probe is None:
            raise DefinitionError("Call probe first: check_probe takes its answers.")
        self._probe.check(self._path, answers)

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
