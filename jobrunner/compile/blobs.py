"""Which blobs of a job are global, transient, shared between nodes or updated in place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from jobrunner.define import ArrayOptions, Blob, Job, Task, WorkspaceType, without_partials
from jobrunner.errors import DefinitionError
from jobrunner.names import check_distinct
from jobrunner.texts import listed

Key = tuple[str, str]
"""Node and name of a blob: `Blob.key`."""

Names = Mapping[str, frozenset[str]]
"""Node -> names of blobs."""


def by_node(keys: Iterable[Key]) -> dict[str, frozenset[str]]:
    """Group blobs by their node."""
    found: dict[str, set[str]] = {}
    for node, name in keys:
        found.setdefault(node, set()).add(name)
    return {node: frozenset(names) for node, names in found.items()}


def keys_of(names: Names) -> set[Key]:
    """Undo `by_node`."""
    return {(node, blob) for node, blobs in names.items() for blob in blobs}


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


def find_globals(tasks: Collection[Task], *, is_init: bool = True) -> Collection[Key]:
    """The blobs that init tasks make, if `is_init`, and those that tasks marked GLOBAL make."""
    makers: dict[Key, Task] = {}
    private: dict[Key, Task] = {}
    for task in tasks:
        kind = task.blob_type
        if kind is None and is_init and task.group is not None and task.group.name == "init":
            kind = WorkspaceType.GLOBAL
        if kind is not None:
            found = makers if kind is WorkspaceType.GLOBAL else private
            for blob in task.output_blobs:
                found.setdefault(blob.key, task)
    if key := next((key for key in private if key in makers), None):
        raise DefinitionError(
            f"Blob {key[1]!r} is private in task {private[key].full_name!r} and global in task "
            f"{makers[key].full_name!r} of the same node. Rename one of the blobs."
        )
    # Many nodes have the same blobs: check them once.
    names = by_node(blob.key for task in tasks for blob in task.output_blobs)
    for blobs, node in {blobs: node for node, blobs in names.items()}.items():
        check_distinct(sorted(blobs), f"blobs of node {node!r}")
    return makers.keys()


def find_classes(tasks: Iterable[Task]) -> dict[Key, type]:
    """The blobs that will be objects of a class, since the last task that makes one calls the class.

    What functions return is not known: nothing checks their annotations. Nor is it of a class that
    chooses in `__new__` what to make.
    """
    found: dict[Key, type] = {}
    for task in tasks:
        fn = without_partials(task.fn)
        makes_one = isinstance(fn, type) and task.num_instances == len(task.output_blobs) == 1
        for blob in (*task.output_blobs, *task.updates):
            found.pop(blob.key, None)
            if makes_one and fn.__new__ is object.__new__ and type(fn).__call__ is type.__call__:
                found[blob.key] = fn  # type: ignore[assignment]
    return found


def find_configured(
    job: Job, checkpointed: Collection[str], global_blobs: Collection[Key]
) -> list[Blob]:
    """The outputs that declare how to save them; raises `DefinitionError` if one is not saved."""
    found = []
    for task in all_tasks(job):
        for blob in task.output_blobs:
            if not (blob.replicated or blob.partition is not None or blob.array_options):
                continue
            is_checkpointed = task.node.name in checkpointed
            if not is_checkpointed or blob.key not in global_blobs:
                raise DefinitionError(
                    f"Task {task.full_name!r} makes {blob!r} with checkpoint options, but the "
                    f"{'blob' if is_checkpointed else 'node'} is not checkpointed. Make the blob "
                    f"in the init group, on a checkpointed node."
                )
            found.append(blob)
    return found


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


def find_array_options(job: Job, configured: Iterable[Blob]) -> dict[str, dict[str, ArrayOptions]]:
    """The array options that the user chose: node -> blob -> options."""
    found: dict[str, dict[str, ArrayOptions]] = {}
    for blob in configured:
        if (options := blob.array_options) is not None:
            node, name = blob.key
            known = found.setdefault(node, {}).setdefault(name, options)
            if known != options:
                raise DefinitionError(
                    f"Job {job.name!r}: blob {name!r} of node {node!r} has two different array "
                    f"options, {known} and {options}. Declare them once."
                )
    for node, blobs in found.items():
        for name, options in blobs.items():
            for coordinate in options.coords:
                dims = blobs[coordinate].dims if coordinate in blobs else None
                if dims is None or not set(dims) <= set(options.dims or ()):
                    found_dims = "none" if dims is None else f"{dims}"
                    raise DefinitionError(
                        f"Job {job.name!r}: blob {name!r} of node {node!r} has coords={coordinate!r}: "
                        f"expected a blob of the same node with dims among {options.dims}, found "
                        f"dims {found_dims}. Declare them where a task makes {coordinate!r}."
                    )
    return found


def all_tasks(job: Job) -> list[Task]:
    """The tasks of all groups, in order of definition."""
    return [task for group in job.groups.values() for task in group.tasks()]
