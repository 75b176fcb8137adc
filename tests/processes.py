"""Dask's schedulers and workers as processes, each of which may be ended by itself."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time

from dask.cli import run_cli
from distributed import Client, LocalCluster

from jobrunner import Session


def fork_dask(*command):
    """Start ``dask`` with some arguments, in a process that has imported it: a tenth of the time."""
    process = multiprocessing.get_context("forkserver").Process(target=_run_dask, args=command)
    process.start()
    return process


def _run_dask(*command):
    sys.argv[1:] = command
    run_cli()


def kill(process):
    """End a process that leads a group of its own, and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(20)


@contextlib.contextmanager
def own_session(workers, *, threads=1, processes=False, **options):
    """A cluster of a test's own; gives it, a client and a session."""
    options |= {"n_workers": workers, "threads_per_worker": threads, "processes": processes}
    with (
        LocalCluster(dashboard_address=":0", **options) as cluster,
        Client(cluster, set_as_default=False) as client,
        Session(client) as session,
    ):
        yield cluster, client, session


@contextlib.contextmanager
def dask_process(*command, cwd, prefix=()):
    """``dask`` with some arguments in a process for a block; what it says goes to a file in `cwd`."""
    with (cwd / "dask.log").open("ab") as log:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "dask", *command],
            env={**os.environ, "PYTHONPATH": os.getcwd()},
            cwd=cwd,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill(process)


def await_file(path):
    """Wait until a file has content, and give that."""
    await_true(lambda: path.exists() and path.read_text(), f"something in {path}")
    return path.read_text()


def await_true(condition, what, process=None):
    """Wait until a condition holds that nothing tells of; it fails where `process` ends before."""
    deadline = time.monotonic() + 60
    while not condition():
        if process is not None and process.poll() is not None:
            told = process.stderr.read() if process.stderr is not None else ""
            raise AssertionError(f"it ended with {process.returncode} before {what}: {told}")
        assert time.monotonic() < deadline, f"{what} did not come within a minute"
        time.sleep(0.005)
