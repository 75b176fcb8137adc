"""4 run: compiled groups as bytes, each node's part of them for its worker."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any

import cloudpickle

from jobrunner.compile import GroupPlan, Slice, gc_paused
from jobrunner.errors import DefinitionError


class Parcel:
    """Group plans of a binding, pickled.

    A node's slices of all groups are one pickle, so that what its functions share stays shared,
    and what functions of two nodes share does not, whether or not they share a worker.

    Parameters
    ----------
    plans : mapping of str to GroupPlan
        By the key that the binding knows each by.

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
        Naming a task that cannot be pickled.
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


def nodes_of(plan: GroupPlan) -> tuple[str, ...]:
    """The nodes that take part in a run: those with a slice, or a stop condition to read."""
    return tuple(dict.fromkeys([*plan.slices, *(c.node for c in plan.conditions)]))


def pickle_function(fn: Any, what: str) -> bytes:
    """Pickle a function for the workers.

    Raises
    ------
    DefinitionError
        It cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps(fn))
    except Exception as error:
        raise DefinitionError(
            f"{what} cannot be pickled, so no worker can run it: {type(error).__name__}: {error}. "
            f"Let it open, inside, what cannot travel: files, sockets, locks, models on a GPU."
        ) from error


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
