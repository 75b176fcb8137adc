"""A directory that a run holds: taking it and leaving it, and which epochs stay."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jobrunner.checkpoint.directory import CheckpointDirectory
from jobrunner.checkpoint.log import (
    AnyEntry,
    Claim,
    FileMetadataHandler,
    MetadataHandler,
    Patience,
    RunLock,
    State,
    is_known_dead,
    nodes_of,
    store_names,
    strict_json,
)
from jobrunner.checkpoint.policies import (
    KeepAll,
    RetentionPolicy,
    find_unreported,
    name_reported,
)
from jobrunner.checkpoint.storage import PosixFiles
from jobrunner.checkpoint.sweeper import Sweeper
from jobrunner.config import get_seconds
from jobrunner.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    DefinitionError,
)
from jobrunner.names import check_distinct, check_name

logger = logging.getLogger(__name__)

_DRAIN_SECONDS = 30.0

SAVE_REQUEST = "_save_now"
"""Whoever makes a file of this name in the directory asks for a save at the next step's end."""


class HeldDirectory(CheckpointDirectory):
    """What a run does with its directory but for saving. `MultiNodeCheckpointManager` documents it."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata_handler: MetadataHandler | None,
        *,
        keep: RetentionPolicy | None,
        delete_on_success: bool,
        allow_pickle: bool,
        take_over: bool,
        files: PosixFiles | None,
        patience: Patience | None,
    ) -> None:
        super().__init__(path, metadata_handler, allow_pickle=allow_pickle, files=files)
        self._keep = keep if keep is not None else KeepAll()
        if not isinstance(self._keep, RetentionPolicy):
            raise DefinitionError(f"keep is a RetentionPolicy such as KeepLast(3); got {keep!r}.")
        self._delete_on_success = bool(delete_on_success)
        self._take_over = take_over
        self._patience = patience
        self._sweeper = Sweeper(self._files, self.path)
        self._hold: RunLock | None = None
        self._resumed_from: int | None = None
        self._next_look = -math.inf
        self._metrics: dict[int, Mapping[str, Any]] = {}  # by number of the commit entry
        self._unclaimed: list[int] | None = None  # of this run, once looked for
        self._has_told_unreported = False  # in this run

    # --- a run

    def start_run(self, nodes: Sequence[str], info: Mapping[str, Any]) -> None:
        """Take the directory for a run.

        Parameters
        ----------
        nodes : sequence of str
            Those that it will save.
        info : mapping
            JSON that `run_info` gives back.

        Raises
        ------
        CommitConflictError
            Another run holds the directory and is alive.
        CheckpointWriteError
            It cannot be created or written.

        Notes
        -----
        *Atomicity*: the ``run`` entry of the log decides who holds the directory. What earlier
        runs had begun and never committed is deleted in the background.
        """
        if self._hold is not None:
            raise DefinitionError(
                f"This checkpoint manager already serves a run in {self.path}. Let it end, or "
                f"make another manager for another directory."
            )
        for node in nodes:
            check_name(node, "node")
        check_distinct(nodes, "node")
        self._handler.set_params(self.path, tuple(nodes))
        beat_seconds = _configured_seconds("checkpoint.heartbeat-seconds")
        patience = self._patience or Patience(_configured_seconds("checkpoint.silence-seconds"))
        hold = RunLock(self._files, self.path, self._journal, nodes, beat_seconds)
        self._resumed_from = self._unclaimed = None
        self._has_told_unreported = False
        try:
            with self._writing("the directory could not be taken"):
                hold.take(as_json(info, "info"), patience, take_over=self._take_over)
            self._hold = hold
            with self._writing("what earlier runs left could not be cleaned up"):
                self._clean_up(hold)
        except BaseException:
            # Ctrl-C too: a run that does not begin must not look alive to the next one.
            if self._hold is not None:
                self.end_run()
            else:
                hold.leave()
            raise

    def held_by(self) -> str | None:
        """Which other run holds the directory, unless it is known to be gone; None: nobody."""
        run = self._journal.refresh().run
        if self._hold is not None or run is None or self._journal.known().is_ended:
            return None
        return None if is_known_dead(run.process, run.run) else str(run)

    def unclaimed(self) -> list[int]:
        """See `RecordedEpochs.unclaimed`; in a run, as it was when it was first asked for.

        Whoever holds the directory claims all that is written there.
        """
        if self._hold is None:
            return super().unclaimed()
        if self._unclaimed is None:
            self._unclaimed = super().unclaimed()
        return self._unclaimed

    def end_run(self) -> None:
        """Leave the directory, so that another run may take it at once.

        Notes
        -----
        Called at the end of every run, after failures as well; raises nothing. Waits, at most
        half a minute, until what is to be deleted is gone.
        """
        if self._hold is None:
            return
        try:
            if not self._sweeper.drain(_DRAIN_SECONDS):
                logger.warning("%s: some stores could not be deleted in time.", self.path)
            self._sweeper.confirm()
            self._append("end", {})
        except CheckpointError as error:
            logger.warning("The end of the run could not be recorded: %s", error)
        finally:
            self._hold.leave()
            self._hold = None

    def probe(self) -> Callable[[Mapping[str, Any]], Any]:
        """Ask whether the workers share the directory.

        Returns
        -------
        callable
            To be called on every worker with its workspaces; picklable. `check_probe` takes the
            answers.
        """
        with self._writing("the workers could not be asked whether they share it"):
            return self._held().ask()

    def check_probe(self, answers: Mapping[str, Any]) -> None:
        """Judge the workers' answers to `probe`.

        Parameters
        ----------
        answers : mapping of str to object
            By the worker's address.

        Raises
        ------
        CheckpointError
            Naming a worker that has another directory under that path.
        CheckpointWriteError
            Naming a worker that cannot write there; or what it wrote cannot be read just now.
        """
        self._held().check_answers(answers)

    # --- giving up epochs

    def rewind(self, epoch: int | None, reason: str) -> None:
        """Set aside what was recorded after an epoch; its stores stay, hidden.

        Parameters
        ----------
        epoch : int or None
            None: every epoch is set aside.
        reason : str
            For people who read the log.
        """
        self._held()
        self._resumed_from = epoch
        state = self._journal.check_held()
        later = [e for e in state.recorded if epoch is None or e > epoch]
        if later:
            self._give_up(state, later, "rewind", {"after": epoch, "reason": reason})
            self._sweeper.drain(_DRAIN_SECONDS)

    def set_aside(self, epoch: int, reason: str) -> None:
        """Set one recorded epoch aside, for damage; its stores stay, hidden."""
        self._held()
        state = self._journal.check_held()
        if epoch not in state.recorded:
            raise CheckpointNotFoundError(
                f"Epoch {epoch} of {self.path} is not recorded, so it cannot be set aside."
            )
        self._give_up(state, [epoch], "rewind", {"only": epoch, "reason": reason})
        self._sweeper.drain(_DRAIN_SECONDS)

    def metrics(self) -> Mapping[int, Mapping[str, Any]]:
        """What tasks reported at each recorded epoch; read as it is asked for."""
        return _RecordedMetrics(self, self._journal.refresh())

    def retirable(self) -> list[int]:
        """The recorded epochs that the retention policy would give up now, in ascending order."""
        return self._choose_retired(self._journal.refresh())

    def retire(self) -> list[int]:
        """Give up what the retention policy does not keep; a commit does the same.

        Returns
        -------
        list of int
            The epochs, in ascending order. They are deleted in the background.
        """
        state = self._journal.check_held()
        retired = self._choose_retired(state)
        if retired:
            self._tell_unreported(state)
            self._give_up(state, retired, "retire", {"epochs": retired})
        return retired

    def finish(self, epoch: int) -> None:
        """Record that the job has ended after `epoch`, exit group and all.

        With `delete_on_success`, all epochs are given up then.
        """
        self._held()
        self._append("done", {"epoch": epoch})
        if self._delete_on_success:
            state = self._journal.refresh()
            epochs = list(state.recorded)
            self._give_up(state, epochs, "retire", {"epochs": epochs})

    def take_request(self) -> bool:
        """Whether somebody has asked for a save by the file `SAVE_REQUEST`; removes it."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + self._files.poll_seconds
        path = os.path.join(self.path, SAVE_REQUEST)
        try:
            if not self._files.is_taken(path):
                return False
            self._files.remove_file(path)
        except OSError as error:
            logger.warning("%s cannot be looked for or removed: %s", path, error)
            return False
        return True

    def settle(self, timeout_seconds: float = _DRAIN_SECONDS) -> bool:
        """Wait until what was given up is hidden or deleted; False if that takes longer."""
        return self._sweeper.drain(timeout_seconds)

    # --- helpers

    def _held(self) -> RunLock:
        if self._hold is None:
            raise DefinitionError(
                f"This manager holds no run in {self.path}; start_run comes first. A JobRunner "
                f"calls it."
            )
        return self._hold

    def _append(self, kind: str, body: Mapping[str, Any]) -> AnyEntry:
        settled = [list(claim) for claim in self._sweeper.take_settled()]
        return self._journal.append(kind, {**body, "settled": settled} if settled else body)

    def _names_of(self, state: State, epoch: int) -> tuple[Claim, list[str]]:
        """The claim of a recorded epoch, and the names of its stores."""
        claim = Claim(epoch, state.retries[epoch])
        return claim, self._stores_of(claim, state.commit_number(epoch))

    def _stores_of(self, claim: Claim, source: int) -> list[str]:
        """The names of a claim's stores, by the entry that tells its nodes."""
        entry = self._journal.read_entry(source)
        try:
            return list(store_names(nodes_of(entry, claim.epoch), *claim).values())
        except ValueError as error:
            raise CheckpointCorruptError(
                f"{self.path}: entry {source} of the log and the claim {list(claim)} name no "
                f"stores: {error}."
            ) from error

    def _choose_retired(self, state: State) -> list[int]:
        epochs = state.recorded.keys_in_order()
        kept = {state.latest, self._resumed_from, *state.pins}
        proposed = self._keep.retires(epochs, _RecordedMetrics(self, state))
        return sorted(e for e in proposed if e not in kept and e in state.recorded)

    def _tell_unreported(self, state: State) -> None:
        """Warn, once a run, that epochs go though what they are judged by was never reported."""
        metrics = _RecordedMetrics(self, state)
        if self._has_told_unreported or not (names := find_unreported(self._keep, metrics)):
            return
        self._has_told_unreported = True
        logger.warning(
            "%s: no recorded epoch has reported %s, so KeepBest keeps no epoch for it, and those "
            "that nothing else keeps are deleted; reported are: %s. Is the name mistyped?",
            self.path,
            " or ".join(map(repr, names)),
            name_reported(metrics),
        )

    def _give_up(
        self,
        state: State,
        epochs: Sequence[int],
        kind: str,
        body: Mapping[str, Any],
    ) -> None:
        def name(epoch: int) -> tuple[Claim, list[str]] | None:
            try:
                return self._names_of(state, epoch)
            except CheckpointError as error:
                logger.warning("The stores of epoch %d cannot be named: %s", epoch, error)
                return None

        chores = [found for found in self._files.each(name, epochs) if found is not None]
        self._append(kind, body)
        for claim, stores in chores:
            self._sweep(claim, stores)

    def _sweep(self, claim: Claim, stores: Sequence[str]) -> None:
        """Let the stores of a claim go as the log says; what has been pinned meanwhile stays."""
        chore = self._journal.known().chores.get(claim)
        if chore is not None:
            self._sweeper.add(claim, chore.action, stores)

    def _clean_up(self, hold: RunLock) -> None:
        """Hide and delete what earlier runs left undone."""
        # Of a run that has taken over meanwhile, nothing is left undone: it is at work.
        for claim, chore in self._journal.check_held().chores.items():
            try:
                stores = self._stores_of(claim, chore.source)
            except CheckpointError as error:
                logger.warning("Stores of epoch %s cannot be named: %s", claim.epoch, error)
                continue
            self._sweeper.add(claim, chore.action, stores)
        hold.remove_traces_of_others()
        if isinstance(self._handler, FileMetadataHandler):
            self._handler.remove_leftovers(hold.number)

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            if type(error) is not CheckpointError:
                raise
            # A log that cannot be read just now keeps this from being written.
            raise CheckpointWriteError(str(error)) from error
        except OSError as error:
            raise CheckpointWriteError(
                f"{self.path}: {what}: {type(error).__name__}: {error}. What was recorded before "
                f"still is; mend the storage and run again."
            ) from error


def _configured_seconds(key: str) -> float:
    seconds = get_seconds(key)
    if seconds == 0:
        raise DefinitionError(
            f"jobrunner.{key} in Dask's configuration is a number of seconds above 0; got 0."
        )
    return seconds


class _RecordedMetrics(Mapping[int, Mapping[str, Any]]):
    """What tasks reported at recorded epochs, read as it is asked for."""

    def __init__(self, directory: HeldDirectory, state: State) -> None:
        self._directory = directory
        self._state = state

    def __getitem__(self, epoch: int) -> Mapping[str, Any]:
        number = self._state.recorded[epoch]
        known = self._directory._metrics
        if number not in known:
            # Whoever asks for the first will ask for more.
            epochs = [epoch] if known else list(self._state.recorded)
            for asked, metrics in zip(
                epochs, self._directory.files.each(self._read, epochs), strict=True
            ):
                known[self._state.recorded[asked]] = metrics
        return known[number]

    def _read(self, epoch: int) -> Mapping[str, Any]:
        number = self._state.commit_number(epoch)
        try:
            record = self._directory._read_record(epoch, number)
        except CheckpointError as error:
            logger.warning("The metrics of epoch %d cannot be read: %s", epoch, error)
            return {}
        metrics: Mapping[str, Any] = record["details"].get("metrics", {})
        return metrics

    def __iter__(self) -> Iterator[int]:
        return iter(self._state.recorded)

    def __len__(self) -> int:
        return len(self._state.recorded)


def as_json(value: Mapping[str, Any], what: str) -> Any:
    """`value` as strict JSON; `what` it is of a checkpoint, for the message.

    Raises
    ------
    DefinitionError
    """
    strict = strict_json(value)
    try:
        json.dumps(strict, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DefinitionError(
            f"{what} of a checkpoint is JSON (str, numbers, bool, None, lists and dicts of "
            f"them): {error}."
        ) from error
    return strict
