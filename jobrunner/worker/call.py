"""4 run: what one call of a task is given, and where what it returns goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jobrunner.errors import BlobNotFoundError, DefinitionError
from jobrunner.worker.program import Handover, Program, Step
from jobrunner.workspace import IMMUTABLE, BlobUpdate, adopt, freeze, own, view

Send = Callable[[int, Any], None]
"""Takes a crossing's id and its frozen value, for targets on other workers."""


class InputMissing(Exception):  # noqa: N818  (carries an error, is none of its own)
    """A task could not be called, for want of a blob."""

    def __init__(self, reason: BlobNotFoundError) -> None:
        super().__init__(reason)
        self.reason = reason


def gather(step: Step, instance: int = 0) -> list[Any]:
    """The positional arguments of one call.

    Parameters
    ----------
    step : Step
    instance : int
        What a task updates is made its own for the first; the others share it.

    Raises
    ------
    InputMissing
        A blob is not there.
    """
    arguments = []
    for values, key, is_itself in step.arguments:
        try:
            value = values[key]
        except KeyError:
            missing = step.workspace.not_found(str(key))
            missing.add_note(f"Task {step.workspace.node}/{step.name} reads it.")
            raise InputMissing(missing) from None
        if type(value) not in IMMUTABLE:
            if not is_itself:
                value = view(value)
            elif instance == 0:
                del value  # or it would count as another reference
                step.workspace.updated.add(key)
                value = own(values, key, step.workspace.kept_states.array_pool.copy)
        arguments.append(value)
    return arguments


def finish(program: Program, step: Step, box: list[Any], arguments: list[Any], send: Send) -> None:
    """Put what a task returned where it belongs.

    Parameters
    ----------
    program : Program
    step : Step
    box : list
        Its one item is the value, and nothing else refers to it.
    arguments : list
        What the task was called with.
    send : callable

    Raises
    ------
    DefinitionError
        What it returned does not fit its outputs; no blob was changed.
    TypeError
        Another node or task reads it, and it can't be copied; no blob was changed.
    """
    frozen = None  # what goes to other nodes; taken before any blob is set
    if type(box[0]) is BlobUpdate:
        if step.outputs:
            raise DefinitionError(
                f"Task {step.workspace.node}/{step.name} returns a BlobUpdate and has outputs "
                f"too. A task that returns one names no outputs."
            )
        step.workspace.apply(box[0])
    elif len(step.outputs) == 1:
        value = box[0]
        if type(value) not in IMMUTABLE:
            del value  # or it would count as another reference
            value = adopt(box, (*arguments, *step.kwargs.values()))
        target = step.outputs[0]
        if step.keeps or step.handovers:
            box[0] = (value,)
            _keep(program, step, box[0])
            frozen = [_take(program, handover, step, box[0]) for handover in step.handovers]
        if target is not None:
            target[0][target[1]] = value
    elif step.outputs:
        box[0] = parts = _split(step, box, (*arguments, *step.kwargs.values()))
        _keep(program, step, parts)
        frozen = [_take(program, handover, step, parts) for handover in step.handovers]
        for target, value in zip(step.outputs, parts, strict=True):
            if target is not None:
                target[0][target[1]] = value
    elif step.keeps or step.handovers:
        box[0] = (adopt(box, (*arguments, *step.kwargs.values())),)
        _keep(program, step, box[0])
    if frozen is None:
        frozen = [_take(program, handover, step, box[0]) for handover in step.handovers]
    for handover, value in zip(step.handovers, frozen, strict=True):
        _pass_on(program, handover, value, send)


def hand_over(program: Program, handover: Handover, send: Send) -> None:
    """Take a crossing's value from before the group, and pass it on."""
    _pass_on(program, handover, _take(program, handover, None, ()), send)


def _take(program: Program, handover: Handover, step: Step | None, parts: tuple[Any, ...]) -> Any:
    """A crossing's value, frozen: what the task returned, or a blob that it left or updated."""
    crossing = handover.crossing
    value = None
    if crossing.blob is not None:
        if step is not None and crossing.blob in step.output_names:
            value = parts[step.output_names.index(crossing.blob)]
        else:
            value = handover.blobs[crossing.blob]
    elif crossing.part is not None:
        value = parts[crossing.part]
    copy = crossing.copy or (crossing.is_reused and program.keeps_running)
    return freeze(value, copy=copy)


def _pass_on(program: Program, handover: Handover, frozen: Any, send: Send) -> None:
    if handover.is_local:
        program.arrived[handover.crossing.id] = frozen
    if handover.is_remote:
        send(handover.crossing.id, frozen)


def _split(step: Step, box: list[Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The parts of a return value for several outputs."""
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
            f'or name one output, as in outputs=["w"], to keep the whole value in it.'
        )
    if type(value) in (list, tuple):
        del value  # or it would count as another reference to the items
        return tuple(adopt(box, arguments))
    return tuple(adopt([value[i]], arguments) for i in range(count))


def _keep(program: Program, step: Step, parts: tuple[Any, ...]) -> None:
    for keep in step.keeps:
        try:
            frozen = freeze(parts[keep.part], copy=keep.copy, move=keep.is_moved)
        except TypeError as error:
            if keep.is_read:
                raise
            frozen = TypeError(str(error))  # only a fetch would miss it
        if keep.is_read:
            program.results[keep.key] = frozen
        if keep.retain:
            retained = step.workspace.retained.setdefault(program.key, {})
            retained[step.name, keep.part] = frozen
