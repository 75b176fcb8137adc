"""Decide from the recorded epochs where a run begins. Reads, never writes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from jobrunner.checkpoint import EpochRecord, Loader
from jobrunner.compile import Plan, changes, describe
from jobrunner.define import EPOCH, Rule
from jobrunner.errors import (
    CheckpointCorruptError,
    CheckpointError,
    DefinitionError,
    RunStoppedError,
)
from jobrunner.positions import (
    EpochLike,
    Position,
    format_ranges,
    read_epoch,
)
from jobrunner.run.callbacks import check_callbacks
from jobrunner.run.decisions import remainder
from jobrunner.run.load import check_steps, rebuild, recorded_stops
from jobrunner.run.matching import Adaptation, Match, match
from jobrunner.run.result import ResumePlan
from jobrunner.run.upload import CopyTo
from jobrunner.texts import counted

if TYPE_CHECKING:
    from jobrunner.run.runner import JobRunner

ResumeFrom = EpochLike | None
"""What to resume from; None: nothing."""


RESUME_FROM = Rule(f"None, {EPOCH.expected}", lambda it: it is None or EPOCH.fits(it), read_epoch)


def check_options(runner: JobRunner) -> None:
    """Raise `DefinitionError` for callbacks that are none, and options that need a manager."""
    where = f"JobRunner of job {runner.job.name!r}"
    manager, builder = runner.checkpoint_manager, runner.upload_task_group_builder
    check_callbacks(runner.callbacks, where)
    if manager is None:
        for name, is_given in (
            ("resume_from_epoch", runner.resume_from_epoch not in (None, "latest")),
            ("upload_task_group_builder", builder is not None),
            ("rename", bool(runner.rename)),
            ("missing='init'", runner.missing == "init"),
            ("migrate", runner.migrate is not None),
        ):
            if is_given:
                raise DefinitionError(f"{where}: {name} requires a checkpoint_manager.")
    elif isinstance(builder, CopyTo):
        builder.check(manager)


def plan_resume(runner: JobRunner, plan: Plan, resume_from: ResumeFrom) -> ResumePlan:
    """Decide where a run of `plan` begins; see `JobRunner.plan_resume`."""
    own, adaptation = runner.checkpoint_manager, runner.adaptation
    if own is None:
        return ResumePlan(None, "there is no checkpoint manager", _first_steps(plan))
    warnings: tuple[str, ...] = ()
    if (other := own.directory.held_by()) is not None:
        in_use = (
            f"According to its log, another run uses {own.path} ({other}). A new run waits for "
            f"that run's heartbeat, and does not begin if it sees one."
        )
        warnings = (in_use,)
    if resume_from is None:
        adaptation.check_start(plan)
        return ResumePlan(
            None,
            "resume_from_epoch is None",
            _first_steps(plan, "save epoch 0"),
            sets_aside=tuple(at.public for at in own.directory.all()),
            warnings=warnings,
        )
    if resume_from == "latest":
        warnings += _check_claimed(own.loader)
    manager = own.source()
    if isinstance(resume_from, str) and resume_from != "latest":
        resume_from = manager.directory.resolve(resume_from)
    if resume_from == "latest" and manager is not own.loader:
        warnings += _check_claimed(manager)
    epochs = manager.directory.all()
    damaged: dict[Position, str] = {}
    if isinstance(resume_from, Position):
        reason = "it was asked for"
        record = manager.directory.record(resume_from)
        newest: tuple[EpochRecord, Match] | None = record, match(plan, manager, record, adaptation)
    else:
        newest = _find_newest(plan, manager, adaptation, damaged)
        reason = f"it is the last epoch recorded in {manager.path}"
        if damaged:
            reason += " that is not known to be damaged"
    if newest is None:
        adaptation.check_start(plan)
        path = manager.path
        return ResumePlan(
            None,
            f"no recorded epoch of {path} is whole" if epochs else f"nothing is recorded in {path}",
            _first_steps(plan, "save epoch 0"),
            sets_aside=tuple(at.public for at in epochs) if manager is own.loader else (),
            warnings=warnings,
            damaged={at.public: why for at, why in damaged.items()},
        )
    record, found = newest
    at = record.at
    before = manager.directory.run_plan(at)
    now = describe(plan)
    check_steps(plan, record, manager.path)
    later = tuple(recorded for recorded in epochs if recorded > at)
    left = remainder(
        at,
        plan.epoch_limit,
        fired=recorded_stops(plan, record),
        later=later,
        is_done=manager.directory.is_done(),
    )
    steps = [f"load {record.name}"]
    if found.is_reshaped and left != "nothing":
        steps.append(f"save epoch {at} with the nodes and blobs of this job")
    if at.step:
        last = "the last" if plan.steps_per_epoch is None else plan.steps_per_epoch
        steps.append(f"steps {at.step + 1} to {last} of epoch {at.epoch + 1}")
    if left == "epochs":
        steps.append(_epochs(plan, at.epoch + bool(at.step) + 1))
    if left != "nothing":
        steps += _last_groups(plan)
    return ResumePlan(
        at.public,
        reason if left != "nothing" else f"{reason}, and that run had finished",
        tuple(steps),
        rebuilds=tuple(
            f"{node}/{task.name}"
            for node, part in rebuild(runner.job, plan, manager, at, found, {})[0].slices.items()
            for task in part.tasks
        ),
        renames=found.renamed,
        makes=tuple(found.describe_made(adaptation.migrates(record))),
        drops=found.dropped,
        migrates=adaptation.migration if adaptation.migrates(record) else "",
        sets_aside=tuple(it.public for it in later) if manager is own.loader else (),
        changes=tuple(changes(found.rename(before, now), now)) if before else (),
        is_finished=left == "nothing",
        step=at.step,
        warnings=warnings,
        damaged={it.public: why for it, why in damaged.items()},
    )


class Resumption:
    """Where a run, and later the same command, begins; for messages too."""

    def __init__(self, runner: JobRunner, plan: Plan) -> None:
        self._runner = runner
        self._plan = plan
        self.is_first = True  # the run has not begun yet

    @property
    def _begins_from(self) -> ResumeFrom:
        # What was asked is for the start only; after a loss, resume from this run's own epochs.
        if not self.is_first:
            return "latest"
        asked = self._runner.resume_from_epoch
        manager = self._runner.checkpoint_manager
        if isinstance(asked, str) and asked != "latest" and manager is not None:
            return manager.source().directory.resolve(asked)
        return asked

    @property
    def named(self) -> Position | None:
        """The epoch that was asked for, unless it is the latest."""
        begins_from = self._begins_from
        return begins_from if isinstance(begins_from, Position) else None

    def plan(self) -> ResumePlan:
        """See `plan_resume`."""
        return plan_resume(self._runner, self._plan, self._begins_from)

    def point(self) -> str:
        """Where the same command would resume, for a message."""
        try:
            decision = self.plan()
        except CheckpointError as error:  # the error that needs this text matters more
            return f"the last recorded epoch, which cannot be read now: {str(error).rstrip('.')}"
        return "the start" if decision.epoch is None else decision.name

    def advice(self) -> str:
        """How to resume, as the end of a message."""
        return f"Run the same command again to resume from {self.point()}."

    def stopped(self, epoch: int | None, why: str) -> RunStoppedError:
        """The error that ends a run on request."""
        reason = self._runner.stop_reason
        return RunStoppedError(
            f"Job {self._plan.job!r} stopped on request ({reason}): {why}.",
            reason=reason,
            epoch=epoch,
        ).advise(self.advice())

    def explain(self, interrupt: KeyboardInterrupt) -> None:
        """Let IPython show what is recorded instead of a traceback."""
        what = f"{type(interrupt).__name__}: Job {self._plan.job!r} was interrupted at once."
        shown = [what, self.advice()]
        interrupt._render_traceback_ = lambda: shown  # type: ignore[attr-defined]


def _find_newest(
    plan: Plan, manager: Loader, adaptation: Adaptation, damaged: dict[Position, str]
) -> tuple[EpochRecord, Match] | None:
    """The record of the newest epoch not known to be damaged, and how the job matches it.

    Only its load shows if it is whole.

    Adds newer epochs to `damaged`, each with its damage.
    """
    log = manager.directory.log.refresh()
    for epoch in reversed(log.epochs):
        try:
            record = manager.directory.read_record(epoch, log.recorded[epoch])
            return record, match(plan, manager, record, adaptation)
        except CheckpointCorruptError as error:
            damaged[epoch] = str(error)
    return None


def _check_claimed(directory: Loader) -> tuple[str, ...]:
    """Warn of stores that the log does not mention; raise if it records no epoch at all."""
    lost = directory.directory.unclaimed()
    if not lost:
        return ()
    epochs = (
        f"{'epoch' if len(lost) == 1 else 'epochs'} {format_ranges([at.public for at in lost])}"
    )
    found = f"{directory.path} contains stores of {epochs} that no entry of its log mentions"
    remedy = f"`jobrunner fsck {directory.path}` shows them, and --repair records them again"
    if directory.directory.all():
        return (f"{found}: its newest entries may be lost. {remedy}. This run ignores them.",)
    raise CheckpointCorruptError(
        f"{found}, and the log records no epoch: expected {os.path.join(directory.path, '_log')} "
        f"to record them. The log must be lost. {remedy}. To start over and keep the stores: "
        f"resume_from_epoch=None, --resume none.",
        path=directory.path,
    )


# ---- in words


def _first_steps(plan: Plan, *saves: str) -> tuple[str, ...]:
    return (_count(plan, "init"), *saves, _epochs(plan, 1), *_last_groups(plan))


def _epochs(plan: Plan, first: int) -> str:
    ends = [*plan.stops]
    ends += [] if plan.epoch_limit is None else [f"epoch {plan.epoch_limit}"]
    ends += sorted(plan.enders)
    return f"epochs from {first} until {' or '.join(ends)}"


def _last_groups(plan: Plan) -> list[str]:
    return [_count(plan, group) for group in ("download", "exit") if _num_tasks(plan, group)]


def _count(plan: Plan, group: str) -> str:
    return f"{group} group ({counted(_num_tasks(plan, group), 'task')})"


def _num_tasks(plan: Plan, group: str) -> int:
    return sum(len(part.tasks) for part in plan.groups[group].slices.values())
