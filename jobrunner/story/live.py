"""What a run does while it runs: one state, which a callback fills and all views draw."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct, field, structs

from jobrunner.errors import RunStoppedError
from jobrunner.positions import Position

if TYPE_CHECKING:
    from jobrunner.cluster import Binding, UnderWay

MOST_INT = (1 << 63) - 1
"""The largest int of Dask's messages."""

Phase = Literal[
    "starting", "init", "loading", "epochs", "recovering", "finished", "stopped", "failed"
]
ENDS = ("finished", "stopped", "failed")
"""The phases after a run."""

# A scheduler checks by these types what clients tell it.
_Count = Annotated[int, Meta(ge=0, le=MOST_INT)]
_Seconds = Annotated[float, Meta(ge=0, lt=1e30)]
_Metric = bool | Annotated[int, Meta(ge=-MOST_INT, le=MOST_INT)] | float | str


class GroupNow(Struct, frozen=True):
    """A group that runs."""

    group: str
    epoch: _Count | None
    seconds: _Seconds
    tasks: list[str]  # running ones, each as "node/task"


class SaveNow(Struct, frozen=True):
    """The save in flight."""

    epoch: _Count
    step: _Count
    seconds: _Seconds


class LastSave(Struct, frozen=True):
    """The newest recorded checkpoint."""

    epoch: _Count | str
    seconds: _Seconds
    stall_seconds: _Seconds
    nbytes: _Count


class NodeNow(Struct, frozen=True):
    """Where a node is, one of its tasks that runs, and the size of its last store."""

    node: str
    worker: str  # its name in Dask
    task: str | None
    saved_bytes: _Count | None


class RunNow(Struct):
    """A run at one moment: what views draw, and JSON lines and the dashboard get.

    `docs/watching.md` describes each field.
    """

    job: str = ""
    phase: Phase = "starting"
    doing: str = ""
    epoch: _Count = 0
    total_epochs: _Count | None = None
    step: _Count = 0
    steps_per_epoch: _Count | None = 1
    seconds: _Seconds = 0.0
    epoch_seconds: _Seconds = 0.0
    save_seconds: _Seconds = 0.0
    eta_seconds: _Seconds | None = None
    metrics: dict[str, _Metric] = field(default_factory=dict)
    under_way: GroupNow | None = None
    saving: SaveNow | None = None
    saved: LastSave | None = None
    saves: _Count = 0
    failed_saves: _Count = 0
    save_error: str | None = None
    nodes: list[NodeNow] = field(default_factory=list)
    losses: _Count = 0
    recoveries: _Count = 0
    stop_asked: str = ""
    ended_by: str = ""
    error: str = ""


Tell = Callable[[str, Mapping[str, Any]], None]
"""Called with an event and what is known of it, for JSON."""


class RunState:
    """A passive callback of `JobRunner` that keeps what is known of the run now.

    `tell` is called with each event but epochs, in the thread of the run; on_stop_asked in a signal
    handler. `docs/watching.md` lists the events and what is told of them. `now` may be called in any
    thread.
    """

    is_passive = True

    def __init__(
        self, tell: Tell = lambda event, facts: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._run = RunNow()  # without what changes from moment to moment
        self._runner: Any = None  # a JobRunner
        self._metrics: Mapping[str, Any] = {}
        self._workers: Mapping[str, str] = {}  # node -> the name of its worker
        self._stores: Mapping[str, Any] = {}  # of the last save, by node
        self._saving: tuple[int, int, float] | None = None  # epoch, step, since when
        self._began = self._epoch_ended = clock()
        self._pace_from: tuple[float, int] | None = None  # a time, and the epoch then

    # ---- events of the run

    def begin(self, doing: str) -> None:
        """Note what happens before the run itself, such as "imports job.py"."""
        self._run.doing = doing

    def on_setup(self, runner: Any) -> None:
        """Note whom to ask what runs."""
        self._runner = runner
        self._run.job = runner.job.name
        self._run.steps_per_epoch = runner.job.steps_per_epoch
        self._run.doing = "places its nodes on workers, which import what tasks need"

    def on_placement(self, placement: Mapping[str, str]) -> None:
        """Note where the nodes are."""
        names: Mapping[str, str] = {}
        if self.binding is not None:
            names = self.binding.worker_names
        self._workers = {node: names.get(worker, worker) for node, worker in placement.items()}
        if self._run.phase == "starting":
            self._run.doing = "takes the checkpoint directory"
        workers: dict[str, list[str]] = {}
        for node, worker in self._workers.items():
            workers.setdefault(worker, []).append(node)
        self._tell("placement", {"workers": workers})

    def on_start(self, plan: Any, total_epochs: int | None) -> None:
        """Note from where and how far the job runs."""
        self._run.total_epochs = total_epochs
        self._run.doing = ""
        self._run.phase = "init"
        if plan.epoch is not None:
            at = Position.of(plan.epoch)
            self._run.phase, self._run.epoch, self._run.step = "loading", at.epoch, at.step
        text = str(replace(plan, warnings=()))  # those are logged, and told as they are
        facts = {"plan": plan.to_dict(), "total_epochs": total_epochs, "text": text}
        self._tell("start", facts)

    def on_load(self, epoch: int, step: int, seconds: float) -> None:
        """Note where the run continues."""
        self._continue(epoch, step)
        self._tell("load", {"epoch": epoch, "step": step, "seconds": seconds})

    def on_group(self, group: str, epoch: int, seconds: float) -> None:
        """Note that a group other than the epoch group has ended."""
        if group == "init":
            self._continue(0, 0)
        if group != "epoch_end":  # which may end as often as an epoch
            self._tell("group", {"group": group, "epoch": epoch, "seconds": seconds})

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Note that an epoch, or a batch of them, has ended."""
        run = self._run
        run.epoch, run.step = epoch, 0
        run.epoch_seconds = _average(run.epoch_seconds, seconds)
        self._metrics = metrics
        self._epoch_ended = self._clock()

    def on_save_start(self, epoch: int, step: int) -> None:
        """Note that a save has begun."""
        self._saving = epoch, step, self._clock()

    def on_save(self, report: Any) -> None:
        """Note that a checkpoint was recorded, or that its save failed."""
        run = self._run
        run.save_seconds = _average(run.save_seconds, report.stall_seconds)
        self._saving = None
        epoch = Position.of(report.epoch).to_json()
        saved = LastSave(epoch, report.seconds, report.stall_seconds, report.nbytes)
        if report.error is None:
            run.saves += 1
            run.saved, self._stores = saved, report.nodes
        else:
            run.failed_saves += 1
            run.save_error = report.error
        self._tell("save", {**structs.asdict(saved), "error": report.error})

    def on_loss(self, error: Exception) -> None:
        """Note that a worker or the scheduler was lost."""
        self._run.losses += 1
        self._run.phase = "recovering"
        self._saving = self._pace_from = None
        self._tell("loss", {"type": type(error).__name__, "message": str(error)})

    def on_recovery(self, epoch: int, step: int, seconds: float) -> None:
        """Note that the run continues after a loss."""
        self._run.recoveries += 1
        self._continue(epoch, step)
        self._tell("recovery", {"epoch": epoch, "step": step, "seconds": seconds})

    def on_stop_asked(self, reason: str, at_once: str) -> None:
        """Note that a signal ends the run after its epoch. Runs in the signal handler."""
        self._run.stop_asked = reason
        self._tell("stop_asked", {"reason": reason, "at_once": at_once})

    def on_finish(self, result: Any) -> None:
        """Note that the job has ended, and what ended it."""
        run = self._run
        run.phase, run.ended_by = "finished", result.stopped_by
        # Nothing is placed or loaded if the job had ended before.
        run.epoch, run.doing = max(run.epoch, result.epoch), ""

    def on_error(self, error: BaseException) -> None:
        """Note that an exception has ended the run."""
        self._run.phase = "failed"
        if isinstance(error, RunStoppedError | KeyboardInterrupt):
            self._run.phase = "stopped"
        self._run.error = str(error) or type(error).__name__

    def _continue(self, epoch: int, step: int) -> None:
        run = self._run
        run.phase, run.epoch, run.step = "epochs", epoch, step
        self._epoch_ended = self._clock()
        self._pace_from = self._epoch_ended, epoch

    # ---- for views, in any thread

    @property
    def binding(self) -> Binding | None:
        """The nodes on their workers, once they are placed."""
        if self._runner is None:
            return None
        binding: Binding | None = self._runner.binding
        return binding

    @property
    def mark(self) -> tuple[object, ...]:
        """Is another one when there is something new to show."""
        run = self._run
        saves = run.saves, run.failed_saves
        return run.phase, run.doing, run.epoch, saves, run.losses, run.stop_asked

    def now(self) -> RunNow:
        """What is known at this moment."""
        now = self._clock()
        run = structs.replace(
            self._run,
            seconds=now - self._began,
            eta_seconds=self._eta_seconds(now),
            metrics=dict(self._metrics),
        )
        group: UnderWay | None = None
        if self._runner is not None:
            group = self._runner.under_way()
        running: dict[str, str] = {}
        if group is not None:
            run.under_way = GroupNow(group.group, group.epoch, group.seconds, list(group.tasks))
            if group.group == "epoch":
                run.step = group.step
            for task in group.tasks:
                node, _, name = task.partition("/")
                running.setdefault(node, name)
        saving = self._saving
        if saving is not None:
            epoch, step, since = saving
            run.saving = SaveNow(epoch, step, now - since)
        run.nodes = []
        for node, worker in self._workers.items():
            saved_bytes = None
            if node in self._stores:
                saved_bytes = self._stores[node].nbytes
            run.nodes.append(NodeNow(node, worker, running.get(node), saved_bytes))
        return run

    def _eta_seconds(self, now: float) -> float | None:
        """How long the epochs will still take, by the pace since the run began or recovered."""
        run = self._run
        if run.phase != "epochs" or run.total_epochs is None or self._pace_from is None:
            return None
        since, first = self._pace_from
        if run.epoch <= first:
            return None
        pace = (self._epoch_ended - since) / (run.epoch - first)
        left = max(0, run.total_epochs - run.epoch)
        return max(0.0, pace * left - (now - self._epoch_ended))


def _average(average: float, value: float) -> float:
    """A moving average, of which `value` is the newest."""
    if not average:
        return value
    return 0.9 * average + 0.1 * value
