"""What a failure says: where, how much of it, and what to do, once."""

from pathlib import Path

import numpy as np
import pytest

from jobrunner import (
    CheckpointCorruptError,
    DefinitionError,
    Job,
    JobRunner,
    NodeLostError,
    Task,
    TaskFailedError,
    epoch_limiter,
)
from jobrunner.cluster.source_lines import with_source_lines
from tests.jobs import Listener, counter

MANY = 10_000_000


def run(session, fn):
    """Run a job whose epochs call `fn` with blob x, a list."""
    with Job("j") as job:
        with job.init_group:
            Task(list, outputs="x", node="a")
        Task(fn, name="t", node="a")
    epoch_limiter(job, 2)
    return JobRunner(job).run(session)


@pytest.mark.parametrize(
    "error",
    [
        DefinitionError("mine"),
        CheckpointCorruptError("mine", path="p"),
        NodeLostError("mine", nodes=("b",)),
        TaskFailedError("mine", node="b", task="other", epoch=7),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_task_that_raises_one_of_our_errors_is_named(error, inproc_session):
    def fail():
        raise error

    with pytest.raises(TaskFailedError, match=r"'t' .*'a'.* at epoch 1: .*mine") as caught:
        run(inproc_session, fail)
    assert (caught.value.node, caught.value.task, caught.value.epoch) == ("a", "t", 1)
    assert type(caught.value.__cause__) is type(error)
    assert vars(caught.value.__cause__) == vars(error)
    assert "in fail" in caught.value.remote_traceback


def test_the_client_shows_source_lines_of_code_that_workers_have_not_and_reads_no_other_file(
    tmp_path,
):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    number = 1 + Path(__file__).read_text().splitlines().index("MANY = 10_000_000")
    mine, other = (
        f'  File "{__file__}", line {number}, in f\n',
        f'  File "{secret}", line 1, in g\n',
    )
    shown = f"{mine}    MANY = 10_000_000\n"
    assert with_source_lines(f"{mine}{other}{mine}E: e") == f"{shown}{other}{shown}E: e"
    assert with_source_lines(f"{shown}E: e") == f"{shown}E: e"


def test_a_long_text_of_an_exception_is_shortened(inproc_session):
    def fail():
        try:
            raise KeyError("k" * MANY)
        except KeyError as error:
            again = ValueError("begin" + "x" * MANY + "end", 3)
            again.add_note("n" * MANY)
            raise again from error

    with pytest.raises(TaskFailedError) as caught:
        run(inproc_session, fail)
    error = caught.value
    cause = error.__cause__
    assert type(cause) is ValueError
    assert cause.args[1] == 3
    assert "begin" in str(error)
    assert f"{MANY + 8:,} characters" in str(cause)
    for text in (str(error), error.remote_traceback, str(cause), *error.__notes__):
        assert len(text) < 100_000
    assert "characters" in str(error)


# ---- values that contain themselves


def endless():
    value = [np.zeros(2)]
    value.append({"again": value})
    return value


def deep():
    value = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize("make", [endless, deep])
@pytest.mark.parametrize("reader", ["a", "b"])
def test_a_value_may_contain_itself_but_not_be_nested_too_deeply(make, reader, inproc_session):
    with Job("j") as job:
        task = Task(make, outputs="y", name="t", node="a")
        Task(lambda value: len(value), inputs=task.output(), node=reader)
    epoch_limiter(job, 1)
    if make is endless:
        assert JobRunner(job).run(inproc_session).epoch == 1
        return
    with pytest.raises(DefinitionError, match=r"epoch 1.*a/t.*is nested too deeply"):
        JobRunner(job).run(inproc_session)


def test_while_a_run_recovers_by_itself_nobody_is_told_to_act(inproc_session):
    def fail(n):
        raise OSError("flaky")

    heard = Listener()
    job = counter(2, fail, transient_errors=OSError)
    with pytest.raises(TaskFailedError) as caught:
        JobRunner(job, max_restarts=2, callbacks=[heard]).run(inproc_session)
    assert len(heard.warnings) == 2
    for text in heard.warnings:
        assert "flaky" in text
        assert "Beginning again from the start." in text
        assert "start the same command" not in text.lower()
    text = str(caught.value)
    assert text.lower().count("the same command") == 1
    assert "loss 3 in a row" in text
