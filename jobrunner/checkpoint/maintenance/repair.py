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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jobrunner.checkpoint.commits import writing
from jobrunner.checkpoint.directory import Directory
from jobrunner.checkpoint.load_plan import contents_of_store
from jobrunner.checkpoint.log import (
    RUNS_DIRECTORY,
    BeginEntry,
    CommitEntry,
    EntryReplacer,
    Holder,
    LaterVersionError,
    LogEntry,
    LogWriter,
    LostEntry,
    MetadataHandler,
    NodeContents,
    Partition,
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
    DefinitionError,
)
from jobrunner.names import ROOT_DOCUMENT, parse_store_name
from jobrunner.positions import Position


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


@dataclass(frozen=True, slots=True)
class _LostSet:
    """All stores of one attempt at a position, which no entry that is left records."""

    at: Position
    attempt: int
    """The label of the attempt, which its documents have."""
    run: str
    stores: dict[str, Store]
    """By node."""
    record: RecordEntry


class _Planner:
    """Makes the plan for one directory."""

    def __init__(self, directory: Directory) -> None:
        self._files = directory.files
        self._path = directory.path
        # List before the log is read: a name is claimed before it is used.
        self._names = self._files.list_names(self._path)
        self._repair = Repair()
        self._state = State()
        self._labels: dict[int, int] = {}
        """Number of a ``begin`` -> label of its attempt."""
        self._runs: dict[str, RunEntry] = {}
        self._commits: dict[int, CommitEntry] = {}
        self._rewinds: list[RewindEntry] = []
        self._holes: list[int] = []
        """Lost entries since the last repair."""
        self._judged_label = 0
        """The highest label at the end of the last repair, which judged these attempts."""
        for number, entry in each_entry(directory.handler):
            self._take_in(number, entry)

    def _take_in(self, number: int, entry: LogEntry | CheckpointCorruptError) -> None:
        state = self._state
        if isinstance(entry, LaterVersionError):
            raise entry  # nothing is lost
        if isinstance(entry, LogEntry):
            try:
                state.apply(entry)
            except CheckpointCorruptError as error:
                entry = error
        match entry:
            case CheckpointCorruptError():
                self._repair.lost[number] = str(entry)
                state.skip_to(number + 1)
                self._holes.append(number)
            case LostEntry():
                self._holes.append(number)
            case RunEntry():
                self._runs[entry.run] = entry
            case BeginEntry():
                self._labels[number] = entry.label
            case CommitEntry():
                self._commits[number] = entry
            case RewindEntry():
                self._rewinds.append(entry)
        if self._holes and not state.is_unsure:
            self._holes = []
            self._judged_label = state.label

    @property
    def highest(self) -> tuple[Position | None, int]:
        """The highest position that any store has, and a label that no attempt exceeds."""
        stores = [store for store in map(parse_store_name, self._names) if store is not None]
        position = max((store.epoch for store in stores), default=None)
        # Each entry, also one that is lost, may have begun an attempt.
        return position, max([self._state.number, *(store.retry for store in stores)])

    def plan(self) -> Repair | None:
        """The repair; None if none is necessary."""
        repair, state = self._repair, self._state
        lost_sets = self._find_lost_sets()
        if not self._holes:
            repair.kept = state.epochs
            return None
        # An attempt writes positions in ascending order, and the next one begins after the newest
        # that is recorded. So what a later attempt wrote proves that a rewind, which may be lost,
        # has set aside whatever was recorded at that position and above. To each attempt, the
        # lowest position that it wrote:
        lowest = {lost_set.attempt: lost_set.at for lost_set in lost_sets}  # the last is the lowest
        for commit in self._commits.values():
            if commit.begin is not None and commit.records:
                attempt, at = self._attempt_of(commit), commit.records[0].at
                lowest[attempt] = min(at, lowest.get(attempt, at))

        for at in state.epochs:
            reason = self._find_reason(at, lowest)
            if reason:
                repair.given_up[at] = reason
            else:
                repair.kept.append(at)
        for lost_set in lost_sets:
            if not self._is_set_aside(lost_set, lowest):
                self._rebuild(lost_set)
        repair.rebuilt = dict(sorted(repair.rebuilt.items()))
        return repair

    # --- what is recorded

    def _attempt_of(self, commit: CommitEntry) -> int:
        """The label of the attempt that wrote what an entry records.

        Of an entry that records stores that were there, the last attempt before it.
        """
        if commit.begin in self._labels:
            return self._labels[commit.begin]
        if commit.begin is not None:
            for store in (commit.records[0].stores or {}).values():
                with contextlib.suppress(CheckpointCorruptError):
                    reader = StoreReader(self._files, self._path, store.name, store.sha256)
                    return reader.read_document().entry.attempt
        return self._label_before(commit.number)

    def _label_before(self, number: int) -> int:
        return max((label for n, label in self._labels.items() if n < number), default=0)

    def _find_reason(self, at: Position, lowest: Mapping[int, Position]) -> str:
        """Why a lost entry must have given a recorded epoch up; empty if nothing says so."""
        commit = self._commits[self._state.recorded[at]]
        stores = record_in(commit, at).stores or {}
        # A store is deleted from its root document on.
        roots = [
            join_path(self._path, f"{store.name}/{ROOT_DOCUMENT}") for store in stores.values()
        ]
        gone = [root for root in roots if not self._files.is_taken(root)]
        if gone:
            return f"{gone[0]} is gone" if len(gone) < len(roots) else "its stores are gone"
        attempt = self._attempt_of(commit)
        for later, position in lowest.items():
            if later > attempt and position < at and commit.number < self._holes[-1]:
                return f"epoch {position} was written after it, so a lost entry set it aside"
        return ""

    # --- what is not recorded, though its stores are there

    def _find_lost_sets(self) -> list[_LostSet]:
        """Those that a lost entry may have recorded, the newest first."""
        recorded: set[str] = set()
        for commit in self._commits.values():
            for record in commit.records:
                # What became of these, the entries say.
                recorded.update(store.name for store in (record.stores or {}).values())
        sets: dict[tuple[Position, int], dict[str, str]] = defaultdict(dict)
        for name in self._names:
            store = parse_store_name(name)
            if store is not None and name not in recorded:
                sets[store.epoch, store.retry][store.node] = name
        lost_sets = []
        is_cut = False
        for (at, label), names in sets.items():
            is_claimed = self._state.has_claimed(at, label)
            try:
                lost_set = self._read_set(at, names)
            except CheckpointCorruptError as error:
                if self._holes or not is_claimed:
                    self._repair.unproven |= dict.fromkeys(names.values(), str(error))
                continue
            if lost_set is not None and lost_set.attempt > self._judged_label:
                lost_sets.append(lost_set)
                has_begun = lost_set.attempt in self._labels.values()
                is_cut = is_cut or not is_claimed or not has_begun
        if is_cut:
            # Only lost entries can have begun this attempt or claimed these names, although none
            # that follows shows it.
            self._holes.append(self._state.number + 1)
        return sorted(lost_sets, key=lambda item: (item.attempt, item.at), reverse=True)

    def _read_set(self, at: Position, names: Mapping[str, str]) -> _LostSet | None:
        """A lost set by its documents; None if no store is whole, as after a save that died.

        Raises CheckpointCorruptError if they do not prove that they belong together.
        """
        stores: dict[str, Store] = {}
        origins: set[tuple[int, str]] = set()
        record: RecordEntry | None = None
        for node, name in names.items():
            path = join_path(self._path, f"{name}/{ROOT_DOCUMENT}")
            data = self._files.read(path, DOCUMENT_MOST_BYTES)
            if data is None:
                continue
            if not is_sealed(data):
                raise CheckpointCorruptError(
                    f"{path} is damaged: its SHA-256 is another.", path=path
                )
            document = StoreDocument(data, path)
            if (document.node, document.position) != (node, at):
                raise CheckpointCorruptError(
                    f"{path} is that of node {document.node!r} at epoch {document.position}.",
                    path=path,
                )
            nbytes = sum(size for size, _ in document.files().values())
            stores[node] = Store(name, hashlib.sha256(data).hexdigest(), nbytes)
            origins.add((document.entry.attempt, document.entry.run))
            record = document.entry.record or record
        if not stores:
            return None
        nodes = [] if record is None else record.nodes
        missing = ", ".join(node for node in nodes if node not in stores)
        if record is None or missing or len(origins) > 1:
            problem = f"{len(origins)} attempts wrote them"
            if record is None:
                problem = "the one with the record is gone"
            elif missing:
                problem = f"those of {missing} are missing"
            raise CheckpointCorruptError(
                f"The stores of epoch {at} are not all stores of one save: {problem}."
            )
        attempt, run = origins.pop()
        return _LostSet(at, attempt, run, {node: stores[node] for node in nodes}, record)

    def _is_set_aside(self, lost_set: _LostSet, lowest: Mapping[int, Position]) -> bool:
        """Whether an entry, perhaps a lost one, has set these stores aside."""
        at, attempt = lost_set.at, lost_set.attempt
        if any(later > attempt and position <= at for later, position in lowest.items()):
            return True
        number = self._state.recorded.get(at) if at in self._repair.kept else None
        if number is not None and attempt <= self._attempt_of(self._commits[number]):
            return True
        for rewind in self._rewinds:
            is_before = attempt <= self._label_before(rewind.number)
            if is_before and given_up_by(rewind, [at]):
                return True
        # No entry is lost that could have recorded them: their save came to no `commit`.
        numbers = [number for number, label in self._labels.items() if label == attempt]
        return bool(numbers) and self._holes[-1] < numbers[0]

    def _rebuild(self, lost_set: _LostSet) -> None:
        """Plan to record a lost set, if every byte is what was written."""
        repair, at = self._repair, lost_set.at
        partitions: Mapping[str, Partition] = {}
        with contextlib.suppress(ValueError, RecursionError):
            partitions = read_details(lost_set.record.details).partitions
        contents = {}
        try:
            for node, store in lost_set.stores.items():
                reader = StoreReader(self._files, self._path, store.name, store.sha256)
                reader.verify()
                contents[node] = contents_of_store(reader, node, partitions)
        except CheckpointCorruptError as error:
            names = [store.name for store in lost_set.stores.values()]
            repair.unproven |= dict.fromkeys(names, str(error))
            return
        run = self._runs.get(lost_set.run)
        record = Record(at, lost_set.stores, details=lost_set.record.details)
        repair.rebuilt[at] = Rebuilt(record, contents, None if run is None else run.number)
        repair.given_up.pop(at, None)
        if at in repair.kept:
            repair.kept.remove(at)

    # --- who may use the directory

    def holders(self) -> list[Holder]:
        """The runs that may be alive: all that have a heartbeat, as any ``run`` entry may be lost."""
        holders = []
        for name in self._files.list_names(join_path(self._path, RUNS_DIRECTORY)):
            if is_left_behind(self._files, self._path, name):
                continue
            if name in self._runs:
                holders.append(holder_of(self._runs[name]))
            else:
                process = read_beat(self._files, self._path, name).process
                holders.append(Holder(0, name, process=process))
        return holders


def repair_log(directory: Directory, patience: Patience | None = None) -> Repair | None:
    """Repair a log; return what was done, None if nothing is necessary.

    Raises CommitConflictError if a run that is alive holds the directory or took it meanwhile, and
    CheckpointWriteError if the log cannot be written.
    """
    handler: MetadataHandler = directory.handler
    if not isinstance(handler, EntryReplacer):
        raise DefinitionError(
            f"The log of {directory.path} is stored by {type(handler).__name__}, which cannot "
            f"replace entries (it has no method `replace`). Repair it where it is stored."
        )
    with reading(directory):
        planner = _Planner(directory)
        repair = planner.plan()
        if repair is None:
            return None
        for holder in planner.holders():
            refuse_if_alive(directory.files, directory.path, holder, patience or Patience())
    run = uuid.uuid4().hex
    with writing(directory.path, "the log could not be repaired"):
        for number in repair.lost:
            handler.replace(entry_to_json(make_entry(LostEntry, number, run)))
    manager = MultiNodeCheckpointManager(
        directory.path, handler, files=directory.files, patience=patience
    )
    manager.directory.log = LogWriter(handler, directory.path, repairs=True)
    manager.run.start([], {"command": "fsck"})
    try:
        _reconcile(manager, repair, *planner.highest)
    except BaseException:
        # Without an `end`, the log stays unsure, and the next repair begins anew.
        manager.run.leave()
        raise
    manager.run.end()
    directory.log = LogWriter(handler, directory.path)  # forgets what was lost
    directory.log.refresh()  # proves that it can be read
    return repair


def _reconcile(
    manager: MultiNodeCheckpointManager, repair: Repair, position: Position | None, label: int
) -> None:
    """Append what the repair says; `position` and `label` are the highest that names have."""
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
    if position is not None:
        # Lost entries may have claimed any name that is there, and no label may come twice. This
        # entry is the last but one: that nobody claims a name may be all that shows the next
        # repair, if this one dies, that the log had more entries.
        manager.directory.log.begin(position, label=label)
