"""What the log of a checkpoint directory says: which epochs are recorded, and which are pinned."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress
from typing import Any

from jobrunner.checkpoint.log import (
    AnyEntry,
    FileMetadataHandler,
    GapEntry,
    LogWriter,
    MetadataHandler,
    RepairEntry,
    RunEntry,
    State,
    StateEntry,
    commit_in,
    each_entry,
    entry_to_json,
    loose_json,
)
from jobrunner.checkpoint.storage import PosixFiles, absolute_path, files_of
from jobrunner.checkpoint.store import MANIFEST
from jobrunner.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    DefinitionError,
)
from jobrunner.names import StoreName, format_store_name, parse_store_name

logger = logging.getLogger(__name__)

DEFAULT_LABEL = "kept"
"""Of a pin that nobody gave a label of its own."""

_NAMED_EPOCHS = 12
_EPOCH_AND_RETRY = re.compile(r"\.(\d+)(?:\.r(\d+))?$")


class RecordedEpochs:
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
        files: PosixFiles | None,
        only_node: str | None = None,
    ) -> None:
        self.path = absolute_path(path)
        self._files = files_of(self.path, files)
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
        self._journal = LogWriter(self._handler, self.path)
        self._only_node = only_node

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
        return self._read_record(epoch, state.commit_number(epoch))

    def records(
        self, epochs: Iterable[int] | None = None
    ) -> Iterator[tuple[int, Mapping[str, Any] | CheckpointCorruptError]]:
        """Recorded epochs, each with its record, or why it has none.

        Parameters
        ----------
        epochs : iterable of int, optional
            By default all, in ascending order.

        Raises
        ------
        CheckpointError
            The storage fails.
        """
        state = self._journal.refresh()
        wanted = state.recorded if epochs is None else epochs
        numbers = {epoch: state.commit_number(epoch) for epoch in wanted}

        def read(epoch: int) -> Mapping[str, Any] | CheckpointCorruptError:
            try:
                return self._read_record(epoch, numbers[epoch])
            except CheckpointCorruptError as error:
                return error

        return zip(numbers, self._files.each(read, numbers), strict=True)

    def _read_record(self, epoch: int, number: int) -> Mapping[str, Any]:
        entry = self._journal.read_entry(number)
        try:
            commit = commit_in(entry, epoch)
            for node, about in commit.stores.items():
                if about.store != format_store_name(node, epoch, commit.retry):
                    raise ValueError(f"{about.store!r} cannot be the store of node {node!r}")
            record = {**entry_to_json(commit), "details": loose_json(commit.details)}
        except ValueError as error:
            raise CheckpointCorruptError(
                f"{self.path}: entry {number} of the log is not the record of "
                f"epoch {epoch} that it should be: {error}. Restore it from a copy, or let "
                f"`jobrunner fsck {self.path} --repair` make the record again."
            ) from error
        if self._only_node is not None:
            stores = record["stores"]
            record["stores"] = {node: s for node, s in stores.items() if node == self._only_node}
        return record

    def state(self) -> State:
        """All that the log says."""
        return self._journal.refresh()

    def entry(self, number: int) -> AnyEntry:
        """An entry of the log, which must exist."""
        return self._journal.read_entry(number)

    def entries(self) -> Iterator[AnyEntry]:
        """All entries of the log that are whole, in order, read as they are asked for.

        Raises
        ------
        CheckpointError
            The storage fails.
        """
        return self._journal.read_entries()

    @property
    def handler(self) -> MetadataHandler:
        """What keeps the log."""
        return self._handler

    @property
    def files(self) -> PosixFiles:
        """How the file system is used."""
        return self._files

    def run_info(self, epoch: int) -> Mapping[str, Any]:
        """What the run that recorded `epoch` said of itself when it began.

        Empty where the log has lost that.
        """
        return self.info_of(self.record(epoch)["run_number"])

    def info_of(self, run_number: int | None) -> Mapping[str, Any]:
        """What a run said of itself in its entry of the log; empty where that is lost."""
        if run_number is None:
            return {}
        try:
            entry = self._journal.read_entry(run_number)
        except CheckpointCorruptError as error:
            logger.warning("%s: what a run said of itself is not known: %s", self.path, error)
            return {}
        info: Mapping[str, Any] = loose_json(entry.info) if isinstance(entry, RunEntry) else {}
        return info

    def unclaimed(self) -> list[int]:
        """Epochs of stores that lie here and that no entry of the log claims, in ascending order.

        No run leaves such: the log, or its newest entries, must be lost.

        Notes
        -----
        Runs on the client, also while a run holds the directory. Reads names, and no store.
        """
        # Names are claimed before they are used: whoever lists first misses no claim.
        names = self._files.list_names(self.path)
        claims = self._journal.refresh().claims
        suspects = []
        for name in names:
            match = _EPOCH_AND_RETRY.search(name)
            if match is not None and int(match[2] or 0) >= claims.get(int(match[1]), 0):
                suspects.append(name)
        return sorted({store.epoch for _, store in self.stores_among(suspects)})

    def stores_among(self, names: Iterable[str]) -> list[tuple[str, StoreName]]:
        """What of `names` is the name of a store whose manifest is here, and what it says."""
        stores = [(name, store) for name in names if (store := parse_store_name(name)) is not None]
        manifests = [os.path.join(self.path, name, MANIFEST) for name, _ in stores]
        return list(compress(stores, self._files.each(self._files.is_taken, manifests)))

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
        long as nobody has begun one, it waits, and so it does for the run that follows one that
        was killed. A retention policy may give an epoch up before you
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

    def verify_log(self) -> list[int]:
        """Read the log from its first entry on: every entry, and every full state in it.

        Returns
        -------
        list of int
            Entries that are lost or damaged, and that a repair has made up for.

        Raises
        ------
        CheckpointCorruptError
            An entry is missing, damaged or cannot follow on what came before, or a full state is
            not what the entries before it say.
        """
        state = State()
        lost: list[int] = []
        problem: CheckpointCorruptError | None = None
        for number, entry in each_entry(self._handler):
            if isinstance(entry, CheckpointCorruptError):
                problem = problem or entry
                lost.append(number)
            elif isinstance(entry, RepairEntry):
                state.restart(entry)
                problem = None
            elif isinstance(entry, GapEntry):
                lost.append(number)
                problem = problem or CheckpointCorruptError(f"Entry {number} of the log was lost.")
            elif problem is None:
                if isinstance(entry, StateEntry) and not state.says(State.from_json(entry.state)):
                    raise CheckpointCorruptError(
                        f"The full state in entry {number} of the log of {self.path} is not what "
                        f"the entries before it say. Restore it from a copy."
                    )
                state.apply(entry)
        if problem is not None:
            raise problem
        return lost

    def _check_recorded(self, epoch: int, state: State) -> None:
        if type(epoch) is not int:
            raise DefinitionError(f"An epoch is an int; got {epoch!r}.")
        if epoch not in state.recorded:
            raise CheckpointNotFoundError(
                f"Epoch {epoch} of {self.path} is not recorded. Recorded: "
                f"{name_some(list(state.recorded))}. Name one of these, or 'latest'."
            )


def name_some(items: list[Any]) -> str:
    """The last few of `items`, in words."""
    if not items:
        return "none"
    some = [str(item) for item in items[-_NAMED_EPOCHS:]]
    before = "... " if len(items) > len(some) else ""
    return before + ", ".join(some)
