"""Groups that libraries make, and what a group leaves for the client."""

import numpy as np
import pytest

from jobrunner import (
    ExecutionError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Task,
    TaskGroup,
    current_task,
    epoch_limiter,
)

SEEN = []


def note_name():
    SEEN.append(current_task().name)


def one():
    return 1


def test_report_steps_run_in_a_group_without_tasks(inproc_session, tmp_path):
    def run(epochs):
        SEEN.clear()
        with Job("reported", steps_per_epoch=2) as job, Node("n"):
            with job.init_group:
                Task(one, outputs="x")
            job.init_group.report_step(note_name, interval_seconds="1min")
            job.epoch_group.report_step(note_name, interval_seconds="1min")
            Task(one)
            job.exit_group.report_step(note_name, interval_seconds="1min")
        epoch_limiter(job, epochs)
        JobRunner(job, MultiNodeCheckpointManager(tmp_path)).run(inproc_session)
        return SEEN

    assert run(1) == ["report#1"] * 4
    assert run(2) == ["report#1"] * 3  # the init group has run


def bump(x):
    x += 1


def test_a_final_output_is_the_value_after_all_tasks_of_the_group(inproc_session):
    with TaskGroup() as group, Node("n") as node:
        Task(lambda: np.zeros(2), outputs="x", name="make")
        final = group.final_output("x")
        there = group.final_output(Node("m")["y"], node)
        Task(bump, updates="x")  # defined later
        Task(lambda x: float(x.sum()), inputs=node["x"], outputs="y", node="m")
        Task(bump, updates="x", name="last")
    inproc_session.run(group)
    assert final.fetch().tolist() == [2, 2]  # a private blob, gone by now
    assert there.fetch() == 1 * 2
    assert [task.name for task in group.tasks()][-2:] == ["final_output"] * 2


def test_a_final_output_of_a_job_is_that_of_its_last_epoch(inproc_session):
    with Job("finals") as job, Node("n"):
        with job.init_group:
            Task(lambda: 0, outputs="total", name="zero")
        total = job.epoch_group.final_output("total")
        Task(lambda total: total + 3, inputs="total", outputs="total", name="add")
    epoch_limiter(job, 4)
    with pytest.raises(ExecutionError, match="has no value"):
        total.fetch()
    JobRunner(job).run(inproc_session)
    assert total.fetch() == 12
