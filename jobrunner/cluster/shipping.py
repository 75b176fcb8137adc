"""Pickles of groups for the workers, and which groups the workers have already."""

from __future__ import annotations

import hashlib
import pickle
import weakref
from collections.abc import Collection, Mapping
from typing import Any

from jobrunner.cluster.exchange import pickle_function
from jobrunner.compile import GroupPlan, Slice, gc_paused
from jobrunner.define import TaskGroup
from jobrunner.workspace import dumps_definitions


class Parcel:
    """Group plans, pickled; `DefinitionError` if a task cannot be pickled.

    All slices of one node are one pickle: objects that its functions share stay shared. Objects
    that functions of two nodes share do not, even if the nodes are on one worker.
    """

    @gc_paused()
    def __init__(self, plans: Mapping[str, GroupPlan]) -> None:
        by_node: dict[str, dict[str, Slice]] = {}
        outline: dict[str, Any] = {}
        for key, plan in plans.items():
            nodes = nodes_of(plan)
            outline[key] = (plan.name, plan.crossings, plan.conditions, nodes)
            for node in nodes:
                by_node.setdefault(node, {})[key] = plan.slices.get(node) or Slice(node, ())
        self.groups = pickle.dumps(outline)  # for all workers
        self.slices = {node: _pickle_slices(slices) for node, slices in by_node.items()}
        digest = hashlib.blake2b(self.groups, digest_size=16)
        for node, data in self.slices.items():
            digest.update(node.encode() + data)
        self.digest = digest.hexdigest()

    def by_worker(self, placement: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """The groups and the slices of its nodes, for each worker."""
        contents: dict[str, dict[str, Any]] = {}
        for node, data in self.slices.items():
            content = contents.setdefault(placement[node], {"groups": self.groups, "slices": {}})
            content["slices"][node] = data
        return contents


class ShippedGroups:
    """The groups that a binding's workers can run, by key."""

    def __init__(self) -> None:
        self.plans: dict[str, tuple[GroupPlan, list[str]]] = {}  # plan, and addresses of workers
        self._digests: dict[str, str] = {}
        self._keys: weakref.WeakKeyDictionary[TaskGroup, str] = weakref.WeakKeyDictionary()
        self._num_keys = 0
        self._dead_keys: list[str] = []

    def add(
        self, plans: Mapping[str, GroupPlan], digest: str, placement: Mapping[str, str]
    ) -> None:
        """Add the groups of a parcel with that digest."""
        for key, plan in plans.items():
            addresses = dict.fromkeys(placement[node] for node in nodes_of(plan))
            self.plans[key] = (plan, list(addresses))
            self._digests[key] = digest

    def has(self, keys: Collection[str], digest: str) -> bool:
        """Whether the workers have got these groups in a parcel with that digest."""
        return all(self._digests.get(key) == digest for key in keys)

    def key_of(self, group: TaskGroup) -> str:
        """The key of a group; for a job's group, its name."""
        return self._keys.get(group, group.name)

    def make_key(self, group: TaskGroup) -> str:
        """The key of a group that belongs to no job; a new one at its first run."""
        if group not in self._keys:
            self._num_keys += 1
            key = self._keys[group] = f"{group.name}#{self._num_keys}"
            weakref.finalize(group, self._dead_keys.append, key).atexit = False
        return self._keys[group]

    def take_dead_keys(self) -> list[str]:
        """Drop the groups whose objects are gone; returns their keys."""
        dead = list(self._dead_keys)
        del self._dead_keys[: len(dead)]  # in place: finalizers append to this list
        for key in dead:
            self.plans.pop(key, None)
            self._digests.pop(key, None)
        return dead


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
