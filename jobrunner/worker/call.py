"""One call of a task: its arguments, and where its return value goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import numpy as np

from jobrunner.errors import DefinitionError
from jobrunner.worker.program import Handover, InputMissing, Program, Step
from jobrunner.workspace import (
    IMMUTABLE,
    BlobUpdate,
    Form,
    Known,
    Workspace,
    freeze,
    is_own,
    own,
    settle,
    view,
    view_small,
)

Send = Callable[[int, Any], None]
"""Sends a crossing's frozen value, given the crossing's id, to other workers."""

_AWAITED = (CoroutineType, asyncio.Future, asyncio.Task)
_LAZY = (GeneratorType, *_AWAITED, AsyncGeneratorType, map, filter)
"""Types of values that run code of the task only when somebody takes their items, or awaits them."""


def gather(step: Step, instance: int = 0) -> list[Any]:
    """Collect the positional arguments of one call; raises `InputMissing` if a blob is missing.

    Instance 0 copies a blob to update if something else refers to it. The others share that blob.
    """
    arguments = []
    for values, key, is_updated in step.arguments:
        try:
            value = values[key]
        except KeyError:
            missing = step.workspace.not_found(str(key))
            missing.add_note(f"Task {step.workspace.node}/{step.name} reads it.")
            raise InputMissing(step.workspace.node, missing) from None
        if type(value) not in IMMUTABLE:
            workspace = step.workspace
            if not is_updated and type(value) is np.ndarray:
                value = view(value)
            elif not is_updated and (small := view_small(value)) is not None:
                value = small
            elif not is_updated:
                known = None
                if workspace.holds(values):
                    del value  # it would count as another reference
                    known = workspace.recollect(values, key)
                    value = values[key]
                value = view(value, known)
            elif instance == 0:
                del value  # it would count as another reference
                value = _own(workspace, values, key)
        arguments.append(value)
    return arguments


def _own(workspace: Workspace, values: dict[str, Any], name: str) -> Any:
    """Return a blob to update; copies what something else can reach."""
    workspace.updated.add(name)
    if name in workspace.known:
        known = workspace.recollect(values, name)
        workspace.known.pop(name, None)
        if known is not None and known.form is not Form.OTHER:
            return values[name]  # nothing else can reach it, and it holds no array
    if is_own(values, name, must_write=True):
        return values[name]
    return own(values, name, workspace.kept_states.array_pool.copy)


@contextmanager
def set_up(functions: Mapping[str, Callable[[], Any]]) -> Iterator[dict[str, Any]]:
    """Make arguments; at the end, let generators among the functions go on, the last one first."""
    with ExitStack() as stack:
        made = {}
        for name, fn in functions.items():
            made[name] = fn()
            if isinstance(generator := made[name], GeneratorType):
                for made[name] in generator:
                    break
                else:
                    raise RuntimeError(f"The function that sets up {name!r} yields no value.")
                stack.callback(_end, name, generator)
        yield made


def _end(name: str, generator: Generator[Any]) -> None:
    for _ in generator:
        raise RuntimeError(f"The function that sets up {name!r} yields more than one value.")


def finish(program: Program, step: Step, box: list[Any], arguments: list[Any], send: Send) -> None:
    """Store a task's return value and pass it on. Changes no blob if it raises.

    The value is the one item of `box`, and the caller has no other reference to it.

    Raises
    ------
    DefinitionError
        The value does not fit the task's outputs.
    TypeError
        Another node or task reads the value, and it cannot be copied.
    """
    parts: list[Any] = []
    known: list[Known | None] = []
    if type(box[0]) in _LAZY or step.num_instances > 1:
        _refuse_lazy(step, box[0] if step.num_instances > 1 else box)
    if type(box[0]) is BlobUpdate:
        if step.outputs:
            raise DefinitionError(
                f"Task {step.workspace.node}/{step.name} returned a BlobUpdate, and it has "
                f"outputs. A task that returns a BlobUpdate must not name outputs."
            )
        step.workspace.apply(box[0])
    elif step.sole is not None:
        values, name = step.sole
        its = None
        if not is_own(box, 0):
            its = settle(box, 0, lambda: (*arguments, *step.kwargs.values()))
        values[name] = box[0]
        step.workspace.remember(values, name, its)
        return
    elif step.outputs or step.captures or step.handovers:
        parts = _split(step, box) if len(step.outputs) > 1 else box
        known = []
        for i in range(len(parts)):

            def beside(i: int = i) -> Iterator[Any]:
                yield from (*arguments, *step.kwargs.values(), *parts[:i], *parts[i + 1 :])

            known.append(None if is_own(parts, i) else settle(parts, i, beside))
    if step.updates:
        _settle_updates(step, arguments)
    if not (parts or step.captures or step.handovers):
        return
    _capture(program, step, parts)
    # Values for other nodes are frozen before any blob is set.
    frozen = [_crossing_value(program, handover, step, parts) for handover in step.handovers]
    for target, value, its in zip(step.outputs, parts, known, strict=False):  # there may be none
        if target is not None:
            target[0][target[1]] = value
            step.workspace.remember(*target, its)
    for handover, value in zip(step.handovers, frozen, strict=True):
        _pass_on(program, handover, value, send)


def _settle_updates(step: Step, arguments: list[Any]) -> None:
    """Make the blobs that a task has updated their node's own; empties their places."""
    for i, _, _ in step.updates:
        arguments[i] = None
        if step.num_instances > 1:
            arguments[i :: len(step.arguments)] = [None] * step.num_instances
    for i, values, name in step.updates:
        known = None
        if not is_own(values, name):
            known = settle(values, name, partial(_others, step, arguments, i))
        step.workspace.remember(values, name, known)


def _others(step: Step, arguments: list[Any], but: int) -> list[Any]:
    """What a task had besides one of the blobs that it updated."""
    updated = [values[name] for i, values, name in step.updates if i != but]
    return [*arguments, *step.kwargs.values(), *updated]


def hand_over(program: Program, handover: Handover, send: Send) -> None:
    """Pass on a blob as it is before the group runs; may raise `InputMissing`."""
    crossing = handover.crossing
    if crossing.blob is not None and crossing.blob not in handover.blobs:
        missing = program.workspaces[crossing.source].not_found(crossing.blob)
        raise InputMissing(crossing.source, missing)
    _pass_on(program, handover, _crossing_value(program, handover, None, ()), send)


def _crossing_value(
    program: Program, handover: Handover, step: Step | None, parts: Sequence[Any]
) -> Any:
    """Freeze a crossing's value: a return value or a blob."""
    crossing = handover.crossing
    value = known = None
    if crossing.blob is not None:
        if step is not None and crossing.blob in step.output_names:
            value = parts[step.output_names.index(crossing.blob)]
        else:
            workspace = program.workspaces[crossing.source]
            known = workspace.recollect(handover.blobs, crossing.blob)
            value = handover.blobs[crossing.blob]
    elif crossing.part is not None:
        value = parts[crossing.part]
    return freeze(
        value,
        copy=crossing.copy or (crossing.is_reused and program.may_overlap),
        is_pickled=not handover.is_local,
        known=known,
    )


def _pass_on(program: Program, handover: Handover, frozen: Any, send: Send) -> None:
    if handover.is_local:
        program.arrived[handover.crossing.id] = frozen
    if program.routes[handover.crossing.id]:
        send(handover.crossing.id, frozen)


def _split(step: Step, box: list[Any]) -> list[Any]:
    """Split a return value over several outputs; empties `box`."""
    value = box[0]
    try:
        count = -1 if isinstance(value, str | bytes | dict | set) else len(value)
    except TypeError:
        count = -1
    if count != len(step.outputs):
        names = ", ".join(step.output_names)
        found = type(value).__qualname__ + (f" of length {count}" if count >= 0 else "")
        raise DefinitionError(
            f"Task {step.workspace.node}/{step.name} has {len(step.outputs)} outputs ({names}), "
            f"so it must return a sequence of that length; it returned {found}. Return a tuple, "
            f'or name one output, as in outputs=["w"], to store the whole value in it.'
        )
    _refuse_lazy(step, value)
    box.clear()
    return [value[i] for i in range(count)]


def _refuse_lazy(step: Step, values: Iterable[Any]) -> None:
    kind = next((type(value) for value in values if type(value) in _LAZY), None)
    if kind is not None:
        why = "runs only when somebody takes its items, and only once. Return a list or a tuple of them"
        if kind in _AWAITED:
            why = "nobody awaits. Call asyncio.run(...) in the task, and return its result"
        raise DefinitionError(
            f"Task {step.workspace.node}/{step.name} returned {kind.__qualname__}, which {why}."
        )


def _capture(program: Program, step: Step, parts: Sequence[Any]) -> None:
    """Freeze the parts of a return value that tasks or the client read."""
    for captured in step.captures:
        capture = captured.capture
        try:
            frozen = freeze(parts[capture.part], copy=capture.copy, move=captured.is_moved)
        except TypeError as error:
            if captured.is_read:
                raise
            frozen = TypeError(str(error))  # for the client's fetch
        if captured.is_read:
            program.results[step.index, capture.part] = frozen
        if capture.retain:
            retained = step.workspace.retained.setdefault(program.key, {})
            retained[step.name, capture.part] = frozen
