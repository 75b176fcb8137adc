"""Pipes: from a reader, through a function in threads, to a list or into blobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from jobrunner.define import (
    Blob,
    Count,
    Node,
    Task,
    TaskOutput,
    as_node,
    check_call,
    checked,
    read_setup,
    without_partials,
)
from jobrunner.errors import DefinitionError
from jobrunner.pipes.drain import Options, drain

Reads = str | Blob | TaskOutput


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
        A blob of the task's own node that holds a reader of `jobrunner.data` or another iterator; a
        str is its name. Of a task, such as another pipe, the list that it returns.
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
    num_threads : int
        How many threads call `processor`.
    capacity : int, optional
        How many items may be read whose results are not yet passed on; nothing more is read until
        one is. By default two for each thread.
    ordered : bool
        Pass the results on in the order of the items; else as they get ready.
    limit : int, optional
        How many items one run of the group reads at most.
    instance_setup : mapping of str to callable, optional
        What to make for each thread, as of a `Task`: a parameter of `processor`, and a function that
        returns or yields its value.
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

    The task's own thread reads, and calls `into`; other threads call `processor`.
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
    for wrong in ("num_instances", "setup"):
        if wrong in options:
            raise DefinitionError(f"{where}: {wrong} is an argument of Task, not of pipe.")
    source = None
    if isinstance(reader, str | Blob):
        source = Blob(reader) if isinstance(reader, str) else reader
        source = source.on(source.node or node)
        if source.node != node:
            raise DefinitionError(
                f"{where}: it runs on node {node.name!r}, and its reader is on {source.key[0]!r}. A "
                f"reader changes where it is: make the pipe there (node=), or a reader on each node "
                f"that processes, with sharded(i, n)."
            )
    call = partial(
        drain,
        processor=processor,
        into=into,
        instance_setup=setup,
        options=Options(
            num_inputs=len(read),
            num_threads=num_threads,
            capacity=capacity or 2 * num_threads,
            ordered=ordered,
            limit=limit,
            blob="" if source is None else source.name,
        ),
    )
    vars(call)["__name__"] = label
    return Task(
        call,
        read if source is not None else [*read, reader],
        outputs,
        updates=updated if source is None else [source, *updated],
        name=name,
        node=node,
        **options,
    )


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [values]
