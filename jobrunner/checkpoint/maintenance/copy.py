"""Copies an epoch to another directory, and restores an epoch that was set aside.

Both are saves, so a crash does no more harm than during a save: claim names, write, make durable,
commit. Each file is verified while it is copied.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping
from functools import partial

from jobrunner.checkpoint.epochs import Epochs
from jobrunner.checkpoint.log import (
    Claim,
    CommitEntry,
    commit_in,
    commits_in,
)
from jobrunner.checkpoint.maintenance.repair_plan import reading
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
    RETIRED_DOCUMENT,
    ROOT_DOCUMENT,
    Receipt,
    StoreReader,
)
from jobrunner.compile import gc_paused
from jobrunner.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    DefinitionError,
)
from jobrunner.names import LOG_DIRECTORY
from jobrunner.positions import Position


def restore_epoch(
    directory: Epochs,
    epoch: Position,
    number: int | None = None,
    *,
    take_over: bool = False,
) -> CommitEntry:
    """Record an epoch again that a run has set aside; return the ``commit`` that was restored.

    The epoch's stores are copied to new names. `number` is that of the ``commit``, if the epoch was
    set aside more than once; by default the last. `take_over` takes the directory even from a run
    that is alive.

    Raises DefinitionError if the epoch is recorded, CheckpointNotFoundError if it was never set
    aside or its stores are gone, CheckpointCorruptError if they are damaged, and
    CommitConflictError if a run holds the directory and is alive.
    """
    if epoch in directory.log.refresh().recorded:
        raise DefinitionError(
            f"Epoch {epoch} of {directory.path} is recorded already. To replace it, first set it "
            f"aside: run the job with --resume and an earlier epoch."
        )
    found = _find_set_aside(directory)
    commits = [c for c in found if c.epoch == epoch and number in (None, c.number)]
    if not commits:
        known = ", ".join(f"{c.epoch} (commit {c.number})" for c in found)
        raise CheckpointNotFoundError(
            f"No epoch {epoch} that can be restored is in {directory.path}"
            f"{'' if number is None else f', by commit {number}'}. Epochs set aside whose stores "
            f"still exist: {known or 'none'}."
        )
    _save_again(directory, commits[-1], directory.path, directory.files, take_over=take_over)
    return commits[-1]


def _find_set_aside(directory: Epochs) -> list[CommitEntry]:
    """The commits whose epochs are not recorded any more but whose stores all still exist."""
    state = directory.log.refresh()
    with reading(directory):
        names = set(directory.files.list_names(directory.path))
    found = []
    for commit in itertools.chain.from_iterable(map(commits_in, directory.log.read_entries())):
        epoch = commit.epoch
        is_recorded = epoch in state.recorded and state.commit_number(epoch) == commit.number
        chore = state.chores.get(Claim(epoch, commit.retry))
        is_kept = not is_recorded and (chore is None or chore.action != "delete")
        if is_kept and names.issuperset(about.store for about in commit.stores.values()):
            found.append(commit)
    return found


def copy_epoch(directory: Epochs, epoch: Position, target: str, *, take_over: bool = False) -> None:
    """Record an epoch also in directory `target`, from which a job can resume.

    `take_over` takes that directory even from a run that is alive.

    Raises DefinitionError if the epoch is recorded there already or `target` is within a checkpoint
    directory, CheckpointNotFoundError if it is not recorded here, or was retired meanwhile, CheckpointCorruptError if it is damaged, and
    CommitConflictError if a run holds the other directory and is alive.
    """
    files = files_beside(absolute_path(target), directory.files)
    other = Epochs(target, None, files)
    if epoch in other.log.refresh().recorded:
        raise DefinitionError(
            f"Epoch {epoch} is recorded in {other.path} already. Name another directory."
        )
    _refuse_within_another(other.path, files)
    number = directory.record(epoch)["number"]
    commit = commit_in(directory.log.read_entry(number), epoch)
    is_done = directory.is_done() and directory.latest() == epoch
    with directory.reading(epoch):
        _save_again(directory, commit, other.path, files, take_over=take_over, is_done=is_done)


def _refuse_within_another(path: str, files: Files) -> None:
    """Refuse a directory within a checkpoint directory, where it would be a stray or be deleted."""
    for outer in outer_directories(path):
        is_found = False
        with contextlib.suppress(OSError):  # it may be another user's
            beside = files_beside(outer, files)
            is_found = beside.is_directory(join_path(outer, LOG_DIRECTORY))
        if is_found:
            raise DefinitionError(
                f"{path} is within {outer}, which is a checkpoint directory. Copy to a directory "
                f"that is in no other."
            )


@gc_paused()
def _save_again(
    source: Epochs,
    commit: CommitEntry,
    target: str,
    files: Files,
    *,
    take_over: bool,
    is_done: bool = False,
) -> None:
    manager = MultiNodeCheckpointManager(target, take_over=take_over, files=files)
    info = {**source.info_of(commit.run_number), "command": "copy"}
    for name in ("began", "seen"):  # of another run
        info.pop(name, None)
    manager.run.start(list(commit.stores), info)
    try:
        save = manager.commits.begin(commit.epoch)
        try:
            receipts = _copy_stores(source, commit, manager.recorded, save.stores)
        except BaseException as error:
            manager.commits.abandon(save)
            if isinstance(error, OSError) and not isinstance(error, CheckpointError):
                raise CheckpointWriteError(
                    f"Epoch {commit.epoch} of {source.path} could not be copied to {target}: "
                    f"{type(error).__name__}: {error}. Nothing is recorded there. Repair the "
                    f"storage and try again."
                ) from error
            raise
        record = source.read_record(commit.epoch, commit.number)
        details = {name: it for name, it in record["details"].items() if name != "timing"}
        manager.commits.commit(save, receipts, details)
        if is_done:
            manager.run.finish(commit.epoch)
    finally:
        manager.run.end()


def _copy_stores(
    source: Epochs,
    commit: CommitEntry,
    target: Epochs,
    names: Mapping[str, str],
) -> dict[str, Receipt]:
    """Copy all stores of an epoch to `names`, by node, and make them durable."""
    readers = [
        (
            StoreReader(source.files, source.path, about.store, about.manifest),
            StoreReader(target.files, target.path, names[node], about.manifest),
        )
        for node, about in commit.stores.items()
    ]
    farther = max(source.files, target.files, key=lambda it: it.lookups)
    threads = max(source.files.threads, target.files.threads)
    with target.files.durable(target.path, list(names.values())):
        copies = list(farther.each(StoreCopy, readers))
        jobs = [job for copy in copies for job in copy.begin()]
        run_all(jobs, threads, sum(about.nbytes for about in commit.stores.values()))
        list(farther.each(StoreCopy.finish, copies))
    return {
        node: Receipt(
            names[node], about.manifest, about.nbytes, about.seconds, states=tuple(about.states)
        )
        for node, about in commit.stores.items()
    }


class StoreCopy:
    """Copies a store file by file, and verifies each; the caller makes it durable.

    `nbytes` are those of its arrays.
    """

    def __init__(self, from_and_to: tuple[StoreReader, StoreReader]) -> None:
        self._source, self._target = from_and_to
        root = join_path(self._source.root, ROOT_DOCUMENT)
        # The root document of a hidden store has another name.
        is_hidden = not self._source.files.is_taken(root)
        self._root_name = RETIRED_DOCUMENT if is_hidden else ROOT_DOCUMENT
        document = self._source.read_document(self._root_name)
        self._chunks = document.files()
        self._documents = document.zarr_documents()
        self.nbytes = sum(size for size, _ in self._chunks.values())

    def begin(self) -> list[Callable[[], None]]:
        """Make the directories; returns a job for each file but the root document."""
        directories = [os.path.dirname(path) for path in self._documents]
        self._target.files.make_directory(self._target.root, directories)
        documents = [partial(self._write, *document) for document in self._documents.items()]
        return [*documents, *(partial(self._copy, path) for path in self._chunks)]

    def finish(self, *, durable: bool = False) -> None:
        """Copy the root document, after all other files."""
        content = self._source.read_bytes(self._root_name)
        self._target.files.put(
            join_path(self._target.root, ROOT_DOCUMENT), content, durable=durable
        )
        self._target.read_document()  # verifies it

    def _copy(self, path: str) -> None:
        self._write(path, self._source.verified.read(path, self._chunks[path]))

    def _write(self, path: str, content: bytes) -> None:
        self._target.files.write(join_path(self._target.root, path), [content])
