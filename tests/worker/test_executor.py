"""Runs of a group in threads, without Dask. If order matters, the test controls threads and time."""

import contextvars
import threading
from functools import partial

import numpy as np
import pytest
from msgspec.structs import replace

from jobrunner import DefinitionError, Job, Node, Task, TaskGroup, current_task
from jobrunner.compile.job import compile_group
from jobrunner.define.metrics import merge_reports
from jobrunner.worker.executor import GroupRun
from jobrunner.worker.program import Program
from jobrunner.worker.task_context import CurrentTask
from jobrunner.worker.threads import ThreadPool
from jobrunner.workspace import Workspace, adopt

A, B = Node("a"), Node("b")


def group():
    """All outputs of its tasks are global blobs."""
    return TaskGroup(workspace_type="global")


class ManualTimer:
    """Time that passes when a test says so."""

    def __init__(self):
        self.waiting = []

    def __call__(self, delay, callback):
        handle = Handle(self.waiting, callback)
        self.waiting.append(handle)
        return handle

    def fire(self):
        """Let everything happen that waits."""
        due = self.waiting.copy()
        self.waiting.clear()
        for handle in due:
            handle.callback()


class Handle:
    def __init__(self, waiting, callback):
        self.waiting, self.callback = waiting, callback

    def cancel(self):
        if self in self.waiting:
            self.waiting.remove(self)


class Bench:
    """Runs a group, or the epoch of a job, like a worker with some of the nodes."""

    def __init__(self, tasks, *, nodes=None, blobs=None, nthreads=4, submit=None):
        blobs = blobs or {}
        if isinstance(tasks, Job):
            plan = tasks.compile().groups["epoch"]
        else:
            plan = compile_group(tasks, {node: frozenset(blobs[node]) for node in blobs})
        held = nodes or list(plan.slices)
        self.workspaces = {node: Workspace(node) for node in held}
        for node, values in blobs.items():
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

    def start(self):
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
            current_task=partial(CurrentTask, "job", "epoch", 0, 1, 0, 0),
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
        [outcome] = self.outcomes
        if outcome.status != "done":
            assert self.drained.wait(10)
        self.run_.stop_timers()
        return outcome

    def run(self):
        self.start()
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

    def __call__(self):
        self.begun.set()
        assert self.opened.wait(10)
        return self.value


# ---- order and threads


def test_a_chain_runs_in_order_on_one_thread(bench):
    threads = []

    def step(n):
        threads.append(threading.get_ident())
        return n + 1

    with group() as tasks, A:
        for i in range(20):
            Task(step, "n", "n", name=f"step{i}")
    one = bench(tasks, blobs={"a": {"n": 0}})
    assert one.run().status == "done"
    assert one.workspaces["a"].globals == {"n": 20}
    assert len(set(threads)) == len(one.submitted) == 1


def test_no_more_threads_start_than_the_worker_has(bench):
    gates = [Gate(), Gate(), Gate()]
    with group() as tasks, A:
        for i, gate in enumerate(gates):
            Task(gate, name=f"t{i}")
    one = bench(tasks, nthreads=2)
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


def test_a_blob_read_and_updated_in_turns_is_never_copied(bench):
    held = np.zeros(3)
    address = held.__array_interface__["data"][0]
    with group() as tasks, A:
        for i in range(2):
            Task(lambda x: None, "x", name=f"read{i}", num_instances=1 + 2 * i)
            Task(lambda x: x.__iadd__(1), updates="x", name=f"add{i}")
    one = bench(tasks, blobs={"a": {"x": held}}, nthreads=1)
    del held
    one.run()
    x = one.workspaces["a"].globals["x"]
    assert x.tolist() == [2, 2, 2]
    assert x.__array_interface__["data"][0] == address


def test_no_task_starts_before_blobs_for_other_nodes_are_frozen():
    with group() as tasks:
        Task(lambda x: x + 1, A["x"], "y", node=B)
        Task(lambda: 0, outputs="x", node=A)
    waiting = []
    one = Bench(tasks, blobs={"a": {"x": 1}}, submit=waiting.append)
    one.start()
    for _ in range(3):
        one.timer.fire()
    [open_run] = waiting  # no thread helps with tasks before that
    open_run()
    assert one.end().status == "done"
    assert one.workspaces["b"].globals["y"] == 2


# ---- values


def test_an_output_that_cannot_be_copied_fails_the_task_only_if_another_reads_it(bench):
    lock = threading.Lock()

    def make():
        return lock

    with group() as tasks, A:
        Task(make, outputs="l").output()
    one = bench(tasks)
    assert one.run().status == "done"
    with pytest.raises(TypeError, match="lock"):
        one.workspaces["a"].result(["epoch"], "make", 0)

    with group() as tasks:
        Task(id, Task(make, outputs="l", node=A).output(), node=B)
    one = bench(tasks, nodes=["a"], blobs={"a": {"l": "old"}})
    failure = one.run().failure
    assert (failure.task, failure.traceback) == ("make", "")  # of frames of ours alone
    assert "cannot be pickled" in failure.summary
    assert one.workspaces["a"].globals["l"] == "old"


@pytest.mark.parametrize("returned", [(1, 2, 3), "ab"], ids=repr)
def test_several_outputs_need_a_sequence_of_that_length(bench, returned):
    with group() as tasks, A:
        Task(lambda: returned, outputs=["x", "y"], name="make")
    one = bench(tasks)
    with pytest.raises(DefinitionError, match=r"a/make has 2 outputs \(x, y\)"):
        raise one.run().failure.exception()
    assert one.workspaces["a"].globals == {}


def test_no_thread_waits_for_values_of_another_worker_and_each_counts_once(bench):
    with group() as tasks:
        values = [Task(int, (), name, name=name, node=B).output() for name in "xy"]
        Task(lambda *values: values, values, "z", node=A)
    one = bench(tasks, nodes=["a"])
    run = one.start()
    idle = threading.Event()
    one.threads.submit(idle.set)
    assert idle.wait(10)
    assert run.running_tasks() == []
    run.deliver({0: 1})
    run.deliver({0: 2, 7: "of nobody"})
    assert not one.finished.is_set()
    run.deliver({1: 3})
    one.end()
    assert one.workspaces["a"].globals == {"z": (1, 3)}


# ---- failures


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_failure_is_reported_while_other_functions_run_and_nothing_more_starts(bench, error):
    gate, ran = Gate(value=7), []

    def fail():
        raise error

    with group() as tasks, A:
        slow = Task(gate, outputs="x", name="slow")
        Task(fail)
        Task(lambda: ran.append(1), after=slow)
    one = bench(tasks)
    one.program.tasks[0].is_long = True  # so another thread begins at once
    one.start()
    assert one.finished.wait(10)
    assert not one.drained.is_set()
    gate.opened.set()
    failure = one.end().failure
    assert (failure.node, failure.task) == ("a", "fail")
    assert repr(failure.exception()) == repr(error)
    assert failure.summary == f"{type(error).__name__}: {error}".removesuffix(": ")
    assert "raise error" in failure.traceback
    assert "jobrunner/worker/executor.py" not in failure.traceback
    assert one.workspaces["a"].globals == {}  # what came after the end is dropped
    assert ran == []


def test_after_an_abort_nothing_starts_and_results_are_dropped(bench):
    gate, ran = Gate(value=7), []
    with group() as tasks, A:
        Task(gate, outputs="x", name="slow")
        Task(lambda x: ran.append(x), "x")
    one = bench(tasks)
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


# ---- reports and stop conditions


def test_a_report_runs_at_its_interval_and_once_after_the_nodes_last_task(bench):
    gate, seen = Gate(value=3), []
    fired = threading.Event()

    def look():
        seen.append(current_task().workspace.get("x"))
        fired.set()

    with group() as tasks, A:
        Task(gate, outputs="x", name="slow")
        tasks.report_step(look)
    one = bench(tasks)
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
    with group() as tasks, A:
        Task(gate, name="slow")
        tasks.report_step(report)
    one = bench(tasks)
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


def test_the_metric_of_the_task_defined_last_counts(bench):
    with group() as tasks:
        for value, node in ((1, A), (2, B), (3, A)):
            report = partial(lambda value: current_task().report(loss=value), value)
            Task(report, node=node, name=f"t{value}")
    metrics = bench(tasks).run().metrics
    assert merge_reports(metrics) == {"loss": 3, "a/loss": 3, "b/loss": 2}


def outcome_of_condition(bench, value):
    with Job("job") as job, A:
        job.add_stop_condition(Task(lambda: value, outputs="x", name="judge").output())
    return bench(job).run()


@pytest.mark.parametrize(
    ("value", "stopped"),
    [(True, ["a/judge"]), (np.array([[0]]), []), ([], [])],
    ids=repr,
)
def test_stop_conditions_are_read_at_the_end(bench, value, stopped):
    assert outcome_of_condition(bench, value).stopped == stopped


@pytest.mark.parametrize("value", [np.zeros(2), np.zeros(0)], ids=repr)
def test_a_stop_condition_of_several_elements_is_an_error_that_names_it(bench, value):
    with pytest.raises(DefinitionError, match="'a/judge' is an array of shape"):
        raise outcome_of_condition(bench, value).failure.exception()


# ---- with as many threads as can be


def combine(salt, *values):
    return (salt + sum(int(np.sum(v)) * (i + 3) for i, v in enumerate(values))) % 1_000_003


def fill(salt, *values):
    return np.full(2, combine(salt, *values))


def grow(salt, *values):
    *inputs, target = values
    target += combine(salt, *inputs)


@pytest.mark.parametrize("seed", range(30))
def test_with_more_threads_at_every_step_results_equal_those_of_one_thread(bench, seed):
    rng = np.random.default_rng(seed)
    blobs = [(node, blob) for node in ("n0", "n1", "n2") for blob in "xy"]
    expected = {
        node: {"x": np.zeros(2, dtype=int), "y": np.zeros(2, dtype=int)} for node, _ in blobs
    }
    initial = {node: {k: v.copy() for k, v in values.items()} for node, values in expected.items()}
    with group() as tasks:
        for salt in range(30):
            written, *read = (blobs[i] for i in rng.permutation(len(blobs))[: rng.integers(1, 4)])
            values = [expected[node][blob] for node, blob in read]
            inputs = [Node(node)[blob] for node, blob in read]
            node, blob = written
            if rng.random() < 0.5:
                grow(salt, *values, expected[node][blob])
                Task(partial(grow, salt), inputs, updates=blob, node=node, name=f"grow{salt}")
            else:
                expected[node][blob] = fill(salt, *values)
                Task(partial(fill, salt), inputs, blob, node=node, name=f"fill{salt}")
    one = bench(tasks, blobs=initial, nthreads=6)
    for step in one.program.tasks:
        step.is_long = True
    assert one.run().status == "done"
    for node in expected:
        np.testing.assert_equal(one.workspaces[node].globals, expected[node])
