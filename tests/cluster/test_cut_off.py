"""Workers in network namespaces of their own, cut off from all others or from one."""

import contextlib
import itertools
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import Client

from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Session,
    Task,
    current_task,
    epoch_limiter,
)
from tests.processes import await_true, dask_process

BRIDGE, MIDDLE = "jr-bridge", "10.231.78.1"
ENDS = {
    "a": ("jr-a", "10.231.78.2"),
    "b": ("jr-b", "10.231.78.3"),
    "c": ("jr-c", "10.231.78.4"),
}
EPOCHS = 8


def ip(*command):
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True)


@pytest.fixture
def spaces():
    """Three namespaces on a bridge, with a worker's end in each."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2) on this machine")
    with contextlib.ExitStack() as undo:
        try:
            ip("link", "add", BRIDGE, "type", "bridge")
            undo.callback(ip, "link", "del", BRIDGE)
            ip("addr", "add", f"{MIDDLE}/24", "dev", BRIDGE)
            ip("link", "set", BRIDGE, "up")
            for space, address in ENDS.values():
                ip("netns", "add", space)
                undo.callback(ip, "netns", "del", space)
                peer = ["peer", "name", "eth0", "netns", space]
                ip("link", "add", f"{space}-1", "type", "veth", *peer)
                undo.callback(ip, "link", "del", f"{space}-1")  # its own end takes effect later
                ip("link", "set", f"{space}-1", "master", BRIDGE, "up")
                ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
                ip("-n", space, "link", "set", "lo", "up")
                ip("-n", space, "link", "set", "eth0", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no bridge between network namespaces here: {error.stderr.strip()}")
        yield


def plug(is_in):
    """Connect worker a with all others, or with none."""
    ip("link", "set", f"{ENDS['a'][0]}-1", "up" if is_in else "down")


def cut(is_cut):
    """Cut a and b from each other, and from nobody else, or mend that."""
    for name, other in ("ab", "ba"):
        target = [ENDS[other][1], "dev", "eth0"]
        # To an address that no card has: what is sent there arrives nowhere, silently.
        nowhere = [*target[:1], "lladdr", "02:00:00:00:00:99", *target[1:]]
        how = ["replace", *nowhere] if is_cut else ["del", *target]
        ip("-n", ENDS[name][0], "neigh", *how)


@contextlib.contextmanager
def client_of(names, tmp_path):
    """A scheduler here and a worker in some of the namespaces; gives a client."""
    address = f"tcp://{MIDDLE}:18787"
    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set({"jobrunner.worker-silence-seconds": 1}))
        command = ["scheduler", "--dashboard-address", ":0", "--host", MIDDLE, "--port", "18787"]
        stack.enter_context(dask_process(*command, cwd=tmp_path))
        for name in names:
            space, end = ENDS[name]
            command = ["worker", address, "--nthreads", "1", "--no-nanny", "--no-dashboard"]
            command += ["--host", end, "--name", name]
            within = ["ip", "netns", "exec", space]
            stack.enter_context(dask_process(*command, cwd=tmp_path, prefix=within))
        client = stack.enter_context(Client(address, set_as_default=False, timeout=30))
        client.wait_for_workers(len(names), timeout=30)
        yield client


def feed(x, flag):
    if current_task().epoch == 4 and not Path(flag).exists():
        Path(flag).touch()
        await_true(Path(f"{flag}.cut").exists, "the cut")
    return x + current_task().rng.standard_normal(x.size)


def mix(x, other):
    return (x + other) / 2


def run(session, nodes, flag, manager=None):
    """What the first node makes goes to the next one, and so on; gives the result and all blobs.

    A node's part is done before the next one has its value, for which another one then waits in turn.
    """
    with Job("chain", seed=3) as job:
        for name in nodes:
            with job.init_group:
                Task(lambda: np.zeros(100), outputs="x", node=name)
        Task(feed, inputs="x", outputs="x", node=nodes[0], kwargs={"flag": str(flag)})
        for before, name in itertools.pairwise(nodes):
            Task(mix, ["x", Node(before)["x"]], outputs="x", node=name)
    epoch_limiter(job, EPOCHS)
    result = JobRunner(job, manager).run(session)
    return result, [session.fetch(Node(name)["x"]).tobytes() for name in nodes]


def run_and_cut(client, nodes, flag, how, manager):
    """The same, cut in epoch 4: one loss."""

    def act():
        await_true(flag.exists, "the flag")
        how()
        Path(f"{flag}.cut").touch()

    thread = threading.Thread(target=act)
    thread.start()
    with Session(client) as session:
        result, state = run(session, nodes, flag, manager)
    thread.join()
    assert (result.epoch, result.restarts) == (EPOCHS, 1)
    return state


@pytest.fixture
def undisturbed(inproc_client, tmp_path):
    """What an undisturbed run gives."""
    (tmp_path / "none").touch()

    def state(nodes):
        with Session(inproc_client) as session:
            return run(session, nodes, tmp_path / "none")[1]

    return state


@pytest.mark.nightly
def test_a_worker_that_is_cut_off_is_replaced_and_changes_nothing_when_it_is_back(
    spaces, tmp_path, undisturbed
):
    nodes, manager = ("n0", "n1"), MultiNodeCheckpointManager(tmp_path / "ckpt")
    with client_of("ab", tmp_path) as client:
        state = run_and_cut(client, nodes, tmp_path / "flag", lambda: plug(False), manager)
        entries = sorted(os.listdir(tmp_path / "ckpt" / "_log"))
        plug(True)
        time.sleep(2.0)  # for the one that is back to do what it was about to
        assert sorted(os.listdir(tmp_path / "ckpt" / "_log")) == entries
        for epoch in manager.epochs():
            manager.verify(epoch)
    assert state == undisturbed(nodes)


@pytest.mark.nightly
def test_a_pair_of_three_workers_that_is_cut_never_ends_the_run(spaces, tmp_path, undisturbed):
    nodes = ("server", "n0", "n1", "n2")  # three workers get two, one and one
    expected = undisturbed(nodes)
    with client_of("abc", tmp_path) as client:
        for trial in range(20):
            manager = MultiNodeCheckpointManager(tmp_path / f"ckpt-{trial}")
            flag = tmp_path / f"flag-{trial}"
            assert run_and_cut(client, nodes, flag, lambda: cut(True), manager) == expected
            cut(False)
