"""The checkpoint manager: it saves epochs, keeps or retires them, and loads them again."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import dask

from jobrunner.checkpoint.chores import Sweeper
from jobrunner.checkpoint.codecs import registered_codecs
from jobrunner.checkpoint.directory import REPLICATED, CheckpointDirectory
from jobrunner.checkpoint.files import PosixFiles
from jobrunner.checkpoint.hold import Hold
from jobrunner.checkpoint.liveness import Patience
from jobrunner.checkpoint.log import FileMetadataHandler, MetadataHandler
from jobrunner.checkpoint.policies import KeepAll, RetentionPolicy
from jobrunner.checkpoint.records import (
    Claim,
    Entry,
    State,
    nodes_of,
    store_names,
    strict_json,
)
from jobrunner.checkpoint.save import BlobCheck, SaveOrder
from jobrunner.checkpoint.schedule import SaveEvery, SavePolicy
from jobrunner.checkpoint.store import Receipt
from jobrunner.config import get_seconds
from jobrunner.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    DefinitionError,
)
from jobrunner.names import check_distinct, check_name
from jobrunner.task import TaskGroup

logger = logging.getLogger("jobrunner.checkpoint.manager")

_DRAIN_SECONDS = 30.0

SAVE_REQUEST = "_save_now"
"""Whoever makes a file of this name in the directory asks for a save at the next step's end."""


class MultiNodeCheckpointManager(CheckpointDirectory):
    """Saves and loads all nodes of a job: a Zarr store for each node and epoch, and a log.

    Parameters
    ----------
    path : str or os.PathLike
        A directory that the client and all workers have in common; made absolute here, created
        when a run begins.
    metadata_handler : MetadataHandler, optional
        Keeps the log; by default a `FileMetadataHandler`.
    save : SavePolicy
        When to save; by default after every epoch.
    keep : RetentionPolicy
        Which epochs to keep.
    asynchronous : bool
        Let the epochs go on once all blobs are copied, and write the copies meanwhile. At most
        one save is in flight; the next one waits for it.
    budget_bytes : int, optional
        With `asynchronous`: longest that the copies on one worker may be together. What is beyond
        is written before the epochs go on.
    delete_on_success : bool
        Give all epochs up once the job has ended, exit group and all.
    load_path : str or os.PathLike, optional
        Another checkpoint directory, to begin from where this one records nothing yet. It is
        only read.
    allow_pickle : bool
        Pickle blobs that cannot be saved otherwise, and unpickle them: only for directories
        whose writers you trust.
    take_over : bool
        Take the directory from a run that is alive, too. That run ends with
        `CommitConflictError`.
    files : PosixFiles, optional
        How the file system is used; for tests.
    patience : Patience, optional
        How long a silent run counts as alive; for tests.

    Raises
    ------
    DefinitionError
        An argument cannot be what it says.

    Notes
    -----
    Making a manager touches no storage. What reads needs no cluster and no run; what writes is
    called by a `JobRunner`, between `start_run` and `end_run`. One manager may serve several
    runners, one after another.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata_handler: MetadataHandler | None = None,
        *,
        save: SavePolicy | None = None,
        keep: RetentionPolicy | None = None,
        asynchronous: bool = False,
        budget_bytes: int | None = None,
        delete_on_success: bool = False,
        load_path: str | os.PathLike[str] | None = None,
        allow_pickle: bool = False,
        take_over: bool = False,
        files: PosixFiles | None = None,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(path, metadata_handler, allow_pickle=allow_pickle, files=files)
        self.save_policy = save if save is not None else SaveEvery(epochs=1)
        if not isinstance(self.save_policy, SavePolicy):
            raise DefinitionError(
                f"save is a SavePolicy such as SaveEvery(epochs=5); got {save!r}."
            )
        self._keep = keep if keep is not None else KeepAll()
        if not isinstance(self._keep, RetentionPolicy):
            raise DefinitionError(f"keep is a RetentionPolicy such as KeepLast(3); got {keep!r}.")
        self.asynchronous = bool(asynchronous)
        if budget_bytes is not None and (
            not isinstance(budget_bytes, int) or isinstance(budget_bytes, bool) or budget_bytes < 0
        ):
            raise DefinitionError(f"budget_bytes is a number of bytes; got {budget_bytes!r}.")
        if budget_bytes is not None and not asynchronous:
            raise DefinitionError("budget_bytes bounds the copies of asynchronous=True; give both.")
        self.budget_bytes = budget_bytes
        self._delete_on_success = bool(delete_on_success)
        self._origin = (
            None
            if load_path is None
            else CheckpointDirectory(load_path, None, allow_pickle=allow_pickle, files=files)
        )
        if self._origin is not None and self._origin.path == self.path:
            raise DefinitionError(
                f"load_path is another directory than path, and both are {self.path}. Leave "
                f"load_path out: a run goes on from its own directory anyway."
            )
        self._take_over = take_over
        self._patience = patience
        self._sweeper = Sweeper(self._files, self.path)
        self._hold: Hold | None = None
        self._resumed_from: int | None = None
        self._unfinished: dict[Claim, SaveOrder] = {}
        self._abandoned: dict[Claim, SaveOrder] = {}
        # Number of the newest commit entry, and that epoch's stores with their manifests' digests.
        self._newest: tuple[int, dict[str, tuple[str, str]]] | None = None
        self._metrics: dict[int, Mapping[str, Any]] = {}  # by number of the commit entry

    def load(
        self,
        epoch: int,
        *,
        nodes: Collection[str] | None = None,
        blobs: Mapping[str, Collection[str]] | None = None,
        partitions: Mapping[str, Sequence[str]] | None = None,
    ) -> TaskGroup:
        """See `CheckpointDirectory.load`; in a run, the epoch is kept until the run ends."""
        group = super().load(epoch, nodes=nodes, blobs=blobs, partitions=partitions)
        if self._hold is not None:
            self._resumed_from = epoch
        return group

    def source(self) -> CheckpointDirectory:
        """The directory that a run would go on from.

        Returns
        -------
        CheckpointDirectory
            This manager, or what it was given as `load_path` as long as nothing is recorded here.

        Raises
        ------
        CheckpointNotFoundError
            Nothing is recorded in `load_path` either.
        """
        if self._origin is None or self.epochs():
            return self
        if not self._origin.epochs():
            raise CheckpointNotFoundError(
                f"load_path: nothing is recorded in {self._origin.path}. Name the directory of a "
                f"run that has recorded an epoch, or leave load_path out to start afresh."
            )
        return self._origin

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
        hold = Hold(self._files, self.path, self._journal, nodes, beat_seconds)
        self._resumed_from = None
        self._unfinished, self._abandoned = {}, {}
        try:
            with self._writing("the directory could not be taken"):
                hold.take(_as_json(info, "info"), patience, take_over=self._take_over)
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
            for order in [*self._unfinished.values(), *self._abandoned.values()]:
                self.abandon(order)
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
            Naming a worker that cannot write there.
        """
        self._held().check_answers(answers)

    # --- saving

    def blob_check(self) -> BlobCheck:
        """What finds out, on the workers and without storage, whether all blobs can be saved.

        Returns
        -------
        BlobCheck
            To be called on every worker with its workspaces; picklable.
        """
        return BlobCheck(frozenset(self._held().nodes), registered_codecs(), self._allow_pickle)

    def begin(
        self, epoch: int, *, replicated: Mapping[str, Sequence[str]] | None = None
    ) -> SaveOrder:
        """Claim the names of an epoch's stores.

        Parameters
        ----------
        epoch : int
        replicated : mapping of str to sequence of str, optional
            Name of a blob -> the nodes that have it; the first one saves it.

        Returns
        -------
        SaveOrder
            To be called on every worker with its workspaces; picklable. What the calls return,
            together, is for `commit`.

        Raises
        ------
        CommitConflictError
            Another run has taken the directory over.
        CheckpointWriteError
            The claim could not be recorded.
        """
        hold = self._held()
        for order in list(self._unfinished.values()):
            self.abandon(order)
        with self._writing(f"the save of epoch {epoch} could not be begun"):
            retry = self._journal.check_held().claims.get(epoch, 0)
            # What lies there without a claim is none of ours, and stays.
            while any(
                self._files.is_taken(os.path.join(self.path, store))
                for store in store_names(hold.nodes, epoch, retry).values()
            ):
                retry += 1
            self._append("begin", {"epoch": epoch, "retry": retry})
        claim = Claim(epoch, retry)
        order = SaveOrder(
            self.path,
            hold.run,
            claim,
            store_names(hold.nodes, epoch, retry),
            self.blob_check(),
            self._files,
            self._former(),
            dict(replicated or {}),
        )
        self._unfinished[claim] = order
        return order

    def _former(self) -> dict[str, tuple[str, str]]:
        """The newest recorded stores, which the next ones may share unchanged chunks with."""
        state = self._journal.known()  # as of the claim: reading again could fail
        latest = state.latest
        if latest is None:
            return {}
        number = state.recorded[latest]
        if self._newest is None or self._newest[0] != number:
            try:
                stores = self.record(latest)["stores"]
            except CheckpointError as error:
                logger.info("Nothing is linked to epoch %d: %s", latest, error)
                stores = {}
            found = {node: (about["store"], about["manifest"]) for node, about in stores.items()}
            self._newest = (number, found)
        return self._newest[1]

    def commit(
        self, order: SaveOrder, receipts: Mapping[str, Receipt], details: Mapping[str, Any]
    ) -> None:
        """Make an epoch exist.

        Parameters
        ----------
        order : SaveOrder
        receipts : mapping of str to Receipt
            One for every node of the order.
        details : mapping
            JSON to keep with it; may hold NaN and infinities.

        Raises
        ------
        CommitConflictError
            Another run has taken the directory over; the epoch does not exist.
        CheckpointWriteError
            A receipt is missing, or it is not known whether the epoch was recorded.

        Notes
        -----
        *Atomicity*: the ``commit`` entry of the log. What the retention policy gives up is
        deleted afterwards, in the background.
        """
        missing = [node for node in order.stores if node not in receipts]
        if missing:
            raise CheckpointWriteError(
                f"Epoch {order.epoch} of {self.path} cannot be recorded: expected a receipt from "
                f"each of {len(order.stores)} nodes, found none from {', '.join(missing[:8])}. "
                f"Are they placed on workers? Save again."
            )
        _check_replicas(order, receipts)
        epoch, retry = order.claim
        details = dict(details)
        if order.replicated:
            details[REPLICATED] = {name: list(nodes) for name, nodes in order.replicated.items()}
        body = {
            "epoch": epoch,
            "retry": retry,
            "run_number": self._held().number,
            "stores": {
                node: {
                    "store": receipts[node].store,
                    "manifest": receipts[node].manifest,
                    "nbytes": receipts[node].nbytes,
                    "seconds": round(receipts[node].seconds, 6),
                }
                for node in order.stores
            },
            "details": _as_json(details, "details"),
        }
        with self._writing(f"epoch {epoch} could not be recorded"):
            state = self._journal.check_held()
            if order.claim not in self._unfinished:
                raise CheckpointWriteError(
                    f"The save of epoch {epoch} in {self.path} was abandoned. Begin it again."
                )
            replaced = self._names_of(state, epoch) if epoch in state.recorded else None
            entry = self._append("commit", body)
        # From here on the epoch exists, and nothing that fails may say otherwise.
        self._newest = (
            entry["number"],
            {node: (receipts[node].store, receipts[node].manifest) for node in order.stores},
        )
        del self._unfinished[order.claim]
        if replaced is not None:
            self._sweep(*replaced)
        self._report_save({node: receipts[node].seconds for node in order.stores})
        try:
            self.retire()
        except Exception as error:  # a policy is anybody's code
            logger.warning(
                "%s: no epoch was retired after epoch %d: %s: %s",
                self.path,
                epoch,
                type(error).__name__,
                error,
            )

    def abandon(self, order: SaveOrder) -> None:
        """Delete what a failed save has written, as far as that goes; its names stay claimed."""
        self._unfinished.pop(order.claim, None)
        try:
            state = self._journal.check_held()
        except CheckpointError as error:
            logger.warning("Left as it is, %s at epoch %d: %s", self.path, order.epoch, error)
            return
        # A commit whose answer was lost may have been recorded all the same.
        if order.claim in state.chores:
            # A slow worker may still write, whoever gave the save up: the claim is settled by the
            # next run, and swept once more at this one's end.
            self._abandoned[order.claim] = order
            self._sweeper.add(order.claim, "delete", list(order.stores.values()), is_final=False)

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

    def _held(self) -> Hold:
        if self._hold is None:
            raise DefinitionError(
                f"This manager holds no run in {self.path}; start_run comes first. A JobRunner "
                f"calls it."
            )
        return self._hold

    def _append(self, kind: str, body: Mapping[str, Any]) -> Entry:
        settled = [list(claim) for claim in self._sweeper.take_settled()]
        return self._journal.append(kind, {**body, "settled": settled} if settled else body)

    def _names_of(self, state: State, epoch: int) -> tuple[Claim, list[str]]:
        """The claim of a recorded epoch, and the names of its stores."""
        entry = self._journal.read_entry(state.commit_number(epoch))
        return Claim(epoch, state.retries[epoch]), list(
            store_names(nodes_of(entry), epoch, state.retries[epoch]).values()
        )

    def _report_save(self, seconds: Mapping[str, float]) -> None:
        try:
            self._handler.report("checkpoint_save", seconds)
        except Exception:
            logger.warning("The metadata handler failed to take a report", exc_info=True)

    def _choose_retired(self, state: State) -> list[int]:
        epochs = state.recorded.keys_in_order()
        kept = {state.latest, self._resumed_from, *state.pins}
        proposed = self._keep.retires(epochs, _RecordedMetrics(self, state))
        return sorted(e for e in proposed if e not in kept and e in state.recorded)

    def _give_up(
        self,
        state: State,
        epochs: Sequence[int],
        kind: str,
        body: Mapping[str, Any],
    ) -> None:
        chores = []
        for epoch in epochs:
            try:
                chores.append(self._names_of(state, epoch))
            except CheckpointError as error:
                logger.warning("The stores of epoch %d cannot be named: %s", epoch, error)
        self._append(kind, body)
        for claim, stores in chores:
            self._sweep(claim, stores)

    def _sweep(self, claim: Claim, stores: Sequence[str]) -> None:
        """Let the stores of a claim go as the log says; what has been pinned meanwhile stays."""
        chore = self._journal.known().chores.get(claim)
        if chore is not None:
            self._sweeper.add(claim, chore.action, stores)

    def _clean_up(self, hold: Hold) -> None:
        """Hide and delete what earlier runs left undone."""
        # Of a run that has taken over meanwhile, nothing is left undone: it is at work.
        for claim, chore in self._journal.check_held().chores.items():
            try:
                entry = self._journal.read_entry(chore.source)
            except CheckpointError as error:
                logger.warning("Stores of epoch %d cannot be named: %s", claim.epoch, error)
                continue
            self._sweeper.add(
                claim, chore.action, list(store_names(nodes_of(entry), *claim).values())
            )
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
    try:
        seconds = get_seconds(key)
    except (TypeError, ValueError):
        seconds = math.nan
    if isinstance(dask.config.get(f"jobrunner.{key}"), bool) or not 0 < seconds < math.inf:
        raise DefinitionError(
            f"jobrunner.{key} in Dask's configuration is a number of seconds; got "
            f"{dask.config.get(f'jobrunner.{key}')!r}."
        )
    return seconds


def _check_replicas(order: SaveOrder, receipts: Mapping[str, Receipt]) -> None:
    for name, nodes in order.replicated.items():
        first = receipts[nodes[0]].replicas.get(name)
        for node in nodes:
            if receipts[node].replicas.get(name) != first:
                raise DefinitionError(
                    f"Blob {name!r} is replicated, and at epoch {order.epoch} its value on node "
                    f"{node!r} is not that on node {nodes[0]!r}. Make them equal, or declare it "
                    f"without replicated=True."
                )


class _RecordedMetrics(Mapping[int, Mapping[str, Any]]):
    """What tasks reported at recorded epochs, read as it is asked for."""

    def __init__(self, manager: MultiNodeCheckpointManager, state: State) -> None:
        self._manager = manager
        self._state = state

    def __getitem__(self, epoch: int) -> Mapping[str, Any]:
        number = self._state.recorded[epoch]
        known = self._manager._metrics
        if number not in known:
            try:
                known[number] = self._manager.record(epoch)["details"].get("metrics", {})
            except CheckpointError as error:
                logger.warning("The metrics of epoch %d cannot be read: %s", epoch, error)
                known[number] = {}
        return known[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._state.recorded)

    def __len__(self) -> int:
        return len(self._state.recorded)


def _as_json(value: Mapping[str, Any], what: str) -> Any:
    strict = strict_json(value)
    try:
        json.dumps(strict, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DefinitionError(
            f"{what} of a checkpoint is JSON (str, numbers, bool, None, lists and dicts of "
            f"them): {error}."
        ) from error
    return strict
