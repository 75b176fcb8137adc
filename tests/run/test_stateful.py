"""Objects with a state of their own, through everything that loads a checkpoint."""

import threading

import numpy as np
import pytest
from distributed import Client

from jobrunner import (
    Blob,
    CheckpointError,
    DefinitionError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    PlanMismatchError,
    Session,
    Task,
    TaskFailedError,
    current_task,
    epoch_limiter,
)

A = Node("a")


class Model:
    def __init__(self, scale):
        self.weights = np.zeros(4)
        self.scale = scale
        self.lock = threading.Lock()

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights[...] = state["weights"]


class Optimizer:
    """Updates a model that it holds, as in PyTorch."""

    def __init__(self, model):
        self.model = model
        self.steps = 0

    def step(self, gradient):
        self.steps += 1
        self.model.weights += self.model.scale * gradient / self.steps

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def train(model, optimizer, fails_at, once):
    task = current_task()
    if task.epoch == fails_at and not (once and task.attempt):
        raise ZeroDivisionError("by hand")
    optimizer.step(task.rng.standard_normal(4))
    return model.weights.copy()


def training(epochs, *, fails_at=None, once=False):
    with Job("training", seed=5) as job, A:
        with job.init_group:
            Task(lambda: 0.5, outputs="scale", name="scale")
            Task(Model, inputs="scale", outputs="model", name="model")
            Task(Optimizer, inputs="model", outputs="opt", name="opt")
            Task(lambda: "log", outputs="log", name="log")
            Task(lambda: None, outputs=Blob("socket", transient=True), name="socket")
        Task(
            train,
            inputs=["model", "opt"],
            outputs="seen",
            kwargs={"fails_at": fails_at, "once": once},
            transient_errors=ZeroDivisionError if once else (),
            name="train",
        )
        with job.download_group:
            Task(
                lambda m, o: (m.weights.tobytes(), o.steps, o.model is m),
                inputs=["model", "opt"],
                name="result",
            ).output()
        epoch_limiter(job, epochs)
    return job


def result_of(job):
    return job.download_group.find("a", "result").output().fetch()


@pytest.fixture(scope="module")
def expected(inproc_cluster):
    job = training(6)
    with Client(inproc_cluster, set_as_default=False) as client, Session(client) as session:
        JobRunner(job).run(session)
        found = result_of(job)
    assert found[1:] == (6, True)
    return found


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
def test_a_job_resumes_with_the_same_bits_and_says_what_it_makes_anew(
    inproc_session, tmp_path, expected, asynchronous
):
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt", asynchronous=asynchronous)
    with pytest.raises(TaskFailedError):
        JobRunner(training(6, fails_at=4), manager).run(inproc_session)
    job = training(6)
    runner = JobRunner(job, manager)
    assert runner.plan_resume().rebuilds == ("a/model", "a/opt", "a/socket")
    assert runner.run(inproc_session).resumed_from == 3
    assert result_of(job) == expected


def test_a_redone_epoch_begins_from_the_recorded_state(inproc_session, manager, expected):
    job = training(6, fails_at=4, once=True)
    assert JobRunner(job, manager).run(inproc_session).restarts == 1
    assert result_of(job) == expected


def test_a_load_without_an_object_says_what_makes_it(inproc_client, inproc_session, manager):
    JobRunner(training(1), manager).run(inproc_session)
    with (
        Session(inproc_client) as other,
        pytest.raises(
            PlanMismatchError,
            match=r"found nothing\. Make the object in a task of the job's init group",
        ),
    ):
        other.run(manager.load(1))


def test_some_blobs_are_loaded_into_the_objects_that_are_there(inproc_session, manager):
    runner = JobRunner(training(3), manager)
    runner.run(inproc_session)
    inproc_session.run(Task(lambda o: setattr(o, "mark", 1), inputs="opt", node=A))
    assert runner.load_blobs_from_checkpoints([A["opt"]], 2, inproc_session)
    found = inproc_session.run(Task(lambda o: (o.steps, o.mark), inputs="opt", node=A))
    assert found == (2, 1)


def test_an_object_that_only_an_epoch_makes_ends_the_run_by_name(inproc_session, manager):
    with Job("late") as job, A:
        with job.init_group:
            Task(lambda: 0, outputs="n")
        Task(lambda n: Model(n), inputs="n", outputs="m", workspace_type="global")
        epoch_limiter(job, 2)
    with pytest.raises(DefinitionError, match=r"blob 'm'.*no task of the init group"):
        JobRunner(job, manager).run(inproc_session)


class Reader:
    """Reads every `count`-th number from `index` on; its state is which it has read."""

    def __init__(self, index, count):
        self.index, self.count, self.read = index, count, []

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = list(state["read"])

    def merge_state_dicts(self, states):
        read = [number for state in states for number in state["read"]]
        return {"read": [n for n in sorted(read) if n % self.count == self.index], "order": read}


class LoneReader(Reader):
    merge_state_dicts = None


def read_on(readers):
    for reader in readers.values() if isinstance(readers, dict) else [readers]:
        reader.read.append(reader.index + reader.count * len(reader.read))


def parted(nodes, epochs, make=Reader):
    with Job("parted") as job:
        for i, node in enumerate(nodes):
            with job.init_group:
                Task(
                    make,
                    outputs=Blob("reader", partition=0),
                    kwargs={"index": i, "count": len(nodes)},
                    node=node,
                    name="make",
                )
            Task(read_on, updates="reader", node=node, name="read")
        epoch_limiter(job, epochs)
    return job


def numbers_read(session, nodes):
    task = [Task(lambda r: r.read, inputs="reader", node=node) for node in nodes]
    return [session.run(one) for one in task]


@pytest.mark.parametrize("nodes", ["ab", "xy", "ba"])
def test_as_many_nodes_get_the_states_of_their_own_parts(inproc_session, manager, nodes):
    JobRunner(parted("ab", 2, LoneReader), manager).run(inproc_session)
    JobRunner(parted(nodes, 3, LoneReader), manager).run(inproc_session)
    assert numbers_read(inproc_session, nodes) == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("count", [1, 4])
def test_another_number_of_nodes_merges_the_states_of_all_parts(inproc_session, manager, count):
    nodes = [f"n{i}" for i in range(count)]
    JobRunner(parted("ab", 2), manager).run(inproc_session)
    JobRunner(parted(nodes, 3), manager).run(inproc_session)
    found = [read[:-1] for read in numbers_read(inproc_session, nodes)]
    assert found == [[n for n in range(4) if n % count == i] for i in range(count)]
    JobRunner(parted("ab", 4), manager).run(inproc_session)


def test_states_that_their_objects_cannot_merge_are_refused(inproc_session, manager):
    JobRunner(parted("ab", 2, LoneReader), manager).run(inproc_session)
    with pytest.raises(PlanMismatchError, match=r"parts .* was 2 .*LoneReader.*merge_state_dicts"):
        JobRunner(parted("abc", 3, LoneReader), manager).run(inproc_session)
    with pytest.raises(CheckpointError, match=r"merge_state_dicts of .*KeyError: 'read'"):
        JobRunner(parted("abc", 3, Forgetful), manager).run(inproc_session)
    assert manager.epochs() == [0, 1, 2]
    assert manager.open(2).nodes == ("a", "b")


class Forgetful(LoneReader):
    def merge_state_dicts(self, states):
        return {"read": [state.pop("read") + state["read"] for state in states]}


Forgetful.__qualname__ = "LoneReader"
