"""Plans the repair of a log that has lost entries. Changes nothing.

Epochs whose stores are gone are no longer recorded; epochs whose stores are complete, though no entry
that is left records them, are verified byte by byte, to be recorded anew.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jobrunner.checkpoint.directory import Directory
from jobrunner.checkpoint.log import (
    ClaimEntry,
    CommitEntry,
    LaterVersionError,
    LogEntry,
    LostEntry,
    Record,
    RunEntry,
    State,
    Store,
    StoreKey,
    each_entry,
    is_histories_name,
    record_in,
)
from jobrunner.checkpoint.opened import contents_of_store
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
)
from jobrunner.names import HISTORIES, ROOT_DOCUMENT, parse_store_name
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
def reading_storage(directory: Directory) -> Iterator[None]:
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
    with reading_storage(directory):
        return Planner(directory).plan()


@dataclass(frozen=True, slots=True)
class _LostSet:
    """All stores of one save of a position, which no entry that is left records."""

    at: Position
    claim: int
    """The number of its ``claim``, as its documents say; 0: of another directory."""
    run: str
    stores: dict[str, Store]
    """By node."""
    record: RecordEntry

    def readers(self, directory: Directory, histories: str) -> dict[str, StoreReader]:
        """The readers of its stores, by node, if their histories lie there."""
        readers = {}
        for node, store in self.stores.items():
            readers[node] = StoreReader(
                directory.files, directory.path, store.name, store.sha256, histories
            )
        return readers


class Planner:
    """Makes the plan for one directory."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        # List before the log is read: a name is claimed before it is used.
        self.names = directory.files.list_names(directory.path)
        self._repair = Repair()
        self._state = State()
        self._runs: dict[str, int] = {}
        """Run -> number of its entry."""
        self._claims: dict[int, str] = {}
        """Number of a ``claim`` -> its run."""
        self._commits: dict[int, CommitEntry] = {}
        self._lost: set[int] = set()
        """The entries that are lost and that no repair has made up for."""
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
                self._lost.add(number)
            case LostEntry():
                self._lost.add(number)
            case RunEntry():
                self._runs[entry.run] = number
            case ClaimEntry():
                self._claims[number] = entry.run
            case CommitEntry():
                self._commits[number] = entry
        if not state.is_unsure:
            self._lost = set(self._repair.lost)

    @property
    def highest(self) -> Position | None:
        """The highest position that any store has."""
        stores = map(parse_store_name, self.names)
        return max((store.epoch for store in stores if store is not None), default=None)

    def plan(self) -> Repair | None:
        """The repair; None if none is necessary."""
        repair = self._repair
        lost_sets = self._find_lost_sets()
        if not self._lost:
            return None
        # By a claim, positions are written in ascending order, and the next claim begins after the
        # newest that is recorded. So what was written by a later claim proves that a rewind, which
        # may be lost, has set aside whatever was recorded at that position and above. To each
        # claim, the lowest position that was written by it:
        pairs = [(lost_set.claim, lost_set.at) for lost_set in lost_sets]
        for commit in self._commits.values():
            if commit.claim is not None and commit.records:
                pairs.append((commit.claim, commit.records[0].at))
        written: dict[int, Position] = {}
        for number, at in pairs:
            written[number] = min(at, written.get(number, at))

        def is_superseded(at: Position, claim: int) -> bool:
            return any(later > claim and lowest <= at for later, lowest in written.items())

        for at, number in self._state.recorded.items():
            claim = self._commits[number].claim
            if claim is None:
                # Stores that were there, as after a restore, are newer than all that was begun before.
                claim = number
            if self._is_cut(at, number):
                repair.given_up[at] = "stores of it are gone"
            elif is_superseded(at, claim):
                repair.given_up[at] = "a later save wrote it, or an epoch before it"
            else:
                repair.kept.append(at)
        for lost_set in lost_sets:
            # If no entry is lost that could have recorded them, their save came to no `commit`.
            is_claimed = self._is_claimed(lost_set.claim, lost_set.run)
            is_abandoned = is_claimed and lost_set.claim > max(self._lost)
            if not is_superseded(lost_set.at, lost_set.claim) and not is_abandoned:
                self._rebuild(lost_set)
        return repair

    def _is_claimed(self, claim: int, run: str) -> bool:
        """Whether an entry that is left is this claim of the run."""
        return self._claims.get(claim) == run

    def _is_cut(self, at: Position, number: int) -> bool:
        """Whether a store of a recorded epoch is gone: it is deleted from its root document on."""
        stores = record_in(self._commits[number], at).all_stores.values()
        names = [store.name for store in stores]
        return len(self._directory.find_whole(names)) < len(names)

    # --- what is not recorded, though its stores are there

    def _find_lost_sets(self) -> list[_LostSet]:
        """Those that a lost entry may have recorded, by position."""
        state = self._state
        recorded: set[str] = set()
        for commit in self._commits.values():
            for record in commit.records:
                # What became of these, the entries say.
                recorded.update(store.name for store in record.all_stores.values())
        sets: dict[StoreKey, dict[str, str]] = defaultdict(dict)
        for name in self.names:
            store = parse_store_name(name)
            if store is not None and name not in recorded and store.key not in state.aside:
                sets[store.key][store.node] = name
        lost_sets = []
        for key, names in sorted(sets.items()):
            try:
                lost_set = self._read_set(key, names)
            except CheckpointCorruptError as error:
                self._repair.unproven |= dict.fromkeys(names.values(), str(error))
                continue
            if lost_set is None:
                continue
            lost_sets.append(lost_set)
            is_known = not lost_set.claim or self._is_claimed(lost_set.claim, lost_set.run)
            if not is_known or not state.has_claimed(key):
                # Only lost entries can have claimed these names, although none that follows shows it.
                self._lost.add(state.number + 1)
        return lost_sets

    def _read_set(self, key: StoreKey, names: Mapping[str, str]) -> _LostSet | None:
        """A lost set by its documents; None if no store is whole, as after a save that died.

        Raises CheckpointCorruptError if they do not prove that they belong together.
        """
        at, state = key[0], self._state
        stores: dict[str, Store] = {}
        origins: set[tuple[int, str]] = set()
        record: RecordEntry | None = None
        for node, name in names.items():
            path = join_path(self._directory.path, f"{name}/{ROOT_DOCUMENT}")
            data = self._directory.files.read(path, DOCUMENT_MOST_BYTES)
            if data is None:
                continue
            document = _check_document(data, path, node, at)
            nbytes = sum(size for size, _ in document.files().values())
            stores[node] = Store(name, hashlib.sha256(data).hexdigest(), nbytes)
            origins.add((document.entry.claim, document.entry.run))
            record = document.entry.record or record
        if not stores:
            return None
        subject = f"The stores of epoch {at} are not all stores of one save"
        if record is None:
            raise CheckpointCorruptError(f"{subject}: the one with the record is gone.")
        missing = [node for node in record.nodes if node not in stores]
        if missing:
            raise CheckpointCorruptError(f"{subject}: those of {', '.join(missing)} are missing.")
        if len(origins) > 1:
            raise CheckpointCorruptError(f"{subject}: {len(origins)} saves wrote them.")
        claim, run = origins.pop()
        # The entry of its run may be lost as well, while that of its claim is left.
        is_known = run in self._runs or self._is_claimed(claim, run)
        is_ours = is_known or claim in self._lost or claim > state.number
        if state.has_claimed(key) and not is_ours:
            claim = 0  # copied from another directory, before all that was written here
        return _LostSet(at, claim, run, {node: stores[node] for node in record.nodes}, record)

    def _rebuild(self, lost_set: _LostSet) -> None:
        """Plan to record a lost set, if every byte is what was written."""
        repair = self._repair
        contents = {}
        histories = self._find_histories(lost_set)
        try:
            for node, reader in lost_set.readers(self._directory, histories).items():
                reader.verify()
                contents[node] = contents_of_store(reader)
        except CheckpointCorruptError as error:
            names = [store.name for store in lost_set.stores.values()]
            repair.unproven |= dict.fromkeys(names, str(error))
            return
        record = Record(lost_set.at, lost_set.stores, histories, details=lost_set.record.details)
        repair.rebuilt[lost_set.at] = {
            "records": [record],
            "contents": contents,
            "run_number": self._runs.get(lost_set.run),
        }
        repair.given_up.pop(lost_set.at, None)

    def _find_histories(self, lost_set: _LostSet) -> str:
        """Where the histories of a lost set lie.

        Usually where its documents say; those of a copy lie elsewhere, and prove it by their digests.
        """
        directory = self._directory
        written = lost_set.record.histories
        if not written:
            return ""
        names = directory.files.list_directories(join_path(directory.path, HISTORIES))
        candidates = [written, *filter(is_histories_name, sorted(names))]
        for histories in candidates:
            with contextlib.suppress(CheckpointCorruptError):
                for reader in lost_set.readers(directory, histories).values():
                    document = reader.read_document()
                    for blob in document.entry.histories:
                        reader.history(document, blob).verify()
                return histories
        return written


def _check_document(data: bytes, path: str, node: str, at: Position) -> StoreDocument:
    """The root document of a store, which must prove by itself that it is whole, and whose it is."""
    if not is_sealed(data):
        raise CheckpointCorruptError(f"{path} is damaged: its SHA-256 is another.", path=path)
    document = StoreDocument(data, path)
    if (document.node, document.position) != (node, at):
        raise CheckpointCorruptError(
            f"{path} is that of node {document.node!r} at epoch {document.position}.", path=path
        )
    return document
