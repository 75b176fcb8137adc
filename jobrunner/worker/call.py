"""One call of a task: its arguments, and where its return value goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from jobrunner.compile import is_due
from jobrunner.errors import DefinitionError
from jobrunner.worker.program import Handover, InputMissing, PreparedTask, Program
from jobrunner.workspace import IMMUTABLE, BlobUpdate, capture, read, settle, stored_in, take

Send = Callable[[int, Any], None]
"""Sends a crossing's captured value, given the crossing's id, to other workers."""

_AWAITED = (CoroutineType, asyncio.Future, asyncio.Task)
_LAZY = (GeneratorType, *_AWAITED, AsyncGeneratorType, map, filter)
"""Types of values that run code of the task only when somebody takes their items, or awaits them."""

_SPECIAL = frozenset({*_LAZY, BlobUpdate})


def gather(task: PreparedTask, instance: int = 0) -> list[Any]:
    """Collect the positional arguments of one call; raises `InputMissing` if a blob is missing.

    Instance 0 takes the blobs to update; all instances get the same ones.
    """
    arguments = []
    for slot in task.arguments:
        try:
            if not slot.is_updated:
                value = slot.values[slot.key]
                if type(value) not in IMMUTABLE:
                    value = read(slot.values, slot.key)
            elif instance == 0:
                slot.versions[slot.key] += 1
                value = take(slot.values, slot.key)
            else:
                value = slot.values[slot.key].box[0]
        except KeyError:
            missing = task.workspace.not_found(str(slot.key))
            missing.add_note(f"Task {task.workspace.node}/{task.name} reads it.")
            raise InputMissing(task.workspace.node, missing) from None
        arguments.append(value)
    return arguments


@contextmanager
def set_up(functions: Mapping[str, Callable[[], Any]]) -> Iterator[dict[str, Any]]:
    """Make arguments; at the end, let generators among the functions go on, the last one first."""
    with ExitStack() as stack:
        arguments = {}
        for name, fn in functions.items():
            arguments[name] = value = fn()
            if isinstance(value, GeneratorType):
                try:
                    arguments[name] = next(value)
                except StopIteration:
                    problem = f"The function that sets up {name!r} yields no value."
                    raise RuntimeError(problem) from None
                stack.callback(_end, name, value)
        yield arguments


def _end(name: str, generator: Generator[Any]) -> None:
    for _ in generator:
        raise RuntimeError(f"The function that sets up {name!r} yields more than one value.")


def finish(
    program: Program, task: PreparedTask, box: list[Any], arguments: list[Any], send: Send
) -> None:
    """Store a task's return value and pass it on. Sets no blob if it raises.

    The value is the one item of `box`, and the caller has no other reference to it. Empties
    `arguments` if some of them are updated.

    Raises
    ------
    DefinitionError
        The value does not fit the task's outputs.
    TypeError
        Another node or task reads the value, and it cannot be copied.
    """
    if task.updates:
        arguments.clear()  # they would count as references to what has been updated
    kind = type(box[0])
    if task.sole is not None and kind not in _SPECIAL:
        task.sole.put(settle(box))
        return
    if task.num_instances > 1:
        _refuse_lazy(task, box[0])
    elif kind in _LAZY:
        _refuse_lazy(task, box)
    parts: list[Any] = []
    if kind is BlobUpdate:
        _apply(task, box[0])
    elif task.outputs or task.captures or task.handovers:
        parts = box
        if len(task.outputs) > 1:
            parts = _split(task, box)
        for i in range(len(parts)):
            settle(parts, i)
    for slot in task.updates:
        settle(slot.values[slot.key].box)
    if task.puts_rows:
        _put_rows(task, parts)
    if task.captures:
        _capture(program, task, parts)
    # Values for other nodes are captured before any blob is set.
    crossing = [_crossing_value(program, task, parts, handover) for handover in task.handovers]
    for slot in task.updates:  # `gather` has raised their versions
        slot.values[slot.key] = slot.values[slot.key].box[0]
    for output, value in zip(task.outputs, parts, strict=False):  # a BlobUpdate leaves no parts
        if output is not None:
            output.put(value)
    for handover, value in zip(task.handovers, crossing, strict=True):
        _pass_on(program, handover, value, send)


def _apply(task: PreparedTask, update: BlobUpdate) -> None:
    if task.outputs:
        raise DefinitionError(
            f"Task {task.workspace.node}/{task.name} returned a BlobUpdate, and it has "
            f"outputs. A task that returns a BlobUpdate must not name outputs."
        )
    task.workspace.apply(update)


def _put_rows(task: PreparedTask, parts: list[Any]) -> None:
    """Let histories have what the task puts in them; raises DefinitionError for what is no row."""
    histories = task.workspace.histories
    where = f"Task {task.workspace.node}/{task.name}"
    for i, output in enumerate(task.outputs[: len(parts)]):
        if output is not None and output.key in histories:
            parts[i] = histories[output.key].put(parts[i], where)
    for slot in task.updates:
        if slot.key in histories:
            box = slot.values[slot.key].box
            box[0] = histories[slot.key].put(box[0], where)


def hand_over(
    program: Program, handovers: Iterable[Handover], send: Send, *, must_exist: bool
) -> None:
    """Pass on blobs as they are: before the group runs, or of a task that is not due.

    One that does not exist is an `InputMissing`, or has no reader: whoever needs the task to make it
    runs when it does.
    """
    for handover in handovers:
        crossing, captured = handover.crossing, None
        if crossing.blob is not None and is_due(crossing.every, program.step):
            if crossing.blob in handover.blobs:
                captured = capture(stored_in(handover.blobs, crossing.blob))
            elif must_exist:
                missing = program.workspaces[crossing.source].not_found(crossing.blob)
                raise InputMissing(crossing.source, missing)
        _pass_on(program, handover, captured, send)


def _crossing_value(
    program: Program, task: PreparedTask, parts: Sequence[Any], handover: Handover
) -> Any:
    """Capture what a task hands over: a part of its value, or a blob as the task leaves it."""
    crossing = handover.crossing
    if not is_due(crossing.every, program.step):
        return None
    if crossing.blob is None:
        if crossing.part is None:
            return None  # a mere signal
        return capture(parts[crossing.part])
    if parts and crossing.blob in task.output_names:
        return capture(parts[task.output_names.index(crossing.blob)])
    for slot in task.updates:
        if slot.key == crossing.blob:
            return capture(slot.values[slot.key].box[0])
    return capture(stored_in(handover.blobs, crossing.blob))


def _pass_on(program: Program, handover: Handover, captured: Any, send: Send) -> None:
    if handover.is_local:
        program.arrived[handover.crossing.id] = captured
    if program.routes[handover.crossing.id]:
        send(handover.crossing.id, captured)


def _split(task: PreparedTask, box: list[Any]) -> list[Any]:
    """Split a return value over several outputs; empties `box`."""
    value = box[0]
    count = -1  # it has no length, or no order
    if not isinstance(value, str | bytes | dict | set):
        with suppress(TypeError):
            count = len(value)
    description = type(value).__qualname__
    if count >= 0:
        description += f" of length {count}"
    if count != len(task.outputs):
        names = ", ".join(task.output_names)
        raise DefinitionError(
            f"Task {task.workspace.node}/{task.name} has {len(task.outputs)} outputs ({names}), "
            f"so it must return a sequence of that length; it returned {description}. Return a tuple, "
            f'or name one output, as in outputs=["w"], to store the whole value in it.'
        )
    _refuse_lazy(task, value)
    box.clear()
    return [value[i] for i in range(count)]


def _refuse_lazy(task: PreparedTask, values: Iterable[Any]) -> None:
    kind = next((type(value) for value in values if type(value) in _LAZY), None)
    if kind is not None:
        problem = "runs only when somebody takes its items, and only once. Return a list or a tuple of them"
        if kind in _AWAITED:
            problem = "nobody awaits. Call asyncio.run(...) in the task, and return its result"
        raise DefinitionError(
            f"Task {task.workspace.node}/{task.name} returned {kind.__qualname__}, which {problem}."
        )


def _capture(program: Program, task: PreparedTask, parts: Sequence[Any]) -> None:
    """Capture the parts of a return value that tasks or the client read."""
    for wanted in task.captures:
        part = wanted.part
        is_read = (task.index, part) in program.read_parts
        try:
            captured = capture(parts[part])
        except TypeError as error:
            if is_read:
                raise
            captured = TypeError(str(error))  # for the client's fetch
        if is_read:
            program.results[task.index, part] = captured
        if wanted.retain:
            retained = task.workspace.retained.setdefault(program.key, {})
            retained[task.name, part] = captured
