"""Compile a whole job: its groups, and the init tasks that a resume runs again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec import structs

from jobrunner.compile.fingerprint import CodeDigests, kind_of, structure_of
from jobrunner.compile.global_blobs import (
    BlobNames,
    all_tasks,
    by_node,
    checkpointed_nodes,
    find_array_options,
    find_configured,
    find_globals,
    find_histories,
    find_shared,
    keys_of,
)
from jobrunner.compile.group_compiler import GroupCompiler
from jobrunner.compile.plan import GroupPlan, Plan, PlannedNode
from jobrunner.define import (
    Blob,
    Job,
    Node,
    Task,
    TaskGroup,
    TaskOutput,
    check_seedable,
    constants_of,
    is_lazy,
)
from jobrunner.errors import DefinitionError
from jobrunner.gc_pause import gc_paused
from jobrunner.names import BlobKey, check_distinct
from jobrunner.positions import Position


@gc_paused()
def compile_job(job: Job) -> Plan:
    """See `Job.compile`."""
    tasks = all_tasks(job)
    if job.seed_global_rng:
        _check_seedable(tasks)
    global_blobs = find_globals(tasks)
    checkpointed = checkpointed_nodes(job)
    configured = find_configured(job, checkpointed, global_blobs)
    replicated, partitions = find_shared(job, configured)
    groups, lasting_blobs = _compile_groups(job, global_blobs)
    structure, code = _digests_of_tasks(job, global_blobs)
    each_step = [task for task in job.epoch_group.tasks() if task.every == 1]
    plan = Plan(
        job=job.name,
        seed=job.seed,
        seed_global_rng=job.seed_global_rng,
        steps_per_epoch=job.steps_per_epoch,
        epoch_limit=job.epoch_limit,
        nodes=tuple(_nodes_with_kinds(job, code)),
        groups=groups,
        checkpointed=checkpointed,
        globals=by_node(global_blobs),
        initial=by_node(lasting_blobs["init"]),
        early=by_node(lasting_blobs["init"] | _made_by(each_step, global_blobs)),
        lasting=by_node(
            lasting_blobs["init"].union(lasting_blobs["epoch"], lasting_blobs.get("epoch_end", ()))
        ),
        transient=by_node(_transient_blobs(tasks)),
        replicated=replicated,
        partitions=partitions,
        array_options=find_array_options(job, configured),
        histories=find_histories(job, configured),
        parameters=job.parameters,
        structure=structure,
        code=code,
        can_batch="epoch_end" not in groups,
    )
    groups["resume"] = compile_resume(job, plan)
    for group in (*job.groups.values(), job.epoch_end_group):
        group.is_compiled = True
    return plan


def _check_seedable(tasks: Iterable[Task]) -> None:
    for task in tasks:
        constants = [*constants_of(task.fn, task.kwargs), *task.setup.values()]
        constants = [value for value in constants if not is_lazy(value)]
        functions = filter(callable, [*constants, *task.instance_setup.values()])
        for fn in (task.fn, *functions):
            check_seedable(fn, f"Task {task.full_name!r} of a job with seed_global_rng")


def _compile_groups(
    job: Job, global_blobs: Collection[BlobKey]
) -> tuple[dict[str, GroupPlan], dict[str, set[BlobKey]]]:
    """The groups by name, and the global blobs that each is sure to have made when it has run."""
    after_step, after_epoch = _split_stops(job, global_blobs)
    stops = {"epoch": after_step, "epoch_end": after_epoch}
    groups: dict[str, GroupPlan] = {}
    lasting_blobs: dict[str, set[BlobKey]] = {}
    for name, group in job.groups.items():
        lasting = group.tasks()
        compiler = GroupCompiler(
            group,
            lasting,
            globals=global_blobs,
            available=set().union(*lasting_blobs.values()),
            groups=job.groups.values(),
            is_seeded=job.seed_global_rng,
            steps=job.steps_per_epoch if name == "epoch" else 1,
        )
        groups[name] = compiler.compile(stops.get(name, ()))
        lasting_blobs[name] = _made_by(lasting, global_blobs)
    return groups, lasting_blobs


def _split_stops(
    job: Job, global_blobs: Collection[BlobKey]
) -> tuple[list[TaskOutput | Blob], list[TaskOutput | Blob]]:
    """The stop conditions that are read after a step, and after the epoch end group."""
    if "epoch_end" not in job.groups:
        return job.stop_conditions, []
    private = {blob.key for task in job.epoch_group.tasks() for blob in task.output_blobs}
    private.difference_update(global_blobs)
    after_step: list[TaskOutput | Blob] = []
    after_epoch: list[TaskOutput | Blob] = []
    for condition in job.stop_conditions:
        if isinstance(condition, Blob):
            is_of_step = condition.key in private
        else:
            is_of_step = condition.task.group is job.epoch_group
        if is_of_step:
            after_step.append(condition)
        else:
            after_epoch.append(condition)
    return after_step, after_epoch


def _made_by(tasks: Iterable[Task], global_blobs: Collection[BlobKey]) -> set[BlobKey]:
    return {blob.key for task in tasks for blob in task.output_blobs}.intersection(global_blobs)


def _transient_blobs(tasks: Iterable[Task]) -> Iterator[BlobKey]:
    for task in tasks:
        for blob in task.output_blobs:
            if blob.transient:
                yield blob.key


def _nodes_with_kinds(job: Job, code: Mapping[str, str]) -> Iterator[PlannedNode]:
    in_epochs: dict[str, list[tuple[Task, str]]] = {}
    for name in ("epoch", "epoch_end"):
        if name not in job.groups:
            continue
        for task in job.groups[name].tasks():
            of_node = in_epochs.setdefault(task.node.name, [])
            of_node.append((task, code[f"{name}:{task.full_name}"]))
    for node in planned_nodes(job.groups.values()):
        yield structs.replace(node, kind=kind_of(in_epochs.get(node.name, ())))


def _digests_of_tasks(
    job: Job, global_blobs: Collection[BlobKey]
) -> tuple[dict[str, str], dict[str, str]]:
    """The digests of each task's structure, and of its code, by group, node and task."""
    structure: dict[str, str] = {}
    code: dict[str, str] = {}
    digests = CodeDigests()
    for name, group in job.groups.items():
        for task in group.tasks():
            key = f"{name}:{task.full_name}"
            structure[key] = structure_of(task, global_blobs)
            code[key] = digests.of_task(task)
    return structure, code


def compile_group(group: TaskGroup, global_blobs: BlobNames) -> GroupPlan:
    """Compile a group that belongs to no job; `global_blobs` exist.

    Whether the other blobs that the group reads exist is checked when it runs.
    """
    tasks = group.tasks()
    known_globals = keys_of(global_blobs).union(find_globals(tasks))
    plan = GroupCompiler(group, tasks, known_globals, available=None).compile()
    group.is_compiled = True
    return plan


# ---- a resume


def compile_resume(
    job: Job,
    plan: Plan,
    anew: BlobNames | None = None,
    present: BlobNames | None = None,
    missing: BlobNames | None = None,
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
        checkpointed = set(plan.checkpointed)
        loaded = {key for key in global_blobs - transient if key[0] in checkpointed} - remade
        tasks = _resumed_tasks(job, loaded, remade, lacking, plan)
    else:
        available = keys_of(present)
        loaded = available - remade
        tasks = _resumed_tasks(job, loaded, remade, lacking, None)
    return GroupCompiler(
        job.init_group,
        tasks,
        global_blobs,
        available=available - remade,
        loaded=loaded,
        is_seeded=job.seed_global_rng,
        has_reports=bool(tasks),
    ).compile()


def _resumed_tasks(
    job: Job,
    loaded: Collection[BlobKey],
    remade: set[BlobKey],
    lacking: set[BlobKey],
    plan: Plan | None,
) -> list[Task]:
    """The init tasks that run again after a load, in order of definition.

    - tasks that make the blobs of `remade`, and tasks that update those of `lacking`;
    - with a plan, tasks of nodes that are not checkpointed, and tasks that make or update
      transient blobs;
    - tasks that make what these tasks read, unless it is `loaded`.
    """
    tasks = job.init_group.tasks()
    changed = set(lacking)
    unsaved_nodes: set[str] = set()
    if plan is not None:
        changed |= keys_of(plan.transient)
        unsaved_nodes = {node.name for node in plan.nodes}.difference(plan.checkpointed)

    def is_wanted(task: Task) -> bool:
        outputs = {blob.key for blob in task.output_blobs}
        if task.node.name in unsaved_nodes:
            return True
        written = outputs.union(blob.key for blob in task.updates)
        return not (remade.isdisjoint(outputs) and changed.isdisjoint(written))

    makers: dict[BlobKey, list[Task]] = {}
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
        wanted += [maker for maker in dict.fromkeys(needed) if maker not in included]
        included.update(needed)

    resumed = [task for task in tasks if task in included]
    when = "at every resume, for its transient blobs"
    if lacking:
        when = "at this resume, for blobs that the checkpoint lacks"
    for task in resumed:
        for blob in task.updates:
            if blob.key in loaded:
                raise DefinitionError(
                    f"Task {task.full_name!r} of the init group runs again {when}, and would update "
                    f"blob {blob.name!r} twice: the checkpoint already has the update. Update that "
                    f"blob in another task."
                )
    return resumed


# ---- nodes


def planned_nodes(groups: Iterable[TaskGroup]) -> tuple[PlannedNode, ...]:
    """The nodes that these groups use, with what they require of their workers."""
    planned: dict[str, PlannedNode] = {}
    for group in groups:
        for node in _nodes_of(group):
            wanted = PlannedNode(node.name, node.workers, node.resources)
            first = planned.setdefault(node.name, wanted)
            if first.workers is None and first.resources is None:
                planned[node.name] = wanted
            elif wanted not in (first, PlannedNode(node.name)):
                raise DefinitionError(
                    f"Node {node.name!r} has conflicting requirements: workers={first.workers}, "
                    f"resources={first.resources}, and workers={node.workers}, "
                    f"resources={node.resources}. Make it once and use that object."
                )
    check_distinct(planned, "nodes")
    return tuple(planned.values())


def _nodes_of(group: TaskGroup) -> Iterable[Node]:
    """Each object that names a node in the group, once."""
    nodes: dict[int, Node] = {}
    for task in group.tasks():
        nodes[id(task.node)] = task.node
        for value in task.inputs:
            node = value.node if isinstance(value, Blob) else value.task.node
            if node is not None:
                nodes[id(node)] = node
    for node, _, _ in group.reports:
        nodes[id(node)] = node
    return nodes.values()
