"""Read what the runs of a checkpoint directory did from its log."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Protocol

from jobrunner.checkpoint import (
    CommitEntry,
    Directory,
    DoneEntry,
    EndEntry,
    LogEntry,
    Record,
    RewindEntry,
    RunEntry,
    State,
    Timing,
    check_info,
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
        source = Directory(source)
    elif not isinstance(source, Directory):
        source = source.directory
    return _Reader(source).read()


@dataclass(slots=True)
class _Run:
    """A run as far as its entries were read."""

    story: RunStory
    entry: RunEntry | None = None
    outcome: StateName | None = None  # None: it has not ended
    is_command: bool = False  # not a run of a job
    # From where it began, and went back to after losses; what earlier runs ran after that is lost.
    origins: list[Position | None] = field(default_factory=list)  # None: the start
    # By time: a record that seemed to fail may tell of the same losses as the next.
    losses: dict[float, LossStory] = field(default_factory=dict)

    def spend(self, timing: Timing | None) -> None:
        """Note what it had spent, and its losses since the entry before."""
        if timing is None:
            return
        self.story.ledger = Ledger(*(getattr(timing, part) for part in PARTS))
        began = self.story.began
        for loss in timing.losses:
            resumed = position = None
            if loss.resumed is not None:
                resumed = began + loss.resumed
            if loss.epoch is not None:
                position = position_from_json(loss.epoch).public
            self.losses[loss.at] = LossStory(began + loss.at, loss.text, resumed, position)


class _Reader:
    """Applies the entries of a log one after another."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._state = State()
        self._runs: dict[str, _Run] = {}
        self._newest: _Run | None = None  # that took the directory
        self._recorded: dict[Position, EpochStory] = {}
        self._saved: dict[tuple[Position, int], EpochStory] = {}  # by the key of its stores

    def read(self) -> Story:
        """Read the whole log."""
        for entry in self._directory.log.read_entries():
            if entry.number > self._state.number + 1:
                self._state.skip_to(entry.number)
            self._take_in(entry)
            self._state.apply(entry)
            if isinstance(entry, RewindEntry) and entry.run in self._runs:
                self._runs[entry.run].origins.append(self._state.latest)
        for at, epoch in self._recorded.items():
            epoch.is_kept = at in self._state.recorded
        runs = [run for run in self._runs.values() if not run.is_command]
        for number, run in enumerate(runs, start=1):
            run.story.number = number
            run.story.losses = tuple(run.losses.values())
            self._tell_outcome(run)
            self._tell_ends(run)
        if runs:
            last = runs[-1].story
            last.state = last_state(last.state, self._state)
        kept: Position | None = _END  # what all later runs have left of a run
        for run in reversed(runs):
            close_ledger(run.story, kept)
            for origin in run.origins:
                if kept is None or origin is None:
                    kept = None
                else:
                    kept = min(kept, origin)
        return Story(self._directory.path, [run.story for run in runs])

    def _take_in(self, entry: LogEntry) -> None:
        time = unix_time(entry.time)
        match entry:
            case RunEntry():
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
            story = self._runs[entry.run].story
            story.last_seen = max(story.last_seen, time)

    def _begin(self, entry: RunEntry, time: float) -> None:
        run = self._newest = self._run(entry.run, time)
        story = run.story
        run.entry = entry
        story.host, story.pid = entry.process.host or "", entry.process.pid
        try:
            info = check_info(loose_json(entry.info))
            story.plan = info.get("plan") or {}
        except (ValueError, RecursionError) as error:
            logger.warning("The begin of run %s cannot be read: %s", story.name, error)
            return
        run.is_command = bool(info.get("command"))
        if isinstance(info.get("environment"), dict):
            story.environment = info["environment"]
        story.began = min(info.get("began") or time, time)
        for name, seen_at in info.get("seen", {}).items():
            if name in self._runs and seen_at <= time:
                before = self._runs[name].story
                before.last_seen = max(before.last_seen, seen_at)

    def _run(self, name: str, time: float) -> _Run:
        if name not in self._runs:
            self._runs[name] = _Run(RunStory(name, time, time))
        return self._runs[name]

    def _set_aside(self, positions: Iterable[Position]) -> None:
        for at in positions:
            self._recorded.pop(at).is_set_aside = True

    def _commit(self, entry: CommitEntry, record: Record, time: float) -> None:
        run = self._run(entry.run, time)
        try:
            details = read_details(record.details)
        except (ValueError, RecursionError) as error:
            logger.warning("The record of epoch %s cannot be read: %s", record.at, error)
            return
        if not run.origins:
            run.origins.append(self._state.latest)
        if record.at in self._recorded:
            self._set_aside([record.at])
        run.spend(details.timing)
        key = (record.at, record.retry)
        if entry.claim is None and key in self._saved:  # it was set aside, and is restored
            self._saved[key].is_set_aside = False
            self._saved[key].recorded = time
        else:
            stores = record.all_stores.values()
            self._saved[key] = EpochStory(
                record.at.public,
                time,
                max((store.seconds for store in stores), default=0.0),
                sum(store.nbytes for store in stores),
                details.metrics,
                stopped_by=tuple(details.stopped_by),
                compute=run.story.ledger.compute,
            )
            run.story.epochs.append(self._saved[key])
        self._recorded[record.at] = self._saved[key]

    def _tell_outcome(self, run: _Run) -> None:
        """Tell how a run ended, or whether it may be alive."""
        story = run.story
        if run.outcome is not None:
            story.state = run.outcome
            return
        beat = read_beat(self._directory.files, self._directory.path, story.name)
        story.last_seen = max(story.last_seen, beat.time)
        if run is self._newest and run.entry is not None:
            every = run.entry.heartbeat_seconds
            if may_live(beat.seconds_ago, run.entry.process, story.name, every):
                story.state = "running"

    def _tell_ends(self, run: _Run) -> None:
        """Tell from which epoch a run resumed, and what ended the job."""
        story = run.story
        if not run.origins and run is self._newest:  # it has recorded nothing yet
            run.origins.append(self._state.latest)
        last = None
        if run.origins and run.origins[0] is not None:
            first = run.origins[0]
            story.resumed_from = first.public
            last = self._recorded.get(first)  # which may have ended the job already
        if story.epochs:
            last = story.epochs[-1]
        if last is not None:
            story.stopped_by = last.stopped_by


def last_state(outcome: StateName, log: State) -> StateName:
    """How the last run ended: "finished" only if the log says so of the newest epoch, too.

    A run finishes after epoch 5, and then `restore` records epoch 8 of an earlier run again. The same
    command goes on from there, so the job has not finished. Nor has it if the last epoch could not be
    saved. If no epoch is recorded any more, they were deleted because the job had finished.
    """
    if outcome == "finished" and log.latest is not None and not log.is_done:
        return "stopped"
    return outcome


def close_ledger(story: RunStory, kept: Position | None) -> None:
    """Account for the end of a run, and for what it computed in vain.

    The last record says what the run had spent by then. After it, a run that ended by itself waited
    or called back; one that was lost ran epochs that nobody recorded.

    `kept` is what later runs left of this one: if it recorded epochs 1 to 10, and the next resumed from
    6, then `kept` is 6, and what it computed after epoch 6 was in vain. None: they began afresh.
    """
    ledger = story.ledger
    remaining = max(0.0, story.last_seen - story.began - ledger.wall)
    if story.state == "lost":
        ledger.redone += remaining
    elif story.state != "running":
        ledger.idle += remaining
    if kept == _END:
        return
    left = 0.0
    for epoch in story.epochs:
        if kept is not None and Position.of(epoch.epoch) <= kept:
            left = max(left, epoch.compute)
    in_vain = max(0.0, ledger.compute - left)
    ledger.compute -= in_vain
    ledger.redone += in_vain


def unix_time(time: str) -> float:
    """An entry's time; 0 if a stranger wrote another text."""
    try:
        moment = datetime.fromisoformat(time)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp()
    except (ValueError, OverflowError):
        return 0.0
