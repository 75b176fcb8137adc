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
    """A run's exclusive use of a checkpoint directory.

    Parameters
    ----------
    files : Files
    path : str
        The checkpoint directory.
    log : LogWriter
    nodes : sequence of str
        The nodes that the run saves.
    beat_seconds : float
        Interval of the heartbeat.

    Attributes
    ----------
    run : str
        A unique id.
    number : int
        Of its ``run`` entry, once taken.
    """

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
        self.number = -1
        self._heartbeat = Heartbeat(files, path, self.run, beat_seconds)
        self._probe: Probe | None = None

    def take(self, info: Any, patience: Patience, *, take_over: bool) -> None:
        """Append the ``run`` entry, unless another run is alive.

        Parameters
        ----------
        info : JSON
        patience : Patience
        take_over : bool
            Take the directory even from a run that is alive.

        Raises
        ------
        CommitConflictError
            Another run holds the directory.
        CheckpointWriteError, OSError
            The directory cannot be written.
        """
        seen: set[str] = set()

        def judge(state: State) -> None:
            if state.run is not None and not state.is_ended:
                if take_over and state.run.run in seen:
                    return  # it has only written meanwhile
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
        # The first heartbeat comes before the entry that makes others look for it.
        self._files.make_directories(self._path)
        self._heartbeat.start()
        try:
            self._files.prove_creation(self._heartbeat.directory)
            self.number = self._log.take(self.run, body, judge)
            self._heartbeat.restore()
        except BaseException:
            self._stop()
            raise
        # A run whose manager is dropped without `leave` must not look alive for ever.
        weakref.finalize(self, self._heartbeat.stop)

    def ask(self) -> Probe:
        """Write the probe that every worker must read and answer."""
        self._probe = Probe.ask(self._files, self._heartbeat.directory)
        return self._probe

    def check_answers(self, answers: Mapping[str, Any]) -> None:
        """Judge the workers' answers; see `Probe.check`."""
        if self._probe is None:
            raise DefinitionError("Call probe first: check_probe takes its answers.")
        self._probe.check(self._path, answers)

    def remove_traces_of_others(self) -> None:
        """Remove the heartbeats and probes of earlier runs.

        Those of a run that waits for the directory, or has just taken it over, stay.
        """
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
            logger.warning("Files of earlier runs could not be removed: %s: %s", runs, error)

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
