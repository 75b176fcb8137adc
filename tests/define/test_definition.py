"""Jobs, groups, tasks, nodes and blobs: how they are defined, and which arguments they refuse."""

import functools
import pickle
from concurrent.futures import Future
from xml.etree import ElementTree

import dask
import pytest

from jobrunner import (
    Blob,
    DefinitionError,
    ExecutionError,
    Job,
    JobRunner,
    Node,
    Task,
    TaskGroup,
    WorkspaceType,
    epoch_limiter,
)


def one(x=None):
    return x


def test_tasks_join_the_innermost_group_and_node():
    with Job("j") as job:
        assert Job.current() is job
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


def make_two(name):
    with Job():
        Task(one, name="t", node="b")
        for _ in range(2):
            Task(one, name=name, node="a")


REFUSED = [
    (lambda: make_two("t"), "Two tasks of the epoch group are called 'a/t'"),
    (lambda: Task(one, inputs=Task(one, outputs=["a", "b"])), "task.output(0)"),
    (lambda: Task(one, inputs=["a", "b"]), "cannot be called with 2 inputs"),
    (lambda: Task(one, kwargs={"y": 1}), "cannot be called"),
    (lambda: Task(max, inputs="a", updates="a"), "in inputs and in updates"),
    (lambda: Task(one, outputs="a", updates="a"), "in outputs and in updates"),
    (lambda: Task(one, outputs=["a", "a"]), "twice"),
    (lambda: Task(one, outputs=Blob("a", "other")), "own node only"),
    (lambda: Task(one, updates=Blob("a", "other")), "own node only"),
    (lambda: Task(one).output(1), "1 output"),
    (lambda: Node("a/b"), "'/'"),
    (lambda: Node("a", workers=[]), "at least one"),
    (lambda: Node("a", resources={"GPU": float("nan")}), "positive number"),
    (lambda: Blob("x", history=True, transient=True), "give only one of them"),
    (lambda: Blob("x", history=True, chunks=3), "omit compressors, chunks and coords"),
    (lambda: Job("a/b"), "'/'"),
    (lambda: Job(nodes_to_checkpoint="trainer"), "nodes_to_checkpoint"),
    (lambda: Job().add_stop_condition(3), "condition must be"),
    (lambda: Job().add_stop_condition(Blob("x")), "names no node"),
    (lambda: TaskGroup().report_step(lambda x: x), "report_step: fn: <lambda>(x) cannot be called"),
    (lambda: Task(one).output().fetch(), "Run its job"),
]


@pytest.mark.parametrize(("make", "says"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_arguments_are_refused_at_once(make, says):
    with pytest.raises((DefinitionError, ExecutionError)) as caught:
        make()
    assert says in str(caught.value)


def test_a_dask_collection_or_a_future_is_refused_with_advice():
    delayed = dask.delayed(one)()
    for make in (
        lambda: Task(one, inputs=[delayed]),
        lambda: Task(functools.partial(one, x=[1, (delayed,)])),
    ):
        with pytest.raises(DefinitionError, match="compute"):
            make()
    with pytest.raises(DefinitionError, match="result"):
        Task(one, kwargs={"x": Future()})


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


def test_nodes_to_checkpoint_are_those_of_the_init_group_unless_given():
    with Job() as job:
        with job.init_group:
            Task(one, node="a")
        Task(one, node="b")
    assert [node.name for node in job.nodes_to_checkpoint()] == ["a"]
    assert [n.name for n in Job(nodes_to_checkpoint=["b", "b"]).nodes_to_checkpoint()] == ["b"]


def test_a_group_has_one_role():
    group = TaskGroup()
    Job("one", init_group=group)
    Job("two", init_group=group)  # the same tasks begin both
    with pytest.raises(DefinitionError, match="Job 'three'.*already the init group of job 'two'"):
        Job("three", epoch_group=group)
    other = TaskGroup()
    with pytest.raises(DefinitionError, match="Job 'four'.*one role"):
        Job("four", init_group=other, epoch_group=other)
    Job("five", exit_group=other)  # a job that was refused has no groups


def test_workspace_types_may_be_given_by_their_names():
    group = TaskGroup("global")
    assert group.workspace_type is WorkspaceType.GLOBAL
    task = Task(int, node="n", group=group, workspace_type="private")
    assert task.blob_type is WorkspaceType.PRIVATE
    for make in (TaskGroup, lambda kind: Task(int, workspace_type=kind)):
        with pytest.raises(DefinitionError, match=r"'global' or 'private'.*got 'lokal'"):
            make("lokal")


def test_a_job_is_a_table_in_a_notebook_and_may_be_changed_afterwards():
    with Job("a <b>&job") as job:
        Task(int, outputs="w", node='no<d>e & "co"')
    root = ElementTree.fromstring(job._repr_html_())
    rows = [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]
    assert ["epoch", "1", '1: no<d>e & "co"', "1: w"] in rows
    Task(int, node="a", group=job.epoch_group)


def test_a_job_that_ran_can_be_pickled(inproc_session):
    job = Job("j")
    with job.init_group:
        result = Task(int, outputs="x", node=Node("a")).output()
    epoch_limiter(job, 1)
    JobRunner(job).run(inproc_session)
    copy = pickle.loads(pickle.dumps(job))
    assert [task.full_name for task in copy.init_group.tasks()] == ["a/int"]
    assert JobRunner(copy).run(inproc_session).epoch == 1
    assert result.task.session is inproc_session
