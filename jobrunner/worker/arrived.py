"""Takes what Dask has computed for the init tasks of nodes into their workspaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distributed import get_worker

from jobrunner.dask_internals import find_plugin
from jobrunner.worker.plugin import PLUGIN_NAME, WorkspaceHost
from jobrunner.worker.program import arrived_name
from jobrunner.workspace import adopt, copied


def take_arrived(binding: str, places: Sequence[tuple[str, int]], values: Sequence[Any]) -> bool:
    """Take the values of `LazyArgument` of nodes, each with its number; a task of Dask.

    They are copied: on the worker that computed them, they are the very objects of the user's
    collection, and what Dask has transferred lies at any address. False: the worker has restarted.
    """
    host = find_plugin(get_worker(), PLUGIN_NAME)
    hosted = host.bindings.get(binding) if isinstance(host, WorkspaceHost) else None
    if hosted is None:
        return False
    for (node, number), value in zip(places, values, strict=True):
        hosted.workspaces[node].set_aside[arrived_name(number)] = adopt(copied(value))
    return True
