"""A run's use of its directory: takes it, sets epochs aside, releases it. Runs on the client."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jobrunner.checkpoint.commits import Commits, as_json, writing
from jobrunner.checkpoint.epochs import Epochs
from jobrunner.checkpoint.log import FileMetadataHandler, Patience, RunLock
from jobrunner.checkpoint.retention import Retention
from jobrunner.config import get_number
from jobrunner.errors import CheckpointError, DefinitionError
from jobrunner.names import check_distinct, check_name

logger = logging.getLogger(__name__)


class DirectoryRun:
    """A run that holds the directory, from `start` to `end`; one run at a time."""

    def __init__(
        self,
        recorded: Epochs,
        retention: Retention,
        commits: Commits,
        *,
        delete_on_success: bool,
        take_over: bool,
        patience: Patience | None,
    ) -> None:
        self.path = recorded.path
        self._recorded = recorded
        self._retention = retention
        self._commits = commits
        self._delete_on_success = delete_on_success
        self._take_over = take_over
        self._patience = patience

    def start(self, nodes: Sequence[str], info: Mapping[str, Any]) -> None:
        """Take the directory, with a ``run`` entry in the log, for a run that saves `nodes`.

        `info` is JSON for that entry; `Epochs.run_info` returns it. Stores that earlier runs did
        not commit are deleted in the background.

        Raises
        ------
        CommitConflictError
            Another run holds the directory and is alive.
        CheckpointWriteError
            The directory cannot be created or written.
        """
        recorded = self._recorded
        if self._commits.lock is not None:
            raise DefinitionError(
                f"This checkpoint manager already serves a run in {self.path}. Wait until that run "
                f"ends, or make another manager for another directory."
            )
        if recorded.only_node is not None and tuple(nodes) != (recorded.only_node,):
            raise DefinitionError(
                f"This CheckpointManager saves one node, {recorded.only_node!r}, and the job "
                f"checkpoints {', '.join(map(repr, nodes)) or 'none'}. Use a "
                f"MultiNodeCheckpointManager, or Job(nodes_to_checkpoint=[...])."
            )
        for node in nodes:
            check_name(node, "node")
        check_distinct(nodes, "node")
        recorded.handler.set_params(self.path, tuple(nodes))
        beat_seconds = _configured_seconds("checkpoint.heartbeat-seconds")
        patience = self._patience or Patience(_configured_seconds("checkpoint.silence-seconds"))
        lock = RunLock(recorded.files, self.path, recorded.log, nodes, beat_seconds)
        try:
            with writing(self.path, "the directory could not be locked"):
                lock.take(as_json(info, "info"), patience, take_over=self._take_over)
            self._commits.lock = lock
            recorded.mark_run(is_running=True)
            with writing(self.path, "leftovers of earlier runs could not be removed"):
                self._retention.start_run()
                lock.remove_traces_of_others()
                if isinstance(recorded.handler, FileMetadataHandler):
                    recorded.handler.remove_leftovers(lock.number)
        except BaseException:
            # Also on Ctrl-C: a run that did not begin must not look alive to the next one.
            if self._commits.lock is not None:
                self.end()
            else:
                lock.leave()
            raise

    def end(self) -> None:
        """Abandon open saves and release the directory, so that another run may take it at once.

        Every run calls this at its end, also after a failure. Raises nothing, and waits half a
        minute at most for deletions.
        """
        try:
            self._commits.abandon_all()
        finally:
            if self._commits.lock is not None:
                self._release(self._commits.lock)

    def _release(self, lock: RunLock) -> None:
        try:
            if not self._retention.sweeper.drain():
                logger.warning(
                    "%s: some stores are not deleted yet; the next run deletes them.", self.path
                )
            self._retention.sweeper.confirm()
            self._retention.append("end", {})
        except CheckpointError as error:
            logger.warning("%s: the end of the run could not be recorded: %s", self.path, error)
        finally:
            lock.leave()
            self._commits.lock = None
            self._recorded.mark_run(is_running=False)

    def probe(self) -> Callable[[Mapping[str, Any]], Any]:
        """Make the probe that shows whether workers share the directory; picklable.

        Call it on every worker with its workspaces, and pass the answers to `check_probe`.
        """
        with writing(self.path, "the probe for the workers could not be written"):
            probe = self._commits.held().probe
            probe.ask()
            return probe

    def check_probe(self, answers: Mapping[str, Any]) -> None:
        """Check the answers to `probe`, by address of the worker.

        Raises CheckpointError if a worker sees another directory under that path, and
        CheckpointWriteError if it cannot write there, or if its file cannot be read here.
        """
        self._commits.held().probe.check(self.path, answers)

    def rewind(self, epoch: int | None, reason: str) -> None:
        """Set aside every epoch after `epoch`, or all if None; their stores stay, hidden.

        `reason` is for people who read the log.
        """
        self._commits.held()
        self._recorded.loaded = epoch
        state = self._recorded.log.check_held()
        later = [e for e in state.recorded if epoch is None or e > epoch]
        if later:
            self._retention.give_up(state, later, "rewind", {"after": epoch, "reason": reason})
            self._retention.sweeper.drain()

    def set_aside(self, epoch: int, reason: str) -> None:
        """Set one damaged epoch aside; its stores stay, hidden."""
        self._commits.held()
        state = self._recorded.log.check_held()
        self._recorded.check_recorded(epoch, state)
        self._retention.give_up(state, [epoch], "rewind", {"only": epoch, "reason": reason})
        self._retention.sweeper.drain()

    def finish(self, epoch: int) -> None:
        """Record that the job ended after `epoch`, exit group included; see `delete_on_success`."""
        self._commits.held()
        self._retention.append("done", {"epoch": epoch})
        if self._delete_on_success:
            state = self._recorded.log.refresh()
            epochs = list(state.recorded)
            self._retention.give_up(state, epochs, "retire", {"epochs": epochs})


def _configured_seconds(key: str) -> float:
    seconds = get_number(key)
    if seconds == 0:
        raise DefinitionError(
            f"jobrunner.{key} in Dask's configuration must be a number > 0; got {seconds}."
        )
    return seconds
