"""Sessions run tasks and groups on workers, in this process and in others."""

import gc
import signal
import subprocess
import sys
import threading
import time

import dask
import numpy as np
import pytest
from distributed import Client, get_client, get_worker

from jobrunner import (
    Blob,
    BlobNotFoundError,
    DefinitionError,
    ExecutionError,
    Job,
    JobRunner,
    Node,
    PlacementError,
    Session,
    Task,
    TaskFailedError,
    TaskGroup,
    WorkspaceType,
    current_task,
)
from jobrunner.cluster.connection import Connection, OwnCluster
from jobrunner.worker.plugin import PLUGIN_NAME

A, B = Node("a"), Node("b")


def global_group():
    return TaskGroup(workspace_type=WorkspaceType.GLOBAL)


def put(session, **blobs):
    """Make global blobs on node a."""
    with global_group() as group, A:
        for name, value in blobs.items():
            Task(lambda value: value, outputs=name, kwargs={"value": value}, name=name)
    session.run(group)


# ---- running


@pytest.mark.processes
def test_run_returns_a_value_a_tuple_or_none_for_a_group(session):
    assert session.run(Task(lambda: 42, node=A)) == 42
    assert session.run(Task(lambda: (1, "x"), outputs=["n", "s"], node=A)) == (1, "x")
    assert session.run(Task(lambda: [1, 2], outputs="n", node=A)) == [1, 2]
    with TaskGroup() as group:
        Task(lambda: 1, node=A)
    assert session.run(group) is None
    assert session.run(TaskGroup()) is None


def test_a_task_can_be_run_again_and_one_of_several_in_a_group_cannot_be_run_alone(session):
    task = Task(lambda: current_task().rng.random(), node=A)
    assert session.run(task) == session.run(task)
    with TaskGroup():
        task = Task(lambda: 1, node=A)
        Task(lambda: 2, node=A)
    with pytest.raises(DefinitionError, match="one of 2 in its group"):
        session.run(task)


def test_global_blobs_stay_from_run_to_run_and_private_ones_do_not(session):
    put(session, n=1)
    with TaskGroup() as group, A:
        Task(lambda n: n + 1, inputs="n", outputs="n")
        Task(lambda: 7, outputs="p")
    session.run(group)
    session.run(group)
    assert session.fetch(A["n"]) == 3
    with pytest.raises(BlobNotFoundError, match="'a' has no blob 'p'; its blobs are: 'n'"):
        session.fetch(A["p"])
    with pytest.raises(BlobNotFoundError, match="'a' has no blob 'p'"):
        session.run(Task(abs, inputs="p", node=A))


@pytest.mark.processes
def test_functions_find_their_worker_and_a_client(session):
    def ask():
        return get_worker().address, get_client().submit(lambda: 5).result()

    address, value = session.run(Task(ask, node=A))
    assert address in session.client.scheduler_info()["workers"]
    assert value == 5


# ---- fetching


def test_an_output_is_what_the_task_returned_until_its_group_runs_again(session):
    put(session, w=np.zeros(2))
    with TaskGroup() as group, A:
        before = Task(lambda w: w, inputs="w").output()
        Task(lambda w: w.__iadd__(1), updates="w")
    session.run(group)
    assert before.fetch().tolist() == [0, 0]
    session.run(group)
    assert before.fetch().tolist() == session.fetch(before).tolist() == [1, 1]


def test_an_output_of_one_job_is_not_that_of_a_similar_job(session):
    def run(value):
        with Job(f"of {value}") as job, A:
            with job.init_group:
                Task(lambda: value, outputs="x", name="init")
            out = Task(lambda x: x, inputs="x", name="read").output()
        JobRunner(job, num_epochs=1).run(session)
        return job, out

    job, first = run(1)
    assert first.fetch() == 1
    _, second = run(2)
    assert second.fetch() == 2
    for fetch in (first.fetch, lambda: session.fetch(first)):
        with pytest.raises(ExecutionError, match="binding job 'of 2' in this session dropped"):
            fetch()
    JobRunner(job, num_epochs=1).run(session)
    assert first.fetch() == 1


def test_a_missing_value_is_an_error_that_lists_what_exists(session):
    with pytest.raises(BlobNotFoundError, match="nodes are none"):
        session.fetch(A["w"])
    put(session, w=1)
    with pytest.raises(BlobNotFoundError, match="of node 'b'.*nodes are 'a'"):
        session.fetch(B["w"])
    with pytest.raises(DefinitionError, match="Blob with its node"):
        session.fetch(Blob("w"))
    with pytest.raises(ExecutionError, match="has not run"):
        session.fetch(Task(lambda: 1, node=A).output())


def test_groups_that_are_gone_are_forgotten_on_the_workers(session):
    def groups(dask_worker):
        host = dask_worker.plugins.get(PLUGIN_NAME)
        hosted = host.bindings.values() if host else ()
        return [key for binding in hosted for key in binding.programs]

    for _ in range(5):
        session.run(Task(lambda: 1, node=A))
    gc.collect()  # tasks and their group refer to each other
    session.run(Task(lambda: 1, node=A))
    counts = [len(keys) for keys in session.client.run(groups).values()]
    assert sum(counts) == 1


# ---- failures


def fail():
    raise ZeroDivisionError("by hand")


class TwoArgumentsError(Exception):
    """Cannot be unpickled."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def fail_strangely():
    raise TwoArgumentsError("left", "right")


@pytest.mark.processes
def test_a_failed_task_says_where_and_shows_the_remote_traceback(session):
    for fn, told in ((fail, "by hand"), (fail_strangely, "TwoArgumentsError: left right")):
        with TaskGroup() as group:
            Task(fn, (), node=A, name="bad")
        with pytest.raises(TaskFailedError, match=f"'bad'.*node 'a'.*{told}") as caught:
            session.run(group)
        error = caught.value
        assert (error.node, error.task, error.group, error.epoch) == ("a", "bad", "group", None)
        assert "in fail" in error.remote_traceback
        assert any("in fail" in note for note in error.__notes__)
        assert isinstance(error.__cause__, ZeroDivisionError) == (fn is fail)
    assert session.run(Task(lambda: 1, node=A)) == 1


def test_a_function_that_cannot_be_pickled_is_named_before_anything_runs(session):
    lock = threading.Lock()
    with pytest.raises(DefinitionError, match="Task a/stuck cannot be pickled"):
        session.run(Task(lambda: lock, node=A, name="stuck"))


# ---- several at once, and the end


def test_two_sessions_of_two_clients_do_not_disturb_each_other(session, cluster):
    with Client(cluster, set_as_default=False) as other_client, Session(other_client) as other:
        put(session, n=1)
        put(other, n=2)
        assert (session.fetch(A["n"]), other.fetch(A["n"])) == (1, 2)
    put(session, m=1)
    assert session.fetch(A["n"]) == 1


def test_one_operation_at_a_time(session):
    put(session, n=1)
    flag = threading.Event()

    def busy():
        with session.exclusive("The runner of job 'long'"):
            session.run(Task(lambda: 1, node=A))  # its own operations may run
            flag.set()
            done.wait(10)

    done = threading.Event()
    thread = threading.Thread(target=busy)
    thread.start()
    assert flag.wait(10)
    for attempt in (lambda: session.fetch(A["n"]), lambda: session.run(Task(int, node=A))):
        with pytest.raises(ExecutionError, match="one runner at a time"):
            attempt()
    done.set()
    thread.join()
    assert session.fetch(A["n"]) == 1


def test_a_new_binding_drops_what_the_session_had(client):
    with Session(client) as session:
        put(session, n=1)
        with Job() as job, job.init_group:
            Task(lambda: 2, outputs="m", node=A)
        binding = session.bind(job.compile())
        binding.run("init", epoch=0)
        assert session.fetch(A["m"]) == 2
        with pytest.raises(BlobNotFoundError):
            session.fetch(A["n"])
        again = session.bind(binding.plan)
        assert again.attempt == 1


def test_waiting_for_workers_to_start_ends():
    with pytest.raises(ExecutionError, match="did not start within 0 s"):
        OwnCluster(1, 1, processes=False, start_seconds=0)


def test_nodes_that_a_local_cluster_never_suits_are_refused_at_once():
    started = time.monotonic()
    with Session.local(workers=1, processes=False) as session:
        client, own = session.client, session._connection._cluster
        with pytest.raises(PlacementError, match="GPU"):
            session.run(Task(int, node=Node("g", resources={"GPU": 1})))
        assert session.run(Task(lambda: 1, node=A)) == 1
    assert (client.status, own.cluster.status.name) == ("closed", "closed")
    assert time.monotonic() - started < 30  # of the 60 that workers may take to come


def test_a_script_without_a_main_guard_is_an_error_that_shows_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from jobrunner import Session\nSession.local(workers=1)\n")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.stderr.count("if __name__ == '__main__':") == 1  # by the client, by no worker


def test_a_session_connects_to_a_scheduler(process_cluster):
    with Session.connect(process_cluster.scheduler_address) as session:
        assert session.run(Task(lambda: 1, node=A)) == 1
        assert "1 node>" in repr(session)
    assert session.client.status == "closed"
    assert "closed" in repr(session)
    with pytest.raises(ExecutionError, match="session is closed"):
        session.run(Task(lambda: 1, node=A))
    session.close()
    with pytest.raises(ExecutionError, match="No Dask scheduler answers at tcp://127.0.0.1:1"):
        Session.connect("tcp://127.0.0.1:1", timeout=0.2)


@pytest.mark.parametrize("file", [None, "/nowhere", __file__])
def test_certificates_that_are_missing_or_wrong_are_named(file):
    config = dict.fromkeys(
        ("distributed.comm.tls.ca-file", "distributed.comm.tls.client.cert"), file
    )
    with (
        dask.config.set(config),
        pytest.raises(ExecutionError, match=r"with TLS also.*distributed\.comm"),
    ):
        Session.connect("tls://127.0.0.1:1", timeout=0.2)


def test_a_closed_client_and_other_objects_are_refused(process_cluster):
    with pytest.raises(DefinitionError, match=r"Session.local\(\)"):
        Session("tcp://somewhere")
    with Client(process_cluster, set_as_default=False) as client:
        pass
    with pytest.raises(ExecutionError, match="is closed"):
        Session(client)


def test_threads_switch_sooner_on_workers_that_host_a_session_and_as_before_afterwards(
    process_client,
):
    before = process_client.run(sys.getswitchinterval)
    with Session(process_client) as session:
        session.run(Task(int, node=Node("a", workers=[next(iter(before))])))
        during = process_client.run(sys.getswitchinterval)
    assert min(during.values()) == pytest.approx(0.0005)
    assert process_client.run(sys.getswitchinterval) == before


class SlowCluster:
    """A cluster whose close waits for its workers until they are killed."""

    most_workers = 1

    def __init__(self):
        self.is_closing, self.is_killed, self.is_closed = (threading.Event() for _ in range(3))

    def close(self):
        self.is_closing.set()
        if self.is_killed.wait(20):
            self.is_closed.set()

    def kill(self):
        self.is_killed.set()


@pytest.mark.parametrize("how", ["is killed", "hangs", "is interrupted"])
def test_a_cluster_that_does_not_close_is_killed_and_then_left(inproc_cluster, caplog, how):
    cluster = SlowCluster()
    client = Client(inproc_cluster, set_as_default=False)
    if how == "is interrupted":

        def interrupt():
            if cluster.is_closing.wait(20):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            Connection(client, cluster=cluster).close()
        thread.join()
    else:
        if how == "hangs":
            cluster.kill = lambda: None
        Connection(client, cluster=cluster, close_seconds=0.1).close()
        assert ("did not close within 0.1 s" in caplog.text) == (how == "hangs")
    assert client.status == "closed"
    assert cluster.is_closed.is_set() == (how != "hangs")
    cluster.is_killed.set()
