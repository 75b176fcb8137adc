"""Compile a whole job: its groups, and the init tasks that a resume runs again."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec import structs

from jobrunner.compile.blobs import (
    Key,
    Names,
    all_tasks,
    by_node,
    checkpointed_nodes,
    find_array_options,
    find_configured,
    find_globals,
    find_shared,
    keys_of,
)
from jobrunner.compile.fingerprint import code_of, structure_of, task_code
from jobrunner.compile.group import GroupCompiler
from jobrunner.compile.plan import GroupPlan, Plan, PlannedNode, gc_paused
from jobrunner.compile.steps import check_no_intervals, check_steps, split_stops
from jobrunner.define import (
    Blob,
    Job,
    Node,
    Task,
    TaskGroup,
    TaskOutput,
    check_seedable,
    constants_of,
)
from jobrunner.errors import DefinitionError
from jobrunner.names import check_distinct
from jobrunner.positions import Position


@gc_paused()
def compile_job(job: Job) -> Plan:
    """See `Job.compile`."""
    tasks = {name: group.tasks() for name, group in job.groups.items()}
    every = all_tasks(job)
    for task in every if job.seed_global_rng else ():
        values = [*constants_of(task.fn, task.kwargs), *task.setup.values()]
        for fn in (task.fn, *filter(callable, [*values, *task.instance_setup.values()])):
            check_seedable(fn, f"Task {task.full_name!r} of a job with seed_global_rng")
    outputs = [blob for task in every for blob in task.output_blobs]
    global_blobs = find_globals(every)
    checkpointed = checkpointed_nodes(job)
    configured = find_configured(job, checkpointed, global_blobs)
    replicated, partitions = find_shared(job, configured)

    groups: dict[str, GroupPlan] = {}
    made: dict[str, set[Key]] = {}
    check_steps(job)
    stops, last_stops = split_stops(job, global_blobs)
    conditions = {"epoch": stops, "epoch_end": last_stops}
    ends = {"epoch": job.epoch_end_conditions}
    for name, group in job.groups.items():
        compiler = GroupCompiler(
            group,
            tasks[name],
            globals=global_blobs,
            available=set().union(*made.values()),
            groups=job.groups.values(),
            is_seeded=job.seed_global_rng,
        )
        groups[name] = compiler.compile(conditions.get(name, ()), ends.get(name, ()))
        lasting = tasks[name]
        if name == "epoch" and job.steps_per_epoch is None:
            # An epoch may end before the others have run.
            lasting = [task for task in lasting if task.every == 1]
        made[name] = _made_by(lasting, global_blobs)
    steady = [task for task in tasks["epoch"] if task.every == 1]
    ended = made["epoch"].union(made.get("epoch_end", ()))

    functions = {id(task.fn): task.fn for task in every}
    codes = {number: code_of(fn) for number, fn in functions.items()}
    named = {f"{name}:{task.full_name}": task for name in tasks for task in tasks[name]}
    plan = Plan(
        job=job.name,
        seed=job.seed,
        seed_global_rng=job.seed_global_rng,
        steps_per_epoch=job.steps_per_epoch,
        epoch_limit=job.epoch_limit,
        nodes=planned_nodes(job.groups.values()),
        groups=groups,
        checkpointed=checkpointed,
        globals=by_node(global_blobs),
        initial=by_node(made["init"]),
        early=by_node(made["init"] | _made_by(steady, global_blobs)),
        lasting=by_node(made["init"] | ended),
        transient=by_node(blob.key for blob in outputs if blob.transient),
        replicated=replicated,
        partitions=partitions,
        array_options=find_array_options(job, configured),
        parameters=job.parameters,
        structure={key: structure_of(task, global_blobs) for key, task in named.items()},
        code={key: task_code(task, codes[id(task.fn)]) for key, task in named.items()},
        can_batch=job.steps_per_epoch is not None and "epoch_end" not in groups,
    )
    groups["resume"] = compile_resume(job, plan)
    for group in (*job.groups.values(), job.epoch_end_group):
        group.is_compiled = True
    return plan


def _made_by(tasks: Iterable[Task], global_blobs: Collection[Key]) -> set[Key]:
    return {blob.key for task in tasks for blob in task.output_blobs}.intersection(global_blobs)


def compile_resume(
    job: Job,
    plan: Plan,
    anew: Names | None = None,
    present: Names | None = None,
    missing: Names | None = None,
) -> GroupPlan:
    """Compile the init tasks that run again after a load.

    The blobs of `anew` are made although a checkpoint has their state, which is then loaded into
    them; those of `missing` because it has nothing of them. `present` are the blobs that exist, and
    only `anew` is made; None: the blobs of a checkpoint exist, and all others are made. Raises
    `DefinitionError` if one of these tasks updates a blob that exists, so it would be updated twice.
    """
    lacking = keys_of(missing or {})
    remade = keys_of(anew or {}) | lacking
    global_blobs, transient = keys_of(plan.globals), keys_of(plan.transient)
    if present is None:
        available = keys_of(plan.saved_blobs(Position(0)))
        loaded = {key for key in global_blobs - transient if key[0] in plan.checkpointed}
    else:
        loaded = available = keys_of(present)
    loaded -= remade
    tasks = _resumed_tasks(job, loaded, remade, lacking, plan if present is None else None)
    return GroupCompiler(
        job.init_group,
        tasks,
        global_blobs,
        available=available - remade,
        loaded=loaded,
        is_seeded=job.seed_global_rng,
        has_reports=bool(tasks),
    ).compile()


def compile_group(group: TaskGroup, global_blobs: Names) -> GroupPlan:
    """Compile a group that belongs to no job; `global_blobs` exist.

    Whether the other blobs that the group reads exist is checked when it runs.
    """
    check_no_intervals(group)
    tasks = group.tasks()
    plan = GroupCompiler(
        group,
        tasks,
        keys_of(global_blobs).union(find_globals(tasks, is_init=False)),
        available=None,
    ).compile()
    group.is_compiled = True
    return plan


def _resumed_tasks(
    job: Job, loaded: Collection[Key], remade: set[Key], lacking: set[Key], plan: Plan | None
) -> list[Task]:
    """The init tasks that run again after a load, in order of definition.

    - tasks that make the blobs of `remade`, and tasks that update those of `lacking`;
    - with a plan, tasks of nodes that are not checkpointed, and tasks that make or update
      transient blobs;
    - tasks that make what these tasks read, unless it is `loaded`.
    """
    tasks = job.init_group.tasks()
    changed = lacking | (keys_of(plan.transient) if plan is not None else set())

    def is_wanted(task: Task) -> bool:
        outputs = {blob.key for blob in task.output_blobs}
        if plan is not None and task.node.name not in plan.checkpointed:
            return True
        written = outputs.union(blob.key for blob in task.updates)
        return not (remade.isdisjoint(outputs) and changed.isdisjoint(written))

    makers: dict[Key, list[Task]] = {}
    for task in tasks:
        # The loaded state would replace an update of these blobs.
        updates = [blob for blob in task.updates if blob.key not in remade - lacking]
        for blob in (*task.output_blobs, *updates):
            makers.setdefault(blob.key, []).append(task)
    wanted = [task for task in tasks if is_wanted(task)]
    included = set(wanted)
    while wanted:
        task = wanted.pop()
        needed: list[Task] = []
        for value in (*task.inputs, *task.updates):
            if isinstance(value, TaskOutput):
                if value.blob is None or value.blob.key not in loaded:
                    needed.append(value.task)
            elif value.key not in loaded:
                needed += makers.get(value.key, [])
        wanted += [other for other in dict.fromkeys(needed) if other not in included]
        included.update(needed)

    resumed = [task for task in tasks if task in included]
    when = "at this resume, for blobs that the checkpoint lacks"
    when = when if lacking else "at every resume, for its transient blobs"
    for task in resumed:
        for blob in task.updates:
            if blob.key in loaded:
                raise DefinitionError(
                    f"Task {task.full_name!r} of the init group runs again {when}, and would update "
                    f"blob {blob.name!r} twice: the checkpoint already has the update. Update that "
                    f"blob in another task."
                )
    return resumed


def planned_nodes(groups: Iterable[TaskGroup]) -> tuple[PlannedNode, ...]:
    """The nodes that these groups use, with what they require of their workers."""
    found: dict[str, PlannedNode] = {}
    uids: dict[str, str] = {}
    for group in groups:
        nodes: list[Node | None] = []
        for task in group.tasks():
            owners = [value if isinstance(value, Blob) else value.task for value in task.inputs]
            nodes += [task.node, *(owner.node for owner in owners)]
        nodes += [node for node, _, _ in group.reports]
        for node in {id(node): node for node in nodes if node is not None}.values():
            asked = PlannedNode(node.name, node.workers, node.resources)
            uid = uids.setdefault(node.name, node.uid) if node.uid is not None else None
            known = found.setdefault(node.name, asked)
            if known.workers is None and known.resources is None:
                found[node.name] = asked
            elif asked not in (known, PlannedNode(node.name)):
                raise DefinitionError(
                    f"Node {node.name!r} has conflicting requirements: workers={known.workers}, "
                    f"resources={known.resources}, and workers={node.workers}, "
                    f"resources={node.resources}. Make it once and use that object."
                )
            if uid != node.uid:
                raise DefinitionError(
                    f"Node {node.name!r} has two uids, {uid!r} and {node.uid!r}. Make it once and use "
                    f"that object."
                )
    check_distinct(found, "nodes")
    named: dict[str, str] = {}
    for name in found:
        uid = uids.get(name, name)
        if named.setdefault(uid, name) != name:
            raise DefinitionError(
                f"Nodes {named[uid]!r} and {name!r} have the same uid, {uid!r}; a node without a uid "
                f"has its name for one. Give each its own."
            )
    return tuple(
        structs.replace(node, uid=uids[name]) if name in uids else node
        for name, node in found.items()
    )
