"""What clients apply to a binding's nodes: `fn(hosted_nodes)`, in a thread of the binding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jobrunner.compile import Condition, Crossing, GroupPlan, Slice
from jobrunner.errors import ExecutionError
from jobrunner.gc_pause import gc_paused
from jobrunner.worker.hosted_nodes import HostedNodes
from jobrunner.worker.keeper import Keeper
from jobrunner.worker.program import Program
from jobrunner.workspace import Rows, Workspace


class NewNode(NamedTuple):
    """What a worker has to know of a node that is placed there."""

    stream: str  # of random numbers
    transient: Sequence[str]  # names of blobs
    histories: Mapping[str, bool]  # names of blobs; whether a value is rows, not one row


class GroupOutline(NamedTuple):
    """What all workers that take part in a group have to know of it."""

    name: str
    crossings: tuple[Crossing, ...]
    conditions: tuple[Condition, ...]
    placement: Mapping[str, str]  # of the nodes that take part


def add_nodes(nodes: Mapping[str, NewNode], hosted: HostedNodes) -> None:
    """Make workspaces for nodes."""
    for node, new in nodes.items():
        workspace = Workspace(node, frozenset(new.transient), new.stream)
        for name, extends in new.histories.items():
            workspace.histories[name] = Rows(name, extends)
        hosted.workspaces[node] = workspace


@gc_paused()
def add_groups(groups: bytes, slices: Mapping[str, bytes], hosted: HostedNodes) -> None:
    """Take groups, and what the worker's nodes do in them; see `Parcel`."""
    parts: dict[str, dict[str, Slice]] = {}
    for node, data in slices.items():
        parts[node] = hosted.unpickle(data, f"the tasks of node {node!r}")
    outlines: dict[str, GroupOutline] = hosted.unpickle(groups, "groups")
    for key, outline in outlines.items():
        own = {node: part[key] for node, part in parts.items() if key in part}
        if not own:
            continue
        elsewhere: dict[str, str] = {}
        for node, address in outline.placement.items():
            if node not in hosted.workspaces:
                elsewhere[node] = address
        plan = GroupPlan(outline.name, own, outline.crossings, outline.conditions)
        hosted.programs[key] = Program(key, plan, hosted.workspaces, elsewhere)


def drop_groups(keys: Sequence[str], hosted: HostedNodes) -> None:
    """Forget groups and what their tasks returned."""
    for key in keys:
        hosted.programs.pop(key, None)
        for workspace in hosted.workspaces.values():
            workspace.forget(key)


def fetch(node: str, name: str, groups: Sequence[str], part: int, hosted: HostedNodes) -> Any:
    """Capture a blob; with `groups`, part of task `name`'s return value in one of these."""
    workspace = hosted.workspaces[node]
    if groups:
        return workspace.result(groups, name, part)
    return workspace.capture(name)


def blob_names(hosted: HostedNodes) -> dict[str, frozenset[str]]:
    """The names of the global blobs, by node."""
    return {node: frozenset(space.globals) for node, space in hosted.workspaces.items()}


def install_keeper(factory: Callable[[], Keeper], hosted: HostedNodes) -> None:
    """Make a keeper, in place of an earlier one."""
    previous, hosted.keeper = hosted.keeper, None
    if previous is not None:
        previous.close()
    hosted.keeper = factory()


def call_keeper(fn: Callable[[Keeper, Mapping[str, Workspace]], Any], hosted: HostedNodes) -> Any:
    """Call a function with the keeper and the workspaces."""
    if hosted.keeper is None:
        raise ExecutionError("This worker keeps no captures: Binding.keep was not called.")
    return fn(hosted.keeper, hosted.workspaces)


def call_on_workspaces(fn: Callable[[dict[str, Workspace]], Any], hosted: HostedNodes) -> Any:
    """Call a function with a copy of the dictionary of workspaces."""
    return fn(dict(hosted.workspaces))
