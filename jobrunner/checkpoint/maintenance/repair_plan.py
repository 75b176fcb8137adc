"""What can be proven of a log that has lost entries. Changes nothing.

The evidence is: the entries that are left; the stores, each of which tells its node, epoch and run,
and the first of an epoch its nodes and details; and whether a store still has its root document,
which everything that gives an epoch up takes away first.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobrunner.checkpoint.epochs import Epochs
from jobrunner.checkpoint.log import (
    ENTRY_NAME,
    LOG_DIRECTORY,
    RESTARTS,
    AnyEntry,
    BeginEntry,
    Claim,
    CommitEntry,
    FileMetadataHandler,
    GapEntry,
    RewindEntry,
    RunEntry,
    State,
    commit_in,
    each_entry,
    entry_to_json,
    given_up_by,
    parse_entry,
    read_content,
)
from jobrunner.checkpoint.storage import Files, join_path
from jobrunner.checkpoint.store import (
    MANIFEST,
    RETIRED_DOCUMENT,
    ROOT_DOCUMENT,
    RecordEntry,
    StoreReader,
    is_sealed,
    read_manifest,
)
from jobrunner.errors import CheckpointCorruptError, CheckpointError, DefinitionError


@dataclass(slots=True)
class Repair:
    """What a repair would write, and what it goes by.

    Attributes
    ----------
    last : int
        The highest number in the log that is taken; -1 where there is no log.
    lost : dict of int to str
        Number of an entry that cannot be read, or is missing -> why.
    elsewhere : dict of int to str
        Number of an entry that lies under another's name -> that name.
    kept : list of int
        Recorded epochs that stay so.
    rebuilt : list of int
        Epochs whose record is lost and made again from their stores, every byte verified.
    given_up : dict of int to str
        Epochs with a record that are recorded no longer -> why.
    unproven : dict of str to str
        Stores that no record speaks of and none is made for -> why.
    """

    last: int
    lost: dict[int, str] = field(default_factory=dict)
    elsewhere: dict[int, str] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)
    rebuilt: list[int] = field(default_factory=list)
    given_up: dict[int, str] = field(default_factory=dict)
    unproven: dict[str, str] = field(default_factory=dict)
    state: State = field(default_factory=State)
    commits: list[dict[str, Any]] = field(default_factory=list)
    entries: dict[int, AnyEntry] = field(default_factory=dict)

    @property
    def gaps(self) -> list[int]:
        """Numbers below the last that are free, and must not be used again."""
        return [number for number, why in self.lost.items() if why == _MISSING]


_MISSING = "missing"


def plan_repair(directory: Epochs) -> Repair | None:
    """Find out what a repair of a directory's log would do; None where none is needed.

    Parameters
    ----------
    directory : Epochs
        One whose log is kept in files, by the default metadata handler.

    Raises
    ------
    CheckpointError
        The storage fails, which is no reason to take anything for lost.

    Notes
    -----
    Runs on the client, and changes nothing. Reads the whole log, the names of all stores, and every
    byte of the epochs whose record it makes again.
    """
    handler = file_handler(directory)
    with reading(directory):
        return _plan(directory, handler)


@contextlib.contextmanager
def reading(directory: Epochs) -> Iterator[None]:
    """Tell storage that fails from damage."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{directory.path} cannot be read: {type(error).__name__}: {error}. That is not the "
            f"same as damage: nothing is repaired before it can be read."
        ) from error


def _plan(directory: Epochs, handler: FileMetadataHandler) -> Repair | None:
    # Names are claimed before they are used: whoever lists first misses no claim.
    stores = _list_stores(directory)
    repair = Repair(handler.last_number())
    _read_entries(directory.files, directory.path, handler, repair)
    base = max(
        (n for n, entry in repair.entries.items() if isinstance(entry, RESTARTS)), default=-1
    )
    holes = [number for number in repair.lost if number > base]
    state, is_exact = _follow(repair, base, holes)
    if not is_exact:
        for epoch in list(state.recorded):
            why = _given_up(directory, repair, state, epoch)
            if why:
                repair.given_up[epoch] = why
                del state.recorded[epoch], state.retries[epoch]
    _make_records(directory, repair, state, stores, holes)
    if not holes and not repair.rebuilt and not repair.given_up:
        return None
    _settle_state(repair, state, stores, is_exact=is_exact)
    return repair


def file_handler(directory: Epochs) -> FileMetadataHandler:
    """What keeps the log in files, which only such a log has to be mended by."""
    if isinstance(directory.handler, FileMetadataHandler):
        return directory.handler
    raise DefinitionError(
        f"The log of {directory.path} is kept by {type(directory.handler).__name__}, and only one "
        f"that is kept in files can be repaired. Mend it where it is kept."
    )


def _read_entries(files: Files, path: str, handler: FileMetadataHandler, repair: Repair) -> None:
    for number, entry in each_entry(handler):
        if isinstance(entry, CheckpointCorruptError):
            there = files.is_taken(os.path.join(path, LOG_DIRECTORY, f"{number:010d}.json"))
            repair.lost[number] = str(entry) if there else _MISSING
        elif isinstance(entry, GapEntry):
            repair.lost[number] = "lost before"
        else:
            repair.entries[number] = entry
    if not repair.lost:
        return
    for name in sorted(files.list_names(os.path.join(path, LOG_DIRECTORY))):
        # An entry gets its name whole, and only its own: under another's, somebody has moved it.
        if ENTRY_NAME.fullmatch(name):
            data = files.read_if_there(os.path.join(path, LOG_DIRECTORY, name))
            with contextlib.suppress(CheckpointCorruptError):
                found = parse_entry(read_content(data or b""), name)
                if found.number in repair.lost and not isinstance(found, GapEntry):
                    repair.entries[found.number] = found
                    repair.elsewhere[found.number] = name


def _follow(repair: Repair, base: int, holes: list[int]) -> tuple[State, bool]:
    """What the entries that are left say, and whether nothing else can have been said."""
    state = State()
    if base >= 0:
        state.restart(repair.entries[base])
    later = [repair.entries[n] for n in sorted(repair.entries) if n > base]
    if all(hole in repair.elsewhere for hole in holes):
        exact = State()
        if base >= 0:
            exact.restart(repair.entries[base])
        try:
            for entry in later:
                exact.apply(entry)
            return exact, True
        except CheckpointCorruptError as error:
            repair.lost[exact.number + 1] = str(error)
            holes.append(exact.number + 1)
    for entry in later:
        is_sure = not any(n < entry.number and n not in repair.elsewhere for n in holes)
        state.follow(entry, is_sure=is_sure)
    return state, False


Stores = Mapping[Claim, Mapping[str, str]]
"""Claim -> node -> name of the store that lies there."""


def _list_stores(directory: Epochs) -> Stores:
    found: dict[Claim, dict[str, str]] = defaultdict(dict)
    for name, store in directory.stores_among(directory.files.list_names(directory.path)):
        found[Claim(store.epoch, store.retry)][store.node] = name
    return found


def _record_of(repair: Repair, state: State, epoch: int) -> CommitEntry | None:
    """The record of an epoch, if the entry that holds it is left."""
    entry = repair.entries.get(state.commit_number(epoch))
    try:
        return None if entry is None else commit_in(entry, epoch)
    except ValueError:
        return None


def _given_up(directory: Epochs, repair: Repair, state: State, epoch: int) -> str:
    """Why the stores of an epoch tell that it was given up by an entry that is lost."""
    commit = _record_of(repair, state, epoch)
    if commit is None:
        return ""  # its record cannot be made again then
    roots = [os.path.join(directory.path, about.store) for about in commit.stores.values()]
    for root in roots:
        if directory.files.is_taken(os.path.join(root, RETIRED_DOCUMENT)):
            return f"{root} was hidden, as is done with an epoch that is given up"
    if roots and not any(directory.files.is_taken(root) for root in roots):
        return "its stores are gone"
    return ""


def _make_records(
    directory: Epochs,
    repair: Repair,
    state: State,
    stores: Stores,
    holes: Sequence[int],
) -> None:
    """Make records again of the newest attempts at epochs that are whole and have none."""
    failed: dict[Claim, str] = {}
    for claim in sorted(stores, reverse=True):
        epoch, retry = claim
        own = state.retries[epoch] if epoch in state.recorded else -1
        if epoch in repair.rebuilt or retry < own:
            continue
        if retry == own:
            commit = _record_of(repair, state, epoch)
            if commit is not None and commit.number not in repair.lost:
                continue
        else:
            commit = None
            is_known = retry < state.claims.get(epoch, 0)
            if is_known and not _may_be_committed(repair, claim, holes):
                continue
        try:
            if commit is None:
                record = _record_again(directory, repair, claim, stores[claim])
            else:
                whole = entry_to_json(commit)
                record = {key: whole[key] for key in _RECORD}
        except CheckpointCorruptError as error:
            failed[claim] = str(error)
            continue
        repair.rebuilt.append(epoch)
        repair.commits.append(record)
    repair.rebuilt.sort()
    repair.commits.sort(key=lambda commit: int(commit["epoch"]))
    for epoch in list(state.recorded):
        if epoch not in repair.rebuilt and _record_of(repair, state, epoch) is None:
            why = failed.pop(Claim(epoch, state.retries[epoch]), "its stores are gone")
            repair.given_up[epoch] = f"the entry that recorded it is lost, and {why}"
            del state.recorded[epoch], state.retries[epoch]
    for claim, why in failed.items():
        repair.unproven |= dict.fromkeys(stores[claim].values(), why)
    repair.kept = [epoch for epoch in state.recorded if epoch not in repair.rebuilt]


_RECORD = ("epoch", "retry", "run", "run_number", "time", "stores", "details")


def _may_be_committed(repair: Repair, claim: Claim, holes: Sequence[int]) -> bool:
    """Whether an entry that is lost can have recorded a claim."""
    begun, ends, covered = -1, repair.last + 1, -1
    run = None
    for number in sorted(repair.entries):
        entry = repair.entries[number]
        if isinstance(entry, BeginEntry) and (entry.epoch, entry.retry) == claim:
            begun, run = number, entry.run
        elif isinstance(entry, RunEntry) and begun >= 0 and run != entry.run:
            ends = min(ends, number)
        elif isinstance(entry, RewindEntry) and claim.epoch in given_up_by(entry, [claim.epoch]):
            covered = number
    return any(max(begun, covered) < hole < ends for hole in holes)


def _record_again(
    directory: Epochs, repair: Repair, claim: Claim, names: Mapping[str, str]
) -> dict[str, Any]:
    """The record of whole stores.

    Raises
    ------
    CheckpointCorruptError
        They are not whole, or do not tell what a record must say.
    """
    abouts: dict[str, Mapping[str, Any]] = {}
    record: RecordEntry | None = None
    runs = set()
    newest = 0.0
    for node, name in names.items():
        path = join_path(os.path.join(directory.path, name), MANIFEST)
        data = directory.files.read_if_there(path) or b""
        digest = hashlib.sha256(data).hexdigest()
        if not is_sealed(data):
            raise CheckpointCorruptError(
                f"{path} is not what was written: its {len(data)} bytes do not end with their own "
                f"SHA-256. Or an earlier version wrote it.",
                path=path,
            )
        manifest = read_manifest(data, path)
        told = (manifest.node, manifest.epoch)
        if told != (node, claim.epoch):
            raise CheckpointCorruptError(
                f"{path} is of node {told[0]!r} at epoch {told[1]}: expected {node!r} at epoch "
                f"{claim.epoch}.",
                path=path,
            )
        reader = StoreReader(directory.files, directory.path, name, digest)
        if not directory.files.is_taken(os.path.join(reader.root, ROOT_DOCUMENT)):
            raise CheckpointCorruptError(
                f"{reader.root} has no {ROOT_DOCUMENT}: its save never ended, or it was given up.",
                path=reader.root,
            )
        reader.verify()
        nbytes = sum(size for size, _ in manifest.files().values())
        abouts[node] = {"store": name, "manifest": digest, "nbytes": nbytes, "seconds": 0.0}
        if manifest.states is not None:
            abouts[node] = {**abouts[node], "states": manifest.states}
        record = manifest.record or record
        runs.add(manifest.run)
        newest = max(newest, directory.files.modified_seconds(path))
    if record is None:
        raise CheckpointCorruptError(
            f"None of the stores {', '.join(names.values())} tells the record of epoch "
            f"{claim.epoch}: the one that does is gone, or an earlier version saved them."
        )
    missing = [node for node in record.nodes if node not in abouts]
    if missing or len(runs) > 1:
        what = f"those of {', '.join(missing)} are missing" if missing else "two runs wrote them"
        raise CheckpointCorruptError(
            f"The stores of epoch {claim.epoch} that lie there are not all of one save: {what}."
        )
    run = runs.pop()
    numbers = [n for n, e in repair.entries.items() if isinstance(e, RunEntry) and e.run == run]
    return {
        "epoch": claim.epoch,
        "retry": claim.retry,
        "run": run,
        "run_number": numbers[0] if numbers and numbers[0] not in repair.lost else None,
        "time": dt.datetime.fromtimestamp(newest, dt.UTC).isoformat(timespec="milliseconds"),
        "stores": {node: abouts[node] for node in record.nodes},
        "details": record.details,
    }


def _settle_state(repair: Repair, state: State, stores: Stores, *, is_exact: bool) -> None:
    """Make the state that the repair begins with, but for the epochs that it makes records of."""
    for claim in stores:
        if claim.retry >= state.claims.get(claim.epoch, 0):
            state.claims[claim.epoch] = claim.retry + 1
    latest = max((*repair.rebuilt, *repair.kept), default=None)
    for commit in repair.commits:
        epoch = commit["epoch"]
        state.chores.pop(Claim(epoch, commit["retry"]), None)
        if epoch in state.recorded:
            del state.recorded[epoch], state.retries[epoch]
    if not is_exact:
        state.chores = {}  # nothing is deleted that may still be wanted
    epochs = {*repair.kept, *repair.rebuilt}
    state.pins = {epoch: labels for epoch, labels in state.pins.items() if epoch in epochs}
    if state.done != latest:
        state.done = None
    repair.state = state
