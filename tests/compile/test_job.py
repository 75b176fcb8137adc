"""From definitions to plans: edges, crossings, globals, and the errors that name a task."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from jobrunner import Blob, DefinitionError, Job, Node, Task, WorkspaceType
from jobrunner.compile.fingerprint import changes, describe
from jobrunner.compile.plan import BlobArgument, CrossingArgument
from jobrunner.positions import Position

ROOT = Path(__file__).parents[2]
A, B = Node("a"), Node("b")


def f(*args):
    return args


def tasks_of(plan, group="epoch"):
    found = {}
    for part in plan.groups[group].slices.values():
        for task in part.tasks:
            found[f"{part.node}/{task.name}"] = task
    return found


def job_with(*, epoch=lambda: None, init=lambda: None, **kwargs):
    with Job("test", **kwargs) as job:
        with job.init_group:
            init()
        epoch()
    return job


def test_readers_wait_for_the_last_writer_and_writers_for_readers():
    def epoch():
        Task(f, outputs="x", name="write", node=A)
        Task(f, inputs="x", name="read1", node=A)
        Task(f, inputs="x", name="read2", node=A)
        Task(f, outputs="x", name="rewrite", node=A)
        Task(f, inputs="x", name="read3", node=A)
        Task(f, outputs="y", name="other", node=A)

    tasks = tasks_of(job_with(epoch=epoch).compile())
    assert tasks["a/write"].waits_for == ()
    assert tasks["a/read1"].waits_for == tasks["a/read2"].waits_for == (0,)
    assert set(tasks["a/rewrite"].waits_for) == {0, 1, 2}
    assert tasks["a/read3"].waits_for == (3,)
    assert tasks["a/other"].waits_for == ()


def test_a_remote_read_sees_the_last_write_defined_before_it_or_the_value_before_the_group():
    def epoch():
        Task(f, inputs=A["x"], name="before", node=B)
        Task(f, outputs="x", name="write", node=A)
        Task(f, inputs=A["x"], name="after", node=B)

    def init():
        Task(f, outputs="x", node=A)

    plan = job_with(epoch=epoch, init=init).compile()
    crossings = plan.groups["epoch"].crossings
    assert [(c.source, c.source_task, c.blob, c.targets) for c in crossings] == [
        ("a", None, "x", ("b",)),
        ("a", 1, "x", ("b",)),
    ]
    tasks = tasks_of(plan)
    assert tasks["b/before"].arguments == (CrossingArgument(0),)
    assert tasks["a/write"].hands_over == (1,)
    # The value was taken at the start, so the write does not wait for a remote reader.
    assert tasks["a/write"].crossings == ()


def test_after_adds_an_edge_on_the_node_and_a_signal_between_nodes():
    def epoch():
        first = Task(f, name="first", node=A)
        Task(f, name="second", node=A, after=first)
        Task(f, name="third", node=B, after="a/first")
        Task(f, name="early", node=A, after="late")
        Task(f, name="late", node=A)

    plan = job_with(epoch=epoch).compile()
    tasks = tasks_of(plan)
    assert tasks["a/second"].waits_for == (0,)
    assert tasks["a/early"].waits_for == (4,)
    (signal,) = plan.groups["epoch"].crossings
    assert (signal.blob, signal.part) == (None, None)
    assert tasks["b/third"].crossings == (signal.id,)


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_cycle_through_after_is_refused_naming_its_tasks(node):
    def epoch():
        Task(f, outputs="x", name="one", node=A, after=f"{node}/two")
        Task(f, inputs=A["x"], name="two", node=node)

    with pytest.raises(DefinitionError) as caught:
        job_with(epoch=epoch).compile()
    assert "'a/one'" in str(caught.value)
    assert f"'{node}/two'" in str(caught.value)


def t(node=A, **options):
    Task(f, name="t", node=node, **options)


MAKES_G = {"outputs": "g", "node": A, "workspace_type": "global"}
REFUSED = [
    (lambda: t(inputs="nope"), ["'a/t'", "'nope'", "'x'"]),
    (lambda: t(updates="nope"), ["'a/t'", "'nope'"]),
    (lambda: t(inputs=A["nope"], node=B), ["'b/t'", "'nope'", "'a'"]),
    (lambda: t(inputs=B["x"]), ["'a/t'", "'x'", "'b'"]),
    (lambda: t(after="gone"), ["'a/t'", "'gone'"]),
    (lambda: t(after="t"), ["'a/t'", "itself"]),
    (lambda: t(inputs=Task(f, node=A, group=Job().init_group)), ["'a/t'", "not part of this job"]),
    (lambda: t(outputs=["p", "q"], num_instances=2), ["'a/t'", "one list"]),
    (lambda: (t(inputs="g"), Task(f, **MAKES_G)), ["'a/t'", "before any task makes it"]),
    (lambda: t(outputs="x", workspace_type="private"), ["'a/t'", "private", "'a/f'"]),
    (lambda: t(outputs="X"), ["'x'", "'X'", "case"]),
    (lambda: t(node="A"), ["'A'", "'a'", "case"]),
    (
        lambda: [Task(f, node=Node("n", workers=w)) for w in "vw"],
        ["'n'", "conflicting requirements"],
    ),
]


@pytest.mark.parametrize(("epoch", "names"), REFUSED, ids=range(len(REFUSED)))
def test_a_job_that_cannot_run_is_refused_with_names(epoch, names):
    def init():
        Task(f, outputs="x", node=A)

    with pytest.raises(DefinitionError) as caught:
        job_with(epoch=epoch, init=init).compile()
    for name in names:
        assert name in str(caught.value)


def test_a_private_blob_of_another_group_does_not_exist():
    with Job() as job:
        Task(f, outputs="p", node=A)
        with job.exit_group:
            Task(f, inputs="p", name="late", node=A)
    with pytest.raises(DefinitionError, match=r"exit group.*'p'.*workspace_type"):
        job.compile()


def test_an_output_of_another_group_stands_for_its_global_blob():
    with Job() as job:
        with job.init_group:
            made = Task(f, outputs="x", node=A).output()
            lost = Task(f, node=A).output()
        Task(f, inputs=made, name="read", node=A)
        assert tasks_of(job.compile())["a/read"].arguments == (BlobArgument("x"),)
    with Job() as job:
        with job.init_group:
            lost = Task(f, node=A).output()
        Task(f, inputs=lost, name="read", node=A)
    with pytest.raises(DefinitionError, match="fills no blob"):
        job.compile()


def test_conditions_are_outputs_or_blobs_of_the_epoch():
    with Job() as job:
        with job.init_group:
            Task(f, outputs="x", node=A)
        job.add_stop_condition(Task(f, name="enough", node=A))
        job.add_stop_condition(A["x"])
        Task(f, outputs="p", node=A)
        job.add_stop_condition(A["p"])
    conditions = job.compile().groups["epoch"].conditions
    assert [c.name for c in conditions] == ["a/enough", "a/x", "a/p"]
    job = job_with(epoch=lambda: Task(f, node=A))
    job.add_stop_condition(Blob("gone", A))
    with pytest.raises(DefinitionError, match="stop condition reads blob 'gone'"):
        job.compile()


def test_checkpointing_an_unused_node_is_refused():
    with pytest.raises(DefinitionError, match="'zzz'"):
        job_with(nodes_to_checkpoint=["zzz"]).compile()


def test_init_tasks_that_run_again_at_a_resume():
    with Job(nodes_to_checkpoint=[A]) as job:
        with job.init_group:
            Task(f, outputs="w", name="weights", node=A)
            Task(f, outputs="path", name="path", node=A, workspace_type=WorkspaceType.PRIVATE)
            Task(f, inputs="w", outputs=["v", Blob("c", transient=True)], name="conn", node=A)
            Task(f, inputs="path", outputs=Blob("file", transient=True), name="open", node=A)
            Task(f, inputs=A["w"], outputs="u", name="all", node=B)
        Task(f, inputs=["c", "file"], node=A)
    plan = job.compile()
    again = tasks_of(plan, "resume")
    assert list(again) == ["a/path", "a/conn", "a/open", "b/all"]
    assert [(o.name, o.is_kept) for o in again["a/conn"].outputs] == [("v", False), ("c", True)]
    assert [o.is_kept for o in again["b/all"].outputs] == [True]
    assert plan.saved_blobs(Position(3)) == {"a": {"w", "v"}}


def test_a_task_that_runs_again_may_not_update_a_loaded_blob():
    with Job() as job, job.init_group:
        Task(f, outputs="w", node=A)
        Task(f, updates="w", outputs=Blob("c", transient=True), name="bad", node=A)
    with pytest.raises(DefinitionError, match="'a/bad'.*'w'"):
        job.compile()


def build(*, fn=f, extra=False, inputs="x", order=1):
    def epoch():
        for name in ("s", "t")[::order]:
            Task(fn, inputs=inputs, outputs="y", name=name, node=A)
        if extra:
            Task(f, name="extra", node=A)

    def init():
        Task(f, outputs=["x", "y"], node=A)

    return job_with(epoch=epoch, init=init).compile()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, []),
        ({"extra": True}, ["task epoch:a/extra is new"]),
        ({"inputs": "y"}, ["task epoch:a/s has other inputs", "task epoch:a/t has other inputs"]),
        ({"order": -1}, ["another order"]),
        (
            {"fn": lambda *a: a[0]},
            ["task epoch:a/s has other code", "task epoch:a/t has other code"],
        ),
    ],
    ids=["same", "new", "inputs", "order", "code"],
)
def test_changes_name_the_task(changed, says):
    found = changes(describe(build()), describe(build(**changed)))
    assert len(found) == len(says)
    for sentence, part in zip(found, says, strict=True):
        assert part in sentence


MODULE = """
import functools

def shift(x): return x + {shift}

@functools.lru_cache
def factor(): return {factor}

class Model:
    @property
    def scale(self): return factor() * {scale}
    @functools.lru_cache
    def bias(self): return {bias}
    def step(self, x): return shift(x) * self.scale + self.bias()

def report(x): return {report}

def step(x): return [Model().step(y) for y in x]
"""


def call(fn, x):
    return fn(x)


@pytest.mark.parametrize("of_method", [False, True], ids=["function", "partial of a method"])
@pytest.mark.parametrize("part", ["shift", "factor", "scale", "bias", "report"])
def test_a_task_has_other_code_if_what_it_calls_in_its_module_has(part, of_method):
    def described(number):
        module = {"__name__": "module"}
        parts = dict.fromkeys(["shift", "factor", "scale", "bias", "report"], 1)
        parts[part] = number
        exec(MODULE.format(**parts), module)
        fn = module["step"]
        if of_method:
            fn = functools.partial(call, module["Model"]().step)
        return describe(build(fn=fn))

    assert changes(described(1), described(1)) == []
    told = [] if part == "report" else [f"task epoch:a/{t} has other code" for t in ("s", "t")]
    assert changes(described(1), described(2)) == told


def test_a_task_may_call_an_object_that_has_an_answer_for_every_attribute():
    class Answering:
        def __getattr__(self, name):
            return self

        def __call__(self, x):
            return x

    assert changes(describe(build(fn=Answering())), describe(build(fn=Answering()))) == []


def test_a_description_is_the_same_in_another_process():
    script = "from tests.compile.test_job import build, describe; print(describe(build()))"
    answers = set()
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PATH": ""}
        command = [sys.executable, "-c", script]
        answers.add(subprocess.check_output(command, cwd=ROOT, env=environment))
    assert len(answers) == 1
