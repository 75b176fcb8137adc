"""What all tests share: clusters, Hypothesis profiles, and the check that nothing leaks."""

import faulthandler
import gc
import os
import signal
import threading
import time
from pathlib import Path

import dask
import pytest
from distributed import Client, LocalCluster
from distributed.utils import get_mp_context
from hypothesis import HealthCheck, is_hypothesis_test, settings

from jobrunner import Session
from jobrunner.checkpoint import REGISTERED_CODECS
from tests.object_servers import S3Server
from tests.sampling import EVERYDAY_EXAMPLES, NIGHTLY_EXAMPLES, NIGHTLY_TIMEOUT_SECONDS

# A shell starts with SIGINT ignored what it runs in the background, and so would be all programs
# that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# "everyday" draws the same examples every time, so that a failure comes from a change and not from
# luck; "nightly" looks for new ones. Other programs share the machine, so time is no criterion.
settings.register_profile(
    "everyday",
    deadline=None,
    derandomize=True,
    max_examples=EVERYDAY_EXAMPLES,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "nightly",
    parent=settings.get_profile("everyday"),
    derandomize=False,
    max_examples=NIGHTLY_EXAMPLES,
)
settings.load_profile("everyday")


def pytest_configure(config):
    """Draw more and new examples where the nightly tests are asked for."""
    if config.option.markexpr == "nightly":
        settings.load_profile("nightly")
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[_STDERR] = os.dup(2)


_STDERR = pytest.StashKey[int]()
_TIMES_TIMEOUT = 2


def _watch(item):
    marker = item.get_closest_marker("timeout")
    seconds = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(
        _TIMES_TIMEOUT * seconds, exit=True, file=item.config.stash[_STDERR]
    )


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item):
    """End this process, with the stacks of its threads, where pytest-timeout cannot end a test.

    pytest-timeout raises an error in the test; what ends the test may then hang as well, or never
    see the error. Another process of pytest-xdist goes on with the tests that are left.
    """
    _watch(item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node):
    """Watch the end of a failed test too; pytest stops to, for the sake of debuggers."""
    if isinstance(node, pytest.Item):
        _watch(node)


MOST_PROCESSES = 4


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Spread all tests over the cores; files and folders that are named run in this process.

    One more process than cores, since tests wait for others a third of their time.
    """
    are_all = {Path(argument).resolve() for argument in config.args} == {Path(__file__).parent}
    return min(len(os.sched_getaffinity(0)) + 1, MOST_PROCESSES) if are_all else 0


def pytest_collection_modifyitems(config, items):
    """Count some tests among the nightly ones.

    What draws examples belongs to them where they run, and may take hours. Tests on `cluster` run on
    worker processes only nightly, unless marked: what they find there, others find too.
    """
    is_nightly = config.option.markexpr == "nightly"
    for item in items:
        parameters = getattr(item, "callspec", None)
        is_on_processes = parameters is not None and parameters.params.get("cluster") == "processes"
        if is_on_processes and not item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.nightly)
        if is_nightly and is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.nightly)
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.timeout(NIGHTLY_TIMEOUT_SECONDS))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Let no garbage collection look at what the tests import, a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


# Threads that a library starts once in a process and never ends.
_THREADS_FOR_LIFE = (
    "Dask-Offload",
    "Dask-Callback-Thread",
    "asyncio_",
    "zarr_io",
    "pytest_timeout",
)
_SHARED_CLUSTERS = {"inproc_cluster", "process_cluster"}
_PATIENCE_SECONDS = 5.0


@pytest.fixture(autouse=True)
def _nothing_leaks(request):
    """Fail a test that leaves a thread running or a file open.

    Tests on a shared cluster are spared: its threads and connections come and go on their own.
    """
    if {"cluster", *_SHARED_CLUSTERS} & set(request.fixturenames):
        yield
        return
    threads_before, files_before = set(threading.enumerate()), _open_files()
    yield
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for thread in _new_threads(threads_before):
        thread.join(max(0.0, deadline - time.monotonic()))
    threads = [thread.name for thread in _new_threads(threads_before)]
    files = _open_files() - files_before
    if files:
        gc.collect()  # a traceback's cycle may hold the last reference
        files = _open_files() - files_before
    if threads or files:
        pytest.fail(
            f"The test left threads {sorted(threads)} running and files {sorted(files)} open; "
            f"expected neither {_PATIENCE_SECONDS:g} s after its end.",
            pytrace=False,
        )


@pytest.fixture(autouse=True)
def _own_codecs():
    """Forget the codecs that a test registers."""
    before = dict(REGISTERED_CODECS)
    yield
    REGISTERED_CODECS.clear()
    REGISTERED_CODECS.update(before)


def _new_threads(before):
    return [
        thread
        for thread in threading.enumerate()
        if thread not in before and not thread.name.startswith(_THREADS_FOR_LIFE)
    ]


def _open_files():
    """Descriptors of files and directories; sockets and pipes belong to event loops."""
    found = set()
    try:
        numbers = os.listdir("/proc/self/fd")
    except FileNotFoundError:  # no /proc on this system
        return set()
    for number in numbers:
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the descriptor of the listing itself
            continue
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
            found.add((int(number), target))
    return found


def _start_cluster(*, processes):
    options = {"n_workers": 2, "threads_per_worker": 2, "dashboard_address": ":0"}
    with LocalCluster(processes=processes, **options) as cluster:
        yield cluster


@pytest.fixture(scope="session", autouse=True)
def _workers_are_forked():
    """Fork worker processes from one that has imported what they need: a tenth of the time.

    It keeps the environment of the first one. The commands that tests run spawn their workers.
    """
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver", **_IDLE}):
        # Dask would add pandas and others, and does so only once.
        get_mp_context().set_forkserver_preload(_FORKED_WITH)
        yield


# A cluster that does nothing takes a tenth of a core with Dask's intervals, and all clusters of a
# process stay until its end.
_IDLE = {
    "distributed.admin.system-monitor.interval": "60 s",
    "distributed.admin.tick.interval": "1 s",
    "distributed.worker.memory.monitor-interval": "1 s",
    "distributed.worker.profile.enabled": False,
}
_FORKED_WITH = [
    "distributed",
    "jobrunner.worker.plugin",
    "jobrunner.checkpoint.worker_save",
    "jobrunner.checkpoint.log.log_writer",
]


@pytest.fixture(scope="session")
def inproc_cluster():
    """Two workers of two threads each in this process, shared by all tests."""
    yield from _start_cluster(processes=False)


@pytest.fixture(scope="session")
def process_cluster():
    """Two worker processes of two threads each, shared by all tests: leave them alive."""
    yield from _start_cluster(processes=True)


@pytest.fixture(params=["in-process", "processes"])
def cluster(request):
    """The test runs twice: on workers in this process, and on worker processes.

    On processes it runs nightly, and every day if it is marked with ``processes``.
    """
    name = "inproc_cluster" if request.param == "in-process" else "process_cluster"
    return request.getfixturevalue(name)


@pytest.fixture
def client(cluster):
    """A client of `cluster` for one test."""
    with Client(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture
def inproc_client(inproc_cluster):
    """A client of `inproc_cluster` for one test."""
    with Client(inproc_cluster, set_as_default=False) as client:
        yield client


@pytest.fixture
def process_client(process_cluster):
    """A client of `process_cluster` for one test."""
    with Client(process_cluster, set_as_default=False) as client:
        yield client


@pytest.fixture
def session(client):
    """A session on `cluster` for one test."""
    with Session(client) as session:
        yield session


@pytest.fixture
def inproc_session(inproc_client):
    """A session on `inproc_cluster` for one test."""
    with Session(inproc_client) as session:
        yield session


@pytest.fixture
def s3(monkeypatch):
    """A server that speaks S3, with a bucket; this process and its children can reach it."""
    pytest.importorskip("moto", reason="moto is not installed: pip install 'dask-jobrunner[test]'")
    server = S3Server()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()
