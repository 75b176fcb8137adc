"""Copies an epoch to another directory, or restores one that was set aside.

Both work as a save: claim names, write, make durable, commit. A crash leaves what a crash of a
save leaves. Every byte is compared with the record while it is copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jobrunner.checkpoint.epochs import Epochs
from jobrunner.checkpoint.log import (
    Claim,
    CommitEntry,
    commit_in,
    commits_in,
    entry_to_json,
    loose_json,
)
from jobrunner.checkpoint.manager import MultiNodeCheckpointManager
from jobrunner.checkpoint.storage import Files, absolute_path, files_beside, join_path, run_all
from jobrunner.checkpoint.store import (
    MANIFEST,
    RETIRED_DOCUMENT,
    ROOT_DOCUMENT,
    Receipt,
    StoreReader,
    VerifiedFiles,
)
from jobrunner.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    DefinitionError,
)


@dataclass(frozen=True, slots=True)
class Record:
    """A commit in the log, whether its epoch is still recorded or not.

    Attributes
    ----------
    number : int
        Of the ``commit`` entry.
    epoch, retry : int
    time : str
        When it was recorded, ISO 8601.
    stores : mapping of str to mapping
        Node -> ``store``, ``manifest``, ``nbytes``, ``seconds``.
    details : mapping
    run_number : int or None
        Of the entry of the run that saved it; None if that is lost.
    """

    number: int
    epoch: int
    retry: int
    time: str
    stores: Mapping[str, Mapping[str, Any]]
    details: Mapping[str, Any]
    run_number: int | None

    @classmethod
    def from_entry(cls, entry: CommitEntry) -> Record:
        """Take over a ``commit`` entry."""
        return cls(
            entry.number,
            entry.epoch,
            entry.retry,
            entry.time,
            entry_to_json(entry)["stores"],
            loose_json(entry.details),
            entry.run_number,
        )


def find_set_aside(directory: Epochs, epoch: int | None = None) -> list[Record]:
    """Find commits whose epochs are no longer recorded and whose stores all still exist.

    Parameters
    ----------
    directory : Epochs
    epoch : int, optional
        Only commits of this epoch.

    Returns
    -------
    list of Record
        In the order of the log.

    Raises
    ------
    CheckpointError
        The log or the directory cannot be read.
    """
    state = directory.log.refresh()
    try:
        there = set(directory.files.list_names(directory.path))
    except OSError as error:
        raise CheckpointError(
            f"{directory.path} cannot be listed: {type(error).__name__}: {error}. Nothing was "
            f"changed. Repair the storage and try again."
        ) from error
    found = []
    for entry in itertools.chain.from_iterable(map(commits_in, directory.log.read_entries())):
        if epoch not in (None, entry.epoch):
            continue
        is_recorded = entry.epoch in state.recorded and (
            state.commit_number(entry.epoch) == entry.number
        )
        chore = state.chores.get(Claim(entry.epoch, entry.retry))
        if is_recorded or (chore is not None and chore.action == "delete"):
            continue
        record = Record.from_entry(entry)
        stores = [about["store"] for about in record.stores.values()]
        if there.issuperset(stores):
            found.append(record)
    return found


def restore_epoch(
    directory: Epochs,
    epoch: int,
    number: int | None = None,
    *,
    take_over: bool = False,
) -> Record:
    """Record an epoch again that a rewind set aside, or that was set aside for damage.

    Parameters
    ----------
    directory : Epochs
    epoch : int
    number : int, optional
        Of its ``commit`` entry, if the epoch was set aside more than once; by default the last.
    take_over : bool
        Take the directory even from a run that is alive.

    Returns
    -------
    Record
        The commit that was restored.

    Raises
    ------
    DefinitionError
        The epoch is recorded.
    CheckpointNotFoundError
        The epoch was never set aside, or its stores are gone.
    CheckpointCorruptError
        Its stores are damaged; nothing is recorded.
    CommitConflictError
        A run holds the directory and is alive.

    Notes
    -----
    Runs on the client. *Atomicity*: that of a save; the epoch's stores get new names, and what was
    set aside stays as it is. *Safe to retry*: yes.
    """
    if epoch in directory.log.refresh().recorded:
        raise DefinitionError(
            f"Epoch {epoch} of {directory.path} is recorded already. To put another one in its "
            f"place, set it aside first: run the job with --resume and an earlier epoch."
        )
    records = find_set_aside(directory, epoch)
    chosen = [record for record in records if number in (None, record.number)]
    if not chosen:
        known = ", ".join(f"{r.epoch} (commit {r.number})" for r in find_set_aside(directory))
        raise CheckpointNotFoundError(
            f"Nothing of epoch {epoch} is set aside in {directory.path}"
            f"{'' if number is None else f' by commit {number}'}. Set aside and still there: "
            f"{known or 'none'}."
        )
    _save_again(directory, chosen[-1], directory.path, directory.files, take_over=take_over)
    return chosen[-1]


def copy_epoch(directory: Epochs, epoch: int, target: str, *, take_over: bool = False) -> Record:
    """Record an epoch in another directory as well.

    Parameters
    ----------
    directory : Epochs
    epoch : int
    target : str
        Path of the other directory; created if there is none.
    take_over : bool
        Take the other directory even from a run that is alive.

    Returns
    -------
    Record
        The commit that was copied.

    Raises
    ------
    DefinitionError
        The epoch is recorded there already.
    CheckpointNotFoundError
        The epoch is not recorded, or was retired while it was copied.
    CheckpointCorruptError
        The epoch is damaged; nothing is recorded in the other directory.
    CommitConflictError
        A run holds the other directory and is alive.

    Notes
    -----
    Runs on the client. *Atomicity*: that of a save. *Safe to retry*: yes. A job resumes from the
    copy as from the original.
    """
    files = files_beside(absolute_path(target), directory.files)
    other = Epochs(target, None, files)
    if epoch in other.log.refresh().recorded:
        raise DefinitionError(
            f"Epoch {epoch} is recorded in {other.path} already. Name another directory."
        )
    number = directory.record(epoch)["number"]
    entry = commit_in(directory.log.read_entry(number), epoch)
    record = Record.from_entry(entry)
    is_done = directory.is_done() and directory.latest() == epoch
    with directory.reading(epoch):
        _save_again(directory, record, other.path, files, take_over=take_over, is_done=is_done)
    return record


def _save_again(
    source: Epochs,
    record: Record,
    target: str,
    files: Files,
    *,
    take_over: bool,
    is_done: bool = False,
) -> None:
    manager = MultiNodeCheckpointManager(target, take_over=take_over, files=files)
    info = source.info_of(record.run_number)
    manager.run.start(list(record.stores), info)
    try:
        save = manager.commits.begin(record.epoch)
        try:
            receipts = _copy_stores(source, record, files, target, save.stores)
        except OSError as error:
            manager.commits.abandon(save)
            if isinstance(error, CheckpointNotFoundError):
                raise
            raise CheckpointWriteError(
                f"Epoch {record.epoch} of {source.path} could not be copied to {target}: "
                f"{type(error).__name__}: {error}. Nothing is recorded there. Repair the storage "
                f"and try again."
            ) from error
        except BaseException:
            manager.commits.abandon(save)
            raise
        manager.commits.commit(save, receipts, record.details)
        if is_done:
            manager.run.finish(record.epoch)
    finally:
        manager.run.end()


def _copy_stores(
    source: Epochs,
    record: Record,
    files: Files,
    target: str,
    names: Mapping[str, str],
) -> dict[str, Receipt]:
    """Copy all stores of an epoch to `names`, by node; check each file and make all durable."""
    readers = [
        (
            StoreReader(source.files, source.path, about["store"], about["manifest"]),
            StoreReader(files, target, names[node], about["manifest"]),
        )
        for node, about in record.stores.items()
    ]
    farther = max(source.files, files, key=lambda it: it.lookups)
    threads = max(source.files.threads, files.threads)
    with files.durable(target, list(names.values())):
        copies = list(farther.each(_StoreCopy, readers))
        for copy in copies:
            copy.make_directories()
        jobs = [job for copy in copies for job in copy.jobs()]
        run_all(jobs, threads, sum(about["nbytes"] for about in record.stores.values()))
        list(farther.each(_StoreCopy.finish, copies))
    return {
        node: Receipt(
            names[node],
            about["manifest"],
            about["nbytes"],
            about["seconds"],
            states=tuple(about.get("states", ())),
        )
        for node, about in record.stores.items()
    }


class _StoreCopy:
    """Copies a store file by file; the caller makes it durable."""

    def __init__(self, from_and_to: tuple[StoreReader, StoreReader]) -> None:
        self._source, self._target = from_and_to
        self._listed = self._source.read_manifest().files()
        # The root document of a hidden store has another name.
        root = join_path(self._source.root, ROOT_DOCUMENT)
        self._root_name = ROOT_DOCUMENT if self._source.files.is_taken(root) else RETIRED_DOCUMENT

    def make_directories(self) -> None:
        self._target.files.make_directory(self._target.root)
        for path in _directories((MANIFEST, *self._listed)):
            self._target.files.make_directory(join_path(self._target.root, path))

    def jobs(self) -> list[Callable[[], None]]:
        """Copy all but the root document and the manifest; one job a file."""
        return [partial(self._copy, path) for path in self._listed if path != ROOT_DOCUMENT]

    def finish(self) -> None:
        """Copy the manifest and the root document, when all else is there."""
        path = join_path(self._source.root, MANIFEST)
        with VerifiedFiles(self._source.files, self._source.root).reading(path):
            manifest = self._source.files.read(path)
        self._target.files.write(join_path(self._target.root, MANIFEST), [manifest])
        self._copy(ROOT_DOCUMENT)
        self._target.read_manifest()  # verify what was just written

    def _copy(self, path: str) -> None:
        name = self._root_name if path == ROOT_DOCUMENT else path
        data = self._source.read_file(name, self._listed[path])
        self._target.files.write(join_path(self._target.root, path), [data])


def _directories(paths: Iterable[str]) -> list[str]:
    """The directories of `paths`, parents first."""
    found: dict[str, None] = {}
    for path in paths:
        pieces = path.split("/")
        for depth in range(1, len(pieces)):
            found["/".join(pieces[:depth])] = None
    return sorted(found, key=lambda path: path.count("/"))
