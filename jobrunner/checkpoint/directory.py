"""What a checkpoint directory holds: reading it, with or without a cluster."""

from __future__ import annotations

import os
import platform
import time
import urllib.parse
import urllib.request
import uuid
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from jobrunner.checkpoint.codecs import registered_codecs
from jobrunner.checkpoint.files import PosixFiles
from jobrunner.checkpoint.journal import Journal
from jobrunner.checkpoint.load import Part, Reading, cut_evenly, load_group
from jobrunner.checkpoint.log import FileMetadataHandler, MetadataHandler
from jobrunner.checkpoint.reader import StoreReader
from jobrunner.checkpoint.records import Entry, State, loose_json
from jobrunner.checkpoint.view import Checkpoint
from jobrunner.errors import (
    BlobNotFoundError,
    CheckpointCorruptError,
    CheckpointNotFoundError,
    DefinitionError,
)
from jobrunner.names import format_store_name, parse_store_name
from jobrunner.task import TaskGroup, TaskOutput

DEFAULT_LABEL = "kept"
"""Of a pin that nobody gave a label of its own."""

REPLICATED = "replicated"
"""Detail of a record: name of a blob -> the nodes that have it; the first one's store holds it."""

PARTITIONS = "partitions"
"""Detail of a record: name of a blob -> its axis, and the nodes that hold its parts, in order."""

_NAMED_EPOCHS = 12


class CheckpointDirectory:
    """The recorded epochs of a directory. `MultiNodeCheckpointManager` documents the parameters.

    Notes
    -----
    Runs on the client. All that it says, it says from the log as it is at the call.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata_handler: MetadataHandler | None,
        *,
        allow_pickle: bool,
        files: PosixFiles | None,
        only_node: str | None = None,
    ) -> None:
        self.path = absolute_path(path)
        self._files = files if files is not None else PosixFiles()
        if metadata_handler is None:
            metadata_handler = FileMetadataHandler(self._files)
        elif not isinstance(metadata_handler, MetadataHandler):
            raise DefinitionError(
                f"metadata_handler is a MetadataHandler; got {type(metadata_handler).__name__}, "
                f"which lacks some of its methods: set_params, append, write, last_number, "
                f"entries, last_epoch, report, accessible."
            )
        self._handler = metadata_handler
        self._handler.set_params(self.path, () if only_node is None else (only_node,))
        self._journal = Journal(self._handler, self.path)
        self._allow_pickle = allow_pickle
        self._only_node = only_node
        self._load_seconds: weakref.WeakKeyDictionary[
            TaskGroup, tuple[str, dict[str, TaskOutput]]
        ] = weakref.WeakKeyDictionary()

    # --- what the log says

    def epochs(self) -> list[int]:
        """The recorded epochs, in ascending order.

        Raises
        ------
        CheckpointError
            The directory cannot be read; nothing there at all is no epochs instead.
        """
        return list(self._journal.refresh().recorded)

    def latest(self) -> int | None:
        """The newest recorded epoch, if there is one."""
        return self._journal.refresh().latest

    def is_done(self) -> bool:
        """Whether the job had ended, exit group and all, after the newest recorded epoch."""
        state = self._journal.refresh()
        return state.done is not None and state.done == state.latest

    def record(self, epoch: int) -> Mapping[str, Any]:
        """What the log says of a recorded epoch.

        Parameters
        ----------
        epoch : int

        Returns
        -------
        mapping
            ``epoch``, ``time``, ``run``; ``stores``, by node: ``store`` (its name), ``manifest``
            (SHA-256), ``nbytes``, ``seconds``; and ``details``, what the runner wanted to keep.

        Raises
        ------
        CheckpointNotFoundError
            It is not recorded; names the epochs that are.
        """
        state = self._journal.refresh()
        self._check_recorded(epoch, state)
        entry = self._journal.read_entry(state.commit_number(epoch))
        try:
            if entry["kind"] != "commit" or entry["epoch"] != epoch:
                raise ValueError(f"it is a {entry['kind']} of epoch {entry.get('epoch')}")
            for node, about in entry["stores"].items():
                expected = (node, epoch, entry["retry"])
                if parse_store_name(about["store"]) != expected or not about["manifest"]:
                    raise ValueError(f"{about['store']!r} cannot be the store of node {node!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointCorruptError(
                f"{self.path}: entry {state.commit_number(epoch)} of the log is not the record of "
                f"epoch {epoch} that it should be: {error}. Restore it from a copy."
            ) from error
        record: Mapping[str, Any] = loose_json(entry)
        if self._only_node is None:
            return record
        stores = {node: s for node, s in record["stores"].items() if node == self._only_node}
        return {**record, "stores": stores}

    def state(self) -> State:
        """All that the log says."""
        return self._journal.refresh()

    def entry(self, number: int) -> Entry:
        """An entry of the log, which must exist."""
        return self._journal.read_entry(number)

    def entries(self) -> Iterator[Entry]:
        """All entries of the log, in order, read as they are asked for.

        Raises
        ------
        CheckpointCorruptError
            One is damaged.
        CheckpointError
            One cannot be read.
        """
        return self._journal.read_entries()

    @property
    def files(self) -> PosixFiles:
        """How the file system is used."""
        return self._files

    def run_info(self, epoch: int) -> Mapping[str, Any]:
        """What the run that recorded `epoch` said of itself when it began."""
        entry = self._journal.read_entry(self.record(epoch)["run_number"])
        info: Mapping[str, Any] = loose_json(entry["info"])
        return info

    def get_ckpt_db_name(self, node: str, epoch: int) -> str:
        """Where the store of `node` at `epoch` lies, or would lie if it were saved next.

        Returns
        -------
        str
            An absolute path, ``path/node.epoch``; with ``.r1``, ``.r2``, ... where earlier
            attempts to save the epoch had claimed that name.
        """
        state = self._journal.refresh()
        retry = state.retries.get(epoch, state.claims.get(epoch, 0))
        return os.path.join(self.path, format_store_name(node, epoch, retry))

    def pins(self) -> dict[int, list[str]]:
        """The recorded epochs that are pinned, in ascending order, and under which labels."""
        return {e: list(labels) for e, labels in sorted(self._journal.refresh().pins.items())}

    def pin(self, epoch: int, label: str = DEFAULT_LABEL) -> None:
        """Keep a recorded epoch whatever the retention policy says.

        Parameters
        ----------
        epoch : int
        label : str
            Whose pin it is; an epoch may be pinned under several, and is kept while one is left.

        Raises
        ------
        CheckpointNotFoundError
            The epoch is not recorded.
        CheckpointWriteError
            The log could not be written.

        Notes
        -----
        Runs on the client, also while a run holds the directory. *Atomicity*: the ``pin`` entry of
        the log. What comes first there counts: an epoch that is pinned is not deleted any more.
        *Safe to retry*: yes. A rewind sets a pinned epoch aside all the same, and deletes nothing.
        """
        if not isinstance(label, str) or not label or not label.isprintable():
            raise DefinitionError(f"A pin's label is printable text; got {label!r}.")

        def decide(state: State) -> Mapping[str, Any] | None:
            self._check_recorded(epoch, state)
            if label in state.pins.get(epoch, ()):
                return None
            return {"epoch": epoch, "label": label}

        self._journal.note("pin", decide)

    def unpin(self, epoch: int, label: str | None = None) -> bool:
        """Take a pin away.

        Parameters
        ----------
        epoch : int
        label : str, optional
            By default all of the epoch's pins are taken away.

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
        Runs on the client, also while a run holds the directory. *Safe to retry*: yes. The
        retention policy judges the epoch again at the next commit.
        """

        def decide(state: State) -> Mapping[str, Any] | None:
            self._check_recorded(epoch, state)
            labels = state.pins.get(epoch, ())
            if not labels if label is None else label not in labels:
                return None
            return {"epoch": epoch, "label": label}

        return self._journal.note("unpin", decide) is not None

    def watch(
        self,
        after: int | None = None,
        *,
        poll_seconds: float = 1.0,
        timeout_seconds: float | None = None,
    ) -> Iterator[int]:
        """Wait for epochs to be recorded, and give each as it is.

        Parameters
        ----------
        after : int, optional
            Give only what is recorded after this recorded epoch; by default all there is, first.
        poll_seconds : float
            How often to look.
        timeout_seconds : float, optional
            End when so long nothing new was recorded.

        Yields
        ------
        int
            An epoch, in ascending order; again where it was set aside and recorded anew.

        Raises
        ------
        CheckpointNotFoundError
            `after` is not recorded.

        Notes
        -----
        Runs anywhere the directory is mounted. Ends once the run that writes there has ended; as
        long as nobody has begun one, it waits. A retention policy may give an epoch up before you
        have read it: ``open(epoch, pin=True)`` says so, or keeps it.
        """
        seen = -1
        if after is not None:
            state = self._journal.refresh()
            self._check_recorded(after, state)
            seen = state.recorded[after]
        last_news = time.monotonic()
        while True:
            state = self._journal.refresh()
            epochs = state.recorded.keys_in_order()
            known = len(epochs)
            while known and state.recorded[epochs[known - 1]] > seen:
                known -= 1
            news = list(epochs[known:])
            if news:
                seen = state.recorded[news[-1]]
                yield from news
                last_news = time.monotonic()
                continue  # more may have come while these were worked on
            if state.run is not None and state.is_ended:
                return
            left = poll_seconds
            if timeout_seconds is not None:
                left = min(left, last_news + timeout_seconds - time.monotonic())
                if left <= 0:
                    return
            time.sleep(left)

    # --- what the stores hold

    def blobs(self, epoch: int) -> dict[str, list[str]]:
        """Names of the blobs of each node at a recorded epoch.

        Raises
        ------
        CheckpointCorruptError
            A manifest is missing or not what was written.
        """
        with self._reading(epoch):
            found = {
                node: list(reader.read_manifest()["blobs"])
                for node, reader in self._readers(epoch).items()
            }
        for name, nodes in self.record(epoch)["details"].get(REPLICATED, {}).items():
            for node in nodes[1:]:
                if node in found and nodes[0] in found:
                    found[node].append(name)
        return found

    def shared_blobs(self, epoch: int) -> frozenset[str]:
        """Names of the blobs that nodes which were not saved can load too."""
        details = self.record(epoch)["details"]
        return frozenset(details.get(REPLICATED, ())) | frozenset(details.get(PARTITIONS, ()))

    def verify(self, epoch: int) -> None:
        """Read every byte of a recorded epoch.

        Raises
        ------
        CheckpointCorruptError
            Naming the first file that is not what was written, what was expected and found.
        """
        with self._reading(epoch):
            for reader in self._readers(epoch).values():
                reader.verify()

    def verify_log(self) -> None:
        """Read the log from its first entry on: every entry, and every full state in it.

        Raises
        ------
        CheckpointCorruptError
            An entry is missing, damaged or cannot follow on what came before, or a full state is
            not what the entries before it say.
        """
        last = self._handler.last_number()
        state = State()
        for entry in self.entries():
            if entry["kind"] == "state" and not state.says(State.from_json(entry["state"])):
                raise CheckpointCorruptError(
                    f"The full state in entry {entry['number']} of the log of {self.path} is not "
                    f"what the entries before it say. Restore it from a copy."
                )
            state.apply(entry)
        if state.number < last:
            raise CheckpointCorruptError(
                f"Entry {state.number + 1} of the log of {self.path} is missing: expected all up "
                f"to {last}. Restore it from a copy."
            )

    def open(self, epoch: int, *, pin: bool = False) -> Checkpoint:
        """Look into a recorded epoch: ``checkpoint[node][blob]``.

        Parameters
        ----------
        epoch : int
        pin : bool
            Keep the epoch, whatever the retention policy says, until `Checkpoint.close`; the
            checkpoint is a context manager. Writes to the log.

        Returns
        -------
        Checkpoint

        Raises
        ------
        CheckpointNotFoundError
            The epoch is not recorded.
        """
        release = None
        if pin:
            label = f"opened by process {os.getpid()} on {platform.node()}, {uuid.uuid4().hex[:8]}"
            self.pin(epoch, label)
            release = partial(self.unpin, epoch, label)
        return Checkpoint(
            epoch,
            self.record(epoch),
            self._readers(epoch),
            registered_codecs(),
            allow_pickle=self._allow_pickle,
            release=release,
        )

    def load(
        self,
        epoch: int,
        *,
        nodes: Collection[str] | None = None,
        blobs: Mapping[str, Collection[str]] | None = None,
        partitions: Mapping[str, Sequence[str]] | None = None,
    ) -> TaskGroup:
        """Make the task group that loads a recorded epoch.

        It verifies everything on all nodes, and only then replaces the nodes' global blobs.

        Parameters
        ----------
        epoch : int
        nodes : collection of str, optional
            Only these nodes.
        blobs : mapping of str to collection of str, optional
            Node -> the blobs to load; these nodes' other blobs, and other nodes, stay as they
            are. Only what is asked for is read.
        partitions : mapping of str to sequence of str, optional
            Name of a partitioned blob -> the nodes that hold its parts now. Where they are others
            than those that saved it, each gets a part of about the same length.

        Returns
        -------
        TaskGroup
            For `Session.run`.

        Raises
        ------
        CheckpointNotFoundError
            The epoch is not recorded.
        BlobNotFoundError
            A node or blob that was named is not in it.

        Notes
        -----
        Runs on the client; the group's tasks run on the nodes' workers, and raise
        `CheckpointCorruptError` where something is not what was written. *Atomicity*: no blob is
        replaced before all are verified. *Safe to retry*: yes.
        """
        readers = self._readers(epoch)
        details = self.record(epoch)["details"]
        lacking = [
            *(node for node in nodes or () if node not in readers),
            *(node for node, names in (blobs or {}).items() if node not in readers and not names),
        ]
        for node in lacking:
            raise BlobNotFoundError(
                f"Epoch {epoch} of {self.path} has no node {node!r}. It has "
                f"{_name_some(list(readers))}."
            )
        wanted = [
            node for node in (readers if blobs is None else blobs) if nodes is None or node in nodes
        ]
        with self._reading(epoch):
            parts = self._cut(readers, details.get(PARTITIONS, {}), partitions or {})
            readings = {}
            for node in wanted:
                asked = None if blobs is None else frozenset(blobs[node])
                borrowed = {
                    name: readers[owner]
                    for name, (owner, *others) in details.get(REPLICATED, {}).items()
                    if node != owner and (node in others if asked is None else name in asked)
                }
                cut = {
                    name: part
                    for name, part in parts.get(node, {}).items()
                    if asked is None or name in asked
                }
                own = None if asked is None else asked - borrowed.keys() - cut.keys()
                self._check_blobs(epoch, node, readers.get(node), own or ())
                reader = None if own is not None and not own else readers.get(node)
                readings[node] = Reading(reader, own, borrowed, cut)
        group, seconds = load_group(
            readings,
            registered_codecs(),
            replace=blobs is None,
            allow_pickle=self._allow_pickle,
        )
        action = "checkpoint_load" if blobs is None else "checkpoint_partial_load"
        self._load_seconds[group] = (action, seconds)
        return group

    def report_load(self, group: TaskGroup) -> None:
        """Report to the metadata handler how long each node took, once `group` has run.

        Parameters
        ----------
        group : TaskGroup
            One that `load` made.

        Raises
        ------
        DefinitionError
            It was not.
        ExecutionError
            It has not run.
        """
        if group not in self._load_seconds:
            raise DefinitionError(f"{group!r} was not made by load() of this manager.")
        action, seconds = self._load_seconds[group]
        self._handler.report(action, {node: output.fetch() for node, output in seconds.items()})

    # --- helpers

    def _check_recorded(self, epoch: int, state: State) -> None:
        if type(epoch) is not int:
            raise DefinitionError(f"An epoch is an int; got {epoch!r}.")
        if epoch not in state.recorded:
            raise CheckpointNotFoundError(
                f"Epoch {epoch} of {self.path} is not recorded. Recorded: "
                f"{_name_some(list(state.recorded))}. Name one of these, or 'latest'."
            )

    def _readers(self, epoch: int) -> dict[str, StoreReader]:
        stores = self.record(epoch)["stores"]
        if not stores and self._only_node is not None:
            raise CheckpointNotFoundError(
                f"Epoch {epoch} of {self.path} holds nothing of node {self._only_node!r}. Name a "
                f"node that was checkpointed, or use a MultiNodeCheckpointManager."
            )
        return {
            node: StoreReader(self._files, self.path, about["store"], about["manifest"])
            for node, about in stores.items()
        }

    def _cut(
        self,
        readers: Mapping[str, StoreReader],
        recorded: Mapping[str, Any],
        partitions: Mapping[str, Sequence[str]],
    ) -> dict[str, dict[str, Part]]:
        """Node -> the blobs of which it gets another part than was saved of it, and which."""
        parts: dict[str, dict[str, Part]] = {}
        for name, nodes in partitions.items():
            if name not in recorded or list(nodes) == recorded[name]["nodes"]:
                continue
            axis = recorded[name]["axis"]
            stores = [readers[node] for node in recorded[name]["nodes"]]
            lengths = [reader.axis_length(name, axis) for reader in stores]
            for node, pieces in zip(nodes, cut_evenly(lengths, len(nodes)), strict=True):
                found = [(stores[i], start, stop) for i, start, stop in pieces]
                parts.setdefault(node, {})[name] = Part(axis, found)
        return parts

    def _check_blobs(
        self, epoch: int, node: str, reader: StoreReader | None, blobs: Collection[str]
    ) -> None:
        there = [] if reader is None or not blobs else reader.read_manifest()["blobs"]
        for blob in blobs:
            if reader is None:
                raise BlobNotFoundError(
                    f"Epoch {epoch} of {self.path} has no node {node!r}, and so not its blob "
                    f"{blob!r}."
                )
            if blob not in there:
                raise BlobNotFoundError(
                    f"Node {node!r} has no blob {blob!r} at epoch {epoch} of {self.path}. "
                    f"It has {_name_some(list(there))}."
                )

    @contextmanager
    def _reading(self, epoch: int) -> Iterator[None]:
        """Tell damage from an epoch that was retired while it was read."""
        try:
            yield
        except CheckpointCorruptError as error:
            if epoch in self._journal.refresh().recorded:
                raise
            raise CheckpointNotFoundError(
                f"Epoch {epoch} of {self.path} was given up while it was read. Read a later one."
            ) from error


def absolute_path(path: str | os.PathLike[str]) -> str:
    """The absolute path of a checkpoint directory.

    Raises
    ------
    DefinitionError
        `path` is a URL of anything but files, or no path at all.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text:
        raise DefinitionError(f"path is that of a directory (a str or os.PathLike); got {path!r}.")
    scheme, separator, rest = text.partition("://")
    if separator and scheme.isalnum():
        if scheme != "file":
            raise DefinitionError(
                f"{text}: checkpoints are kept in directories, and not behind {scheme}://. Name "
                f"a directory that the client and all workers have in common."
            )
        host, _, _ = rest.partition("/")
        if host not in ("", "localhost"):
            raise DefinitionError(f"{text}: a file URL names a path, file:///..., and no host.")
        text = urllib.request.url2pathname(urllib.parse.urlsplit(text).path)
    return os.path.abspath(text)


def _name_some(items: list[Any]) -> str:
    if not items:
        return "none"
    some = [str(item) for item in items[-_NAMED_EPOCHS:]]
    before = "... " if len(items) > len(some) else ""
    return before + ", ".join(some)
