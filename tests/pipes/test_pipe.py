"""Pipes: order, bounds, errors, positions."""

import operator
import threading
import time

import numpy as np
import pytest

from jobrunner import (
    Blob,
    DefinitionError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Task,
    TaskFailedError,
    TaskGroup,
    current_task,
    epoch_limiter,
    pipe,
)
from jobrunner.data import from_records

READ = []
GATE = threading.Event()


class Numbers:
    """The numbers from 0 to n - 1, as records."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        READ.append(i)
        return i


@pytest.fixture(autouse=True)
def _nothing_read():
    READ.clear()
    GATE.clear()


def square(x):
    return x * x


def add_to(x, total):
    total += x
    return int(total[0])


def make_job(make_pipe, *, kind=Numbers, n=10, **options):
    """A job whose epochs run a pipe over n numbers on node "here"; and the pipe's results."""
    with Job("pipes", **options) as job, Node("here"):
        with job.init_group:
            Task(lambda: from_records(kind(n)), (), "reader", name="open")
        results = make_pipe().output()
        job.add_stop_condition(
            Task(operator.attrgetter("finished"), "reader", name="finished").output()
        )
    return job, results


@pytest.mark.parametrize("num_threads", [1, 3])
def test_results_come_in_the_order_of_the_items(inproc_session, num_threads):
    job, results = make_job(lambda: pipe("reader", square, num_threads=num_threads))
    result = JobRunner(job).run(inproc_session)
    assert result.epoch == 1
    assert results.fetch() == [x * x for x in range(10)]
    assert list(range(10)) == READ


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_limit_splits_a_pass_over_epochs_and_the_next_pass_begins_after_its_end(
    inproc_session, num_threads
):
    job, results = make_job(lambda: pipe("reader", square, limit=4, num_threads=num_threads))
    with job, Node("here") as here:
        with job.init_group:
            Task(list, (), "seen", name="none")
        Task(lambda results, seen: seen.append(results), [results], updates="seen", name="note")
    job.stop_conditions.clear()
    epoch_limiter(job, 4)
    JobRunner(job).run(inproc_session)
    assert inproc_session.fetch(here["seen"]) == [
        [0, 1, 4, 9],
        [16, 25, 36, 49],
        [64, 81],
        [0, 1, 4, 9],
    ]


def hold(x, most):
    most[0] = max(most[0], len(READ) - x)
    return x


@pytest.mark.parametrize("num_threads", [1, 3])
def test_no_more_is_read_than_fits_and_not_yet_passed_on(inproc_session, num_threads):
    with TaskGroup() as group, Node("here"):
        Task(lambda: from_records(Numbers(40)), (), "reader")
        Task(lambda: np.zeros(1, int), outputs="most")
        pipe("reader", operator.pos, into=hold, updates="most", num_threads=num_threads)
        most = group.final_output("most")
    inproc_session.run(group)
    assert 1 <= most.fetch()[0] <= 2 * num_threads


def scale(x, by, offset):
    return x * int(by[0]) + offset


def test_what_has_no_position_is_refused_when_a_pipe_reads_from_it(inproc_session):
    """Each run would read all of a list again."""
    with Job("reading") as job, Node("here"):
        with job.init_group:
            Task(lambda: [1, 2, 3], outputs="reader", name="make")
        pipe("reader", operator.neg, name="negate", limit=2)
    epoch_limiter(job, 1)
    refused = r"'negate.*at epoch 1: .*the pipe reads from blob 'reader', which is list\."
    with pytest.raises(TaskFailedError, match=refused):
        JobRunner(job).run(inproc_session)


def test_inputs_are_shared_by_all_calls(inproc_session):
    with TaskGroup() as group, Node("here"):
        Task(lambda: from_records(Numbers(5)), (), "reader")
        Task(lambda: np.array([3]), outputs="by", name="by")
        one = Task(lambda: 1)
        got = pipe("reader", scale, ["by", one.output()], "scaled", num_threads=2).output()
    inproc_session.run(group)
    assert got.fetch() == [1, 4, 7, 10, 13]


def draw(*_):
    return float(current_task().rng.random())


def draw_beside(x):
    return current_task().instance, draw(x)


def test_an_item_draws_the_same_numbers_on_any_number_of_threads(inproc_session):
    drawn = []
    for num_threads in (1, 4):
        job, results = make_job(
            lambda n=num_threads: pipe("reader", draw_beside, num_threads=n),
            seed=5,
        )
        JobRunner(job).run(inproc_session)
        instances, numbers = zip(*results.fetch(), strict=True)
        assert instances == tuple(range(10))
        drawn.append(numbers)
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 10


def fail_at_7(x, *_):
    if x == 7:
        raise ValueError("seven")
    return x


class Failing(Numbers):
    def __getitem__(self, i):
        return fail_at_7(i)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ({"processor": fail_at_7}, Numbers),
        ({"processor": operator.pos, "into": fail_at_7}, Numbers),
        ({"processor": operator.pos}, Failing),
    ],
)
def test_an_error_ends_the_group_and_names_node_task_and_epoch(
    inproc_session, call, kind, num_threads
):
    options = {"name": "work", "num_threads": num_threads, **call}
    job, _ = make_job(lambda: pipe("reader", **options), kind=kind)
    with pytest.raises(TaskFailedError, match="ValueError: seven") as caught:
        JobRunner(job).run(inproc_session)
    assert (caught.value.node, caught.value.task, caught.value.epoch) == ("here", "work", 1)
    assert "In item 7 of this run" in str(caught.value)


def test_a_resumed_run_reads_on_from_what_was_processed(inproc_session, tmp_path):
    def new():
        job, results = make_job(
            lambda: pipe("reader", square, into=add_to, updates="total", num_threads=3, limit=3)
        )
        with job.init_group:
            Task(lambda: np.array([100]), (), "total", node="here", name="zero")
        return job, results

    manager = MultiNodeCheckpointManager(tmp_path / "runs")
    job, _ = new()
    assert JobRunner(job, manager).run(inproc_session).epoch == 4
    final = int(inproc_session.fetch(Node("here")["total"])[0])
    assert final == 100 + sum(x * x for x in range(10))
    for epoch in range(4):
        READ.clear()
        job, _ = new()
        runner = JobRunner(job, manager, resume_from_epoch=epoch)
        runner.run(inproc_session)
        assert list(range(3 * epoch, 10)) == READ
        assert inproc_session.fetch(Node("here")["total"])[0] == final


def fail_once_at_7(x):
    if x == 7 and not GATE.is_set():
        GATE.set()
        raise TimeoutError
    return x * x


@pytest.mark.parametrize("limit", [3, 4])
def test_each_item_counts_once_though_an_epoch_runs_again(inproc_session, tmp_path, limit):
    options = {"into": add_to, "updates": "total", "num_threads": 2, "limit": limit}
    job, _ = make_job(
        lambda: pipe("reader", fail_once_at_7, transient_errors=TimeoutError, **options)
    )
    with job.init_group:
        Task(lambda: np.zeros(1, int), (), "total", node="here", name="zero")
    result = JobRunner(job, MultiNodeCheckpointManager(tmp_path)).run(inproc_session)
    assert result.restarts == 1
    assert inproc_session.fetch(Node("here")["total"])[0] == sum(x * x for x in range(10))


class Endless(Numbers):
    """Its first item lets a task fail."""

    def __getitem__(self, i):
        GATE.set()
        return 1


def fail_when_open():
    GATE.wait(10)
    raise ValueError("elsewhere")


def wait_until_cancelled(x):
    while not current_task().is_cancelled:
        time.sleep(0.001)
    return x


@pytest.mark.parametrize("processor", [operator.pos, wait_until_cancelled])
@pytest.mark.parametrize("options", [{}, {"num_threads": 2}, {"into": square, "num_threads": 2}])
def test_an_endless_pipe_ends_when_another_task_fails(inproc_session, options, processor):
    with TaskGroup() as group, Node("here"):
        Task(lambda: from_records(Endless(1 << 40)), (), "reader")
        pipe("reader", processor, **options)
        Task(fail_when_open, node="other")
    with pytest.raises(TaskFailedError, match="elsewhere"):
        inproc_session.run(group)
    # Waits until the pipe has returned.
    inproc_session.run(Task(square, (), kwargs={"x": 1}, node="here"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"processor": scale}, "cannot be called with 1 arguments"),
        ({"into": square, "updates": ["x", "y"]}, "cannot be called with 3 arguments"),
        ({"processor": scale, "inputs": ["x", "y"], "updates": "z"}, "Give into="),
        ({"inputs": "x"}, "are for processor"),
        ({"reader": Blob("reader", "there")}, "'here', and its reader is on 'there'.*sharded"),
        ({"num_instances": 3}, "num_instances is an argument of Task"),
        ({"into": square, "updates": "reader"}, "cannot be called with 2 arguments|twice"),
    ],
)
def test_a_pipe_that_cannot_run_is_refused(arguments, message):
    with TaskGroup(), Node("here"), pytest.raises(DefinitionError, match=message):
        pipe(**{"reader": "reader", **arguments})
