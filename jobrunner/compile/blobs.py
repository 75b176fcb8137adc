"""Which blobs of a job are global, transient, shared between nodes or updated in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jobrunner.compile.group import Names, is_in
from jobrunner.define import ArrayOptions, Blob, Job, Task, WorkspaceType
from jobrunner.errors import DefinitionError
from jobrunner.names import check_distinct


def checkpointed_nodes(job: Job) -> tuple[str, ...]:
    """The nodes whose global blobs are saved."""
    used = {node for group in job.groups.values() for node in group.used_nodes()}
    nodes = job.nodes_to_checkpoint()
    for node in nodes:
        if node not in used:
            raise DefinitionError(
                f"Job {job.name!r}: nodes_to_checkpoint names {node.name!r}, which no task uses. "
                f"Its nodes: {', '.join(sorted(repr(node.name) for node in used)) or 'none'}."
            )
    return tuple(node.name for node in nodes)


def find_globals(tasks: Iterable[Task], *, is_init: bool = True) -> dict[str, frozenset[str]]:
    """The blobs that init tasks make, if `is_init`, and those that tasks marked GLOBAL make."""
    makers: dict[tuple[str, str], Task] = {}
    tasks = list(tasks)
    for task in tasks:
        kind = task.blob_type
        in_init = is_init and task.group is not None and task.group.name == "init"
        if kind is WorkspaceType.GLOBAL or (kind is None and in_init):
            for blob in task.output_blobs:
                makers.setdefault((task.node.name, blob.name), task)
    every: dict[str, dict[str, None]] = {}
    for task in tasks:
        is_private = task.blob_type is WorkspaceType.PRIVATE
        for blob in task.output_blobs:
            every.setdefault(task.node.name, {})[blob.name] = None
            maker = makers.get((task.node.name, blob.name)) if is_private else None
            if maker is not None:
                raise DefinitionError(
                    f"Blob {blob.name!r} is private in task {task.full_name!r} and global in task "
                    f"{maker.full_name!r} of the same node. Rename one of the blobs."
                )
    # Many nodes have the same blobs: check them once.
    for names, node in {tuple(blobs): node for node, blobs in every.items()}.items():
        check_distinct(names, f"blobs of node {node!r}")
    return _collect(makers)


def find_transient(job: Job) -> dict[str, frozenset[str]]:
    """The blobs that are not saved but made again at a resume."""
    return _collect((task.node.name, blob.name) for task, blob in _outputs(job) if blob.transient)


def find_shared(
    job: Job, checkpointed: Sequence[str], global_blobs: Names
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[int, tuple[str, ...]]]]:
    """The replicated blobs with their nodes, and the partitioned ones with axis and nodes."""
    nodes: dict[tuple[str, int | None], dict[str, None]] = {}
    for task, blob in _outputs(job):
        if blob.replicated or blob.partition is not None:
            _check_saved(task, blob, checkpointed, global_blobs)
            nodes.setdefault((blob.name, blob.partition), {})[task.node.name] = None
    replicated: dict[str, tuple[str, ...]] = {}
    partitions: dict[str, tuple[int, tuple[str, ...]]] = {}
    for (name, axis), members in nodes.items():
        if name in replicated or name in partitions:
            raise DefinitionError(
                f"Job {job.name!r}: blob {name!r} is both replicated and partitioned, or partitioned "
                f"along different axes. Declare it the same way on all nodes."
            )
        if axis is None:
            replicated[name] = tuple(members)
        else:
            partitions[name] = (axis, tuple(members))
    return replicated, partitions


def find_updated(tasks: Iterable[Task]) -> set[tuple[str, str]]:
    """The blobs that these tasks update in place, as (node, blob)."""
    return {(task.node.name, blob.name) for task in tasks for blob in task.updates}


def find_array_options(
    job: Job, checkpointed: Sequence[str], global_blobs: Names
) -> dict[str, dict[str, ArrayOptions]]:
    """The array options that the user chose: node -> blob -> options."""
    found: dict[str, dict[str, ArrayOptions]] = {}
    for task, blob in _outputs(job):
        if blob.array_options is None:
            continue
        _check_saved(task, blob, checkpointed, global_blobs)
        node = task.node.name
        known = found.setdefault(node, {}).setdefault(blob.name, blob.array_options)
        if known != blob.array_options:
            raise DefinitionError(
                f"Job {job.name!r}: blob {blob.name!r} of node {node!r} has two different array "
                f"options, {known} and {blob.array_options}. Declare them once."
            )
    return found


def made_by(tasks: Iterable[Task], global_blobs: Names) -> dict[str, frozenset[str]]:
    """The global blobs that these tasks make."""
    return _collect(
        (task.node.name, blob.name)
        for task in tasks
        for blob in task.output_blobs
        if is_in(global_blobs, task.node.name, blob.name)
    )


def all_tasks(job: Job) -> list[Task]:
    """The tasks of all groups, in order of definition."""
    return [task for group in job.groups.values() for task in group.tasks()]


def _outputs(job: Job) -> Iterator[tuple[Task, Blob]]:
    return ((task, blob) for task in all_tasks(job) for blob in task.output_blobs)


def _check_saved(task: Task, blob: Blob, checkpointed: Sequence[str], global_blobs: Names) -> None:
    is_checkpointed = task.node.name in checkpointed
    if not is_checkpointed or not is_in(global_blobs, task.node.name, blob.name):
        raise DefinitionError(
            f"Task {task.full_name!r} makes {blob!r} with checkpoint options, but the "
            f"{'blob' if is_checkpointed else 'node'} is not checkpointed. Make the blob in the "
            f"init group, on a checkpointed node."
        )


def _collect(blobs: Iterable[tuple[str, str]]) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for node, name in blobs:
        found.setdefault(node, set()).add(name)
    return {node: frozenset(names) for node, names in found.items()}
