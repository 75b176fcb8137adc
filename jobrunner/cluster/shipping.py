"""Task groups on their way to the workers: pickles, and what the workers have already."""

from __future__ import annotations

import hashlib
import pickle
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import cloudpickle

from jobrunner.cluster.messages import pickle_function
from jobrunner.compile import GroupPlan, Slice, gc_paused
from jobrunner.define import TaskGroup


class Parcel:
    """Group plans of a binding, pickled.

    The slices of one node, of all groups, are one pickle: what its functions share stays shared,
    and what functions of two nodes share does not, whether or not they share a worker.

    Parameters
    ----------
    plans : mapping of str to GroupPlan
        By the binding's key for each.

    Attributes
    ----------
    groups : bytes
        What all workers need.
    slices : dict of str to bytes
        By node.
    digest : str
        Of all the bytes.

    Raises
    ------
    DefinitionError
        A task cannot be pickled.
    """

    def __init__(self, plans: Mapping[str, GroupPlan]) -> None:
        with gc_paused():
            self._pack(plans)

    def _pack(self, plans: Mapping[str, GroupPlan]) -> None:
        by_node: dict[str, dict[str, Slice]] = {}
        outline: dict[str, Any] = {}
        for key, plan in plans.items():
            nodes = nodes_of(plan)
            outline[key] = (plan.name, plan.crossings, plan.conditions, nodes)
            for node in nodes:
                by_node.setdefault(node, {})[key] = plan.slices.get(node) or Slice(node, ())
        self.groups = pickle.dumps(outline)
        self.slices = {node: _pickle_slices(slices) for node, slices in by_node.items()}
        digest = hashlib.blake2b(self.groups, digest_size=16)
        for node, data in self.slices.items():
            digest.update(node.encode() + data)
        self.digest = digest.hexdigest()

    def by_worker(self, placement: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """What each worker is sent: address -> groups, and the slices of its nodes."""
        contents: dict[str, dict[str, Any]] = {}
        for node, data in self.slices.items():
            content = contents.setdefault(placement[node], {"groups": self.groups, "slices": {}})
            content["slices"][node] = data
        return contents


class ShippedGroups:
    """The groups that a binding's workers can run, by key.

    Attributes
    ----------
    plans : dict
        Key -> the plan, and the addresses of the workers that take part.
    """

    def __init__(self) -> None:
        self.plans: dict[str, tuple[GroupPlan, list[str]]] = {}
        self._digests: dict[str, str] = {}
        self._keys: weakref.WeakKeyDictionary[TaskGroup, str] = weakref.WeakKeyDictionary()
        self._num_keys = 0
        self._dead_keys: list[str] = []

    def add(self, plans: Mapping[str, GroupPlan], placement: Mapping[str, str]) -> None:
        """Note groups and who takes part in them."""
        for key, plan in plans.items():
            addresses = dict.fromkeys(placement[node] for node in nodes_of(plan))
            self.plans[key] = (plan, list(addresses))

    def has(self, keys: Collection[str], digest: str) -> bool:
        """Whether the workers have these groups as they were in a parcel of that digest."""
        return all(self._digests.get(key) == digest for key in keys)

    def note_digest(self, keys: Collection[str], digest: str) -> None:
        """Note that the workers have these groups."""
        self._digests.update(dict.fromkeys(keys, digest))

    def key_of(self, group: TaskGroup) -> str:
        """The key of a group that is no job's; of a job's group, its name."""
        return self._keys.get(group, group.name)

    def make_key(self, group: TaskGroup) -> str:
        """The key of a group that is no job's, new if it was never run."""
        if group not in self._keys:
            self._num_keys += 1
            key = self._keys[group] = f"{group.name}#{self._num_keys}"
            weakref.finalize(group, self._dead_keys.append, key).atexit = False
        return self._keys[group]

    def take_dead_keys(self) -> list[str]:
        """Forget the groups that nobody can run or fetch from any more; returns their keys."""
        dead = list(self._dead_keys)
        del self._dead_keys[: len(dead)]  # in place: finalizers append to this very list
        for key in dead:
            self.plans.pop(key, None)
            self._digests.pop(key, None)
        return dead


def nodes_of(plan: GroupPlan) -> tuple[str, ...]:
    """The nodes that take part in a run: those with a slice or a stop condition."""
    return tuple(dict.fromkeys([*plan.slices, *(c.node for c in plan.conditions)]))


def _pickle_slices(slices: Mapping[str, Slice]) -> bytes:
    try:
        return bytes(cloudpickle.dumps(slices))
    except Exception:
        for part in slices.values():
            for task in part.tasks:
                pickle_function((task.fn, task.kwargs), f"Task {part.node}/{task.name}")
            for report in part.reports:
                pickle_function(report.fn, f"Report {part.node}/{report.name}")
        raise
