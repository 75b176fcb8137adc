"""Read what the runs of a checkpoint directory did from its log."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec

from jobrunner.checkpoint import (
    CommitEntry,
    Directory,
    DoneEntry,
    EndEntry,
    LogEntry,
    Record,
    RewindEntry,
    RunEntry,
    SpanRecord,
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
from jobrunner.report.ledger import Ledger, Mark, close, estimate, go_back
from jobrunner.report.story import (
    EpochStory,
    LossStory,
    RunStory,
    SaveStory,
    Span,
    StateName,
    Story,
)
from jobrunner.texts import get_logger

logger = get_logger(__name__)


_ALL = Position(10**18)  # no epoch comes after it
KEPT_SPANS = 100_000
"""Samples that are kept, of all runs: the newest."""
KEPT_METRICS = 4096
"""Of an epoch, which are kept: the first. `MultiNodeCheckpointManager.history` has all."""


class _HasDirectory(Protocol):
    """A manager."""

    directory: Directory


Source = _HasDirectory | Directory | str | os.PathLike[str]

_SOURCE = Rule(
    "a checkpoint directory or its manager",
    lambda it: isinstance(getattr(it, "directory", it), Directory) or PATH.fits(it),
)
_TOLD = Rule(
    "a checkpoint directory, its manager or its Story",
    lambda it: isinstance(it, Story) or _SOURCE.fits(it),
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
    story: SaveStory
    metrics: Mapping[str, Any]
    at: Position
    timing: Timing | None


@dataclass(slots=True)
class _Run:
    """A run as far as its entries were read."""

    name: str
    entry: RunEntry | None
    began: float
    last_seen: float
    has_ended: bool = False
    is_done: bool = False
    is_command: bool = False  # not a run of a job
    is_taken_over: bool = False  # another run followed
    has_loaded: bool = False  # `resumed_from` and `first` are known
    resumed_from: Position | None = None
    outcome: StateName = "stopped"  # if it has ended
    saves: list[_Save] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    set_aside: set[int] = field(default_factory=set)  # of `saves`, by index
    first: Position | None = None  # the earliest that it went on from; None: the start, or unknown


class _Reader:
    """Applies the entries of a log one after another."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._state = State()
        self._runs: dict[str, _Run] = {}
        self._newest: _Run | None = None
        self._names: dict[str, str] = {}  # of metrics: those of all epochs share them
        self._where: dict[
            Position, tuple[_Run, int]
        ] = {}  # what is recorded -> its run and save there
        self._spans: deque[tuple[str, SpanRecord]] = deque(maxlen=KEPT_SPANS)  # with their runs

    def read(self) -> Story:
        """Read the whole log."""
        for entry in self._directory.log.read_entries():
            if entry.number > self._state.number + 1:
                self._state.skip_to(entry.number)
            self._take_in(entry)
            self._state.apply(entry)
            if isinstance(entry, RewindEntry):
                self._go_back(entry.run, self._state.latest)
        runs = [run for run in self._runs.values() if not run.is_command]
        spans: dict[str, list[SpanRecord]] = {run.name: [] for run in runs}
        for name, span in self._spans:
            spans.get(name, []).append(span)
        told: list[RunStory] = []
        kept: Position | None = _ALL  # what all later runs have left of this one
        for number in range(len(runs), 0, -1):
            run = runs[number - 1]
            told.append(self._tell(number, run, kept, spans[run.name]))
            if run.has_loaded:
                kept = None if kept is None or run.first is None else min(kept, run.first)
        return Story(self._directory.path, tuple(reversed(told)))

    def _take_in(self, entry: LogEntry) -> None:
        time = unix_time(entry.time)
        match entry:
            case RunEntry():
                if self._newest is not None:
                    self._newest.is_taken_over = True
                self._begin(entry, time)
            case RewindEntry():
                self._set_aside(given_up_by(entry, self._where))
            case DoneEntry():
                self._run(entry.run, time).is_done = True
            case EndEntry():
                run = self._run(entry.run, time)
                run.has_ended, run.outcome = True, entry.outcome or "stopped"
                self._note(run, entry.timing)
            case CommitEntry():
                for record in entry.records:
                    self._commit(entry, record)
        if (known := self._runs.get(entry.run)) is not None:
            known.last_seen = max(known.last_seen, time)

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
            if (before := self._runs.get(name)) is not None and seen <= time:
                before.last_seen = max(before.last_seen, seen)

    def _run(self, name: str, time: float) -> _Run:
        if name not in self._runs:
            self._runs[name] = _Run(name, None, time, time)
        return self._runs[name]

    def _set_aside(self, epochs: list[Position]) -> None:
        for epoch in epochs:
            run, index = self._where.pop(epoch)
            run.set_aside.add(index)

    def _commit(self, commit: CommitEntry, record: Record) -> None:
        try:
            details = read_details(record.details)
        except (ValueError, RecursionError) as error:
            logger.warning("The record of epoch %s cannot be read: %s", record.at, error)
            return
        ended = unix_time(commit.time)
        run = self._run(commit.run, ended)
        if not run.has_loaded:
            self._go_back(commit.run, self._state.latest)
        stores = record.stores or {}
        nodes = {node: store.seconds for node, store in stores.items()}
        seconds = max(nodes.values(), default=0.0)
        nbytes = sum(store.nbytes for store in stores.values())
        save = SaveStory(record.at.public, record.at.step, ended, seconds, seconds, nbytes, nodes)
        timing = self._note(run, details.timing)
        if record.at in self._where:
            self._set_aside([record.at])
        self._where[record.at] = (run, len(run.saves))
        kept = islice(details.metrics.items(), KEPT_METRICS)
        metrics = {self._names.setdefault(name, name): value for name, value in kept}
        run.saves.append(_Save(save, metrics, record.at, timing))

    def _note(self, run: _Run, timing: Timing | None) -> Timing | None:
        """Note what a run had spent; returns it without the samples, which may be very many."""
        if timing is None:
            return None
        self._spans += ((run.name, span) for span in timing.spans)
        run.timings.append(msgspec.structs.replace(timing, spans=[]))
        return run.timings[-1]

    def _go_back(self, name: str, epoch: Position | None) -> None:
        """Note that a run went on from an epoch: what earlier runs ran after that is lost."""
        run = self._runs.get(name)
        if run is None:
            return
        if not run.has_loaded:
            run.has_loaded, run.resumed_from, run.first = True, epoch, epoch
        run.first = None if epoch is None or run.first is None else min(epoch, run.first)

    def _tell(
        self, number: int, run: _Run, kept: Position | None, spans: Sequence[SpanRecord]
    ) -> RunStory:
        """A run, of which later ones have left the epochs up to `kept`; None: none."""
        process = run.entry.process if run.entry is not None else None
        plan, environment = self._about(run)
        state, last_seen = self._end_of(run)
        if not run.has_loaded and not run.is_taken_over:
            run.resumed_from = self._state.latest
        marks, ledger = _spent(run)
        saves = _with_waits([save.story for save in run.saves], marks, ledger)
        if state != "running":
            ledger = close(ledger, last_seen - run.began, is_lost=state == "lost")
        ledger = go_back(ledger, marks, kept)
        return RunStory(
            number=number,
            name=run.name,
            job=str(plan.get("job") or ""),
            host=(process.host if process is not None else None) or "",
            pid=process.pid if process is not None else None,
            parameters=plan.get("parameters", {}),
            plan=plan,
            environment=environment,
            began=run.began,
            ended=last_seen if state not in ("running", "lost") else None,
            last_seen=last_seen,
            state=state,
            resumed_from=None if run.resumed_from is None else run.resumed_from.public,
            epochs=_epochs(run, marks),
            saves=saves,
            losses=_losses(run),
            moves=tuple(
                (run.began + began, run.began + max(began, ended))
                for timing in run.timings
                for began, ended in timing.moves
            ),
            spans=tuple(
                Span(it.node, it.task, it.epoch, run.began + it.began, it.seconds) for it in spans
            ),
            ledger=ledger,
            is_estimated=not run.timings,
        )

    def _end_of(self, run: _Run) -> tuple[StateName, float]:
        """How a run ended, and when it was last seen."""
        if run.has_ended or run.is_done:
            return "finished" if run.is_done else run.outcome, run.last_seen
        files, entry = self._directory.files, run.entry
        beat = read_beat(files, self._directory.path, run.name)
        last_seen = max(run.last_seen, beat.time)
        if run.is_taken_over or entry is None:
            return "lost", last_seen
        is_alive = may_live(beat.seconds_ago, entry.process, run.name, entry.heartbeat_seconds)
        return "running" if is_alive else "lost", last_seen

    def _about(self, run: _Run) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The plan of a run, and what it ran on."""
        try:
            info = loose_json(run.entry.info) if run.entry is not None else {}
            plan = check_plan(info["plan"]) if info.get("plan") else {}
        except (ValueError, RecursionError) as error:
            logger.warning("The plan of run %s cannot be read: %s", run.name, error)
            return {}, {}
        environment = info.get("environment")
        return plan, environment if isinstance(environment, dict) else {}


def _spent(run: _Run) -> tuple[list[Mark], Ledger]:
    """What a run had spent at each save, and at its last record."""
    if not run.timings:
        saves = [(save.at, save.story.ended, save.story.seconds) for save in run.saves]
        return estimate(run.began, saves)
    marks: list[Mark] = []
    spent = Ledger()
    for save in run.saves:
        spent = Ledger.of(save.timing) if save.timing is not None else spent
        marks.append(Mark(save.at, spent))
    return marks, Ledger.of(run.timings[-1])


def _with_waits(
    saves: list[SaveStory], marks: Sequence[Mark], last: Ledger
) -> tuple[SaveStory, ...]:
    after = [*(mark.spent.save_wait for mark in marks[1:]), last.save_wait]
    return tuple(
        replace(save, wait_seconds=max(0.0, until - mark.spent.save_wait))
        for save, mark, until in zip(saves, marks, after, strict=False)  # no save, no mark
    )


def _epochs(run: _Run, marks: Sequence[Mark]) -> tuple[EpochStory, ...]:
    found: list[EpochStory] = []
    before = [(-1 if run.resumed_from is None else run.resumed_from.epoch, 0.0)]
    for index, ((_, metrics, at, _), mark) in enumerate(zip(run.saves, marks, strict=True)):
        if at.step:
            continue
        epoch = at.epoch
        while len(before) > 1 and before[-1][0] >= epoch:  # the run went back
            before.pop()
        last, compute = before[-1]
        seconds = max(0.0, mark.spent.compute - compute) / max(1, epoch - last)
        before.append((epoch, mark.spent.compute))
        ended = run.began + mark.spent.wall
        found.append(EpochStory(epoch, ended, seconds, metrics, index in run.set_aside))
    return tuple(found)


def _losses(run: _Run) -> tuple[LossStory, ...]:
    # By time: a record that seemed to fail may tell of the same losses as the next.
    found = {loss.at: loss for timing in run.timings for loss in timing.losses}
    return tuple(
        LossStory(
            time=run.began + loss.at,
            text=loss.text,
            resumed=None if loss.resumed is None else run.began + loss.resumed,
            resumed_from=None if loss.epoch is None else position_from_json(loss.epoch).public,
        )
        for loss in found.values()
    )


def unix_time(time: str) -> float:
    """An entry's time; 0 if a stranger wrote another text."""
    try:
        found = datetime.fromisoformat(time)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return 0.0
