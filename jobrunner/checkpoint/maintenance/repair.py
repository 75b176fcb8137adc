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
from typing import Any

from jobrunner.checkpoint.directory import Directory
from jobrunner.checkpoint.directory_run import writing
from jobrunner.checkpoint.load_plan import contents_of_store
from jobrunner.checkpoint.log import (
    RUNS_DIRECTORY,
    BeginEntry,
    CommitEntry,
    FileMetadataHandler,
    Holder,
    LaterVersionError,
    LogEntry,
    LogWriter,
    LostEntry,
    MetadataHandler,
    Patience,
    Record,
    RewindEntry,
    RunEntry,
    State,
    Store,
    StoreKey,
    each_entry,
    entry_to_json,
    given_up_by,
    holder_of,
    is_history_label,
    is_left_behind,
    make_entry,
    read_beat,
    record_in,
    refuse_if_alive,
)
from jobrunner.checkpoint.manager import MultiNodeCheckpointManager
from jobrunner.checkpoint.storage import join_path
from jobrunner.checkpoint.store import (
    DOCUMENT_MOST_BYTES,
    HISTORIES,
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


@dataclass(slots=True)
class Repair:
    """What a repair would do, and why."""

    lost: dict[int, str] = field(default_factory=dict)
    """Number of an entry that is missing or cannot be read -> why."""
    kept: list[Position] = field(default_factory=list)
    """Epochs that stay recorded."""
    rebuilt: dict[Position, dict[str, Any]] = field(default_factory=dict)
    """Epochs that their stores prove, to be recorded anew -> what the ``commit`` says of each."""
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
        self._directory = directory
        self._files = directory.files
        self._path = directory.path
        # List before the log is read: a name is claimed before it is used.
        self.names = self._files.list_names(self._path)
        self._repair = Repair()
        self._state = State()
        self._begins: dict[int, int] = {}
        """Label of an attempt -> number of its ``begin``."""
        self._runs: dict[str, RunEntry] = {}
        self._commits: dict[int, tuple[CommitEntry, int]] = {}
        """Each with the label of the attempt that was the newest then."""
        self._rewinds: list[tuple[RewindEntry, int]] = []
        self._last_lost = -1
        """The last entry that is lost and that no repair has made up for."""
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
                self._last_lost = number
            case LostEntry():
                self._last_lost = number
            case RunEntry():
                self._runs[entry.run] = entry
            case BeginEntry():
                self._begins[entry.label] = number
            case CommitEntry():
                self._commits[number] = entry, state.label
            case RewindEntry():
                self._rewinds.append((entry, state.label))
        if not state.is_unsure:
            self._last_lost = -1

    @property
    def highest(self) -> Position | None:
        """The highest position that any store has."""
        stores = map(parse_store_name, self.names)
        return max((store.epoch for store in stores if store is not None), default=None)

    def plan(self) -> Repair | None:
        """The repair; None if none is necessary."""
        repair, state = self._repair, self._state
        lost_sets = self._find_lost_sets()
        if self._last_lost < 0:
            return None
        # An attempt writes positions in ascending order, and the next one begins after the newest
        # that is recorded. So what a later attempt wrote proves that a rewind, which may be lost,
        # has set aside whatever was recorded at that position and above. To each attempt, the
        # lowest position that it wrote:
        written = {
            lost_set.attempt: lost_set.at for lost_set in lost_sets
        }  # the last is the lowest
        for commit, _ in self._commits.values():
            if commit.begin is not None and commit.records:
                attempt, at = self._attempt_of(commit.number), commit.records[0].at
                written[attempt] = min(at, written.get(attempt, at))

        def is_superseded(at: Position, attempt: int) -> bool:
            return any(later > attempt and lowest <= at for later, lowest in written.items())

        for at, number in state.recorded.items():
            if self._is_cut(at, number):
                repair.given_up[at] = "stores of it are gone"
            elif is_superseded(at, self._attempt_of(number)):
                repair.given_up[at] = "a later attempt wrote it, or an epoch before it"
            else:
                repair.kept.append(at)
        for lost_set in lost_sets:
            at, attempt = lost_set.at, lost_set.attempt
            rewinds = [entry for entry, label in self._rewinds if attempt <= label]
            is_set_aside = any(given_up_by(entry, [at]) for entry in rewinds)
            is_older = at in repair.kept and attempt <= self._attempt_of(state.recorded[at])
            # No entry is lost that could have recorded them: their save came to no `commit`.
            is_abandoned = self._begins.get(attempt, -1) > self._last_lost
            if not (is_superseded(at, attempt) or is_set_aside or is_older or is_abandoned):
                self._rebuild(lost_set)
        repair.rebuilt = dict(sorted(repair.rebuilt.items()))
        return repair

    def _attempt_of(self, number: int) -> int:
        """The label of the attempt that wrote what an entry records.

        Of an entry that records stores that were there, the last attempt before it.
        """
        commit, label = self._commits[number]
        if commit.begin is None:
            return label
        for attempt, begin in self._begins.items():
            if begin == commit.begin:
                return attempt
        for store in (commit.records[0].stores or {}).values():
            with contextlib.suppress(CheckpointCorruptError):
                reader = StoreReader(self._files, self._path, store.name, store.sha256)
                return reader.read_document().entry.attempt
        return label

    def _is_cut(self, at: Position, number: int) -> bool:
        """Whether a store of a recorded epoch is gone: it is deleted from its root document on."""
        stores = record_in(self._commits[number][0], at).stores or {}
        names = [store.name for store in stores.values()]
        return len(self._directory.find_whole(names)) < len(names)

    # --- what is not recorded, though its stores are there

    def _find_lost_sets(self) -> list[_LostSet]:
        """Those that a lost entry may have recorded, the newest first."""
        state = self._state
        recorded: set[str] = set()
        for commit, _ in self._commits.values():
            for record in commit.records:
                # What became of these, the entries say.
                recorded.update(store.name for store in (record.stores or {}).values())
        sets: dict[StoreKey, dict[str, str]] = defaultdict(dict)
        for name in self.names:
            store = parse_store_name(name)
            if store is not None and name not in recorded and store.key not in state.aside:
                sets[store.key][store.node] = name
        lost_sets = []
        for key, names in sets.items():
            is_claimed = state.has_claimed(key)
            try:
                lost_set = self._read_set(key[0], names)
            except CheckpointCorruptError as error:
                if self._last_lost >= 0 or not is_claimed:
                    self._repair.unproven |= dict.fromkeys(names.values(), str(error))
                continue
            if lost_set is None:
                continue
            lost_sets.append(lost_set)
            if not is_claimed or lost_set.attempt not in self._begins:
                # Only lost entries can have begun this attempt or claimed these names, although
                # none that follows shows it.
                self._last_lost = state.number + 1
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

    def _rebuild(self, lost_set: _LostSet) -> None:
        """Plan to record a lost set, if every byte is what was written."""
        repair, at = self._repair, lost_set.at
        contents = {}
        label = self._find_histories(lost_set)
        try:
            for node, store in lost_set.stores.items():
                reader = StoreReader(self._files, self._path, store.name, store.sha256, label)
                reader.verify()
                contents[node] = contents_of_store(reader)
        except CheckpointCorruptError as error:
            names = [store.name for store in lost_set.stores.values()]
            repair.unproven |= dict.fromkeys(names, str(error))
            return
        run = self._runs.get(lost_set.run)
        record = Record(at, lost_set.stores, label, details=lost_set.record.details)
        number = None if run is None else run.number
        repair.rebuilt[at] = {"records": [record], "contents": contents, "run_number": number}
        repair.given_up.pop(at, None)
        if at in repair.kept:
            repair.kept.remove(at)

    def _find_histories(self, lost_set: _LostSet) -> str:
        """Where the histories of a lost set lie.

        Usually where its documents say; those of a copy lie elsewhere, and prove it by their digests.
        """
        written = lost_set.record.histories
        if not written:
            return ""
        names = self._files.list_directories(join_path(self._path, HISTORIES))
        labels = [written, *(name for name in sorted(names) if is_history_label(name))]
        for label in labels:
            with contextlib.suppress(CheckpointCorruptError):
                for store in lost_set.stores.values():
                    reader = StoreReader(self._files, self._path, store.name, store.sha256, label)
                    document = reader.read_document()
                    for blob in document.entry.histories:
                        reader.history(document, blob).verify()
                return label
        return written

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
    if not isinstance(handler, FileMetadataHandler):
        raise DefinitionError(
            f"The log of {directory.path} is stored by {type(handler).__name__}. Repair it where it "
            f"is stored."
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
    manager = MultiNodeCheckpointManager(directory.path, handler, files=directory.files)
    manager.run.patience = patience
    manager.directory.log = LogWriter(handler, directory.path, repairs=True)
    manager.run.start([], {"command": "fsck"})
    append = manager.retention.append
    try:
        for at, reason in repair.given_up.items():
            append(RewindEntry, only=at, reason=reason)
        for commit in repair.rebuilt.values():
            append(CommitEntry, begin=None, **commit)
        # Lost entries may have claimed any name that is there, and begun any attempt. This sets all
        # stores aside that are not recorded. It is the last entry but one: that nobody claims a
        # name may be all that shows the next repair, if this one dies, that the log had more.
        if planner.highest is not None:
            manager.directory.log.begin(planner.highest, planner.names)
    except BaseException:
        # Without an `end`, the log stays unsure, and the next repair begins anew.
        manager.run.leave()
        raise
    manager.run.end()
    directory.log = LogWriter(handler, directory.path)  # forgets what was lost
    directory.log.refresh()  # proves that it can be read
    return repair
