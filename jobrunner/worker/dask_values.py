"""Values that nodes take from Dask, and that Dask takes from nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import get_worker

from jobrunner.dask_internals import find_plugin, hold
from jobrunner.worker.hosted_nodes import HostedNodes
from jobrunner.worker.plugin import PLUGIN_NAME, WorkspaceHost
from jobrunner.worker.program import arrived_name
from jobrunner.workspace import Workspace, adopt, copied

if TYPE_CHECKING:
    from distributed import Worker


def take_arrived(binding: str, places: Sequence[tuple[str, int]], values: Sequence[Any]) -> bool:
    """Take the values of `LazyArgument` of nodes, each with its number; a task of Dask.

    They are copied: on the worker that computed them, they are the very objects of the user's
    collection, and what Dask has transferred lies at any address. False: the worker has restarted.
    """
    hosted = _find_hosted(get_worker(), binding)
    if hosted is None:
        return False
    for (node, number), value in zip(places, values, strict=True):
        hosted.workspaces[node].parked[arrived_name(number)] = adopt(copied(value))
    return True


def describe_blob(
    describe: Callable[[Any], Any], blob: str, workspaces: Mapping[str, Workspace]
) -> dict[str, Any]:
    """Describe a global blob of each node that has it."""
    return {
        node: describe(workspace.value(blob))
        for node, workspace in workspaces.items()
        if blob in workspace.globals
    }


async def lend_blob(
    binding: str, blob: str, keys: Mapping[str, Sequence[str]], dask_worker: Worker
) -> dict[str, int] | None:
    """Let Dask hold a blob of some of a worker's nodes: a list under each key; returns their sizes.

    Arrays are not copied: at rest they never change, and an update copies what Dask holds. None: the
    worker has restarted.
    """
    hosted = _find_hosted(dask_worker, binding)
    if hosted is None:
        return None
    own = {key: nodes for key, nodes in keys.items() if hosted.workspaces.keys() >= {*nodes}}
    values = await asyncio.to_thread(_read_all, hosted, blob, own)
    return hold(dask_worker, values)


def _read_all(
    hosted: HostedNodes, blob: str, keys: Mapping[str, Sequence[str]]
) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {}
    for key, nodes in keys.items():
        values[key] = []
        for node in nodes:
            value = hosted.workspaces[node].value(blob)
            if type(value) is not np.ndarray:
                value = copied(value)
            values[key].append(value)
    return values


def _find_hosted(worker: Worker, binding: str) -> HostedNodes | None:
    host = find_plugin(worker, PLUGIN_NAME)
    if not isinstance(host, WorkspaceHost):
        return None
    return host.bindings.get(binding)
