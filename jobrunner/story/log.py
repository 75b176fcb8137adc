"""Read what the runs of a checkpoint directory did from its log."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Protocol

from jobrunner.checkpoint import (
    CommitEntry,
    Directory,
    DoneEntry,
    EndEntry,
    LogEntry,
    LossRecord,
    Record,
    RewindEntry,
    RunEntry,
    State,
    Timing,
    check_info,
    check_plan,
    given_up_by,
    loose_json,
    may_live,
    read_beat,
    read_details,
)
from jobrunner.define import PATH, Rule, checked
from jobrunner.positions import Position, position_from_json
from jobrunner.story.model import PARTS, EpochStory, Ledger, LossStory, RunStory, StateName, Story
from jobrunner.texts import get_logger

logger = get_logger(__name__)

_END = Position(10**18)  # no epoch comes after it


class _HasDirectory(Protocol):
    """A manager."""

    directory: Directory


Source = _HasDirectory | Directory | str | os.PathLike[str]

SOURCE = Rule(
    "a checkpoint directory or its manager",
    lambda source: isinstance(getattr(source, "directory", source), Directory) or PATH.fits(source),
)


@checked
def read_story(source: Annotated[Source, SOURCE]) -> Story:
    """Read what the runs of a checkpoint directory did.

    Parameters
    ----------
    source : MultiNodeCheckpointManager, str or os.PathLike
        The directory, or its manager.

    Returns
    -------
    Story
        Without what damaged entries of the log said, which a warning tells.

    Raises
    ------
    CheckpointError
        The log cannot be read, or all its entries are damaged.

    Notes
    -----
    Runs on any machine that can read the directory, also during a run; writes nothing.
    """
    if isinstance(source, str | os.PathLike):
        return _Reader(Directory(source)).read()
    if isinstance(source, Directory):
        return _Reader(source).read()
    return _Reader(source.directory).read()


@dataclass(slots=True)
class _Epoch:
    """A recorded epoch of a run."""

    at: Position
    recorded: float
    seconds: float
    nbytes: int
    metrics: Mapping[str, Any]
    stopped_by: tuple[str, ...]
    compute: float  # what its run had computed when it ended
    is_set_aside: bool = False


@dataclass(slots=True)
class _Run:
    """A run as far as its entries were read."""

    name: str
    entry: RunEntry | None
    began: float
    last_seen: float
    outcome: StateName | None = None  # None: it has not ended
    is_command: bool = False  # not a run of a job
    is_taken_over: bool = False  # another run followed
    has_loaded: bool = False  # `resumed_from` and `first` are set
    resumed_from: Position | None = None
    first: Position | None = None  # the earliest that it went on from; None: the start, or unknown
    plan: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    epochs: list[_Epoch] = field(default_factory=list)
    spent: Timing = field(default_factory=Timing)  # at its last entry that says so
    # By time: a record that seemed to fail may tell of the same losses as the next.
    losses: dict[float, LossRecord] = field(default_factory=dict)

    def go_on_from(self, epoch: Position | None) -> None:
        """Note that it went on from an epoch: what earlier runs ran after that is lost."""
        if not self.has_loaded:
            self.has_loaded = True
            self.resumed_from = self.first = epoch
        elif epoch is None or self.first is None:
            self.first = None
        else:
            self.first = min(epoch, self.first)

    def spend(self, timing: Timing | None) -> None:
        """Note what it had spent, and its losses since the entry before."""
        if timing is not None:
            self.spent = timing
            self.losses.update({loss.at: loss for loss in timing.losses})


class _Reader:
    """Applies the entries of a log one after another."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._state = State()
        self._runs: dict[str, _Run] = {}
        self._newest: _Run | None = None
        self._recorded: dict[Position, _Epoch] = {}

    def read(self) -> Story:
        """Read the whole log."""
        for entry in self._directory.log.read_entries():
            if entry.number > self._state.number + 1:
                self._state.skip_to(entry.number)
            self._take_in(entry)
            self._state.apply(entry)
            if isinstance(entry, RewindEntry) and entry.run in self._runs:
                self._runs[entry.run].go_on_from(self._state.latest)
        runs = [run for run in self._runs.values() if not run.is_command]
        stories = []
        kept: Position | None = _END  # what all later runs have left of this one
        for number in range(len(runs), 0, -1):
            run = runs[number - 1]
            stories.append(self._tell(number, run, kept))
            if run.has_loaded:
                kept = None if kept is None or run.first is None else min(kept, run.first)
        return Story(self._directory.path, tuple(reversed(stories)))

    def _take_in(self, entry: LogEntry) -> None:
        time = unix_time(entry.time)
        match entry:
            case RunEntry():
                if self._newest is not None:
                    self._newest.is_taken_over = True
                self._begin(entry, time)
            case RewindEntry():
                self._set_aside(given_up_by(entry, self._recorded))
            case DoneEntry():
                self._run(entry.run, time).outcome = "finished"
            case EndEntry():
                run = self._run(entry.run, time)
                run.outcome = run.outcome or entry.outcome or "stopped"
                run.spend(entry.timing)
            case CommitEntry():
                for record in entry.records:
                    self._commit(entry, record, time)
        if entry.run in self._runs:
            self._runs[entry.run].last_seen = max(self._runs[entry.run].last_seen, time)

    def _begin(self, entry: RunEntry, time: float) -> None:
        run = self._newest = self._run(entry.run, time)
        run.entry = entry
        try:
            info = check_info(loose_json(entry.info))
            run.plan = check_plan(info["plan"]) if info.get("plan") else {}
        except (ValueError, RecursionError) as error:
            logger.warning("The begin of run %s cannot be read: %s", run.name, error)
            return
        run.is_command = bool(info.get("command"))
        if isinstance(info.get("environment"), dict):
            run.environment = info["environment"]
        run.began = min(info.get("began") or time, time)
        for name, seen in info.get("seen", {}).items():
            if name in self._runs and seen <= time:
                self._runs[name].last_seen = max(self._runs[name].last_seen, seen)

    def _run(self, name: str, time: float) -> _Run:
        if name not in self._runs:
            self._runs[name] = _Run(name, None, time, time)
        return self._runs[name]

    def _set_aside(self, positions: Iterable[Position]) -> None:
        for at in positions:
            self._recorded.pop(at).is_set_aside = True

    def _commit(self, commit: CommitEntry, record: Record, time: float) -> None:
        try:
            details = read_details(record.details)
        except (ValueError, RecursionError) as error:
            logger.warning("The record of epoch %s cannot be read: %s", record.at, error)
            return
        run = self._run(commit.run, time)
        if not run.has_loaded:
            run.go_on_from(self._state.latest)
        if record.at in self._recorded:
            self._set_aside([record.at])
        run.spend(details.timing)
        stores = (record.stores or {}).values()
        seconds = max((store.seconds for store in stores), default=0.0)
        nbytes = sum(store.nbytes for store in stores)
        epoch = self._recorded[record.at] = _Epoch(
            record.at,
            time,
            seconds,
            nbytes,
            details.metrics,
            tuple(details.stopped_by),
            run.spent.compute,
        )
        run.epochs.append(epoch)

    def _tell(self, number: int, run: _Run, kept: Position | None) -> RunStory:
        """A run, of which later ones have left the epochs up to `kept`; None: none."""
        state, last_seen = self._end_of(run)
        if not run.has_loaded and not run.is_taken_over:
            run.resumed_from = self._state.latest
        ledger = Ledger(*(getattr(run.spent, part) for part in PARTS))
        if state != "running":
            ledger = ledger.closed(last_seen - run.began, is_lost=state == "lost")
        if kept != _END:
            left = 0.0
            for epoch in run.epochs:
                if kept is not None and epoch.at <= kept:
                    left = max(left, epoch.compute)
            ledger = ledger.after_going_back(left)
        last = run.epochs[-1] if run.epochs else None
        if last is None and run.resumed_from is not None:
            last = self._recorded.get(run.resumed_from)  # which has ended the job already
        epochs = []
        for epoch in run.epochs:
            is_recorded = epoch.at in self._state.recorded and not epoch.is_set_aside
            told = (epoch.recorded, epoch.seconds, epoch.nbytes, epoch.metrics)
            epochs.append(EpochStory(epoch.at.public, *told, is_recorded, epoch.is_set_aside))
        process = None if run.entry is None else run.entry.process
        return RunStory(
            number=number,
            name=run.name,
            host="" if process is None else process.host or "",
            pid=None if process is None else process.pid,
            plan=run.plan,
            environment=run.environment,
            began=run.began,
            last_seen=last_seen,
            state=state,
            stopped_by=last.stopped_by if last is not None else (),
            resumed_from=None if run.resumed_from is None else run.resumed_from.public,
            epochs=tuple(epochs),
            losses=tuple(_loss(run, loss) for loss in run.losses.values()),
            ledger=ledger,
        )

    def _end_of(self, run: _Run) -> tuple[StateName, float]:
        """How a run ended, and when it was last seen."""
        if run.outcome is not None:
            return run.outcome, run.last_seen
        beat = read_beat(self._directory.files, self._directory.path, run.name)
        last_seen = max(run.last_seen, beat.time)
        if run.is_taken_over or run.entry is None:
            return "lost", last_seen
        is_alive = may_live(
            beat.seconds_ago, run.entry.process, run.name, run.entry.heartbeat_seconds
        )
        return "running" if is_alive else "lost", last_seen


def _loss(run: _Run, loss: LossRecord) -> LossStory:
    resumed = None if loss.resumed is None else run.began + loss.resumed
    position = None if loss.epoch is None else position_from_json(loss.epoch).public
    return LossStory(run.began + loss.at, loss.text, resumed, position)


def unix_time(time: str) -> float:
    """An entry's time; 0 if a stranger wrote another text."""
    try:
        moment = datetime.fromisoformat(time)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return 0.0
