"""Workers in network namespaces of their own, one of which is cut off from another."""

import contextlib
import itertools
import shutil
import subprocess
import threading
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
)
from tests.processes import await_true, dask_process

BRIDGE, MIDDLE = "jr-bridge", "10.231.78.1"
ENDS = {
    "a": ("jr-a", "10.231.78.2"),
    "b": ("jr-b", "10.231.78.3"),
    "c": ("jr-c", "10.231.78.4"),
}
NODES = ("server", "n0", "n1", "n2")  # three workers get two, one and one
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


def cut(is_cut):
    """Cut a and b from each other, and from nobody else, or mend that."""
    for name, other in ("ab", "ba"):
        neighbour = ["-n", ENDS[name][0], "neigh"]
        target = [ENDS[other][1], "dev", "eth0"]
        if is_cut:
            # To an address that no card has: what is sent there arrives nowhere, silently.
            ip(*neighbour, "replace", *target, "lladdr", "02:00:00:00:00:99")
        else:
            ip(*neighbour, "del", *target)


@pytest.fixture
def client(spaces, tmp_path):
    """Of a scheduler here and a worker in each namespace."""
    address = f"tcp://{MIDDLE}:18787"
    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set({"jobrunner.worker-silence-seconds": 1}))
        command = ["scheduler", "--dashboard-address", ":0", "--host", MIDDLE, "--port", "18787"]
        stack.enter_context(dask_process(*command, cwd=tmp_path))
        for space, end in ENDS.values():
            command = ["worker", address, "--nthreads", "1", "--no-nanny", "--no-dashboard"]
            within = ["ip", "netns", "exec", space]
            stack.enter_context(dask_process(*command, "--host", end, cwd=tmp_path, prefix=within))
        client = stack.enter_context(Client(address, set_as_default=False, timeout=30))
        client.wait_for_workers(len(ENDS), timeout=30)
        yield client


def feed(x, flag):
    if current_task().epoch == 4 and not Path(flag).exists():
        Path(flag).touch()
        await_true(Path(f"{flag}.cut").exists, "the cut")
    return x + current_task().rng.standard_normal(x.size)


def run(session, flag, manager=None):
    """What the first node makes goes to the next one, and so on; gives the result and all blobs.

    A node's part is done before the next one has its value, for which another one then waits in turn.
    """
    with Job("chain", seed=3) as job:
        for name in NODES:
            with job.init_group:
                Task(lambda: np.zeros(100), outputs="x", node=name)
        Task(feed, inputs="x", outputs="x", node=NODES[0], kwargs={"flag": str(flag)})
        for before, name in itertools.pairwise(NODES):
            Task(lambda x, y: (x + y) / 2, ["x", Node(before)["x"]], outputs="x", node=name)
    result = JobRunner(job, manager, num_epochs=EPOCHS).run(session)
    return result, [session.fetch(Node(name)["x"]).tobytes() for name in NODES]


@pytest.mark.nightly
def test_a_pair_of_three_workers_that_is_cut_never_ends_the_run(client, inproc_session, tmp_path):
    (tmp_path / "none").touch()
    _, expected = run(inproc_session, tmp_path / "none")
    for trial in range(20):
        flag = tmp_path / f"flag-{trial}"

        def cut_in_epoch_4(flag=flag):
            await_true(flag.exists, "the flag")
            cut(True)
            Path(f"{flag}.cut").touch()

        thread = threading.Thread(target=cut_in_epoch_4)
        thread.start()
        with Session(client) as session:
            manager = MultiNodeCheckpointManager(tmp_path / f"ckpt-{trial}")
            result, state = run(session, flag, manager)
        thread.join()
        assert (result.epoch, result.restarts, state) == (EPOCHS, 1, expected)
        cut(False)
