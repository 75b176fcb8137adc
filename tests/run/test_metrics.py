"""What tasks report: combined over tasks, nodes and steps; arrays and images for callbacks."""

import math

import numpy as np
import pytest

from jobrunner import (
    DefinitionError,
    Image,
    Job,
    JobRunner,
    KeepAll,
    Max,
    Mean,
    Min,
    MultiNodeCheckpointManager,
    Node,
    Position,
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


def test_every_call_and_every_instance_counts(inproc_session):
    def report(node, task, epoch, step):
        for x in (1, 2):
            current_task().report(n=Sum(x), mean=Mean(x + current_task().instance))

    found = metrics_of(inproc_session, report, nodes="a", instances=4)
    assert found == {"epoch": 1, "n": 12, "mean": 3.0}


@pytest.mark.parametrize("kind", [Min, Max, Mean, Sum])
def test_nan_is_not_hidden(inproc_session, kind):
    def report(node, task, epoch, step):
        current_task().report(x=kind(math.nan if node == "b" else 1.0))

    found = metrics_of(inproc_session, report)
    assert math.isnan(found["x"])
    assert found["a/x"] == 1.0


def test_a_mean_without_weight_is_nan(inproc_session):
    def report(node, task, epoch, step):
        current_task().report(x=Mean(5, weight=0))

    assert math.isnan(metrics_of(inproc_session, report)["x"])


def report_steps(node, task, epoch, step):
    if node == "a" or step < 2:
        x = 0.1 * (step + 1) + ord(node)
        current_task().report(mean=Mean(x, weight=step, over="epoch"), last=Mean(x))
        current_task().report(count=Sum(1, over="epoch"), most=Max(step, over="epoch"))


def test_values_are_combined_over_the_steps_of_an_epoch(inproc_session):
    found = metrics_of(inproc_session, report_steps, nodes="ab", steps_per_epoch=4)
    weighed = [(0.1 * (s + 1) + ord(n), s) for n in "ab" for s in range(4) if n == "a" or s < 2]
    total = sum(x * w for x, w in weighed) / sum(w for _, w in weighed)
    assert found["mean"] == pytest.approx(total, rel=1e-15)
    assert found["last"] == 0.1 * 4 + ord("a")
    assert (found["count"], found["most"], found["a/count"], found["b/count"]) == (6, 3, 4, 2)


def test_a_batch_of_epochs_combines_steps_as_single_epochs_do(inproc_session):
    job = reporting(report_steps, epochs=30, steps_per_epoch=4)
    in_batches = JobRunner(job).run(inproc_session).metrics
    one_by_one = JobRunner(job, callbacks=[Told()]).run(inproc_session).metrics
    assert in_batches == one_by_one
    assert len(in_batches) == 30


class Told:
    """A callback that keeps what it is told."""

    def __init__(self):
        self.epochs, self.steps = [], []

    def on_epoch(self, epoch, seconds, metrics):
        self.epochs.append(dict(metrics))

    def on_step(self, epoch, step, seconds, metrics):
        self.steps.append(dict(metrics))


def test_a_resume_in_the_middle_of_an_epoch_combines_all_its_steps(inproc_session, tmp_path):
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
    assert manager.record(middle).details.totals["count"] == {
        "a": ("sum", 3, 1 + 1 + 1),
        "b": ("sum", 2, 1 + 1),
    }
    told = Told()
    result = JobRunner(job(fails=False), manager, callbacks=[told]).run(inproc_session)
    assert result.resumed_from == middle
    assert result.metrics == whole[1:]
    assert told.steps == [
        {"mean": pytest.approx(97.4), "last": 97.4, "count": 1, "most": 3}
    ]  # of this step alone
    assert not manager.record(2).details.totals


def test_a_save_in_the_background_records_the_totals_of_its_own_step(inproc_session, tmp_path):
    manager = MultiNodeCheckpointManager(
        tmp_path / "k", save=SaveEvery(steps=1), keep=KeepAll(partial=True), asynchronous=True
    )

    def job():
        return reporting(report_steps, nodes="ab", epochs=1, steps_per_epoch=4)

    whole = JobRunner(job(), manager).run(inproc_session).metrics
    for step in (3, 2, 1):
        record = manager.record(Position(0, step))
        assert record.details.totals["count"]["a"] == ("sum", step, step)
        runner = JobRunner(job(), manager, resume_from_epoch=(0, step))
        assert runner.run(inproc_session).metrics == whole


def test_pixels_that_are_nan_or_off_by_a_rounding_error_are_no_fault():
    pixels = Image(np.array([[np.nan, 1 + 1e-6, -1e-6]])).pixels
    assert pixels.tolist() == [[0, 255, 0]]


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
    ("first", "second"),
    [
        (Mean(1, over="epoch"), Sum(5, over="epoch")),
        (Mean(1, over="epoch"), Mean(5)),
        (3, Max(5, over="epoch")),
    ],
)
def test_a_name_that_steps_report_in_two_ways_is_refused(inproc_session, first, second):
    def report(node, task, epoch, step):
        current_task().report(x=second if step else first)

    with pytest.raises(DefinitionError, match="'x' is reported in different ways in the steps"):
        metrics_of(inproc_session, report, steps_per_epoch=2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mean("1"),
        lambda: Mean(10**400),
        lambda: Mean(1, weight=-1),
        lambda: Mean(1, weight=math.nan),
        lambda: Sum(1, over="steps"),
        lambda: Min(np.zeros(2)),
        lambda: Image(np.zeros(3)),
        lambda: Image(np.zeros((2, 3, 2))),
        lambda: Image(np.zeros((0, 3))),
        lambda: Image(np.zeros((2, 3), int)),
        lambda: Image(np.full((2, 3), 1.01)),
        lambda: Image(np.array([[0.0, -np.inf]])),
    ],
)
def test_invalid_values_are_refused(make):
    with pytest.raises(DefinitionError):
        make()


def test_arrays_and_images_go_to_callbacks_and_into_no_record(inproc_session, tmp_path):
    def report(node, task, epoch, step):
        me = current_task()
        weights = np.arange(6, dtype=">f4").reshape(2, 3)[:, ::2] + ord(node)
        me.report(loss=1.0, weights=weights)
        if node == "a":
            me.report(picture=Image(np.full((4, 5, 3), 0.5)))

    told = Told()
    manager = MultiNodeCheckpointManager(tmp_path / "k")
    runner = JobRunner(reporting(report, nodes="ab", epochs=2), manager, callbacks=[told])
    result = runner.run(inproc_session)
    assert result.metrics[1] == {"epoch": 2, "loss": 1.0, "a/loss": 1.0, "b/loss": 1.0}
    assert manager.record(2).details.metrics == {"loss": 1.0, "a/loss": 1.0, "b/loss": 1.0}
    metrics = told.epochs[1]
    assert np.array_equal(metrics["a/weights"], [[97, 99], [100, 102]])
    assert np.array_equal(metrics["weights"], metrics["b/weights"])
    assert metrics["weights"].dtype == np.float32
    pixels = metrics["picture"].pixels
    assert (pixels.dtype, pixels.shape) == (np.uint8, (4, 5, 3))
    assert np.all(pixels == 128)
    assert told.steps[1].keys() == metrics.keys()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (lambda: np.zeros((1 << 20) + 1, np.float32), r"has 4194308 bytes, and at most 4194304"),
        (lambda: Image(np.zeros((2000, 2100), np.uint8)), r"has 4200000 bytes"),
        (lambda: np.array(["a"]), r"its dtype is <U1"),
        (lambda: np.zeros(1, complex), r"its dtype is complex128"),
    ],
)
def test_an_array_that_cannot_be_sent_is_refused(inproc_session, value, why):
    def report(node, task, epoch, step):
        current_task().report(big=value())

    with pytest.raises(TaskFailedError, match=rf"Task a/task0 reports 'big', .*{why}"):
        metrics_of(inproc_session, report, nodes="a")


def test_all_arrays_of_a_worker_are_bounded_together(inproc_session):
    def report(node, task, epoch, step):
        for _ in range(9):  # they replace each other
            current_task().report(same=np.zeros(1 << 19))
        for i in range(4):
            current_task().report(**{f"big{i}": np.zeros(1 << 19)})

    with pytest.raises(TaskFailedError, match=r"'big3': .* 20971520 bytes, and at most 16777216"):
        metrics_of(inproc_session, report, nodes="a")
