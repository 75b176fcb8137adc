"""The runs below a directory: what each is, how far it is, and whether it is alive."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from jobrunner.checkpoint import (
    Directory,
    DoneEntry,
    EndEntry,
    Files,
    KeepBest,
    LogEntry,
    SavedEpoch,
    State,
    is_url,
    may_live,
    rank,
    read_beat,
    read_past_epochs,
)
from jobrunner.errors import CheckpointError, DefinitionError
from jobrunner.names import LOG_DIRECTORY, MAX_NAME_LENGTH, described_nodes
from jobrunner.outputs import refuse_within_checkpoint
from jobrunner.positions import Position, PublicPosition
from jobrunner.story.log import last_state, unix_time
from jobrunner.story.model import StateName
from jobrunner.texts import clip, listed

DEPTH = 4
"""How many levels below a directory its runs are looked for."""
MOST_DIRECTORIES = 20_000
"""Directories that are looked into for runs."""
SEARCH_SECONDS = 2.0
"""How often `LiveRuns` looks for runs that have begun; less often if this takes long."""
_MOST_EPOCHS = 10**18
_MOST_AT_END = 64  # entries that are read to find the end of the last run
_LARGEST = sys.float_info.max  # neither NaN nor an int of 400 digits is at most this


@dataclass(slots=True)
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
    num_epochs : int
        How many epochs are recorded.
    latest : int, Position or None
        The newest of them.
    epoch : int, Position or None
        The last that ended, or `latest` if that is later.
    total_epochs : int or None
        The last of the job, if it has a limit.
    pace_seconds : float or None
        How long an epoch takes with all around it, on average, of a run that is alive.
    metrics : mapping
        Of `epoch`.
    saved, last_seen : float or None
        When `latest` was recorded, and when the run was last known to be alive: Unix times in
        seconds, by the clock of the run.
    host : str
    pid : int or None
    nodes : collection of str
        Of the job.
    """

    name: str
    state: StateName | Literal["damaged"] | None = None
    error: str = ""
    job: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
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

    @property
    def eta_seconds(self) -> float | None:
        """Until its last epoch ends; None if nobody knows."""
        if self.pace_seconds is None or self.total_epochs is None:
            return None
        return self.pace_seconds * max(0, self.total_epochs - Position.of(self.epoch or 0).epoch)


class RunSearch(NamedTuple):
    """What a search for checkpoint directories has found, as names relative to where it began."""

    names: list[str]
    is_whole: bool = True
    """Whether all directories were looked into: those of some levels, and not too many."""
    unreadable: Sequence[str] = ()
    """Directories that this user may not read."""


_LEVELS, _MOST_LOOKED_INTO = 2, 1000
"""How far a new directory is searched for runs."""


def refuse_directory_of_runs(directory: Directory) -> None:
    """Raise DefinitionError if a new directory is in a checkpoint directory, or has some in it.

    Somebody has named the directory of all runs in place of one of them. Once there is a log, commands
    would no longer look for runs below it.
    """
    if not is_url(directory.path):
        refuse_within_checkpoint(directory.path)
    runs = find_runs(directory.files, directory.path, _LEVELS, _MOST_LOOKED_INTO).names
    if runs not in ([], ["."]):
        raise DefinitionError(
            f"{directory.path} is no checkpoint directory, but contains some: {listed(runs, 5)}. "
            f"Name one of them, or a new one, such as {os.path.join(directory.path, 'NAME')}."
        )


def find_runs(
    files: Files, path: str, depth: int = DEPTH, most: int = MOST_DIRECTORIES
) -> RunSearch:
    """Find the checkpoint directories in a directory, and below it.

    Looks into the directories of `depth` levels, and `most` in all. Follows no link, and looks
    neither into checkpoint directories nor into directories whose names begin with a dot.
    """
    runs: list[str] = []
    unreadable: list[str] = []
    level = [""]
    num_listed = 0
    for _ in range(depth + 1):
        is_cut = num_listed + len(level) > most
        level = level[: most - num_listed]
        num_listed += len(level)
        below = []
        for name, inside in zip(level, files.each(partial(_list, files, path), level), strict=True):
            if inside is None:
                unreadable.append(name)
            elif LOG_DIRECTORY in inside:
                runs.append(name or ".")
            else:
                below += [os.path.join(name, entry) for entry in sorted(inside) if entry[0] != "."]
        if is_cut:
            return RunSearch(runs, False, unreadable)
        level = below
    return RunSearch(runs, True, unreadable)


def _list(files: Files, path: str, name: str) -> list[str] | None:
    """The names in a directory; None if it is another user's."""
    directory = path
    if name:
        directory = os.path.join(path, name)
    try:
        inside = files.list_directories(directory)
    except OSError as error:
        if name and isinstance(error, PermissionError):
            return None
        raise CheckpointError(
            f"{path} cannot be searched for runs: {type(error).__name__}: {error}. Its user needs "
            f"permission to list it and what is in it."
        ) from error
    return [entry for entry in inside if "\n" not in entry]  # no checkpoint directory is named so


def open_run(files: Files, path: str, name: str) -> Directory:
    """The directory of a run that `find_runs` found in `path`; reads nothing."""
    run_path = path
    if name != ".":
        run_path = os.path.join(path, name)
    if is_url(path):  # a store has one client for all
        return Directory(run_path, files=files)
    return Directory(run_path)  # whose files know few directories, and so are quick


def summarize_run(directory: Directory, name: str) -> RunSummary:
    """Summarize the last run of a directory; reads what was appended since the last call."""
    try:
        return _summarize(directory, name, directory.snapshot())
    except (CheckpointError, OSError) as error:
        return RunSummary(name, "damaged", str(error))


def _summarize(directory: Directory, name: str, snapshot: State) -> RunSummary:
    run = RunSummary(name)
    holder, latest = snapshot.holder, snapshot.latest
    if holder is None:
        return run
    info = directory.info_of(holder.number)
    commands = {holder.run} if info.get("command") else set()
    if latest is not None:
        record = directory.record(latest, snapshot)
        run.num_epochs = len(snapshot.recorded)
        run.epoch = run.latest = latest.public
        run.metrics = record.details.metrics
        run.saved = unix_time(record.time)
        if "plan" not in info:
            # A command such as `prune` holds the directory for a while, as a run without a plan.
            info = directory.info_of(record.run_number)
    plan: Mapping[str, Any] = info.get("plan") or {}
    run.job = clip(str(plan.get("job") or ""), MAX_NAME_LENGTH)
    run.parameters = plan.get("parameters", {})
    run.nodes = described_nodes(plan)
    total = info.get("total_epochs")
    if isinstance(total, int) and 0 <= total < _MOST_EPOCHS:
        run.total_epochs = total
    run.host, run.pid = holder.process.host or "", holder.process.pid or None
    newest = directory.log.read_entry(snapshot.number)
    run.last_seen = unix_time(newest.time)
    if snapshot.is_ended or commands:
        run.state, last_seen = _end_of_last_run(directory, snapshot, commands)
        run.last_seen = last_seen or run.last_seen
        return run
    beat = read_beat(directory.files, directory.path, holder.run)
    run.last_seen = max(run.last_seen, beat.time)
    run.state = _state_without_end(newest)
    if may_live(beat.seconds_ago, holder.process, holder.run, holder.heartbeat_seconds):
        run.state = "running"
        if beat.status is not None and beat.status.num_ended:
            seconds = max(0.0, beat.time - unix_time(holder.time))
            run.pace_seconds = seconds / beat.status.num_ended
            run.epoch = max(latest or Position(0), Position(beat.status.epoch)).public
            run.metrics = beat.status.metrics or run.metrics
    return run


def _end_of_last_run(
    directory: Directory, snapshot: State, commands: set[str]
) -> tuple[StateName, float | None]:
    """How the last run ended, and when it was last seen; `commands`: what is known to be no run.

    A command such as `prune` is no run, but holds the directory for a while as one does. Entries
    are read from the last one on: those of commands are passed over, and the first of another
    holder is the last of a run.
    """
    for number in range(snapshot.number, max(-1, snapshot.number - _MOST_AT_END), -1):
        entry = directory.log.read_entry(number)
        if entry.kind == "lost":
            break  # entries before it may be lost
        if entry.kind in ("pin", "unpin") or entry.run in commands:
            continue  # anybody may write these
        if not isinstance(entry, EndEntry):
            return _state_without_end(entry), unix_time(entry.time)
        if entry.outcome is not None:
            return last_state(entry.outcome, snapshot), unix_time(entry.time)
        commands.add(entry.run)  # only a run of a job has an outcome
    if snapshot.is_done:
        return "finished", None
    return "stopped", None


def _state_without_end(newest: LogEntry) -> StateName:
    """How a run ended that left no ``end``: killed at work, or after it had noted the job's end."""
    if isinstance(newest, DoneEntry):
        return "finished"
    return "lost"


def best_of(directory: Directory, best: KeepBest) -> tuple[float, PublicPosition] | None:
    """The best value of a metric that a directory's runs recorded, and its last epoch.

    Epochs removed since also count, those set aside do not: reads the whole log. None if there is no
    such value.
    """
    values: dict[Position, float] = {}
    for row in read_past_epochs(directory.log.read_entries()):
        value = row["metrics"].get(best.metric)
        if isinstance(value, int | float) and abs(value) <= _LARGEST:
            values[Position.of(row["epoch"])] = float(value)
    saved = [SavedEpoch(at, metrics={best.metric: value}) for at, value in values.items()]
    ranked = rank(best.metric, best.mode, saved)
    if not ranked:
        return None
    at = ranked[0].at
    return values[at], at.public


class LiveRuns:
    """The runs below a directory that are alive, for somebody who looks again and again."""

    def __init__(
        self, files: Files, path: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._files = files
        self._path = path
        self._clock = clock
        self._directories: dict[str, Directory] = {}
        self._alive: Collection[str] = ()
        self._search_at = -math.inf

    def look(self) -> list[RunSummary]:
        """Read the log and the heartbeat of each run that is alive; now and then, of all."""
        now = self._clock()
        is_search = now >= self._search_at
        if is_search:
            for name in find_runs(self._files, self._path).names:
                if name not in self._directories:
                    self._directories[name] = open_run(self._files, self._path, name)
            self._alive = self._directories
        runs = [summarize_run(self._directories[name], name) for name in sorted(self._alive)]
        if is_search:
            self._search_at = now + max(SEARCH_SECONDS, 10 * (self._clock() - now))
        alive = [run for run in runs if run.state == "running"]
        self._alive = [run.name for run in alive]
        return alive
