"""Tasks of several instances: what is made before them, and what ends after them."""

import threading

import pytest

from jobrunner import (
    BlobNotFoundError,
    Node,
    Task,
    TaskFailedError,
    TaskGroup,
    current_task,
)

EVENTS = []


@pytest.fixture(autouse=True)
def _no_events():
    EVENTS.clear()


def note(event):
    EVENTS.append(event)


def shared():
    note("task set up")
    yield threading.Barrier(3)
    note("task torn down")


def own():
    number = current_task().instance
    note(("set up", number))
    yield 10 * number
    note(("torn down", number))


def meet(x, barrier, own):
    barrier.wait(10)
    note("call")
    return x + own


def run(session, *args, **kwargs):
    task = Task(*args, node="n", group=TaskGroup(), **kwargs)
    output = task.output()
    assert task.group is not None
    session.run(task.group)
    return output.fetch()


def test_set_up_runs_once_before_all_instances_and_tear_down_once_after_them(inproc_session):
    values = run(
        inproc_session,
        lambda barrier, own: meet(1, barrier, own),
        num_instances=3,
        setup={"barrier": shared},
        instance_setup={"own": own},
    )
    assert values == [1, 11, 21]
    assert EVENTS[0] == "task set up"
    assert EVENTS[-1] == "task torn down"
    assert len(EVENTS) == 2 + 3 * 3
    for instance in range(3):
        assert EVENTS.index(("set up", instance)) < EVENTS.index("call")
        assert EVENTS.index("call") < EVENTS.index(("torn down", instance))


def fail(own):
    if own == 10:
        raise ValueError("of instance 1")


def test_tear_downs_run_once_after_an_error_of_an_instance(inproc_session):
    with pytest.raises(TaskFailedError, match="'fail' .node 'n'") as caught:
        run(
            inproc_session,
            lambda barrier, own: fail(own),
            name="fail",
            num_instances=3,
            setup={"barrier": shared},
            instance_setup={"own": own},
        )
    assert "of instance 1" in str(caught.value)
    inproc_session.run(Task(note, kwargs={"event": "next"}, node="n"))  # waits for all instances
    assert EVENTS[-2:] == ["task torn down", "next"]
    assert EVENTS.count("task torn down") == 1
    assert sorted(number for what, number in EVENTS[1:-2] if what == "torn down") == [0, 1, 2]


WENT_ON, FAILED = threading.Event(), threading.Event()


class LateError(Exception):
    """Says what happened only when there was time for others to go on."""

    def __str__(self):
        WENT_ON.wait(0.2)
        return "told late"


def fail_first():
    if current_task().instance == 1:
        FAILED.set()
        raise LateError
    FAILED.wait(10)
    return 1


def go_on(parts):
    WENT_ON.set()


def test_nobody_gets_the_values_of_a_task_of_which_one_instance_has_failed(inproc_session):
    WENT_ON.clear()
    FAILED.clear()
    with TaskGroup() as group, Node("n"):
        Task(go_on, [Task(fail_first, (), num_instances=2, outputs="parts")])
    with pytest.raises(TaskFailedError, match="told late"):
        inproc_session.run(group)
    assert not WENT_ON.is_set()
    with pytest.raises(BlobNotFoundError):
        inproc_session.fetch(Node("n")["parts"])


def broken():
    yield 1
    raise OSError("cannot close")


def never():
    raise OSError("cannot open")


def twice():
    yield 1
    yield 2


def nothing():
    yield from ()


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (broken, "cannot close"),
        (never, "cannot open"),
        (twice, "sets up 'value' yields more than one value"),
        (nothing, "sets up 'value' yields no value"),
    ],
)
@pytest.mark.parametrize("kind", ["setup", "instance_setup"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_set_up_or_tear_down_that_fails_fails_the_task(
    inproc_session, setup, message, kind, count
):
    # The set-up made before is torn down, and the blob is not set.
    made = {"barrier": shared, "value": setup}
    with pytest.raises(TaskFailedError, match=message) as caught:
        run(
            inproc_session,
            lambda barrier, value: value,
            outputs="x",
            name="t",
            num_instances=count,
            **{kind: made},
        )
    assert "node 'n'" in str(caught.value)
    inproc_session.run(Task(note, kwargs={"event": "next"}, node="n"))
    calls = count if kind == "instance_setup" else 1
    assert EVENTS.count("task set up") == EVENTS.count("task torn down") == calls
