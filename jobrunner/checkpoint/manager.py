"""The checkpoint managers, which users pass to a `JobRunner` and read checkpoints with."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jobrunner.checkpoint.directory import Directory, EpochRecord
from jobrunner.checkpoint.directory_run import DirectoryRun
from jobrunner.checkpoint.epoch_axis import EpochAxis
from jobrunner.checkpoint.history_array import open_history
from jobrunner.checkpoint.keep_policies import RetentionPolicy
from jobrunner.checkpoint.load_plan import (
    choose_sources,
    plan_load,
    with_contents,
)
from jobrunner.checkpoint.log import MetadataHandler
from jobrunner.checkpoint.opened import Checkpoint, open_pinned, open_record, verify_record
from jobrunner.checkpoint.past_epochs import check_metadata, frame_of, read_past_epochs
from jobrunner.checkpoint.retention import Retention
from jobrunner.checkpoint.save_policies import SaveEvery, SavePolicy
from jobrunner.checkpoint.storage import FILES, Files, absolute_path, files_beside
from jobrunner.checkpoint.worker_load import load_group
from jobrunner.define import (
    ArrayOptions,
    Interval,
    Label,
    Natural,
    Seconds,
    TaskGroup,
    checked,
    read_compressors,
)
from jobrunner.errors import CheckpointError, DefinitionError
from jobrunner.names import check_name
from jobrunner.positions import EpochLike, Position, PublicPosition
from jobrunner.texts import Html, card, pairs, printable

if TYPE_CHECKING:
    from dask.array import Array
    from pandas import DataFrame
    from xarray import Dataset, DataTree

_EPOCHS = "a collection of epochs"


class MultiNodeCheckpointManager:
    """Saves and loads all nodes of a job: a Zarr store for each node and epoch, and a log.

    Parameters
    ----------
    path : str or os.PathLike
        A directory that the client and all workers share. The path is made absolute at once; a run
        creates the directory. Or a URL in an object store: ``s3://bucket/name``, ``gs://...``,
        ``az://...`` or ``memory://...``.
    metadata_handler : MetadataHandler, optional
        Stores the log; by default a `FileMetadataHandler`.
    save : SavePolicy
        When to save; by default after every epoch.
    keep : RetentionPolicy
        Which epochs to keep; by default all.
    asynchronous : bool
        Save in the background, which is the default: epochs go on while the ones before are written
        and recorded, in groups. NumPy arrays are saved by reference; everything else is copied
        first. At most 512 epochs are under way, and for a second; then the next one waits. False:
        each epoch waits until the one before is recorded.
    budget_bytes : int, optional
        With `asynchronous`: limit for each worker on the copies, together with the arrays that
        tasks may replace until they are written. An epoch that would exceed it waits. By default an
        eighth of the worker's memory.
    delete_on_success : bool
        Delete all epochs once the job has ended, exit group included.
    load_path : str or os.PathLike, optional
        Another directory to resume from while this one records no epoch. It is only read.
    compressors : str or codec of Zarr, optional
        For all blobs that name none themselves; see `Blob`. By default nothing is compressed.
    allow_pickle : bool
        Pickle blobs that cannot be saved otherwise, and unpickle them: a checkpoint can then run
        any code as you. Use it only if you trust everyone who can write to the directory.
    take_over : bool
        Take the directory even from a run that is alive; it ends with `CommitConflictError`.
    metadata : dict, optional
        What to add to the record of each epoch: JSON values by name, at most 64 KiB. `record`,
        `past_epochs` and ``jobrunner info`` show it.
    files : Files, optional
        How to access the file system; for tests.

    Raises
    ------
    DefinitionError
        An argument is invalid.

    Notes
    -----
    Making a manager touches no storage. Its methods need no cluster and no run; they only read,
    except `pin`, `unpin` and ``open(pin=True)``. Several runners may use one manager, one after
    another. `directory`, `origin`, `retention` and `run` are its parts, for `JobRunner`
    and the command line.
    """

    @checked
    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata_handler: Annotated[
            MetadataHandler,
            "a MetadataHandler, with set_params, append, last_number and entries",
        ]
        | None = None,
        *,
        save: Annotated[SavePolicy, "a SavePolicy, for example SaveEvery(epochs=5)"] | None = None,
        keep: Annotated[RetentionPolicy, "a RetentionPolicy, for example KeepLast(3)"]
        | None = None,
        asynchronous: bool = True,
        budget_bytes: Natural | None = None,
        delete_on_success: bool = False,
        load_path: str | os.PathLike[str] | None = None,
        compressors: object = None,
        allow_pickle: bool = False,
        take_over: bool = False,
        metadata: Mapping[str, Any] | None = None,
        files: Annotated[Files, FILES] | None = None,
    ) -> None:
        self.save_policy = SaveEvery(epochs=1) if save is None else save
        if budget_bytes is not None and not asynchronous:
            raise DefinitionError("budget_bytes requires asynchronous=True.")
        self.asynchronous, self.budget_bytes = asynchronous, budget_bytes
        self.directory = Directory(path, metadata_handler, files, allow_pickle=allow_pickle)
        self.path = self.directory.path
        self.origin: Directory | None = None  # of `load_path`
        if load_path is not None:
            origin_files = files_beside(absolute_path(load_path), files)
            self.origin = Directory(load_path, None, origin_files, allow_pickle=allow_pickle)
            if self.origin.path == self.path:
                raise DefinitionError(
                    f"load_path and path are both {self.path}. Omit load_path: a run resumes from "
                    f"path."
                )
        if compressors is not None:
            compressors = read_compressors(compressors, "compressors")
        self.metadata = check_metadata(metadata or {})
        self.retention = Retention(self.directory, keep)
        self.run = DirectoryRun(
            self.directory,
            self.retention,
            ArrayOptions(compressors),
            delete_on_success,
            take_over,
        )

    def __repr__(self) -> str:
        return printable(f"<{type(self).__name__} of {self.path}>")

    def _repr_html_(self) -> Html:
        try:
            epochs = self.epochs()
            recorded = f"{epochs[-1]}, the newest of {len(epochs)}" if epochs else "none"
        except (CheckpointError, OSError) as error:
            recorded = f"cannot be read: {error}"
        policies = {"saves": self.save_policy, "keeps": self.retention.policy}
        facts = {"recorded epoch": recorded, **policies}
        return card(type(self).__name__, self.path, pairs(facts))

    def epochs(self) -> list[int]:
        """The recorded whole epochs, in ascending order; none if the directory does not exist.

        Raises
        ------
        CheckpointError
            The directory cannot be read.
        """
        return [at.epoch for at in self.positions() if not at.step]

    def positions(self) -> list[Position]:
        """Everything that is recorded, in ascending order: whole epochs, and positions within one.

        Raises
        ------
        CheckpointError
            The directory cannot be read.
        """
        return self.directory.snapshot().epochs

    def latest(self) -> PublicPosition | None:
        """The newest recorded epoch, or position within one, if any."""
        latest = self.directory.snapshot().latest
        return None if latest is None else latest.public

    @checked
    def best(self, metric: Label, mode: Literal["min", "max"] = "min") -> PublicPosition:
        """The recorded epoch with the lowest or highest value of a metric, of several the newest.

        Raises
        ------
        CheckpointNotFoundError
            No recorded epoch has reported that metric.
        """
        return self.directory.resolve(f"best:{metric}:{mode}").public

    @checked
    def record(self, epoch: EpochLike) -> EpochRecord:
        """The record of an epoch in the log.

        Raises
        ------
        CheckpointNotFoundError
            The epoch is not recorded; the message names those that are.
        """
        snapshot = self.directory.snapshot()
        return self.directory.record(self.directory.resolve(epoch, snapshot), snapshot)

    def past_epochs(self) -> list[dict[str, Any]]:
        """What all runs have recorded of the epochs that led to the newest one, in their order.

        Returns
        -------
        list of dict
            Also of checkpoints that were removed later. Each has ``epoch``, an int or a `Position`;
            ``step``, 0 for whole epochs; ``time``; ``run``, the run's name; ``metrics`` and
            ``metadata``. Epochs that were run again, or not continued, are left out.

        Raises
        ------
        CheckpointError
            The log cannot be read. Damaged entries are left out.
        """
        return read_past_epochs(self.directory.log.read_entries())

    def metrics(self) -> DataFrame:
        """The metrics of all whole `past_epochs`; needs pandas."""
        return frame_of(self.past_epochs())

    @checked
    def history_of(
        self, blob: str, nodes: Collection[str] | None = None, epoch: EpochLike = "latest"
    ) -> Any:
        """All rows of a blob with ``history=`` as a `dask.array.Array`: nodes, rows, axes of a row.

        Parameters
        ----------
        blob : str
        nodes : collection of str, optional
            By default all that have the history. They must have as many rows.
        epoch : EpochLike
            The rows up to this recorded epoch. By default all that are recorded, also while a run
            goes on.

        Raises
        ------
        CheckpointNotFoundError
            The epoch is not recorded.
        BlobNotFoundError
            The blob has no history there, or none on a node that you named.
        DefinitionError
            The nodes have not equally many rows, or rows of another dtype or shape.

        Notes
        -----
        Lazy: computing it reads and verifies rows, and raises `CheckpointCorruptError` for damage.
        """
        return open_history(self.directory, self.record(epoch), blob, nodes)

    @checked
    def get_ckpt_db_name(self, node: str, epoch: EpochLike) -> str:
        """The absolute path of the store of `node` at `epoch`: the recorded one, or else the next.

        That is ``path/node.epoch``, with ``.r1``, ``.r2``, ... if earlier saves of the
        epoch have claimed that name.
        """
        return self.directory.next_store(node, self.directory.resolve(epoch))

    def pins(self) -> dict[PublicPosition, list[str]]:
        """The pinned epochs in ascending order, each with its labels."""
        pins = self.directory.snapshot().pins
        return {at.public: list(labels) for at, labels in sorted(pins.items())}

    @checked
    def pin(self, epoch: EpochLike, label: Label = "kept") -> None:
        """Keep a recorded epoch whatever the retention policy says.

        Parameters
        ----------
        label : str
            Whose pin it is. An epoch may have pins with different labels, and is kept until the
            last one is removed.

        Raises
        ------
        CheckpointError
            The epoch is not recorded, or the log could not be written.

        Notes
        -----
        Runs on the client, also while a run holds the directory. *Atomicity*: the ``pin`` entry of
        the log. An epoch is not deleted if that entry comes before the one that retires it. *Safe
        to retry*: yes. A rewind sets pinned epochs aside too, but deletes nothing.
        """
        self.directory.pin(self.directory.resolve(epoch), label)

    @checked
    def unpin(self, epoch: EpochLike, label: str | None = None) -> bool:
        """Remove the pin with a label, or by default all pins of an epoch.

        From the next commit on, the retention policy may retire the epoch.

        Returns
        -------
        bool
            Whether there was one.

        Raises
        ------
        CheckpointNotFoundError
            The epoch is not recorded.

        Notes
        -----
        Appends to the log, as `pin` does: *safe to retry*.
        """
        return self.directory.unpin(self.directory.resolve(epoch), label)

    @checked
    def watch(
        self,
        after: EpochLike | None = None,
        *,
        poll_seconds: Interval = 1.0,
        timeout_seconds: Seconds | None = None,
    ) -> Iterator[PublicPosition]:
        """Wait for epochs to be recorded, and yield each.

        Parameters
        ----------
        after : EpochLike, optional
            Yield only what is recorded after this recorded epoch; by default all.
        poll_seconds : float
            Time between two looks at the log.
        timeout_seconds : float, optional
            Stop after this time without a new epoch; by default never.

        Yields
        ------
        int or Position
            In ascending order; again if it was set aside and recorded anew.

        Raises
        ------
        CheckpointNotFoundError
            `after` is not recorded.

        Notes
        -----
        Runs on any machine that can read the directory. Stops once the run there has ended; waits
        if no run has begun yet, and if a run was killed, for the next one. The retention policy may
        retire an epoch before you have read it: ``open(epoch, pin=True)`` keeps it, or raises if
        it is gone.
        """
        last = None if after is None else self.directory.resolve(after)
        news = self.directory.watch(last, poll_seconds, timeout_seconds)
        return (at.public for at in news)

    @checked
    def verify(self, epoch: EpochLike) -> None:
        """Read every byte of a recorded epoch.

        Raises
        ------
        CheckpointCorruptError
            A file is not what was written; the message names the first such file.
        """
        verify_record(self.directory, self.record(epoch))

    @checked
    def open(self, epoch: EpochLike, *, pin: bool = False) -> Checkpoint:
        """Open a recorded epoch for reading: ``checkpoint[node][blob]``.

        Parameters
        ----------
        pin : bool
            Pin the epoch until `Checkpoint.close`; the checkpoint is a context manager.

        Raises
        ------
        CheckpointNotFoundError
            The epoch is not recorded.
        """
        if pin:
            return open_pinned(self.directory, self.directory.resolve(epoch))
        return open_record(self.directory, self.record(epoch))

    @checked
    def array(
        self,
        blob: str,
        nodes: Collection[str] | None = None,
        epochs: Annotated[Collection[EpochLike], _EPOCHS] | None = None,
    ) -> Array:
        """Open a blob of many epochs as one lazy `dask.array.Array`.

        Parameters
        ----------
        nodes : collection of str, optional
            By default all that have the blob.
        epochs : collection of EpochLike, optional
            By default all whole ones that are recorded.

        Returns
        -------
        dask.array.Array
            Of the shape (epochs, nodes, ...), or (epochs, ...) of a single node. The parts of a
            partitioned blob are joined along its axis. Its tasks verify what they read, and need no
            cluster; a value that several epochs have is read once a chunk, and once in all if it
            has 8 MiB or more.

        Raises
        ------
        CheckpointNotFoundError
            One of `epochs` is not recorded.
        BlobNotFoundError
            Some of the epochs lack the blob; the message names them.
        DefinitionError
            The blob is neither an array nor a number, or differs in shape or dtype between nodes.
        CheckpointError
            It differs between epochs; raised by the tasks that read them.
        """
        return EpochAxis(self.directory, epochs).array(blob, nodes)

    @checked
    def to_xarray(
        self,
        epochs: Annotated[Collection[EpochLike], _EPOCHS] | None = None,
        nodes: Collection[str] | None = None,
        blobs: Collection[str] | None = None,
    ) -> Dataset | DataTree:
        """Open many epochs as an xarray Dataset, with what was reported of them; needs xarray.

        Returns
        -------
        xarray.Dataset or xarray.DataTree
            Variables are the blobs, lazy and as in `array`, and the metrics, along the coordinate
            ``epoch``. A `DataTree` with a child for each node if the nodes have different blobs, or
            blobs of different shapes. Axes have the names that ``Blob(dims=...)`` gave them. A metric
            with the name of a blob is called ``metric_...``, a blob with that of an axis ``blob_...``.

            Where epochs lack a blob, it is NaN or NaT, integers and bools become floats, and its
            attribute ``missing`` says so. By default, blobs for which that is impossible (parts of
            arrays, texts) and those that are neither arrays nor numbers are left out: the
            attribute ``left_out`` lists them.

        Raises
        ------
        DefinitionError
            xarray is not installed, or as in `array`, as all else.
        """
        return EpochAxis(self.directory, epochs).dataset(nodes, blobs)

    @checked
    def load(
        self,
        epoch: EpochLike,
        *,
        nodes: Collection[str] | None = None,
        blobs: Mapping[str, Collection[str]] | None = None,
        partitions: Mapping[str, Sequence[str]] | None = None,
    ) -> TaskGroup:
        """Make the task group that loads a recorded epoch.

        Parameters
        ----------
        nodes : collection of str, optional
            Load only these nodes; by default all.
        blobs : mapping of str to collection of str, optional
            Node -> the blobs to load; the node's other blobs stay. By default all blobs, replacing
            whatever the node has. A node that was not saved may load replicated and partitioned
            blobs.
        partitions : mapping of str to sequence of str, optional
            Name of a blob that was saved partitioned -> the nodes that get its parts now. If these
            are not the nodes that saved it, it is cut anew.

        Returns
        -------
        TaskGroup
            For `Session.run`. It verifies everything on all nodes before it replaces any blob.

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
        replaced before all are verified. *Safe to retry*: yes. During a run, the retention policy
        does not retire the epoch that was loaded last.
        """
        directory = self.directory
        record = with_contents(directory, self.record(epoch))
        sources = choose_sources(directory, record, nodes, blobs)
        loads = plan_load(directory, record, sources, partitions=partitions)
        directory.loaded = record.at
        return load_group(loads, replaces=blobs is None)


class CheckpointManager(MultiNodeCheckpointManager):
    """Saves and loads the node `node_name` of a job; otherwise as `MultiNodeCheckpointManager`.

    `options` are the keywords of that class.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        node_name: str,
        metadata_handler: MetadataHandler | None = None,
        **options: Any,
    ) -> None:
        super().__init__(path, metadata_handler, **options)
        self.node_name = self.directory.only_node = check_name(node_name, "node")

    @checked
    def get_ckpt_db_name(self, node: str | None, epoch: EpochLike) -> str:
        """As `MultiNodeCheckpointManager.get_ckpt_db_name`; None means the manager's node."""
        return super().get_ckpt_db_name(self.node_name if node is None else node, epoch)
