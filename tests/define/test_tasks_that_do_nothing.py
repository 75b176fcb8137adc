"""Tasks that would do nothing are refused, or the job that misses them says so."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

from jobrunner import (
    BlobNotFoundError,
    DefinitionError,
    Job,
    JobRunner,
    Node,
    Session,
    Task,
    TaskGroup,
    WorkspaceType,
    epoch_limiter,
)


def count_up() -> Iterator[int]:
    yield 1


async def count_later() -> Any:
    yield 1


async def answer_later() -> int:
    return 1


class Asynchronous:
    async def __call__(self) -> int:
        return 1

    def generate(self) -> Iterator[int]:
        yield 1

    async def answer(self) -> int:
        return 1


class Generating:
    def __call__(self) -> Iterator[int]:
        yield 1


class Curried:
    __call__ = functools.partialmethod(lambda self, n: n, 1)


ASYNC = "coroutine function"
GENERATOR = "generator function"
LAZY = [
    (answer_later, ASYNC),
    (functools.partial(answer_later), ASYNC),
    (Asynchronous(), ASYNC),
    (functools.partial(functools.partial(Asynchronous())), ASYNC),
    (Asynchronous().answer, ASYNC),
    (Asynchronous().__call__, ASYNC),
    (count_up, GENERATOR),
    (functools.partial(count_up), GENERATOR),
    (Generating(), GENERATOR),
    (functools.partial(Generating()), GENERATOR),
    (Asynchronous().generate, GENERATOR),
    (count_later, "async generator function"),
]


@pytest.mark.parametrize(("fn", "kind"), LAZY)
def test_a_function_that_its_call_does_not_run_is_refused(fn: Callable[[], Any], kind: str) -> None:
    group = TaskGroup()
    with group, pytest.raises(DefinitionError, match=rf"Task 'n/t': fn is an? {kind}"):
        Task(fn, name="t", node="n")
    with pytest.raises(DefinitionError, match=rf"report_step: fn is an? {kind}"):
        group.report_step(fn)
    assert group.tasks() == group.reports == []


@pytest.mark.parametrize("event", ["on_epoch", "on_finish"])
def test_a_callback_that_its_call_does_not_run_is_refused(event: str) -> None:
    callback = type("Late", (), {event: Asynchronous.answer})()
    with pytest.raises(DefinitionError, match=rf"{event} of Late is a coroutine function"):
        JobRunner(Job(), callbacks=[callback])


@pytest.mark.parametrize("fn", [Curried(), functools.lru_cache(lambda: 1), int, dict])
def test_other_callables_are_accepted(fn: Callable[..., Any]) -> None:
    assert Task(fn, node="n", group=TaskGroup()).fn is fn


def test_an_iterator_or_coroutine_that_a_task_returns_is_refused(inproc_session: Session) -> None:
    def lazy(what: str) -> Any:
        made: dict[str, Any] = {
            "generator": (i for i in range(3)),
            "async_generator": count_later(),
            "map": map(str, range(3)),
            "coroutine": Asynchronous().answer(),
            "Future": asyncio.Future(loop=asyncio.new_event_loop()),
        }
        made["coroutine"].close()
        made["Future"].get_loop().close()
        return made[what]

    def both() -> Any:
        return 1, count_up()

    for what in ("generator", "async_generator", "map"):
        for outputs in ((), "x"):
            with pytest.raises(DefinitionError, match=f"n/lazy returned .*{what}") as caught:
                inproc_session.run(
                    Task(lazy, kwargs={"what": what}, outputs=outputs, name="lazy", node="n")
                )
            assert "tuple" in str(caught.value)
    for what in ("coroutine", "Future"):
        with pytest.raises(DefinitionError, match=rf"{what}, which nobody awaits.*asyncio\.run"):
            inproc_session.run(Task(lazy, kwargs={"what": what}, node="n"))
    with pytest.raises(DefinitionError, match="generator"):
        inproc_session.run(Task(both, outputs=["x", "y"], node="n"))
    with pytest.raises(DefinitionError, match="generator"):
        inproc_session.run(Task(lazy, kwargs={"what": "generator"}, num_instances=2, node="n"))


# ---- tasks outside any group


def make_job() -> Job:
    job = Job("j")
    with job.init_group:
        Task(lambda: 0, outputs="x", node="a")
    epoch_limiter(job, 1)
    return job


def test_a_dropped_task_outside_any_group_is_an_error_of_the_job() -> None:
    job = make_job()
    Task(print, name="lost", node="a")
    for _ in range(2):
        with pytest.raises(DefinitionError, match=r"a/lost.*test_tasks_that_do_nothing.py:\d+"):
            job.compile()
    make_job().compile()  # a job defined later has nothing to do with it


def test_a_dropped_task_of_another_thread_is_an_error_of_the_job() -> None:
    with make_job() as job:
        thread = threading.Thread(target=lambda: Task(print, name="lost", node="a"), name="helper")
        thread.start()
        thread.join()
    with pytest.raises(DefinitionError, match=r"a/lost.*thread 'helper'.*group=job\.epoch_group"):
        job.compile()


def test_a_task_outside_any_group_that_may_still_join_one_is_warned_of() -> None:
    job = make_job()
    kept = Task(print, name="kept", node="a")
    with pytest.warns(UserWarning, match=r"a/kept.*joined no group"):
        job.compile()
    job = make_job()
    job.exit_group.add(kept)
    job.compile()


def test_a_group_that_misses_a_task_is_an_error_too(inproc_session: Session) -> None:
    group = TaskGroup()
    with group:
        Task(print, node="a")
    Task(print, name="lost", node="a")
    with pytest.raises(DefinitionError, match="a/lost"):
        inproc_session.run(group)


def test_tasks_without_a_group_that_ran_or_were_refused_are_forgotten(
    inproc_session: Session,
) -> None:
    job = make_job()
    inproc_session.run(Task(int, name="ran", node="a"))
    with contextlib.suppress(DefinitionError):
        Task(count_up, name="refused", node="a")
    gc.collect()
    job.compile()


def make_group(**kwargs: Any) -> TaskGroup:
    group = TaskGroup()
    Task(print, name="lost", node="a", group=group, **kwargs)
    return group


def test_a_dropped_group_that_belongs_to_no_job_is_an_error_of_the_job() -> None:
    job = make_job()
    make_group()
    for _ in range(2):
        with pytest.raises(
            DefinitionError, match=r"group of task 'a/lost', made at .*:\d+, is in no job"
        ):
            job.compile()
    make_job().compile()  # a job defined later has nothing to do with it


def test_a_group_that_may_still_run_is_warned_of() -> None:
    with make_job() as job, TaskGroup() as group:
        Task(print, name="lost", node="a")
    with pytest.warns(UserWarning, match=r"group of task 'a/lost'.*joined no job.*Session\.run"):
        job.compile()
    job = make_job()
    other = Job("other", exit_group=group)
    job.compile()
    assert other.exit_group is group


def test_groups_that_run_one_after_another_are_not_warned_of(inproc_session: Session) -> None:
    groups = [make_group(), make_group(), make_group()]
    job = make_job()
    groups.append(make_group())
    for group in groups:
        inproc_session.run(group)
    job.compile()
    with pytest.raises(BlobNotFoundError):
        inproc_session.run(make_group(inputs=Node("other")["missing"]))
    job.compile()


# ---- groups and types


def test_a_group_has_one_role() -> None:
    group = TaskGroup()
    Job("one", init_group=group)
    Job("two", init_group=group)  # the same tasks begin both
    with pytest.raises(DefinitionError, match="Job 'three'.*already the init group of job 'two'"):
        Job("three", epoch_group=group)
    other = TaskGroup()
    with pytest.raises(DefinitionError, match="Job 'four'.*one role"):
        Job("four", init_group=other, epoch_group=other)
    Job("five", exit_group=other)  # a job that was refused has no groups


@pytest.mark.parametrize("role", Job("any").groups)
def test_the_groups_of_a_job_cannot_be_replaced(role: str) -> None:
    job = Job("six")
    assert getattr(job, f"{role}_group") is job.groups[role]
    with pytest.raises(AttributeError, match=f"{role}_group"):
        setattr(job, f"{role}_group", TaskGroup())


@pytest.mark.parametrize("kind", ["global", "private"])
def test_workspace_types_may_be_given_by_their_names(kind: str) -> None:
    group = TaskGroup(kind)
    assert group.workspace_type is WorkspaceType(kind)
    assert Task(int, node="n", group=group, workspace_type=kind).blob_type is WorkspaceType(kind)


def test_other_names_of_workspace_types_are_refused() -> None:
    for make in (TaskGroup, lambda kind: Task(int, workspace_type=kind)):
        with pytest.raises(DefinitionError, match=r"'global' or 'private'.*got 'lokal'"):
            make("lokal")


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_a_job_that_ran_can_be_pickled(dumps: Any, inproc_session: Session) -> None:
    job = Job("j")
    with job.init_group:
        result = Task(int, outputs="x", node=Node("a")).output()
    epoch_limiter(job, 1)
    JobRunner(job).run(inproc_session)
    copy = pickle.loads(dumps(job))
    assert [task.full_name for task in copy.init_group.tasks()] == ["a/int"]
    assert JobRunner(copy).run(inproc_session).epoch == 1
    assert result.task.session is inproc_session
