"""Save a run's checkpoints: lock the directory, save at epoch boundaries, report failures."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from jobrunner.checkpoint import (
    Encoding,
    Moment,
    MultiNodeCheckpointManager,
    Pace,
    Pending,
    SaveOrder,
    SaveQueue,
    Status,
    epochs_until,
    read_metadata,
    read_receipts,
)
from jobrunner.cluster import Binding, describe_environment, run_in_thread
from jobrunner.compile import Plan, describe, find_classes
from jobrunner.config import get_number
from jobrunner.define import Job
from jobrunner.errors import CheckpointWriteError, CommitConflictError
from jobrunner.positions import Position
from jobrunner.run.result import NodeSave, SaveReport
from jobrunner.texts import get_logger

logger = get_logger(__name__)

SaveErrorPolicy = Literal["warn", "refuse", "raise"]

_NUMBERS = re.compile(r"[0-9a-f]{32}|[0-9]+(\.s[0-9]+)?")
"""Parts that differ between messages of the same failure: epochs and random names."""


@dataclass(slots=True)
class _Save:
    """A save under way."""

    at: Position
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    stall_seconds: float = 0.0
    details: dict[str, Any] = field(init=False)  # what the record says of the run
    nodes: dict[str, NodeSave] = field(default_factory=dict)
    error: BaseException | None = None
    writing: Future[None] = field(init=False)  # of a save in the background


class _Failures:
    """Warns of the first failed save, then of how many more failed for the same reason."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._kind = ""
        self._epochs: list[Position] = []

    def add(self, epoch: Position | None, error: BaseException, then: str = "") -> None:
        """Add a failure; `epoch` None: the directory could not be locked."""
        # The nodes that fail first, and their files, may differ from epoch to epoch.
        kind = _NUMBERS.sub("#", str(error).rpartition(": ")[2])
        if kind == self._kind:
            self._epochs += [] if epoch is None else [epoch]
            return
        self.close()
        self._kind = kind
        what = str(error) if epoch is None else f"Epoch {epoch} was not saved: {error}"
        self._warn(f"{what} {then}".rstrip())

    def close(self) -> None:
        """Warn of the failures that were only counted."""
        epochs, self._epochs, self._kind = self._epochs, [], ""
        if len(epochs) == 1:
            self._warn(f"Epoch {epochs[0]} was not saved either, for the same reason.")
        elif epochs:
            self._warn(
                f"{len(epochs)} epochs, {epochs[0]} to {epochs[-1]}, were not saved either, for "
                f"the same reason."
            )


class Saver:
    """Writes the checkpoints of one run.

    It began at the Unix time `began`. It calls `warn` for a problem that does not end the run, and `saved` after every save that does
    not end it. `save_now` is the user's request; a save clears it.
    """

    can_save = True

    def __init__(
        self,
        manager: MultiNodeCheckpointManager,
        plan: Plan,
        on_save_error: SaveErrorPolicy,
        warn: Callable[[str], None],
        saved: Callable[[SaveReport], None],
        save_now: threading.Event,
        status: Callable[[], Status],
        began: float,
    ) -> None:
        self._manager = manager
        self._plan = plan
        self._on_save_error = on_save_error
        self._failures = _Failures(warn)
        self._saved = saved
        self._save_now = save_now
        self._status, self._began = status, began
        self._in_flight: _Save | None = None
        self.holds = manager.save_on_failure
        self._held: _Save | None = None
        self._pace = Pace(time.monotonic())
        self._has_lock = False
        self._deadline_seconds = get_number("checkpoint.deadline-seconds")
        self._is_shared = False  # the directory, with all workers of the binding
        self._binding: Binding
        self._encoding = Encoding()

    def start(self, binding: Binding, losses: int) -> None:
        """Save from these workers from now on; check that they share the directory with us.

        The first call locks the directory for this run. If the directory is empty and not
        writable, and `on_save_error` is "warn", the run starts and each save tries again. `losses`
        is how many the run has had.
        """
        self._pace.start(time.monotonic(), losses)
        self._held = None  # if a worker was lost, its captures are lost too
        self._binding = binding
        self._is_shared = False
        is_refused = self._on_save_error == "refuse" and not self._has_lock
        is_empty = not self._manager.directory.all()
        try:
            self._lock_directory()
            self._check_shared()
        except CheckpointWriteError as error:
            if is_refused:
                what = str(error)
                if is_empty:
                    what = what.replace(" Earlier epochs are still recorded.", "")
                raise CheckpointWriteError(f"Run refused: {what}") from error
            if self._on_save_error == "raise" or not is_empty:
                raise
            self._failures.add(None, error, "The run starts anyway; each save tries again.")

    def refuse_classes(self, job: Job) -> None:
        """Raise `DefinitionError` if init tasks make objects that cannot be saved, as far as known."""
        saved = self._plan.saved_blobs(Position(0))
        made = find_classes(job.init_group.tasks()).items()
        self._manager.commits.refuse_classes(
            {(node, name): cls for (node, name), cls in made if name in saved.get(node, ())}
        )

    def end(self, about: Callable[[], Mapping[str, Any]]) -> None:
        """Unlock the directory, so that another run can lock it; `about` says how this one ended."""
        self.wait_quietly()
        self._failures.close()
        if self._has_lock:
            self._has_lock = False
            self._manager.run.end(about())

    def set_aside(self, damaged: Mapping[Position, str]) -> None:
        """Set aside epochs that could not be loaded; each has its reason."""
        if self._has_lock:
            for epoch, reason in damaged.items():
                self._manager.run.set_aside(epoch, reason)

    def rewind(self, to: Position | None, reason: str) -> None:
        """Set aside what is recorded after a position; None: all."""
        if self._has_lock and self._manager.directory.latest() not in (None, to):
            self._manager.run.rewind(to, reason)

    def finish(self, at: Position) -> None:
        """Record that the job ended there and ran its exit group."""
        if self._has_lock and self._manager.directory.latest() == at:
            self._manager.run.finish(at)

    def epochs_until(self, epoch: int) -> int | None:
        """How many epochs, from `epoch` on, may run before the next call of `is_due`.

        None: the policy saves by time. A requested save waits until these epochs have ended.
        """
        steps = self._plan.steps_per_epoch or 1
        return 1 if self.holds else epochs_until(self._manager.save_policy, epoch, steps)

    def is_due(
        self, epoch: int, step: int, metrics: Mapping[str, Any], *, has_ended: bool = False
    ) -> bool:
        """Whether the policy or the user asks to save after step `step` of `epoch`, from 1 on.

        `metrics` is what the epoch has reported so far. `has_ended`: the step was its last. Also
        reports a save in the background that has ended.
        """
        save = self._in_flight
        if save is not None and save.writing.done():
            self.wait()
        width = self._plan.steps_per_epoch
        moment = Moment(
            epoch,
            step,
            width,
            is_saving=self._in_flight is not None,
            has_ended=has_ended and width is None,
            time=time.time(),
            metrics=metrics,
        )
        moment = self._pace.look(time.monotonic(), moment)
        return self._save_now.is_set() or self._manager.save_policy.is_due(moment)

    def save(self, at: Position, about: Mapping[str, Any]) -> None:
        """Write and record a checkpoint.

        `about` is what the record says of the run. With an asynchronous manager, return once tasks
        cannot change what is saved; `is_due` and `wait` then report the end of the save. Raises
        `CheckpointWriteError` only if `on_save_error` is "raise", and always raises other errors.
        """
        self.wait()
        self._held = None
        save = _Save(at)
        self._pace.begin_save(save.started)
        self._save_now.clear()
        try:
            self._begin(save, about)
            if self._manager.asynchronous:
                must_wait = not self._capture(save)
                save.stall_seconds = time.monotonic() - save.started
                self._pace.continue_run(time.monotonic())
                write = partial(self._write, save, is_captured=True)
                save.writing = run_in_thread(write, "jobrunner-save")
                self._in_flight = save
                if must_wait:
                    self.wait()
                return
            self._write(save)
        except CheckpointWriteError as error:
            save.error = error
        save.seconds = save.stall_seconds = time.monotonic() - save.started
        self._report(save)

    def hold(self, at: Position, about: Mapping[str, Any]) -> None:
        """Let the workers capture a state that is not saved, for `save_held`; see `save`."""
        self._held = None
        if self._in_flight is not None:  # its captures use the memory
            return
        save = _Save(at)
        try:
            self._begin(save, about)
            self._capture(save)
        except CheckpointWriteError as error:
            logger.info("Epoch %s could not be kept in memory: %s", at, error)
        else:
            self._held = save

    def save_held(self, starting: Callable[[int, int], None]) -> None:
        """Save the captured state, if any, after a task has failed; only log an error.

        Every worker must have its captures. Calls `starting` first, with the epoch and the step.
        """
        save, self._held = self._held, None
        if save is None:
            return
        starting(save.at.epoch, save.at.step)
        save.started = time.monotonic()
        try:
            self._write(save, is_captured=True)
        except Exception as error:
            logger.warning("Epoch %s could not be saved after a failure: %s", save.at, error)
            return
        save.seconds = save.stall_seconds = time.monotonic() - save.started
        self._report(save)

    def _describe(self, at: Position, about: Mapping[str, Any]) -> dict[str, Any]:
        details = dict(about)
        if (metadata := self._manager.metadata) is not None:
            details["metadata"] = read_metadata(metadata, at)
        if at.step:
            details["steps_per_epoch"] = self._plan.steps_per_epoch
        details["placement"] = dict(self._binding.placement)
        details["ended"] = round(time.time(), 3)
        return details

    def wait(self) -> None:
        """Wait for a save in flight; raise its error as `save` does."""
        save = self._in_flight
        if save is not None:
            started = time.monotonic()
            save.error = save.writing.exception()
            save.stall_seconds += time.monotonic() - started
            self._in_flight = None
            self._report(save)

    def wait_quietly(self) -> None:
        """Wait for a save in flight after another error; only log its error."""
        try:
            self.wait()
        except Exception as error:
            logger.warning("A save in the background failed too: %r", error)

    def _report(self, save: _Save) -> None:
        error = save.error
        if error is not None and not isinstance(error, CheckpointWriteError):
            raise error
        report = SaveReport(
            epoch=save.at.public,
            seconds=save.seconds,
            stall_seconds=save.stall_seconds,
            nbytes=sum(node.nbytes for node in save.nodes.values()),
            nodes=save.nodes,
            error=None if error is None else str(error),
            step=save.at.step,
        )
        self._pace.end_save(save.stall_seconds, save.seconds)
        self._pace.continue_run(time.monotonic())
        if error is None:
            self._failures.close()
        elif self._on_save_error == "raise":
            raise error
        else:
            self._failures.add(save.at, error)
        self._saved(report)

    def _begin(self, save: _Save, about: Mapping[str, Any]) -> None:
        save.details = self._describe(save.at, about)
        if not self._has_lock:
            self._lock_directory()
            if self._manager.directory.all():
                raise CommitConflictError(
                    f"{self._manager.path} was not writable when this run began, and now contains "
                    f"epochs of another run. Choose another directory, or run again to resume "
                    f"from them."
                )
        self._check_shared()

    def _capture(self, save: _Save) -> bool:
        """Let the workers capture what is to be written; False: tasks must wait until it is."""
        budget_bytes = self._manager.budget_bytes
        budget = math.inf if budget_bytes is None else budget_bytes
        capture = partial(SaveQueue.capture_within, at=save.at, budget_bytes=budget)
        held = self._call_queues(capture, f"the copy of epoch {save.at}")
        return all(nbytes <= budget for nbytes in held.values())

    def _write(self, save: _Save, *, is_captured: bool = False) -> None:
        """Let the workers write, and record the epoch. Runs in any thread."""
        commits = self._manager.commits
        try:
            order = commits.order([Pending(save.at, save.details)], self._encoding)
            with self._abandons(order):
                write = SaveQueue.write if is_captured else SaveQueue.save
                what = f"the save of epoch {save.at}"
                replies = self._call_queues(partial(write, order=order), what, "save")
                written = read_receipts(replies, order, self._binding.placement)
                commits.commit(order, written)
        finally:
            save.seconds = time.monotonic() - save.started
        save.nodes = {
            node: NodeSave(receipt.seconds, receipt.nbytes - receipt.linked_bytes)
            for node, receipt in written.receipts[save.at].items()
        }

    def _call_queues(
        self, fn: Callable[..., Any], what: str, channel: str = "keeper"
    ) -> dict[str, Any]:
        """Call a method of all workers' queues, with a deadline: storage may hang without an error."""
        return self._binding.apply_to_keeper(
            fn, channel=channel, what=what, deadline_seconds=self._deadline_seconds
        )

    @contextlib.contextmanager
    def _abandons(self, order: SaveOrder) -> Iterator[None]:
        try:
            yield
        except CheckpointWriteError:
            self._manager.commits.abandon(order)
            raise

    def _lock_directory(self) -> None:
        if not self._has_lock:
            plan = self._plan
            placed = describe_environment(self._binding.placement)
            about = {"environment": placed, "total_epochs": plan.epoch_limit}
            info = {"plan": describe(plan), "began": self._began, **about}
            self._manager.run.start(plan.checkpointed, info, self._status)
            self._has_lock = True
            self._pace.begin_save(time.monotonic())

    def _check_shared(self) -> None:
        if not self._is_shared:
            probe = self._manager.run.probe()
            what = "the check that the workers share the directory"
            answers = self._binding.apply(probe, what=what, deadline_seconds=self._deadline_seconds)
            self._manager.run.check_probe(answers)
            plan = self._plan
            self._encoding = self._manager.commits.encoding(
                initial=plan.initial,
                array_options=plan.array_options,
                replicated=plan.replicated,
                partitions=plan.partitions,
            )
            self._binding.keep(partial(SaveQueue, self._encoding))
            self._is_shared = True
