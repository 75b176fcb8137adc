"""Inputs by the names of parameters, and tasks on many nodes at once."""

from __future__ import annotations

import functools
import gc
import pickle
import weakref

import cloudpickle
import numpy as np
import pytest

from jobrunner import (
    DefinitionError,
    Job,
    JobRunner,
    Node,
    Task,
    current_task,
    epoch_limiter,
)


def join(first, second, *, sep="-"):
    return f"{first}{sep}{second}"


def total(parts, start=0):
    return start + sum(parts)


def grow(amount, field):
    field += amount


@pytest.fixture
def run(inproc_session):
    def run(job, *fetched):
        epoch_limiter(job, 1)
        JobRunner(job).run(inproc_session)
        return [inproc_session.fetch(blob) for blob in fetched]

    return run


def test_parameters_get_the_blobs_of_their_names_and_what_inputs_say(run):
    a, b = Node("a"), Node("b")
    with Job() as job:
        with job.init_group:
            Task(lambda: "1", outputs="first", node=a)
            Task(lambda: "2", outputs="second", node=a)
            Task(lambda: "3", outputs="second", node=b)
        glob = {"workspace_type": "global", "node": a}
        Task(join, outputs="own", **glob)
        Task(join, inputs={"second": b["second"]}, outputs="mixed", **glob)
        Task(join, inputs={"second": "first", "sep": "second"}, outputs="keywords", **glob)
        Task(join, inputs={"first": "second"}, kwargs={"second": "k"}, outputs="k", **glob)
    found = run(job, *(a[name] for name in ("own", "mixed", "keywords", "k")))
    assert found == ["1-2", "1-3", "121", "2-k"]


def test_a_parameter_gets_the_list_of_many_inputs(run):
    nodes, server = [Node(f"n{i}") for i in range(3)], Node("server")
    with Job() as job:
        with job.init_group:
            Task.on_each(nodes, lambda i: i, outputs="x", kwargs=lambda i: {"i": i})
        doubled = Task.on_each(nodes, lambda x: 2 * x)
        glob = {"workspace_type": "global", "node": server}
        Task(total, inputs={"parts": doubled, "start": nodes[1]["x"]}, outputs="some", **glob)
        Task(total, inputs={"start": doubled[2], "parts": ()}, outputs="none", **glob)
        Task(
            lambda parts: [part.tolist() for part in parts],
            inputs={"parts": [Task(np.ones, kwargs={"shape": 1}, node=server)]},
            outputs="arrays",
            **glob,
        )
    blobs = (server["some"], server["none"], server["arrays"])
    assert run(job, *blobs) == [7, 4, [[1.0]]]


def test_updates_go_to_the_parameter_of_their_name_or_to_the_one_named(run):
    with Job() as job, Node("a") as node:
        with job.init_group:
            Task(lambda: np.zeros(2), outputs="field")
            Task(lambda: np.ones(2), outputs="amount")
        Task(grow, updates="field")
        Task(grow, inputs={"amount": "field"}, updates={"field": "amount"})
        Task(lambda state: state.__imul__(10), updates="field")  # in order, as there is only one
    assert [it.tolist() for it in run(job, node["field"], node["amount"])] == [[10, 10], [2, 2]]


def test_instances_and_methods_are_called_by_name_too(run):
    class Adder:
        def add(self, by, *, x):
            return x + by + current_task().instance

    with Job() as job, Node("a") as node:
        with job.init_group:
            Task(lambda: 1, outputs="x")
            Task(lambda: 10, outputs="by")
        kept = {"workspace_type": "global"}
        Task(Adder().add, outputs="sums", num_instances=3, **kept)
        Task(functools.partial(join, second="p"), inputs={"first": "x"}, outputs="partial", **kept)
    assert run(job, node["sums"], node["partial"]) == [[11, 12, 13], "1-p"]


REFUSED = [
    (lambda: Task(join, {"frist": "x"}), "unexpected keyword argument 'frist'"),
    (lambda: Task(join, {1: "x"}), "must map names of parameters; got 1"),
    (lambda: Task(join, {"first": "x"}, kwargs={"first": 1}), "gets parameter 'first' twice"),
    (lambda: Task(grow, {"field": "x"}, updates="field"), "gets parameter 'field' twice"),
    (lambda: Task(grow, {"amount": "x"}, updates="state"), "unexpected keyword argument 'state'"),
    (lambda: Task(max, {"key": "x"}), "does not say what its parameters are called"),
    (lambda: Task(lambda *parts: 0, {"parts": ["x"]}), "unexpected keyword argument 'parts'"),
    (lambda: Task(lambda x, /: 0), "missing a required"),
    (lambda: Task(grow, ["x"], updates={"field": "x"}), "so inputs must do so too"),
    (lambda: Task(join, ()), "cannot be called with 0 inputs"),
    (lambda: Task(join, {"first": Task(join, outputs=["a", "b"])}), "one of its inputs, has 2"),
    (lambda: Task(join, {"first": 3}), "inputs must be blobs' names"),
    (lambda: Task.on_each("ab", join), "'join': nodes must be a list of nodes; got 'ab'"),
    (lambda: Task.on_each([], join), "'join': nodes must be a list"),
    (lambda: Task.on_each(["a"], join, node="b"), "got node="),
    (lambda: Task(join, [["x", "y"], "z"]), "name the parameter that gets a list of inputs"),
]


@pytest.mark.parametrize(("make", "says"), REFUSED, ids=range(len(REFUSED)))
def test_wrong_names_are_refused_at_once(make, says):
    with pytest.raises(DefinitionError) as caught:
        make()
    assert says in str(caught.value)


def test_a_parameter_without_its_blob_is_named_before_anything_runs():
    with Job() as job, Node("a"):
        with job.init_group:
            Task(lambda: "1", outputs="first")
        Task(join)
    epoch_limiter(job, 1)
    with pytest.raises(DefinitionError) as caught:
        job.compile()
    assert "Task 'a/join' of the epoch group uses blob 'second' of node 'a'" in str(caught.value)
    assert "for parameter 'second' of its function" in str(caught.value)


def test_names_that_mean_the_same_order_change_nothing_in_a_job():
    def fingerprints(inputs, fn=join):
        with Job() as job, Node("a"):
            with job.init_group:
                Task(lambda: "1", outputs="first")
                Task(lambda: "2", outputs="second")
            Task(fn, inputs)
        epoch_limiter(job, 1)
        return job.compile().structure["epoch:a/join"]

    in_order = fingerprints(["first", "second"])
    assert fingerprints(None) == fingerprints({"second": "second"}) == in_order
    assert fingerprints({"second": "first", "first": "second"}) != in_order
    assert fingerprints({"first": "first", "sep": "second", "second": "second"}) != in_order


def test_no_function_lives_on_after_its_task():
    def fn(x):
        return x

    with Job("gone") as job:
        Task(fn, kwargs={"x": 1}, node="n")
    known = weakref.ref(fn)
    del fn, job
    gc.collect()
    assert known() is None


def test_options_of_each_node_are_values_or_functions_of_its_index():
    nodes = [Node(f"n{i}") for i in range(3)]
    with Job() as job:
        made = Task.on_each(nodes, lambda: 0, outputs=lambda i: f"x{i}", name="make")
        then = Task.on_each(
            nodes,
            lambda x, by: x * by,
            lambda i: {"x": made[i - 1]},
            kwargs=lambda i: {"by": i},
            after=lambda i: [made[i]],
            group=job.epoch_group,
        )
    assert [task.full_name for task in made] == ["n0/make", "n1/make", "n2/make"]
    assert [task.output_blobs[0].name for task in made] == ["x0", "x1", "x2"]
    assert [task.inputs[0].task for task in then] == [made[2], made[0], made[1]]
    assert [(task.kwargs["by"], task.after) for task in then] == [(i, (made[i],)) for i in range(3)]
    assert all(pickle.loads(cloudpickle.dumps(task.kwargs)) == task.kwargs for task in then)
