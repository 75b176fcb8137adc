"""2 compile: which blobs of a job outlast their group, and what becomes of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jobrunner.compile.group import Names, is_in
from jobrunner.define import ArrayOptions, Blob, Job, Task, WorkspaceType
from jobrunner.errors import DefinitionError
from jobrunner.names import check_distinct


def checkpointed_nodes(job: Job) -> tuple[str, ...]:
    """The nodes whose global blobs are saved."""
    used = {node for group in job.groups.values() for node in group.used_nodes()}
    for node in job.nodes_to_checkpoint():
        if node not in used:
            raise DefinitionError(
                f"Job {job.name!r}: nodes_to_checkpoint names {node.name!r}, which no task uses. "
                f"Its nodes: {', '.join(sorted(repr(node.name) for node in used)) or 'none'}."
            )
    return tuple(node.name for node in job.nodes_to_checkpoint())


def find_globals(tasks: Iterable[Task], *, is_init: bool = True) -> dict[str, frozenset[str]]:
    """The blobs that are global: made by an init task, or by one marked GLOBAL.

    `is_init` False: the tasks are of no job, and only the mark counts.
    """
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
                    f"Task {task.full_name!r} makes blob {blob.name!r} as PRIVATE, and task "
                    f"{maker.full_name!r} makes it as a global blob of the same node. Give one of "
                    f"the blobs another name."
                )
    checked: set[tuple[str, ...]] = set()  # many nodes have the same blobs
    for node, blobs in every.items():
        names = tuple(blobs)
        if names not in checked:
            check_distinct(names, f"blobs of node {node!r}")
            checked.add(names)
    found: dict[str, set[str]] = {}
    for node, name in makers:
        found.setdefault(node, set()).add(name)
    return _frozen(found)


def find_transient(job: Job) -> dict[str, frozenset[str]]:
    """The blobs that are made anew instead of saved."""
    found: dict[str, set[str]] = {}
    for group in job.groups.values():
        for task in group.tasks():
            for blob in task.output_blobs:
                if blob.transient:
                    found.setdefault(task.node.name, set()).add(blob.name)
    return _frozen(found)


def find_shared(
    job: Job, checkpointed: Sequence[str], global_blobs: Names
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[int, tuple[str, ...]]]]:
    """The replicated blobs with their nodes, and the partitioned ones with axis and nodes."""
    nodes: dict[tuple[str, int | None], dict[str, None]] = {}
    for group in job.groups.values():
        for task in group.tasks():
            for blob in task.output_blobs:
                if not blob.replicated and blob.partition is None:
                    continue
                node = task.node.name
                if node not in checkpointed or not is_in(global_blobs, node, blob.name):
                    raise _not_saved(task, blob, node in checkpointed)
                nodes.setdefault((blob.name, blob.partition), {})[node] = None
    replicated: dict[str, tuple[str, ...]] = {}
    partitions: dict[str, tuple[int, tuple[str, ...]]] = {}
    for (name, axis), members in nodes.items():
        if name in replicated or name in partitions:
            raise DefinitionError(
                f"Job {job.name!r}: blob {name!r} is declared in two ways, as replicated or as "
                f"parts along one axis or another. Declare it in one way on all nodes."
            )
        if axis is None:
            replicated[name] = tuple(members)
        else:
            partitions[name] = (axis, tuple(members))
    return replicated, partitions


def find_updated(job: Job) -> set[tuple[str, str]]:
    """The blobs that any task of the job updates in place, with their nodes."""
    return {
        (task.node.name, blob.name)
        for group in job.groups.values()
        for task in group.tasks()
        for blob in task.updates
    }


def find_array_options(
    job: Job, checkpointed: Sequence[str], global_blobs: Names
) -> dict[str, dict[str, ArrayOptions]]:
    """How blobs are stored, where that is said: node -> blob -> how."""
    found: dict[str, dict[str, ArrayOptions]] = {}
    for group in job.groups.values():
        for task in group.tasks():
            for blob in task.output_blobs:
                if blob.array_options is None:
                    continue
                node = task.node.name
                if node not in checkpointed or not is_in(global_blobs, node, blob.name):
                    raise _not_saved(task, blob, node in checkpointed)
                known = found.setdefault(node, {}).setdefault(blob.name, blob.array_options)
                if known != blob.array_options:
                    raise DefinitionError(
                        f"Job {job.name!r}: how blob {blob.name!r} of node {node!r} is stored is "
                        f"said in two ways, {known} and {blob.array_options}. Say it once."
                    )
    return found


def _not_saved(task: Task, blob: Blob, is_checkpointed: bool) -> DefinitionError:
    return DefinitionError(
        f"Task {task.full_name!r} makes {blob!r}, which says how it is saved; but it is not: "
        f"{'the blob' if is_checkpointed else 'the node'} is not checkpointed. Make it in the init "
        f"group of a checkpointed node."
    )


def made_by(tasks: Iterable[Task], global_blobs: Names) -> dict[str, frozenset[str]]:
    """The global blobs that some tasks make."""
    found: dict[str, set[str]] = {}
    for task in tasks:
        node = task.node.name
        lasting = global_blobs.get(node, ())
        for blob in task.output_blobs:
            if blob.name in lasting:
                found.setdefault(node, set()).add(blob.name)
    return _frozen(found)


def _frozen(names: Mapping[str, set[str]]) -> dict[str, frozenset[str]]:
    return {node: frozenset(its) for node, its in names.items()}
