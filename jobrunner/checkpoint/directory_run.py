"""A run's use of its directory: it takes it, sets epochs aside, and leaves it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jobrunner.checkpoint.commits import Commits, as_json, writing
from jobrunner.checkpoint.epochs import Epochs
from jobrunner.checkpoint.log import FileMetadataHandler, Patience, RunLock
from jobrunner.checkpoint.retention import Retention
from jobrunner.config import get_number
from jobrunner.errors import CheckpointError, CheckpointNotFoundError, DefinitionError
from jobrunner.names import check_distinct, check_name

logger = logging.getLogger(__name__)


class DirectoryRun:
    """Takes a directory for one run after another, each from `start` to `end`.

    Parameters
    ----------
    recorded : Epochs
    retention : Retention
    commits : Commits
    delete_on_success, take_over, patience
        As for `MultiNodeCheckpointManager`.

    Notes
    -----
    Runs on the client.
    """

    def __init__(
        self,
        recorded: Epochs,
        retention: Retention,
        commits: Commits,
        *,
        delete_on_success: bool = False,
        take_over: bool = False,
        patience: Patience | None = None,
    ) -> None:
        self.path = recorded.path
        self._recorded = recorded
        self._retention = retention
        self._commits = commits
        self._files = recorded.files
        self._delete_on_success = delete_on_success
        self._take_over = take_over
        self._patience = patience

    def start(self, nodes: Sequence[str], info: Mapping[str, Any]) -> None:
        """Take the directory for a run.

        Parameters
        ----------
        nodes : sequence of str
            The nodes that it will save.
        info : mapping
            JSON that `Epochs.run_info` returns.

        Raises
        ------
        CommitConflictError
            Another run holds the directory and is alive.
        CheckpointWriteError
            The directory cannot be created or written.

        Notes
        -----
        *Atomicity*: the ``run`` entry of the log decides who holds the directory. What earlier
        runs began and never committed is deleted in the background.
        """
        recorded = self._recorded
        if self._commits.lock is not None:
            raise DefinitionError(
                f"This checkpoint manager already serves a run in {self.path}. Wait until it "
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
        lock = RunLock(self._files, self.path, recorded.log, nodes, beat_seconds)
        try:
            with writing(self.path, "the directory could not be taken"):
                lock.take(as_json(info, "info"), patience, take_over=self._take_over)
            self._commits.lock = lock
            recorded.mark_run(is_running=True)
            with writing(self.path, "what earlier runs left could not be cleaned up"):
                self._retention.start_run()
                lock.remove_traces_of_others()
                if isinstance(recorded.handler, FileMetadataHandler):
                    recorded.handler.remove_leftovers(lock.number)
        except BaseException:
            # Ctrl-C too: a run that does not begin must not look alive to the next one.
            if self._commits.lock is not None:
                self.end()
            else:
                lock.leave()
            raise

    def end(self) -> None:
        """Leave the directory, so that another run may take it at once.

        Saves that were begun and not committed are abandoned.

        Notes
        -----
        Called at the end of every run, after failures too; raises nothing. Waits for the deletion
        of what was given up, for half a minute at most.
        """
        try:
            self._commits.abandon_all()
        finally:
            if self._commits.lock is not None:
                self._leave(self._commits.lock)

    def _leave(self, lock: RunLock) -> None:
        try:
            if not self._retention.sweeper.drain():
                logger.warning("%s: some stores could not be deleted in time.", self.path)
            self._retention.sweeper.confirm()
            self._retention.append("end", {})
        except CheckpointError as error:
            logger.warning("The end of the run could not be recorded: %s", error)
        finally:
            lock.leave()
            self._commits.lock = None
            self._recorded.mark_run(is_running=False)

    def probe(self) -> Callable[[Mapping[str, Any]], Any]:
        """Ask whether the workers share the directory.

        Returns
        -------
        callable
            To be called on every worker with its workspaces; picklable. `check_probe` takes the
            answers.
        """
        with writing(self.path, "the workers could not be asked whether they share it"):
            return self._commits.held().ask()

    def check_probe(self, answers: Mapping[str, Any]) -> None:
        """Check the workers' answers to `probe`, by the worker's address.

        Raises
        ------
        CheckpointError
            A worker sees another directory under that path; names it.
        CheckpointWriteError
            A worker cannot write there, or what it wrote cannot be read now; names it.
        """
        self._commits.held().check_answers(answers)

    def rewind(self, epoch: int | None, reason: str) -> None:
        """Set aside what was recorded after an epoch; its stores stay, hidden.

        Parameters
        ----------
        epoch : int or None
            None: every epoch is set aside.
        reason : str
            For people who read the log.
        """
        self._commits.held()
        self._recorded.loaded = epoch
        state = self._recorded.log.check_held()
        later = [e for e in state.recorded if epoch is None or e > epoch]
        if later:
            self._retention.give_up(state, later, "rewind", {"after": epoch, "reason": reason})
            self._retention.sweeper.drain()

    def set_aside(self, epoch: int, reason: str) -> None:
        """Set one recorded epoch aside, for damage; its stores stay, hidden."""
        self._commits.held()
        state = self._recorded.log.check_held()
        if epoch not in state.recorded:
            raise CheckpointNotFoundError(
                f"Epoch {epoch} of {self.path} is not recorded, so it cannot be set aside."
            )
        self._retention.give_up(state, [epoch], "rewind", {"only": epoch, "reason": reason})
        self._retention.sweeper.drain()

    def finish(self, epoch: int) -> None:
        """Record that the job ended after `epoch`, exit group included.

        With `delete_on_success`, all epochs are then given up.
        """
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
            f"jobrunner.{key} in Dask's configuration must be a number of seconds above 0; got 0."
        )
    return seconds
