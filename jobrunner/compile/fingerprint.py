"""Describe a job by digests that are the same in every process and on every machine.

The *structure* of a job is its tasks with their groups, nodes, names, arguments, outputs and order.
Its *code* is digested apart, because a bug fix changes only that.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import platform
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

from jobrunner.compile.plan import Plan
from jobrunner.define import Task, TaskOutput, without_secrets
from jobrunner.positions import Position
from jobrunner.texts import clip, printable, show

_to_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode

_SETTINGS = {
    "job": "the job's name",
    "seed": "the seed",
    "steps_per_epoch": "steps_per_epoch",
    "seed_global_rng": "seed_global_rng",
}


def describe(plan: Plan) -> dict[str, Any]:
    """Describe a plan as JSON, for `changes`; ``nodes`` are the checkpointed ones."""
    return {
        "job": plan.job,
        "seed": plan.seed,
        "steps_per_epoch": plan.steps_per_epoch,
        # Digests of code can be compared within a minor version of Python.
        "python": ".".join(platform.python_version_tuple()[:2]),
        "nodes": {node: sorted(blobs) for node, blobs in plan.saved_blobs(Position(1)).items()},
        "seed_global_rng": plan.seed_global_rng,
        "parameters": dict(plan.parameters),
        "structure": dict(plan.structure),
        "code": dict(plan.code),
    }


# ---- what has changed


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the differences between the descriptions of two plans, each in a line.

    Both may be recorded, and lack fields.
    """
    lines = []
    for key, name in _SETTINGS.items():
        if before.get(key) != now.get(key):
            lines.append(f"{name} was {before.get(key)!r} and is {now.get(key)!r}")
    # A stranger's record may have secrets.
    old, new = (
        {name: without_secrets(name, value) for name, value in part.get("parameters", {}).items()}
        for part in (before, now)
    )
    for name in sorted({*new, *old}):
        if name not in old or name not in new or old[name] != new[name]:
            lines.append(
                f"parameter {name!r} was {_text_of(old, name)} and is {_text_of(new, name)}"
            )
    old, new = before.get("nodes", {}), now.get("nodes", {})
    lines += [f"node {node!r} is no longer saved" for node in old if node not in new]
    for node, blobs in new.items():
        if node not in old:
            lines.append(f"node {node!r} is newly saved")
            continue
        for blob in sorted({*old[node]} ^ {*blobs}):
            change = "new" if blob in blobs else "no longer saved"
            lines.append(f"blob {blob!r} of node {node!r} is {change}")
    lines += _changed_tasks(before, now)
    return [printable(line, kept="") for line in lines]


def _text_of(parameters: Mapping[str, Any], name: str) -> str:
    return clip(show(parameters[name]), 100) if name in parameters else "not given"


def _changed_tasks(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old, new = before.get("structure", {}), now.get("structure", {})
    yield from (f"task {name} is gone" for name in old if name not in new)
    yield from (f"task {name} is new" for name in new if name not in old)
    shared = [name for name in new if name in old]
    if [name for name in old if name in new] != shared:
        yield "the tasks are defined in another order"
    is_comparable = before.get("python") == now.get("python")
    for name in shared:
        if old[name] != new[name]:
            yield f"task {name} has other inputs, outputs or edges"
        if is_comparable and before.get("code", {}).get(name) != now.get("code", {}).get(name):
            yield f"task {name} has other code"


# ---- digests


def structure_of(task: Task, global_blobs: Collection[tuple[str, str]]) -> str:
    """Digest of one task's structure: 16 hexadecimal digits."""
    outputs = [(blob.name, blob.key in global_blobs) for blob in task.output_blobs]
    after = [
        task_after if isinstance(task_after, str) else task_after.full_name
        for task_after in task.after
    ]
    structure = [
        [_name_input(value) for value in task.inputs],
        [blob.name for blob in task.updates],
        outputs,
        task.places,
        sorted(task.kwargs),
        sorted([*task.setup, *task.instance_setup]),
        task.num_instances,
        task.every,
        sorted(after),
    ]
    return _digest(structure, 8)


def _name_input(value: Any) -> str:
    if isinstance(value, TaskOutput):
        group = value.task.group.name if value.task.group else ""
        return f"output {group}:{value.task.full_name}[{value.part}]"
    return f"blob {'/'.join(value.key)}"


def code_of(fn: Any) -> str:
    """Digest of a function's code: 16 hexadecimal digits.

    It covers nested functions, but not defaults; of a partial, its function and the functions among
    its arguments; of a decorated function, both functions; of another callable, the ``__call__`` of
    its class.
    """
    functions: list[Any] = []
    while isinstance(fn, functools.partial):
        arguments = (*fn.args, *fn.keywords.values())
        functions += filter(inspect.isfunction, arguments)
        fn = fn.func
    fn = getattr(fn, "__func__", fn)
    if inspect.isfunction(getattr(fn, "__wrapped__", None)):  # by a decorator
        functions.append(fn.__wrapped__)
    code = getattr(fn, "__code__", None)
    if code is None:
        code = getattr(vars(type(fn)).get("__call__"), "__code__", None)
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    parts = [name, None if code is None else _flatten(code), *map(code_of, functions)]
    return _digest(parts, 8)


def task_code(task: Task, code: str) -> str:
    """Digest of the code of a task, given that of its function."""
    functions = {**task.setup, **task.instance_setup}
    return _digest([code, *map(code_of, functions.values())], 8) if functions else code


def kind_of(tasks: Iterable[tuple[Task, str]]) -> str:
    """Digest of what a node does in each epoch, given its tasks there and the digests of their code."""
    described = [(task.name, code, task.every) for task, code in tasks]
    return _digest(described, 8) if described else ""


def _flatten(code: CodeType) -> list[Any]:
    constants: list[Any] = []
    for value in code.co_consts:
        if isinstance(value, CodeType):
            constants.append(_flatten(value))
        elif isinstance(value, frozenset):
            # The order of its repr depends on the hash seed of the process.
            constants.append(repr(sorted(map(repr, value))))
        else:
            constants.append(repr(value))
    return [code.co_code.hex(), list(code.co_names), list(code.co_varnames), constants]


def _digest(value: Any, size: int) -> str:
    return hashlib.blake2b(_to_json(value).encode(), digest_size=size).hexdigest()
