"""Save a run's checkpoints: lock the directory, save at epoch boundaries, report failures."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from jobrunner.checkpoint import (
    Encoding,
    Moment,
    MultiNodeCheckpointManager,
    Pace,
    SaveQueue,
    Status,
    epochs_until,
    read_receipts,
    reply_to,
    stride_of,
)
from jobrunner.cluster import Binding, describe_environment
from jobrunner.compile import Plan, describe
from jobrunner.config import get_number
from jobrunner.errors import CheckpointWriteError, CommitConflictError
from jobrunner.positions import Position
from jobrunner.run.disk_watch import DiskWatch
from jobrunner.run.failed_saves import FailedSaves
from jobrunner.run.result import NodeSave, SaveReport
from jobrunner.run.save_groups import (
    MOST_CAPTURED,
    MOST_PENDING,
    MOST_SECONDS,
    Save,
    SaveGroups,
)
from jobrunner.texts import get_logger
from jobrunner.worker import CaptureRhythm

logger = get_logger(__name__)

SaveErrorPolicy = Literal["warn", "refuse", "raise"]

BUDGET_SHARE = 8
"""A share of a worker's memory that captures may keep from being freed: one in so many."""

DEFAULT_BUDGET_BYTES = 256 << 20
"""The same where workers have no limit."""

PATIENCE_SECONDS = 5.0
"""How long a run that is interrupted at once waits for a save under way."""


class Saver:
    """Saves the checkpoints of one run.

    The run's thread hands over each position that is due: `save`. By default a capture of it stays
    on the workers, and epochs go on; `SaveGroups` has it written and recorded. `poll` and `wait`
    then report it in the run's thread, in order. Without `asynchronous`, `save` does all that.

    The run began at the Unix time `began`. The saver calls `warn` for a problem that does not end
    it, and `saved` after every save that does not end it, but for those that the retention policy
    passes over. `save_now` is the user's request; a save clears it.
    """

    can_save = True

    def __init__(
        self,
        manager: MultiNodeCheckpointManager,
        plan: Plan,
        *,
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
        self._failed = FailedSaves(warn)
        self._disk = DiskWatch(manager.path)
        self._warn = warn
        self._saved = saved
        self._save_now = save_now
        self._status, self._began = status, began
        self._groups = SaveGroups(partial(self._record, write=SaveQueue.write))
        self._pace = Pace(time.monotonic())
        self._deadline_seconds = get_number("checkpoint.deadline-seconds")
        self._capture_bytes: int | None = None  # of the newest capture on the fullest worker
        self._binding: Binding
        self._encoding: Encoding | None = None  # once the workers have their queues
        self.must_retry = False
        """Whether the last save in the background has failed: one that is waited for may succeed."""

    # ---- the run

    def start(self, binding: Binding) -> None:
        """Save from these workers from now on; check that they share the directory with us.

        The first call takes the directory for this run. If that is empty and not writable, and
        `on_save_error` is "warn", the run starts and each save tries again. No save is under way.
        """
        self._pace.continue_run(time.monotonic())
        self._groups.forget()
        self._binding = binding
        self._encoding = self._capture_bytes = None
        self.must_retry = False
        try:
            self._prepare()
        except CheckpointWriteError as error:
            if self._on_save_error != "warn" or self._manager.directory.snapshot().recorded:
                raise
            self._failed.add(None, error, f"{error} The run starts anyway; each save tries again.")

    def _prepare(self) -> None:
        """Take the directory and make the workers' queues, should that have failed before."""
        if self._encoding is not None:
            return
        manager, plan = self._manager, self._plan
        if manager.run.lock is None:
            info = {
                "plan": describe(plan),
                "began": self._began,
                "environment": describe_environment(self._binding.placement),
                "total_epochs": plan.epoch_limit,
            }
            manager.run.start(plan.checkpointed, info, self._status)
            self._pace.begin_save(time.monotonic())
            if self._failed.count and manager.directory.snapshot().recorded:
                raise CommitConflictError(
                    f"{manager.path} was not writable when this run began, and now contains epochs "
                    f"of another run. Choose another directory, or run again to resume from them."
                )
        if plan.histories:
            manager.run.prove_appending()
        answers = self._binding.apply(
            manager.run.probe(),
            activity="the check that the workers share the directory",
            deadline_seconds=self._deadline_seconds,
        )
        manager.run.check_probe(answers)
        puts = None
        if plan.epoch_limit is not None:
            puts = plan.epoch_limit * plan.steps_per_epoch
        encoding = replace(
            manager.run.encoding(),
            initial=plan.initial,
            options=plan.array_options,
            replicated=plan.replicated,
            partitions=plan.partitions,
            busy=frozenset(plan.groups["epoch"].slices),
            histories=sorted({name for blobs in plan.histories.values() for name in blobs}),
            puts=puts,
        )
        self._binding.keep(partial(SaveQueue, encoding))
        self._encoding = encoding

    def end(self, outcome: Callable[[], Mapping[str, Any]], *, at_once: bool = False) -> None:
        """Unlock the directory, so that another run can lock it; `outcome` says how this one ended.

        Wait for all that is under way; `at_once`, for some seconds at most.
        """
        if not at_once:
            self._end(outcome)
            return
        ending = threading.Thread(
            target=self._end, args=(outcome,), name="jobrunner-end", daemon=True
        )
        ending.start()
        ending.join(PATIENCE_SECONDS)
        if ending.is_alive():
            self._warn(
                f"A save is still under way after {PATIENCE_SECONDS:g} s. If this process ends "
                f"before it, the next run deletes what it has left, and resumes from the epoch "
                f"before."
            )

    def _end(self, outcome: Callable[[], Mapping[str, Any]]) -> None:
        self.wait_quietly()
        self._failed.end()
        self._manager.run.end(outcome())

    def set_aside(self, damaged: Mapping[Position, str]) -> None:
        """Set aside epochs that could not be loaded; each has its reason."""
        for epoch, reason in damaged.items():
            self._manager.run.set_aside(epoch, reason)
            self._warn(
                f"Epoch {epoch}, which is damaged, is now set aside: it no longer counts. Its stores "
                f"stay; `jobrunner fsck` shows them."
            )

    def rewind(self, to: Position | None, reason: str) -> None:
        """Set aside what is recorded after a position; None: all."""
        if self._manager.run.lock is not None:
            self._manager.run.rewind(to, reason)

    def finish(self, at: Position) -> None:
        """Record that the job ended there and ran its exit group."""
        is_held = self._manager.run.lock is not None
        if is_held and self._manager.directory.snapshot().latest == at:
            self._manager.run.finish(at)

    # ---- when to save

    def epochs_until(self, epoch: int) -> int | None:
        """How many epochs, from `epoch` on, may run before `is_due` must be asked, or one must wait.

        None: the policy saves by time. A requested save waits until these epochs have ended.
        """
        rhythm = self.capture_rhythm()
        if rhythm is not None:
            captured = min(self._room(), MOST_CAPTURED)
            return rhythm.epochs_before(epoch) + captured * rhythm.stride
        steps = self._plan.steps_per_epoch
        return epochs_until(self._manager.save_policy, epoch, steps)

    def capture_rhythm(self) -> CaptureRhythm | None:
        """Which epochs workers are to capture by themselves.

        None: epochs are captured afterwards, because the policy decides then whether they are due,
        or because a capture may be too large for epochs to go on.
        """
        if not self._manager.asynchronous or self.must_retry or self._capture_bytes is None:
            return None
        stride = stride_of(self._manager.save_policy, self._plan.steps_per_epoch)
        if stride is None or self._capture_bytes > self._budget_bytes():
            return None
        return CaptureRhythm(stride)

    def is_due(self, epoch: int, step: int, metrics: Mapping[str, Any]) -> bool:
        """Whether the policy or the user asks to save after step `step` of `epoch`, from 1 on.

        `metrics` is what the epoch has reported so far. Also reports saves that
        have ended.
        """
        self.poll()
        moment = Moment(
            epoch,
            step,
            self._plan.steps_per_epoch,
            is_saving=not self._has_room(),
            time=time.time(),
            metrics=metrics,
        )
        moment = self._pace.look(time.monotonic(), moment)
        return self._save_now.is_set() or self._manager.save_policy.is_due(moment)

    @property
    def is_asked(self) -> bool:
        """Whether the user has asked for a save, which is then waited for."""
        return self._save_now.is_set()

    # ---- saves

    def save(self, at: Position, details: Mapping[str, Any], *, must_wait: bool = False) -> None:
        """Save the state of the workspaces, which is that of a position.

        `details` is what the record says of the run. In the background, return once tasks cannot change
        what is saved, unless it `must_wait`. Raises `CheckpointWriteError` only if `on_save_error` is
        "raise", and always raises other errors.
        """
        self._await_room()
        save = self._begin(at, details)
        try:
            self._prepare()
        except CheckpointWriteError as error:
            save.error = error
            self._report(save)
            return
        if self._manager.asynchronous and not must_wait and not self.must_retry:
            can_go_on = self._capture(save)
            save.stall_seconds = time.monotonic() - save.began
            self._pace.continue_run(time.monotonic())
            self._groups.add([save])
            if not can_go_on:
                self.wait()
            return
        self.wait()
        self._record([save], SaveQueue.save)
        save.seconds = save.stall_seconds = time.monotonic() - save.began
        self._report(save)
        self.must_retry = False

    def save_captured(self, captured: Sequence[tuple[Position, Mapping[str, Any]]]) -> None:
        """Save positions that workers captured when they ended, with what the record of each says."""
        saves = [self._begin(at, details) for at, details in captured]
        self._capture_bytes = max(self._binding.capture_bytes.values(), default=0)
        for save in saves:
            save.nbytes = self._capture_bytes
        self._pace.continue_run(time.monotonic())
        self._groups.add(saves)

    def poll(self) -> None:
        """Report the saves that have ended; raises what `save` raises."""
        save = self._groups.take_ended()
        while save is not None:
            self.must_retry = save.error is not None
            self._report(save)
            save = self._groups.take_ended()
        warning = self._disk.take_warning()
        if warning:
            self._warn(warning)

    def make_room(self, epoch: int) -> None:
        """Wait if workers are to capture an epoch and too much is under way.

        Raises what `save` raises. Other epochs run beside a save that takes long.
        """
        self.poll()
        rhythm = self.capture_rhythm()
        if rhythm is not None and rhythm.covers(epoch):
            self._await_room()

    def _await_room(self) -> None:
        self.poll()
        if not self._has_room():
            self._groups.wait(self._has_room)
            self.poll()
            self._pace.continue_run(time.monotonic())

    def wait(self) -> None:
        """Wait for all that is under way; raises what `save` raises."""
        self._groups.wait()
        self.poll()

    def wait_unreported(self) -> None:
        """Wait until all that is under way is recorded, or has failed. In any thread."""
        self._groups.wait()

    def wait_quietly(self, *, gives_up: bool = False) -> None:
        """Wait for all that is under way after another error; only log errors.

        If it gives up, because workers are lost, only for the group that they write now.
        """
        if gives_up:
            self._groups.give_up()
        else:
            self._groups.wait()
        try:
            self.poll()
        except Exception as error:
            level = logging.INFO if gives_up else logging.WARNING
            logger.log(level, "A save in the background failed too: %r", error)
            self._groups.forget()

    # ---- inside

    def _room(self) -> int:
        """How many more epochs may be captured before one is recorded."""
        pending = self._groups.pending
        count = MOST_PENDING - len(pending)
        if self._capture_bytes:
            free = self._budget_bytes() - sum(save.nbytes for save in pending)
            count = min(count, free // self._capture_bytes)
        return max(0, count)

    def _has_room(self) -> bool:
        pending = self._groups.pending
        if not pending:
            return True
        return self._room() > 0 and time.monotonic() - pending[0].began < MOST_SECONDS

    def _budget_bytes(self) -> int:
        budget = self._manager.budget_bytes
        if budget is not None:
            return budget
        limit = self._binding.least_memory_bytes
        if limit:
            return limit // BUDGET_SHARE
        return DEFAULT_BUDGET_BYTES

    def _begin(self, at: Position, facts: Mapping[str, Any]) -> Save:
        details = dict(facts)
        if self._manager.metadata:
            details["metadata"] = self._manager.metadata
        if at.step:
            details["steps_per_epoch"] = self._plan.steps_per_epoch
        details["ended"] = round(time.time(), 3)
        save = Save(at, details)
        self._pace.begin_save(save.began)
        self._save_now.clear()
        return save

    def _report(self, save: Save) -> None:
        error = save.error
        if error is not None and self._is_fatal(error):
            raise error
        self._pace.end_save(save.seconds)
        if save.is_passed_over:
            return
        problem = None
        if error is None:
            self._failed.end()
        else:
            problem = str(error)
            self._failed.add(save.at, error, f"Epoch {save.at} was not saved: {problem}")
        self._saved(
            SaveReport(
                epoch=save.at.public,
                seconds=save.seconds,
                stall_seconds=save.stall_seconds,
                nbytes=sum(node.nbytes for node in save.nodes.values()),
                nodes=save.nodes,
                error=problem,
                step=save.at.step,
            )
        )

    def _capture(self, save: Save) -> bool:
        """Let the workers capture a position; False: epochs must wait until it is recorded."""
        pending = self._groups.pending
        budget = self._budget_bytes() - sum(captured.nbytes for captured in pending)
        sizes = self._binding.apply(
            partial(SaveQueue.capture, at=save.at, budget_bytes=budget),
            to_keeper=True,
            channel="keeper",
            activity=f"the copy of epoch {save.at}",
            deadline_seconds=self._deadline_seconds,
        )
        save.nbytes = self._capture_bytes = max(sizes.values(), default=0)
        return save.nbytes <= budget

    def _record(self, group: Sequence[Save], write: Callable[..., Any]) -> tuple[int, bool]:
        """Let the workers write a group, and record it; sets what has become of each save.

        Returns how many of the group that was, and whether the run may go on.
        """
        run = self._manager.run
        try:
            order = run.order({save.at: save.details for save in group}, self._encoding)
            try:
                replies = self._binding.apply(
                    partial(reply_to, write, order=order),
                    to_keeper=True,
                    channel="save",
                    activity=f"the save of epoch {order.at}",
                    deadline_seconds=self._deadline_seconds,  # storage may hang without an error
                )
                written = read_receipts(replies, order, self._binding.placement)
                committed = run.commit(order, written)
            except CheckpointWriteError:
                # Slow workers may still write stores of these names, so no other save uses them.
                run.abandon(order)
                raise
        except BaseException as error:
            for save in group:
                save.error = error
            return len(group), not self._is_fatal(error)
        group = [save for save in group if save.at in order.records]
        self._disk.look()
        ended = time.monotonic()
        last = max(committed.recorded)
        for save in group:
            save.seconds = ended - save.began
            if save.at in committed.recorded:
                for node, receipt in committed.recorded[save.at].items():
                    nbytes = receipt.nbytes - receipt.linked_bytes
                    save.nodes[node] = NodeSave(receipt.seconds, nbytes)
            elif save.at < last:
                save.is_passed_over = True
            else:
                save.error = committed.problem
        return len(group), not self._is_fatal(committed.problem)

    def _is_fatal(self, error: BaseException | None) -> bool:
        if error is None:
            return False
        return self._on_save_error == "raise" or not isinstance(error, CheckpointWriteError)
