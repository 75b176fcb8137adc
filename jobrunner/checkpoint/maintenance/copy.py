"""Copies an epoch to another directory, and restores an epoch that was set aside.

A copy is a save, so a crash does no more harm than during a save: claim names, write, make durable,
commit. Each file is verified while it is copied.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from jobrunner.checkpoint.commits import Pending
from jobrunner.checkpoint.directory import Directory
from jobrunner.checkpoint.loader import Loader
from jobrunner.checkpoint.log import CommitEntry, EpochRecord, Record
from jobrunner.checkpoint.maintenance.repair import reading
from jobrunner.checkpoint.manager import MultiNodeCheckpointManager
from jobrunner.checkpoint.storage import (
    Files,
    absolute_path,
    files_beside,
    join_path,
    outer_directories,
    run_all,
)
from jobrunner.checkpoint.store import (
    Receipt,
    StoreReader,
)
from jobrunner.checkpoint.worker_save import Written
from jobrunner.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    DefinitionError,
)
from jobrunner.names import LOG_DIRECTORY, ROOT_DOCUMENT
from jobrunner.positions import Position


def restore_epoch(
    directory: Directory,
    epoch: Position,
    number: int | None = None,
    *,
    take_over: bool = False,
) -> CommitEntry:
    """Record an epoch again that a run has set aside; return the ``commit`` that was restored.

    Its stores are verified, and recorded as they are. `number` is that of the ``commit``, if the
    epoch was set aside more than once; by default the last. `take_over` takes the directory even
    from a run that is alive.

    Raises DefinitionError if the epoch is recorded, CheckpointNotFoundError if it was never set
    aside or its stores are gone, CheckpointCorruptError if they are damaged, and
    CommitConflictError if a run holds the directory and is alive.
    """
    if epoch in directory.log.refresh().recorded:
        raise DefinitionError(
            f"Epoch {epoch} of {directory.path} is recorded already. To replace it, first set it "
            f"aside: run the job with --resume and an earlier epoch."
        )
    candidates = _find_set_aside(directory)
    chosen: SetAside | None = None
    for candidate in candidates:
        if candidate.record.at == epoch and number in (None, candidate.commit.number):
            chosen = candidate
    if chosen is None:
        names = [f"{item.record.at} (commit {item.commit.number})" for item in candidates]
        raise CheckpointNotFoundError(
            f"No epoch {epoch} that can be restored is in {directory.path}"
            f"{'' if number is None else f', by commit {number}'}. Epochs set aside whose stores "
            f"still exist: {', '.join(names) or 'none'}."
        )
    manager = MultiNodeCheckpointManager(directory.path, take_over=take_over, files=directory.files)
    manager.run.start([], {"command": "restore"})
    try:
        record_existing(manager, chosen)
    finally:
        manager.run.end()
    return chosen.commit


@dataclass(frozen=True, slots=True)
class SetAside:
    """An epoch whose record does not count any more, but whose stores are there."""

    commit: CommitEntry
    record: Record


def _find_set_aside(directory: Directory) -> list[SetAside]:
    """The epochs that are not recorded any more but whose stores all still exist."""
    state = directory.log.refresh()
    with reading(directory):
        names = set(directory.files.list_names(directory.path))
    doomed = {(item.commit, item.at) for item in state.given_up}
    set_aside = []
    for entry in directory.log.read_entries():
        if not isinstance(entry, CommitEntry):
            continue
        for record in entry.records:
            is_recorded = record.at in state.recorded
            if is_recorded or record.stores is None or (entry.number, record.at) in doomed:
                continue
            if names.issuperset(store.name for store in record.stores.values()):
                set_aside.append(SetAside(entry, record))
    return set_aside


def record_existing(manager: MultiNodeCheckpointManager, aside: SetAside) -> None:
    """Record stores that are there, in the run of `manager`, once every byte is verified."""
    record, commit = aside.record, aside.commit
    for store in (record.stores or {}).values():
        StoreReader(manager.directory.files, manager.path, store.name, store.sha256).verify()
    contents = record.contents
    if contents is None and commit.contents:
        contents = commit.number
    details = {name: value for name, value in record.details.items() if name != "timing"}
    manager.retention.append(
        CommitEntry,
        begin=None,
        records=[msgspec.structs.replace(record, contents=contents, details=details)],
        run_number=commit.run_number,
    )


def copy_epoch(
    directory: Directory, epoch: Position, target: str, *, take_over: bool = False
) -> None:
    """Record an epoch also in directory `target`, from which a job can resume.

    `take_over` takes that directory even from a run that is alive.

    Raises DefinitionError if the epoch is recorded there already or `target` is within a checkpoint
    directory, CheckpointNotFoundError if it is not recorded here, or was retired meanwhile, CheckpointCorruptError if it is damaged, and
    CommitConflictError if a run holds the other directory and is alive.
    """
    files = files_beside(absolute_path(target), directory.files)
    copy = Directory(target, None, files)
    if epoch in copy.log.refresh().recorded:
        raise DefinitionError(
            f"Epoch {epoch} is recorded in {copy.path} already. Name another directory."
        )
    _refuse_within_another(copy.path, files)
    record = directory.record(epoch)
    is_done = directory.is_done() and directory.latest() == epoch
    with directory.reading(epoch):
        _save_again(directory, record, copy.path, files, take_over=take_over, is_done=is_done)


def _refuse_within_another(path: str, files: Files) -> None:
    """Refuse a directory within a checkpoint directory, where it would be a stray or be deleted."""
    for outer in outer_directories(path):
        has_log = False
        with contextlib.suppress(OSError):  # it may be another user's
            outer_files = files_beside(outer, files)
            has_log = outer_files.is_directory(join_path(outer, LOG_DIRECTORY))
        if has_log:
            raise DefinitionError(
                f"{path} is within {outer}, which is a checkpoint directory. Copy to a directory "
                f"that is in no other."
            )


def _save_again(
    source: Directory,
    record: EpochRecord,
    target: str,
    files: Files,
    *,
    take_over: bool,
    is_done: bool = False,
) -> None:
    epoch = record.at
    manager = MultiNodeCheckpointManager(target, take_over=take_over, files=files)
    info = {**source.info_of(record.run_number), "command": "copy"}
    for name in ("began", "seen"):  # of another run
        info.pop(name, None)
    manager.run.start(list(record.stores), info)
    try:
        details = record.details.to_json()
        details.pop("timing", None)  # of another run
        order = manager.commits.order([Pending(epoch, details)])
        try:
            receipts = _copy_stores(source, record, manager.directory, order.stores[epoch])
        except BaseException as error:
            manager.commits.abandon(order)
            if isinstance(error, OSError) and not isinstance(error, CheckpointError):
                raise CheckpointWriteError(
                    f"Epoch {epoch} of {source.path} could not be copied to {target}: "
                    f"{type(error).__name__}: {error}. Nothing is recorded there. Repair the "
                    f"storage and try again."
                ) from error
            raise
        manager.commits.commit(order, Written({epoch: receipts}))
        if is_done:
            manager.run.finish(epoch)
    finally:
        manager.run.end()


def _copy_stores(
    source: Directory,
    record: EpochRecord,
    target: Directory,
    names: Mapping[str, str],
) -> dict[str, Receipt]:
    """Copy all stores of an epoch to `names`, by node, and make them durable."""
    readers = [
        (
            StoreReader(source.files, source.path, store.name, store.sha256),
            StoreReader(target.files, target.path, names[node], store.sha256),
        )
        for node, store in record.stores.items()
    ]
    farther = max(source.files, target.files, key=lambda files: files.lookups)
    threads = max(source.files.threads, target.files.threads)
    with target.files.durable(target.path, list(names.values())):
        copies = list(farther.each(StoreCopy, readers))
        jobs = [job for copy in copies for job in copy.begin()]
        run_all(jobs, threads, record.nbytes)
        list(farther.each(StoreCopy.finish, copies))
    contents = Loader(source).contents(record)
    return {
        node: Receipt(
            names[node],
            store.sha256,
            store.nbytes,
            store.seconds,
            lengths=contents[node].parts,
            blobs={
                name: tuple(contents[node].classes.get(name, ())) for name in contents[node].blobs
            },
            states=tuple(contents[node].states),
        )
        for node, store in record.stores.items()
    }


class StoreCopy:
    """Copies a store file by file, and verifies each; the caller makes it durable.

    `nbytes` are those of its arrays.
    """

    def __init__(self, from_and_to: tuple[StoreReader, StoreReader]) -> None:
        self._source, self._target = from_and_to
        document = self._source.read_document()
        self._chunks = document.files()
        self._documents = document.zarr_documents()
        self.nbytes = sum(size for size, _ in self._chunks.values())

    def begin(self) -> list[Callable[[], None]]:
        """Make the directories; returns a job for each file but the root document."""
        self._target.files.make_directory(self._target.root)
        for path in self._documents:
            directory = os.path.dirname(path)
            self._target.files.make_directory(join_path(self._target.root, directory))
        documents = [partial(self._write, *document) for document in self._documents.items()]
        return [*documents, *(partial(self._copy, path) for path in self._chunks)]

    def finish(self, *, durable: bool = False) -> None:
        """Copy the root document, after all other files."""
        content = self._source.read_bytes()
        path = join_path(self._target.root, ROOT_DOCUMENT)
        self._target.files.put(path, content, durable=durable)
        self._target.read_document()  # verifies it

    def _copy(self, path: str) -> None:
        self._write(path, self._source.verified.read(path, self._chunks[path]))

    def _write(self, path: str, content: bytes) -> None:
        self._target.files.write(join_path(self._target.root, path), [content])
