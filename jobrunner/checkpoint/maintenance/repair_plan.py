"""Plans the repair of a log that has lost entries. Changes nothing.

The remaining entries and the stores prove what is in the plan. Each store names its node, epoch and
run; the first store of an epoch names its nodes and details. If an epoch was given up, the root
documents of its stores were renamed or deleted first.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from jobrunner.checkpoint.epochs import Epochs
from jobrunner.checkpoint.log import (
    ENTRY_NAME,
    RESTARTS,
    BeginEntry,
    Claim,
    CommitEntry,
    FileMetadataHandler,
    GapEntry,
    LaterVersionError,
    LogEntry,
    RebuiltRecord,
    RewindEntry,
    RunEntry,
    State,
    StoreRecord,
    commits_in,
    each_entry,
    given_up_by,
    parse_entry,
    read_content,
)
from jobrunner.checkpoint.storage import join_path
from jobrunner.checkpoint.store import (
    DOCUMENT_MOST_BYTES,
    RETIRED_DOCUMENT,
    ROOT_DOCUMENT,
    RecordEntry,
    StoreDocument,
    StoreReader,
    is_sealed,
)
from jobrunner.errors import CheckpointCorruptError, CheckpointError, DefinitionError
from jobrunner.names import LOG_DIRECTORY
from jobrunner.positions import Position


@dataclass(slots=True)
class Repair:
    """What a repair would write, and why."""

    last: int
    """The highest number of an entry; -1 if there is no log."""
    lost: dict[int, str] = field(default_factory=dict)
    """Number of an entry that is missing or cannot be read -> why."""
    elsewhere: dict[int, str] = field(default_factory=dict)
    """Number of an entry whose file has another entry's name -> that name."""
    kept: list[Position] = field(default_factory=list)
    """Epochs that stay recorded."""
    given_up: dict[Position, str] = field(default_factory=dict)
    """Epochs that are no longer recorded -> why."""
    unproven: dict[str, str] = field(default_factory=dict)
    """Stores of which no record can be rebuilt -> why."""
    state: State = field(default_factory=State)
    """What the repair's entry says, besides `commits`."""
    commits: dict[Position, RebuiltRecord] = field(default_factory=dict)
    """Epoch -> its record, rebuilt from its stores, every byte verified."""
    entries: dict[int, LogEntry] = field(default_factory=dict)
    """The remaining entries, by number."""

    @property
    def rebuilt(self) -> list[Position]:
        """Epochs whose lost record is rebuilt."""
        return sorted(self.commits)

    @property
    def gaps(self) -> list[int]:
        """The numbers of missing entries, which must not be used again."""
        return [number for number, why in self.lost.items() if why == _MISSING]


_MISSING = "missing"


def plan_repair(directory: Epochs) -> Repair | None:
    """Plan the repair of a directory whose log is in files; None if none is necessary.

    Reads the whole log, the names of all stores, and every byte of the epochs whose records it
    rebuilds. Raises CheckpointError if the storage fails, or a later version wrote an entry.
    """
    handler = file_handler(directory)
    with reading(directory):
        return _Planner(directory, handler).plan()


@contextlib.contextmanager
def reading(directory: Epochs) -> Iterator[None]:
    """Raise CheckpointError if the storage fails, which is no sign of damage."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{directory.path} cannot be read: {type(error).__name__}: {error}. This does not mean "
            f"that it is damaged, so nothing was changed. Repair the storage and try again."
        ) from error


def file_handler(directory: Epochs) -> FileMetadataHandler:
    """The handler of a log in files; raises DefinitionError if the log is elsewhere."""
    if isinstance(directory.handler, FileMetadataHandler):
        return directory.handler
    raise DefinitionError(
        f"The log of {directory.path} is stored by {type(directory.handler).__name__}, but only a "
        f"log in files can be repaired. Repair it where it is stored."
    )


class _Planner:
    """Makes the plan for one directory."""

    def __init__(self, directory: Epochs, handler: FileMetadataHandler) -> None:
        self._files = directory.files
        self._path = directory.path
        # List before the log is read: a name is claimed before it is used.
        self._stores: dict[Claim, dict[str, str]] = defaultdict(dict)
        for name, store in directory.stores_among(self._files.list_names(self._path)):
            self._stores[Claim(store.epoch, store.retry)][store.node] = name
        self._repair = Repair(handler.last_number())
        self._read_entries(handler)
        entries = self._repair.entries
        self._base = max((n for n, e in entries.items() if isinstance(e, RESTARTS)), default=-1)
        self._holes = [number for number in self._repair.lost if number > self._base]

    def plan(self) -> Repair | None:
        repair = self._repair
        is_exact = self._follow()
        self._records = self._find_records()
        if not is_exact:
            reasons = {epoch: self._given_up(commit) for epoch, commit in self._records.items()}
            repair.given_up = {epoch: why for epoch, why in reasons.items() if why}
        self._make_records()
        if not self._holes and not repair.commits and not repair.given_up:
            return None
        self._finish_state(is_exact=is_exact)
        return repair

    def _read_entries(self, handler: FileMetadataHandler) -> None:
        repair = self._repair
        for number, entry in each_entry(handler):
            if isinstance(entry, LaterVersionError):
                raise entry  # nothing is lost
            if isinstance(entry, CheckpointCorruptError):
                is_there = self._files.is_taken(handler.path_of(number))
                repair.lost[number] = str(entry) if is_there else _MISSING
            elif isinstance(entry, GapEntry):
                repair.lost[number] = "lost before"
            else:
                repair.entries[number] = entry
        if not repair.lost:
            return
        root = os.path.join(self._path, LOG_DIRECTORY)
        known = {os.path.basename(handler.path_of(number)) for number in repair.entries}
        for name in sorted(set(self._files.list_names(root)) - known):
            # An entry whose file has another name was moved there after it was written.
            if ENTRY_NAME.fullmatch(name):
                data = handler.read_file(os.path.join(root, name))
                with contextlib.suppress(CheckpointCorruptError):
                    found = parse_entry(
                        read_content(data) if isinstance(data, bytes) else None, name
                    )
                    if found.number in repair.lost and not isinstance(found, GapEntry):
                        repair.entries[found.number] = found
                        repair.elsewhere[found.number] = name

    def _follow(self) -> bool:
        """Apply the remaining entries; return whether the log had no others."""
        repair, base, holes = self._repair, self._base, self._holes
        later = [repair.entries[n] for n in sorted(repair.entries) if n > base]
        if all(hole in repair.elsewhere for hole in holes):
            repair.state = self._state_at_base()
            try:
                for entry in later:
                    repair.state.apply(entry)
                return True
            except CheckpointCorruptError as error:
                number = repair.state.number + 1
                repair.lost[number] = str(error)
                holes.append(number)
        repair.state = self._state_at_base()
        for entry in later:
            is_sure = not any(n < entry.number and n not in repair.elsewhere for n in holes)
            repair.state.follow(entry, is_sure=is_sure)
        return False

    def _state_at_base(self) -> State:
        state = State()
        if self._base >= 0:
            state.restart(self._repair.entries[self._base])
        return state

    def _find_records(self) -> dict[Position, CommitEntry]:
        """The records of the epochs whose entries remain; the state may name very many others."""
        state = self._repair.state
        return {
            commit.epoch: commit
            for entry in self._repair.entries.values()
            for commit in commits_in(entry)
            if commit.epoch in state.recorded and state.commit_number(commit.epoch) == entry.number
        }

    def _given_up(self, commit: CommitEntry) -> str:
        """Why, judging by its stores, a lost entry gave an epoch up; empty if none did."""
        roots = [os.path.join(self._path, about.store) for about in commit.stores.values()]
        for root in roots:
            if self._files.is_taken(os.path.join(root, RETIRED_DOCUMENT)):
                return f"{root} is hidden, so a lost entry retired it or set it aside"
        if roots and not any(self._files.is_taken(root) for root in roots):
            return "its stores are gone"
        return ""

    def _make_records(self) -> None:
        """Rebuild lost records, for each epoch that of its newest whole attempt."""
        repair, state = self._repair, self._repair.state
        failed: dict[Claim, str] = {}
        for claim in sorted(self._stores, reverse=True):
            epoch, retry = claim
            own = -1 if epoch in repair.given_up else state.retries.get(epoch, -1)
            if epoch in repair.commits or retry < own:
                continue
            commit = self._records.get(epoch) if retry == own else None
            if commit is not None and commit.number not in repair.lost:
                continue
            is_claimed = retry < state.claims.get(epoch, 0)
            if retry > own and is_claimed and not self._may_be_committed(claim):
                continue
            try:
                repair.commits[epoch] = (
                    self._rebuild_record(claim)
                    if commit is None
                    else RebuiltRecord(
                        **{name: getattr(commit, name) for name in RebuiltRecord.__struct_fields__}
                    )
                )
            except CheckpointCorruptError as error:
                failed[claim] = str(error)
        given_up, repair.given_up = repair.given_up, {}
        for epoch in state.recorded:
            if epoch in self._records and epoch not in given_up and epoch not in repair.commits:
                repair.kept.append(epoch)
            elif epoch not in repair.commits:
                why = "its record is lost, and its stores are gone"
                repair.given_up[epoch] = given_up.get(epoch, why)
        for claim, why in failed.items():
            is_last = claim.retry == state.retries.get(claim.epoch)
            if is_last and claim.epoch in repair.given_up and claim.epoch not in given_up:
                repair.given_up[claim.epoch] = f"its record is lost, and {why}"
            else:
                repair.unproven |= dict.fromkeys(self._stores[claim].values(), why)

    def _may_be_committed(self, claim: Claim) -> bool:
        """Whether a lost entry may have recorded a claim."""
        entries = self._repair.entries
        begun, ends, covered = -1, self._repair.last + 1, -1
        run = None
        for number in sorted(entries):
            entry = entries[number]
            if isinstance(entry, BeginEntry) and (entry.epoch, entry.retry) == claim:
                begun, run = number, entry.run
            elif isinstance(entry, RunEntry) and begun >= 0 and run != entry.run:
                ends = min(ends, number)
            elif isinstance(entry, RewindEntry) and given_up_by(entry, [claim.epoch]):
                covered = number
        return any(max(begun, covered) < hole < ends for hole in self._holes)

    def _rebuild_record(self, claim: Claim) -> RebuiltRecord:
        """The record that a claim's stores prove; raises CheckpointCorruptError if they do not."""
        names = self._stores[claim]
        abouts: dict[str, StoreRecord] = {}
        record: RecordEntry | None = None
        runs = set()
        newest = 0.0
        for node, name in names.items():
            path = join_path(os.path.join(self._path, name), ROOT_DOCUMENT)
            data = self._files.read(path, DOCUMENT_MOST_BYTES)
            if data is None:
                raise CheckpointCorruptError(
                    f"{os.path.dirname(path)} has no {ROOT_DOCUMENT}: its save never ended, or the "
                    f"epoch was retired or set aside.",
                    path=os.path.dirname(path),
                )
            digest = hashlib.sha256(data).hexdigest()
            if not is_sealed(data):
                raise CheckpointCorruptError(
                    f"{path} is damaged: its {len(data)} bytes do not contain their own SHA-256.",
                    path=path,
                )
            document = StoreDocument(data, path)
            if (document.node, document.position) != (node, claim.epoch):
                raise CheckpointCorruptError(
                    f"{path}: expected the document of node {node!r} at epoch {claim.epoch}, found "
                    f"that of node {document.node!r} at epoch {document.position}.",
                    path=path,
                )
            reader = StoreReader(self._files, self._path, name, digest)
            reader.verify()
            entry = document.entry
            nbytes = sum(size for size, _ in document.files().values())
            abouts[node] = StoreRecord(name, digest, nbytes, 0.0, entry.states)
            record = entry.record or record
            runs.add(entry.run)
            newest = max(newest, self._files.modified_seconds(path))
        if record is None:
            raise CheckpointCorruptError(
                f"None of the stores {', '.join(names.values())} has the record of epoch "
                f"{claim.epoch}: the store that had it is gone, or an earlier version wrote them."
            )
        missing = [node for node in record.nodes if node not in abouts]
        if missing or len(runs) > 1:
            what = (
                f"those of {', '.join(missing)} are missing" if missing else "two runs wrote them"
            )
            raise CheckpointCorruptError(
                f"The stores of epoch {claim.epoch} are not all stores of one save: {what}."
            )
        run = runs.pop()
        entries = self._repair.entries.items()
        numbers = [n for n, e in entries if isinstance(e, RunEntry) and e.run == run]
        is_known = bool(numbers) and numbers[0] not in self._repair.lost
        return RebuiltRecord(
            epoch=claim.epoch,
            retry=claim.retry,
            run=run,
            run_number=numbers[0] if is_known else None,
            time=dt.datetime.fromtimestamp(newest, dt.UTC).isoformat(timespec="milliseconds"),
            stores={node: abouts[node] for node in record.nodes},
            details=record.details,
        )

    def _finish_state(self, *, is_exact: bool) -> None:
        """Make the state of the repair's entry, without the epochs that it rebuilds."""
        repair, state = self._repair, self._repair.state
        state.recorded = state.recorded.only(repair.kept)
        state.retries = state.retries.only(repair.kept)
        for epoch, retry in self._stores:
            if retry >= state.claims.get(epoch, 0):
                state.claims[epoch] = retry + 1
        for epoch, commit in repair.commits.items():
            state.chores.pop(Claim(epoch, commit.retry), None)
        if not is_exact:
            state.chores = {}  # delete no store that a lost entry may have recorded
        epochs = {*repair.kept, *repair.commits}
        state.pins = {epoch: labels for epoch, labels in state.pins.items() if epoch in epochs}
        if state.done != max(epochs, default=None):
            state.done = None
