"""The checkpoint manager: it saves epochs, keeps or retires them, and loads them again."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypedDict

from jobrunner.checkpoint.directory import REPLICATED, CheckpointDirectory
from jobrunner.checkpoint.encoding import registered_codecs
from jobrunner.checkpoint.held import HeldDirectory, as_json
from jobrunner.checkpoint.log import Claim, MetadataHandler, Patience, store_names
from jobrunner.checkpoint.policies import RetentionPolicy, SaveEvery, SavePolicy
from jobrunner.checkpoint.save import BlobCheck, SaveOrder
from jobrunner.checkpoint.storage import PosixFiles, absolute_path, files_beside
from jobrunner.checkpoint.store import Receipt, check_compressors, resolve_storage
from jobrunner.define import ArrayOptions, TaskGroup, read_compressors
from jobrunner.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    DefinitionError,
)

logger = logging.getLogger(__name__)


class ManagerOptions(TypedDict, total=False):
    """The keywords of `MultiNodeCheckpointManager`, which documents them."""

    save: SavePolicy | None
    keep: RetentionPolicy | None
    asynchronous: bool
    budget_bytes: int | None
    delete_on_success: bool
    load_path: str | os.PathLike[str] | None
    compressors: object
    allow_pickle: bool
    take_over: bool
    files: PosixFiles | None
    patience: Patience | None


class MultiNodeCheckpointManager(HeldDirectory):
    """Saves and loads all nodes of a job: a Zarr store for each node and epoch, and a log.

    Parameters
    ----------
    path : str or os.PathLike
        A directory that the client and all workers have in common, made absolute here and
        created when a run begins; or the URL of one in an object store, ``s3://bucket/name``,
        ``gs://...``, ``az://...`` or ``memory://...``.
    metadata_handler : MetadataHandler, optional
        Keeps the log; by default a `FileMetadataHandler`.
    save : SavePolicy
        When to save; by default after every epoch.
    keep : RetentionPolicy
        Which epochs to keep.
    asynchronous : bool
        Let the epochs go on, and write meanwhile what the blobs were: arrays that only a blob
        holds by reference, anything else from copies that are made before. At most one save is in
        flight; the next one waits for it.
    budget_bytes : int, optional
        With `asynchronous`: longest that copies, and arrays that tasks may replace meanwhile, may
        be together on one worker. What is beyond is written before the epochs go on.
    delete_on_success : bool
        Give all epochs up once the job has ended, exit group and all.
    load_path : str or os.PathLike, optional
        Another checkpoint directory, to begin from where this one records nothing yet. It is
        only read.
    compressors : str, codec of Zarr's, or a sequence of them, optional
        For all blobs that do not say otherwise; as for `Blob`. By default nothing is compressed.
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
        compressors: object = None,
        allow_pickle: bool = False,
        take_over: bool = False,
        files: PosixFiles | None = None,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(
            path,
            metadata_handler,
            keep=keep,
            delete_on_success=delete_on_success,
            allow_pickle=allow_pickle,
            take_over=take_over,
            files=files,
            patience=patience,
        )
        self.save_policy = save if save is not None else SaveEvery(epochs=1)
        if not isinstance(self.save_policy, SavePolicy):
            raise DefinitionError(
                f"save is a SavePolicy such as SaveEvery(epochs=5); got {save!r}."
            )
        self.asynchronous = bool(asynchronous)
        if budget_bytes is not None and (
            not isinstance(budget_bytes, int) or isinstance(budget_bytes, bool) or budget_bytes < 0
        ):
            raise DefinitionError(f"budget_bytes is a number of bytes; got {budget_bytes!r}.")
        if budget_bytes is not None and not asynchronous:
            raise DefinitionError("budget_bytes bounds the copies of asynchronous=True; give both.")
        self.budget_bytes = budget_bytes
        self._origin = None
        if load_path is not None:
            beside = files_beside(absolute_path(load_path), files)
            self._origin = CheckpointDirectory(
                load_path, None, allow_pickle=allow_pickle, files=beside
            )
        if self._origin is not None and self._origin.path == self.path:
            raise DefinitionError(
                f"load_path is another directory than path, and both are {self.path}. Leave "
                f"load_path out: a run goes on from its own directory anyway."
            )
        self._storage = ArrayOptions(
            None
            if compressors is None
            else check_compressors(read_compressors(compressors, "compressors"), "compressors")
        )
        self._unfinished: dict[Claim, SaveOrder] = {}
        self._abandoned: dict[Claim, SaveOrder] = {}
        # Number of the newest commit entry, and that epoch's stores with their manifests' digests.
        self._newest: tuple[int, dict[str, tuple[str, str]]] | None = None

    def load(
        self,
        epoch: int,
        *,
        nodes: Collection[str] | None = None,
        blobs: Mapping[str, Collection[str]] | None = None,
        partitions: Mapping[str, Sequence[str]] | None = None,
        anew: Mapping[str, Collection[str]] | None = None,
        from_memory: bool = False,
    ) -> TaskGroup:
        """See `CheckpointDirectory.load`; in a run, the epoch is kept until the run ends."""
        group = super().load(
            epoch,
            nodes=nodes,
            blobs=blobs,
            partitions=partitions,
            anew=anew,
            from_memory=from_memory,
        )
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

    def end_run(self) -> None:
        """See `HeldDirectory.end_run`; what was begun and not committed is abandoned."""
        try:
            for order in [*self._unfinished.values(), *self._abandoned.values()]:
                self.abandon(order)
        finally:
            self._unfinished, self._abandoned = {}, {}
            super().end_run()

    # --- saving

    def check_storage(self, storage: Mapping[str, Mapping[str, ArrayOptions]]) -> None:
        """Refuse what no store could be written with; `begin` says what it takes.

        Raises
        ------
        DefinitionError
        """
        resolve_storage(storage)

    def blob_check(
        self,
        initial: Mapping[str, Collection[str]] | None = None,
        storage: Mapping[str, Mapping[str, ArrayOptions]] | None = None,
    ) -> BlobCheck:
        """What finds out, on the workers and without storage, whether all blobs can be saved.

        Parameters
        ----------
        initial, storage
            See `begin`.

        Returns
        -------
        BlobCheck
            To be called on every worker with its workspaces; picklable.
        """
        return BlobCheck(
            frozenset(self._held().nodes),
            registered_codecs(),
            self._allow_pickle,
            initial,
            resolve_storage(storage or {}),
            self._storage,
        )

    def begin(
        self,
        epoch: int,
        *,
        replicated: Mapping[str, Sequence[str]] | None = None,
        initial: Mapping[str, Collection[str]] | None = None,
        details: Mapping[str, Any] | None = None,
        storage: Mapping[str, Mapping[str, ArrayOptions]] | None = None,
    ) -> SaveOrder:
        """Claim the names of an epoch's stores.

        Parameters
        ----------
        epoch : int
        replicated : mapping of str to sequence of str, optional
            Name of a blob -> the nodes that have it; the first one saves it.
        initial : mapping of str to collection of str, optional
            Node -> the blobs that its init tasks make, and so make anew for a saved state.
        details : mapping, optional
            What `commit` will be told: JSON, which may hold NaN and infinities. A store keeps it,
            so that the record can be made again where the log has lost it.
        storage : mapping of str to mapping of str to ArrayOptions, optional
            Node -> name of a blob -> how its arrays are stored.

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
        shared = {name: list(nodes) for name, nodes in (replicated or {}).items()}
        kept = {**(details or {}), **({REPLICATED: shared} if shared else {})}
        kept = as_json(kept, "details")
        check = self.blob_check(initial, storage)
        for order in list(self._unfinished.values()):
            self.abandon(order)
        # The disk needs room for what is kept and one epoch more, however slowly it deletes.
        self.settle()
        with self._writing(f"the save of epoch {epoch} could not be begun"):
            retry = self._journal.check_held().claims.get(epoch, 0)
            # What lies there without a claim is none of ours, and stays.
            while any(
                self._files.each(
                    self._files.is_taken,
                    [
                        os.path.join(self.path, store)
                        for store in store_names(hold.nodes, epoch, retry).values()
                    ],
                )
            ):
                retry += 1
            self._append("begin", {"epoch": epoch, "retry": retry})
        claim = Claim(epoch, retry)
        order = SaveOrder(
            self.path,
            hold.run,
            claim,
            store_names(hold.nodes, epoch, retry),
            check,
            self._files,
            self._former(),
            shared,
            kept,
        )
        self._unfinished[claim] = order
        return order

    def _former(self) -> dict[str, tuple[str, str]]:
        """The newest recorded stores, which the next ones may share unchanged chunks with."""
        state = self._journal.known()  # as of the claim: reading again could fail
        latest = state.latest
        if latest is None:
            return {}
        number = state.commit_number(latest)
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
                    **({"states": list(names)} if (names := receipts[node].states) else {}),
                }
                for node in order.stores
            },
            "details": as_json(details, "details"),
        }
        with self._writing(f"epoch {epoch} could not be recorded"):
            state = self._journal.check_held()
            if order.claim not in self._unfinished:
                raise CheckpointWriteError(
                    f"The save of epoch {epoch} in {self.path} was abandoned. Begin it again."
                )
            replaced = None
            if epoch in state.recorded:
                try:
                    replaced = self._names_of(state, epoch)
                except CheckpointCorruptError as error:
                    logger.warning("What epoch %d replaces stays: %s", epoch, error)
            entry = self._append("commit", body)
        # From here on the epoch exists, and nothing that fails may say otherwise.
        self._newest = (
            entry.number,
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

    def _report_save(self, seconds: Mapping[str, float]) -> None:
        try:
            self._handler.report("checkpoint_save", seconds)
        except Exception:
            logger.warning("The metadata handler failed to take a report", exc_info=True)


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
