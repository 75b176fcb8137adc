"""Repairs a log that has lost entries, by an ordinary run that reconciles it with the stores.

A damaged entry is kept under another name, and `lost` takes its place. Then a run takes the
directory. Epochs whose stores are gone are set aside; epochs whose stores are complete, though no
entry that is left records them, are verified byte by byte and recorded. No store is touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jobrunner.checkpoint.directory import Directory
from jobrunner.checkpoint.loader import read_contents
from jobrunner.checkpoint.log import (
    RUNS_DIRECTORY,
    BeginEntry,
    CommitEntry,
    EndEntry,
    EntryReplacer,
    Holder,
    LaterVersionError,
    LogEntry,
    LogWriter,
    LostEntry,
    MetadataHandler,
    NodeContents,
    Patience,
    Record,
    RewindEntry,
    RunEntry,
    State,
    Store,
    each_entry,
    entry_to_json,
    given_up_by,
    holder_of,
    is_left_behind,
    make_entry,
    read_beat,
    read_details,
    record_in,
    refuse_if_alive,
)
from jobrunner.checkpoint.manager import MultiNodeCheckpointManager
from jobrunner.checkpoint.storage import join_path
from jobrunner.checkpoint.store import (
    DOCUMENT_MOST_BYTES,
    RecordEntry,
    StoreDocument,
    StoreReader,
    is_sealed,
)
from jobrunner.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointWriteError,
    CommitConflictError,
    DefinitionError,
)
from jobrunner.names import ROOT_DOCUMENT, parse_store_name
from jobrunner.positions import Position

_NO_END = 1 << 62


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The record of an epoch that its stores prove."""

    record: Record
    contents: dict[str, NodeContents]
    run_number: int | None


@dataclass(slots=True)
class Repair:
    """What a repair would do, and why."""

    lost: dict[int, str] = field(default_factory=dict)
    """Number of an entry that is missing or cannot be read -> why."""
    kept: list[Position] = field(default_factory=list)
    """Epochs that stay recorded."""
    rebuilt: dict[Position, Rebuilt] = field(default_factory=dict)
    """Epochs that are recorded anew."""
    given_up: dict[Position, str] = field(default_factory=dict)
    """Epochs that are no longer recorded -> why."""
    unproven: dict[str, str] = field(default_factory=dict)
    """Stores of which no record can be rebuilt -> why."""


@contextlib.contextmanager
def reading(directory: Directory) -> Iterator[None]:
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


def plan_repair(directory: Directory) -> Repair | None:
    """Plan the repair of a directory; None if none is necessary. Changes nothing.

    Reads the whole log, the names of all stores, and every byte of the epochs whose records it
    rebuilds. Raises CheckpointError if the storage fails, or a later version wrote an entry.
    """
    with reading(directory):
        return _Planner(directory).plan()


@dataclass(slots=True)
class _LostSet:
    """The stores of one attempt at a position that no entry that is left records."""

    at: Position
    attempt: int
    """The label of the attempt, which its documents have."""
    run: str
    documents: dict[str, StoreDocument]
    """By node."""
    stores: dict[str, Store]
    record: RecordEntry

    @property
    def names(self) -> list[str]:
        """The names of the stores."""
        return [store.name for store in self.stores.values()]


class _Planner:
    """Makes the plan for one directory."""

    def __init__(self, directory: Directory) -> None:
        _replacer(directory)
        self._files = directory.files
        self._path = directory.path
        # List before the log is read: a name is claimed before it is used.
        self._names = self._files.list_names(self._path)
        self._lost_sets: list[_LostSet] = []
        self._repair = Repair()
        self._state = State()
        self._entries: list[LogEntry] = []
        self._holes: list[int] = []
        """Lost entries since the last repair."""
        self._begins: dict[int, int] = {}
        """Label of an attempt -> number of its entry."""
        self._repaired = -1, 0
        """Where the last repair ended, and the highest label then."""
        for number, entry in each_entry(directory.handler):
            self._take_in(number, entry)

    def _take_in(self, number: int, entry: LogEntry | CheckpointCorruptError) -> None:
        state = self._state
        if isinstance(entry, LaterVersionError):
            raise entry  # nothing is lost
        if not isinstance(entry, CheckpointCorruptError):
            try:
                state.apply(entry)
            except CheckpointCorruptError as error:
                entry = error
        if isinstance(entry, CheckpointCorruptError):
            self._repair.lost[number] = str(entry)
            state.skip_to(number + 1)
            self._holes.append(number)
            return
        self._entries.append(entry)
        if isinstance(entry, LostEntry):
            self._holes.append(number)
        if isinstance(entry, BeginEntry):
            self._begins[entry.label] = number
        if self._holes and not state.is_unsure:
            self._holes = []
            self._repaired = number, state.label

    @property
    def highest(self) -> tuple[Position | None, int]:
        """The highest position that any store has, and a label that no attempt exceeds."""
        stores = filter(None, map(parse_store_name, self._names))
        position = max((store.epoch for store in stores), default=None)
        labels = [lost_set.attempt for lost_set in self._lost_sets]
        # Each entry that is lost may have begun an attempt.
        return position, max([self._state.number, *labels])

    def plan(self) -> Repair | None:
        """The plan; None if there is nothing to do."""
        repair, state = self._repair, self._state
        self._lost_sets = self._find_lost_sets()
        if any(self._is_unclaimed(lost_set) for lost_set in self._lost_sets):
            # Only a commit, or a begin, of the attempt can have claimed these names. So the log had
            # more entries, although nothing follows to show it.
            self._holes.append(state.number + 1)
        candidates = [item for item in self._lost_sets if self._may_be_committed(item)]
        for at in state.epochs:
            reason = self._why_given_up(at, candidates) if self._holes else ""
            if reason:
                repair.given_up[at] = reason
            else:
                repair.kept.append(at)
        for lost_set in candidates:
            self._rebuild(lost_set, candidates)
        repair.rebuilt = dict(sorted(repair.rebuilt.items()))
        if not state.is_unsure and not repair.rebuilt and not repair.given_up:
            return None
        return repair

    # --- what is recorded

    def _record(self, at: Position) -> tuple[CommitEntry, Record]:
        """The recorded epoch's entry and record."""
        number = self._state.recorded[at]
        for entry in self._entries:
            if entry.number == number and isinstance(entry, CommitEntry):
                return entry, record_in(entry, at)
        raise AssertionError(f"entry {number} was applied")

    def _attempt_of(self, commit: CommitEntry) -> tuple[int, int]:
        """The least and the highest label that the attempt of a commit may have.

        They differ if its ``begin`` is lost; labels rise from entry to entry.
        """
        begin = commit.number if commit.begin is None else commit.begin
        before = [label for label, number in self._begins.items() if number <= begin]
        after = [label for label, number in self._begins.items() if number > begin]
        least = max(before, default=0)
        if self._begins.get(least) == begin or commit.begin is None:
            return least, least
        return least + 1, min(after, default=1 << 62) - 1

    def _why_given_up(self, at: Position, candidates: Sequence[_LostSet]) -> str:
        """Why a lost entry must have given an epoch up; empty if nothing says so."""
        commit, record = self._record(at)
        stores = record.stores or {}
        roots = [join_path(self._path, store.name) for store in stores.values()]
        if roots and not any(map(self._files.is_taken, roots)):
            return "its stores are gone"
        for root in roots:
            # A store is deleted from its root document on.
            if not self._files.is_taken(join_path(root, ROOT_DOCUMENT)):
                return f"{root} has no {ROOT_DOCUMENT}, so a lost entry retired it"
        # An attempt records positions in ascending order, and the next one begins after the
        # newest that is recorded. So whatever a later attempt wrote below `at` came after a rewind.
        for entry in self._entries:
            if isinstance(entry, CommitEntry) and (entry.begin or 0) > commit.number:
                is_split = any(commit.number < hole < entry.number for hole in self._holes)
                if is_split and any(record.at < at for record in entry.records):
                    return f"entry {entry.number} records an earlier one, after a lost rewind"
        _, attempt = self._attempt_of(commit)
        for lost_set in candidates:
            if lost_set.attempt > attempt and lost_set.at < at:
                return f"{lost_set.names[0]} was written after it, so a lost entry set it aside"
        return ""

    # --- what is not recorded, though its stores are there

    def _find_lost_sets(self) -> list[_LostSet]:
        """All complete ones, the newest first."""
        recorded: set[str] = set()
        for entry in self._entries:
            if isinstance(entry, CommitEntry):
                for record in entry.records:
                    # What became of these, the entries say.
                    recorded.update(store.name for store in (record.stores or {}).values())
        sets: dict[tuple[Position, int], dict[str, str]] = defaultdict(dict)
        for name in self._names:
            store = parse_store_name(name)
            if store is not None and name not in recorded:
                sets[store.epoch, store.retry][store.node] = name
        lost_sets = []
        for (at, label), names in sets.items():
            try:
                lost_set = self._read_set(at, names)
            except CheckpointCorruptError as error:
                if self._holes or not self._state.has_claimed(at, label):
                    self._repair.unproven |= dict.fromkeys(names.values(), str(error))
                continue
            if lost_set is not None:
                lost_sets.append(lost_set)
        return sorted(lost_sets, key=lambda item: (item.attempt, item.at), reverse=True)

    def _read_set(self, at: Position, names: Mapping[str, str]) -> _LostSet | None:
        """A lost set by its documents; None if no store is whole, as after a save that died.

        Raises CheckpointCorruptError if they do not prove that they belong together.
        """
        documents: dict[str, StoreDocument] = {}
        stores: dict[str, Store] = {}
        origins: set[tuple[int, str]] = set()
        source: RecordEntry | None = None
        for node, name in names.items():
            path = join_path(self._path, f"{name}/{ROOT_DOCUMENT}")
            data = self._files.read(path, DOCUMENT_MOST_BYTES)
            if data is None:
                continue
            if not is_sealed(data):
                raise CheckpointCorruptError(
                    f"{path} is damaged: its {len(data)} bytes do not contain their own SHA-256.",
                    path=path,
                )
            document = StoreDocument(data, path)
            if (document.node, document.position) != (node, at):
                raise CheckpointCorruptError(
                    f"{path}: expected the document of node {node!r} at epoch {at}, found that of "
                    f"node {document.node!r} at epoch {document.position}.",
                    path=path,
                )
            nbytes = sum(size for size, _ in document.files().values())
            documents[node] = document
            stores[node] = Store(name, hashlib.sha256(data).hexdigest(), nbytes)
            origins.add((document.entry.attempt, document.entry.run))
            source = document.entry.record or source
        if not documents:
            return None
        listed = ", ".join(names.values())
        if source is None:
            raise CheckpointCorruptError(
                f"None of the stores {listed} has the record of epoch {at}: the store that had it "
                f"is gone."
            )
        missing = [node for node in source.nodes if node not in stores]
        if missing:
            raise CheckpointCorruptError(
                f"The stores of epoch {at} are not all stores of one save: those of "
                f"{', '.join(missing)} are missing."
            )
        if len(origins) > 1:
            raise CheckpointCorruptError(
                f"The stores of epoch {at} are not all stores of one save: {listed} were written "
                f"by {len(origins)} attempts."
            )
        stores = {node: stores[node] for node in source.nodes}
        attempt, run = origins.pop()
        return _LostSet(at, attempt, run, documents, stores, source)

    def _may_be_committed(self, lost_set: _LostSet) -> bool:
        """Whether a lost entry may have recorded these stores, and no other one gave them up.

        Labels rise from attempt to attempt, so the entries that are left bound where the ``begin``
        of this one was; and where its ``commit`` was, as the next attempt ends it.
        """
        repaired, last_label = self._repaired
        begin = self._begins.get(lost_set.attempt)
        if begin is None and lost_set.attempt <= last_label:
            return False  # the last repair has judged it
        first, end = repaired, _NO_END
        for label, number in self._begins.items():
            if label <= lost_set.attempt:
                first = max(first, number)
            else:
                end = min(end, number)
        rewind = -1
        for entry in self._entries:
            if entry.number <= first:
                continue
            if isinstance(entry, RewindEntry) and given_up_by(entry, [lost_set.at]):
                if begin is not None or entry.number > end:
                    return False
                rewind = entry.number
            elif begin is not None and isinstance(entry, RunEntry | RewindEntry | EndEntry):
                end = min(end, entry.number)
        holes = [hole for hole in self._holes if max(first, rewind) < hole < end]
        if begin is not None:
            return bool(holes)
        # The `begin` is lost, too. If the log has none of a later attempt, all of its end may be.
        return len(holes) >= 2 or end == _NO_END

    def _is_unclaimed(self, lost_set: _LostSet) -> bool:
        for name in lost_set.names:
            store = parse_store_name(name)
            if store is not None and not self._state.has_claimed(lost_set.at, store.retry):
                return True
        return False

    def _rebuild(self, lost_set: _LostSet, candidates: Sequence[_LostSet]) -> None:
        """Plan to record a lost set, unless something shows that a lost entry had given it up."""
        repair, at = self._repair, lost_set.at
        for later in candidates:
            if later.attempt > lost_set.attempt and later.at <= at:
                return
        for entry in self._entries:
            if isinstance(entry, CommitEntry) and entry.begin is not None:
                least, _ = self._attempt_of(entry)
                if least > lost_set.attempt and any(record.at <= at for record in entry.records):
                    return
        if at in repair.kept:
            _, attempt = self._attempt_of(self._record(at)[0])
            if lost_set.attempt <= attempt:
                return
        for store in lost_set.stores.values():
            try:
                StoreReader(self._files, self._path, store.name, store.sha256).verify()
            except CheckpointCorruptError as error:
                repair.unproven |= dict.fromkeys(lost_set.names, str(error))
                return
        contents = self._contents_of(lost_set)
        runs = [entry for entry in self._entries if isinstance(entry, RunEntry)]
        numbers = [entry.number for entry in runs if entry.run == lost_set.run]
        record = Record(at, lost_set.stores, details=lost_set.record.details)
        repair.rebuilt[at] = Rebuilt(record, contents, numbers[0] if numbers else None)
        repair.given_up.pop(at, None)
        if at in repair.kept:
            repair.kept.remove(at)

    def _contents_of(self, lost_set: _LostSet) -> dict[str, NodeContents]:
        """What the stores have in them, as the ``commit`` said that is lost."""
        partitions = {}
        with contextlib.suppress(ValueError, RecursionError):
            partitions = read_details(lost_set.record.details).partitions
        contents = {}
        for node, store in lost_set.stores.items():
            reader = StoreReader(self._files, self._path, store.name, store.sha256)
            contents[node] = read_contents(reader, node, partitions)
        return contents

    # --- who may use the directory

    def holders(self) -> dict[str, Holder]:
        """The runs that may be alive, judged by the entries that are left and by heartbeats.

        The last ``run`` entry may be a lost one, so every heartbeat counts.
        """
        runs = {e.run: holder_of(e) for e in self._entries if isinstance(e, RunEntry)}
        ended = {entry.run for entry in self._entries if isinstance(entry, EndEntry)}
        last = list(runs.values())[-1:]
        suspects = {holder.run: holder for holder in last if holder.run not in ended}
        root = join_path(self._path, RUNS_DIRECTORY)
        for name in self._files.list_names(root):
            if not is_left_behind(self._files, self._path, name):
                process = read_beat(self._files, self._path, name).process
                suspects[name] = runs.get(name) or Holder(0, name, process=process)
        return suspects


def repair_log(directory: Directory, patience: Patience | None = None) -> Repair | None:
    """Repair a log; return what was done, None if nothing is necessary.

    Raises CommitConflictError if a run that is alive holds the directory or took it meanwhile, and
    CheckpointWriteError if the log cannot be written.
    """
    with reading(directory):
        planner = _Planner(directory)
        repair = planner.plan()
        if repair is None:
            return None
        for holder in planner.holders().values():
            _refuse_if_alive(directory, holder, patience or Patience())
    run = uuid.uuid4().hex
    handler = _replacer(directory)
    try:
        for number in repair.lost:
            handler.replace(entry_to_json(make_entry(LostEntry, number, run)))
    except OSError as error:
        raise CheckpointWriteError(
            f"{directory.path}: the log could not be repaired: {type(error).__name__}: {error}. "
            f"Repair the storage and try again."
        ) from error
    directory.log = LogWriter(directory.handler, directory.path)  # forgets what was lost
    _reconcile(directory, repair, planner.highest, patience)
    directory.log.refresh()  # proves that it can be read
    return repair


def _reconcile(
    directory: Directory,
    repair: Repair,
    highest: tuple[Position | None, int],
    patience: Patience | None,
) -> None:
    """Append what the repair says, as a run."""
    manager = MultiNodeCheckpointManager(
        directory.path, directory.handler, files=directory.files, patience=patience
    )
    manager.directory.log = LogWriter(directory.handler, directory.path, repairs=True)
    manager.run.start([], {"command": "fsck"})
    try:
        append = manager.retention.append
        for at, reason in repair.given_up.items():
            append(RewindEntry, only=at, reason=reason)
        for rebuilt in repair.rebuilt.values():
            append(
                CommitEntry,
                begin=None,
                records=[rebuilt.record],
                contents=rebuilt.contents,
                run_number=rebuilt.run_number,
            )
        position, label = highest
        if position is not None:
            # Lost entries may have claimed any name that is there, and no label may come twice. This
            # entry is the last but one: that nobody claims a name may be all that shows the next
            # repair, if this one dies, that the log had more entries.
            manager.directory.log.begin(position, label=label)
    except BaseException:
        # Without an `end`, the log stays unsure, and the next repair begins anew.
        manager.run.leave()
        raise
    manager.run.end()


def _replacer(directory: Directory) -> EntryReplacer:
    """The handler; raises DefinitionError if it cannot replace entries."""
    handler: MetadataHandler = directory.handler
    if isinstance(handler, EntryReplacer):
        return handler
    raise DefinitionError(
        f"The log of {directory.path} is stored by {type(handler).__name__}, which cannot replace "
        f"entries (it has no method `replace`). Repair it where it is stored."
    )


def _refuse_if_alive(directory: Directory, holder: Holder, patience: Patience) -> None:
    try:
        refuse_if_alive(directory.files, directory.path, holder, patience)
    except CommitConflictError as error:
        raise CommitConflictError(
            f"The log of {directory.path} was not repaired, because a run that is alive holds the "
            f"directory: {holder}. Stop it and try again."
        ) from error
