"""6 loop: what a run writes down. Holds the checkpoint directory and saves at epoch boundaries."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jobrunner.checkpoint import Moment, MultiNodeCheckpointManager
from jobrunner.errors import CheckpointWriteError, CommitConflictError
from jobrunner.fingerprint import describe
from jobrunner.plan import Plan
from jobrunner.result import NodeSave, SaveReport
from jobrunner.session import Binding

_REMEMBERED_SAVES = 5


class Recorder:
    """Writes the checkpoints of one run.

    Parameters
    ----------
    manager : MultiNodeCheckpointManager
    plan : Plan
    on_save_error : "warn" or "raise"
        See `JobRunner`.
    warn : callable
        Told in a sentence what went wrong without ending the run.
    save_now : threading.Event
        Set by whoever asks for a save; cleared when it begins.
    """

    def __init__(
        self,
        manager: MultiNodeCheckpointManager,
        plan: Plan,
        on_save_error: Literal["warn", "raise"],
        warn: Callable[[str], None],
        save_now: threading.Event,
    ) -> None:
        self.manager = manager
        self._plan = plan
        self._on_save_error = on_save_error
        self._warn = warn
        self._save_now = save_now
        self._last_save = time.monotonic()
        self._stalls: deque[float] = deque(maxlen=_REMEMBERED_SAVES)
        self._holds_directory = False
        self._binding: Binding
        self.saves: list[SaveReport] = []
        self.failed_saves: list[SaveReport] = []

    def start(self, binding: Binding) -> None:
        """Take the directory for this run, and prove that driver and workers share it.

        Where it cannot be written, holds nothing yet and `on_save_error` is "warn", the run goes
        on without; every save tries again.
        """
        nothing_yet = not self.manager.epochs()
        try:
            self._take_directory()
        except CheckpointWriteError as error:
            if self._on_save_error == "raise" or not nothing_yet:
                raise
            self._warn(f"{error} The job runs all the same, and each epoch tries again to save.")
        self.attach(binding)

    def attach(self, binding: Binding) -> None:
        """Save from these workers from now on."""
        self._binding = binding
        if self._holds_directory:
            self._prove_shared()

    def end(self) -> None:
        """Give the directory back, so that another run may take it at once."""
        if self._holds_directory:
            self._holds_directory = False
            self.manager.end_run()

    def latest(self) -> int | None:
        """The last epoch that is recorded and can be loaded again."""
        return self.manager.latest() if self._holds_directory else None

    def rewind(self, epoch: int | None, reason: str) -> None:
        """Set aside what is recorded after `epoch`; None: everything."""
        latest = self.latest()
        if latest is not None and latest != epoch:
            self.manager.rewind(epoch, reason)

    def set_aside(self, damaged: Mapping[int, str]) -> None:
        """Set aside epochs that could not be loaded, for the reasons given."""
        if self._holds_directory:
            for epoch, reason in damaged.items():
                self.manager.set_aside(epoch, reason)

    def finish(self, epoch: int) -> None:
        """Record that the job ended after `epoch`, exit group and all."""
        if self.latest() == epoch:
            self.manager.finish(epoch)

    def is_due(self, epoch: int, step: int) -> bool:
        """Whether to save after step `step` of `epoch`, counted from 1, by policy or request."""
        moment = Moment(
            epoch,
            step,
            self._plan.steps_per_epoch,
            time.monotonic() - self._last_save,
            statistics.median(self._stalls) if self._stalls else None,
        )
        if self._holds_directory and self.manager.take_request():
            self._save_now.set()
        return self._save_now.is_set() or self.manager.save_policy.is_due(moment)

    def save(
        self, epoch: int, fired: Sequence[str], metrics: Mapping[str, Any], step: int | None = None
    ) -> SaveReport:
        """Write and record the checkpoint of `epoch`, or of its first `step` steps.

        Raises
        ------
        CheckpointWriteError
            It failed and `on_save_error` is "raise"; else the report says so.
        DefinitionError
            A blob cannot be saved.
        CommitConflictError
            Another run has taken the directory over.
        """
        started = self._last_save = time.monotonic()
        self._save_now.clear()
        nodes: dict[str, NodeSave] = {}
        failure: CheckpointWriteError | None = None
        try:
            nodes = self._write(epoch, fired, metrics, step)
        except CheckpointWriteError as error:
            failure = error
        seconds = time.monotonic() - started
        report = SaveReport(
            epoch=epoch,
            seconds=seconds,
            stall_seconds=seconds,
            nbytes=sum(node.nbytes for node in nodes.values()),
            nodes=nodes,
            error=None if failure is None else str(failure),
        )
        self._stalls.append(report.stall_seconds)
        (self.saves if failure is None else self.failed_saves).append(report)
        if failure is not None:
            if self._on_save_error == "raise":
                raise failure
            self._warn(f"Epoch {epoch} was not saved: {failure}")
        return report

    def _write(
        self, epoch: int, fired: Sequence[str], metrics: Mapping[str, Any], step: int | None
    ) -> dict[str, NodeSave]:
        if not self._holds_directory:
            self._take_directory()
            if self.manager.epochs():
                raise CommitConflictError(
                    f"{self.manager.path} could not be written when this run began, and now holds "
                    f"epochs of another run. Choose another directory, or run again to go on from "
                    f"them."
                )
            self._prove_shared()
        order = self.manager.begin(epoch)
        try:
            receipts = {
                node: receipt
                for answer in self._binding.apply(order).values()
                for node, receipt in answer.items()
            }
            self.manager.commit(
                order,
                receipts,
                {
                    "stopped_by": list(fired),
                    "metrics": dict(metrics),
                    "placement": dict(self._binding.placement),
                    **({} if step is None else {"step": step}),
                },
            )
        except CheckpointWriteError:
            self.manager.abandon(order)
            raise
        return {
            node: NodeSave(receipt.seconds, receipt.nbytes) for node, receipt in receipts.items()
        }

    def _take_directory(self) -> None:
        self.manager.start_run(self._plan.checkpointed, {"plan": describe(self._plan)})
        self._holds_directory = True
        self._last_save = time.monotonic()

    def _prove_shared(self) -> None:
        self.manager.check_probe(self._binding.apply(self.manager.probe()))
