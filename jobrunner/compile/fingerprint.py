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
from contextlib import suppress
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

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
    old, new = _parameters_of(before), _parameters_of(now)
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


def _parameters_of(described: Mapping[str, Any]) -> dict[str, Any]:
    parameters = described.get("parameters", {})
    # A stranger's record may have secrets.
    return {name: without_secrets(name, value) for name, value in parameters.items()}


def _text_of(parameters: Mapping[str, Any], name: str) -> str:
    if name not in parameters:
        return "not given"
    return clip(show(parameters[name]), 100)


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
    after = [str(getattr(earlier, "full_name", earlier)) for earlier in task.after]
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


class CodeDigests:
    """Digests of the code of a job's tasks. What many of them use is looked at once."""

    def __init__(self) -> None:
        # By identity, which is theirs alone as long as they are kept here.
        self._parts: dict[int, _Part] = {}
        self._functions: dict[int, str] = {}

    def of_task(self, task: Task) -> str:
        """Digest of the code of a task's functions: 16 hexadecimal digits."""
        functions = [task.fn, *task.setup.values(), *task.instance_setup.values()]
        return _digest([self.of_function(fn) for fn in functions], 8)

    def of_function(self, fn: Any) -> str:
        """Digest of a function's code: 16 hexadecimal digits.

        It covers nested functions, the functions and classes of the function's own module that its
        code names, and what these name, but neither defaults nor other modules. Of a partial, such as
        a pipe's, it covers also what can be called among its arguments; of a decorated function, both
        functions; of a method or another callable, its class.
        """
        if id(fn) in self._functions:
            return self._functions[id(fn)]
        covered: dict[int, str] = {}
        pending = [fn]
        while pending:
            value = pending.pop()
            if id(value) not in covered:
                part = self._look_at(value)
                covered[id(value)] = part.digest
                pending += part.used
        digest = self._functions[id(fn)] = _digest(list(covered.values()), 8)
        return digest

    def _look_at(self, value: Any) -> _Part:
        if id(value) not in self._parts:
            code: list[Any] = []
            if isinstance(value, FunctionType):
                code = _flatten(value.__code__)
            name = getattr(value, "__qualname__", "")
            if not isinstance(name, str):  # of an object that has an answer for every attribute
                name = ""
            digest = _digest([name, code], 8)
            self._parts[id(value)] = _Part(value, digest, _used_by(value))
        return self._parts[id(value)]


class _Part(NamedTuple):
    """A function, a class or another callable."""

    value: Any
    digest: str  # of its own code
    used: list[Any]


def _used_by(value: Any) -> list[Any]:
    """What else the code of a function, a class or another callable covers."""
    if isinstance(value, functools.partial):
        return [value.func, *filter(callable, (*value.args, *value.keywords.values()))]
    if isinstance(value, MethodType):
        owner = value.__self__  # of a class method, the class itself
        return [value.__func__, owner if isinstance(owner, type) else type(owner)]
    if isinstance(value, type):
        return _of_module(value.__module__, [*_members(value), *value.__bases__])
    used = [type(value)]
    if isinstance(value, FunctionType):
        used = []
        # A decorator of another module says that its function is of the module of what it wraps.
        if value.__globals__.get("__name__") == value.__module__:
            used = _of_module(value.__module__, _named_by(value))
    return [*used, *_of_wrapped(value)]


def _members(owner: type) -> Iterator[Any]:
    for _, member in sorted(vars(owner).items()):
        if isinstance(member, staticmethod | classmethod):
            yield member.__func__
        elif isinstance(member, property):
            yield member.fget
        elif isinstance(member, functools.cached_property):
            yield member.func
        else:
            yield member


def _named_by(function: FunctionType) -> Iterator[Any]:
    """The values of the global names and the closure of a function."""
    for name in _names_in(function.__code__):
        yield function.__globals__.get(name)
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents


def _of_wrapped(value: Any) -> list[Any]:
    """The function that a decorator has wrapped; found without running code of the value."""
    wrapped = inspect.getattr_static(value, "__wrapped__", None)
    if isinstance(wrapped, FunctionType):
        return [wrapped]
    return []


def _of_module(module: str, values: Iterable[Any]) -> list[Any]:
    """The functions and classes of a module among the values and among what these wrap."""
    used = []
    for value in values:
        for part in (value, *_of_wrapped(value)):
            # By its type: `isinstance` would ask a proxy for the class of what it stands for.
            if issubclass(type(part), (FunctionType, type)) and part.__module__ == module:
                used.append(part)
    return used


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _names_in(value)


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
