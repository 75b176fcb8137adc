"""6 loop: where a run goes on from, decided from what is recorded. Reads, never writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jobrunner.checkpoint import CheckpointDirectory, MultiNodeCheckpointManager
from jobrunner.compiler import compile_resume
from jobrunner.errors import CheckpointCorruptError, CheckpointNotFoundError, PlanMismatchError
from jobrunner.fingerprint import changes, describe
from jobrunner.job import Job
from jobrunner.plan import GroupPlan, Plan
from jobrunner.result import ResumePlan


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
    if policy.resume_from is None:
        return _fresh(plan, own, policy, "resume_from_epoch is None", tuple(own.epochs()))
    manager = own.source()
    recorded = manager.epochs()
    if policy.resume_from == "latest":
        if not recorded:
            return _fresh(plan, manager, policy, f"nothing is recorded in {manager.path}")
        epoch = recorded[-1]
        reason = f"it is the last epoch recorded in {manager.path}"
    else:
        epoch = policy.resume_from
        reason = "it was asked for"
        if epoch not in recorded:
            there = ", ".join(map(str, recorded)) or "none"
            raise CheckpointNotFoundError(
                f"Epoch {epoch} of {manager.path} is not recorded; recorded epochs: {there}. Name "
                f"one of these, or 'latest'."
            )

    later = tuple(e for e in recorded if e > epoch)
    record = manager.record(epoch)
    try:
        required_blobs(plan, manager, epoch)
    except CheckpointCorruptError:
        # Only a load can tell what of the epoch is whole; "latest" falls back then.
        if policy.resume_from != "latest":
            raise
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
