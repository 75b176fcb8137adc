"""Runs of a group in threads, without Dask. If order matters, the test controls threads and time."""

import contextvars
import threading
from functools import partial

import numpy as np
import pytest
from msgspec.structs import replace

from jobrunner.compile.job import compile_group
from jobrunner.compile.plan import (
    BlobArgument,
    Capture,
    Condition,
    Crossing,
    CrossingArgument,
    GroupPlan,
    Output,
    PlannedTask,
    Report,
    ResultArgument,
    Slice,
    UpdateArgument,
)
from jobrunner.define.metrics import merge_reports
from jobrunner.define.node import Node, WorkspaceType
from jobrunner.define.task import Task, TaskGroup
from jobrunner.errors import DefinitionError
from jobrunner.worker.executor import GroupRun
from jobrunner.worker.program import Program
from jobrunner.worker.task_context import CurrentTask, current_task
from jobrunner.worker.threads import ThreadPool
from jobrunner.workspace import Workspace, adopt


def task(index, fn, reads=(), outputs=(), *, after=(), updates=(), private=(), **more):
    arguments = [BlobArgument(r) if isinstance(r, str) else r for r in reads]
    return PlannedTask(
        index=index,
        name=more.pop("name", f"t{index}"),
        fn=fn,
        arguments=(*arguments, *(UpdateArgument(u) for u in updates)),
        kwargs=more.pop("kwargs", {}),
        outputs=tuple(Output(o, is_global=o not in private) for o in outputs),
        captures=more.pop("captures", ()),
        waits_for=tuple(after),
        crossings=tuple(more.pop("crossings", ())),
        hands_over=tuple(more.pop("hands_over", ())),
        **more,
    )


def group(slices, crossings=(), conditions=(), reports=None):
    parts = {
        node: Slice(node, tuple(tasks), tuple((reports or {}).get(node, ())))
        for node, tasks in slices.items()
    }
    return GroupPlan("epoch", parts, tuple(crossings), tuple(conditions))


class ManualTimer:
    """Time that passes when a test says so."""

    def __init__(self):
        self.waiting = []

    def __call__(self, delay, callback):
        handle = Handle(delay, callback, self.waiting)
        self.waiting.append(handle)
        return handle

    def fire(self, longest=1.0):
        """Let everything happen that waits for at most so many seconds."""
        due = [handle for handle in self.waiting if handle.delay <= longest]
        for handle in due:
            self.waiting.remove(handle)
        for handle in due:
            handle.callback()


class Handle:
    def __init__(self, delay, callback, waiting):
        self.delay, self.callback, self._waiting = delay, callback, waiting

    def cancel(self):
        if self in self._waiting:
            self._waiting.remove(self)


class Bench:
    """Runs a group plan like a worker with `nodes`, and has the outcome."""

    def __init__(self, plan, *, nodes=None, blobs=None, nthreads=4, submit=None):
        held = nodes or list(plan.slices)
        self.workspaces = {node: Workspace(node) for node in held}
        for node, values in (blobs or {}).items():
            for name, value in values.items():
                self.workspaces[node].put(name, adopt(value))
        self.program = Program(
            "epoch",
            replace(plan, slices={node: plan.slices[node] for node in held}),
            self.workspaces,
            elsewhere={node: "tcp://there" for node in plan.slices if node not in held},
        )
        self.nthreads = nthreads
        self.timer = ManualTimer()
        self.threads_are_gone, self.threads_failed = threading.Event(), []
        self.threads = ThreadPool(
            "bench",
            contextvars.copy_context(),
            self.threads_are_gone.set,
            self.threads_failed.append,
        )
        self.submitted = []
        self._submit = submit or self.threads.submit

    def start(self, epoch=1):
        self.outcomes, self.sent = [], {}
        self.finished, self.drained = threading.Event(), threading.Event()

        def submit(call):
            self.submitted.append(call)
            return self._submit(call)

        def finished(run, outcome):
            self.outcomes.append(outcome)
            self.finished.set()

        self.run_ = GroupRun(
            program=self.program,
            current_task=partial(CurrentTask, "job", "epoch", 0, epoch, 0, 0),
            nthreads=self.nthreads,
            submit=submit,
            timer=self.timer,
            send=self.sent.__setitem__,
            finished=finished,
            drained=self.drained.set,
        )
        self.run_.start()
        return self.run_

    def end(self):
        assert self.finished.wait(10)
        assert len(self.outcomes) == 1
        if self.outcomes[0].status != "done":
            assert self.drained.wait(10)
        self.run_.stop_timers()
        return self.outcomes[0]

    def run(self, **kwargs):
        self.start(**kwargs)
        return self.end()

    def close(self):
        self.threads.close()
        assert self.threads_are_gone.wait(10)
        assert self.threads_failed == []


@pytest.fixture
def bench():
    """Makes benches, and closes them."""
    made = []

    def make(*args, **kwargs):
        made.append(Bench(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Gate:
    """A task function that waits for the test, and says when it has begun."""

    def __init__(self, value=None):
        self.begun, self.opened, self.value = threading.Event(), threading.Event(), value

    def __call__(self, *args):
        self.begun.set()
        assert self.opened.wait(10)
        return self.value


# ---- order and threads


def test_a_chain_runs_in_order_on_one_thread(bench):
    threads = []

    def step(n):
        threads.append(threading.get_ident())
        return n + 1

    tasks = [task(i, step, ["n"], ["n"], after=[i - 1] if i else []) for i in range(20)]
    one = bench(group({"a": tasks}), blobs={"a": {"n": 0}})
    assert one.run().status == "done"
    assert one.workspaces["a"].globals == {"n": 20}
    assert len(set(threads)) == 1
    assert len(one.submitted) == 1


def test_no_more_threads_start_than_the_worker_has(bench):
    gates = [Gate(), Gate(), Gate()]
    one = bench(group({"a": [task(i, gate) for i, gate in enumerate(gates)]}), nthreads=2)
    one.start()
    assert gates[0].begun.wait(10)
    one.timer.fire()  # the first tick only looks
    assert len(one.submitted) == 1
    one.timer.fire()
    assert gates[1].begun.wait(10)
    for _ in range(5):
        one.timer.fire()
    assert len(one.submitted) == 2
    for gate in gates:
        gate.opened.set()
    assert one.end().status == "done"


def test_a_task_known_to_be_long_starts_another_thread_at_once(bench):
    gate = Gate()
    one = bench(group({"a": [task(0, gate), task(1, lambda: None)]}))
    one.program.tasks[0].is_long = True
    one.start()
    assert gate.begun.wait(10)
    assert len(one.submitted) == 2  # without any tick
    gate.opened.set()
    one.end()


def test_a_blob_read_and_updated_in_turns_is_never_copied(bench):
    held = np.zeros(3)
    address = held.__array_interface__["data"][0]

    def read(x):
        return None

    def add(x):
        x += 1

    tasks = [
        task(0, read, ["x"]),
        task(1, add, updates=["x"], after=[0]),
        task(2, read, ["x"], after=[1], num_instances=3),
        task(3, add, updates=["x"], after=[2]),
    ]
    run = bench(group({"a": tasks}), blobs={"a": {"x": held}}, nthreads=1)
    del held
    run.run()
    x = run.workspaces["a"].globals["x"]
    assert x.tolist() == [2, 2, 2]
    assert x.__array_interface__["data"][0] == address


# ---- values


def test_private_blobs_last_for_one_run(bench):
    def make():
        return dict(current_task().workspace), [1]

    plan = group(
        {
            "a": [
                task(0, make, outputs=["seen", "p"], private=["p"]),
                task(1, len, ["p"], ["n"], after=[0], private=["p"]),
            ]
        }
    )
    one = bench(plan)
    one.run()
    one.run()
    assert one.workspaces["a"].private == {}
    assert one.workspaces["a"].lookup("seen") == {"seen": {}, "n": 1}


def test_an_output_that_cannot_be_copied_fails_the_task_only_if_another_reads_it(bench):
    lock = threading.Lock()
    kept = Capture(0, retain=True)
    one = bench(group({"a": [task(0, lambda: lock, outputs=["l"], captures=[kept])]}))
    assert one.run().status == "done"
    with pytest.raises(TypeError, match="lock"):
        one.workspaces["a"].result(["epoch"], "t0", 0)

    plan = group(
        {
            "a": [
                task(0, lambda: lock, outputs=["l"], captures=[kept]),
                task(1, id, [ResultArgument(0, 0)], after=[0]),
            ]
        }
    )
    outcome = bench(plan).run()
    assert (outcome.failure.task, "pickled" in outcome.failure.summary) == ("t0", True)


@pytest.mark.parametrize("returned", [(1, 2, 3), "ab"], ids=repr)
def test_several_outputs_need_a_sequence_of_that_length(bench, returned):
    one = bench(group({"a": [task(0, lambda: returned, outputs=["x", "y"])]}))
    outcome = one.run()
    error = outcome.failure.exception()
    assert isinstance(error, DefinitionError)
    assert "a/t0 has 2 outputs (x, y)" in str(error)
    assert one.workspaces["a"].globals == {}


# ---- crossings


def crossing(id, source, targets, *, task=None, blob=None, part=None):
    return Crossing(id, source, task, blob, part, tuple(targets))


def test_a_value_that_cannot_be_sent_leaves_its_blob_unchanged(bench):
    plan = group(
        {
            "a": [task(0, threading.Lock, outputs=["x"], hands_over=(0,))],
            "b": [task(1, lambda x: None, [CrossingArgument(0)], crossings=(0,))],
        },
        [Crossing(0, "a", 0, "x", None, ("b",))],
    )
    one = bench(plan, blobs={"a": {"x": "old"}})
    failure = one.run().failure
    assert "cannot be pickled" in failure.summary
    assert failure.traceback == ""  # of frames of ours alone
    assert one.workspaces["a"].globals["x"] == "old"


def test_a_value_for_other_workers_is_sent_once_and_frozen(bench):
    plan = group(
        {
            "a": [task(0, lambda: np.zeros(2), outputs=["x"], hands_over=[0, 1])],
            "b": [task(1, list, [CrossingArgument(0)], ["y"], crossings=[0, 1])],
        },
        [crossing(0, "a", ["b"], task=0, part=0), crossing(1, "a", ["b"], task=0)],
    )
    one = bench(plan, nodes=["a"])
    one.run()
    assert list(one.sent) == [0, 1]
    assert not one.sent[0].flags.writeable
    assert one.sent[1] is None  # a bare signal


def far_plan():
    return group(
        {
            "a": [task(0, lambda: 1, outputs=["x"], hands_over=[0])],
            "b": [task(1, lambda v: v, [CrossingArgument(0)], ["y"], crossings=[0])],
        },
        [crossing(0, "a", ["b"], task=0, blob="x")],
    )


@pytest.mark.parametrize("comes", [True, False])
def test_no_thread_waits_for_a_value_from_another_worker(bench, comes):
    one = bench(far_plan(), nodes=["b"])
    run = one.start()
    idle = threading.Event()
    one.threads.submit(idle.set)
    assert idle.wait(10)
    assert (run._remaining, run.running_tasks()) == (1, [])
    if comes:
        run.deliver({0: 5})
        assert one.end().status == "done"
        assert one.workspaces["b"].globals == {"y": 5}
    else:
        run.abort("told to")
        assert one.end().status == "aborted"


def test_a_value_that_arrives_twice_counts_once(bench):
    arguments = [CrossingArgument(0), CrossingArgument(1)]
    plan = group(
        {"b": [task(0, lambda *v: v, arguments, ["y"], crossings=[0, 1])]},
        [crossing(i, "a", ["b"], blob=f"x{i}") for i in (0, 1)],
    )
    one = bench(plan)
    run = one.start()
    run.deliver({0: 1})
    run.deliver({0: 2, 7: "of nobody"})
    assert not one.finished.is_set()
    run.deliver({1: 3})
    one.end()
    assert one.workspaces["b"].globals == {"y": (1, 3)}


# ---- failures


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_after_a_failed_task_nothing_more_starts(bench, error):
    def fail():
        raise error

    ran = []
    plan = group({"a": [task(0, fail), task(1, lambda: ran.append(1), after=[0])]})
    outcome = bench(plan).run()
    failure = outcome.failure
    assert (outcome.status, failure.node, failure.task) == ("failed", "a", "t0")
    assert repr(failure.exception()) == repr(error)
    assert failure.summary == f"{type(error).__name__}: {error}".removesuffix(": ")
    assert "raise error" in failure.traceback
    assert "jobrunner/worker/executor.py" not in failure.traceback
    assert ran == []


def test_a_failure_is_reported_while_other_functions_still_run(bench):
    gate, ran = Gate(value=7), []

    def fail():
        raise ValueError

    plan = group(
        {"a": [task(0, gate, outputs=["x"]), task(1, fail), task(2, ran.append, after=[0])]}
    )
    one = bench(plan)
    one.program.tasks[0].is_long = True
    one.start()
    assert one.finished.wait(10)
    assert not one.drained.is_set()
    gate.opened.set()
    one.end()
    assert one.workspaces["a"].globals == {}  # what came after the end is dropped
    assert ran == []


def test_after_an_abort_nothing_starts_and_results_are_dropped(bench):
    gate, ran = Gate(value=7), []
    plan = group({"a": [task(0, gate, outputs=["x"]), task(1, ran.append, ["x"], after=[0])]})
    one = bench(plan)
    run = one.start()
    assert gate.begun.wait(10)
    run.abort("told to")
    assert one.finished.is_set()
    assert (one.outcomes[0].status, one.outcomes[0].reason) == ("aborted", "told to")
    assert not one.drained.is_set()
    assert one.timer.waiting == []
    gate.opened.set()
    one.end()
    assert one.workspaces["a"].globals == {}
    assert ran == []
    run.abort("again")
    run.deliver({0: 1})
    assert len(one.outcomes) == 1


# ---- reports, metrics, stop conditions


def test_a_report_runs_at_its_interval_and_once_after_the_nodes_last_task(bench):
    gate, seen = Gate(value=3), []
    fired = threading.Event()

    def look():
        seen.append(current_task().workspace.get("x"))
        fired.set()

    plan = group(
        {"a": [task(0, gate, outputs=["x"])]}, reports={"a": [Report("report#1", look, 0.5)]}
    )
    one = bench(plan)
    one.start()
    assert gate.begun.wait(10)
    for _ in range(3):
        fired.clear()
        one.timer.fire()
        assert fired.wait(10)
    gate.opened.set()
    one.end()
    assert seen == [None, None, None, 3]
    assert one.timer.waiting == []


def test_a_report_that_is_still_running_is_not_started_again(bench):
    gate, report = Gate(), Gate()
    plan = group({"a": [task(0, gate)]}, reports={"a": [Report("r", report, 0.5)]})
    one = bench(plan)
    one.start()
    assert gate.begun.wait(10)
    one.timer.fire()
    assert report.begun.wait(10)
    before = len(one.submitted)
    one.timer.fire()
    assert len(one.submitted) == before
    gate.opened.set()
    report.opened.set()
    assert one.end().status == "done"


def test_a_report_that_raises_fails_the_run_and_is_named(bench):
    def fail():
        raise ValueError("bad report")

    plan = group({"a": []}, reports={"a": [Report("report#1", fail, 0.5)]})
    assert bench(plan).run().failure.task == "report#1"


def test_the_metric_of_the_task_defined_last_counts(bench):
    def report(value):
        return lambda: current_task().report(loss=value, **{f"only{value}": value})

    plan = group(
        {"a": [task(0, report(1)), task(2, report(3))], "b": [task(1, report(2))]},
        reports={"b": [Report("r", lambda: current_task().report(late=True), 0.5)]},
    )
    outcome = bench(plan).run()
    assert merge_reports(outcome.metrics) == {
        "loss": 3,
        "a/loss": 3,
        "b/loss": 2,
        "only1": 1,
        "only2": 2,
        "only3": 3,
        "late": True,
    }


def conditions_of(value, capture=True):
    condition = (
        Condition("a/t0", "a", None, 0, 0) if capture else Condition("a/x", "a", "x", None, None)
    )
    captures = [Capture(0, retain=False)] if capture else []
    tasks = [task(0, lambda: value, outputs=["x"], captures=captures)]
    return group({"a": tasks}, conditions=[condition])


@pytest.mark.parametrize("capture", [True, False], ids=["output", "blob"])
@pytest.mark.parametrize(
    ("value", "stops"),
    [(True, True), (np.array([[0]]), False), ([], False)],
    ids=repr,
)
def test_stop_conditions_are_read_at_the_end(bench, value, stops, capture):
    outcome = bench(conditions_of(value, capture)).run()
    assert outcome.stopped == ((["a/t0"] if capture else ["a/x"]) if stops else [])


@pytest.mark.parametrize("value", [np.zeros(2), np.zeros(0)], ids=repr)
def test_a_stop_condition_of_several_elements_is_an_error_that_names_it(bench, value):
    failure = bench(conditions_of(value)).run().failure
    assert isinstance(failure.exception(), DefinitionError)
    assert "'a/t0' is an array of shape" in failure.summary


# ---- with as many threads as can be


def combine(salt, *values):
    return (salt + sum(int(np.sum(v)) * (i + 3) for i, v in enumerate(values))) % 1_000_003


def grow(salt, *values):
    *inputs, target = values
    target += combine(salt, *inputs)


@pytest.mark.parametrize("seed", range(60))
def test_with_more_threads_at_every_step_results_equal_those_of_one_thread(bench, seed):
    rng = np.random.default_rng(seed)
    nodes = [f"n{i}" for i in range(3)]
    expected = {node: {blob: np.zeros(2, dtype=np.int64) for blob in "xy"} for node in nodes}
    initial = {node: {k: v.copy() for k, v in blobs.items()} for node, blobs in expected.items()}
    with TaskGroup(workspace_type=WorkspaceType.GLOBAL) as tasks:
        for salt in range(30):
            node = nodes[rng.integers(3)]
            blob = "xy"[rng.integers(2)]
            reads = {
                (nodes[rng.integers(3)], "xy"[rng.integers(2)]) for _ in range(rng.integers(3))
            }
            reads = sorted(reads - {(node, blob)})
            values = [expected[n][b] for n, b in reads]
            inputs = [Node(n)[b] for n, b in reads]
            if rng.random() < 0.5:
                grow(salt, *values, expected[node][blob])
                Task(partial(grow, salt), inputs, updates=blob, node=node)
            else:
                expected[node][blob] = np.full(2, combine(salt, *values))
                fill = partial(lambda salt, *v: np.full(2, combine(salt, *v)), salt)
                Task(fill, inputs, outputs=blob, node=node, name=f"fill{salt}")
    plan = compile_group(tasks, {node: frozenset("xy") for node in nodes})
    one = bench(plan, blobs=initial, nthreads=6)
    for step in one.program.tasks:
        step.is_long = True
    outcome = one.run()
    assert outcome.status == "done", outcome
    for node in nodes:
        np.testing.assert_equal(one.workspaces[node].globals, expected[node])


def test_no_task_starts_before_blobs_for_other_nodes_are_frozen():
    crossing = Crossing(0, "a", None, "x", None, ("b",))
    plan = group(
        {
            "a": [task(1, lambda: 0)],
            "b": [task(0, lambda x: x + 1, [CrossingArgument(0)], ["y"], crossings=[0])],
        },
        [crossing],
    )
    held_back = []
    bench = Bench(plan, blobs={"a": {"x": 1}}, submit=held_back.append)
    bench.start()
    for _ in range(3):
        bench.timer.fire()
    assert len(held_back) == 1  # what opens the run; no thread helps with tasks before that
    held_back[0]()
    assert bench.end().status == "done"
    assert bench.workspaces["b"].globals["y"] == 2
