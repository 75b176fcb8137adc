"""Read what the runs of a checkpoint directory did from its log."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any, NamedTuple, Protocol

from jobrunner.checkpoint import (
    CommitEntry,
    Details,
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
    check_plan,
    given_up_by,
    loose_json,
    may_live,
    read_beat,
    read_details,
)
from jobrunner.define import PATH, Rule, checked
from jobrunner.positions import Position, position_from_json
from jobrunner.story.model import (
    EpochStory,
    Ledger,
    LossStory,
    Mark,
    RunStory,
    SaveStory,
    StateName,
    Story,
)
from jobrunner.texts import get_logger

logger = get_logger(__name__)


KEPT_METRICS = 4096
"""Of an epoch, which are kept: the first. `MultiNodeCheckpointManager.history` has all."""
_END = Position(10**18)  # no epoch comes after it


class _HasDirectory(Protocol):
    """A manager."""

    directory: Directory


Source = _HasDirectory | Directory | str | os.PathLike[str]

_SOURCE = Rule(
    "a checkpoint directory or its manager",
    lambda source: isinstance(getattr(source, "directory", source), Directory) or PATH.fits(source),
)
_TOLD = Rule(
    "a checkpoint directory, its manager or its Story",
    lambda source: isinstance(source, Story) or _SOURCE.fits(source),
)
Told = Annotated[Source | Story, _TOLD]


def story_of(source: Source | Story) -> Story:
    """The story of a checkpoint directory, which may have been read before."""
    return source if isinstance(source, Story) else read_story(source)


@checked
def read_story(source: Annotated[Source, _SOURCE]) -> Story:
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


class _Save(NamedTuple):
    """A recorded epoch of a run."""

    at: Position
    ended: float
    nodes: Mapping[str, float]
    nbytes: int
    metrics: Mapping[str, Any]
    timing: Timing


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
    stopped_by: tuple[str, ...] = ()
    saves: list[_Save] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    set_aside: set[int] = field(default_factory=set)  # of `saves`, by index

    def go_on_from(self, epoch: Position | None) -> None:
        """Note that it went on from an epoch: what earlier runs ran after that is lost."""
        if not self.has_loaded:
            self.has_loaded = True
            self.resumed_from = self.first = epoch
        elif epoch is None or self.first is None:
            self.first = None
        else:
            self.first = min(epoch, self.first)


class _Reader:
    """Applies the entries of a log one after another."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._state = State()
        self._runs: dict[str, _Run] = {}
        self._newest: _Run | None = None
        self._metric_names: dict[str, str] = {}  # those of all epochs share them
        # What is recorded -> its run, and its number among that run's saves.
        self._recorded: dict[Position, tuple[_Run, int]] = {}

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
                if entry.timing is not None:
                    run.timings.append(entry.timing)
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
        except (ValueError, RecursionError) as error:
            logger.warning("The begin of run %s cannot be read: %s", run.name, error)
            return
        run.is_command = bool(info.get("command"))
        run.began = min(info.get("began") or time, time)
        for name, seen in info.get("seen", {}).items():
            if name in self._runs and seen <= time:
                self._runs[name].last_seen = max(self._runs[name].last_seen, seen)

    def _run(self, name: str, time: float) -> _Run:
        if name not in self._runs:
            self._runs[name] = _Run(name, None, time, time)
        return self._runs[name]

    def _set_aside(self, epochs: Sequence[Position]) -> None:
        for epoch in epochs:
            run, index = self._recorded.pop(epoch)
            run.set_aside.add(index)

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
        self._recorded[record.at] = (run, len(run.saves))
        run.saves.append(self._read_save(run, record, details, time))
        run.stopped_by = tuple(details.stopped_by)

    def _read_save(self, run: _Run, record: Record, details: Details, time: float) -> _Save:
        metrics = {}
        for name, value in islice(details.metrics.items(), KEPT_METRICS):
            metrics[self._metric_names.setdefault(name, name)] = value
        stores = record.stores or {}
        nodes = {node: store.seconds for node, store in stores.items()}
        nbytes = sum(store.nbytes for store in stores.values())
        if details.timing is not None:
            run.timings.append(details.timing)
        timing = run.timings[-1] if run.timings else Timing()
        return _Save(record.at, time, nodes, nbytes, metrics, timing)

    def _tell(self, number: int, run: _Run, kept: Position | None) -> RunStory:
        """A run, of which later ones have left the epochs up to `kept`; None: none."""
        plan, environment = self._read_plan(run)
        state, last_seen = self._end_of(run)
        if not run.has_loaded and not run.is_taken_over:
            run.resumed_from = self._state.latest
        marks = [Mark(save.at, Ledger.of(save.timing)) for save in run.saves]
        ledger = Ledger.of(run.timings[-1]) if run.timings else Ledger()
        saves = _saves(run, marks, ledger)
        if state != "running":
            ledger = ledger.closed(last_seen - run.began, is_lost=state == "lost")
        if kept != _END:
            ledger = ledger.after_going_back(marks, kept)
        process = None if run.entry is None else run.entry.process
        return RunStory(
            number=number,
            name=run.name,
            job=str(plan.get("job") or ""),
            host="" if process is None else process.host or "",
            pid=None if process is None else process.pid,
            parameters=plan.get("parameters", {}),
            plan=plan,
            environment=environment,
            began=run.began,
            ended=last_seen if state not in ("running", "lost") else None,
            last_seen=last_seen,
            state=state,
            stopped_by=run.stopped_by,
            resumed_from=None if run.resumed_from is None else run.resumed_from.public,
            epochs=_epochs(run, marks),
            saves=saves,
            losses=_losses(run),
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

    def _read_plan(self, run: _Run) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The plan of a run, and what it ran on."""
        if run.entry is None:
            return {}, {}
        try:
            info = loose_json(run.entry.info)
            plan = check_plan(info["plan"]) if info.get("plan") else {}
        except (ValueError, RecursionError) as error:
            logger.warning("The plan of run %s cannot be read: %s", run.name, error)
            return {}, {}
        environment = info.get("environment")
        return plan, environment if isinstance(environment, dict) else {}


def _saves(run: _Run, marks: Sequence[Mark], last: Ledger) -> tuple[SaveStory, ...]:
    """Its saves: how long epochs waited for one is told by what the run had spent at the next."""
    stories = []
    after = [*(mark.spent.save_wait for mark in marks[1:]), last.save_wait]
    for save, mark, until in zip(run.saves, marks, after, strict=False):  # no save, no mark
        wait_seconds = max(0.0, until - mark.spent.save_wait)
        seconds = max(save.nodes.values(), default=0.0)
        public = save.at.public
        stories.append(
            SaveStory(
                public, save.at.step, save.ended, seconds, wait_seconds, save.nbytes, save.nodes
            )
        )
    return tuple(stories)


def _epochs(run: _Run, marks: Sequence[Mark]) -> tuple[EpochStory, ...]:
    stories = []
    # What had been spent at the recorded epochs before, of which a recovery may drop the last.
    before = [(-1 if run.resumed_from is None else run.resumed_from.epoch, 0.0)]
    for index, (save, mark) in enumerate(zip(run.saves, marks, strict=True)):
        if save.at.step:
            continue
        epoch = save.at.epoch
        while len(before) > 1 and before[-1][0] >= epoch:
            before.pop()
        last_epoch, compute = before[-1]
        seconds = max(0.0, mark.spent.compute - compute) / max(1, epoch - last_epoch)
        before.append((epoch, mark.spent.compute))
        ended = run.began + mark.spent.wall
        stories.append(EpochStory(epoch, ended, seconds, save.metrics, index in run.set_aside))
    return tuple(stories)


def _losses(run: _Run) -> tuple[LossStory, ...]:
    # By time: a record that seemed to fail may tell of the same losses as the next.
    losses = {loss.at: loss for timing in run.timings for loss in timing.losses}
    return tuple(
        LossStory(
            time=run.began + loss.at,
            text=loss.text,
            resumed=None if loss.resumed is None else run.began + loss.resumed,
            resumed_from=None if loss.epoch is None else position_from_json(loss.epoch).public,
        )
        for loss in losses.values()
    )


def unix_time(time: str) -> float:
    """An entry's time; 0 if a stranger wrote another text."""
    try:
        moment = datetime.fromisoformat(time)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return 0.0
