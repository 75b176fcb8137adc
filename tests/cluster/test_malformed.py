"""Messages that no client of this version sends, over real connections, and answers that no worker gives."""

import asyncio
import copy
import os
import random

from distributed import Client
from distributed.comm import connect

from jobrunner import ExecutionError, Session, Task, TaskGroup, WorkspaceType
from jobrunner.worker.plugin import LEASE_PREFIX, OPERATION
from tests.sampling import sampled

PATIENCE_SECONDS = 20
STRANGE = [
    *(None, True, -1, 0, 1, 2, 2**62, 0.5, float("nan"), float("inf")),
    *("", "a", "a#1", "x" * 10_000, b"", b"\x80no pickle", [], {}, [[]], {"a": 1}, {1: []}),
    *([[1, [[0, [b"no pickle"]]]]], [[1, [[-1, [b"9999 0"]]]]], [[1, [[-2, [b"1 x"]]]]]),
    *([[1, [[-2, [10**12]]]]], [[1, [[0, ["text"]]]]], [[1, [[0, []]]]], {"epochs": -1}),
]
MESSAGES = {
    "hello": {},
    "bind": {
        "leases": {},
        "wait_seconds": 0.01,
        "job": "j",
        "seed": 0,
        "attempt": 0,
        "can_move": False,
        "silence_seconds": 60.0,
    },
    "ship": {"number": 9, "wait_seconds": 0.01, "nodes": {"z": []}, "placement": {}, "slices": {}},
    "run": {"number": 9, "wait_seconds": 0.01, "key": "a", "epoch": 1, "epoch_batch": {}},
    "apply": {"number": 9, "wait_seconds": 0.01, "fn": b"", "channel": "apply"},
    "blob_names": {},
    "forget": {"keys": ["a"]},
    "push": {"values": [[9, [[0, [b"x"]]]]]},
    "abort": {"number": 9, "reason": "r"},
    "release": {"heir": ""},
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
                    messages = [mutant(draw, messenger.name, number) for _ in range(20)]
                    answers = client.sync(tell, address, messages)
                    # None: there is no binding any more, and so no handler.
                    assert all(answer is None or "status" in answer for answer in answers)
                group, last = pass_on()
                try:
                    session.run_group(group, deadline_seconds=PATIENCE_SECONDS)
                    assert last.fetch() == 4
                except ExecutionError as error:
                    failures.append(str(error))
            keys = [f"{LEASE_PREFIX}|", f"{LEASE_PREFIX}-{draw.random()}"]
            client.gather([client.submit(int, key=key, pure=False) for key in keys])
        assert client.run(os.getpid) == pids
    assert len(failures) < rounds
    assert not [text for text in failures if "did not end within" in text]
