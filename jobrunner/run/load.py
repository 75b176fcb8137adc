"""Load a recorded epoch into workspaces, and decide what else must run."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from jobrunner.checkpoint import (
    DAMAGE_ADVICE,
    Directory,
    EpochRecord,
    Loader,
    MultiNodeCheckpointManager,
    load_waiting_states,
)
from jobrunner.cluster import Binding, Session
from jobrunner.compile import GroupPlan, Plan, compile_resume, planned_nodes
from jobrunner.config import get_number
from jobrunner.define import Blob, Job, Reported, TaskGroup, Total
from jobrunner.errors import (
    BlobNotFoundError,
    CheckpointCorruptError,
    PlanMismatchError,
)
from jobrunner.positions import Position
from jobrunner.run.matching import START_AFRESH, Adaptation, Match, match, name_now
from jobrunner.run.migrate import migrated

if TYPE_CHECKING:
    from jobrunner.run.loop import Run
    from jobrunner.run.result import ResumePlan


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded epoch: all its blobs are in the workspaces, except objects saved by their state."""

    group: TaskGroup  # the group that loaded it
    resume_group: GroupPlan  # init tasks to run again; they also make those objects
    waiting: Mapping[str, frozenset[str]]  # node -> blobs whose states wait for their objects
    match: Match
    blobs: Mapping[str, frozenset[str]]  # node -> blobs that it now has from the checkpoint


def load(
    session: Session,
    binding: Binding,
    job: Job,
    manager: Loader,
    epoch: Position,
    adaptation: Adaptation,
) -> Loaded:
    """Load an epoch into workspaces."""
    plan = binding.plan
    given = migrated(adaptation, plan, manager, epoch)
    record = manager.directory.record(epoch)
    found = match(plan, manager, record, adaptation, given)
    # Bytes on disk of the nodes that load their whole store.
    stores = record.stores
    saved = (manager.directory.run_plan(epoch) or {}).get("nodes", {})
    sizes = {}
    for node, names in found.blobs.items():
        there = [found.origins.of(node, name) for name in names]
        home = found.origins.nodes.get(node, node)
        if home in stores and home in saved and set(there) >= {(home, it) for it in saved[home]}:
            sizes[node] = stores[home].nbytes
    binding.check_fit(sizes, f"Epoch {epoch} of {manager.path}")
    resume_group, waiting = rebuild(job, plan, manager, epoch, found, given)
    group = manager.load(
        epoch,
        blobs={**dict.fromkeys(given, ()), **found.blobs},
        partitions={name: nodes for name, (_, nodes) in plan.partitions.items()},
        anew=waiting,
        origins=found.origins,
        given=given,
    )
    session.run_group(group, epoch.epoch, get_number("checkpoint.deadline-seconds"))
    blobs = {
        node: found.blobs.get(node, frozenset()).union(given.get(node, ()))
        for node in {**found.blobs, **given}
    }
    return Loaded(group, resume_group, waiting, found, blobs)


def load_recorded(run: Run, decision: ResumePlan) -> Position | None:
    """Load the named epoch, or for "latest" the newest whole one; None if there is none."""
    started, runner, state = time.monotonic(), run.runner, run.state
    own = runner.checkpoint_manager
    assert own is not None
    is_own = (manager := own.source()) is own.loader
    plan, damaged = run.plan, dict[Position, str]()
    found = load_newest(run, manager, damaged)
    if found is None:
        if is_own:
            run.saver.set_aside(damaged)
        return None
    at, record, loaded = found
    run.watch.go_back(at)
    finish_load(run.binding, loaded, run.run_group)
    state.reported = reported_in(record)
    state.fired = recorded_stops(plan, record)
    check_steps(plan, record, manager.path)
    state.epoch, state.steps_done = at.epoch, at.step
    run.callbacks.load_states(record.details.callbacks)
    run.lineage = runner.adaptation.lineage(plan, record.details)
    save = partial(run.save, at, state.reported.metrics, must_wait=True)
    own.commits.name_former(loaded.match.origins.nodes if is_own else {})
    if is_own:
        run.saver.set_aside(damaged)
        run.saver.rewind(at, f"resumed from epoch {at}")
        state.recorded = at
    run.callbacks.notify("on_load", at.epoch, at.step, time.monotonic() - started)
    if not is_own:
        save()  # then the run can resume from its own directory alone
    elif loaded.match.is_reshaped and not (decision.is_finished and is_loaded(decision, at)):
        record_anew(own.directory, at, save, run.wait_for_save)
    return at


def load_newest(
    run: Run, manager: Loader, damaged: dict[Position, str]
) -> tuple[Position, EpochRecord, Loaded] | None:
    """Load the epoch that was asked for, or the newest whole one; return it with its record.

    None: no recorded epoch is whole. Adds those that are not to `damaged`, each with its damage.
    """
    named, binding, warn = run.resumption.named, run.binding, run.callbacks.warn
    job, adaptation, own = run.runner.job, run.runner.adaptation, run.runner.checkpoint_manager
    aside = " and set aside" if own is not None and manager is own.loader else ""
    for epoch in reversed(manager.directory.all()) if named is None else [named]:
        try:
            loaded = load(run.session, binding, job, manager, epoch, adaptation)
            record = manager.directory.record(epoch)
            if changed := loaded.match.describe():
                warn(
                    f"Epoch {epoch} of {manager.path} has other nodes or blobs than the job: {changed}"
                )
            return epoch, record, loaded
        except CheckpointCorruptError as error:
            if named is not None:
                raise
            damaged[epoch] = str(error).removesuffix(DAMAGE_ADVICE).rstrip()
            warn(
                f"Epoch {epoch} of {manager.path} is damaged{aside}; trying an earlier one: "
                f"{damaged[epoch]}"
            )
    warn(f"No recorded epoch of {manager.path} is whole; starting afresh.")
    return None


def finish_load(binding: Binding, loaded: Loaded, run: Callable[[str, int], object]) -> None:
    """Run the init tasks that run again, and give the objects that waited for them their states.

    `run` gets the key of a group and an epoch.
    """
    if loaded.waiting or loaded.match.made:
        # Ship all groups at once: objects that their functions share stay shared.
        binding.ship({**binding.plan.groups, "resume": loaded.resume_group})
    if loaded.resume_group.slices:
        run("resume", 0)  # as epoch 0: init tasks draw the same random numbers
    if loaded.waiting:
        binding.apply(load_waiting_states)


def is_loaded(decision: ResumePlan, at: Position | None) -> bool:
    """Whether that is what the run decided to load: not, if it was damaged."""
    return at is not None and at.public == decision.epoch


def record_anew(
    directory: Directory,
    at: Position,
    save: Callable[[], None],
    wait: Callable[[], None],
) -> None:
    """Record a loaded epoch in the shape that the job gave it, with `save`; then `wait` for it.

    The stores in the former shape are set aside, not deleted. A crash before the commit leaves the
    record as it was.
    """
    labels = directory.pins().get(at, ())
    save()
    wait()
    for label in labels:  # a new record has none
        directory.pin(at, label)


def rebuild(
    job: Job,
    plan: Plan,
    manager: Loader,
    epoch: Position,
    found: Match,
    given: Mapping[str, Mapping[str, Any]],
) -> tuple[GroupPlan, dict[str, frozenset[str]]]:
    """The init tasks to run after a load of `epoch`, and the objects that then get their states.

    The objects are node -> blobs. Raises `PlanMismatchError` if no init task makes one of them.
    """
    recorded = manager.stateful_blobs(epoch)
    anywhere = {name for names in recorded.values() for name in names}
    shared = {name for name, then in found.origins.shared.items() if then in anywhere}
    waiting = {}
    for node in {**found.blobs, **given}:
        names = found.blobs.get(node, frozenset()).union(given.get(node, ()))
        there = {name: found.origins.of(node, name) for name in names}
        stateful = frozenset(
            name
            for name, (old, then) in there.items()
            if name in shared or then in recorded.get(old, ())
        )
        missing = sorted(stateful - plan.initial.get(node, frozenset()))
        if missing:
            raise PlanMismatchError(
                f"Epoch {epoch} of {manager.path} contains the state of an object in blob "
                f"{missing[0]!r} of node {node!r}, but no init task of job {plan.job!r} makes "
                f"that object. Add one that does, or {START_AFRESH}."
            )
        if stateful:
            waiting[node] = stateful
    if not waiting and not found.made:
        return plan.groups["resume"], waiting
    return compile_resume(job, plan, waiting, missing=found.made), waiting


def recorded_metrics(manager: MultiNodeCheckpointManager | None) -> list[dict[str, Any]]:
    """The metrics of all recorded whole epochs, as in `RunResult.metrics`."""
    rows = [] if manager is None else manager.history()
    whole = [row for row in rows if row["epoch"] and not row["step"]]
    return [{**row["metrics"], "epoch": row["epoch"]} for row in whole]


def reported_in(record: EpochRecord) -> Reported:
    """What tasks had reported in the recorded epoch, or in its steps so far."""
    details = record.details
    totals = {
        name: {node: Total(*total, over="epoch") for node, total in nodes.items()}
        for name, nodes in details.totals.items()
    }
    return Reported(dict(details.metrics), totals)


def recorded_stops(plan: Plan, record: EpochRecord) -> tuple[str, ...]:
    """The stop conditions that were true at a recorded epoch, among those that there still are."""
    names = plan.enders.union(plan.stops)
    return tuple(name for name in record.details.stopped_by if name in names)


def check_steps(plan: Plan, record: EpochRecord, path: str) -> None:
    """Raise `PlanMismatchError` if a checkpoint contains more steps than the job's epochs have."""
    done = record.at.step
    if plan.steps_per_epoch is not None and 0 < plan.steps_per_epoch <= done:
        raise PlanMismatchError(
            f"The checkpoint of {record.name} in {path} was saved after step {done}, but "
            f"the epochs of job {plan.job!r} have steps_per_epoch={plan.steps_per_epoch}, so the "
            f"run cannot resume from it. Give the job more than {done} steps per epoch, or resume "
            f"from an earlier epoch."
        )


def load_blobs(
    job: Job,
    manager: Loader,
    epoch: Position,
    asked: Sequence[str | Blob],
    session: Session,
    rename: Mapping[str, str],
) -> None:
    """See `JobRunner.load_blobs_from_checkpoints`."""
    nodes = planned_nodes(job.groups.values())
    uids = {node.name: node.uid for node in nodes if node.uid is not None}
    record = manager.directory.record(epoch)
    now = name_now(
        *(rename, uids, [node.name for node in nodes]),
        *(manager.path, record, manager.blobs(record)),
    )
    wanted = _find_blobs(now.blobs, manager, epoch, asked)
    with session.exclusive(f"The load of epoch {epoch} of {manager.path}"):
        recorded = manager.stateful_blobs(epoch)
        stateful: dict[str, set[str]] = {}
        for node, names in wanted.items():
            there = {name: now.blobs[node, name] for name in names}
            stateful[node] = {n for n, (old, then) in there.items() if then in recorded[old]}
        present = session.blob_names() if any(stateful.values()) else {}
        waiting = {
            node: frozenset(missing)
            for node, blobs in stateful.items()
            if (missing := blobs - present.get(node, frozenset()))
        }
        group = manager.load(epoch, blobs=wanted, anew=waiting, origins=now.origins(wanted))
        session.run(group)
        if waiting:
            plan = job.compile()
            resume_group = compile_resume(job, plan, waiting, session.blob_names())
            session.run_compiled("made anew", resume_group, plan.nodes).apply(load_waiting_states)


def _find_blobs(
    there: Collection[tuple[str, str]],
    manager: Loader,
    epoch: Position,
    asked: Sequence[str | Blob],
) -> dict[str, set[str]]:
    """The blobs that were asked for, by node; a name stands for every node that has the blob."""
    found: dict[str, set[str]] = {}
    for one in [asked] if isinstance(asked, str | Blob) else asked:
        blob = Blob(one) if isinstance(one, str) else one
        nodes = [
            node
            for node, name in there
            if blob.name == name and (blob.node is None or blob.node.name == node)
        ]
        if not nodes:
            names: dict[str, list[str]] = {}
            for node, name in there:
                names.setdefault(node, []).append(name)
            raise BlobNotFoundError(
                f"Epoch {epoch} of {manager.path} has no blob {blob!r}. Its blobs are: "
                + "; ".join(f"{n}: {', '.join(sorted(b))}" for n, b in names.items())
            )
        for node in nodes:
            found.setdefault(node, set()).add(blob.name)
    return found
