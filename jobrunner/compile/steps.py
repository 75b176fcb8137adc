"""The steps of an epoch: which tasks of the epoch group run in which of them, and what ends it.

A step runs one *variant* of the epoch group, compiled as if the tasks that are not due did not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from math import lcm

from jobrunner.compile.blobs import Key
from jobrunner.compile.group import GroupCompiler
from jobrunner.compile.plan import GroupPlan, step_key
from jobrunner.define import Blob, Job, Task, TaskGroup, TaskOutput
from jobrunner.errors import DefinitionError

MOST_INTERVALS = 6
"""Different values of `every` in a job: each may double the number of variants."""


def check_steps(job: Job) -> tuple[int, ...]:
    """Check what a job says of its steps; returns the intervals of its tasks, if they have any."""
    for name, group in job.groups.items():
        if name != "epoch":
            check_no_intervals(group)
    where = f"Job {job.name!r}"
    count, tasks = job.steps_per_epoch, job.epoch_group.tasks()
    if count is None and not job.epoch_end_conditions:
        raise DefinitionError(
            f"{where} has steps_per_epoch=None and no condition that ends an epoch, so its first "
            f"epoch would never end. Add one: job.end_epoch_when(...)."
        )
    for task in tasks:
        if count is not None and task.every > count:
            raise DefinitionError(
                f"Task {task.full_name!r} would never run: it runs every {task.every} steps, and "
                f"an epoch has {count}. Choose an every= of at most that, or add the task to "
                f"job.epoch_end_group to run it once an epoch."
            )
        for value in task.inputs:
            if isinstance(value, TaskOutput) and value.task.group is task.group:
                _check_reader(task, value.task)
    for condition in job.epoch_end_conditions:
        if isinstance(condition, TaskOutput):
            source = condition.task
            if source.group is not job.epoch_group or source.every > 1:
                raise DefinitionError(
                    f"{where}: the condition {condition} cannot end an epoch, because its task "
                    f"does not run in every step. Use a task of the epoch group without every=."
                )
    for condition in job.stop_conditions:
        if isinstance(condition, TaskOutput) and condition.task.group is job.epoch_group:
            every = condition.task.every
            if every > 1 and (count is None or count % every):
                raise DefinitionError(
                    f"{where}: the stop condition {condition} has no value at the end of an epoch: "
                    f"its task runs every {every} steps, which need not include the last. Add the "
                    f"task to job.epoch_end_group."
                )
    intervals = sorted({task.every for task in tasks} - {1})
    if len(intervals) > MOST_INTERVALS:
        raise DefinitionError(
            f"{where}: its tasks have {len(intervals)} different values of every=: {intervals}. "
            f"Use at most {MOST_INTERVALS}."
        )
    return tuple(intervals)


def check_no_intervals(group: TaskGroup) -> None:
    """Refuse tasks of a group without steps that have an interval."""
    for task in group.tasks():
        if task.every > 1:
            raise DefinitionError(
                f"Task {task.full_name!r} has every={task.every}, but the {group.name} group has no "
                f"steps. Only a job's epoch group has."
            )


def _check_reader(task: Task, source: Task) -> None:
    if task.every % source.every:
        raise DefinitionError(
            f"Task {task.full_name!r} reads the output of {source.full_name!r}, which has a value "
            f"only every {source.every} steps. Give both tasks every={source.every}, or let "
            f"{source.full_name!r} fill a blob that the init group makes, and read that blob."
        )


def split_stops(
    job: Job, global_blobs: Collection[Key]
) -> tuple[list[TaskOutput | Blob], list[TaskOutput | Blob]]:
    """The stop conditions that are read after a step, and after the epoch end group."""
    if "epoch_end" not in job.groups:
        return job.stop_conditions, []
    tasks = job.epoch_group.tasks()
    private = {blob.key for task in tasks for blob in task.output_blobs} - set(global_blobs)
    steps = [
        it
        for it in job.stop_conditions
        if (it.key in private if isinstance(it, Blob) else it.task.group is job.epoch_group)
    ]
    return steps, [it for it in job.stop_conditions if it not in steps]


def compile_steps(
    job: Job,
    intervals: Sequence[int],
    stops: Sequence[TaskOutput | Blob],
    compiler: Callable[..., GroupCompiler],  # lacks only the tasks
) -> dict[str, GroupPlan]:
    """Compile the variants of the epoch group, by key; see `Plan.step_group`."""
    tasks, count, ends = job.epoch_group.tasks(), job.steps_per_epoch, job.epoch_end_conditions
    subsets = (c for n in range(len(intervals) + 1) for c in combinations(intervals, n))
    periods = {lcm(*subset) for subset in subsets}
    dues = {
        tuple(k for k in intervals if not period % k)
        for period in periods
        if count is None or period <= count
    }
    plans = {}
    # Those with the most tasks first, so that an error names skipped tasks only if they matter.
    for due in sorted(dues, key=len, reverse=True):
        run = [task for task in tasks if task.every == 1 or task.every in due]
        left_out = set(tasks).difference(run)
        read = [it for it in stops if isinstance(it, Blob) or it.task not in left_out]
        try:
            plans[step_key(due)] = compiler(tasks=run).compile(read, ends)
        except DefinitionError as error:
            skipped = [k for k in intervals if k not in due]
            if not skipped or not plans:
                raise
            raise DefinitionError(
                f"In steps in which the tasks with every={' and every='.join(map(str, skipped))} "
                f"do not run: {error}"
            ) from error
    return plans
