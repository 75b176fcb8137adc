"""Check what a job says of the steps of its epochs: which tasks run in which, and what ends an epoch."""

from __future__ import annotations

from collections.abc import Collection

from jobrunner.compile.global_blobs import Key
from jobrunner.define import Blob, Job, Task, TaskGroup, TaskOutput
from jobrunner.errors import DefinitionError

Conditions = list[TaskOutput | Blob]


def check_steps(job: Job) -> None:
    """Refuse tasks that would never run, readers of what is not there, and endless epochs."""
    where = f"Job {job.name!r}"
    count = job.steps_per_epoch
    for name, group in job.groups.items():
        if name != "epoch":
            check_no_intervals(group)
    if count is None and not job.epoch_end_conditions:
        raise DefinitionError(
            f"{where} has steps_per_epoch=None and no condition that ends an epoch, so its first "
            f"epoch would never end. Add one: job.end_epoch_when(...)."
        )
    for task in job.epoch_group.tasks():
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


def split_stops(job: Job, global_blobs: Collection[Key]) -> tuple[Conditions, Conditions]:
    """The stop conditions that are read after a step, and after the epoch end group."""
    if "epoch_end" not in job.groups:
        return job.stop_conditions, []
    private = {blob.key for task in job.epoch_group.tasks() for blob in task.output_blobs}
    private.difference_update(global_blobs)
    after_step: Conditions = []
    after_epoch: Conditions = []
    for condition in job.stop_conditions:
        if isinstance(condition, Blob):
            is_of_step = condition.key in private
        else:
            is_of_step = condition.task.group is job.epoch_group
        (after_step if is_of_step else after_epoch).append(condition)
    return after_step, after_epoch
