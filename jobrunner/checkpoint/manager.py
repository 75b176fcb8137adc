"""The checkpoint managers: what users read and hand to a `JobRunner`, composed of its parts."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from jobrunner.checkpoint.commits import Commits
from jobrunner.checkpoint.directory_run import DirectoryRun
from jobrunner.checkpoint.epochs import Epochs
from jobrunner.checkpoint.loader import Loader
from jobrunner.checkpoint.log import MetadataHandler, Patience
from jobrunner.checkpoint.policies import RetentionPolicy, SaveEvery, SavePolicy
from jobrunner.checkpoint.retention import Retention
from jobrunner.checkpoint.storage import Files, absolute_path, files_beside
from jobrunner.checkpoint.store import Checkpoint, check_compressors
from jobrunner.define import ArrayOptions, TaskGroup, check_int, read_compressors
from jobrunner.errors import CheckpointCorruptError, CheckpointNotFoundError, DefinitionError
from jobrunner.names import check_name


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
    files: Files | None
    patience: Patience | None


class MultiNodeCheckpointManager:
    """Saves and loads all nodes of a job: a Zarr store for each node and epoch, and a log.

    Parameters
    ----------
    path : str or os.PathLike
        A directory that the client and all workers share. It is made absolute here, and created
        when a run begins. Or a URL in an object store: ``s3://bucket/name``, ``gs://...``,
        ``az://...`` or ``memory://...``.
    metadata_handler : MetadataHandler, optional
        Keeps the log; by default a `FileMetadataHandler`.
    save : SavePolicy
        When to save; by default after every epoch.
    keep : RetentionPolicy
        Which epochs to keep; by default all.
    asynchronous : bool
        Save in the background: later epochs run while this one is written. Arrays that only a blob
        refers to are saved by reference, everything else is copied first. At most one save runs at
        a time; the next one waits for it.
    budget_bytes : int, optional
        With `asynchronous`: limit on one worker of the copies, together with the arrays that tasks
        may replace in the meantime. What exceeds it is written before the epochs continue.
    delete_on_success : bool
        Delete all epochs once the job has ended, exit group included.
    load_path : str or os.PathLike, optional
        Another checkpoint directory, to begin from while this one records no epoch. It is only
        read.
    compressors : str, codec of Zarr, or a sequence of them, optional
        For all blobs that do not name their own; as for `Blob`. By default nothing is compressed.
    allow_pickle : bool
        Pickle blobs that cannot be saved otherwise, and unpickle them. Use it only with
        directories whose writers you trust.
    take_over : bool
        Take the directory even from a run that is alive. That run ends with
        `CommitConflictError`.
    files : Files, optional
        How the file system is accessed; for tests.
    patience : Patience, optional
        How long a silent run counts as alive; for tests.

    Raises
    ------
    DefinitionError
        An argument is invalid.

    Notes
    -----
    Making a manager touches no storage. Its methods read, and need no cluster and no run; only
    `pin`, `unpin` and ``open(pin=True)`` write. One manager may serve several runners, one after
    another. `recorded`, `loader`, `retention`, `commits` and `run` are its parts, for `JobRunner`
    and the command line.
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
        files: Files | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.save_policy = save if save is not None else SaveEvery(epochs=1)
        if not isinstance(self.save_policy, SavePolicy):
            raise DefinitionError(
                f"save must be a SavePolicy such as SaveEvery(epochs=5); got {save!r}."
            )
        self.asynchronous = bool(asynchronous)
        if budget_bytes is not None:
            check_int(budget_bytes, 0, "budget_bytes")
            if not asynchronous:
                raise DefinitionError("budget_bytes requires asynchronous=True.")
        self.budget_bytes = budget_bytes
        self.recorded = Epochs(path, metadata_handler, files)
        self.path = self.recorded.path
        self.loader = Loader(self.recorded, allow_pickle=allow_pickle)
        self._origin: Loader | None = None
        if load_path is not None:
            origin = Epochs(load_path, None, files_beside(absolute_path(load_path), files))
            if origin.path == self.path:
                raise DefinitionError(
                    f"load_path must differ from path, and both are {self.path}. Leave load_path "
                    f"out: a run resumes from its own directory anyway."
                )
            self._origin = Loader(origin, allow_pickle=allow_pickle)
        if compressors is not None:
            given = read_compressors(compressors, "compressors")
            compressors = check_compressors(given, "compressors")
        options = ArrayOptions(compressors)
        self.retention = Retention(self.recorded, keep)
        self.commits = Commits(self.recorded, self.retention, options, allow_pickle=allow_pickle)
        self.run = DirectoryRun(
            self.recorded,
            self.retention,
            self.commits,
            delete_on_success=bool(delete_on_success),
            take_over=take_over,
            patience=patience,
        )

    def epochs(self) -> list[int]:
        """The recorded epochs, in ascending order; none if there is nothing at the path.

        Raises
        ------
        CheckpointError
            The directory cannot be read.
        """
        return self.recorded.all()

    def latest(self) -> int | None:
        """The newest recorded epoch, if any."""
        return self.recorded.latest()

    def record(self, epoch: int) -> Mapping[str, Any]:
        """What the log says of a recorded epoch.

        Returns
        -------
        mapping
            ``epoch``, ``time``, ``run``; ``stores``, by node: ``store`` (its name), ``manifest``
            (SHA-256), ``nbytes``, ``seconds``; and ``details``, what the runner added.

        Raises
        ------
        CheckpointNotFoundError
            The epoch is not recorded; names the epochs that are.
        """
        return self.recorded.record(epoch)

    def records(
        self, epochs: Iterable[int] | None = None
    ) -> Iterator[tuple[int, Mapping[str, Any] | CheckpointCorruptError]]:
        """Recorded epochs, each with its record, or with the error that says why it has none.

        Parameters
        ----------
        epochs : iterable of int, optional
            By default all, in ascending order.

        Raises
        ------
        CheckpointError
            The storage fails.
        """
        return self.recorded.records(epochs)

    def get_ckpt_db_name(self, node: str, epoch: int) -> str:
        """Where the store of `node` at `epoch` lies, or would lie if it were saved next.

        Returns
        -------
        str
            An absolute path, ``path/node.epoch``; with ``.r1``, ``.r2``, ... if earlier attempts
            to save the epoch had claimed that name.
        """
        return self.recorded.get_ckpt_db_name(node, epoch)

    def pins(self) -> dict[int, list[str]]:
        """The pinned epochs in ascending order, each with its labels."""
        return self.recorded.pins()

    def pin(self, epoch: int, label: str = "kept") -> None:
        """Keep a recorded epoch whatever the retention policy says.

        Parameters
        ----------
        epoch : int
        label : str
            Whose pin it is. An epoch may be pinned under several labels, and is kept while one is
            left.

        Raises
        ------
        CheckpointNotFoundError
            The epoch is not recorded.
        CheckpointWriteError
            The log could not be written.

        Notes
        -----
        Runs on the client, also while a run holds the directory. *Atomicity*: the ``pin`` entry of
        the log; an epoch pinned before its retirement is logged is not deleted. *Safe to retry*:
        yes. A rewind sets a pinned epoch aside too, and deletes nothing.
        """
        self.recorded.pin(epoch, label)

    def unpin(self, epoch: int, label: str | None = None) -> bool:
        """Remove a pin.

        Parameters
        ----------
        epoch : int
        label : str, optional
            By default all pins of the epoch are removed.

        Returns
        -------
        bool
            Whether there was one.

        Notes
        -----
        Raises, runs and retries as `pin` does. The retention policy judges the epoch again at the
        next commit.
        """
        return self.recorded.unpin(epoch, label)

    def watch(
        self,
        after: int | None = None,
        *,
        poll_seconds: float = 1.0,
        timeout_seconds: float | None = None,
    ) -> Iterator[int]:
        """Wait for epochs to be recorded, and yield each.

        Parameters
        ----------
        after : int, optional
            Yield only what is recorded after this recorded epoch; by default all.
        poll_seconds : float
            How often to look.
        timeout_seconds : float, optional
            End if nothing new is recorded for so long.

        Yields
        ------
        int
            An epoch, in ascending order; again if it was set aside and recorded anew.

        Raises
        ------
        CheckpointNotFoundError
            `after` is not recorded.

        Notes
        -----
        Runs anywhere the directory is mounted. Ends once the run that writes there has ended. It
        waits for a run that has not begun yet, and for the successor of one that was killed. A
        retention policy may retire an epoch before you have read it: ``open(epoch, pin=True)``
        keeps it, or says that it is gone.
        """
        return self.recorded.watch(after, poll_seconds, timeout_seconds)

    def verify(self, epoch: int) -> None:
        """Read every byte of a recorded epoch.

        Raises
        ------
        CheckpointCorruptError
            A file is not what was written: names the first one, what was expected and found.
        """
        self.loader.verify(epoch)

    def open(self, epoch: int, *, pin: bool = False) -> Checkpoint:
        """Open a recorded epoch for reading: ``checkpoint[node][blob]``.

        Parameters
        ----------
        epoch : int
        pin : bool
            Keep the epoch, whatever the retention policy says, until `Checkpoint.close`; the
            checkpoint is a context manager. Writes to the log.

        Raises
        ------
        CheckpointNotFoundError
            The epoch is not recorded.
        """
        return self.loader.open(epoch, pin=pin)

    def load(
        self,
        epoch: int,
        *,
        nodes: Collection[str] | None = None,
        blobs: Mapping[str, Collection[str]] | None = None,
        partitions: Mapping[str, Sequence[str]] | None = None,
    ) -> TaskGroup:
        """Make the task group that loads a recorded epoch; in a run, that epoch is kept.

        Parameters
        ----------
        epoch : int
        nodes, blobs, partitions
            See `Loader.load`. By default all blobs of all nodes.

        Returns
        -------
        TaskGroup
            For `Session.run`. It verifies everything on all nodes, and only then replaces the
            nodes' global blobs.

        Raises
        ------
        CheckpointNotFoundError
            The epoch is not recorded.
        BlobNotFoundError
            A node or blob that you named is not in it.

        Notes
        -----
        Runs on the client; the group's tasks run on the nodes' workers, and raise
        `CheckpointCorruptError` if something is not what was written. *Atomicity*: no blob is
        replaced before all are verified. *Safe to retry*: yes.
        """
        return self.loader.load(epoch, nodes=nodes, blobs=blobs, partitions=partitions)

    def source(self) -> Loader:
        """What a run would resume from: this directory, or `load_path` while it records nothing.

        Raises
        ------
        CheckpointNotFoundError
            `load_path` records no epoch either.
        """
        if self._origin is None or self.epochs():
            return self.loader
        if not self._origin.recorded.all():
            raise CheckpointNotFoundError(
                f"load_path {self._origin.path} records no epoch. Name the directory of a run that "
                f"has recorded one, or leave load_path out to start afresh."
            )
        return self._origin


class CheckpointManager(MultiNodeCheckpointManager):
    """Saves and loads one node of a job; otherwise the same as `MultiNodeCheckpointManager`.

    Parameters
    ----------
    path : str or os.PathLike
    node_name : str
    metadata_handler : MetadataHandler, optional
    **options
        As for `MultiNodeCheckpointManager`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        node_name: str,
        metadata_handler: MetadataHandler | None = None,
        **options: Unpack[ManagerOptions],
    ) -> None:
        super().__init__(path, metadata_handler, **options)
        self.node_name = self.recorded.only_node = check_name(node_name, "node")

    def get_ckpt_db_name(self, node: str | None, epoch: int) -> str:
        """See `MultiNodeCheckpointManager.get_ckpt_db_name`; None stands for the manager's node."""
        return super().get_ckpt_db_name(self.node_name if node is None else node, epoch)
