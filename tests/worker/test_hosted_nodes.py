"""How a worker handles early, late and stale messages; without a cluster."""

import asyncio
import contextvars
import gc
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from jobrunner import ExecutionError, Node, Task, TaskGroup
from jobrunner.cluster.shipping import Parcel
from jobrunner.compile.job import compile_group
from jobrunner.worker.applied import NewNode, add_groups, add_nodes, install_keeper
from jobrunner.worker.hosted_nodes import BindingContext, BindingOptions, HostedNodes
from jobrunner.worker.memory import MemoryLimit
from jobrunner.worker.messages import AbortMessage, PushMessage, RunMessage, RunOrder
from jobrunner.worker.outbox import Outbox
from jobrunner.worker.outcome import Failure
from jobrunner.workspace import to_frames
from tests.worker.test_plugin import in_a_loop

HERE, THERE = "tcp://here", "tcp://there"
A, B = Node("a"), Node("b")  # a is here
ORDER = RunOrder("epoch")


def add_one(x):
    return x + 1


def count():
    with TaskGroup(workspace_type="global") as tasks:
        Task(add_one, "x", "x", node=A)
    return tasks


def sender(fn):
    """Node a makes a value for node b."""
    with TaskGroup(workspace_type="global") as tasks:
        Task(add_one, Task(fn, (), "x", node=A).output(), "y", node=B)
    return tasks


def receiver():
    """Node a waits for two values of node b."""
    with TaskGroup(workspace_type="global") as tasks:
        values = [Task(int, (), name, name=name, node=B).output() for name in "pq"]
        Task(lambda *values: max(values), values, "x", node=A)
    return tasks


class Peers:
    """The other workers: what they are sent, and what they answer."""

    def __init__(self, *, answer=None, error=None):
        self.messages, self.answer, self.error = [], answer or {"status": "done"}, error
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, address, operation, message):
        if operation == "identity":
            return await self.ping()
        self.messages.append((address, message))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.answer

    async def ping(self):
        return "ok"


class Asked(HostedNodes):
    """Is asked with arguments in place of messages."""

    async def run(self, number, wait_seconds, order=None):
        return await super().run(
            RunMessage(binding="b", number=number, wait_seconds=wait_seconds, order=order)
        )

    async def push(self, values):
        return await super().push(PushMessage(binding="b", values=values))

    async def abort(self, number, reason):
        return await super().abort(AbortMessage(binding="b", number=number, reason=reason))


class Host:
    """A hosted binding that can be asked from a test."""

    def __init__(self, tasks, peers=None, blobs=None, silence_seconds=60, **options):
        self.peers, self.options = peers or Peers(), options
        self.tasks, self.blobs = tasks, blobs or {}
        self.silence_seconds = silence_seconds

    async def __aenter__(self):
        context = BindingContext(
            name="binding",
            options=BindingOptions(
                job="job",
                seed=0,
                attempt=0,
                can_move=False,
                silence_seconds=self.silence_seconds,
            ),
            address=HERE,
            nthreads=2,
            call_peer=self.peers,
            **{"memory_limit": MemoryLimit(HERE, int, 0, 0), **self.options},
        )
        self.hosted = Asked(context, contextvars.copy_context())
        add_nodes({"a": NewNode("", ["t"], {})}, self.hosted)
        plan = compile_group(self.tasks, {"a": frozenset(self.blobs)})
        parcel = Parcel({"epoch": plan}, {"a": HERE, "b": THERE})
        add_groups(parcel.groups, parcel.by_worker[HERE], self.hosted)
        self.hosted.workspaces["a"].globals.update(self.blobs)
        return self.hosted

    async def __aexit__(self, *exc_info):
        self.hosted.close("the test is over")
        await asyncio.wait_for(self.hosted.ended.wait(), 10)


def frames(value):
    return [bytes(frame) for frame in to_frames(value)]


# ---- operations


@in_a_loop
async def test_a_run_starts_once_and_its_reply_can_be_asked_again_until_the_next():
    async with Host(count(), blobs={"x": 0}) as hosted:
        first, second = await asyncio.gather(hosted.run(3, 5, ORDER), hosted.run(3, 5))
        assert first["status"] == second["status"] == "done"
        assert hosted.workspaces["a"].globals["x"] == 1
        # A client that lost the message with the reply asks again.
        assert (await hosted.run(3, 5))["status"] == "done"
        assert await hosted.run(2, 5, ORDER) == {"status": "stale"}
        assert hosted.workspaces["a"].globals["x"] == 1
        assert (await hosted.run(4, 5, ORDER))["status"] == "done"
        assert await hosted.run(3, 5, ORDER) == {"status": "stale"}


@in_a_loop
async def test_a_thread_that_fails_outside_of_any_task_ends_the_run():
    async with Host(receiver()) as hosted:
        assert (await hosted.run(3, 0.01, ORDER))["status"] == "running"
        hosted.threads.submit(lambda: 1 / 0)
        reply = await hosted.run(3, 10)
        assert reply["status"] == "failed"
        failure = Failure(**reply["failure"])
        assert isinstance(failure.exception(), ZeroDivisionError)
        assert failure.is_own


@in_a_loop
async def test_tasks_that_cannot_be_unpickled_are_named_with_their_node():
    async with Host(count()) as hosted:
        with pytest.raises(ExecutionError, match=r"tasks of node 'a'.*register_pickle_by_value"):
            add_groups(b"", {"a": b"cnot_a_module_anywhere\nfn\n."}, hosted)


@in_a_loop
async def test_closing_a_binding_frees_its_blobs_without_the_garbage_collector():
    array = np.zeros(8)
    gone = weakref.ref(array)
    host = Host(count(), blobs={"x": array})
    gc.disable()
    try:
        async with host as hosted:
            reply = await hosted.run(3, 5, ORDER)
            assert reply["status"] == "done"
            made = weakref.ref(hosted.workspaces["a"].globals["x"])
            host.blobs.clear()
            del array
        assert gone() is None
        assert made() is None
    finally:
        gc.enable()


@in_a_loop
async def test_a_keeper_is_closed_when_another_comes_and_when_the_binding_ends():
    closed = []
    async with Host(count()) as hosted:
        for name in ("first", "second"):
            keeper = SimpleNamespace(close=partial(closed.append, name), capture_bytes=int)
            install_keeper(lambda keeper=keeper: keeper, hosted)
        assert closed == ["first"]
    assert closed == ["first", "second"]


@in_a_loop
async def test_no_run_begins_while_memory_is_over_its_limit():
    limit = MemoryLimit(HERE, lambda: 95, 100, 0.9)
    with pytest.MonkeyPatch.context() as patch:
        # So that no later look ends it.
        patch.setattr("jobrunner.worker.hosted_nodes.LOOK_SECONDS", 60)
        async with Host(count(), blobs={"x": 0}, memory_limit=limit) as hosted:
            reply = await hosted.run(3, 5, ORDER)
            error = Failure(**reply["failure"]).exception()
            assert isinstance(error, ExecutionError)
            assert "it uses 95 B of its limit of 100 B" in str(error)
            assert hosted.workspaces["a"].globals["x"] == 0


# ---- values from other workers


SMALL = {"memory_limit": MemoryLimit(HERE, lambda: 0, 16_000, 0.9)}  # 1,000 may wait


@in_a_loop
async def test_a_worker_that_sends_too_much_for_later_runs_waits_for_this_run():
    async with Host(receiver(), **SMALL) as hosted:
        await hosted.run(3, 0, ORDER)
        assert await hosted.push([[4, [(0, frames(bytes(900)))]]]) == {"status": "done"}
        full = asyncio.ensure_future(hosted.push([[4, [(1, frames(bytes(900)))]]]))
        await asyncio.sleep(0)
        assert (await hosted.push([[3, [(0, frames(1))]]]))["is_full"]  # and is taken all the same
        assert (await full)["is_full"]
        waiting = asyncio.ensure_future(hosted.push([]))
        await asyncio.sleep(0)
        hosted._take([[3, [(1, frames(2))]]])
        assert (await hosted.run(3, 5))["status"] == "done"
        assert await waiting == {"status": "done"}
        assert hosted.workspaces["a"].globals["x"] == 2
        assert (await hosted.run(4, 5, ORDER))["status"] == "done"
        assert await hosted.push([]) == {"status": "done"}


@in_a_loop
async def test_no_run_begins_while_too_many_values_wait_to_be_sent():
    peers = Peers()
    peers.gate.clear()
    made = []

    def make():
        made.append(bytes(1_500))
        return made[-1]

    async with Host(sender(make), peers, **SMALL) as hosted:
        hosted.programs["epoch"].tasks[0].fn = make  # what was shipped is a copy
        await hosted.run(3, 0, RunOrder("epoch", 1, epochs=3, lead=HERE, seconds=9))
        while not hosted._waits_for_sent:
            await asyncio.sleep(0.001)
        assert len(made) == 1
        peers.gate.set()
        assert (await hosted.run(3, 5))["status"] == "done"
        assert len(made) == 3


@in_a_loop
async def test_values_of_runs_that_are_over_are_dropped():
    async with Host(receiver()) as hosted:
        await hosted.push([[3, [(0, frames(100)), (1, frames(100))]]])
        await hosted.push([[5, [(0, frames(1))]]])  # so run 3 is over, and never was here
        await hosted.push([[3, [(1, frames(100))]]])
        assert (await hosted.run(5, 0.01, ORDER))["status"] == "running"
        await hosted.push([[3, [(1, frames(100))]]])
        await hosted.push([[5, [(1, frames(2))]]])
        await hosted.run(5, 5)
        assert hosted.workspaces["a"].globals["x"] == 2


@in_a_loop
async def test_an_abort_that_arrives_before_its_run_ends_it_at_once():
    async with Host(receiver()) as hosted:
        await hosted.abort(3, "a peer failed")
        reply = await hosted.run(3, 5, ORDER)
        assert (reply["status"], reply["reason"]) == ("aborted", "a peer failed")
        await hosted.abort(2, "of a run long over")
        await hosted.push([[4, [(0, frames(1)), (1, frames(2))]]])
        assert (await hosted.run(4, 5, ORDER))["status"] == "done"


# ---- values for other workers


@in_a_loop
async def test_values_made_while_a_message_is_sent_travel_together_and_old_ones_not_at_all():
    sent, gate = [], asyncio.Event()

    async def call_peer(address, operation, message):
        sent.append((address, [c for _, values in message["values"] for c, _ in values]))
        await gate.wait()
        return {"status": "done"}

    outbox = Outbox("binding", call_peer, 60, failed=pytest.fail, sent=lambda: None)
    outbox.start(1)
    outbox.put(1, (THERE,), 9, [b"of a run that is over"])
    outbox.start(2)
    outbox.put(2, (THERE,), 0, [b"x"])
    while not sent:
        await asyncio.sleep(0)
    for crossing in (1, 2, 3):
        outbox.put(2, (THERE,), crossing, [b"x"])
    outbox.put(2, ("tcp://third",), 4, [b"x"])
    while len(sent) < 2:
        await asyncio.sleep(0)
    gate.set()
    while len(sent) < 3:
        await asyncio.sleep(0)
    assert sent == [(THERE, [0]), ("tcp://third", [4]), (THERE, [1, 2, 3])]
    outbox.close()


@pytest.mark.parametrize(
    "peers", [{"error": OSError("unreachable")}, {"answer": {"status": "unknown"}}], ids=str
)
@in_a_loop
async def test_a_worker_that_cannot_be_reached_is_named_as_suspect(peers):
    with sender(lambda: 1) as tasks:
        # The run is over here, all but the value that a waits for.
        Task(add_one, tasks.find("b", "add_one").output(), "z", node=A)
    async with Host(tasks, Peers(**peers)) as hosted:
        reply = await hosted.run(4, 5, ORDER)
        assert (reply["status"], reply["suspect"]) == ("aborted", THERE)
        assert THERE in reply["reason"]


class Silent(Peers):
    """Takes values and never replies; answers three pings."""

    pings = 0

    async def __call__(self, address, operation, message):
        if operation == "identity":
            self.pings += 1
            if self.pings < 4:
                return self.answer
        return await asyncio.get_running_loop().create_future()


@in_a_loop
async def test_a_worker_that_answers_no_ping_is_a_suspect_even_after_the_sender_was_done():
    peers = Silent()
    async with Host(sender(lambda: 1), peers, silence_seconds=0.02) as hosted:
        reply = await hosted.run(3, 5, ORDER)
        while reply["status"] == "done":
            await asyncio.sleep(0.005)
            reply = await hosted.run(3, 5)
        assert (reply["status"], reply["suspect"], peers.pings) == ("aborted", THERE, 4)
        assert "TimeoutError: it did not answer within 0.04 s" in reply["reason"]


# ---- functions that cannot be stopped


HELD = {}


def hold():
    HELD["begun"].set()
    assert HELD["gate"].wait(10)


@pytest.fixture
def held():
    """A group with a task that waits for the test."""
    HELD.update(begun=threading.Event(), gate=threading.Event())
    with TaskGroup() as tasks:
        Task(hold, node=A)
    return tasks


async def until_begun():
    while not HELD["begun"].is_set():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("is_told", [True, False], ids=["aborted", "its abort was lost"])
@in_a_loop
async def test_the_next_run_waits_for_functions_of_an_aborted_one(held, is_told):
    async with Host(held) as hosted:
        first = asyncio.ensure_future(hosted.run(3, 5, ORDER))
        await until_begun()
        HELD["begun"].clear()
        if is_told:
            await hosted.abort(3, "told to")
        assert (await hosted.run(4, 0.02, ORDER))["status"] == "running"
        assert (await first)["status"] == "aborted"
        assert not HELD["begun"].is_set()
        await hosted.push([[4, [(9, frames(0))]]])  # early, and of no use
        HELD["gate"].set()
        assert (await hosted.run(4, 5))["status"] == "done"
        assert HELD["begun"].is_set()


@in_a_loop
async def test_a_function_of_an_aborted_run_that_never_ends_is_named(held):
    async with Host(held, straggler_seconds=0.01) as hosted:
        first = asyncio.ensure_future(hosted.run(3, 5, ORDER))
        await until_begun()
        await hosted.abort(3, "told to")
        await first
        reply = await hosted.run(4, 5, ORDER)
        assert reply["status"] == "aborted"
        assert "a/hold of an aborted run still runs" in reply["reason"]
        HELD["gate"].set()
