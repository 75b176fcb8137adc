"""A client's own connections to workers: faster where they work, and never needed."""

import asyncio
import socket
import threading
import time
from collections import UserDict
from types import SimpleNamespace

import dask
import pytest
from distributed import Client
from distributed.core import Server
from distributed.utils import LoopRunner

from jobrunner import Job, JobRunner, Node, Session, Task, current_task
from jobrunner.cluster.direct import DirectLines
from jobrunner.worker.plugin import OPERATION

PATIENCE_SECONDS = 10.0


class Worker:
    """Something that answers as a worker would, on a loop of its own."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.is_silent = False
        self.runner = LoopRunner(asynchronous=False)
        self.runner.start()
        self.server = self.runner.run_sync(self._start)
        self.address = self.server.address

    async def _start(self) -> Server:
        server = Server({OPERATION: self.answer}, needs_workdir=False)
        await server.listen("tcp://127.0.0.1:0")
        return server

    async def answer(self, call: str, **details: object) -> dict[str, object]:
        if call == "hello":
            return {"incarnation": "first"}
        self.heard.append(call)
        while self.is_silent:
            await asyncio.sleep(0.01)
        return {"status": "done", **details}

    def close(self) -> None:
        self.is_silent = False
        self.runner.run_sync(self.server.close)
        self.runner.stop()


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture
def lines():
    unsecured = SimpleNamespace(connection_args={})
    lines = DirectLines(unsecured, most=2, connect_seconds=0.3, late_seconds=0.2)
    yield lines
    lines.close()


def ask(lines, worker, incarnation="first", **details):
    return lines.ask({"call": "run", **details}, {worker.address: incarnation}, 0.1)


def connect(lines, worker):
    """Ask until there is a connection."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (answers := ask(lines, worker)) is None:
        assert not lines.is_over
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return answers


def await_end(lines):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not lines.is_over:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_first_request_connects_and_later_ones_are_answered(lines, worker):
    assert ask(lines, worker) is None
    assert connect(lines, worker) == {worker.address: {"status": "done"}}
    assert ask(lines, worker, number=7) == {worker.address: {"status": "done", "number": 7}}


def test_another_worker_at_the_address_is_not_used(lines, worker):
    assert ask(lines, worker, "second") is None
    await_end(lines)
    assert ask(lines, worker, "second") is None
    assert worker.heard == []


def test_a_peer_that_accepts_and_stays_silent_delays_nothing(lines):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        started = time.monotonic()
        workers = {f"tcp://127.0.0.1:{deaf.getsockname()[1]}": "first"}
        while not lines.is_over:
            assert lines.ask({"call": "run"}, workers, 0.1) is None
            assert time.monotonic() - started < PATIENCE_SECONDS


def test_a_silent_worker_closes_the_connections(lines, worker):
    connect(lines, worker)
    worker.is_silent = True
    assert ask(lines, worker) is None
    assert lines.is_over


def test_a_worker_that_closes_ends_a_request_at_once(lines, worker):
    connect(lines, worker)
    worker.is_silent = True

    def stop():
        worker.server.stop()
        for comm in list(worker.server._comms):
            comm.abort()

    def go():
        while len(worker.heard) < 2:
            time.sleep(0.001)
        worker.runner.loop.add_callback(stop)

    thread = threading.Thread(target=go)
    thread.start()
    started = time.monotonic()
    assert lines.ask({"call": "run"}, {worker.address: "first"}, 1000.0) is None
    assert time.monotonic() - started < PATIENCE_SECONDS
    thread.join()


class Interrupted(UserDict):
    """A message; Ctrl-C is pressed while it is packed, so in a task of the event loop."""

    def keys(self):
        raise KeyboardInterrupt


def test_ctrl_c_in_the_event_loops_task_ends_the_request(lines, worker):
    connect(lines, worker)
    with pytest.raises(KeyboardInterrupt):
        lines.ask(Interrupted(call="run"), {worker.address: "first"}, 0.1)
    assert lines.is_over
    assert ask(lines, worker) is None


def test_ctrl_c_that_loses_what_wakes_the_task_ends_the_request(lines, worker):
    connect(lines, worker)
    worker.is_silent = True

    def interrupt():
        # As if it came after the loop had taken the task's wakeup from its queue.
        lines._task.cancel()
        lines._loop._ready.clear()
        raise KeyboardInterrupt

    lines._loop.call_soon(lambda: lines._loop.call_later(0.01, interrupt))
    with pytest.raises(KeyboardInterrupt):
        ask(lines, worker)
    assert lines.is_over


def test_a_lock_that_ctrl_c_left_locked_does_not_keep_lines_open_for_ever(lines):
    assert lines._lock.acquire(timeout=PATIENCE_SECONDS)
    try:
        lines.close()
    finally:
        lines._lock.release()


def test_more_workers_than_allowed_are_left_to_the_scheduler(lines, worker):
    many = {worker.address: "first", "tcp://127.0.0.1:1": "x", "tcp://127.0.0.1:2": "y"}
    assert lines.ask({"call": "run"}, many, 0.1) is None
    assert connect(lines, worker)  # no other worker was tried


def test_a_thread_with_an_event_loop_of_its_own_goes_through_the_scheduler(lines, worker):
    connect(lines, worker)

    async def in_a_notebook():
        return ask(lines, worker)

    assert asyncio.run(in_a_notebook()) is None
    assert ask(lines, worker) is not None


def count_up(n, history):
    return n + 1, [*history, current_task().epoch]


def counting():
    with Job("count") as job:
        for name in "ab":
            with job.init_group:
                Task(lambda: (0, []), outputs=["n", "epochs"], node=name)
            Task(count_up, inputs=["n", "epochs"], outputs=["n", "epochs"], node=name)
    return job


class Breaks:
    """Breaks the connections, once they are there, in the middle of a run."""

    def __init__(self, session, *, waits):
        self.session, self.waits = session, waits
        self.was_used = False

    def on_epoch(self, epoch, seconds, metrics):
        lines = self.session._binding._messenger._lines
        if epoch != 5:
            return
        deadline = time.monotonic() + PATIENCE_SECONDS * self.waits
        while not lines._comms and time.monotonic() < deadline:
            time.sleep(0.001)
        self.was_used = bool(lines._comms)
        if self.was_used:
            # The next message goes out, and its answer finds nobody.
            lines._loop.call_soon(lambda: lines._loop.call_later(0, lines._task.cancel))


@pytest.mark.parametrize("most", [0, 8])
def test_every_epoch_runs_once_with_and_without_connections(process_cluster, most):
    with (
        dask.config.set({"jobrunner.direct-workers": most}),
        Client(process_cluster, set_as_default=False) as client,
        Session(client) as session,
    ):
        breaks = Breaks(session, waits=bool(most))
        result = JobRunner(counting(), num_epochs=20, callbacks=[breaks]).run(session)
        assert breaks.was_used == bool(most)
        assert result.epoch == 20
        for name in "ab":
            assert session.fetch(Node(name)["epochs"]) == list(range(1, 21))
