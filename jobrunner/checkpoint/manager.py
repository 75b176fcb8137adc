"""The checkpoint managers: they save epochs, keep or retire them, and load them again."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import dask

from jobrunner.checkpoint.chores import Sweeper
from jobrunner.checkpoint.codecs import registered_codecs
from jobrunner.checkpoint.directory import CheckpointDirectory
from jobrunner.checkpoint.files import PosixFiles
from jobrunner.checkpoint.liveness import (
    RUNS_DIRECTORY,
    Heartbeat,
    Patience,
    own_process,
    refuse_if_alive,
)
from jobrunner.checkpoint.log import FileMetadataHandler, MetadataHandler
from jobrunner.checkpoint.policies import KeepAll, RetentionPolicy
from jobrunner.checkpoint.probe import Probe
from jobrunner.checkpoint.records import Claim, Entry, State, strict_json
from jobrunner.checkpoint.save import BlobCheck, SaveOrder
from jobrunner.checkpoint.store import Receipt
from jobrunner.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    DefinitionError,
)
from jobrunner.names import check_distinct, check_name, format_store_name

logger = logging.getLogger("jobrunner.checkpoint.manager")

_DRAIN_SECONDS = 30.0


class MultiNodeCheckpointManager(CheckpointDirectory):
    """Saves and loads all nodes of a job: a Zarr store for each node and epoch, and a log.

    Parameters
    ----------
    path : str or os.PathLike
        A directory that the client and all workers have in common; made absolute here, created
        when a run begins.
    metadata_handler : MetadataHandler, optional
        Keeps the log; by default a `FileMetadataHandler`.
    keep : RetentionPolicy
        Which epochs to keep.
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
        keep: RetentionPolicy | None = None,
        allow_pickle: bool = False,
        take_over: bool = False,
        files: PosixFiles | None = None,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(path, metadata_handler, allow_pickle=allow_pickle, files=files)
        self._keep = keep if keep is not None else KeepAll()
        if not callable(getattr(self._keep, "retires", None)):
            raise DefinitionError(f"keep is a RetentionPolicy such as KeepLast(3); got {keep!r}.")
        self._take_over = take_over
        self._patience = patience
        self._sweeper = Sweeper(self._files, self.path)
        self._run: str | None = None
        self._run_number = -1
        self._nodes: tuple[str, ...] = ()
        self._heartbeat: Heartbeat | None = None
        self._probe: Probe | None = None
        self._resumed_from: int | None = None
        self._unfinished: dict[Claim, SaveOrder] = {}

    def load(self, epoch: int, **selection: Any) -> Any:
        """See `CheckpointDirectory.load`; the epoch is kept until the run ends."""
        group = super().load(epoch, **selection)
        if self._run is not None:
            self._resumed_from = epoch
        return group

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
        if self._run is not None:
            raise DefinitionError(
                f"This checkpoint manager already serves a run in {self.path}. Let it end, or "
                f"make another manager for another directory."
            )
        for node in nodes:
            check_name(node, "node")
        check_distinct(nodes, "node")
        config = dask.config.get("jobrunner.checkpoint", {}) or {}
        beat_seconds = float(config.get("heartbeat-seconds", 2.0))
        patience = self._patience or Patience(float(config.get("silence-seconds", 15.0)))
        run = uuid.uuid4().hex
        self._handler.set_params(self.path, tuple(nodes))
        heartbeat = Heartbeat(self._files, self.path, run, beat_seconds)
        body = {
            "nodes": list(nodes),
            "info": _as_json(info, "info"),
            "process": own_process(),
            "heartbeat_seconds": beat_seconds,
        }
        with self._writing("the directory could not be taken"):
            self._files.make_directories(self.path)
            heartbeat.start()
            try:
                self._journal.take(run, body, lambda state: self._judge(state, patience))
            except BaseException:
                heartbeat.stop()
                self._forget_run(heartbeat)
                raise
        # A manager that is dropped without end_run must not look alive for ever.
        weakref.finalize(self, heartbeat.stop)
        self._run, self._nodes, self._heartbeat = run, tuple(nodes), heartbeat
        self._resumed_from = None
        self._unfinished = {}
        state = self._journal.refresh()
        self._run_number = state.number
        self._clean_up(state)

    def end_run(self) -> None:
        """Leave the directory, so that another run may take it at once.

        Notes
        -----
        Called at the end of every run, after failures as well; raises nothing. Waits, at most
        half a minute, until what is to be deleted is gone.
        """
        if self._run is None or self._heartbeat is None:
            return
        for order in list(self._unfinished.values()):
            self.abandon(order)
        if not self._sweeper.drain(_DRAIN_SECONDS):
            logger.warning("%s: some stores could not be deleted in time.", self.path)
        try:
            self._append("end", {})
        except CheckpointError as error:
            logger.warning("The end of the run could not be recorded: %s", error)
        self._journal.leave()
        self._heartbeat.stop()
        self._forget_run(self._heartbeat)
        self._run = self._heartbeat = self._probe = None

    def probe(self) -> Callable[[Mapping[str, Any]], Any]:
        """Ask whether the workers share the directory.

        Returns
        -------
        callable
            To be called on every worker with its workspaces; picklable. `check_probe` takes the
            answers.
        """
        with self._writing("the workers could not be asked whether they share it"):
            self._probe = Probe.ask(self._files, self._held().directory)
        return self._probe

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
        if self._probe is None:
            raise DefinitionError("check_probe takes the answers to probe, which comes first.")
        self._probe.check(self.path, answers)

    # --- saving

    def blob_check(self) -> BlobCheck:
        """What finds out, on the workers and without storage, whether all blobs can be saved.

        Returns
        -------
        BlobCheck
            To be called on every worker with its workspaces; picklable.
        """
        return BlobCheck(frozenset(self._nodes), registered_codecs(), self._allow_pickle)

    def begin(self, epoch: int) -> SaveOrder:
        """Claim the names of an epoch's stores.

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
        run = self._held_run()
        for order in list(self._unfinished.values()):
            self.abandon(order)
        with self._writing(f"the save of epoch {epoch} could not be begun"):
            retry = self._journal.check_held().claims.get(epoch, 0)
            # What lies there without a claim is none of ours, and stays.
            while any(
                self._files.is_taken(os.path.join(self.path, store))
                for store in self._stores(epoch, retry).values()
            ):
                retry += 1
            self._append("begin", {"epoch": epoch, "retry": retry})
        claim = Claim(epoch, retry)
        order = SaveOrder(
            self.path, run, claim, self._stores(epoch, retry), self.blob_check(), self._files
        )
        self._unfinished[claim] = order
        return order

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
        epoch, retry = order.claim
        body = {
            "epoch": epoch,
            "retry": retry,
            "run_number": self._run_number,
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
        state = self._journal.check_held()
        if order.claim not in self._unfinished:
            raise CheckpointWriteError(
                f"The save of epoch {epoch} in {self.path} was abandoned. Begin it again."
            )
        replaced = self._names_of(state, epoch) if epoch in state.recorded else None
        self._append("commit", body)
        del self._unfinished[order.claim]
        if replaced is not None:
            self._sweeper.add(replaced[0], "delete", replaced[1])
        self._handler.report(
            "checkpoint_save", {node: receipts[node].seconds for node in order.stores}
        )
        try:
            self._retire()
        except CheckpointError as error:
            logger.warning("%s: no epoch was retired after epoch %d: %s", self.path, epoch, error)

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
            self._sweeper.add(order.claim, "delete", list(order.stores.values()))

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
        self._resumed_from = epoch
        state = self._journal.check_held()
        later = [e for e in state.recorded if epoch is None or e > epoch]
        if later:
            self._give_up(state, later, "hide", "rewind", {"after": epoch, "reason": reason})
            self._sweeper.drain(_DRAIN_SECONDS)

    def set_aside(self, epoch: int, reason: str) -> None:
        """Set one recorded epoch aside, for damage; its stores stay, hidden."""
        state = self._journal.check_held()
        if epoch not in state.recorded:
            raise CheckpointNotFoundError(
                f"Epoch {epoch} of {self.path} is not recorded, so it cannot be set aside."
            )
        self._give_up(state, [epoch], "hide", "rewind", {"only": epoch, "reason": reason})
        self._sweeper.drain(_DRAIN_SECONDS)

    def finish(self, epoch: int) -> None:
        """Record that the job has ended after `epoch`, exit group and all."""
        self._append("done", {"epoch": epoch})

    def settle(self, timeout_seconds: float = _DRAIN_SECONDS) -> bool:
        """Wait until what was given up is hidden or deleted; False if that takes longer."""
        return self._sweeper.drain(timeout_seconds)

    # --- helpers

    def _held(self) -> Heartbeat:
        self._held_run()
        if self._heartbeat is None:
            raise DefinitionError(f"No run holds {self.path} by this manager.")
        return self._heartbeat

    def _held_run(self) -> str:
        if self._run is None:
            raise DefinitionError(
                f"This manager holds no run in {self.path}; start_run comes first. A JobRunner "
                f"calls it."
            )
        return self._run

    def _judge(self, state: State, patience: Patience) -> None:
        if state.run is not None and not state.is_ended:
            refuse_if_alive(self._files, self.path, state.run, patience, self._take_over)

    def _append(self, kind: str, body: Mapping[str, Any]) -> Entry:
        settled = [list(claim) for claim in self._sweeper.take_settled()]
        return self._journal.append(kind, {**body, "settled": settled} if settled else body)

    def _stores(self, epoch: int, retry: int) -> dict[str, str]:
        return {node: format_store_name(node, epoch, retry) for node in self._nodes}

    def _names_of(self, state: State, epoch: int) -> tuple[Claim, list[str]]:
        """The claim of a recorded epoch, and the names of its stores."""
        entry = self._journal.read_entry(state.recorded[epoch])
        return Claim(epoch, state.retries[epoch]), _store_names(entry, epoch, state.retries[epoch])

    def _retire(self) -> None:
        state = self._journal.refresh()
        epochs = state.recorded.keys_in_order()
        kept = {state.latest, self._resumed_from}
        retired = [e for e in self._keep.retires(epochs) if e not in kept and e in state.recorded]
        if retired:
            self._give_up(state, sorted(retired), "delete", "retire", {"epochs": sorted(retired)})

    def _give_up(
        self,
        state: State,
        epochs: Sequence[int],
        action: Literal["delete", "hide"],
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
            self._sweeper.add(claim, action, stores)

    def _clean_up(self, state: State) -> None:
        """Hide and delete what earlier runs left undone."""
        for claim, chore in state.chores.items():
            try:
                entry = self._journal.read_entry(chore.source)
            except CheckpointError as error:
                logger.warning("Stores of epoch %d cannot be named: %s", claim.epoch, error)
                continue
            self._sweeper.add(claim, chore.action, _store_names(entry, *claim))
        with contextlib.suppress(OSError):
            runs = os.path.join(self.path, RUNS_DIRECTORY)
            for name in self._files.list_names(runs):
                if name != self._run:
                    self._files.remove_tree(os.path.join(runs, name))
            if isinstance(self._handler, FileMetadataHandler):
                self._handler.remove_leftovers(state.number)

    def _forget_run(self, heartbeat: Heartbeat) -> None:
        with contextlib.suppress(OSError):
            self._files.remove_tree(heartbeat.directory)

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointWriteError(
                f"{self.path}: {what}: {type(error).__name__}: {error}. What was recorded before "
                f"still is; mend the storage and run again."
            ) from error


class CheckpointManager(MultiNodeCheckpointManager):
    """Saves and loads one node of a job; otherwise as `MultiNodeCheckpointManager`.

    Parameters
    ----------
    path : str or os.PathLike
    node_name : str
    metadata_handler : MetadataHandler, optional
    keep, allow_pickle, take_over, files, patience
        As for `MultiNodeCheckpointManager`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        node_name: str,
        metadata_handler: MetadataHandler | None = None,
        *,
        keep: RetentionPolicy | None = None,
        allow_pickle: bool = False,
        take_over: bool = False,
        files: PosixFiles | None = None,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(
            path,
            metadata_handler,
            keep=keep,
            allow_pickle=allow_pickle,
            take_over=take_over,
            files=files,
            patience=patience,
        )
        self.node_name = check_name(node_name, "node")
        self._only_node = node_name

    def start_run(self, nodes: Sequence[str], info: Mapping[str, Any]) -> None:
        """See `MultiNodeCheckpointManager.start_run`; the nodes must be this one."""
        if tuple(nodes) != (self.node_name,):
            raise DefinitionError(
                f"A CheckpointManager saves one node, {self.node_name!r} here, and the job "
                f"checkpoints {', '.join(map(repr, nodes)) or 'none'}. Use a "
                f"MultiNodeCheckpointManager, or Job(nodes_to_checkpoint=[...])."
            )
        super().start_run(nodes, info)

    def get_ckpt_db_name(self, node: str | None, epoch: int) -> str:
        """See `CheckpointDirectory.get_ckpt_db_name`; None stands for the manager's node."""
        return super().get_ckpt_db_name(self.node_name if node is None else node, epoch)


def _store_names(entry: Entry, epoch: int, retry: int) -> list[str]:
    """Names of the stores of a claim, by the ``run`` or ``commit`` entry that names its nodes."""
    nodes = entry["nodes"] if entry["kind"] == "run" else entry["stores"]
    return [format_store_name(node, epoch, retry) for node in nodes]


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
