"""What is known of a run while it runs: the one model that all views draw."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from jobrunner.errors import RunStoppedError
from jobrunner.positions import Position
from jobrunner.texts import printable

if TYPE_CHECKING:
    from jobrunner.cluster import Binding, UnderWay

LONG_SECONDS = 1.0
"""What has run for this long is shown before it ends."""
SHOWN_WARNINGS = 5

Tell = Callable[[str, Mapping[str, Any]], None]
"""Called with an event and what is known of it, for JSON."""


class Runner(Protocol):
    """What `RunState` needs of a `JobRunner`."""

    job: Any

    @property
    def binding(self) -> Binding | None:
        """The nodes on their workers, once they are placed."""

    def under_way(self) -> UnderWay | None:
        """What runs on the workers now."""

    def stop(self, reason: str) -> None:
        """Ask the run to end after its epoch."""


class RunState:
    """A passive callback of `JobRunner` that keeps what is known of the run now.

    Parameters
    ----------
    tell : callable, optional
        Called with each event but epochs, in the thread of the run; on_stop_asked in a signal
        handler. `docs/watching.md` lists the events and what is told of them.

    Notes
    -----
    `to_dict` may be called in any thread.
    """

    is_passive = latest_only = True

    def __init__(
        self, tell: Tell = lambda event, about: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._began = clock()
        self._runner: Runner | None = None
        self._job = ""
        self._phase = "starting"
        self._epoch = self._step = 0
        self._total_epochs: int | None = None
        self._steps_per_epoch: int | None = 1
        self._epoch_seconds = self._save_seconds = 0.0  # moving averages
        self._epoch_ended = 0.0
        self._since: tuple[float, int] | None = None  # the time and epoch to measure the pace from
        self._metrics: Mapping[str, Any] = {}
        self._saving: tuple[int, int, float] | None = None
        self._saved: dict[str, Any] | None = None
        self._saved_nodes: Mapping[str, Any] = {}
        self._save_error: str | None = None
        self._num_saves = self._failed_saves = self._losses = self._recoveries = 0
        self._warnings: deque[str] = deque(maxlen=SHOWN_WARNINGS)
        self._stop_asked = self._error = ""
        self._placement: Mapping[str, str] = {}  # node -> worker

    # ---- events of the run

    def on_setup(self, runner: Runner) -> None:
        """Note whom to ask what runs."""
        self._runner = runner
        self._job = runner.job.name
        self._steps_per_epoch = runner.job.steps_per_epoch

    def on_placement(self, placement: Mapping[str, str]) -> None:
        """Note where the nodes are."""
        self._placement = placement
        self._tell("placement", {})

    def on_start(self, plan: Any, total_epochs: int | None) -> None:
        """Note from where and how far the job runs."""
        self._total_epochs = total_epochs
        self._phase = "init" if plan.epoch is None else "loading"
        self._tell(
            "start", {"plan": plan.to_dict(), "total_epochs": total_epochs, "text": str(plan)}
        )

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
        mean = self._epoch_seconds
        self._epoch_seconds = 0.9 * mean + 0.1 * seconds if mean else seconds
        self._epoch, self._step, self._metrics = epoch, 0, metrics
        self._epoch_ended = self._clock()

    def on_save_start(self, epoch: int, step: int) -> None:
        """Note that a save has begun."""
        self._saving = epoch, step, self._clock()

    def on_save(self, report: Any) -> None:
        """Note that a checkpoint was recorded, or that its save failed."""
        mean, stall = self._save_seconds, report.stall_seconds
        self._save_seconds = 0.9 * mean + 0.1 * stall if mean else stall
        self._saving = None
        about = {
            "epoch": Position.of(report.epoch).to_json(),
            "seconds": report.seconds,
            "stall_seconds": stall,
            "nbytes": report.nbytes,
        }
        if report.error is None:
            self._num_saves += 1
            self._saved, self._saved_nodes = about, report.nodes
        else:
            self._failed_saves += 1
            self._save_error = report.error
        self._tell("save", {**about, "error": report.error})

    def on_loss(self, error: Exception) -> None:
        """Note that a worker or the scheduler was lost."""
        self._losses += 1
        self._phase, self._saving, self._since = "recovering", None, None
        self._tell("loss", {"type": type(error).__name__, "message": str(error)})

    def on_recovery(self, epoch: int, step: int, seconds: float) -> None:
        """Note that the run continues after a loss."""
        self._recoveries += 1
        self._continue(epoch, step)
        self._tell("recovery", {"epoch": epoch, "step": step, "seconds": seconds})

    def on_warning(self, message: str) -> None:
        """Keep the last warnings."""
        self._warnings.append(message)

    def on_stop_asked(self, reason: str, at_once: str) -> None:
        """Note that a signal ends the run after its epoch. Runs in the signal handler."""
        self._stop_asked = reason
        self._tell("stop_asked", {"reason": reason, "at_once": at_once})

    def on_finish(self, result: Any) -> None:
        """Note that the job has ended."""
        self._phase = "finished"
        self._tell("over", {})

    def on_error(self, error: BaseException) -> None:
        """Note that an exception has ended the run."""
        is_stopped = isinstance(error, RunStoppedError | KeyboardInterrupt)
        self._phase = "stopped" if is_stopped else "failed"
        self._error = str(error) or type(error).__name__
        self._tell("over", {})

    def _continue(self, epoch: int, step: int) -> None:
        self._phase, self._epoch, self._step = "epochs", epoch, step
        self._since = self._clock(), epoch
        self._epoch_ended = self._since[0]

    # ---- for views, in any thread

    @property
    def binding(self) -> Binding | None:
        """The nodes on their workers, once they are placed."""
        return None if self._runner is None else self._runner.binding

    def under_way(self) -> UnderWay | None:
        """What runs on the workers now."""
        return None if self._runner is None else self._runner.under_way()

    def stop(self, reason: str) -> None:
        """Ask the run to end after its epoch."""
        if self._runner is not None:
            self._stop_asked = reason
            self._runner.stop(reason)

    @property
    def mark(self) -> tuple[Any, ...]:
        """Is another one when there is something new to show."""
        saves = self._num_saves, self._failed_saves
        return self._phase, self._epoch, saves, self._losses, self._stop_asked

    def to_dict(self) -> dict[str, Any]:
        """Return what is known now, for JSON: `docs/watching.md` describes each key."""
        now, run = self._clock(), self.under_way()
        saving = self._saving
        step = run.step if run is not None and run.group == "epoch" else self._step
        return {
            "job": self._job,
            "phase": self._phase,
            "epoch": self._epoch,
            "total_epochs": self._total_epochs,
            "step": step,
            "steps_per_epoch": self._steps_per_epoch,
            "seconds": now - self._began,
            "epoch_seconds": self._epoch_seconds,
            "save_seconds": self._save_seconds,
            "eta_seconds": self._eta_seconds(now),
            "metrics": numbers(self._metrics),
            "under_way": None
            if run is None
            else {"group": run.group, "epoch": run.epoch, "seconds": run.seconds}
            | {"tasks": list(run.tasks)},
            "saving": None
            if saving is None
            else {"epoch": saving[0], "step": saving[1], "seconds": now - saving[2]},
            "saved": self._saved,
            "saves": self._num_saves,
            "failed_saves": self._failed_saves,
            "save_error": self._save_error,
            "nodes": self._nodes(run),
            "losses": self._losses,
            "recoveries": self._recoveries,
            "warnings": list(self._warnings),
            "stop_asked": self._stop_asked,
            "error": self._error,
        }

    def _eta_seconds(self, now: float) -> float | None:
        """How long the epochs will still take, by the pace since the run began or recovered."""
        total, since, epoch, ended = (
            self._total_epochs,
            self._since,
            self._epoch,
            self._epoch_ended,
        )
        if self._phase != "epochs" or total is None or since is None or epoch <= since[1]:
            return None
        pace = (ended - since[0]) / (epoch - since[1])
        return max(0.0, pace * max(0, total - epoch) - (now - ended))

    def _nodes(self, run: UnderWay | None) -> list[dict[str, Any]]:
        binding = self.binding
        running = {} if run is None else dict(task.split("/", 1) for task in reversed(run.tasks))
        began = self._clock() - (0.0 if run is None else run.seconds)
        counted = {} if binding is None else binding.counted
        is_saving = self._saving is not None
        nodes = []
        for name, worker in self._placement.items():
            ended, tasks, task, is_new = 0, 0, running.get(name, ""), False
            last = counted.get(name)
            if last is not None and run is not None and last.group == run.group:
                is_new, tasks = last.at >= began, last.tasks
                if is_new:
                    ended, task = last.ended, last.task
                else:  # of the group's run before; what ran then probably runs again
                    task = task or last.task
            does = "saves" if is_saving else ""
            if task and run is not None:
                does = "runs"
            elif is_new and tasks:
                does = "waits" if ended < tasks else "ended"
            node: dict[str, Any] = {
                "node": name,
                "worker": worker,
                "does": does,
                "task": task or None,
            }
            node |= {"ended": ended, "tasks": tasks}
            saved = self._saved_nodes.get(name)
            node["saved_bytes"] = None if saved is None else saved.nbytes
            nodes.append(node)
        return nodes


def numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that are one number, flag or string."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if name == "epoch":
            continue
        item = getattr(value, "item", None)
        plain = item() if item is not None and getattr(value, "size", 0) == 1 else value
        if isinstance(plain, bool | int | float | str):
            found[name] = printable(plain) if isinstance(plain, str) else plain
    return found
