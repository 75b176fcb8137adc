"""Which blobs of a job are global, shared between nodes, or saved in a way of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from jobrunner.define import ArrayOptions, Blob, Job, Task, WorkspaceType
from jobrunner.errors import DefinitionError
from jobrunner.names import BlobKey, check_distinct
from jobrunner.texts import listed

BlobNames = Mapping[str, frozenset[str]]
"""Node -> names of blobs."""


def by_node(keys: Iterable[BlobKey]) -> dict[str, frozenset[str]]:
    """Group blobs by their node."""
    names: dict[str, set[str]] = {}
    for node, name in keys:
        names.setdefault(node, set()).add(name)
    return {node: frozenset(blobs) for node, blobs in names.items()}


def keys_of(names: BlobNames) -> set[BlobKey]:
    """Undo `by_node`."""
    return {(node, blob) for node, blobs in names.items() for blob in blobs}


def all_tasks(job: Job) -> list[Task]:
    """The tasks of all groups, in order of definition."""
    return [task for group in job.groups.values() for task in group.tasks()]


def checkpointed_nodes(job: Job) -> tuple[str, ...]:
    """The nodes whose global blobs are saved."""
    used = {node for group in job.groups.values() for node in group.used_nodes()}
    nodes = job.nodes_to_checkpoint()
    for node in nodes:
        if node not in used:
            raise DefinitionError(
                f"Job {job.name!r}: nodes_to_checkpoint names {node.name!r}, which no task uses. "
                f"Its nodes: {listed(sorted(repr(node.name) for node in used))}."
            )
    return tuple(node.name for node in nodes)


def find_globals(tasks: Collection[Task]) -> Collection[BlobKey]:
    """The blobs that init tasks make, those that tasks marked GLOBAL make, and histories."""
    makers: dict[BlobKey, Task] = {}
    private_makers: dict[BlobKey, Task] = {}
    for task in tasks:
        kind = task.blob_type
        if kind is None and task.group is not None and task.group.name == "init":
            kind = WorkspaceType.GLOBAL
        for blob in task.output_blobs:
            if kind is WorkspaceType.GLOBAL or (kind is None and blob.history):
                makers.setdefault(blob.key, task)
            elif kind is not None:
                private_makers.setdefault(blob.key, task)
    for key in private_makers.keys() & makers.keys():
        raise DefinitionError(
            f"Blob {key[1]!r} is private in task {private_makers[key].full_name!r} and global in task "
            f"{makers[key].full_name!r} of the same node. Rename one of the blobs."
        )
    # Many nodes have the same blobs: check them once.
    names = by_node(blob.key for task in tasks for blob in task.output_blobs)
    for blobs, node in {blobs: node for node, blobs in names.items()}.items():
        check_distinct(sorted(blobs), f"blobs of node {node!r}")
    return makers.keys()


def find_configured(
    job: Job, checkpointed: Collection[str], global_blobs: Collection[BlobKey]
) -> list[Blob]:
    """The outputs that declare how to save them; raises `DefinitionError` if one is not saved."""
    configured = []
    for task in all_tasks(job):
        for blob in task.output_blobs:
            is_shared = blob.replicated or blob.partition is not None
            if not (is_shared or blob.history or blob.array_options):
                continue
            is_checkpointed = task.node.name in checkpointed
            if not is_checkpointed or blob.key not in global_blobs:
                raise DefinitionError(
                    f"Task {task.full_name!r} makes {blob!r} with checkpoint options, but the "
                    f"{'blob' if is_checkpointed else 'node'} is not checkpointed. Make the blob "
                    f"in the init group, on a checkpointed node."
                )
            configured.append(blob)
    return configured


def find_shared(
    job: Job, configured: Iterable[Blob]
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[int, tuple[str, ...]]]]:
    """The replicated blobs with their nodes, and the partitioned ones with axis and nodes."""
    nodes: dict[tuple[str, int | None], dict[str, None]] = {}
    for blob in configured:
        if blob.replicated or blob.partition is not None:
            nodes.setdefault((blob.name, blob.partition), {})[blob.key[0]] = None
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


def find_histories(job: Job, configured: Iterable[Blob]) -> dict[str, dict[str, bool]]:
    """Node -> the blobs that are histories -> whether a value is rows, not one row."""
    declared = {blob.key: blob for blob in configured if blob.history}
    if not declared:
        return {}
    histories: dict[str, dict[str, bool]] = {}
    for task in all_tasks(job):
        for blob in task.output_blobs:
            history = declared.get(blob.key)
            if history is None:
                continue
            is_plain = (blob.transient, blob.replicated, blob.partition) == (False, False, None)
            if not is_plain or blob.history not in (False, history.history):
                raise DefinitionError(
                    f"Job {job.name!r}: blob {blob.name!r} of node {blob.key[0]!r} is declared as "
                    f"{history!r} and as {blob!r}. Declare it the same way in all tasks."
                )
            node, name = blob.key
            histories.setdefault(node, {})[name] = history.history == "extend"
    return histories


def find_array_options(job: Job, configured: Iterable[Blob]) -> dict[str, dict[str, ArrayOptions]]:
    """The array options that the user chose: node -> blob -> options."""
    chosen: dict[str, dict[str, ArrayOptions]] = {}
    for blob in configured:
        if blob.array_options is None:
            continue
        node, name = blob.key
        first = chosen.setdefault(node, {}).setdefault(name, blob.array_options)
        if first != blob.array_options:
            raise DefinitionError(
                f"Job {job.name!r}: blob {name!r} of node {node!r} has two different array "
                f"options, {first} and {blob.array_options}. Declare them once."
            )
    for node, blobs in chosen.items():
        for name, options in blobs.items():
            for coordinate in options.coords:
                dims = blobs[coordinate].dims if coordinate in blobs else None
                if dims is None or not set(dims) <= set(options.dims or ()):
                    raise DefinitionError(
                        f"Job {job.name!r}: blob {name!r} of node {node!r} has coords={coordinate!r}: "
                        f"expected a blob of the same node with dims among {options.dims}, found "
                        f"dims {'none' if dims is None else dims}. Declare them where a task makes "
                        f"{coordinate!r}."
                    )
    return chosen
