"""Jobs, groups, tasks, nodes and blobs: how they are defined, and which arguments they refuse."""

import functools
import pickle

import pytest

from jobrunner import (
    Blob,
    DefinitionError,
    ExecutionError,
    Job,
    Node,
    Task,
    TaskGroup,
    epoch_limiter,
)


def one(x=None):
    return x


def test_tasks_join_the_innermost_group_and_node():
    with Job("j") as job:
        with Node("a"):
            epoch_task = Task(one)
            with job.init_group, Node("b"):
                init_task = Task(one)
        plain = Task(one)
    assert job.epoch_group.tasks() == [epoch_task, plain]
    assert job.init_group.tasks() == [init_task]
    assert [epoch_task.node.name, init_task.node.name, plain.node.name] == ["a", "b", "local"]


def test_no_job_is_active_outside_its_block():
    with Job():
        pass
    with pytest.raises(DefinitionError, match="No job is active"):
        Job.current()


def test_default_names_are_numbered_within_a_node_and_group_and_repeat_from_build_to_build():
    def build():
        with Job() as job:
            for _ in range(3):
                Task(one, node="a")
            Task(functools.partial(one, 3), node="b")
            Task(lambda: 1, node="b")
        return [task.full_name for task in job.epoch_group.tasks()]

    assert build() == build() == ["a/one", "a/one#2", "a/one#3", "b/one", "b/lambda"]


def test_two_tasks_of_one_given_name_are_refused():
    with Job() as job:
        Task(one, name="t", node="a")
        Task(one, name="t", node="b")
        with pytest.raises(DefinitionError, match="'a/t'"):
            Task(one, name="t", node="a")
    assert len(job.epoch_group.tasks()) == 2


def test_a_blob_reference_has_its_node():
    node = Node("a")
    assert node["w"] == Blob("w", node) == Blob("w", "a")
    assert Task(one, inputs="w", node=node).inputs == (Blob("w", node),)


def test_outputs_are_one_name_or_a_sequence():
    assert [blob.name for blob in Task(one, outputs="w").output_blobs] == ["w"]
    assert [blob.name for blob in Task(one, outputs=["v", "w"]).output_blobs] == ["v", "w"]
    assert len(Task(one).outputs()) == 1
    assert len(Task(one, outputs=["v", "w"]).outputs()) == 2


REFUSED = [
    (lambda: Task(3), "fn must be callable"),
    (lambda: Task(one, inputs=3), "inputs must be blobs' names"),
    (lambda: Task(one, inputs=Task(one, outputs=["a", "b"])), "task.output(0)"),
    (lambda: Task(one, inputs=["a", "b"]), "cannot be called with 2 inputs"),
    (lambda: Task(one, kwargs={"y": 1}), "cannot be called"),
    (lambda: Task(one, kwargs={1: 1}), "kwargs must be a mapping of names (str) to values"),
    (lambda: Task(one, kwargs=["y"]), "kwargs"),
    (lambda: Task(one, group="init"), "group must be a TaskGroup"),
    (lambda: Task(max, inputs="a", updates="a"), "in inputs and in updates"),
    (lambda: Task(one, outputs="a", updates="a"), "in outputs and in updates"),
    (lambda: Task(one, outputs=["a", "a"]), "twice"),
    (lambda: Task(one, outputs=Blob("a", "other")), "own node only"),
    (lambda: Task(one, updates=Blob("a", "other")), "own node only"),
    (lambda: Task(one, num_instances=0), "num_instances"),
    (lambda: Task(one, num_instances=True), "num_instances"),
    (lambda: Task(one, after=3), "after must be tasks"),
    (lambda: Task(one, workspace_type="lokal"), "WorkspaceType"),
    (lambda: Task(one, node=3), "node must be a Node"),
    (lambda: Task(one).output(1), "1 output"),
    (lambda: Node(""), "is empty"),
    (lambda: Node("a/b"), "'/'"),
    (lambda: Node("a\nb"), "control character"),
    (lambda: Node(".."), "a directory"),
    (lambda: Node(" a"), "space"),
    (lambda: Node("x" * 129), "129 characters"),
    (lambda: Node(3), "must be a str"),
    (lambda: Node("a", workers=[]), "at least one"),
    (lambda: Node("a", workers=3), "at least one"),
    (lambda: Node("a", resources={"GPU": -1}), "positive number"),
    (lambda: Node("a", resources=["GPU"]), "positive number"),
    (lambda: Node("a", resources={"GPU": float("nan")}), "positive number"),
    (lambda: Blob(""), "is empty"),
    (lambda: Job("a/b"), "'/'"),
    (lambda: Job(steps_per_epoch=0), "steps_per_epoch"),
    (lambda: Job(seed=-1), "seed"),
    (lambda: Job(seed=1 << 64), "seed"),
    (lambda: Job(init_group=3), "init_group must be a TaskGroup"),
    (lambda: Job(nodes_to_checkpoint="trainer"), "nodes_to_checkpoint"),
    (lambda: Job(nodes_to_checkpoint=[3]), "nodes_to_checkpoint"),
    (lambda: Job(stop_conditions=Task(one).output()), "stop_conditions"),
    (lambda: Job().add_stop_condition(3), "condition must be"),
    (lambda: Job().add_stop_condition(Blob("x")), "names no node"),
    (lambda: epoch_limiter(Job(), 0), "num_epochs"),
    (lambda: TaskGroup().report_step(one, interval_ms=0), "interval_ms"),
    (lambda: TaskGroup().report_step(one, node=3), "node must be a Node"),
    (lambda: TaskGroup().report_step(3), "fn must be callable"),
    (
        lambda: TaskGroup().report_step(lambda x: x),
        "report_step: fn: <lambda>(x) cannot be called",
    ),
    (lambda: TaskGroup(workspace_type=1), "workspace_type"),
]


@pytest.mark.parametrize(("make", "says"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_arguments_are_refused_at_once(make, says):
    with pytest.raises(DefinitionError) as caught:
        make()
    assert says in str(caught.value)


@pytest.mark.parametrize("how", ["input", "partial", "list", "fn"])
def test_a_dask_collection_is_refused_with_advice(how):
    bag = pytest.importorskip("dask.delayed").delayed(one)()
    with pytest.raises(DefinitionError, match="compute"):
        {
            "input": lambda: Task(one, inputs=[bag]),
            "partial": lambda: Task(functools.partial(one, bag)),
            "list": lambda: Task(functools.partial(one, x=[1, (bag,)])),
            "fn": lambda: Task(bag.key and bag, inputs=[bag]),
        }[how]()


def test_a_future_is_refused_with_advice():
    from concurrent.futures import Future

    with pytest.raises(DefinitionError, match="result"):
        Task(one, kwargs={"x": Future()})


def test_an_output_cannot_be_fetched_before_its_task_ran():
    with pytest.raises(ExecutionError, match="Run its job"):
        Task(one).output().fetch()


def test_a_group_cannot_change_once_it_was_compiled():
    with Job() as job:
        Task(one)
        epoch_limiter(job, 1)
    job.compile()
    with pytest.raises(DefinitionError, match="already compiled"), job.epoch_group:
        Task(one)
    with pytest.raises(DefinitionError, match="already compiled"):
        job.add_stop_condition(Blob("x", "a"))
    job.compile()


def test_used_nodes_come_in_order_of_first_use():
    with TaskGroup() as group:
        for name in "bab":
            Task(one, node=name)
        group.report_step(one, node="c")
    assert [node.name for node in group.used_nodes()] == ["b", "a", "c"]


def test_nodes_to_checkpoint_are_those_of_the_init_group_unless_given():
    with Job() as job:
        with job.init_group:
            Task(one, node="a")
        Task(one, node="b")
    assert [node.name for node in job.nodes_to_checkpoint()] == ["a"]
    assert [n.name for n in Job(nodes_to_checkpoint=["b", "b"]).nodes_to_checkpoint()] == ["b"]


def test_errors_survive_pickling():
    from jobrunner import CheckpointCorruptError, NodeLostError, TaskFailedError

    for error in (
        TaskFailedError("m", job="j", node="n", task="t", epoch=3, remote_traceback="tb"),
        NodeLostError("m", nodes=("a", "b"), worker="tcp://x", epoch=1),
        CheckpointCorruptError("m", path="p"),
        DefinitionError("m"),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == "m"
        assert copy.__dict__ == error.__dict__
