"""Load a recorded epoch into workspaces, and decide what else must run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobrunner.checkpoint import DAMAGE_ADVICE, Loader, load_waiting_states, steps_in
from jobrunner.cluster import Binding, Session
from jobrunner.compile import GroupPlan, Plan, compile_resume
from jobrunner.config import get_number
from jobrunner.define import Blob, Job, TaskGroup
from jobrunner.errors import BlobNotFoundError, CheckpointCorruptError, PlanMismatchError

START_AFRESH = "start afresh (resume_from_epoch=None, --resume none)"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded epoch: all its blobs are in the workspaces, except objects saved by their state."""

    group: TaskGroup  # the group that loaded it
    resume_group: GroupPlan  # init tasks to run again; they also make those objects
    waiting: Mapping[str, frozenset[str]]  # node -> blobs whose states wait for their objects


def load(
    session: Session,
    binding: Binding,
    job: Job,
    manager: Loader,
    epoch: int,
    *,
    from_memory: bool = False,
) -> Loaded:
    """Load an epoch into workspaces; `from_memory`: use states that workers kept in memory."""
    plan = binding.plan
    blobs = required_blobs(plan, manager, epoch)
    # Bytes on disk of the nodes that load their whole store.
    stores = manager.recorded.record(epoch)["stores"]
    saved = (manager.recorded.run_plan(epoch) or {}).get("nodes", {})
    sizes = {
        node: stores[node]["nbytes"]
        for node, names in blobs.items()
        if node in stores and node in saved and names >= set(saved[node])
    }
    binding.check_fit(sizes, f"Epoch {epoch} of {manager.path}")
    resume_group, waiting = rebuild(job, plan, manager, epoch)
    group = manager.load(
        epoch,
        blobs=blobs,
        partitions={name: nodes for name, (_, nodes) in plan.partitions.items()},
        anew=waiting,
        from_memory=from_memory,
    )
    session.run_group(group, epoch, get_number("checkpoint.deadline-seconds"))
    return Loaded(group, resume_group, waiting)


def load_newest(
    session: Session,
    binding: Binding,
    job: Job,
    manager: Loader,
    named: int | None,
    damaged: dict[int, str],
    aside: str,
    warn: Callable[[str], None],
) -> tuple[int, Mapping[str, Any], Loaded] | None:
    """Load epoch `named`, or the newest whole one if it is None; return it with its record.

    None: no recorded epoch is whole. Adds those that are not to `damaged`, each with its damage;
    `aside` says what is done with them.
    """
    for epoch in reversed(manager.recorded.all()) if named is None else [named]:
        try:
            loaded = load(session, binding, job, manager, epoch, from_memory=True)
            record = manager.recorded.record(epoch)
            binding.recorded = manager.memory_key(record)
            manager.report_load(loaded.group, "checkpoint_load")
            return epoch, record, loaded
        except CheckpointCorruptError as error:
            if named is not None:
                raise
            damaged[epoch] = str(error)
            warn(
                f"Epoch {epoch} of {manager.path} is damaged{aside}; trying an earlier one: "
                f"{str(error).removesuffix(DAMAGE_ADVICE).rstrip()}"
            )
    warn(f"No recorded epoch of {manager.path} is whole; starting afresh.")
    return None


def finish_load(binding: Binding, loaded: Loaded, run: Callable[[str, int], object]) -> None:
    """Run the init tasks that run again, and give the objects that waited for them their states.

    `run` gets the key of a group and an epoch.
    """
    if loaded.waiting:
        # Ship all groups at once: objects that their functions share stay shared.
        binding.ship({**binding.plan.groups, "resume": loaded.resume_group})
    if loaded.resume_group.slices:
        run("resume", 0)  # as epoch 0: init tasks draw the same random numbers
    if loaded.waiting:
        binding.apply(load_waiting_states)


def required_blobs(plan: Plan, manager: Loader, epoch: int) -> dict[str, frozenset[str]]:
    """The blobs to load from `epoch`, by node; raises `PlanMismatchError` if it lacks some."""
    there = manager.blobs(epoch)
    needed = plan.saved_blobs(epoch)
    shared = manager.shared_blobs(epoch) & (plan.replicated.keys() | plan.partitions.keys())
    missing = []
    for node, blobs in needed.items():
        own = blobs - shared
        if node in there:
            missing += [f"blob {b!r} of node {node!r}" for b in sorted(own.difference(there[node]))]
        elif own or not blobs:
            missing.append(f"node {node!r}")
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise PlanMismatchError(
            f"Job {plan.job!r} cannot resume from epoch {epoch} of {manager.path}, which lacks "
            f"{', '.join(missing[:8])}{more}; its nodes are "
            f"{', '.join(map(repr, there)) or 'none'}. Run the job that wrote it, or "
            f"{START_AFRESH}."
        )
    return needed


def rebuild(
    job: Job, plan: Plan, manager: Loader, epoch: int
) -> tuple[GroupPlan, dict[str, frozenset[str]]]:
    """The init tasks to run after a load of `epoch`, and the objects that then get their states.

    The objects are node -> blobs. Raises `PlanMismatchError` if no init task makes one of them.
    """
    recorded = manager.stateful_blobs(epoch)
    shared = {name for names in recorded.values() for name in names}
    shared &= plan.replicated.keys() | plan.partitions.keys()
    waiting = {}
    for node, blobs in plan.saved_blobs(epoch).items():
        found = blobs & (recorded.get(node, frozenset()) | shared)
        missing = sorted(found - plan.initial.get(node, frozenset()))
        if missing:
            raise PlanMismatchError(
                f"Epoch {epoch} of {manager.path} contains the state of an object in blob "
                f"{missing[0]!r} of node {node!r}, but no init task of job {plan.job!r} makes "
                f"that object. Add one that does, or {START_AFRESH}."
            )
        if found:
            waiting[node] = found
    return (compile_resume(job, plan, waiting) if waiting else plan.groups["resume"]), waiting


def recorded_stops(plan: Plan, record: Mapping[str, Any]) -> tuple[str, ...]:
    """The stop conditions that were true at a recorded epoch, among those that there still are."""
    names = plan.enders.union(plan.stops)
    return tuple(name for name in record["details"].get("stopped_by", ()) if name in names)


def steps_done(plan: Plan, record: Mapping[str, Any]) -> int:
    """How many steps of its epoch a checkpoint contains; 0: all."""
    done = steps_in(record)
    if plan.steps_per_epoch is not None and 0 < plan.steps_per_epoch <= done:
        raise PlanMismatchError(
            f"Epoch {record['epoch']} was saved after step {done}, but the epochs of job "
            f"{plan.job!r} have steps_per_epoch={plan.steps_per_epoch}, so the run cannot resume "
            f"from it. Give the job more than {done} steps per epoch, or resume from an earlier "
            f"epoch."
        )
    return done


def load_blobs(
    job: Job, manager: Loader, epoch: int, asked: Sequence[str | Blob], session: Session
) -> None:
    """See `JobRunner.load_blobs_from_checkpoints`."""
    wanted = _find_blobs(manager, epoch, asked)
    with session.exclusive(f"The load of epoch {epoch} of {manager.path}"):
        stateful = {n: b & wanted.get(n, set()) for n, b in manager.stateful_blobs(epoch).items()}
        present = session.blob_names() if any(stateful.values()) else {}
        waiting = {
            node: missing
            for node, blobs in stateful.items()
            if (missing := blobs - present.get(node, frozenset()))
        }
        group = manager.load(epoch, blobs=wanted, anew=waiting)
        session.run(group)
        manager.report_load(group, "checkpoint_partial_load")
        if waiting:
            plan = job.compile()
            resume_group = compile_resume(job, plan, waiting, session.blob_names())
            session.run_compiled("made anew", resume_group, plan.nodes).apply(load_waiting_states)


def _find_blobs(manager: Loader, epoch: int, asked: Sequence[str | Blob]) -> dict[str, set[str]]:
    """The blobs that were asked for, by node; a name stands for every node that has the blob."""
    there = manager.blobs(epoch)
    found: dict[str, set[str]] = {}
    for one in [asked] if isinstance(asked, str | Blob) else asked:
        blob = Blob(one) if isinstance(one, str) else one
        nodes = [
            node
            for node, names in there.items()
            if blob.name in names and (blob.node is None or blob.node.name == node)
        ]
        if not nodes:
            raise BlobNotFoundError(
                f"Epoch {epoch} of {manager.path} has no blob {blob!r}. Its blobs are: "
                + "; ".join(f"{n}: {', '.join(sorted(b))}" for n, b in there.items())
            )
        for node in nodes:
            found.setdefault(node, set()).add(blob.name)
    return found
