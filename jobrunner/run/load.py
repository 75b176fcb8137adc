"""6 loop: a recorded epoch back in workspaces; `jobrunner.run.resume` says what that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from jobrunner.checkpoint import CheckpointDirectory
from jobrunner.cluster import SessionBinding
from jobrunner.compile import GroupPlan, Plan
from jobrunner.config import get_seconds
from jobrunner.define import Job, TaskGroup
from jobrunner.errors import CheckpointCorruptError
from jobrunner.run import resume


@dataclass(frozen=True, slots=True)
class Loaded:
    """An epoch whose blobs are in the workspaces, but for objects that are saved by their state.

    Attributes
    ----------
    epoch : int
    group : TaskGroup
        What loaded it.
    again : GroupPlan
        The init tasks that run again, and among others make those objects.
    anew : mapping of str to frozenset of str
        Node -> blobs whose states wait for these.
    """

    epoch: int
    group: TaskGroup
    again: GroupPlan
    anew: Mapping[str, frozenset[str]]


def load(
    binding: SessionBinding,
    job: Job,
    plan: Plan,
    manager: CheckpointDirectory,
    epoch: int,
    *,
    from_memory: bool = False,
) -> Loaded:
    """Load an epoch into the workspaces of a binding of the plan.

    Raises
    ------
    CheckpointError, ExecutionError
        It does not fit the job, or the workers; or it is not what was written.
    """
    blobs = resume.required_blobs(plan, manager, epoch)
    partitions = {name: nodes for name, (_, nodes) in plan.partitions.items()}
    sizes = resume.least_bytes(blobs, manager, epoch)
    binding.check_fit(sizes, f"Epoch {epoch} of {manager.path}")
    again, anew = resume.rebuild(job, plan, manager, epoch)
    group = manager.load(
        epoch, blobs=blobs, partitions=partitions, anew=anew, from_memory=from_memory
    )
    deadline_seconds = get_seconds("checkpoint.deadline-seconds")
    binding.run_group(group, epoch=epoch, deadline_seconds=deadline_seconds)
    return Loaded(epoch, group, again, anew)


def load_newest(
    binding: SessionBinding,
    job: Job,
    plan: Plan,
    manager: CheckpointDirectory,
    epochs: Iterable[int],
    pass_over: Callable[[int, CheckpointCorruptError], None],
) -> Loaded | None:
    """Load the first of some epochs that is whole, for a run that goes on from it.

    What workers still keep of it in memory is not read. `pass_over` is told of each epoch that is
    damaged.
    """
    for epoch in epochs:
        try:
            loaded = load(binding, job, plan, manager, epoch, from_memory=True)
            binding.recorded = manager.moment(epoch)
            manager.report_load(loaded.group, "checkpoint_load")  # all that the job needs
        except CheckpointCorruptError as error:
            pass_over(epoch, error)
        else:
            return loaded
    return None
