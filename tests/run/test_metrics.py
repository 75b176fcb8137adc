"""What tasks report: combined over tasks and nodes."""

import math

import numpy as np
import pytest

from jobrunner import (
    DefinitionError,
    Job,
    JobRunner,
    Max,
    Mean,
    Min,
    MultiNodeCheckpointManager,
    Node,
    SaveEvery,
    Sum,
    Task,
    TaskFailedError,
    current_task,
    epoch_limiter,
)


def reporting(report, nodes="abc", epochs=1, tasks=1, instances=1, **options):
    """A job whose tasks call `report(node, number of the task, epoch, step)`."""

    def run():
        me = current_task()
        report(me.node, int(me.name[-1]), me.epoch, me.step)

    with Job("reporting", **options) as job:
        for name in nodes:
            with Node(name):
                with job.init_group:
                    Task(lambda: 0, outputs="x", name="x0")
                for number in range(tasks):
                    Task(run, name=f"task{number}", num_instances=instances)
    epoch_limiter(job, epochs)
    return job


def metrics_of(inproc_session, report, manager=None, **options):
    [metrics] = JobRunner(reporting(report, **options), manager).run(inproc_session).metrics
    return metrics


def test_values_are_combined_over_the_tasks_of_all_nodes(inproc_session):
    weights = {"a": 1, "b": 2, "c": 5}

    def report(node, task, epoch, step):
        x = weights[node] + 10 * task
        me = current_task()
        me.report(mean=Mean(x), weighted=Mean(x, weight=np.float32(weights[node])))
        me.report(sum=Sum(x), least=Min(np.int8(x)), most=Max(float(x)), last=np.array(x))

    found = metrics_of(inproc_session, report, tasks=2)
    assert found["mean"] == sum((1, 11, 2, 12, 5, 15)) / 6
    assert found["weighted"] == (1 + 11 + 2 * (2 + 12) + 5 * (5 + 15)) / 16
    assert (found["sum"], found["least"], found["most"], found["last"]) == (46, 1, 15.0, 15)
    assert found["b/mean"] == 7
    assert found["c/most"] == 15.0
    assert type(found["sum"]) is type(found["least"]) is int


@pytest.mark.parametrize("kind", [Min, Max, Mean, Sum])
def test_nan_is_not_hidden(inproc_session, kind):
    def report(node, task, epoch, step):
        current_task().report(x=kind(math.nan if node == "b" else 1.0), y=Mean(5, weight=0))

    found = metrics_of(inproc_session, report)
    assert math.isnan(found["x"])
    assert found["a/x"] == 1.0
    assert math.isnan(found["y"])  # a mean without weight


def report_steps(node, task, epoch, step):
    if node == "a" or step < 2:
        current_task().report(last=Mean(step + 10 * epoch))
    if step == 0:
        current_task().report(first=epoch)


def test_a_metric_of_an_epoch_is_that_of_the_last_step_that_reported_it(inproc_session):
    job = reporting(report_steps, nodes="ab", epochs=30, steps_per_epoch=4)
    in_batches = JobRunner(job).run(inproc_session).metrics
    expected = {"epoch": 30, "last": 303, "a/last": 301, "b/last": 301, "first": 30}
    assert in_batches[-1] == {**expected, "a/first": 30, "b/first": 30}
    assert JobRunner(job, callbacks=[Told()]).run(inproc_session).metrics == in_batches


class Told:
    """A callback that keeps what it is told."""

    def __init__(self):
        self.steps = []

    def on_step(self, epoch, step, seconds, metrics):
        self.steps.append(dict(metrics))


def test_a_resume_in_the_middle_of_an_epoch_keeps_what_its_steps_reported(inproc_session, tmp_path):
    def job(fails):
        def report(node, task, epoch, step):
            report_steps(node, task, epoch, step)
            if fails and (epoch, step) == (2, 3):
                raise ZeroDivisionError

        return reporting(report, nodes="ab", epochs=2, steps_per_epoch=4)

    manager = MultiNodeCheckpointManager(tmp_path / "k", save=SaveEvery(steps=1))
    whole = JobRunner(job(fails=False)).run(inproc_session).metrics
    with pytest.raises(TaskFailedError):
        JobRunner(job(fails=True), manager).run(inproc_session)
    [*_, middle] = manager.positions()
    told = Told()
    result = JobRunner(job(fails=False), manager, callbacks=[told]).run(inproc_session)
    assert result.resumed_from == middle
    assert result.metrics == whole[1:]
    assert told.steps == [{"last": 23.0}]  # of this step alone


@pytest.mark.parametrize("name", ["", "epoch", "seconds"])
def test_names_that_results_and_logs_use_themselves_are_refused(name, inproc_session):
    def report(*_):
        current_task().report(**{"loss": 1, name: 3})

    with pytest.raises(TaskFailedError, match=f"Task a/task0 reports a metric as '{name}'"):
        metrics_of(inproc_session, report, nodes="a")


def test_a_name_that_is_reported_in_two_ways_is_refused(inproc_session):
    def on_nodes(node, task, epoch, step):
        current_task().report(x=Mean(1) if node == "a" else 1)

    with pytest.raises(DefinitionError, match=r"'x' .* as Mean by node 'a'; plainly by node 'b'"):
        metrics_of(inproc_session, on_nodes, nodes="ab")

    def in_a_task(node, task, epoch, step):
        current_task().report(x=Mean(1))
        current_task().report(x=Sum(1))

    with pytest.raises(TaskFailedError, match=r"a/task0 reports 'x' in different ways"):
        metrics_of(inproc_session, in_a_task, nodes="a")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mean("1"),
        lambda: Mean(10**400),
        lambda: Mean(1, weight=-1),
        lambda: Mean(1, weight=math.nan),
        lambda: Min(np.zeros(2)),
    ],
)
def test_invalid_values_are_refused(make):
    with pytest.raises(DefinitionError):
        make()
