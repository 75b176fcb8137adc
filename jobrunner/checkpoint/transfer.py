"""An epoch saved again from the files of another: copied to a directory, or brought back.

It goes the way of every save: claim names, write, make durable, commit. A crash leaves what a
crash of a save leaves. Every byte is compared with what was recorded while it is copied.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jobrunner.checkpoint.directory import CheckpointDirectory
from jobrunner.checkpoint.files import PosixFiles
from jobrunner.checkpoint.layout import MANIFEST, RETIRED_DOCUMENT, ROOT_DOCUMENT
from jobrunner.checkpoint.manager import MultiNodeCheckpointManager
from jobrunner.checkpoint.objects import files_beside
from jobrunner.checkpoint.paths import absolute_path, join_path
from jobrunner.checkpoint.reader import StoreReader
from jobrunner.checkpoint.records import Claim, commit_in, commits_in, loose_json
from jobrunner.checkpoint.store import Receipt
from jobrunner.checkpoint.threads import run_all
from jobrunner.checkpoint.verified import VerifiedFiles
from jobrunner.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    DefinitionError,
)


@dataclass(frozen=True, slots=True)
class Record:
    """A commit that the log holds, whether its epoch is still recorded or not.

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
        Of the entry of the run that saved it; None where it is lost.
    """

    number: int
    epoch: int
    retry: int
    time: str
    stores: Mapping[str, Mapping[str, Any]]
    details: Mapping[str, Any]
    run_number: int | None

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> Record:
        """Read a ``commit`` entry."""
        return cls(
            entry["number"],
            entry["epoch"],
            entry["retry"],
            entry["time"],
            entry["stores"],
            loose_json(entry["details"]),
            entry["run_number"],
        )


def find_set_aside(directory: CheckpointDirectory, epoch: int | None = None) -> list[Record]:
    """Commits whose epochs are no longer recorded, and whose stores are all still there.

    Parameters
    ----------
    directory : CheckpointDirectory
    epoch : int, optional
        Only commits of this one.

    Returns
    -------
    list of Record
        In the order of the log.

    Raises
    ------
    CheckpointError
        The log or the directory cannot be read.
    """
    state = directory.state()
    try:
        there = set(directory.files.list_names(directory.path))
    except OSError as error:
        raise CheckpointError(
            f"{directory.path} cannot be listed: {type(error).__name__}: {error}. Nothing was "
            f"changed; mend the storage and try again."
        ) from error
    found = []
    for entry in itertools.chain.from_iterable(map(commits_in, directory.entries())):
        if epoch not in (None, entry["epoch"]):
            continue
        is_recorded = entry["epoch"] in state.recorded and (
            state.commit_number(entry["epoch"]) == entry["number"]
        )
        chore = state.chores.get(Claim(entry["epoch"], entry["retry"]))
        if is_recorded or (chore is not None and chore.action == "delete"):
            continue
        record = Record.from_entry(entry)
        stores = [about["store"] for about in record.stores.values()]
        if there.issuperset(stores):
            found.append(record)
    return found


def restore_epoch(
    directory: CheckpointDirectory,
    epoch: int,
    number: int | None = None,
    *,
    take_over: bool = False,
) -> Record:
    """Record an epoch again that was set aside, by a rewind or for damage.

    Parameters
    ----------
    directory : CheckpointDirectory
    epoch : int
    number : int, optional
        Of its ``commit`` entry, where the epoch was set aside more than once; by default the last.
    take_over : bool
        Take the directory from a run that is alive, too.

    Returns
    -------
    Record
        The commit that was restored.

    Raises
    ------
    DefinitionError
        The epoch is recorded.
    CheckpointNotFoundError
        It was never set aside, or its stores are gone.
    CheckpointCorruptError
        What is left of it is not what was written; nothing is recorded.
    CommitConflictError
        A run holds the directory and is alive.

    Notes
    -----
    Runs on the client. *Atomicity*: that of a save; the epoch's stores get names of their own, and
    what was set aside stays as it is. *Safe to retry*: yes.
    """
    if epoch in directory.state().recorded:
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


def copy_epoch(
    directory: CheckpointDirectory, epoch: int, target: str, *, take_over: bool = False
) -> Record:
    """Record an epoch in another directory as well.

    Parameters
    ----------
    directory : CheckpointDirectory
    epoch : int
    target : str
        Path of the other directory; created where there is none.
    take_over : bool
        Take the other directory from a run that is alive, too.

    Returns
    -------
    Record
        The commit that was copied.

    Raises
    ------
    DefinitionError
        The epoch is recorded there already.
    CheckpointNotFoundError
        The epoch is not recorded, or was given up while it was copied.
    CheckpointCorruptError
        What is here is not what was written; nothing is recorded there.
    CommitConflictError
        A run holds the other directory and is alive.

    Notes
    -----
    Runs on the client. *Atomicity*: that of a save. *Safe to retry*: yes. A job resumes from the
    copy as from the original.
    """
    files = files_beside(absolute_path(target), directory.files)
    other = CheckpointDirectory(target, None, allow_pickle=False, files=files)
    if epoch in other.state().recorded:
        raise DefinitionError(
            f"Epoch {epoch} is recorded in {other.path} already. Name another directory."
        )
    number = directory.record(epoch)["number"]
    entry = commit_in(directory.entry(number), epoch)
    record = Record.from_entry(entry)
    is_done = directory.is_done() and directory.latest() == epoch
    with directory.reading(epoch):
        _save_again(directory, record, other.path, files, take_over=take_over, is_done=is_done)
    return record


def _save_again(
    source: CheckpointDirectory,
    record: Record,
    target: str,
    files: PosixFiles,
    *,
    take_over: bool,
    is_done: bool = False,
) -> None:
    manager = MultiNodeCheckpointManager(target, take_over=take_over, files=files)
    info = source.info_of(record.run_number)
    manager.start_run(list(record.stores), info)
    try:
        order = manager.begin(record.epoch)
        readers = {
            node: StoreReader(source.files, source.path, about["store"], about["manifest"])
            for node, about in record.stores.items()
        }
        try:
            with files.durable(target, list(order.stores.values())):
                receipts = {
                    node: _copy_store(files, reader, target, order.stores[node], record, node)
                    for node, reader in readers.items()
                }
        except OSError as error:
            manager.abandon(order)
            if isinstance(error, CheckpointNotFoundError):
                raise
            raise CheckpointWriteError(
                f"Epoch {record.epoch} of {source.path} could not be copied to {target}: "
                f"{type(error).__name__}: {error}. Nothing is recorded there; mend the storage "
                f"and try again."
            ) from error
        except BaseException:
            manager.abandon(order)
            raise
        manager.commit(order, receipts, record.details)
        if is_done:
            manager.finish(record.epoch)
    finally:
        manager.end_run()


def _copy_store(
    files: PosixFiles,
    source: StoreReader,
    directory: str,
    store: str,
    record: Record,
    node: str,
) -> Receipt:
    """Copy a store file by file, comparing each with its record; not durable yet."""
    manifest = source.read_manifest()
    listed = dict(source.list_files(manifest))
    root = os.path.join(directory, store)
    files.make_directory(root)
    for path in _directories((MANIFEST, *listed)):
        files.make_directory(join_path(root, path))
    # A store that was set aside keeps its root document under another name.
    is_hidden = not source.files.is_taken(os.path.join(source.root, ROOT_DOCUMENT))

    def copy(path: str, size: int, digest: int) -> None:
        name = RETIRED_DOCUMENT if is_hidden and path == ROOT_DOCUMENT else path
        files.write(join_path(root, path), [source.read_file(name, size, digest)])

    jobs = [partial(copy, path, *about) for path, about in listed.items() if path != ROOT_DOCUMENT]
    run_all(jobs, max(files.threads, source.files.threads), record.stores[node]["nbytes"])
    path = join_path(source.root, MANIFEST)
    with VerifiedFiles(source.files, source.root).reading(path):
        data = source.files.read(path)
    files.write(join_path(root, MANIFEST), [data])
    copy(ROOT_DOCUMENT, *listed[ROOT_DOCUMENT])
    again = StoreReader(files, directory, store, source.manifest)
    again.read_manifest()  # what was just written is what was verified before
    about = record.stores[node]
    return Receipt(
        store,
        source.manifest,
        about["nbytes"],
        about["seconds"],
        states=tuple(about.get("states", ())),
    )


def _directories(paths: Iterable[str]) -> list[str]:
    """All that the paths lie in, parents first."""
    found: dict[str, None] = {}
    for path in paths:
        pieces = path.split("/")
        for depth in range(1, len(pieces)):
            found["/".join(pieces[:depth])] = None
    return sorted(found, key=lambda path: path.count("/"))
