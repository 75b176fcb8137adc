"""Pipes: from a reader, through a function in threads, to a list or into blobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from jobrunner.define import (
    Blob,
    Count,
    Node,
    Rule,
    Task,
    TaskGroup,
    TaskOutput,
    as_node,
    check_call,
    checked,
    read_setup,
    without_partials,
)
from jobrunner.errors import DefinitionError
from jobrunner.pipes.drain import Options, drain, join

Reads = str | Blob | TaskOutput

_MOST_PARTS = 10_000
"""Of a pipe across nodes; each is two tasks."""


_NODES = Rule(
    "a list of at least one node",
    lambda value: isinstance(value, list | tuple) and len(value) > 0,
)


@checked
def pipe(
    reader: Annotated[
        str | Blob | Task | TaskOutput,
        "a blob that holds a reader (an init task makes it) or its name, or a Task or TaskOutput",
    ],
    processor: Callable[..., Any] | None = None,
    inputs: Reads | Sequence[Reads] = (),
    outputs: str | Blob | tuple[()] = (),
    *,
    into: Callable[..., Any] | None = None,
    updates: str | Blob | Sequence[str | Blob] = (),
    nodes: Annotated[Sequence[Node | str], _NODES] | None = None,
    num_threads: Count = 1,
    capacity: Count | None = None,
    ordered: bool = True,
    limit: Count | None = None,
    instance_setup: Mapping[str, Callable[[], Any]] | None = None,
    name: str | None = None,
    node: Node | str | None = None,
    **options: Any,
) -> Task:
    """Make a task that reads items, processes them in threads, and passes the results on in order.

    It reads from the reader's position to the end of the pass, or `limit` items. If the last pass
    has ended, it begins the next one. When the task ends, all that has been read is processed, so the
    position that a checkpoint saves is exact.

    Parameters
    ----------
    reader : str, Blob, Task or TaskOutput
        A blob that holds a reader of `jobrunner.data` or another iterator. A str names a blob of the
        task's own node. Of a task, such as another pipe, the list that it returns.
    processor : callable, optional
        Called as ``processor(item, *inputs)``, in threads: several calls at a time. Without it, the
        result is the item.
    inputs : str, Blob, TaskOutput, or a sequence of them
        What else `processor` gets, as the inputs of a `Task`. All calls of a run share them.
    outputs : str or Blob, optional
        The blob that takes the list of results.
    into : callable, optional
        Called as ``into(result, *updates)``, for one result at a time, while the threads process
        later items.
    updates : str, Blob, or a sequence of them
        Blobs that `into` changes in place.
    nodes : sequence of Node or str, optional
        Call `processor` and `into` on these nodes, in turn for some items each, with blobs of these
        nodes. By default only on the task's own node. Needs a `limit`, as does a reader on another
        node.
    num_threads : int
        How many threads call `processor`, on each node.
    capacity : int, optional
        How many items may be read whose results are not yet passed on; nothing more is read until
        one is. By default two for each thread.
    ordered : bool
        Pass the results on in the order of the items; else as they get ready. With several nodes,
        each passes on the results of its items in some order.
    limit : int, optional
        How many items one run of the group reads at most.
    instance_setup : mapping of str to callable, optional
        What to make for each thread, as of a `Task`: a parameter of `processor`, and a function that
        returns or yields its value. With several nodes, it is made again for the items of each part.
    name : str, optional
        By default that of `processor` or `into`.
    node : Node or str, optional
        By default `Node.current()`.
    **options
        Other arguments of `Task`: `group`, `after`, `workspace_type`, `transient_errors`.

    Returns
    -------
    Task
        It returns the list of what `into` returned, or else `processor`, for each item.

    Raises
    ------
    DefinitionError
        An argument is invalid.

    Notes
    -----
    ``current_task().instance`` is the number of the item in the run, so an item draws the same
    random numbers on any thread. In `into`, it is -1.

    An error in any of the functions or in the reader ends the group, as an error of a task does; a
    note in its traceback says for which item.

    Across nodes, a pipe is several tasks: ``NAME.read`` on the reader's node takes up to half of
    ``capacity / len(nodes)`` items, ``NAME.part`` on the next node processes them, and so on. Each
    reading waits until there is room. The last task, NAME, joins the results.
    """
    node = Node.current() if node is None else as_node(node, "pipe")
    called = without_partials(into if processor is None else processor)
    label = name or getattr(called, "__name__", "pipe").strip("<>")
    where = f"pipe {label!r}"
    read, updated = _listed(inputs), _listed(updates)
    setup = read_setup(instance_setup, f"{where}: instance_setup")
    if processor is not None:
        check_call(processor, 1 + len(read), setup, f"{where}: processor")
    elif read or setup:
        raise DefinitionError(f"{where}: inputs and instance_setup are for processor; got none.")
    if into is not None:
        check_call(into, 1 + len(updated), (), f"{where}: into")
    elif updated:
        raise DefinitionError(
            f"{where}: got updates={updates!r} without into. Give into=, which is called for one "
            f"result at a time; processor is called in several threads."
        )
    if wrong := options.keys() & {"num_instances", "setup"}:
        raise DefinitionError(f"{where}: {min(wrong)} is an argument of Task, not of pipe.")
    places = [node] if nodes is None else [as_node(each, f"{where}: nodes") for each in nodes]
    how = Options(
        num_inputs=len(read),
        num_threads=num_threads,
        capacity=capacity or 2 * num_threads * len(places),
        ordered=ordered,
        limit=limit,
    )
    call = partial(drain, processor=processor, into=into, instance_setup=setup)
    final = {**options, "name": name, "node": node, "outputs": outputs}
    if isinstance(reader, Task | TaskOutput):
        if nodes is not None:
            raise DefinitionError(f"{where}: with nodes, reader must be a blob; got {reader!r}.")
        fn = _named(label, call, options=how)
        return Task(fn, [*read, reader], updates=updated, **final)
    source = Blob(reader) if isinstance(reader, str) else reader
    source = source.on(source.node or node)
    if nodes is None and source.node == node:
        fn = _named(label, call, options=how._replace(blob=source.name))
        return Task(fn, read, updates=[source, *updated], **final)
    if limit is None:
        raise DefinitionError(
            f"{where}: it reads on node {source.key[0]!r} and processes on "
            f"{', '.join(repr(each.name) for each in places)}. Give limit=: how many items a run "
            f"of the group reads. Its tasks are fixed before it runs."
        )
    if options.get("group") is None:
        options["group"] = TaskGroup.current()  # `DefinitionError` outside of any: it is many tasks
    parts = _make_parts(label, call, how, source, places, read, updated, options)
    return Task(_named(label, join), parts, **{**final, "after": ()})


def _make_parts(
    label: str,
    call: partial[list[Any]],
    how: Options,
    source: Blob,
    nodes: Sequence[Node],
    read: Sequence[Any],
    updated: Sequence[Any],
    options: Mapping[str, Any],
) -> list[Task]:
    """The tasks of a pipe across nodes, except the last one."""
    limit = how.limit or 0
    size = max(1, how.capacity // (2 * len(nodes)))
    if limit > size * _MOST_PARTS:
        raise DefinitionError(
            f"pipe {label!r}: limit={limit} with capacity={how.capacity} on {len(nodes)} nodes makes "
            f"{-(-limit // size)} parts of {size} items; at most {_MOST_PARTS} are possible. Raise "
            f"capacity, or read less in a run and give the job more steps or epochs."
        )
    most = max(1, how.capacity // size)  # parts at a time
    take = partial(drain, processor=None, into=None, instance_setup={})
    parts: list[Task] = []
    for i, first in enumerate(range(0, limit, size)):
        after = options.get("after", ()) if i == 0 else parts[i - most] if i >= most else ()
        taken = Task(
            _named(
                f"{label}.read",
                take,
                options=Options(
                    limit=min(size, limit - first), first=first, begins=i == 0, blob=source.name
                ),
            ),
            (),
            updates=source,
            node=source.node,
            **{**options, "after": after},
        )
        fn = _named(f"{label}.part", call, options=how._replace(first=first, limit=None))
        place = nodes[i % len(nodes)]
        # `drain` gets what the reading has taken in place of the reader.
        parts.append(
            Task(fn, [*read, taken], updates=updated, node=place, **{**options, "after": ()})
        )
    return parts


def _named(name: str, fn: Callable[..., Any], **arguments: Any) -> Callable[..., Any]:
    named = partial(fn, **arguments)
    vars(named)["__name__"] = name
    return named


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [values]
