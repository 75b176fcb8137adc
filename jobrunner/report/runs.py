"""The runs below a directory: what each is, how far it is, and whether it is alive."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from jobrunner.checkpoint import (
    Beat,
    Directory,
    EndEntry,
    EpochRecord,
    Files,
    RunEntry,
    State,
    check_info,
    is_url,
    may_live,
    read_beat,
)
from jobrunner.define import HIDDEN
from jobrunner.errors import CheckpointError
from jobrunner.names import LOG_DIRECTORY, MAX_NAME_LENGTH, described_nodes
from jobrunner.positions import Position, PublicPosition
from jobrunner.report.reader import unix_time
from jobrunner.report.story import StateName
from jobrunner.texts import clip

DEPTH = 4
"""How many levels below a directory its runs are looked for."""
MOST_DIRECTORIES = 20_000
"""Directories that are looked into for runs."""
SEARCH_SECONDS = 2.0
"""How often `LiveRuns` looks for runs that have begun; less often if this takes long."""
_PACE_SECONDS = 30.0
_MOST_ENDED = 4
_MOST_EPOCHS = 10**18
_MOST_AT_END = 64  # entries that are read to find the end of the last run
_LARGEST = sys.float_info.max  # neither NaN nor an int of 400 digits is at most this


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The last run of a checkpoint directory, as the end of its log and its heartbeat tell.

    Attributes
    ----------
    name : str
        The directory, relative to the one that was searched; "." if it is that one.
    state : str or None
        As in `RunStory`; ``"damaged"`` if the log cannot be read, None if nothing ran there.
    error : str
        Why the log cannot be read.
    job : str
        Empty if not recorded.
    parameters : mapping
        What the function that made the job was called with.
    former_parameters : mapping
        Those that were others in the run that recorded the oldest epoch, as they were there.
    num_epochs : int
        How many epochs are recorded.
    latest : int, Position or None
        The newest of them.
    epoch : int, Position or None
        The last that ended, or `latest` if that is later.
    total_epochs : int or None
        The last of the job, if it has a limit.
    pace_seconds : float or None
        From the end of an epoch to that of the next, on average, of a run that is alive.
    metrics : mapping
        Of `epoch`.
    saved, last_seen : float or None
        When `latest` was recorded, and when the run was last known to be alive: Unix times in
        seconds, by the clock of the run.
    host : str
    pid : int or None
    nodes : collection of str
        Of the job.
    keeps_best : tuple of str or None
        The metric by which the run keeps the best epochs, and ``"min"`` or ``"max"``.
    """

    name: str
    state: StateName | Literal["damaged"] | None = None
    error: str = ""
    job: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    former_parameters: Mapping[str, Any] = field(default_factory=dict)
    num_epochs: int = 0
    latest: PublicPosition | None = None
    epoch: PublicPosition | None = None
    total_epochs: int | None = None
    pace_seconds: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    saved: float | None = None
    last_seen: float | None = None
    host: str = ""
    pid: int | None = None
    nodes: Collection[str] = ()
    keeps_best: tuple[str, Literal["min", "max"]] | None = None

    @property
    def whole_epochs(self) -> int:
        """How many epochs have ended, as far as is known."""
        return Position.of(self.epoch or 0).epoch


def find_runs(
    files: Files, path: str, depth: int = DEPTH, most: int = MOST_DIRECTORIES
) -> tuple[list[str], bool]:
    """Find the checkpoint directories in a directory, and below it.

    Returns their names relative to `path`, and whether all directories were looked into: those of
    `depth` levels, and `most` in all. Follows no link, and looks neither into checkpoint directories
    nor into directories whose names begin with a dot, or that this user may not read.
    """
    found: list[str] = []
    level, looked = [""], 0
    for _ in range(depth + 1):
        level, left = level[: most - looked], level[most - looked :]
        looked += len(level)
        below = []
        for name, inside in zip(level, files.each(partial(_list, files, path), level), strict=True):
            if LOG_DIRECTORY in inside:
                found.append(name or ".")
            else:
                below += [os.path.join(name, it) for it in sorted(inside) if it[0] != "."]
        if left:
            return found, False
        level = below
    return found, True


def _list(files: Files, path: str, name: str) -> list[str]:
    try:
        inside = files.list_directories(os.path.join(path, name) if name else path)
        return [it for it in inside if "\n" not in it]  # no checkpoint directory is named so
    except PermissionError:
        if not name:
            raise
        return []  # of another user


def open_run(files: Files, path: str, name: str) -> Directory:
    """The directory of a run that `find_runs` found in `path`; reads nothing."""
    where = path if name == "." else os.path.join(path, name)
    # A store has one client for all. Files are quicker if they know few directories.
    return Directory(where, files=files if is_url(path) else None)


def summarize_run(
    directory: Directory,
    name: str,
    silent_seconds: Callable[[str, Beat], float] = lambda run, beat: beat.seconds_ago,
) -> RunSummary:
    """Summarize the last run of a directory; reads what was appended since the last call.

    `silent_seconds` says how old the last heartbeat of a run is, given the run's name in the log.
    """
    try:
        state = directory.log.refresh()
        if state.holder is None:
            return RunSummary(name)
        return _summarize(directory, name, state, silent_seconds)
    except (CheckpointError, OSError) as error:
        return RunSummary(name, "damaged", str(error))


def _summarize(
    directory: Directory,
    name: str,
    state: State,
    silent_seconds: Callable[[str, Beat], float],
) -> RunSummary:
    recorded, run, latest = directory, state.holder, state.latest
    assert run is not None
    process = run.process
    record: EpochRecord | None = None
    if latest is not None:
        record = recorded.read_record(latest, state.recorded[latest])
    saved = None if record is None else unix_time(record.time)
    # A command such as `prune` also holds the directory for a while, as a run without a plan.
    numbers = (run.number, None if record is None else record.run_number)
    number = next((it for it in numbers if "plan" in recorded.info_of(it)), None)
    plan, info = recorded.plan_of(number) or {}, recorded.info_of(number)
    total = info.get("total_epochs")
    try:
        best = check_info(dict(info)).get("keeps_best")
    except ValueError:  # a stranger's
        best = None
    summary = RunSummary(
        name,
        job=clip(str(plan.get("job") or ""), MAX_NAME_LENGTH),
        parameters=plan.get("parameters", {}),
        former_parameters=_former_parameters(directory, state, plan),
        num_epochs=len(state.recorded),
        latest=None if latest is None else latest.public,
        epoch=None if latest is None else latest.public,
        total_epochs=total if isinstance(total, int) and 0 <= total < _MOST_EPOCHS else None,
        metrics={} if record is None else record.details.metrics,
        saved=saved,
        last_seen=unix_time(recorded.log.read_entry(state.number).time),
        host=process.host or "",
        pid=process.pid or None,
        nodes=described_nodes(plan),
        keeps_best=best and (best[0], best[1]),
    )
    is_command = bool(recorded.info_of(run.number).get("command"))
    if state.is_ended or is_command:
        ended, seen = _end_of_last_run(directory, state, is_command)
        return replace(summary, state=ended, last_seen=seen or summary.last_seen)
    beat = read_beat(recorded.files, recorded.path, run.run)
    last_seen = max(summary.last_seen or 0.0, beat.time)
    silent = silent_seconds(run.run, beat)
    if not may_live(silent, run.process, run.run, run.heartbeat_seconds):
        return replace(summary, state="lost", last_seen=last_seen)
    summary = replace(summary, state="running", last_seen=last_seen)
    if beat.status is None or not beat.status.num_ended:
        return summary
    status, seconds = beat.status, max(0.0, beat.time - unix_time(run.time))
    pace, metrics = seconds / status.num_ended, status.metrics or summary.metrics
    at = max(latest or Position(0), Position(status.epoch))
    return replace(summary, epoch=at.public, pace_seconds=pace, metrics=metrics)


def _former_parameters(
    directory: Directory, state: State, plan: Mapping[str, Any]
) -> Mapping[str, Any]:
    recorded, now = directory, plan.get("parameters", {})
    if not (now and state.recorded):
        return {}
    first = state.epochs[0]
    try:
        number = recorded.read_record(first, state.recorded[first]).run_number
    except CheckpointError:  # `ls` of the directory names it
        return {}
    then = (recorded.plan_of(number) or {}).get("parameters", {})
    found = {name: then[name] for name in now if name in then and then[name] != now[name]}
    return {name: it for name, it in found.items() if HIDDEN not in (it, now[name])}


def _end_of_last_run(
    directory: Directory, state: State, is_command: bool
) -> tuple[StateName, float | None]:
    """How the last run ended, and when it was last seen.

    A command such as `prune` is no run, but holds the directory for a while as one does; if
    `is_command`, the last that held it is such a command.
    """
    assert state.holder is not None
    ended = (
        state.holder.run if is_command else None
    )  # whose entries come next, from the last one on
    seen = None
    for number in range(state.number, max(-1, state.number - _MOST_AT_END), -1):
        entry = directory.log.read_entry(number)
        if entry.kind == "lost":
            break  # entries before it may be lost
        if entry.kind in ("pin", "unpin"):
            continue  # anybody may write these
        if isinstance(entry, RunEntry) and entry.info.get("command"):
            ended = seen = None
        elif entry.run != ended:
            ended, seen = entry.run, unix_time(entry.time)
            if not isinstance(entry, EndEntry):
                return "lost", seen
            if entry.outcome is not None:
                return entry.outcome, seen
        elif isinstance(entry, RunEntry):
            break  # of an earlier version, which recorded no outcome
    return ("finished" if state.is_done else "stopped"), seen


def best_of(
    directory: Directory,
    metric: str,
    mode: Literal["min", "max"],
    *,
    is_kept: bool = False,
) -> tuple[float, PublicPosition] | None:
    """The lowest or highest value of a metric that a directory's runs recorded, and its epoch.

    Epochs removed since also count, those set aside do not: reads the whole log. If `is_kept`, because
    a policy keeps the best, only the epochs still recorded count. None if there is no such value.
    """
    sign = 1 if mode == "min" else -1
    if is_kept:
        records = ((at, it) for at, it in directory.records() if not isinstance(it, Exception))
        rows = [(epoch, record.details.metrics) for epoch, record in records]
    else:
        rows = [(row["epoch"], row["metrics"]) for row in directory.history()]
    found = [
        (sign * float(value), Position.of(epoch))
        for epoch, metrics in rows
        if isinstance(value := metrics.get(metric), int | float) and abs(value) <= _LARGEST
    ]
    best = min(found, default=None)
    return None if best is None else (sign * best[0], best[1].public)


class LiveRun(NamedTuple):
    """A run that is alive, as seen now."""

    run: RunSummary
    beat_seconds: float
    """Since its last heartbeat."""
    pace_seconds: float | None
    """From the end of an epoch to that of the next, lately."""

    @property
    def eta_seconds(self) -> float | None:
        """Until its last epoch ends; None if nobody knows."""
        run, pace = self.run, self.pace_seconds
        if pace is None or run.total_epochs is None:
            return None
        return pace * max(0, run.total_epochs - run.whole_epochs)


class _Watched(NamedTuple):
    """The last heartbeat of a run."""

    run: str
    beat: float
    since: float  # when it was first seen, by our clock
    is_first: bool  # that was seen of the run: it may have been there before

    def silent_seconds(self, now: float) -> float:
        """How old it is; the first one, as two clocks say."""
        ours = now - self.since
        return max(ours, time.time() - self.beat) if self.is_first else ours


class LiveRuns:
    """The runs below a directory that are alive, for somebody who looks again and again.

    Whether one is alive, two clocks say at the first look; from its next heartbeat on, only ours.
    """

    def __init__(
        self, files: Files, path: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._files, self._path, self._clock = files, path, clock
        self._directories: dict[str, Directory] = {}
        self._alive: set[str] = set()
        self._search_at = -math.inf
        self._watched: dict[str, _Watched] = {}
        # By run: the last heartbeats that were seen, each with when, and the epoch.
        self._beats: dict[str, deque[tuple[float, int]]] = {}
        self.ended: list[RunSummary] = []
        """The last four that were alive at an earlier look, the last to end last."""

    def look(self) -> list[LiveRun]:
        """Read the log and the heartbeat of each run that is alive; now and then, of all."""
        now, before = self._clock(), self._alive
        if is_search := now >= self._search_at:
            for name in find_runs(self._files, self._path)[0]:
                if name not in self._directories:
                    self._directories[name] = open_run(self._files, self._path, name)
            self._alive = set(self._directories)
        found = [
            summarize_run(self._directories[name], name, partial(self._watch, name, now))
            for name in sorted(self._alive)
        ]
        if is_search:
            took = self._clock() - now
            self._search_at = now + max(SEARCH_SECONDS, 10 * took)
        ended = [run for run in found if run.state != "running" and run.name in before]
        found = [run for run in found if run.state == "running"]
        self._alive = {run.name for run in found}
        self.ended = [run for run in self.ended if run.name not in self._alive] + ended
        del self.ended[:-_MOST_ENDED]
        return [self._see(run, now) for run in found]

    def _watch(self, name: str, now: float, run: str, beat: Beat) -> float:
        seen = self._watched.get(name)
        if seen is None or seen.run != run or not beat.time:
            seen = _Watched(run, beat.time, now, is_first=True)
        elif beat.time != seen.beat:
            seen = _Watched(run, beat.time, now, is_first=False)
        self._watched[name] = seen
        return seen.silent_seconds(now)

    def _see(self, run: RunSummary, now: float) -> LiveRun:
        beats = self._beats.setdefault(run.name, deque())
        seen, epoch = run.last_seen or 0.0, run.whole_epochs
        if beats and (seen < beats[-1][0] or epoch < beats[-1][1]):  # another run, or a loss
            beats.clear()
        if not beats or seen > beats[-1][0]:
            beats.append((seen, epoch))
        while len(beats) > 2 and seen - beats[1][0] > _PACE_SECONDS:
            beats.popleft()
        first, last = beats[0], beats[-1]
        pace = run.pace_seconds
        if last[1] > first[1]:
            pace = (last[0] - first[0]) / (last[1] - first[1])
        return LiveRun(run, self._watched[run.name].silent_seconds(now), pace)
