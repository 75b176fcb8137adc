"""Copies an epoch to another directory, and restores an epoch that was set aside.

A copy is a save, so a crash does no more harm than during a save: claim names, write, make durable,
commit. Each file is verified while it is copied.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from jobrunner.checkpoint.directory import Directory, EpochRecord
from jobrunner.checkpoint.directory_run import writing
from jobrunner.checkpoint.history_writer import copy_chunks, publish_copy
from jobrunner.checkpoint.load_plan import with_contents
from jobrunner.checkpoint.log import CommitEntry, Record, State
from jobrunner.checkpoint.maintenance.repair_plan import reading_storage
from jobrunner.checkpoint.manager import MultiNodeCheckpointManager
from jobrunner.checkpoint.opened import store_readers
from jobrunner.checkpoint.past_epochs import as_json
from jobrunner.checkpoint.storage import (
    absolute_path,
    files_beside,
    join_path,
    run_all,
)
from jobrunner.checkpoint.store import StoreDocument, StoreReader
from jobrunner.errors import (
    CheckpointNotFoundError,
    DefinitionError,
)
from jobrunner.names import HISTORIES, ROOT_DOCUMENT
from jobrunner.positions import Position


def restore_epoch(directory: Directory, epoch: Position, *, take_over: bool = False) -> CommitEntry:
    """Record an epoch again that a run has set aside, last; return the ``commit`` that had it.

    Its stores are verified, and recorded as they are. `take_over` takes the directory even from a
    run that is alive.

    Raises DefinitionError if the epoch is recorded, CheckpointNotFoundError if it was never set
    aside or its stores are gone, CheckpointCorruptError if they are damaged, and
    CommitConflictError if a run holds the directory and is alive.
    """
    state = directory.snapshot()
    if epoch in state.recorded:
        raise DefinitionError(
            f"Epoch {epoch} of {directory.path} is recorded already. To replace it, first set it "
            f"aside: run the job with --resume and an earlier epoch."
        )
    set_aside = _find_set_aside(directory, state)
    if epoch not in set_aside:
        raise CheckpointNotFoundError(
            f"No epoch {epoch} that can be restored is in {directory.path}. Epochs set aside whose "
            f"stores still exist: {', '.join(map(str, set_aside)) or 'none'}."
        )
    commit, record = set_aside[epoch]
    manager = MultiNodeCheckpointManager(directory.path, take_over=take_over, files=directory.files)
    manager.run.start([], {"command": "restore"})
    try:
        for store in record.all_stores.values():
            StoreReader(
                directory.files, directory.path, store.name, store.sha256, record.histories
            ).verify()
        # The commit that recorded the epoch first may have said itself what the stores contain.
        contents = record.contents
        if contents is None and commit.contents:
            contents = commit.number
        details = {name: value for name, value in record.details.items() if name != "timing"}
        manager.retention.append_and_sweep(
            CommitEntry,
            claim=None,
            records=[msgspec.structs.replace(record, contents=contents, details=details)],
            run_number=commit.run_number,
        )
    finally:
        manager.run.end()
    return commit


def _find_set_aside(
    directory: Directory, state: State
) -> dict[Position, tuple[CommitEntry, Record]]:
    """The epochs that are not recorded any more but whose stores all still exist."""
    with reading_storage(directory):
        names = set(directory.files.list_names(directory.path))
    set_aside = {}
    for entry in directory.log.read_entries():
        if not isinstance(entry, CommitEntry):
            continue
        for record in entry.records:
            is_kept = record.stores is not None and (record.at, record.retry) in state.aside
            if not is_kept or record.at in state.recorded:
                continue
            if names.issuperset(store.name for store in record.all_stores.values()):
                set_aside[record.at] = entry, record
    return set_aside


def find_copied(directory: Directory, epochs: Sequence[Position], target: str) -> set[Position]:
    """The epochs that are recorded in directory `target` with the same stores.

    Raises DefinitionError if another epoch has one of these numbers there.
    """
    copy = Directory(target, None, files_beside(absolute_path(target), directory.files))
    snapshot, copied = directory.snapshot(), copy.snapshot()
    present: set[Position] = set()
    for epoch in epochs:
        if epoch not in copied.recorded or epoch not in snapshot.recorded:
            continue
        if _digests(directory, epoch, snapshot) != _digests(copy, epoch, copied):
            raise _recorded_already(epoch, copy)
        present.add(epoch)
    return present


def _digests(directory: Directory, epoch: Position, snapshot: State) -> dict[str, str]:
    stores = directory.record(epoch, snapshot).stores
    return {node: store.sha256 for node, store in stores.items()}


def _recorded_already(epoch: Position, copy: Directory) -> DefinitionError:
    return DefinitionError(
        f"Epoch {epoch} is recorded in {copy.path} already. Name another directory."
    )


def copy_epoch(
    directory: Directory, epoch: Position, target: str, *, take_over: bool = False
) -> None:
    """Record an epoch also in directory `target`, from which a job can resume.

    `take_over` takes that directory even from a run that is alive.

    Raises DefinitionError if the epoch is recorded there already, CheckpointNotFoundError if it is
    not recorded here, or was retired meanwhile, CheckpointCorruptError if it is damaged, and
    CommitConflictError if a run holds the other directory and is alive.
    """
    files = files_beside(absolute_path(target), directory.files)
    copy = Directory(target, None, files)
    if epoch in copy.log.refresh().recorded:
        raise _recorded_already(epoch, copy)
    snapshot = directory.snapshot()
    record = directory.record(epoch, snapshot)
    is_done = snapshot.done == epoch
    blobs = _find_histories(directory, record)
    manager = MultiNodeCheckpointManager(copy.path, take_over=take_over, files=files)
    info = {**directory.info_of(record.run_number), "command": "copy"}
    details = record.details.to_json()
    for name in ("began", "seen"):  # of another run
        info.pop(name, None)
    details.pop("timing", None)
    with directory.reading(epoch):
        manager.run.start(list(record.stores), info)
        try:
            order = manager.run.order({epoch: details})
            names = order.stores[epoch]
            with writing(copy, f"epoch {epoch} of {directory.path} could not be copied"):
                histories = ""
                if blobs:
                    histories = manager.run.make_histories(blobs)
                _copy_stores(directory, record, copy, names, histories)
            stores = {}
            for node, store in record.stores.items():
                stores[node] = msgspec.structs.replace(store, name=names[node])
            manager.retention.append_and_sweep(
                CommitEntry,
                claim=order.claim,
                records=[Record(epoch, stores, histories, details=as_json(details, "details"))],
                run_number=manager.run.held().number,
                contents=with_contents(directory, record).contents or {},
            )
            if is_done:
                manager.run.finish(epoch)
        finally:
            manager.run.end()


def _find_histories(directory: Directory, record: EpochRecord) -> list[str]:
    """The names of the blobs of an epoch that are histories."""
    if not record.histories:
        return []
    names: set[str] = set()
    with directory.reading(record.at):
        for reader in store_readers(directory, record).values():
            names.update(reader.read_document().entry.histories)
    return sorted(names)


def _copy_stores(
    source: Directory,
    record: EpochRecord,
    target: Directory,
    names: Mapping[str, str],
    histories: str,
) -> None:
    """Copy all stores of an epoch to `names`, by node, and make them durable.

    Their histories go to the directory `histories`.
    """
    pairs = []
    for node, original in store_readers(source, record).items():
        copy = StoreReader(target.files, target.path, names[node], original.sha256, histories)
        pairs.append((original, copy))
    written = list(names.values())
    if histories:
        written.append(join_path(HISTORIES, histories))
    with target.files.making_durable(target.path, written):
        copy_files(pairs)
        roots = [partial(copy_root, *pair) for pair in pairs]
        run_all(roots, max(source.files.threads, target.files.threads), 0)


def copy_files(pairs: Sequence[tuple[StoreReader, StoreReader]]) -> None:
    """Copy stores, and the rows that they count, but for the documents that `copy_root` copies.

    Verifies each file; the caller makes them durable, and has made the groups of histories.

    All files of all stores are one list of jobs, so that many small stores are copied as quickly as
    a large one: requests to an object store take longer than all else.
    """
    jobs: list[Callable[[], None]] = []
    sizes: list[int] = []

    def prepare(source: StoreReader, target: StoreReader) -> None:
        """Make the copy's directories, with the arrays' documents; add a job for each chunk."""
        document = source.read_document()
        target.files.make_directory(target.root)
        for path, content in document.zarr_documents().items():
            directory = join_path(target.root, os.path.dirname(path))
            target.files.make_directory(directory)
            target.files.write(join_path(directory, ROOT_DOCUMENT), [content])
        for path, file in document.files().items():
            jobs.append(partial(copy, source, target, path, file))
            sizes.append(file[0])
        for blob in document.entry.histories:
            history = source.history(document, blob)
            jobs.extend(copy_chunks(history, target.history(document, blob)))
            sizes.append(history.mark.chunks * history.mark.chunk_bytes)

    def copy(source: StoreReader, target: StoreReader, path: str, file: tuple[int, str]) -> None:
        content = source.verified.read(path, file)
        target.files.write(join_path(target.root, path), [content])

    threads = max((reader.files.threads for pair in pairs for reader in pair), default=1)
    run_all([partial(prepare, *pair) for pair in pairs], threads, 0)
    run_all(jobs, threads, sum(sizes))


def copy_root(source: StoreReader, target: StoreReader, *, durable: bool = False) -> None:
    """Copy the root document of a store, after all other files: Zarr opens the store by it."""
    path, content = join_path(target.root, ROOT_DOCUMENT), source.read_bytes()
    document = StoreDocument(content, path)
    for blob in document.entry.histories:
        history = source.history(document, blob)
        copied = target.history(document, blob)
        publish_copy(history, copied, document.node, durable=durable)
    target.files.put(path, content, durable=durable)
    target.read_document()  # verifies it
