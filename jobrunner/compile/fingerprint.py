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
from collections.abc import Collection, Mapping
from types import CodeType
from typing import Any

from jobrunner.compile.plan import Plan
from jobrunner.define import HIDDEN, Task, TaskOutput, without_secrets
from jobrunner.names import described_nodes
from jobrunner.positions import Position
from jobrunner.texts import clip, printable, show

DESCRIPTION_VERSION = 1

_as_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def describe(plan: Plan) -> dict[str, Any]:
    """Describe a plan as JSON, for `changes`; ``nodes`` are the checkpointed ones."""
    return {
        "version": DESCRIPTION_VERSION,
        "fingerprint": fingerprint(plan),
        "job": plan.job,
        "seed": plan.seed,
        "steps_per_epoch": plan.steps_per_epoch,
        # Digests of code can be compared within a minor version of Python.
        "python": ".".join(platform.python_version_tuple()[:2]),
        "nodes": {node: sorted(blobs) for node, blobs in plan.saved_blobs(Position(1)).items()},
        **({"seed_global_rng": True} if plan.seed_global_rng else {}),
        **({"parameters": dict(plan.parameters)} if plan.parameters else {}),
        "structure": dict(plan.structure),
        "code": dict(plan.code),
    }


def fingerprint(plan: Plan) -> str:
    """Digest of a plan's structure: 32 hexadecimal digits."""
    nodes = {node: sorted(plan.globals.get(node, ())) for node in plan.checkpointed}
    return _digest([plan.steps_per_epoch, nodes, list(plan.structure.items())], 16)


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the differences between the descriptions of two plans, each in a line.

    Both may be recorded, and lack fields.
    """
    labels = {"job": "the job's name", "seed": "the seed", "steps_per_epoch": "steps_per_epoch"}
    found = [
        f"{what} was {then.get(key)!r} and is {now.get(key)!r}"
        for key, what in labels.items()
        if then.get(key) != now.get(key)
    ]
    is_seeded = now.get("seed_global_rng", False)
    if then.get("seed_global_rng", False) != is_seeded:
        found.append(f"seed_global_rng is now {is_seeded}")
    found += _changed_parameters(then.get("parameters", {}), now.get("parameters", {}))
    old_nodes, new_nodes = then.get("nodes", {}), now.get("nodes", {})
    before, used = (described_nodes(plan) for plan in (then, now))
    found += [
        f"node {name!r} is no longer checkpointed"
        if name in used
        else f"node {name!r} is gone; its recorded blobs are not loaded"
        for name in old_nodes.keys() - new_nodes
    ]
    found += [
        f"node {name!r} is newly checkpointed" if name in before else f"node {name!r} is new"
        for name in new_nodes.keys() - old_nodes
    ]
    for name in old_nodes.keys() & new_nodes.keys():
        old_blobs, new_blobs = set(old_nodes[name]), set(new_nodes[name])
        gone, made = old_blobs - new_blobs, new_blobs - old_blobs
        found += [f"blob {blob!r} of node {name!r} is no longer saved" for blob in gone]
        found += [f"blob {blob!r} of node {name!r} is new" for blob in made]
    found.sort()

    old, new = then.get("structure", {}), now.get("structure", {})
    found += [f"task {name} is gone" for name in old if name not in new]
    found += [f"task {name} is new" for name in new if name not in old]
    shared = [name for name in new if name in old]
    found += [
        f"task {name} has other inputs, outputs or edges"
        for name in shared
        if old[name] != new[name]
    ]
    if [name for name in old if name in new] != shared:
        found.append("the tasks are defined in another order")
    if then.get("python") == now.get("python"):
        old_code, new_code = then.get("code", {}), now.get("code", {})
        found += [
            f"task {name} has other code"
            for name in shared
            if old_code.get(name) != new_code.get(name)
        ]
    return [printable(it, kept="") for it in found]


def _changed_parameters(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    def of(values: Mapping[str, Any], name: str) -> str:
        return clip(show(values[name]), 100) if name in values else "not given"

    # An earlier version recorded more.
    then = {name: without_secrets(name, value) for name, value in then.items()}
    return [
        f"parameter {name!r} was {of(then, name)} and is {of(now, name)}"
        for name in dict.fromkeys((*now, *then))
        if name not in then
        or name not in now
        or (then[name] != now[name] and HIDDEN not in (then[name], now[name]))
    ]


def structure_of(task: Task, global_blobs: Collection[tuple[str, str]]) -> str:
    """Digest of one task's structure: 16 hexadecimal digits."""
    places = {"places": task.places} if task.places else {}
    made = sorted([*task.setup, *task.instance_setup])
    return _digest(
        {
            **places,
            "inputs": [_name_input(value) for value in task.inputs],
            "updates": [blob.name for blob in task.updates],
            "outputs": [
                {"name": blob.name, "global": blob.key in global_blobs}
                for blob in task.output_blobs
            ],
            "kwargs": sorted(task.kwargs),
            "num_instances": task.num_instances,
            **({"every": task.every} if task.every > 1 else {}),
            **({"setup": made} if made else {}),
            "after": sorted(
                other if isinstance(other, str) else other.full_name for other in task.after
            ),
        },
        8,
    )


def code_of(fn: Any) -> str:
    """Digest of a function's code: 16 hexadecimal digits.

    It covers nested functions, but not defaults; of a partial, its function and the functions among
    its arguments; of a decorated function, both functions; of another callable, the ``__call__`` of
    its class.
    """
    given: list[Any] = []
    while isinstance(fn, functools.partial):
        given += [*fn.args, *fn.keywords.values()]
        fn = fn.func
    others = [code_of(value) for value in given if inspect.isfunction(value)]
    fn = getattr(fn, "__func__", fn)
    if inspect.isfunction(getattr(fn, "__wrapped__", None)):  # by a decorator
        others.append(code_of(fn.__wrapped__))
    code = getattr(fn, "__code__", None)
    if code is None:
        code = getattr(vars(type(fn)).get("__call__"), "__code__", None)
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    own = _digest([name, _flatten(code) if code is not None else None], 8)
    return _digest([own, *others], 8) if others else own


def task_code(task: Task, code: str) -> str:
    """Digest of the code of a task, given that of its function."""
    others = {**task.setup, **task.instance_setup}
    return _digest([code, *map(code_of, others.values())], 8) if others else code


def _flatten(code: CodeType) -> list[Any]:
    constants = [
        _flatten(value) if isinstance(value, CodeType) else _stable(value)
        for value in code.co_consts
    ]
    return [code.co_code.hex(), list(code.co_names), list(code.co_varnames), constants]


def _stable(value: Any) -> str:
    # The order of a frozenset's repr depends on the hash seed of the process.
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _name_input(value: Any) -> str:
    if isinstance(value, TaskOutput):
        group = value.task.group.name if value.task.group else ""
        return f"output {group}:{value.task.full_name}[{value.part}]"
    return f"blob {'/'.join(value.key)}"


def _digest(value: Any, size: int) -> str:
    return hashlib.blake2b(_as_json(value).encode(), digest_size=size).hexdigest()
