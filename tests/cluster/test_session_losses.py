"""Workers that disappear; runs that are interrupted."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from jobrunner import (
    Job,
    Node,
    NodeLostError,
    PlacementError,
    Session,
    Task,
    TaskGroup,
    WorkspaceType,
    current_task,
)
from jobrunner.cluster.scheduler import SchedulerLink
from jobrunner.dask_internals import EVERY_WORKER
from jobrunner.worker.plugin import PLUGIN_NAME
from tests.processes import await_file, await_true, own_session


@pytest.fixture
def own():
    """A client and a session of two worker processes of this test's own."""
    with own_session(2, threads=2, processes=True) as (_, client, session):
        yield client, session


@pytest.fixture
def client(own):
    return own[0]


@pytest.fixture
def session(own):
    return own[1]


def job_of_two():
    """A job whose nodes wait for each other in the epoch, a's task first."""
    with Job("pair") as job:
        with job.init_group:
            for name in "ab":
                Task(os.getpid, outputs="pid", node=name)
        slow = Task(lambda pid: time.sleep(30), inputs="pid", node="a")
        Task(lambda x: x, inputs=slow.output(), node="b")
    return job


def bind(session):
    binding = session.bind(job_of_two().compile())
    binding.run("init", epoch=0)
    return binding


@contextlib.contextmanager
def meanwhile(action):
    """Do something in another thread; gives the list that the time of it goes to."""
    times = []

    def act():
        action()
        times.append(time.monotonic())

    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield times
    finally:
        thread.join(30)


def touch(path):
    Path(path).touch()


def run_until_it_fails(binding):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        binding.run("init", epoch=0)


def held(dask_worker):
    host = dask_worker.plugins.get(PLUGIN_NAME)
    return (len(host.bindings), len(host._leases)) if host else (0, 0)


def await_nothing_held(client):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if all(found == (0, 0) for found in client.run(held).values()):
            return
        time.sleep(0.02)
    assert client.run(held) == {}


# ---- workers


def test_a_worker_that_retires_and_is_gone_is_lost_soon(session, client, monkeypatch):
    monkeypatch.setattr("jobrunner.cluster.messenger.RETIRING_SECONDS", 0.1)
    binding = bind(session)

    def retire():
        await_true(lambda: binding._members.running, "the first task")
        client.retire_workers([binding.placement["a"]])

    with meanwhile(retire) as retired, pytest.raises(NodeLostError, match="'a'"):
        binding.run("epoch", epoch=1)
    assert time.monotonic() - retired[0] < 20  # Dask takes 30 s to give up a connection


def test_a_cancelled_lease_is_a_loss_and_frees_the_worker(session, client):
    binding = bind(session)
    held_leases = [lease for worker in binding._members.workers.values() for lease in worker.leases]
    client.cancel(held_leases[:1])
    with pytest.raises(NodeLostError):
        run_until_it_fails(binding)


def test_a_worker_restarted_at_the_same_address_is_not_taken_for_the_old_one():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with own_session(1, processes=True, worker_port=port) as (_, client, session):
        with TaskGroup(workspace_type=WorkspaceType.GLOBAL) as group:
            Task(os.getpid, outputs="pid", node="a")
        session.run(group)
        [place] = client.run(os.getpid)
        os.kill(pid := session.fetch(Node("a")["pid"]), signal.SIGKILL)
        while client.run(os.getpid, on_error="ignore").get(place, pid) == pid:
            time.sleep(0.02)
        with pytest.raises(NodeLostError, match="'a'"):
            session.fetch(Node("a")["pid"])
        # The lease task came to the successor, which has nothing to lend it to.
        await_nothing_held(client)


# ---- stopping on purpose


def test_ctrl_c_aborts_the_run_and_the_session_stays_usable(session, client, tmp_path):
    flag, told, ran = tmp_path / "flag", tmp_path / "told", tmp_path / "ran"

    def wait(flag, told):
        Path(flag).write_text("x")
        while not current_task().is_cancelled:
            time.sleep(0.01)
        Path(told).write_text("x")

    with TaskGroup() as group:
        first = Task(wait, node="a", kwargs={"flag": str(flag), "told": str(told)})
        Task(touch, node="a", kwargs={"path": str(ran)}, after=first)

    def interrupt():
        await_file(flag)
        os.kill(os.getpid(), signal.SIGINT)

    with meanwhile(interrupt) as interrupted, pytest.raises(KeyboardInterrupt):
        session.run(group)
    assert time.monotonic() - interrupted[0] < 3
    await_file(told)
    assert session.run(Task(lambda: 5, node="a")) == 5
    assert not ran.exists()


# ---- the plugin


def change_version():
    from jobrunner.worker import plugin

    plugin.PLUGIN_NAME = "jobrunner-0"


def lose_the_host():
    from jobrunner.worker import plugin

    plugin.WorkspaceHost.setup = None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (change_version, "2 of the .* another version .* found 'jobrunner-0'"),
        (lose_the_host, "could not host nodes .*not callable"),
    ],
)
def test_workers_that_cannot_run_nodes_are_named(client, change, told):
    client.run(change)
    with Session(client) as session, pytest.raises(PlacementError, match=told):
        session.bind(job_of_two().compile(), wait_seconds=0)


def test_more_workers_than_the_scheduler_has_connections_for():
    count = 6
    with own_session(count) as (cluster, client, session):

        async def narrow():
            pool = cluster.scheduler.rpc
            pool.limit = 2
            pool.semaphore = asyncio.Semaphore(2)

        client.sync(narrow)
        with TaskGroup() as group:
            # The last nodes begin; all others wait for them.
            value = Task(lambda: 0, node=f"n{count - 1}").output()
            for i in reversed(range(count - 1)):
                value = Task(lambda n: n + 1, inputs=value, node=f"n{i}").output()
        session.run(group)
        assert value.fetch() == count - 1
        assert len(set(session._binding.placement.values())) == count


def test_news_reach_every_listener_and_a_users_handler_as_before(client):
    heard, told, topics = [], [], client._event_handlers
    client.subscribe_topic(EVERY_WORKER, told.append)
    for name in "xy":  # two sessions
        SchedulerLink(client).watch(
            ["tcp://a"], lambda *news, name=name: heard.append((name, *news))
        )

    def listener(*news):
        heard.append(news)

    link = SchedulerLink(client)
    link.watch(["tcp://b", EVERY_WORKER], listener)
    topics["tcp://a"]((0.0, {"action": "remove-worker"}))
    topics["tcp://a"]((0.0, {"action": "add-worker"}))
    assert heard == [("x", "tcp://a", "lost"), ("y", "tcp://a", "lost")]
    topics["tcp://b"]((0.0, {"action": "remove-worker", "expected": True}))
    topics["tcp://b"]((0.0, {"action": "worker-status-change", "status": "closing"}))
    assert heard[2:] == [("tcp://b", "leaving")] * 2
    events = [
        (0.0, {"action": action, "worker": "tcp://c"}) for action in ("remove-worker", "add-worker")
    ]
    for event in events:
        topics[EVERY_WORKER](event)
    assert heard[4:] == [("tcp://c", "joined")]
    handlers = dict(topics)
    for addresses in (["tcp://b", EVERY_WORKER], ["tcp://b"]):
        link.unwatch(addresses, listener)
    topics[EVERY_WORKER](events[1])
    handlers["tcp://b"]((0.0, {"action": "remove-worker"}))
    assert heard[5:] == []
    assert [event for event in told if event[0] == 0.0] == [*events, events[1]]
