"""Decide where a run begins, from one snapshot of the log. Reads, never writes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from msgspec import structs

from jobrunner.checkpoint import (
    Directory,
    EpochRecord,
    MultiNodeCheckpointManager,
    State,
    stateful_blobs,
    with_contents,
)
from jobrunner.compile import GroupPlan, Plan, changes, compile_resume, describe
from jobrunner.define import EPOCH, Job, Rule
from jobrunner.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    PlanMismatchError,
)
from jobrunner.positions import EpochLike, Position, PublicPosition, format_ranges, read_epoch
from jobrunner.run.decisions import remainder
from jobrunner.run.matching import START_AFRESH, Adaptation, Match, match
from jobrunner.run.result import ResumePlan
from jobrunner.story import refuse_directory_of_runs
from jobrunner.texts import counted

ResumeFrom = EpochLike | None
"""What to resume from; None: nothing."""

RESUME_FROM = Rule(
    f"None, {EPOCH.expected}", lambda value: value is None or EPOCH.fits(value), read_epoch
)


@dataclass(frozen=True, slots=True)
class Begin:
    """How a loaded epoch becomes the beginning of a run."""

    record: EpochRecord
    """With contents."""
    match: Match
    reloads: GroupPlan
    """Init tasks to run again after the load; they also make the objects of `waiting`."""
    waiting: Mapping[str, frozenset[str]]
    """Node -> blobs with objects whose states wait for them."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a run begins: decided once, and handed on."""

    plan: Plan
    reason: str
    snapshot: State | None = None
    """Of the log of the run's own directory; None: there is none."""
    origin: Directory | None = None
    """The directory to load from."""
    is_own: bool = True
    """Whether that is the run's own directory."""
    is_named: bool = False
    """Whether the epoch was asked for."""
    begin: Begin | None = None
    """None: it begins with the init group."""
    left: Literal["epochs", "last groups", "nothing"] = "epochs"
    """What is left to run after the load."""
    later: tuple[Position, ...] = ()
    """What is recorded later than what is loaded."""
    in_use: str = ""
    """What to say of another run that may hold the directory."""
    warnings: tuple[str, ...] = ()
    damaged: Mapping[Position, str] = field(default_factory=dict)
    """Recorded epochs known to be damaged, with their damage."""

    @property
    def at(self) -> Position | None:
        """The epoch to load; None: it begins with the init group."""
        return None if self.begin is None else self.begin.record.at

    @property
    def first_group(self) -> GroupPlan:
        """What runs first: the init group, or the init tasks that run again after the load."""
        return self.plan.groups["init"] if self.begin is None else self.begin.reloads

    @property
    def streams(self) -> Mapping[str, str]:
        """Node -> its first name, to which its random stream belongs, if it has another one."""
        return {} if self.begin is None else self.begin.match.streams

    def is_over(self) -> bool:
        """Whether nothing is left to run, load or save.

        A run in a directory of which the last epoch is damaged goes on from an earlier one. Only a
        load shows all damage, but here a look shows if a store is gone.
        """
        if self.begin is None or self.origin is None or not self.is_own or self.left != "nothing":
            return False
        names = [store.name for store in self.begin.record.stores.values()]
        return len(self.origin.find_whole(names)) == len(names)

    def in_words(self) -> ResumePlan:
        """What the run would do, for people."""
        plan, warnings = self.plan, self.warnings
        if self.in_use:
            warnings = (self.in_use, *warnings)
        sets_aside: tuple[PublicPosition, ...] = ()
        if self.is_own:
            sets_aside = tuple(at.public for at in self.later)
        steps = [_count(plan, "init")]
        if self.snapshot is not None:
            steps.append("save epoch 0")
        steps.append(_name_epochs(plan, 1))
        afresh = ResumePlan(
            None,
            self.reason,
            (*steps, *_last_groups(plan)),
            sets_aside=sets_aside,
            warnings=warnings,
            damaged={at.public: damage for at, damage in self.damaged.items()},
        )
        if self.begin is None:
            return afresh
        assert self.origin is not None
        record, matched = self.begin.record, self.begin.match
        at, is_finished, reason = record.at, self.left == "nothing", self.reason
        steps = [f"load {record.name}"]
        if matched.is_reshaped and not is_finished:
            steps.append(f"save epoch {at} with the nodes and blobs of this job")
        if at.step:
            steps.append(f"steps {at.step + 1} to {plan.steps_per_epoch} of epoch {at.epoch + 1}")
        if self.left == "epochs":
            steps.append(_name_epochs(plan, at.epoch + bool(at.step) + 1))
        if is_finished:
            reason = f"{reason}, and that run had finished"
        else:
            steps += _last_groups(plan)
        rebuilds: list[str] = []
        for node, part in self.begin.reloads.slices.items():
            rebuilds += [f"{node}/{task.name}" for task in part.tasks]
        return replace(
            afresh,
            epoch=at.public,
            reason=reason,
            steps=tuple(steps),
            rebuilds=tuple(rebuilds),
            renames=matched.renamed,
            makes=tuple(matched.describe_made()),
            drops=matched.dropped,
            changes=changes_since(self.origin, record, plan),
            is_finished=is_finished,
            step=at.step,
        )


@dataclass(frozen=True, slots=True)
class ResumeOptions:
    """What a runner was given that says where its run begins; see `JobRunner`."""

    job: Job
    manager: MultiNodeCheckpointManager | None
    resume_from: ResumeFrom
    adaptation: Adaptation
    warnings: tuple[str, ...]
    """Of the runner: what of its options has no effect."""

    def snapshot(self) -> State | None:
        """The log of the run's own directory, as it is now."""
        if self.manager is None:
            return None
        return self.manager.directory.snapshot()


def decide(
    options: ResumeOptions,
    plan: Plan,
    snapshot: State | None,
    damaged: Mapping[Position, str] | None = None,
) -> Resume:
    """Decide where a run begins, by a snapshot of the log of its own directory.

    `damaged` are epochs that could not be loaded, each with its damage. Raises what
    `JobRunner.plan_resume` does.
    """
    manager, resume_from, warnings = options.manager, options.resume_from, list(options.warnings)
    if manager is None or snapshot is None:
        return Resume(plan, "there is no checkpoint manager", warnings=options.warnings)
    own = manager.directory
    if snapshot.holder is None:
        refuse_directory_of_runs(own)
    if resume_from == "latest" and not own.is_taken:
        warnings += _check_claimed(own, snapshot)
    origin, epochs = own, snapshot
    if resume_from is not None and manager.origin is not None and not snapshot.recorded:
        origin, epochs = manager.origin, manager.origin.snapshot()
        if not epochs.recorded:
            raise CheckpointNotFoundError(
                f"load_path {origin.path} records no epoch. Name a directory that does, or omit "
                f"load_path to start afresh."
            )
        if resume_from == "latest":
            warnings += _check_claimed(origin, epochs)
    damage = dict(damaged or {})
    record, reason = _find_record(resume_from, origin, epochs, damage)
    resume = Resume(
        plan,
        reason,
        snapshot,
        origin,
        is_own=origin is own,
        is_named=resume_from not in (None, "latest"),
        later=tuple(epochs.epochs),
        in_use=_describe_holder(own, snapshot),
        warnings=tuple(warnings),
        damaged=damage,
    )
    if record is None:
        options.adaptation.check_start(plan)
        return resume
    begin = prepare(options.job, plan, origin, record, options.adaptation)
    check_steps(plan, record, origin.path)
    later = tuple(at for at in epochs.epochs if at > record.at)
    left = remainder(
        record.at,
        plan.epoch_limit,
        fired=recorded_stops(plan, record),
        later=later,
        is_done=epochs.is_done,
    )
    return replace(resume, begin=begin, left=left, later=later)


def _describe_holder(directory: Directory, snapshot: State) -> str:
    """What to say of another run that may hold the directory; empty if there is none."""
    holder = directory.held_by(snapshot)
    if holder is None:
        return ""
    return (
        f"According to its log, another run uses {directory.path} ({holder}). A new run waits for "
        f"that run's heartbeat, and does not begin if it sees one."
    )


def _find_record(
    resume_from: ResumeFrom, origin: Directory, snapshot: State, damaged: dict[Position, str]
) -> tuple[EpochRecord | None, str]:
    """The record to begin from, if any, and why; only its load shows if it is whole.

    The latest is the newest that is not known to be damaged. Adds newer ones that cannot be read to
    `damaged`.
    """
    if resume_from is None:
        return None, "resume_from_epoch is None"
    if resume_from != "latest":
        return origin.record(origin.resolve(resume_from, snapshot), snapshot), "it was asked for"
    for at in reversed(snapshot.epochs):
        if at in damaged:
            continue
        try:
            record = origin.record(at, snapshot)
        except CheckpointCorruptError as error:
            damaged[at] = error.without_advice()  # the run does what it advises
            continue
        reason = f"it is the last epoch recorded in {origin.path}"
        if damaged:
            reason += " that is not known to be damaged"
        return record, reason
    if damaged:
        return None, f"no recorded epoch of {origin.path} is whole"
    return None, f"nothing is recorded in {origin.path}"


def prepare(
    job: Job,
    plan: Plan,
    origin: Directory,
    record: EpochRecord,
    adaptation: Adaptation,
) -> Begin:
    """Say how a recorded epoch is loaded into a job.

    Raises `PlanMismatchError` if the job lacks what it takes.
    """
    record = with_contents(origin, record)
    matched = match(plan, record, origin.path, adaptation)
    waiting = _find_waiting(plan, record, origin.path, matched)
    new_blobs: dict[str, set[str]] = {}
    for node, name in matched.new_blobs:
        new_blobs.setdefault(node, set()).add(name)
    reloads = plan.groups["resume"]
    if waiting or new_blobs:
        missing = {node: frozenset(names) for node, names in new_blobs.items()}
        reloads = compile_resume(job, plan, waiting, missing=missing)
    return Begin(record, matched, reloads, waiting)


def _find_waiting(
    plan: Plan, record: EpochRecord, path: str, matched: Match
) -> dict[str, frozenset[str]]:
    """Node -> the blobs with objects that init tasks make, and whose states are then loaded."""
    stateful = stateful_blobs(record)
    shared = {**record.details.replicated, **record.details.partitions}
    anywhere = {name for _, name in stateful if name in shared}
    waiting: dict[str, set[str]] = {}
    for (node, name), source in matched.sources.items():
        if source not in stateful and source[1] not in anywhere:
            continue
        if name not in plan.initial.get(node, ()):
            raise PlanMismatchError(
                f"Epoch {record.at} of {path} contains the state of an object in blob {name!r} of "
                f"node {node!r}, but no init task of job {plan.job!r} makes that object. Add one "
                f"that does, or {START_AFRESH}."
            )
        waiting.setdefault(node, set()).add(name)
    return {node: frozenset(names) for node, names in waiting.items()}


def changes_since(origin: Directory, record: EpochRecord, plan: Plan) -> tuple[str, ...]:
    """How a job differs from that of a record, if the log says what that was."""
    before = origin.plan_of(record.run_number)
    if not before:
        return ()
    return tuple(changes(before, describe(plan)))


def with_streams(plan: Plan, streams: Mapping[str, str]) -> Plan:
    """The plan, whose nodes draw random numbers under their first names."""
    nodes = [structs.replace(node, stream=streams.get(node.name, "")) for node in plan.nodes]
    return structs.replace(plan, nodes=tuple(nodes))


def recorded_stops(plan: Plan, record: EpochRecord) -> tuple[str, ...]:
    """The stop conditions that were true at a recorded epoch, among those that there still are."""
    names = plan.enders.union(plan.stops)
    return tuple(name for name in record.details.stopped_by if name in names)


def check_steps(plan: Plan, record: EpochRecord, path: str) -> None:
    """Raise `PlanMismatchError` if a checkpoint contains more steps than the job's epochs have."""
    done = record.at.step
    if 0 < plan.steps_per_epoch <= done:
        raise PlanMismatchError(
            f"The checkpoint of {record.name} in {path} was saved after step {done}, but "
            f"the epochs of job {plan.job!r} have steps_per_epoch={plan.steps_per_epoch}, so the "
            f"run cannot resume from it. Give the job more than {done} steps per epoch, or resume "
            f"from an earlier epoch."
        )


def _check_claimed(directory: Directory, snapshot: State) -> list[str]:
    """Warn of stores that the log does not mention; raise if it records no epoch at all."""
    lost = directory.unclaimed(snapshot)
    if not lost:
        return []
    noun = "epoch" if len(lost) == 1 else "epochs"
    ranges = format_ranges(lost)
    problem = (
        f"{directory.path} contains stores of {noun} {ranges} that no entry of its log mentions"
    )
    remedy = f"`jobrunner fsck {directory.path}` shows them, and --repair records them again"
    if snapshot.recorded:
        return [f"{problem}: its newest entries may be lost. {remedy}. This run ignores them."]
    raise CheckpointCorruptError(
        f"{problem}, and the log records no epoch: expected {os.path.join(directory.path, '_log')} "
        f"to record them. The log must be lost. {remedy}. To start over and keep the stores: "
        f"resume_from_epoch=None, --resume none.",
        path=directory.path,
    )


# ---- in words


def _name_epochs(plan: Plan, first: int) -> str:
    ends = [*plan.stops]
    if plan.epoch_limit is not None:
        ends.append(f"epoch {plan.epoch_limit}")
    ends += sorted(plan.enders)
    return f"epochs from {first} until {' or '.join(ends)}"


def _last_groups(plan: Plan) -> Sequence[str]:
    return [_count(plan, group) for group in ("download", "exit") if _num_tasks(plan, group)]


def _count(plan: Plan, group: str) -> str:
    return f"{group} group ({counted(_num_tasks(plan, group), 'task')})"


def _num_tasks(plan: Plan, group: str) -> int:
    return sum(len(part.tasks) for part in plan.groups[group].slices.values())
