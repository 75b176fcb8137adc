"""Pickles of groups for the workers."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping

from jobrunner.cluster.exchange import pickle_function
from jobrunner.compile import GroupPlan, Slice
from jobrunner.gc_pause import gc_paused
from jobrunner.worker import GroupOutline
from jobrunner.workspace import dumps_definitions


class Parcel:
    """Group plans, pickled; `DefinitionError` if a task cannot be pickled.

    All slices of one node are one pickle: objects that its functions share stay shared. Objects
    that functions of two nodes share do not, even if the nodes are on one worker.
    """

    @gc_paused()
    def __init__(self, plans: Mapping[str, GroupPlan], placement: Mapping[str, str]) -> None:
        by_node: dict[str, dict[str, Slice]] = {}
        outlines: dict[str, GroupOutline] = {}
        for key, plan in plans.items():
            nodes = {node: placement[node] for node in nodes_of(plan)}
            outlines[key] = GroupOutline(plan.name, plan.crossings, plan.conditions, nodes)
            for node in nodes:
                by_node.setdefault(node, {})[key] = plan.slices.get(node) or Slice(node, ())
        self.groups = pickle.dumps(outlines)  # for all workers
        self.by_worker: dict[str, dict[str, bytes]] = {}  # address -> node -> its slices
        digest = hashlib.blake2b(self.groups, digest_size=16)
        for node, slices in by_node.items():
            data = _pickle_slices(slices)
            self.by_worker.setdefault(placement[node], {})[node] = data
            digest.update(node.encode() + data)
        self.digest = digest.hexdigest()


def nodes_of(plan: GroupPlan) -> tuple[str, ...]:
    """The nodes that take part in a run: those with a slice or a stop condition."""
    return tuple(dict.fromkeys([*plan.slices, *(c.node for c in plan.conditions)]))


def _pickle_slices(slices: Mapping[str, Slice]) -> bytes:
    try:
        return dumps_definitions(slices)
    except Exception:
        for part in slices.values():
            for task in part.tasks:
                pickle_function((task.fn, task.kwargs), f"Task {part.node}/{task.name}")
            for report in part.reports:
                pickle_function(report.fn, f"Report {part.node}/{report.name}")
        raise
