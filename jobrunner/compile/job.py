"""Compile a whole job: its groups, and the init tasks that a resume runs again."""

from __future__ import annotations

from collections.abc import Iterable

from jobrunner.compile.blobs import (
    all_tasks,
    checkpointed_nodes,
    find_array_options,
    find_globals,
    find_shared,
    find_transient,
    find_updated,
    made_by,
)
from jobrunner.compile.fingerprint import code_of, structure_of
from jobrunner.compile.gc_pause import gc_paused
from jobrunner.compile.group import Call, GroupCompiler, Names, is_in
from jobrunner.compile.plan import GroupPlan, Plan, PlannedNode
from jobrunner.define import Blob, Job, Node, Task, TaskGroup, TaskOutput
from jobrunner.errors import DefinitionError
from jobrunner.names import check_distinct


@gc_paused()
def compile_job(job: Job) -> Plan:
    """See `Job.compile`."""
    tasks = {name: group.tasks() for name, group in job.groups.items()}
    every = all_tasks(job)
    global_blobs = find_globals(every)
    made = {name: made_by(members, global_blobs) for name, members in tasks.items()}
    initial = made["init"]
    transient = find_transient(job)
    checkpointed = checkpointed_nodes(job)
    replicated, partitions = find_shared(job, checkpointed, global_blobs)
    updated = find_updated(every)
    members = {id(task) for task in every}

    groups: dict[str, GroupPlan] = {}
    available: Names = {}
    for name, group in job.groups.items():
        groups[name] = GroupCompiler(
            group,
            [Call(task) for task in tasks[name]],
            global_blobs,
            available=available,
            members=members,
            updated=updated,
        ).compile(job.stop_conditions if name == "epoch" else ())
        available = _union(available, made[name])

    structure: dict[str, str] = {}
    code: dict[str, str] = {}
    code_by_function: dict[int, str] = {}
    for name, group_tasks in tasks.items():
        for task in group_tasks:
            key = f"{name}:{task.full_name}"
            structure[key] = structure_of(task, global_blobs.get(task.node.name, ()))
            if id(task.fn) not in code_by_function:
                code_by_function[id(task.fn)] = code_of(task.fn)
            code[key] = code_by_function[id(task.fn)]

    plan = Plan(
        job=job.name,
        seed=job.seed,
        steps_per_epoch=job.steps_per_epoch,
        epoch_limit=job.epoch_limit,
        nodes=planned_nodes(job.groups.values()),
        groups=groups,
        checkpointed=checkpointed,
        globals=global_blobs,
        initial=initial,
        lasting=_union(initial, made["epoch"]),
        transient=transient,
        replicated=replicated,
        partitions=partitions,
        array_options=find_array_options(job, checkpointed, global_blobs),
        structure=structure,
        code=code,
    )
    groups["resume"] = compile_resume(job, plan)
    for group in job.groups.values():
        group.is_compiled = True
    return plan


def compile_resume(
    job: Job, plan: Plan, anew: Names | None = None, present: Names | None = None
) -> GroupPlan:
    """Compile the init tasks that run again after a load.

    The blobs of `anew` are made although a checkpoint has their state, which is then loaded into
    them. `present` are the blobs that exist, and only `anew` is made; None: the blobs of a
    checkpoint exist, and all others are made.

    Raises
    ------
    DefinitionError
        One of these tasks updates a blob that exists, so it would be updated twice.
    """
    anew = anew or {}
    loaded = available = present or {}
    if present is None:
        every = {node: plan.globals.get(node, frozenset()) for node in plan.checkpointed}
        loaded, available = _minus(every, plan.transient), plan.saved_blobs(0)
    calls = _resumed_calls(job, _minus(loaded, anew), anew, plan if present is None else None)
    return GroupCompiler(
        job.init_group,
        calls,
        plan.globals,
        available=_minus(available, anew),
        members=None,
        updated=find_updated(all_tasks(job)),
    ).compile(())


def compile_group(group: TaskGroup, global_blobs: Names) -> GroupPlan:
    """Compile a group that belongs to no job; `global_blobs` exist.

    Whether the other blobs that the group reads exist is checked when it runs.
    """
    tasks = group.tasks()
    known = _union(global_blobs, find_globals(tasks, is_init=False))
    plan = GroupCompiler(
        group,
        [Call(task) for task in tasks],
        known,
        available=None,
        members=None,
        updated=find_updated(tasks),
    ).compile(())
    group.is_compiled = True
    return plan


def _union(a: Names, b: Names) -> Names:
    return {node: a.get(node, frozenset()) | b.get(node, frozenset()) for node in {**a, **b}}


def _minus(a: Names, b: Names) -> Names:
    return {node: frozenset(names) - frozenset(b.get(node, ())) for node, names in a.items()}


def _resumed_calls(job: Job, loaded: Names, anew: Names, plan: Plan | None) -> list[Call]:
    """The init tasks that run again after a load, in order of definition.

    - tasks that make the blobs of `anew`;
    - with a plan, tasks of nodes that are not checkpointed, and tasks that make or update
      transient blobs;
    - tasks that make what these tasks read, unless it is `loaded`.
    """
    tasks = job.init_group.tasks()

    def is_wanted(task: Task) -> bool:
        node, written = task.node.name, (*task.output_blobs, *task.updates)
        if any(is_in(anew, node, blob.name) for blob in task.output_blobs):
            return True
        return plan is not None and (
            node not in plan.checkpointed
            or any(is_in(plan.transient, node, blob.name) for blob in written)
        )

    makers: dict[tuple[str, str], list[Task]] = {}
    for task in tasks:
        node = task.node.name
        # The loaded state would replace an update of these blobs.
        updates = [blob for blob in task.updates if not is_in(anew, node, blob.name)]
        for blob in (*task.output_blobs, *updates):
            makers.setdefault((node, blob.name), []).append(task)
    wanted = [task for task in tasks if is_wanted(task)]
    included = {id(task) for task in wanted}
    while wanted:
        task = wanted.pop()
        needed: list[Task] = []
        for value in (*task.inputs, *task.updates):
            if isinstance(value, TaskOutput):
                filled = value.blob
                if filled is None or not is_in(loaded, value.task.node.name, filled.name):
                    needed.append(value.task)
            else:
                node = (value.node or task.node).name
                if not is_in(loaded, node, value.name):
                    needed += makers.get((node, value.name), [])
        for other in needed:
            if id(other) not in included:
                included.add(id(other))
                wanted.append(other)

    calls = []
    for task in (task for task in tasks if id(task) in included):
        node = task.node.name
        for blob in task.updates:
            if is_in(loaded, node, blob.name):
                raise DefinitionError(
                    f"Task {task.full_name!r} of the init group runs again at every resume, for its "
                    f"transient blobs, and would update blob {blob.name!r} twice: the checkpoint "
                    f"already has the update. Update that blob in another task."
                )
        kept = frozenset(b.name for b in task.output_blobs if not is_in(loaded, node, b.name))
        calls.append(Call(task, kept))
    return calls


def planned_nodes(groups: Iterable[TaskGroup]) -> tuple[PlannedNode, ...]:
    """The nodes that these groups use, with what they require of their workers."""
    found: dict[str, PlannedNode] = {}
    for group in groups:
        references: dict[int, Node] = {}
        for task in group.tasks():
            references[id(task.node)] = task.node
            for value in task.inputs:
                node = value.node if isinstance(value, Blob) else value.task.node
                if node is not None:
                    references[id(node)] = node
        references.update((id(node), node) for node, _, _ in group.reports)
        for node in references.values():
            asked = PlannedNode(node.name, node.workers, node.resources)
            known = found.setdefault(node.name, asked)
            if known.workers is None and known.resources is None:
                found[node.name] = asked
            elif asked not in (known, PlannedNode(node.name)):
                raise DefinitionError(
                    f"Node {node.name!r} has conflicting requirements: workers={known.workers}, "
                    f"resources={known.resources}, and workers={node.workers}, "
                    f"resources={node.resources}. Make it once and use that object."
                )
    check_distinct(found, "nodes")
    return tuple(found.values())
