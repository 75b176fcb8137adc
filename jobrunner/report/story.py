"""What the runs of a checkpoint directory did, as its log tells."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from jobrunner.checkpoint import (
    CommitEntry,
    DoneEntry,
    EndEntry,
    LogEntry,
    MultiNodeCheckpointManager,
    RepairEntry,
    RewindEntry,
    RunEntry,
    State,
    check_details,
    check_plan,
    commits_in,
    describe_position,
    given_up_by,
    loose_json,
    may_live,
    read_beat,
)
from jobrunner.report.ledger import Ledger, Mark, close, estimate, go_back, total
from jobrunner.texts import get_logger

logger = get_logger(__name__)

RunState = Literal["running", "finished", "stopped", "failed", "lost"]


@dataclass(frozen=True, slots=True)
class EpochStory:
    """A recorded epoch. Times are Unix times in seconds, here and below."""

    number: int
    ended: float
    seconds: float  # that it took; on average, if epochs before it were not recorded
    metrics: Mapping[str, Any]
    is_set_aside: bool  # it was run again, or not continued


@dataclass(frozen=True, slots=True)
class SaveStory:
    """A recorded checkpoint."""

    epoch: int  # or a `Position`, as `MultiNodeCheckpointManager.epochs` names it
    step: int  # 0: it contains whole epochs
    ended: float
    seconds: float  # until the slowest node's store was durable
    wait_seconds: float  # that epochs waited for it
    nbytes: int
    nodes: Mapping[str, float]  # how long each took, in seconds


@dataclass(frozen=True, slots=True)
class LossStory:
    """A lost worker or scheduler, or an error that counts as transient."""

    time: float
    text: str
    resumed: float | None  # when the run went on; None: it did not
    resumed_from: int | None  # the epoch; None: the start, or it did not go on


@dataclass(frozen=True, slots=True)
class Span:
    """One call of a task's function, in an epoch of which a sample was taken."""

    node: str
    task: str
    epoch: int
    began: float
    seconds: float


@dataclass(frozen=True, slots=True)
class RunStory:
    """What one run did.

    Attributes
    ----------
    number : int
        1 for the first run of the directory.
    name : str
        Its name in the log.
    job, host : str
        Empty if not recorded.
    pid : int or None
    parameters : mapping
        What the function that made the job was called with.
    plan : mapping
        How it described its tasks; empty if that is not recorded.
    environment : mapping
        What it ran on; see `jobrunner.environment`.
    began : float
    ended : float or None
        None if it was lost or still runs.
    last_seen : float
        Its end, or else its last sign of life.
    state : str
        ``"running"``: it may be alive; ``"finished"``: the job ended; ``"stopped"``: it was asked to
        end early; ``"failed"``: an error ended it; ``"lost"``: it ended without a word, as after a
        crash.
    resumed_from : int or None
        The epoch, or `Position`, it resumed from; None if it began with the init group.
    epochs : tuple of EpochStory
        The whole epochs that it recorded, also those removed since.
    saves : tuple of SaveStory
    losses : tuple of LossStory
    spans : tuple of Span
    ledger : Ledger
        Of a run that is still running: up to its last save.
    is_estimated : bool
        The run recorded no timing; the ledger is derived from the times of its saves.
    """

    number: int
    name: str
    job: str
    host: str
    pid: int | None
    parameters: Mapping[str, Any]
    plan: Mapping[str, Any]
    environment: Mapping[str, Any]
    began: float
    ended: float | None
    last_seen: float
    state: RunState
    resumed_from: int | None
    epochs: tuple[EpochStory, ...]
    saves: tuple[SaveStory, ...]
    losses: tuple[LossStory, ...]
    spans: tuple[Span, ...]
    ledger: Ledger
    is_estimated: bool


@dataclass(frozen=True, slots=True)
class Story:
    """What all runs of a directory did."""

    path: str
    runs: tuple[RunStory, ...]

    @property
    def ledger(self) -> Ledger:
        """The sum of the runs' ledgers; the time between runs is in none of them."""
        return total(run.ledger for run in self.runs)


def read_story(source: MultiNodeCheckpointManager | str | os.PathLike[str]) -> Story:
    """Read what the runs of a checkpoint directory did.

    Parameters
    ----------
    source : MultiNodeCheckpointManager, str or os.PathLike
        The directory, or its manager.

    Returns
    -------
    Story
        Without what damaged entries of the log said.

    Raises
    ------
    CheckpointError
        The log cannot be read.

    Notes
    -----
    Runs on any machine that can read the directory, also during a run; writes nothing.
    """
    manager = source if isinstance(source, MultiNodeCheckpointManager) else None
    return _Reader(manager or MultiNodeCheckpointManager(source)).read()  # type: ignore[arg-type]


@dataclass(slots=True)
class _Run:
    """A run as far as its entries were read."""

    name: str
    entry: RunEntry | None
    began: float
    last_seen: float
    has_ended: bool = False
    is_done: bool = False
    is_taken_over: bool = False  # another run followed
    has_loaded: bool = False  # `resumed_from` is known
    resumed_from: int | None = None
    saves: list[tuple[SaveStory, Mapping[str, Any], int]] = field(default_factory=list)
    """Each with its metrics, and how many whole epochs it contains."""
    set_aside: set[int] = field(default_factory=set)  # of `saves`, by index
    went_back: list[int | None] = field(default_factory=list)  # where later runs began again


class _Reader:
    """Applies the entries of a log one after another."""

    def __init__(self, manager: MultiNodeCheckpointManager) -> None:
        self._manager = manager
        self._state = State()
        self._runs: dict[str, _Run] = {}
        self._where: dict[int, tuple[_Run, int]] = {}  # recorded epoch -> its run and save there

    def read(self) -> Story:
        """Read the whole log."""
        for entry in self._manager.recorded.log.read_entries():
            self._take_in(entry)
            self._state.follow(entry, is_sure=True)
            if isinstance(entry, RepairEntry):
                self._set_aside([it for it in self._where if it not in self._state.recorded])
        runs = enumerate(self._runs.values(), 1)
        return Story(self._manager.path, tuple(self._tell(number, run) for number, run in runs))

    def _take_in(self, entry: LogEntry) -> None:
        time = unix_time(entry.time)
        match entry:
            case RunEntry():
                for run in self._runs.values():
                    run.is_taken_over = True
                self._run(entry.run, time).entry = entry
            case RewindEntry():
                self._set_aside(given_up_by(entry, list(self._where)))
            case DoneEntry():
                self._run(entry.run, time).is_done = True
            case EndEntry():
                self._run(entry.run, time).has_ended = True
        for commit in commits_in(entry):
            self._commit(commit)
        if (known := self._runs.get(entry.run)) is not None:
            known.last_seen = max(known.last_seen, time)

    def _run(self, name: str, time: float) -> _Run:
        if name not in self._runs:
            self._runs[name] = _Run(name, None, time, time)
        return self._runs[name]

    def _set_aside(self, epochs: list[int]) -> None:
        for epoch in epochs:
            run, index = self._where.pop(epoch)
            run.set_aside.add(index)

    def _commit(self, commit: CommitEntry) -> None:
        try:
            details = check_details(loose_json(commit.details))
        except (ValueError, RecursionError) as error:
            logger.warning("The record of epoch %s cannot be read: %s", commit.epoch, error)
            return
        ended = unix_time(commit.time)
        run = self._run(commit.run, ended)
        at = describe_position({"epoch": commit.epoch, "details": details})
        self._load(run, None if commit.epoch == 0 else self._state.latest)
        nodes = {node: store.seconds for node, store in commit.stores.items()}
        seconds = max(nodes.values(), default=0.0)
        nbytes = sum(store.nbytes for store in commit.stores.values())
        save = SaveStory(commit.epoch, at["step"], ended, seconds, seconds, nbytes, nodes)
        if commit.epoch in self._where:
            self._set_aside([commit.epoch])
        self._where[commit.epoch] = (run, len(run.saves))
        run.saves.append((save, details.get("metrics", {}), at["whole_epochs"]))

    def _load(self, run: _Run, epoch: int | None) -> None:
        """Note where a run began: the epochs that earlier runs ran after that are lost."""
        if run.has_loaded:
            return
        run.has_loaded, run.resumed_from = True, epoch
        for other in self._runs.values():
            if other is not run:
                other.went_back.append(epoch)

    def _tell(self, number: int, run: _Run) -> RunStory:
        process = run.entry.process if run.entry is not None else None
        plan, environment = self._about(run)
        state, last_seen = self._end_of(run)
        if not run.has_loaded and not run.is_taken_over:
            run.resumed_from = self._state.latest
        saves = [(it.epoch, it.ended, it.seconds) for it, _, _ in run.saves]
        marks, ledger = estimate(run.began, saves)
        if state != "running":
            ledger = close(ledger, last_seen - run.began, is_lost=state == "lost")
        for epoch in run.went_back:
            ledger = go_back(ledger, marks, epoch)
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
            resumed_from=run.resumed_from,
            epochs=_epochs(run, marks),
            saves=tuple(save for save, _, _ in run.saves),
            losses=(),
            spans=(),
            ledger=ledger,
            is_estimated=True,
        )

    def _end_of(self, run: _Run) -> tuple[RunState, float]:
        """How a run ended, and when it was last seen."""
        if run.has_ended:
            return "finished" if run.is_done else "stopped", run.last_seen
        files, entry = self._manager.recorded.files, run.entry
        beat = read_beat(files, self._manager.path, run.name)
        last_seen = max(run.last_seen, beat.time)
        if run.is_taken_over or entry is None:
            return "lost", last_seen
        is_alive = may_live(beat, entry.process, run.name, entry.heartbeat_seconds)
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


def _epochs(run: _Run, marks: list[Mark]) -> tuple[EpochStory, ...]:
    found = []
    last, last_spent = None, 0.0
    for index, ((save, metrics, epoch), mark) in enumerate(zip(run.saves, marks, strict=True)):
        if save.step:
            continue
        count = 1 if last is None else max(1, epoch - last)
        seconds = max(0.0, mark.spent.compute - last_spent) / count
        last, last_spent = epoch, mark.spent.compute
        ended = save.ended - save.seconds
        found.append(EpochStory(epoch, ended, seconds, metrics, index in run.set_aside))
    return tuple(found)


def unix_time(time: str) -> float:
    """An entry's time; 0 if a stranger wrote another text."""
    try:
        found = datetime.fromisoformat(time)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return 0.0
