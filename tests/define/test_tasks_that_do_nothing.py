"""Tasks that would do nothing are refused, or the job that misses them says so."""

import asyncio
import contextlib
import functools
import gc
import pickle

import pytest

from jobrunner import (
    DefinitionError,
    Job,
    JobRunner,
    Task,
    TaskGroup,
)


def count_up():
    yield 1


async def count_later():
    yield 1


class Asynchronous:
    async def __call__(self):
        return 1

    async def answer(self):
        return 1

    def generate(self):
        yield 1


LAZY = [
    (functools.partial(functools.partial(Asynchronous())), "coroutine function"),
    (Asynchronous().answer, "coroutine function"),
    (functools.partial(count_up), "generator function"),
    (Asynchronous().generate, "generator function"),
    (count_later, "async generator function"),
]


@pytest.mark.parametrize(("fn", "kind"), LAZY)
def test_a_function_that_its_call_does_not_run_is_refused(fn, kind):
    group = TaskGroup()
    with group, pytest.raises(DefinitionError, match=rf"Task 'n/t': fn is an? {kind}"):
        Task(fn, name="t", node="n")
    with pytest.raises(DefinitionError, match=rf"report_step: fn is an? {kind}"):
        group.report_step(fn)
    assert group.tasks() == group.reports == []


@pytest.mark.parametrize("event", ["on_epoch", "on_finish"])
def test_a_callback_that_its_call_does_not_run_is_refused(event):
    callback = type("Late", (), {event: Asynchronous.answer})()
    with pytest.raises(DefinitionError, match=rf"{event} of Late is a coroutine function"):
        JobRunner(Job(), callbacks=[callback])


@pytest.mark.parametrize("fn", [functools.lru_cache(lambda: 1), int, dict])
def test_other_callables_are_accepted(fn):
    assert Task(fn, node="n", group=TaskGroup()).fn is fn


def test_an_iterator_or_coroutine_that_a_task_returns_is_refused(inproc_session):
    def lazy(what):
        made = {
            "generator": (i for i in range(3)),
            "async_generator": count_later(),
            "map": map(str, range(3)),
            "coroutine": Asynchronous().answer(),
            "Future": asyncio.Future(loop=asyncio.new_event_loop()),
        }
        made["coroutine"].close()
        made["Future"].get_loop().close()
        return made[what]

    for what in ("generator", "async_generator", "map"):
        with pytest.raises(DefinitionError, match=f"returned .*{what}.*Return a list or a tuple"):
            inproc_session.run(Task(lazy, kwargs={"what": what}, outputs="x", node="n"))
    for what in ("coroutine", "Future"):
        with pytest.raises(DefinitionError, match=rf"{what}, which nobody awaits.*asyncio\.run"):
            inproc_session.run(Task(lazy, kwargs={"what": what}, node="n"))
    kwargs = {"what": "generator"}
    for task in (
        Task(lambda: (1, count_up()), outputs=["x", "y"], node="n"),
        Task(lazy, kwargs=kwargs, num_instances=2, node="n"),
    ):
        with pytest.raises(DefinitionError, match="generator"):
            inproc_session.run(task)


# ---- tasks outside any group


def test_a_task_that_is_dropped_outside_any_group_warns():
    with pytest.warns(RuntimeWarning, match="'a/lost' is in no group, so it never ran"):
        Task(print, name="lost", node="a")


def test_tasks_that_joined_a_group_or_were_refused_or_copied_do_not_warn(inproc_session):
    inproc_session.run(Task(int, name="ran", node="a"))
    group = TaskGroup()
    group.add(Task(int, name="added", node="a"))
    with contextlib.suppress(DefinitionError):
        Task(count_up, name="refused", node="a")
    kept = Task(int, name="kept", node="a")
    pickle.loads(pickle.dumps(kept))
    gc.collect()  # warnings are errors
    group.add(kept)
