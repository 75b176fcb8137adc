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

HERE, THERE = "10.231.77.1", "10.231.77.2"
SPACE, OURS, THEIRS = "jr-test", "jr-ours", "jr-theirs"
EPOCHS = 8

SCHEDULER = ["scheduler", "--dashboard-address", ":0"]
WORKER = ["--nthreads", "1", "--no-nanny", "--no-dashboard"]


def within(space):
    return ["ip", "netns", "exec", space]


def ip(*command):
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True)


@pytest.fixture
def cable():
    """A namespace at the other end of a cable; gives what pulls it (False) and puts it back."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2) on this machine")
    try:
        ip("netns", "add", SPACE)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
    try:
        ip("link", "add", OURS, "type", "veth", "peer", "name", THEIRS, "netns", SPACE)
        ip("addr", "add", f"{HERE}/30", "dev", OURS)
        ip("link", "set", OURS, "up")
        ip("-n", SPACE, "addr", "add", f"{THERE}/30", "dev", THEIRS)
        ip("-n", SPACE, "link", "set", "lo", "up")
        ip("-n", SPACE, "link", "set", THEIRS, "up")
    except subprocess.CalledProcessError as error:
        ip("netns", "del", SPACE)
        pytest.skip(f"no cable into a network namespace here: {error.stderr.strip()}")
    yield lambda is_in: ip("-n", SPACE, "link", "set", THEIRS, "up" if is_in else "down")
    ip("netns", "del", SPACE)  # and the cable with it


@pytest.fixture
def scheduler(cable, tmp_path):
    """A scheduler here with a worker here and one there; gives its address."""
    address = f"tcp://{HERE}:18786"
    command = ["worker", address, *WORKER, "--host"]
    with (
        dask_process(*SCHEDULER, "--host", HERE, "--port", "18786", cwd=tmp_path),
        dask_process(*command, HERE, "--name", "here", cwd=tmp_path),
        dask_process(*command, THERE, "--name", "there", cwd=tmp_path, prefix=within(SPACE)),
    ):
        yield address


def walk(x, flag):
    task = current_task()
    if task.epoch == 4 and flag and not Path(flag).exists():
        Path(flag).touch()
        time.sleep(1)  # the cable is pulled meanwhile
    return x + task.rng.standard_normal(x.size)


def mix(x, other):
    return (x + other) / 2


def build(flag):
    with Job("walk", seed=3) as job:
        for name, other in (("a", "b"), ("b", "a")):
            with job.init_group:
                Task(lambda: np.zeros(100), outputs="x", node=name)
            kwargs = {"flag": str(flag) if name == "b" else ""}
            walked = Task(walk, inputs="x", outputs="y", node=name, kwargs=kwargs)
            Task(mix, [walked.output(), Node(other)["x"]], outputs="x", node=name)
    epoch_limiter(job, EPOCHS)
    return job


@pytest.mark.nightly
def test_a_worker_that_is_cut_off_is_replaced_and_changes_nothing_when_it_is_back(
    scheduler, cable, tmp_path, inproc_client
):
    flag, manager = tmp_path / "flag", MultiNodeCheckpointManager(tmp_path / "ckpt")

    def pull():
        await_true(flag.exists, "the flag")
        cable(False)

    with (
        dask.config.set({"jobrunner.worker-silence-seconds": 1}),
        Client(scheduler, set_as_default=False, timeout=30) as client,
        Session(client) as session,
    ):
        client.wait_for_workers(2, timeout=30)
        thread = threading.Thread(target=pull)
        thread.start()
        result = JobRunner(build(flag), manager).run(session)
        thread.join()
        assert (result.epoch, result.restarts) == (EPOCHS, 1)
        entries = sorted(os.listdir(tmp_path / "ckpt" / "_log"))
        cable(True)
        time.sleep(2.0)  # for the one that is back to do what it was about to
        assert sorted(os.listdir(tmp_path / "ckpt" / "_log")) == entries
        for epoch in manager.epochs():
            manager.verify(epoch)
        state = [session.fetch(Node(name)["x"]).tobytes() for name in "ab"]
    flag.touch()
    with Session(inproc_client) as session:
        JobRunner(build(flag)).run(session)
        assert state == [session.fetch(Node(name)["x"]).tobytes() for name in "ab"]


BRIDGE, MIDDLE = "jr-bridge", "10.231.78.1"
ENDS = {
    "a": ("jr-a", "10.231.78.2"),
    "b": ("jr-b", "10.231.78.3"),
    "c": ("jr-c", "10.231.78.4"),
}
PAIR = ("a", "b")
CHAIN = ("server", "n0", "n1", "n2")  # of four nodes, three workers get two, one and one


@pytest.fixture
def spaces():
    """Three namespaces on a bridge; gives what cuts a and b from each other, or mends that."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2) on this machine")
    made = []
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        made.append(("link", "del", BRIDGE))
        ip("addr", "add", f"{MIDDLE}/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for space, address in ENDS.values():
            ip("netns", "add", space)
            made.append(("netns", "del", space))
            ip("link", "add", f"{space}-1", "type", "veth", "peer", "name", "eth0", "netns", space)
            made.append(("link", "del", f"{space}-1"))  # a namespace's end takes effect later
            ip("link", "set", f"{space}-1", "master", BRIDGE, "up")
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", "eth0", "up")
    except subprocess.CalledProcessError as error:
        for undo in reversed(made):
            ip(*undo)
        pytest.skip(f"no bridge between network namespaces here: {error.stderr.strip()}")

    def cut(is_cut=True):
        for name, other in (PAIR, PAIR[::-1]):
            target = [ENDS[other][1], "dev", "eth0"]
            # To an address that no card has: what is sent there arrives nowhere, silently.
            nowhere = [*target[:1], "lladdr", "02:00:00:00:00:99", *target[1:]]
            how = ["replace", *nowhere] if is_cut else ["del", *target]
            ip("-n", ENDS[name][0], "neigh", *how)

    yield cut
    for undo in reversed(made):
        ip(*undo)


@contextlib.contextmanager
def workers_in(names, tmp_path):
    """A scheduler here and a worker in each of some namespaces; gives its address."""
    address = f"tcp://{MIDDLE}:18787"
    with contextlib.ExitStack() as stack:
        host = ["--host", MIDDLE, "--port", "18787"]
        stack.enter_context(dask_process(*SCHEDULER, *host, cwd=tmp_path))
        for name in names:
            space, end = ENDS[name]
            command = ["worker", address, *WORKER, "--host", end, "--name", name]
            stack.enter_context(dask_process(*command, cwd=tmp_path, prefix=within(space)))
        yield address


def feed(x, flag):
    if current_task().epoch == 4 and flag and not Path(flag).exists():
        Path(flag).touch()
        deadline = time.monotonic() + 20
        while not Path(f"{flag}.cut").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
    return x + current_task().rng.standard_normal(x.size)


def build_one_way(flag):
    """What a makes goes to b and nothing comes back: a's part is done before b has it."""
    with Job("feed", seed=3) as job:
        for name in "ab":
            with job.init_group:
                Task(lambda: np.zeros(100), outputs="x", node=name)
        Task(feed, inputs="x", outputs="x", node="a", kwargs={"flag": str(flag)})
        Task(mix, ["x", Node("a")["x"]], outputs="x", node="b")
    epoch_limiter(job, EPOCHS)
    return job


class Warnings(list):
    on_warning = list.append


@pytest.mark.nightly
def test_workers_that_are_cut_off_from_each_other_only_hold_no_nodes_together(
    spaces, tmp_path, inproc_client
):
    flag, manager = tmp_path / "flag", MultiNodeCheckpointManager(tmp_path / "ckpt")
    warnings = Warnings()

    def cut():
        await_true(flag.exists, "the flag")
        spaces()
        (tmp_path / "flag.cut").touch()

    with (
        dask.config.set({"jobrunner.worker-silence-seconds": 1}),
        workers_in(PAIR, tmp_path) as address,
        Client(address, set_as_default=False, timeout=30) as client,
        Session(client) as session,
    ):
        client.wait_for_workers(2, timeout=30)
        thread = threading.Thread(target=cut)
        thread.start()
        result = JobRunner(build_one_way(flag), manager, callbacks=[warnings]).run(session)
        thread.join()
        assert (result.epoch, result.restarts) == (EPOCHS, 1)
        assert len(client.scheduler_info()["workers"]) == 2  # the scheduler has both
        (told,) = warnings
        for name in PAIR:
            assert ENDS[name][1] in told
        assert "could not send values to" in told
        assert "did not answer within 2 s" in told
        state = [session.fetch(Node(name)["x"]).tobytes() for name in "ab"]
    with Session(inproc_client) as session:
        JobRunner(build_one_way(flag)).run(session)
        assert state == [session.fetch(Node(name)["x"]).tobytes() for name in "ab"]


def build_chain(flag):
    """The server's part is done before b lacks its value, for which c then waits in turn."""
    with Job("chain", seed=3) as job:
        for name in CHAIN:
            with job.init_group:
                Task(lambda: np.zeros(100), outputs="x", node=name)
        Task(feed, inputs="x", outputs="x", node="server", kwargs={"flag": str(flag)})
        for before, name in itertools.pairwise(CHAIN):
            Task(mix, ["x", Node(before)["x"]], outputs="x", node=name)
    epoch_limiter(job, EPOCHS)
    return job


@pytest.mark.nightly
def test_a_pair_of_three_workers_that_is_cut_never_ends_the_run(spaces, tmp_path, inproc_client):
    with Session(inproc_client) as session:
        (tmp_path / "flag").touch()
        JobRunner(build_chain(tmp_path / "flag")).run(session)
        expected = [session.fetch(Node(name)["x"]).tobytes() for name in CHAIN]
    with (
        dask.config.set({"jobrunner.worker-silence-seconds": 1}),
        workers_in(ENDS, tmp_path) as address,
        Client(address, set_as_default=False, timeout=30) as client,
    ):
        client.wait_for_workers(3, timeout=30)
        for trial in range(20):
            flag = tmp_path / f"flag-{trial}"

            def cut(flag=flag):
                await_true(flag.exists, "the flag")
                spaces()
                Path(f"{flag}.cut").touch()

            thread = threading.Thread(target=cut)
            thread.start()
            with Session(client) as session:
                manager = MultiNodeCheckpointManager(tmp_path / f"ckpt-{trial}")
                result = JobRunner(build_chain(flag), manager).run(session)
                assert (result.epoch, result.restarts) == (EPOCHS, 1)
                state = [session.fetch(Node(name)["x"]).tobytes() for name in CHAIN]
            thread.join()
            assert state == expected
            spaces(False)
