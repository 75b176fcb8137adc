"""What a failure says: where, how much of it, and what to do, once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import jobrunner
from jobrunner import (
    CheckpointCorruptError,
    CheckpointError,
    DefinitionError,
    ExecutionError,
    Job,
    JobRunner,
    JobRunnerError,
    MultiNodeCheckpointManager,
    Node,
    NodeLostError,
    SchedulerLostError,
    Session,
    Task,
    TaskFailedError,
    epoch_limiter,
    pipe,
)
from jobrunner.cli.command import main
from jobrunner.data import from_records

MANY = 10_000_000


def run(session: Session, fn: Any, path: Path | None = None, **options: Any) -> Any:
    """Run a job whose epochs call `fn` with blob x, a list."""
    with Job("j") as job:
        with job.init_group:
            Task(list, outputs="x", node="a")
        Task(fn, name="t", node="a", **options)
    epoch_limiter(job, 2)
    manager = None if path is None else MultiNodeCheckpointManager(path)
    return JobRunner(job, manager).run(session)


def test_no_message_puts_an_article_before_the_name_of_a_class() -> None:
    package = Path(jobrunner.__file__).parent
    article = re.compile(r"\ban? \{[^{}]*(__name__|__qualname__|name_class)")
    assert [str(it) for it in package.rglob("*.py") if article.search(it.read_text())] == []


def test_a_message_that_quotes_another_ends_its_sentence_once() -> None:
    inner = DefinitionError("Two rows. Give one.")
    assert (
        str(ExecutionError(f"It said: {inner}. Try again."))
        == "It said: Two rows. Give one. Try again."
    )
    assert str(ExecutionError(f"It said: {inner}.")) == "It said: Two rows. Give one."
    for text in ("cd .. && ls", "../..", "wait... Then", "a..b"):
        assert str(ExecutionError(text)) == text


@pytest.mark.parametrize(
    "error",
    [
        DefinitionError("mine"),
        CheckpointError("mine"),
        CheckpointCorruptError("mine", path="p"),
        ExecutionError("mine"),
        NodeLostError("mine", nodes=("b",)),
        SchedulerLostError("mine"),
        TaskFailedError("mine", node="b", task="other", epoch=7),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_task_that_raises_one_of_our_errors_is_named(
    error: JobRunnerError, inproc_session: Session
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(TaskFailedError, match=r"'t' .*'a'.* at epoch 1: .*mine") as caught:
        run(inproc_session, fail)
    assert (caught.value.node, caught.value.task, caught.value.epoch) == ("a", "t", 1)
    assert type(caught.value.__cause__) is type(error)
    assert vars(caught.value.__cause__) == vars(error)
    assert "in fail" in caught.value.remote_traceback


def test_a_long_text_of_an_exception_is_shortened(inproc_session: Session) -> None:
    def fail() -> None:
        try:
            raise KeyError("k" * MANY)
        except KeyError as error:
            again = ValueError("begin" + "x" * MANY + "end", 3)
            again.add_note("n" * MANY)
            raise again from error

    with pytest.raises(TaskFailedError) as caught:
        run(inproc_session, fail)
    error = caught.value
    cause: Any = error.__cause__
    assert type(cause) is ValueError
    assert cause.args[1] == 3
    assert "begin" in str(error)
    assert f"{MANY + 8:,} characters" in str(cause)
    for text in (str(error), error.remote_traceback, str(cause), *error.__notes__):
        assert len(text) < 100_000
    assert "characters" in str(error)


def test_a_long_message_of_ours_is_shortened() -> None:
    text = str(DefinitionError("y" * MANY))
    assert len(text) < 100_000
    assert f"{MANY:,} characters" in text


def test_an_exception_without_a_text_of_its_own_is_told(inproc_session: Session) -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise ValueError

    def fail() -> None:
        raise BrokenError

    with pytest.raises(TaskFailedError, match="BrokenError"):
        run(inproc_session, fail)


# ---- values that contain themselves


def endless() -> list[Any]:
    value: list[Any] = [np.zeros(2)]
    value.append({"again": value})
    return value


def deep() -> Any:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize("make", [endless, deep])
@pytest.mark.parametrize("how", ["returned", "another node", "two", "instances"])
def test_a_value_may_contain_itself_but_not_be_nested_too_deeply(
    make: Any, how: str, inproc_session: Session
) -> None:
    def make_two() -> Any:
        return make(), 1

    with Job("j") as job:
        task = Task(
            make_two if how == "two" else make,
            outputs=["y", "z"] if how == "two" else "y",
            num_instances=2 if how == "instances" else 1,
            name="t",
            node="a",
        )
        Task(
            lambda value: len(value),
            inputs=task.output(),
            node="b" if how == "another node" else "a",
        )
    epoch_limiter(job, 1)
    if make is endless:
        assert JobRunner(job).run(inproc_session).epoch == 1
        return
    with pytest.raises(DefinitionError, match=r"epoch 1.*a/t.*is nested too deeply"):
        JobRunner(job).run(inproc_session)


@pytest.mark.parametrize("make", [endless, deep])
def test_a_blob_that_contains_itself_is_not_saved_and_named(
    make: Any, inproc_session: Session, tmp_path: Path
) -> None:
    def update(x: list[Any]) -> None:
        x.append(make())

    what = r"blob 'x'.*itself" if make is endless else "a/t .* nested too deeply"
    with pytest.raises(DefinitionError, match=what):
        run(inproc_session, update, tmp_path, updates="x")
    assert MultiNodeCheckpointManager(tmp_path).epochs() == [0]


def test_a_task_that_recurses_too_deeply_fails_as_any_other(inproc_session: Session) -> None:
    def recurse() -> None:
        recurse()

    with pytest.raises(TaskFailedError, match="RecursionError"):
        run(inproc_session, recurse)


# ---- advice


FLAKY = """
import os
from jobrunner import Job, Task, epoch_limiter

def fail():
    raise OSError("flaky")

with Job("flaky") as job:
    with job.init_group:
        Task(int, outputs="x", node="a")
    Task(fail, node="a", transient_errors=OSError)
epoch_limiter(job, 2)
"""


class Warnings:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_warning(self, message: str) -> None:
        self.texts.append(message)


def test_while_a_run_recovers_by_itself_nobody_is_told_to_act(inproc_session: Session) -> None:
    space: dict[str, Any] = {}
    exec(FLAKY, space)
    heard = Warnings()
    with pytest.raises(TaskFailedError) as caught:
        JobRunner(space["job"], max_restarts=2, callbacks=[heard]).run(inproc_session)
    assert len(heard.texts) == 2
    for text in heard.texts:
        assert "flaky" in text
        assert "Beginning again from the start." in text
        assert "start the same command" not in text.lower()
    text = str(caught.value)
    assert text.lower().count("the same command") == 1
    assert "loss 3 in a row" in text


def test_a_run_that_falls_back_by_itself_does_not_advise_to(
    inproc_session: Session, tmp_path: Path
) -> None:
    run(inproc_session, lambda: None, tmp_path)
    for store in tmp_path.glob("a.2*"):
        (store / "zarr.json").write_bytes(b"{}")
    with Job("j") as job, job.init_group:
        Task(list, outputs="x", node="a")
    epoch_limiter(job, 3)
    heard = Warnings()
    JobRunner(job, MultiNodeCheckpointManager(tmp_path), callbacks=[heard]).run(inproc_session)
    [text] = [text for text in heard.texts if "damaged" in text]
    assert "is not what was written" in text
    assert "Resume with" not in text


def test_the_command_line_advises_once_how_to_resume(tmp_path: Path) -> None:
    script = tmp_path / "flaky.py"
    script.write_text(FLAKY)
    result = CliRunner().invoke(
        main, ["run", str(script), "--checkpoint", str(tmp_path / "runs"), "--workers", "1"]
    )
    assert result.exit_code == 3
    last = result.output.partition("Error: ")[2]
    assert last.count("To resume from it: ") == 1
    assert "the same command" not in last.lower()
    assert "loss 4 in a row" in last


def test_advice_survives_pickling_and_can_be_replaced() -> None:
    import pickle

    error = jobrunner.SchedulerLostError("It is lost.").advise("Start it.")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.without_advice()) == ("It is lost. Start it.", "It is lost.")
    assert str(copy.advise("Wait.")) == "It is lost. Wait."


def refuse(item: object = None, *, x: object = None) -> None:
    raise DefinitionError("by hand")


@pytest.mark.parametrize("how", ["by name", "seed_global_rng", "pipe"])
def test_an_error_of_a_users_function_is_its_tasks_however_it_is_called(
    inproc_session: Session, how: str
) -> None:
    flags = {how: True} if how.endswith("_rng") else {}
    with Job("j", **flags) as job, Node("a"):
        with job.init_group:
            Task(list, (), "x")
            Task(lambda: from_records(range(2)), outputs="reader", name="make")
        if how == "pipe":
            pipe("reader", refuse)
        else:
            Task(refuse, {"x": "x"} if how == "by name" else ())
    epoch_limiter(job, 1)
    with pytest.raises(TaskFailedError, match="'refuse'.* failed at epoch 1: .*by hand"):
        JobRunner(job).run(inproc_session)
