"""Messages that no client of this version sends, over real connections, and answers that no worker gives."""

import asyncio
import copy
import os
import random
from types import SimpleNamespace

import msgspec
import pytest
from distributed import Client
from distributed.comm import connect

from jobrunner import (
    CheckpointWriteError,
    ExecutionError,
    Session,
    Task,
    TaskGroup,
    WorkspaceType,
)
from jobrunner.checkpoint import Receipt, Written, read_receipts
from jobrunner.cluster.binding import read_value
from jobrunner.cluster.exchange import Reply, read_reply
from jobrunner.cluster.results import read_runs
from jobrunner.cluster.scheduler import SchedulerLink
from jobrunner.compile import Condition
from jobrunner.positions import Position
from jobrunner.worker import OPERATION, PLUGIN_NAME, RunOrder
from tests.sampling import sampled

PATIENCE_SECONDS = 20
STRANGE = [
    *(None, True, -1, 0, 1, 2, 2**62, 0.5, float("nan"), float("inf")),
    *("", "a", "a#1", "x" * 10_000, b"", b"\x80no pickle", [], {}, [[]], {"a": 1}, {1: []}),
    *([[1, [[0, [b"no pickle"]]]]], [[1, [[-1, [b"9999 0"]]]]], [[1, [[-2, [b"1 x"]]]]]),
    *([[1, [[-2, [10**12]]]]], [[1, [[0, ["text"]]]]], [[1, [[0, []]]]], {"epochs": -1}),
]
ORDER = {"key": "a", "epoch": 1, "epochs": 2, "seconds": 0.1}
MESSAGES = {
    "run": {"number": 9, "wait_seconds": 0.01, "order": ORDER},
    "apply": {"number": 9, "wait_seconds": 0.01, "fn": b"", "channel": "apply"},
    "push": {"values": [[9, [[0, [b"x"]]]]]},
    "abort": {"number": 9, "reason": "r"},
    "release": {},
    # Not meant for messages.
    **{name: {} for name in ("close", "workspaces", "_poll", "__init__", "threads", "")},
}


def mutant(draw, binding, number):
    """One message, about as often well-formed as not."""
    call = draw.choice([*MESSAGES])
    message = copy.deepcopy({"call": call, "binding": binding, **MESSAGES[call]})
    if "number" in message:
        message["number"] = max(1, number + draw.randint(-1, 3))
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        field = draw.choice([*message, "other"])
        if draw.random() < 0.2:
            message.pop(field, None)
        elif field != "wait_seconds" or draw.random() < 0.5:
            message[field] = draw.choice(STRANGE)
    if message.get("wait_seconds") in (1, 2, 2**62):
        message["wait_seconds"] = 0
    return message


async def tell(address, messages):
    """Send a worker messages; gives its answers. It must answer each."""
    comm = await connect(address)
    answers = []
    for message in messages:
        await comm.write({"op": OPERATION, "reply": True, **message})
        answers.append(await asyncio.wait_for(comm.read(), PATIENCE_SECONDS))
    await comm.close()
    return answers


def pass_on():
    with TaskGroup(workspace_type=WorkspaceType.GLOBAL) as group:
        last = Task(int, outputs="x", node="a").output()
        for node in "baab":
            last = Task(lambda x: x + 1, inputs=last, node=node).output()
    return group, last


@sampled("rounds", sample=8, nightly=400)
def test_no_message_ends_a_worker_or_leaves_a_run_waiting(process_cluster, rounds):
    draw = random.Random(rounds)
    failures = []
    with Client(process_cluster, set_as_default=False) as client:
        pids = client.run(os.getpid)
        for _ in range(rounds):
            with Session(client) as session:
                session.run(pass_on()[0])
                messenger = session._binding._messenger
                for address in pids:
                    number = messenger._number
                    messages = [mutant(draw, messenger.name, number) for _ in range(4)]
                    answers = client.sync(tell, address, messages)
                    # None: there is no binding any more, and so no handler.
                    assert all(answer is None or "status" in answer for answer in answers)
                group, last = pass_on()
                try:
                    session.run_group(group, deadline_seconds=PATIENCE_SECONDS)
                    assert last.fetch() == 4
                except ExecutionError as error:
                    failures.append(str(error))
            keys = [f"{PLUGIN_NAME}|", f"{PLUGIN_NAME}-{draw.random()}"]
            client.gather([client.submit(int, key=key, pure=False) for key in keys])
        assert client.run(os.getpid) == pids
    assert len(failures) < rounds
    assert not [text for text in failures if "did not end within" in text]


# ---- answers

HERE, THERE = "tcp://h:1", "tcp://h:2"
PLACEMENT = {"a": HERE, "b": THERE}
RUN = {"stopped": [], "metrics": "", "seconds": 0.1}
FAILURE = {
    "node": "a",
    "task": "t",
    "summary": "s",
    "traceback": "",
    "error": None,
    "is_own": False,
}
FORGED = [
    {"status": "finished"},
    {"status": "done", "runs": []},
    {"status": "done", "runs": [RUN] * 3},
    {"status": "done", "runs": [{**RUN, "seconds": float("nan")}]},
    {"status": "done", "runs": [{**RUN, "metrics": '{"loss": 1}'}]},
    {"status": "done", "runs": [{**RUN, "metrics": "[" * 100_000}]},
    {"status": "done", "runs": [{**RUN, "metrics": '[["x","a",0,0,["mean","text",1]]]'}]},
    {"status": "failed", "failure": {**FAILURE, "node": "b"}},
    {"status": "running", "tasks": [["elsewhere", "t"]]},
    {"status": "aborted", "reason": "r", "suspect": "tcp://nowhere:1"},
    {"status": "failed", "failure": {**FAILURE, "error": 1}},
    {"status": "done", "runs": [{**RUN, "stopped": [None]}] * 2},
    {"status": "running", "tasks": "x" * 10_000},
    {"reason": "no status"},
]


@pytest.mark.parametrize("forged", FORGED, ids=lambda it: str(it)[:200])
def test_a_forged_answer_is_an_error_that_names_the_worker(forged):
    def read():
        read_runs({HERE: read_reply(HERE, forged, PLACEMENT)}, RunOrder(epochs=2), [])

    with pytest.raises(ExecutionError, match=HERE):
        read()


def test_an_epoch_lasts_as_on_its_slowest_worker_and_its_last_step_may_stop_it():
    def ran(seconds, *stopped):
        return {**RUN, "seconds": seconds, "stopped": [*stopped]}

    replies = {
        HERE: Reply("done", runs=[ran(1.0, "a/x"), ran(2.0, "a/y")]),
        THERE: Reply("done", runs=[ran(0.5), ran(0.5)]),
    }
    conditions = [Condition(f"a/{name}", "a") for name in "xy"]
    [epoch] = read_runs(replies, RunOrder(steps_per_epoch=2), conditions)
    assert (epoch.seconds, epoch.stopped) == (3.0, ("a/y",))


def test_workers_that_are_done_must_have_run_as_much():
    replies = {a: Reply("done", runs=[RUN] * n) for a, n in ((HERE, 1), (THERE, 2))}
    with pytest.raises(ExecutionError, match="as many as other workers"):
        read_runs(replies, RunOrder(epochs=2), [])


@pytest.mark.parametrize("frames", [[], ["text"], [b"x", 10**12], None])
def test_an_answer_without_a_value_is_an_error(frames):
    with pytest.raises(ExecutionError, match=HERE):
        read_value(HERE, read_reply(HERE, {"status": "done", "frames": frames}, PLACEMENT))


AT = Position(1)


def told(receipts, failure=""):
    return msgspec.json.encode({"receipts": receipts, "failure": failure})


RECEIPT = ["a.1", "0" * 64, 1, 0.1]


@pytest.mark.parametrize(
    "reply",
    [
        None,
        b"",
        told([{"b": ["b.1", *RECEIPT[1:]]}]),
        told([{"a": "a receipt"}]),
        told([{"a": ["b.1", *RECEIPT[1:]]}]),
        told([{"a": ["a.1", "0" * 64, "many", 0.1]}]),
        told([{}, {"a": RECEIPT}]),
        told({"1": {"a": RECEIPT}}),
        told([{"a": RECEIPT}], failure=7),
    ],
)
def test_a_receipt_that_does_not_fit_is_not_recorded(reply):
    order = SimpleNamespace(at=AT, stores={AT: {"a": "a.1", "b": "b.1"}})
    honest = read_receipts({HERE: told([{"a": RECEIPT}])}, order, PLACEMENT)
    assert honest == Written([{"a": Receipt(*RECEIPT)}])
    with pytest.raises(CheckpointWriteError, match=HERE):
        read_receipts({HERE: reply}, order, PLACEMENT)


def test_a_worker_that_describes_itself_wrongly_gets_no_nodes():
    honest = {"name": 1, "host": "h", "nthreads": 2, "resources": {"GPU": 1}, "nanny": ""}
    honest |= {"memory_limit": 0, "status": "running"}
    workers = {HERE: honest, THERE: {**honest, "resources": {"GPU": "all"}}}

    async def identity(**options):
        return {"workers": workers}

    link = SchedulerLink(SimpleNamespace(scheduler=SimpleNamespace(identity=identity)))
    assert [worker.address for worker in asyncio.run(link.workers())] == [HERE]
