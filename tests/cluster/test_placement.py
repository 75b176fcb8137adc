"""Which worker gets which node."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jobrunner import Job, PlacementError, Task
from jobrunner.cluster.placement import WorkerInfo, check_fit, place, within_reach
from jobrunner.compile.plan import PlannedNode


def worker(name, nthreads=1, **resources):
    return WorkerInfo(f"tcp://{name}:1", name, f"host-{name}", nthreads, resources)


def nodes(count, **asks):
    return [PlannedNode(f"n{i}", **asks) for i in range(count)]


@given(
    st.lists(st.sampled_from("tsvl"), max_size=40),
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
)
@example(list("tttllll"), [1, 1, 3, 3, 4])  # the share of two workers is a whole number
def test_each_worker_has_its_share_of_each_kind_and_keeps_it_when_asked_again(kinds, threads):
    nodes = [PlannedNode(f"n{i}", kind=kind) for i, kind in enumerate(kinds)]
    workers = [worker(f"w{i}", n) for i, n in enumerate(threads)]
    placed = place(nodes, workers)
    for kind in set(kinds):
        addresses = [placed[node.name] for node in nodes if node.kind == kind]
        for info in workers:
            share = len(addresses) * info.nthreads / sum(threads)
            assert abs(addresses.count(info.address) - share) < 1
        # Neighbours of a kind share a worker.
        assert addresses == sorted(addresses)
    assert place(nodes, workers) == placed
    assert place(nodes, workers, placed) == placed


def test_nodes_that_do_the_same_are_of_a_kind():
    with Job("three") as job:
        for name in ("trainer:0", "trainer:1"):
            Task(lambda: 1, node=name)
        Task(lambda: 2, node="validator")
    first, second, other = (node.kind for node in job.compile().nodes)
    assert first == second != other


@pytest.mark.parametrize("alias", ["b", "tcp://b:1", "b:1", "host-b"])
def test_a_worker_is_asked_for_by_address_name_or_host(alias):
    placed = place(nodes(3, workers=(alias,)), [worker("a"), worker("b")])
    assert set(placed.values()) == {"tcp://b:1"}


def test_resources_are_used_up():
    workers = [worker("a", GPU=1), worker("b", GPU=2), worker("c")]
    placed = place(nodes(3, resources={"GPU": 1}), workers)
    assert sorted(placed.values()) == ["tcp://a:1", "tcp://b:1", "tcp://b:1"]
    with pytest.raises(PlacementError, match="'n3'.*GPU.*Start a suitable worker"):
        place(nodes(4, resources={"GPU": 1}), workers)


def test_nodes_that_require_resources_are_spread_too():
    placed = place(nodes(2, resources={"GPU": 1}), [worker("a", GPU=2), worker("b", GPU=2)])
    assert sorted(placed.values()) == ["tcp://a:1", "tcp://b:1"]


def test_the_node_with_the_fewest_choices_goes_first():
    asks = [
        PlannedNode("any", resources={"GPU": 1}),
        PlannedNode("only-a", workers=("a",), resources={"GPU": 1}),
    ]
    placed = place(asks, [worker("a", GPU=1), worker("b", GPU=1)])
    assert placed == {"any": "tcp://b:1", "only-a": "tcp://a:1"}


def test_nodes_stay_where_they_are():
    workers = [worker("a"), worker("b")]
    first = place(nodes(4), workers)
    assert place(nodes(4), [*workers, worker("c")], first) == first
    moved = place(nodes(4), [worker("b"), worker("c")], first)
    assert {name for name in moved if moved[name] == "tcp://b:1"} >= {"n2", "n3"}


def test_nodes_that_do_not_fit_are_named_with_sizes_and_limit():
    mib = 1 << 20
    placement = {f"n{i}": f"tcp://w{i % 2}" for i in range(24)}
    sizes = dict.fromkeys(placement, mib) | {"n3": 5 * mib}
    limits = {"tcp://w0": 10 * mib, "tcp://w1": 10 * mib, "tcp://w2": mib}
    with pytest.raises(PlacementError) as caught:
        check_fit(sizes, placement, limits, 0.9, "Epoch 7")
    text = str(caught.value)
    assert "Epoch 7 does not fit: it would fill 2 of 2 workers beyond 90%" in text
    assert "tcp://w1, with 16.00 MiB in 12 nodes and a limit of 10.00 MiB: 'n3' 5.00 MiB" in text
    assert "and 2 more" in text
    assert "Start more workers" in text


names = st.sampled_from("abcdef")


@given(
    st.lists(names, min_size=1, unique=True),
    st.sets(st.tuples(names, names).filter(lambda pair: pair[0] != pair[1]).map(frozenset)),
)
def test_workers_of_a_side_reach_each_other_and_every_worker_is_in_a_side(there, cuts):
    workers = [worker(name) for name in there]
    cuts = {frozenset(f"tcp://{name}:1" for name in pair) for pair in cuts}
    sides = within_reach(workers, cuts)
    for side in sides:
        found = {frozenset((w.address, o.address)) for w in side for o in side if w is not o}
        assert not found & cuts
    assert {w.name for side in sides for w in side} == set(there)


def test_the_side_with_more_threads_comes_first():
    a, b, c, d, e = [worker(*its) for its in (("a",), ("b",), ("c",), ("d", 2), ("e", 2))]
    cuts = [frozenset((one.address, other.address)) for one in (a, b, c) for other in (d, e)]
    assert within_reach([a, b, c, d, e], cuts) == [[d, e], [a, b, c]]
    assert within_reach([a, b, c, d, e], ()) == [[a, b, c, d, e]]
