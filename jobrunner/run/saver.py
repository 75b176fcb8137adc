"""6 loop: what a run writes down. Holds the checkpoint directory and saves at epoch boundaries."""

from __future__ import annotations

import contextlib
import logging
import re
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from jobrunner.checkpoint import (
    PARTITIONS,
    CopiesOrder,
    Moment,
    MultiNodeCheckpointManager,
    SaveOrder,
    epochs_until,
)
from jobrunner.cluster import Binding
from jobrunner.compile import Plan, describe
from jobrunner.config import get_seconds
from jobrunner.errors import CheckpointWriteError, CommitConflictError
from jobrunner.run.result import NodeSave, SaveReport

logger = logging.getLogger(__name__)

SaveErrorPolicy = Literal["warn", "refuse", "raise"]

_REMEMBERED_SAVES = 5

_NUMBERS = re.compile(r"[0-9a-f]{32}|[0-9]+")
"""What may differ between messages of failures that are the same: epochs, names of our own."""


class _Save:
    """A save under way, or ended; of so many steps of its epoch, or None: of all."""

    def __init__(self, epoch: int, step: int | None, started: float) -> None:
        self.epoch = epoch
        self.step = step
        self.started = started
        self.seconds = 0.0
        self.stall_seconds = 0.0
        self.nodes: dict[str, NodeSave] = {}
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_over(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def start(self, write: Callable[[], dict[str, NodeSave]]) -> None:
        """Go on in a thread of its own."""

        def work() -> None:
            try:
                self.nodes = write()
            except BaseException as error:
                self.error = error
            self.seconds = time.monotonic() - self.started

        self._thread = threading.Thread(target=work, name="jobrunner-save", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()


class _Failures:
    """Tells of saves that fail: of the first, then how many more failed in the same way."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._kind = ""
        self._epochs: list[int] = []

    def add(self, epoch: int | None, error: BaseException, what_then: str) -> None:
        """Take note of one more; `epoch` None: of none yet."""
        kind = _NUMBERS.sub("#", str(error))
        if kind == self._kind:
            self._epochs += [] if epoch is None else [epoch]
            return
        self.close()
        self._kind = kind
        told = str(error) if epoch is None else f"Epoch {epoch} was not saved: {error}"
        self._warn(f"{told} {what_then}".rstrip())

    def close(self) -> None:
        """End a row of failures: tell what was only counted."""
        epochs, self._epochs, self._kind = self._epochs, [], ""
        if len(epochs) == 1:
            self._warn(f"Epoch {epochs[0]} was not saved either, for the same reason.")
        elif epochs:
            self._warn(
                f"{len(epochs)} epochs, {epochs[0]} to {epochs[-1]}, were not saved either, for "
                f"the same reason."
            )


class Recorder:
    """Writes the checkpoints of one run.

    Parameters
    ----------
    manager : MultiNodeCheckpointManager
    plan : Plan
    on_save_error : "warn", "refuse" or "raise"
        See `JobRunner`.
    warn : callable
        Told in a sentence what went wrong without ending the run.
    saved : callable
        Told of every save that is recorded, or has failed without ending the run: its report, and
        of how many steps of the epoch it is, None for all.
    save_now : threading.Event
        Set by whoever asks for a save; cleared when it begins.
    """

    def __init__(
        self,
        manager: MultiNodeCheckpointManager,
        plan: Plan,
        on_save_error: SaveErrorPolicy,
        warn: Callable[[str], None],
        saved: Callable[[SaveReport, int | None], None],
        save_now: threading.Event,
    ) -> None:
        self.manager = manager
        self._plan = plan
        self._on_save_error = on_save_error
        self._failures = _Failures(warn)
        self._warn = warn
        self._saved = saved
        self._save_now = save_now
        self._in_flight: _Save | None = None
        self._last_save = time.monotonic()
        self._stalls: deque[float] = deque(maxlen=_REMEMBERED_SAVES)
        self._holds_directory = False
        self._deadline_seconds = get_seconds("checkpoint.deadline-seconds")
        self._is_shared = False  # by the workers there are now
        self._has_started = False
        self._binding: Binding
        self.saves: list[SaveReport] = []
        self.failed_saves: list[SaveReport] = []

    def start(self, binding: Binding) -> None:
        """Save from these workers from now on; prove that driver and workers share the directory.

        The first call takes the directory for this run. Where it cannot be written, holds nothing
        yet and `on_save_error` lets it, the run goes on without; every save tries again.
        """
        self._binding = binding
        self._is_shared = False
        is_refused = self._on_save_error == "refuse" and not self._has_started
        nothing_yet = not self.manager.epochs()
        try:
            self._take_directory()
            self._prove_shared()
        except CheckpointWriteError as error:
            if is_refused:
                raise CheckpointWriteError(
                    f"Nothing has run, for nothing could be saved: {error}"
                ) from error
            if self._on_save_error == "raise" or not nothing_yet:
                raise
            self._failures.add(
                None, error, "The job runs all the same, and each epoch tries again to save."
            )
        self._has_started = True

    def end(self) -> None:
        """Give the directory back, so that another run may take it at once."""
        self.settle_quietly()
        self._failures.close()
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

    def epochs_until(self, epoch: int) -> int | None:
        """How many epochs, `epoch` the first, may run before `is_due` must be asked.

        None: it goes by time. A save that was asked for waits for that long at most.
        """
        return epochs_until(self.manager.save_policy, epoch, self._plan.steps_per_epoch)

    def is_due(self, epoch: int, step: int) -> bool:
        """Whether to save after step `step` of `epoch`, counted from 1, by policy or request.

        Also tells what became of a save in the background, and raises as `save` does.
        """
        if self._in_flight is not None and self._in_flight.is_over:
            self.settle()
        moment = Moment(
            epoch,
            step,
            self._plan.steps_per_epoch,
            time.monotonic() - self._last_save,
            # Not the median: of saves that cost more now and then, the whole cost counts.
            statistics.fmean(self._stalls) if self._stalls else None,
            self._in_flight is not None,
        )
        if self._holds_directory and self.manager.take_request():
            self._save_now.set()
        return self._save_now.is_set() or self.manager.save_policy.is_due(moment)

    def save(
        self, epoch: int, fired: Sequence[str], metrics: Mapping[str, Any], step: int | None = None
    ) -> None:
        """Write and record the checkpoint of `epoch`, or of its first `step` steps.

        With an asynchronous manager it returns once nothing can change what is saved; `is_due` and `settle`
        tell what became of it.

        Raises
        ------
        CheckpointWriteError
            It failed and `on_save_error` is "raise"; else the report says so.
        DefinitionError
            A blob cannot be saved.
        CommitConflictError
            Another run has taken the directory over.
        """
        self.settle()
        started = self._last_save = time.monotonic()
        self._save_now.clear()
        details: dict[str, Any] = {
            "stopped_by": list(fired),
            "metrics": dict(metrics),
            "placement": dict(self._binding.placement),
            **({} if step is None else {"step": step}),
        }
        if self._plan.partitions:
            details[PARTITIONS] = {
                name: {"axis": axis, "nodes": list(nodes)}
                for name, (axis, nodes) in self._plan.partitions.items()
            }
        write = partial(self._write, self._binding, details)
        save = _Save(epoch, step, started)
        try:
            order = self._begin(epoch, details)
            if self.manager.asynchronous:
                with self._abandons(order):
                    copy = order.copy(self.manager.budget_bytes)
                    self._apply(self._binding, copy, f"the copy of epoch {epoch}")
                save.stall_seconds = time.monotonic() - started
                save.start(partial(write, order, order.write_copies()))
                self._in_flight = save
                return
            save.nodes = write(order, order)
        except CheckpointWriteError as error:
            save.error = error
        save.seconds = save.stall_seconds = time.monotonic() - started
        self._tell(save)

    def settle(self) -> None:
        """Wait for the save that is in flight, if there is one; raises what `save` does."""
        save = self._in_flight
        if save is not None:
            started = time.monotonic()
            save.wait()
            save.stall_seconds += time.monotonic() - started
            self._in_flight = None
            self._tell(save)

    def settle_quietly(self) -> None:
        """Wait for the save that is in flight, when something else has gone wrong already."""
        try:
            self.settle()
        except Exception as error:
            logger.warning("A save in the background failed as well: %r", error)

    def _tell(self, save: _Save) -> None:
        if save.error is not None and not isinstance(save.error, CheckpointWriteError):
            raise save.error
        report = SaveReport(
            epoch=save.epoch,
            seconds=save.seconds,
            stall_seconds=save.stall_seconds,
            nbytes=sum(node.nbytes for node in save.nodes.values()),
            nodes=save.nodes,
            error=None if save.error is None else str(save.error),
        )
        self._stalls.append(report.stall_seconds)
        (self.saves if save.error is None else self.failed_saves).append(report)
        if save.error is not None:
            if self._on_save_error == "raise":
                raise save.error
            self._failures.add(save.epoch, save.error, "")
        else:
            self._failures.close()
        self._saved(report, save.step)

    def _begin(self, epoch: int, details: Mapping[str, Any]) -> SaveOrder:
        if not self._holds_directory:
            self._take_directory()
            if self.manager.epochs():
                raise CommitConflictError(
                    f"{self.manager.path} could not be written when this run began, and now holds "
                    f"epochs of another run. Choose another directory, or run again to go on from "
                    f"them."
                )
        self._prove_shared()
        # Where the nodes ran is of no use to who makes the record again.
        kept = {key: value for key, value in details.items() if key != "placement"}
        return self.manager.begin(
            epoch,
            replicated=self._plan.replicated,
            initial=self._plan.initial,
            details=kept,
            storage=self._plan.array_options,
        )

    def _write(
        self,
        binding: Binding,
        details: Mapping[str, Any],
        order: SaveOrder,
        write: SaveOrder | CopiesOrder,
    ) -> dict[str, NodeSave]:
        """Let the workers write, and record the epoch; in any thread."""
        with self._abandons(order):
            answers = self._apply(binding, write, f"the save of epoch {order.epoch}", "save")
            receipts = {
                node: receipt for answer in answers.values() for node, receipt in answer.items()
            }
            self.manager.commit(order, receipts, details)
            binding.recorded = order.moment
        return {
            node: NodeSave(receipt.seconds, receipt.nbytes - receipt.linked_bytes)
            for node, receipt in receipts.items()
        }

    def _apply(
        self, binding: Binding, fn: Callable[..., Any], what: str, channel: str = "apply"
    ) -> dict[str, Any]:
        """Call something on all workers that touches storage, which may hang without a word."""
        return binding.apply(
            fn, channel=channel, what=what, deadline_seconds=self._deadline_seconds
        )

    @contextlib.contextmanager
    def _abandons(self, order: SaveOrder) -> Iterator[None]:
        try:
            yield
        except CheckpointWriteError:
            self.manager.abandon(order)
            raise

    def _take_directory(self) -> None:
        if self._holds_directory:
            return
        self.manager.start_run(self._plan.checkpointed, {"plan": describe(self._plan)})
        self._holds_directory = True
        self._last_save = time.monotonic()

    def _prove_shared(self) -> None:
        if not self._is_shared:
            probe = self.manager.probe()
            self.manager.check_probe(self._apply(self._binding, probe, "the look for shared files"))
            self._is_shared = True
