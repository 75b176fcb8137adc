"""Pipes: from a reader, through a function in threads, to a list or into blobs."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
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
    without_partials,
)
from jobrunner.errors import DefinitionError
from jobrunner.worker import cancellation, renumber, seeded

Reads = str | Blob | TaskOutput


@checked
def pipe(
    reader: Annotated[str | Blob, "a blob that holds a reader (an init task makes it) or its name"],
    processor: Callable[..., Any] | None = None,
    inputs: Reads | Sequence[Reads] = (),
    outputs: str | Blob | tuple[()] = (),
    *,
    into: Callable[..., Any] | None = None,
    updates: str | Blob | Sequence[str | Blob] = (),
    num_threads: Count = 1,
    limit: Count | None = None,
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
    reader : str or Blob
        A blob of the task's own node that holds a reader of `jobrunner.data` or another iterator; a
        str is its name.
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
        How many threads call `processor`. Twice as many items are in memory at most.
    limit : int, optional
        How many items one run of the group reads at most.
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
    if processor is not None:
        check_call(processor, 1 + len(read), (), f"{where}: processor")
    elif read:
        raise DefinitionError(f"{where}: inputs are for processor; got none.")
    if into is not None:
        check_call(into, 1 + len(updated), (), f"{where}: into")
    elif updated:
        raise DefinitionError(
            f"{where}: got updates={updates!r} without into. Give into=, which is called for one "
            f"result at a time; processor is called in several threads."
        )
    for wrong in ("num_instances", "setup", "instance_setup"):
        if wrong in options:
            raise DefinitionError(f"{where}: {wrong} is an argument of Task, not of pipe.")
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
        num_inputs=len(read),
        num_threads=num_threads,
        limit=limit,
        blob=source.name,
    )
    vars(call)["__name__"] = label
    return Task(call, read, outputs, updates=[source, *updated], name=name, node=node, **options)


def _listed(values: Any) -> list[Any]:
    if isinstance(values, list | tuple):
        return list(values)
    return [values]


def drain(
    *arguments: Any,
    processor: Callable[..., Any] | None,
    into: Callable[..., Any] | None,
    num_inputs: int,
    num_threads: int,
    limit: int | None,
    blob: str,
) -> list[Any]:
    """Read items, process them and pass them on; return what the last function returned.

    This is what a pipe's task does on its worker. The first arguments are the inputs; the reader
    follows, and then the updates.
    """
    inputs, reader = arguments[:num_inputs], arguments[num_inputs]
    updates = arguments[num_inputs + 1 :]
    if not (hasattr(reader, "__iter__") and hasattr(reader, "__next__")):
        raise TypeError(
            f"the pipe reads from blob {blob!r}, which is {type(reader).__qualname__}. Expected a "
            f"reader of jobrunner.data or another iterator that can be saved: without a position, "
            f"each run would read all of it again. Make from_records(x) of a list or an array x, "
            f"from_iterable(f) of a function f that returns a generator."
        )

    def process(number: int, item: Any) -> Any:
        if processor is None:
            return item
        renumber(number)
        return processor(item, *inputs)

    renumber(-1)
    is_cancelled = cancellation()
    items = islice(iter(reader), limit)
    has_ended = False
    waiting: deque[Future[Any]] = deque()
    results: list[Any] = []
    pool = ThreadPoolExecutor(num_threads, f"{threading.current_thread().name}-pipe")
    try:
        while not is_cancelled() and (waiting or not has_ended):
            if len(waiting) == 2 * num_threads or has_ended:
                number = len(results)
                result = waiting.popleft().result()
                if into is not None:
                    result = into(result, *updates)
                results.append(result)
                continue
            number = len(results) + len(waiting)
            try:
                item = next(items)
            except StopIteration:
                has_ended = True
                continue
            # In a copy of the context, so that the thread is a part of the pipe's task.
            run = contextvars.copy_context().run
            waiting.append(pool.submit(run, process, number, item))
    except BaseException as error:
        error.add_note(f"In item {number} of this run, counted from 0.")
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return results


def _seed_within(call: partial[list[Any]]) -> partial[list[Any]]:
    """Seed each call of the functions that `drain` is to call, not the whole run of the pipe."""
    functions = {}
    for name in ("processor", "into"):
        if call.keywords[name] is not None:
            functions[name] = seeded(call.keywords[name])
    return partial(call, **functions)


drain.seeded_within = _seed_within  # type: ignore[attr-defined]
