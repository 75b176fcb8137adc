"""Which task made which value, and which of them is the first to differ, without a cluster."""

from jobrunner import Job, Node, Task, epoch_limiter
from jobrunner.run.replay.tracing import Call, Dataflow, Value


def flow_of(job, runs=((1, 0),)):
    plan, flow = job.compile(), Dataflow()
    for epoch, step in runs:
        flow.add_run(plan.groups["epoch"], "epoch", epoch, step)
    return flow


def call(name, epoch=1):
    node, _, task = name.partition("/")
    return Call("epoch", epoch, 0, node, task)


def chain():
    """x -> private y -> z, and on another node w, made of z and of what `make` returned."""
    a, b = Node("a"), Node("b")
    with Job("chain") as job:
        with job.init_group, a:
            for name in ("x", "z", "u"):
                Task(lambda: 0, outputs=name, name=f"init {name}")
        with job.init_group:
            Task(lambda: 0, outputs="w", node=b, name="init w")
        with a:
            Task(lambda x: x, "x", outputs="x", name="step")
            made = Task(lambda x: x, "x", outputs="y", name="make").output()
            Task(lambda y: y, "y", outputs="z", name="use")
            Task(lambda u: None, updates="u", name="touch")
        Task(lambda z, y, u: z, [a["z"], made, a["u"]], outputs="w", node=b, name="far")
    epoch_limiter(job, 3)
    return job


def test_values_are_followed_through_blobs_outputs_updates_and_crossings():
    flow = flow_of(chain())
    assert {name: flow.reads[call(name)] for name in ("a/step", "a/make", "a/use", "a/touch")} == {
        "a/step": [],
        "a/make": [Value(call("a/step"), 0)],
        "a/use": [Value(call("a/make"), 0)],
        "a/touch": [],
    }
    assert flow.reads[call("b/far")] == [
        Value(call("a/use"), 0),
        Value(call("a/make"), 0),
        Value(call("a/touch"), "u"),
    ]
    # A private blob is gone after its run.
    assert set(flow.blobs) == {("a", "x"), ("a", "z"), ("a", "u"), ("b", "w")}


def test_an_epoch_reads_the_blobs_of_the_one_before():
    flow = flow_of(chain(), [(1, 0), (2, 0)])
    assert flow.reads[call("a/step", 2)] == [Value(call("a/step", 1), 0)]
    assert flow.reads[call("a/touch", 2)] == [Value(call("a/touch", 1), "u")]


def test_a_read_of_another_nodes_blob_before_its_write_gets_the_old_value():
    a = Node("a")
    with Job("before") as job:
        with job.init_group:
            Task(lambda: 0, outputs="x", node=a, name="x")
            Task(lambda: 0, outputs="y", node="b", name="y")
        Task(lambda x: x, [a["x"]], outputs="y", node="b", name="read")
        Task(lambda x: x, "x", outputs="x", node=a, name="write")
    epoch_limiter(job, 3)
    flow = flow_of(job, [(1, 0), (2, 0)])
    assert flow.reads[call("b/read", 1)] == []
    assert flow.reads[call("b/read", 2)] == [Value(call("a/write", 1), 0)]


def test_suspects_are_the_first_known_difference_and_the_unknown_values_before_it():
    flow = flow_of(chain())
    x, z, w = (flow.blobs[key] for key in (("a", "x"), ("a", "z"), ("b", "w")))
    names = lambda calls: [made.name for made in calls]  # noqa: E731
    # x is equal, so z differs by the task that makes y (not recorded) or the one that makes z.
    assert names(flow.suspects(z, {x}, {z})) == ["a/make", "a/use"]
    # w is made from z, which differs, so w's own task is not the first.
    assert names(flow.suspects(w, {x}, {z, w})) == ["a/make", "a/use"]
    # If x differs, that explains all that follows.
    assert names(flow.suspects(w, (), {x, z, w})) == ["a/step"]
    # All that w was made from is equal, except y.
    u = flow.blobs["a", "u"]
    assert names(flow.suspects(w, {x, z, u}, {w})) == ["a/make", "b/far"]


def test_a_call_that_made_two_values_of_the_same_inputs_is_unrepeatable():
    flow = flow_of(chain())
    one = {Value(c, 0): ("d",) for c in flow.reads} | {Value(call("a/touch"), "u"): ("d",)}
    assert flow.unrepeatable(one, one) == []
    other = {**one, Value(call("a/make"), 0): ("e",), Value(call("a/use"), 0): ("e",)}
    assert [c.name for c in flow.unrepeatable(one, other)] == ["a/make"]
    # A value without a digest proves nothing.
    other = {**one, Value(call("a/make"), 0): ("",), Value(call("a/touch"), "u"): ("e",)}
    assert [c.name for c in flow.unrepeatable(one, other)] == ["a/touch"]
