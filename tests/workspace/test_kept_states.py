"""States that a worker keeps in memory for recovery are exact, or not kept."""

import mmap
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.workspace.array_pool import LEAST_BYTES
from jobrunner.workspace.kept_states import KeptStates
from jobrunner.workspace.values import own, settle, view

IDENTITY = ("directory", "a.1", "digest")


def keep(kept_states, blobs, save_id="1", identity=IDENTITY):
    kept_states.keep(save_id, "a", blobs, list(blobs), identity)


def recall(kept_states, names=("x",), identity=IDENTITY):
    return kept_states.recall("a", identity, names)


@pytest.fixture
def kept_states():
    kept = KeptStates(1 << 20)
    kept.changing["a"] = {"x"}
    return kept


def test_an_array_is_kept_without_a_copy_and_copied_only_when_a_task_updates_it(kept_states):
    blobs = {"x": np.zeros(100)}
    address = blobs["x"].ctypes.data
    keep(kept_states, blobs)
    assert recall(kept_states)["x"].ctypes.data == address
    array = own(blobs, "x")
    array += 1
    assert blobs["x"] is array
    assert recall(kept_states)["x"].ctypes.data == address
    assert recall(kept_states)["x"].tolist() == [0] * 100


def test_without_a_rollback_an_update_copies_nothing():
    blobs = {"x": np.zeros(100)}
    keep(KeptStates(), blobs)
    before = blobs["x"].ctypes.data
    assert own(blobs, "x").ctypes.data == before


def test_a_recalled_state_can_be_changed_and_recalled_again(kept_states):
    blobs = {"x": {"w": np.zeros(3), "steps": [1, 2], "seen": {1}}}
    keep(kept_states, blobs)
    for _ in range(3):
        blobs = recall(kept_states)
        value = own(blobs, "x")
        assert value["w"].tolist() == [0, 0, 0]
        assert (value["steps"], value["seen"]) == ([1, 2], {1})
        value["w"] += 1
        value["steps"].append(3)
        value["seen"].add(2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: defaultdict(list, {(i, "k"): [i, None, {i: [0.5]}] for i in range(50)}),
        lambda: OrderedDict((str(i), {"at": [i, -0.0]}) for i in range(50)),
        lambda: deque(([i], {"é\ud800": (i, [True])}) for i in range(50)),
        lambda: deque(([i] for i in range(50)), 60),
        lambda: Counter({str(i): [1 << 70] for i in range(50)}),
        lambda: [[i, b"x", {i}, 1j] for i in range(50)],
        lambda: {"long": [["x" * 1000] for _ in range(50)]},
    ],
    ids=["defaultdict", "OrderedDict", "deque", "maxlen", "Counter", "list", "strings"],
)
def test_containers_of_plain_values_are_views_and_kept_exactly(kept_states, make):
    holder = {"x": make()}
    known = settle(holder, "x", tuple)
    kept_states.keep("1", "a", holder, ["x"], IDENTITY, lambda name: known)
    for copy in (view(holder["x"], known), recall(kept_states)["x"], recall(kept_states)["x"]):
        assert repr(copy) == repr(make())
        for item in copy.values() if isinstance(copy, dict) else copy:
            (item[0] if isinstance(item, tuple) else item).clear()
        copy.clear()
    assert repr(holder["x"]) == repr(make())


def test_an_array_that_something_else_refers_to_is_copied(kept_states):
    mine = np.zeros(3)
    keep(kept_states, {"x": mine})
    mine += 1  # a reference to the blob's own array allows a change that nothing notices
    assert recall(kept_states)["x"].tolist() == [0, 0, 0]


def test_an_array_in_a_shared_container_is_copied(kept_states):
    mine = {"w": np.zeros(3), "rest": [np.zeros(3)]}
    keep(kept_states, {"x": mine})
    mine["w"] += 1  # as of a task that kept what it was given to update
    mine["rest"][0] += 1
    kept = recall(kept_states)["x"]
    assert (kept["w"].tolist(), kept["rest"][0].tolist()) == ([0, 0, 0], [0, 0, 0])


def test_an_array_that_does_not_change_is_shared_by_saves(kept_states):
    blobs = {"x": np.zeros(3)}
    for save_id in "123":
        keep(kept_states, blobs, save_id, save_id)
        assert recall(kept_states, identity=save_id)["x"].ctypes.data == blobs["x"].ctypes.data


@pytest.mark.parametrize(
    "value",
    [object(), np.array([[], {}], object), np.ma.array([1]), {"k": object()}, {object(): 1}],
    ids=["object", "objects", "masked", "inside", "key"],
)
def test_an_object_that_may_change_unnoticed_is_not_kept(kept_states, value):
    keep(kept_states, {"x": value, "y": 1})
    assert recall(kept_states, ["x", "y"]) == {"y": 1}


def test_a_list_that_contains_itself_ends(kept_states):
    value = []
    value.append(value)
    keep(kept_states, {"x": value})
    again = recall(kept_states)["x"]
    assert again[0] is again


def test_items_of_an_ordered_dict_are_kept(kept_states):
    blobs = {"x": OrderedDict(w=np.zeros(3), n=[1])}
    blobs["x"].versions = {"w": 1}
    keep(kept_states, blobs)
    value = own(blobs, "x")
    value["w"] += 1
    value["n"].append(2)
    value.versions["w"] = 2
    kept = recall(kept_states)["x"]
    assert type(kept) is OrderedDict
    assert (kept["w"].tolist(), kept["n"], kept.versions) == ([0, 0, 0], [1], {"w": 1})


def test_a_large_map_of_a_file_is_not_read_in_for_a_copy(kept_states):
    with mmap.mmap(-1, 2 << 20) as memory:
        kept_states.budget_bytes = 1 << 30
        blobs = {"x": np.frombuffer(memory, np.uint8), "y": np.frombuffer(memory, np.uint8, 9)}
        keep(kept_states, blobs)
        assert list(recall(kept_states, ["x", "y"])) == ["y"]
        del blobs


def test_tied_values_stay_tied(kept_states):
    shared, array = [1], np.zeros(2)
    keep(kept_states, {"x": [shared, shared, array, array]})
    one, two, three, four = recall(kept_states)["x"]
    assert one is two
    assert three is four


def test_the_budget_limits_blobs_that_epochs_change(kept_states):
    kept_states.budget_bytes = 1000
    kept_states.changing["a"] = {"x", "y"}
    blobs = {"x": np.zeros(100), "y": np.zeros(100), "data": np.zeros(10_000), "n": 1}
    keep(kept_states, blobs)
    # No epoch changes `data`: it stays in memory anyway.
    assert list(recall(kept_states, list(blobs))) == ["x", "data", "n"]
    assert kept_states.nbytes <= 1000
    before = blobs["y"].ctypes.data
    assert own(blobs, "y").ctypes.data == before


def test_nothing_is_kept_without_a_budget_or_while_memory_is_tight(kept_states):
    none = KeptStates(0)
    keep(none, {"x": 1})
    kept_states.is_suspended = True
    keep(kept_states, {"x": 1})
    assert (recall(none), recall(kept_states)) == ({}, {})


def test_a_state_is_recalled_only_by_its_identity(kept_states):
    keep(kept_states, {"x": 1}, identity=None)
    assert recall(kept_states) == recall(kept_states, identity=None) == {}
    kept_states.identify("1", {"a": IDENTITY})
    kept_states.identify("2", {"a": ("directory", "a.2", "digest")})  # was never kept
    assert recall(kept_states) == {"x": 1}
    assert recall(kept_states, identity=("directory", "a.1", "another digest")) == {}
    assert recall(kept_states, identity=("directory", "a.1.r1", "digest")) == {}
    assert recall(kept_states, identity=("elsewhere", "a.1", "digest")) == {}
    assert kept_states.recall("b", IDENTITY, ["x"]) == {}


def test_a_recorded_epoch_drops_older_states_and_no_newer_ones(kept_states):
    for save_id in "123":
        keep(kept_states, {"x": int(save_id)}, save_id, save_id)
    kept_states.drop_before("2")
    kept = [recall(kept_states, identity=save_id) for save_id in "123"]
    assert kept == [{}, {"x": 2}, {"x": 3}]
    kept_states.drop_before("of another directory")
    assert len(kept_states) == 0


def test_tensors_are_copied_and_ties_between_them_kept(kept_states):
    torch = pytest.importorskip("torch")
    weight = torch.zeros(3)
    blobs = {"x": OrderedDict(a=weight, b=weight.detach(), c=torch.ones(2))}
    blobs["x"]["p"] = torch.nn.Parameter(torch.ones(1))
    keep(kept_states, blobs)
    weight += 1
    kept = recall(kept_states)["x"]
    assert type(kept["p"]) is torch.nn.Parameter
    assert kept["a"].tolist() == [0, 0, 0]
    assert kept["b"] is kept["a"]
    kept["c"] += 1
    assert recall(kept_states)["x"]["c"].tolist() == [1, 1]
    halves = torch.zeros(4)
    keep(kept_states, {"x": [halves[:3], halves[1:]]}, "2", "2")
    assert recall(kept_states, identity="2") == {}
    # One would come back as the type of the other.
    keep(kept_states, {"x": [weight, torch.nn.Parameter(weight)]}, "3", "3")
    assert recall(kept_states, identity="3") == {}


values = st.recursive(
    st.one_of(
        st.none(),
        st.integers(),
        st.floats(),
        st.text(max_size=3),
        st.lists(st.integers(0, 9), max_size=4).map(np.array),
        st.sets(st.integers(), max_size=3),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


def spoil(value):
    """Change everything in a value that can be changed."""
    if isinstance(value, np.ndarray):
        value += 1
    elif isinstance(value, list | tuple):
        for item in value:
            spoil(item)
        if isinstance(value, list):
            value.append("spoilt")
    elif isinstance(value, dict):
        for item in value.values():
            spoil(item)
        value["spoilt"] = True
    elif isinstance(value, set):
        value.add("spoilt")


@given(values, st.booleans())
def test_a_kept_value_is_recalled_unchanged(value, is_changing):
    expected = repr(value)
    kept_states = KeptStates(1 << 20)
    kept_states.changing["a"] = {"x"} if is_changing else set()
    blobs = {"x": view(value)}
    blobs["x"] = own_all(blobs["x"])
    del value
    keep(kept_states, blobs)
    for _ in range(2):
        spoil(own(blobs, "x"))
        blobs = recall(kept_states)
        assert repr(blobs["x"]) == expected


@pytest.mark.parametrize("value", [{8, 0}, [{8, 0}], [[{8, 0}]], {"a": [1, {8, 0}], "b": [[2]]}])
def test_a_set_is_recalled_in_its_order(value):
    kept_states = KeptStates(1 << 20)
    keep(kept_states, {"x": view(value)})
    assert repr(recall(kept_states)["x"]) == repr(value)


def own_all(value):
    """A value whose arrays are its own, as a task's return value is settled."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, OrderedDict):
        return OrderedDict((key, own_all(item)) for key, item in value.items())
    if isinstance(value, dict):
        return {key: own_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(own_all, value))
    return value.copy() if isinstance(value, set) else value


def test_saves_that_are_never_recorded_do_not_pile_up(kept_states):
    array = np.zeros(1000)
    keep(kept_states, {"x": array.copy()}, "recorded", IDENTITY)
    kept_states.drop_before("recorded")
    for attempt in range(20):
        blobs = {"x": np.full(1000, attempt)}
        keep(kept_states, blobs, f"failed {attempt}", (*IDENTITY, attempt))
    assert kept_states.nbytes <= 3 * array.nbytes
    assert recall(kept_states)["x"].tolist() == array.tolist()
    assert recall(kept_states, identity=(*IDENTITY, 19))["x"].tolist() == [19] * 1000


def test_the_memory_of_states_whose_shape_changes_does_not_pile_up(kept_states):
    kept_states.budget_bytes = 1 << 30
    for epoch in range(20):
        blobs = {"x": np.zeros(LEAST_BYTES + epoch)}
        keep(kept_states, blobs, str(epoch), (*IDENTITY, epoch))
        kept_states.drop_before(str(epoch))
        own(blobs, "x", kept_states.array_pool.copy)
    assert kept_states.array_pool.nbytes <= 2 * 8 * (LEAST_BYTES + 20)
