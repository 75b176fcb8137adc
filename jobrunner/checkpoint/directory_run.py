"""A run's use of its directory: takes it, sets epochs aside, releases it. Runs on the client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jobrunner.checkpoint.commits import Commits, writing
from jobrunner.checkpoint.directory import Directory
from jobrunner.checkpoint.history import as_json
from jobrunner.checkpoint.log import (
    DoneEntry,
    EndEntry,
    FileMetadataHandler,
    Patience,
    RetireEntry,
    RewindEntry,
    RunLock,
    State,
    Status,
    read_beat,
)
from jobrunner.checkpoint.retention import Retention
from jobrunner.config import get_number
from jobrunner.errors import CheckpointError, DefinitionError
from jobrunner.names import check_distinct
from jobrunner.positions import Position
from jobrunner.texts import get_logger

logger = get_logger(__name__)

_LEAST_BEAT_SECONDS = 0.1


@dataclass(slots=True)
class DirectoryRun:
    """A run that holds the directory, from `start` to `end`; one run at a time."""

    directory: Directory
    retention: Retention
    commits: Commits
    delete_on_success: bool
    take_over: bool
    patience: Patience | None = None
    """How long a silent run counts as alive, if not as configured."""

    def start(
        self,
        nodes: Sequence[str],
        info: Mapping[str, Any],
        status: Callable[[], Status] | None = None,
    ) -> None:
        """Take the directory, with a ``run`` entry in the log, for a run that saves `nodes`.

        `info` is JSON for that entry; `Directory.info_of` returns it. `status`, which another thread
        calls, says for the heartbeat how far the run is. Stores that earlier runs did not commit
        are deleted in the background. Raises CommitConflictError if another run holds
        the directory and is alive, and CheckpointWriteError if it cannot be created or written.
        """
        directory = self.directory
        if self.commits.lock is not None:
            raise DefinitionError(
                f"This checkpoint manager already serves a run in {self.directory.path}. Wait until "
                f"that run ends, or make another manager for another directory."
            )
        if directory.only_node is not None and tuple(nodes) != (directory.only_node,):
            raise DefinitionError(
                f"This CheckpointManager saves one node, {directory.only_node!r}, and the job "
                f"checkpoints {', '.join(map(repr, nodes)) or 'none'}. Use a "
                f"MultiNodeCheckpointManager, or Job(nodes_to_checkpoint=[...])."
            )
        check_distinct(nodes, "node")
        directory.handler.set_params(directory.path, tuple(nodes))
        beat_seconds = max(_LEAST_BEAT_SECONDS, get_number("checkpoint.heartbeat-seconds"))
        patience = self.patience or Patience(get_number("checkpoint.silence-seconds"))
        path = directory.path
        lock = RunLock(directory.files, path, directory.log, nodes, beat_seconds, status)
        try:
            with writing(path, "the directory could not be locked"):
                before = directory.log.known()
                holder = before.holder
                if holder is not None and not before.is_ended:  # its heartbeat is removed below
                    with suppress(OSError, CheckpointError):
                        beat = read_beat(directory.files, path, holder.run)
                        info = {**info, "seen": {holder.run: beat.time}}
                lock.take(as_json(info, "info"), patience, take_over=self.take_over)
            self.commits.lock = lock
            directory.is_taken, directory.loaded = True, None
            with writing(path, "leftovers of earlier runs could not be removed"):
                # After the `run` entry: whatever is there was not written for this run.
                names = directory.files.list_names(path)
                self.commits.start_run(names)
                self.retention.start_run(names)
                lock.remove_traces_of_others()
                if isinstance(directory.handler, FileMetadataHandler):
                    directory.handler.remove_leftovers(lock.number)
        except BaseException:
            # Also on Ctrl-C: a run that did not begin must not look alive to the next one.
            if self.commits.lock is None:
                lock.leave()
            elif directory.log.repairs:
                self.leave()  # its `end` would say that the log is repaired
            else:
                self.end()
            raise

    def end(self, outcome: Mapping[str, Any] | None = None) -> None:
        """Abandon open saves and release the directory, so that another run may take it at once.

        `outcome` is what the ``end`` entry says of the run. Every run calls this at its end, also
        after a failure. Raises nothing, and waits half a minute at most for deletions.
        """
        lock = self.commits.lock
        if lock is None:
            return
        try:
            upto = self.commits.end_run()
            if not self.retention.sweeper.drain():
                logger.warning(
                    "%s: some stores are not deleted yet; the next run deletes them.",
                    self.directory.path,
                )
            self.directory.log.check_held()  # an entry must not follow those of another directory
            self.retention.append(EndEntry, upto=upto, **outcome or {})
        except CheckpointError as error:
            logger.warning(
                "%s: the end of the run could not be recorded: %s", self.directory.path, error
            )
        finally:
            self.leave()

    def leave(self) -> None:
        """Leave the directory as a run that was killed does, but without its heartbeat."""
        if self.commits.lock is not None:
            self.commits.lock.leave()
            self.commits.lock = None
            self.directory.is_taken, self.directory.loaded = False, None

    def probe(self) -> Callable[[Mapping[str, Any]], Any]:
        """Make the probe that shows whether workers share the directory; picklable.

        Call it on every worker with its workspaces, and pass the answers to `check_probe`.
        """
        with writing(self.directory.path, "the probe for the workers could not be written"):
            probe = self.commits.held().probe
            self.directory.files.put(probe.path, probe.token)
            self.commits.note_placement()
            return probe

    def check_probe(self, answers: Mapping[str, Any]) -> None:
        """Check the answers to `probe`, by address of the worker.

        Raises CheckpointError if a worker sees another directory under that path, and
        CheckpointWriteError if it cannot read there.
        """
        self.commits.held()
        for worker, problem in answers.items():
            if problem is not None:
                raise type(problem)(
                    f"Worker {worker} cannot use the checkpoint directory {self.directory.path}: "
                    f"{problem}"
                )

    def rewind(self, epoch: Position | None, reason: str) -> None:
        """Set aside every epoch after `epoch`, or all if None; their stores stay.

        `reason` is for people who read the log.
        """
        latest = self._check_held().latest
        self.directory.loaded = epoch
        if latest is not None and (epoch is None or latest > epoch):
            self.retention.append(RewindEntry, after=epoch, reason=reason)

    def set_aside(self, epoch: Position, reason: str) -> None:
        """Set one damaged epoch aside; its stores stay."""
        self.directory.check_recorded(epoch, self._check_held())
        self.retention.append(RewindEntry, only=epoch, reason=reason)

    def finish(self, epoch: Position) -> None:
        """Record that the job ended after `epoch`, exit group included; see `delete_on_success`."""
        self._check_held()
        self.retention.append(DoneEntry, epoch=epoch)
        if self.delete_on_success:
            self.retention.append(RetireEntry, epochs=self.directory.log.refresh().epochs)
            self.retention.sweep_histories()

    def _check_held(self) -> State:
        """What the log says now; raises unless a run of this manager still holds the directory."""
        self.commits.held()
        return self.directory.log.check_held()
