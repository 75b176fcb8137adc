"""6 loop: where a run goes on from, decided from what is recorded. Reads, never writes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jobrunner.checkpoint import CheckpointDirectory, MultiNodeCheckpointManager
from jobrunner.compile import GroupPlan, Plan, changes, compile_resume, describe
from jobrunner.define import Blob, Job
from jobrunner.errors import (
    BlobNotFoundError,
    CheckpointCorruptError,
    CheckpointNotFoundError,
    DefinitionError,
    PlanMismatchError,
)
from jobrunner.run.result import ResumePlan, format_ranges


@dataclass(frozen=True, slots=True)
class Policy:
    """What the user asked for: where to resume from, and how many epochs at most."""

    resume_from: int | Literal["latest"] | None
    num_epochs: int | None = None

    def epoch_limit(self, plan: Plan) -> int | None:
        """The smaller of the job's limit and this run's."""
        limits = [n for n in (plan.epoch_limit, self.num_epochs) if n is not None]
        return min(limits, default=None)


def plan_resume(
    job: Job, plan: Plan, own: MultiNodeCheckpointManager | None, policy: Policy
) -> ResumePlan:
    """Decide where a run of `plan` begins; `JobRunner.plan_resume` documents it."""
    if own is None:
        return _fresh(plan, None, policy, "there is no checkpoint manager")
    warnings = _warn_of_holder(own)
    if policy.resume_from is None:
        decision = _fresh(plan, own, policy, "resume_from_epoch is None", tuple(own.epochs()))
        return replace(decision, warnings=warnings)
    if policy.resume_from == "latest":
        warnings += _check_claimed(own)
    manager = own.source()
    if policy.resume_from == "latest" and manager is not own:
        warnings += _check_claimed(manager)
    recorded = manager.epochs()
    damaged: dict[int, str] = {}
    if policy.resume_from == "latest":
        whole = None
        for candidate in reversed(recorded):
            # Whether all of it is whole, only a load can tell.
            try:
                required_blobs(plan, manager, candidate)
            except CheckpointCorruptError as error:
                damaged[candidate] = str(error)
            else:
                whole = candidate
                break
        if whole is None:
            what = "that is recorded is whole" if recorded else "is recorded"
            reason = f"nothing {what} in {manager.path}"
            aside = tuple(recorded) if manager is own else ()
            decision = _fresh(plan, manager, policy, reason, aside)
            return replace(decision, warnings=warnings, damaged=damaged)
        epoch = whole
        reason = f"it is the last epoch recorded in {manager.path}"
        if damaged:
            reason = f"{reason} that is not known to be damaged"
    else:
        epoch = policy.resume_from
        reason = "it was asked for"
        if epoch not in recorded:
            shown = [*map(str, recorded)]
            if len(shown) > 12:
                shown[4:-4] = ["…"]
            there = ", ".join(shown) or "none"
            way_out = "Name one of these, or 'latest'."
            if epoch in manager.unclaimed():
                way_out = (
                    f"Stores of it lie there, so the log has lost that it was recorded: `jobrunner "
                    f"fsck {manager.path}` tells what they are, and --repair records them again."
                )
            raise CheckpointNotFoundError(
                f"Epoch {epoch} of {manager.path} is not recorded; recorded epochs: {there}. "
                f"{way_out}"
            )
        required_blobs(plan, manager, epoch)

    later = tuple(e for e in recorded if e > epoch)
    record = manager.record(epoch)
    done = steps_done(plan, record)
    then = manager.run_info(epoch).get("plan")
    fired = recorded_stops(plan, record)
    limit = policy.epoch_limit(plan)
    is_last = not done and bool(fired or _is_reached(limit, epoch))
    is_finished = not later and manager.is_done() and is_last
    steps = [f"load epoch {epoch}" + (f", saved after step {done}" if done else "")]
    if done:
        steps.append(f"steps {done + 1} to {plan.steps_per_epoch} of epoch {epoch}")
    if not is_last:
        steps.append(f"epochs from {epoch + 1}{_until(plan, limit)}")
    if not is_finished:
        steps += _last_steps(plan)
    return ResumePlan(
        epoch=epoch,
        reason=reason + (", and that run had finished" if is_finished else ""),
        steps=tuple(steps),
        rebuilds=tuple(
            f"{node}/{task.name}"
            for node, part in rebuild(job, plan, manager, epoch)[0].slices.items()
            for task in part.tasks
        ),
        sets_aside=later,
        changes=tuple(changes(then, describe(plan))) if then else (),
        is_finished=is_finished,
        step=done,
        warnings=warnings,
        damaged=damaged,
    )


def _warn_of_holder(own: MultiNodeCheckpointManager) -> tuple[str, ...]:
    holder = own.held_by()
    if holder is None:
        return ()
    warning = (
        f"{own.path} is held by another run ({holder}), as far as its log tells. A run waits for a "
        f"sign of life from it, and does not begin if there is one."
    )
    return (warning,)


def _check_claimed(directory: CheckpointDirectory) -> tuple[str, ...]:
    """Warn of stores that the log should speak of; refuse to start over where it tells nothing."""
    lost = directory.unclaimed()
    if not lost:
        return ()
    recorded = directory.epochs()
    epochs = f"{'epoch' if len(lost) == 1 else 'epochs'} {format_ranges(lost)}"
    found = f"{directory.path} holds stores of {epochs} that no entry of its log claims"
    way = f"`jobrunner fsck {directory.path}` tells what they are, and --repair records them again"
    if recorded:
        return (f"{found}: its newest entries may be lost. {way}. They are not touched.",)
    raise CheckpointCorruptError(
        f"{found}, and the log records no epoch: expected {os.path.join(directory.path, '_log')} "
        f"to record them. The log must be lost. {way}. To start over and leave them as they are: "
        f"resume_from_epoch=None, --resume none.",
        path=directory.path,
    )


def required_blobs(
    plan: Plan, manager: CheckpointDirectory, epoch: int
) -> dict[str, frozenset[str]]:
    """The blobs to load at `epoch`, by node.

    Raises
    ------
    PlanMismatchError
        Naming the nodes and blobs that the checkpoint lacks.
    """
    there = manager.blobs(epoch)
    needed = plan.saved_blobs(epoch)
    shared = manager.shared_blobs(epoch) & (plan.replicated.keys() | plan.partitions.keys())
    missing = [
        f"node {node!r}"
        for node, blobs in needed.items()
        if node not in there and (not blobs or blobs - shared)
    ]
    for node, blobs in needed.items():
        gone = sorted(blobs - shared - set(there.get(node, ()))) if node in there else []
        missing += [f"blob {blob!r} of node {node!r}" for blob in gone]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise PlanMismatchError(
            f"Epoch {epoch} of {manager.path} cannot fill job {plan.job!r}: it lacks "
            f"{', '.join(missing[:8])}{more}. It holds nodes "
            f"{', '.join(map(repr, there)) or 'none'}. Run the job that wrote it, or start afresh "
            f"(resume_from_epoch=None, --resume none)."
        )
    return needed


def find_blobs(
    manager: CheckpointDirectory, epoch: int, asked: Sequence[str | Blob]
) -> dict[str, set[str]]:
    """The blobs that are meant, by node; a name means those of all nodes.

    Raises
    ------
    DefinitionError
        It is neither a name nor a blob.
    BlobNotFoundError
        No checkpointed node has the blob.
    """
    there = manager.blobs(epoch)
    found: dict[str, set[str]] = {}
    for one in [asked] if isinstance(asked, str | Blob) else asked:
        if not isinstance(one, str | Blob):
            raise DefinitionError(f"Blobs to load are names or Blobs; got {one!r}.")
        blob = Blob(one) if isinstance(one, str) else one
        nodes = [
            node
            for node, names in there.items()
            if blob.name in names and (blob.node is None or blob.node.name == node)
        ]
        if not nodes:
            raise BlobNotFoundError(
                f"Epoch {epoch} of {manager.path} has no blob {blob!r}. It holds: "
                + "; ".join(f"{n}: {', '.join(sorted(b))}" for n, b in there.items())
            )
        for node in nodes:
            found.setdefault(node, set()).add(blob.name)
    return found


def rebuild(
    job: Job, plan: Plan, manager: CheckpointDirectory, epoch: int
) -> tuple[GroupPlan, dict[str, frozenset[str]]]:
    """The init tasks that run again after a load of `epoch`, and whose objects take their states.

    Returns
    -------
    group : GroupPlan
    anew : dict of str to frozenset of str
        Node -> the blobs of objects that are made anew, for the states that are loaded.

    Raises
    ------
    PlanMismatchError
        No init task makes such an object.
    """
    recorded = manager.stateful_blobs(epoch)
    shared = {name for names in recorded.values() for name in names} & plan.replicated.keys()
    anew = {}
    for node, blobs in plan.saved_blobs(epoch).items():
        found = blobs & (recorded.get(node, frozenset()) | shared)
        missing = sorted(found - plan.initial.get(node, frozenset()))
        if missing:
            raise PlanMismatchError(
                f"Epoch {epoch} of {manager.path} holds the state of an object in blob "
                f"{missing[0]!r} of node {node!r}, and no task of job {plan.job!r}'s init group "
                f"makes that object. Let one make it, or start afresh (resume_from_epoch=None, "
                f"--resume none)."
            )
        if found:
            anew[node] = found
    return (compile_resume(job, plan, anew) if anew else plan.groups["resume"]), anew


def least_bytes(
    blobs: Mapping[str, frozenset[str]], manager: CheckpointDirectory, epoch: int
) -> dict[str, int]:
    """Node -> what its blobs of `epoch` take on disk, for the nodes that load their whole store."""
    stores = manager.record(epoch)["stores"]
    saved = manager.run_info(epoch).get("plan", {}).get("nodes", {})
    return {
        node: stores[node]["nbytes"]
        for node, names in blobs.items()
        if node in stores and node in saved and names >= set(saved[node])
    }


def recorded_stops(plan: Plan, record: Mapping[str, Any]) -> tuple[str, ...]:
    """The stop conditions that had fired at a recorded epoch and that the job still has."""
    names = {condition.name for condition in plan.groups["epoch"].conditions}
    return tuple(name for name in record["details"].get("stopped_by", ()) if name in names)


def steps_done(plan: Plan, record: Mapping[str, Any]) -> int:
    """After how many steps of its epoch a checkpoint was saved; 0 for a whole epoch.

    Raises
    ------
    PlanMismatchError
        The job's epochs have no step after that one.
    """
    done = int(record["details"].get("step", 0))
    if done and done >= plan.steps_per_epoch:
        raise PlanMismatchError(
            f"Epoch {record['epoch']} was saved after step {done}, and the epochs of job "
            f"{plan.job!r} have steps_per_epoch={plan.steps_per_epoch}, so it cannot be gone on "
            f"with. Give the job more than {done} steps per epoch, or resume from an earlier epoch."
        )
    return done


def _fresh(
    plan: Plan,
    manager: CheckpointDirectory | None,
    policy: Policy,
    reason: str,
    sets_aside: tuple[int, ...] = (),
) -> ResumePlan:
    save = ["save epoch 0"] if manager is not None else []
    epochs = f"epochs from 1{_until(plan, policy.epoch_limit(plan))}"
    steps = [_count(plan, "init"), *save, epochs, *_last_steps(plan)]
    return ResumePlan(None, reason, steps=tuple(steps), sets_aside=sets_aside)


def _last_steps(plan: Plan) -> list[str]:
    return [_count(plan, "download"), _count(plan, "exit")]


def _count(plan: Plan, group: str) -> str:
    slices = plan.groups[group].slices.values()
    count = sum(len(part.tasks) for part in slices)
    return f"{group} group ({count} {'task' if count == 1 else 'tasks'})"


def _is_reached(limit: int | None, epoch: int) -> bool:
    return limit is not None and epoch >= limit


def _until(plan: Plan, limit: int | None) -> str:
    ends = [condition.name for condition in plan.groups["epoch"].conditions]
    ends += [] if limit is None else [f"epoch {limit}"]
    return f" until {' or '.join(ends)}"
