"""A run on an event loop: awaited as the methods of an asynchronous client are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Session,
    Task,
    TaskFailedError,
    epoch_limiter,
)

REACHED, LET_GO = threading.Event(), threading.Event()


def add(x: int) -> int:
    return x + 1


def add_when_told(x: int) -> int:
    REACHED.set()
    LET_GO.wait(30)
    return x + 1


def make(epochs: int, step: Callable[[int], int] = add) -> Job:
    with Job("count") as job:
        with job.init_group:
            Task(lambda: 0, outputs="x", node=Node("a"))
        Task(step, inputs="x", outputs="x", node=Node("a"))
    epoch_limiter(job, epochs)
    return job


def on_a_loop(use: Callable[[Session], Awaitable[Any]]) -> Any:
    """Use a session of an asynchronous client and cluster, on one event loop."""
    REACHED.clear()
    LET_GO.clear()

    async def main() -> Any:
        async with (
            LocalCluster(
                n_workers=1, processes=False, dashboard_address=None, asynchronous=True
            ) as cluster,
            Client(cluster, asynchronous=True) as client,
            Session(client) as session,
        ):
            return await use(session)

    return asyncio.run(main())


def test_a_run_is_awaited_while_the_loop_goes_on(tmp_path: Path) -> None:
    async def use(session: Session) -> tuple[int, int, int]:
        manager = MultiNodeCheckpointManager(tmp_path)
        running = asyncio.ensure_future(JobRunner(make(2, add_when_told), manager).run(session))
        while not REACHED.is_set():
            await asyncio.sleep(0)
        is_running = not running.done()
        LET_GO.set()
        result = await running
        return is_running, result.epoch, await session.fetch(Node("a")["x"])

    assert on_a_loop(use) == (True, 2, 2)
    assert MultiNodeCheckpointManager(tmp_path).epochs() == [0, 1, 2]


def test_a_task_is_awaited_and_its_error_is_raised() -> None:
    async def use(session: Session) -> int:
        with pytest.raises(TaskFailedError, match="division"):
            await session.run(Task(lambda: 1 // 0, node=Node("a")))
        return await session.run(Task(lambda: 6 * 7, node=Node("a")))

    assert on_a_loop(use) == 42


def test_a_cancelled_run_ends_after_its_epoch_which_is_recorded(tmp_path: Path) -> None:
    async def use(session: Session) -> None:
        manager = MultiNodeCheckpointManager(tmp_path)
        running = asyncio.ensure_future(JobRunner(make(9, add_when_told), manager).run(session))
        while not REACHED.is_set():
            await asyncio.sleep(0)
        running.cancel()
        asyncio.get_running_loop().call_soon(LET_GO.set)
        with pytest.raises(asyncio.CancelledError):
            await running

    on_a_loop(use)
    assert MultiNodeCheckpointManager(tmp_path).epochs() == [0, 1]


def test_a_run_that_is_cancelled_again_stops_at_once() -> None:
    async def use(session: Session) -> bool:
        running = asyncio.ensure_future(JobRunner(make(9, add_when_told)).run(session))
        while not REACHED.is_set():
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        is_held = not LET_GO.is_set()
        LET_GO.set()
        return is_held

    assert on_a_loop(use)


def test_the_result_of_a_call_that_has_waited_can_be_awaited(inproc_session: Session) -> None:
    """A notebook has an event loop, and most clients there are synchronous."""

    async def main() -> int:
        runner = JobRunner(make(3))
        assert runner.run(inproc_session).epoch == 3
        return (await runner.run(inproc_session)).epoch

    assert asyncio.run(main()) == 3
