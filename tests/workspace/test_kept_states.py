"""States that a worker keeps in memory to go back to: exact, or not kept."""

import mmap
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.workspace.array_pool import LEAST_BYTES
from jobrunner.workspace.kept_states import Rollbacks
from jobrunner.workspace.values import own, view

IDENTITY = ("directory", "a.1", "digest")


def keep(rollbacks, blobs, moment="1", identity=IDENTITY):
    rollbacks.keep(moment, "a", blobs, list(blobs), identity)


def recall(rollbacks, names=("x",), identity=IDENTITY):
    return rollbacks.recall("a", identity, names)


@pytest.fixture
def rollbacks():
    kept = Rollbacks(1 << 20)
    kept.changing["a"] = {"x"}
    return kept


def test_an_array_is_kept_without_a_copy_and_copied_only_when_a_task_updates_it(rollbacks):
    blobs = {"x": np.zeros(100)}
    address = blobs["x"].ctypes.data
    keep(rollbacks, blobs)
    assert recall(rollbacks)["x"].ctypes.data == address
    array = own(blobs, "x")
    array += 1
    assert blobs["x"] is array
    assert recall(rollbacks)["x"].ctypes.data == address
    assert recall(rollbacks)["x"].tolist() == [0] * 100


def test_without_a_rollback_an_update_copies_nothing():
    blobs = {"x": np.zeros(100)}
    keep(Rollbacks(), blobs)
    before = blobs["x"].ctypes.data
    assert own(blobs, "x").ctypes.data == before


def test_what_was_recalled_can_be_changed_and_recalled_again(rollbacks):
    blobs = {"x": {"w": np.zeros(3), "steps": [1, 2], "seen": {1}}}
    keep(rollbacks, blobs)
    for _ in range(3):
        blobs = recall(rollbacks)
        value = own(blobs, "x")
        assert value["w"].tolist() == [0, 0, 0]
        assert (value["steps"], value["seen"]) == ([1, 2], {1})
        value["w"] += 1
        value["steps"].append(3)
        value["seen"].add(2)


def test_an_array_that_something_else_refers_to_is_copied(rollbacks):
    mine = np.zeros(3)
    keep(rollbacks, {"x": mine})
    mine += 1  # whoever keeps a blob's own array can change it unseen
    assert recall(rollbacks)["x"].tolist() == [0, 0, 0]


def test_what_lies_in_a_container_that_something_else_refers_to_is_copied(rollbacks):
    mine = {"w": np.zeros(3), "rest": [np.zeros(3)]}
    keep(rollbacks, {"x": mine})
    mine["w"] += 1  # as of a task that kept what it was given to update
    mine["rest"][0] += 1
    kept = recall(rollbacks)["x"]
    assert (kept["w"].tolist(), kept["rest"][0].tolist()) == ([0, 0, 0], [0, 0, 0])


def test_an_array_that_does_not_change_is_shared_by_moments(rollbacks):
    blobs = {"x": np.zeros(3)}
    for moment in "123":
        keep(rollbacks, blobs, moment, moment)
        assert recall(rollbacks, identity=moment)["x"].ctypes.data == blobs["x"].ctypes.data


@pytest.mark.parametrize(
    "value",
    [object(), np.array([[], {}], object), np.ma.array([1]), {"k": object()}, {object(): 1}],
    ids=["object", "objects", "masked", "inside", "key"],
)
def test_what_may_change_unseen_is_not_kept(rollbacks, value):
    keep(rollbacks, {"x": value, "y": 1})
    assert recall(rollbacks, ["x", "y"]) == {"y": 1}


def test_a_list_that_contains_itself_ends(rollbacks):
    value = []
    value.append(value)
    keep(rollbacks, {"x": value})
    again = recall(rollbacks)["x"]
    assert again[0] is again


def test_what_an_ordered_dict_holds_is_copied_since_updates_do_not_look_into_it(rollbacks):
    blobs = {"x": OrderedDict(w=np.zeros(3), n=[1])}
    blobs["x"].versions = {"w": 1}
    keep(rollbacks, blobs)
    blobs["x"]["w"] += 1
    blobs["x"]["n"].append(2)
    blobs["x"].versions["w"] = 2
    kept = recall(rollbacks)["x"]
    assert type(kept) is OrderedDict
    assert (kept["w"].tolist(), kept["n"], kept.versions) == ([0, 0, 0], [1], {"w": 1})


def test_a_large_map_of_a_file_is_not_read_in_for_a_copy(rollbacks):
    with mmap.mmap(-1, 2 << 20) as memory:
        rollbacks.budget_bytes = 1 << 30
        blobs = {"x": np.frombuffer(memory, np.uint8), "y": np.frombuffer(memory, np.uint8, 9)}
        keep(rollbacks, blobs)
        assert list(recall(rollbacks, ["x", "y"])) == ["y"]
        del blobs


def test_tied_values_stay_tied(rollbacks):
    shared, array = [1], np.zeros(2)
    keep(rollbacks, {"x": [shared, shared, array, array]})
    one, two, three, four = recall(rollbacks)["x"]
    assert one is two
    assert three is four


def test_the_budget_bounds_what_may_come_to_take_memory(rollbacks):
    rollbacks.budget_bytes = 1000
    rollbacks.changing["a"] = {"x", "y"}
    blobs = {"x": np.zeros(100), "y": np.zeros(100), "data": np.zeros(10_000), "n": 1}
    keep(rollbacks, blobs)
    # `data` is changed by nobody: it stays in memory anyway.
    assert list(recall(rollbacks, list(blobs))) == ["x", "data", "n"]
    assert rollbacks.nbytes <= 1000
    before = blobs["y"].ctypes.data
    assert own(blobs, "y").ctypes.data == before


def test_nothing_is_kept_without_a_budget_or_while_memory_is_tight(rollbacks):
    none = Rollbacks(0)
    keep(none, {"x": 1})
    rollbacks.is_suspended = True
    keep(rollbacks, {"x": 1})
    assert (recall(none), recall(rollbacks)) == ({}, {})


def test_only_who_names_the_very_state_gets_it(rollbacks):
    keep(rollbacks, {"x": 1}, identity=None)
    assert recall(rollbacks) == recall(rollbacks, identity=None) == {}
    rollbacks.identify("1", {"a": IDENTITY})
    rollbacks.identify("2", {"a": ("directory", "a.2", "digest")})  # was never kept
    assert recall(rollbacks) == {"x": 1}
    assert recall(rollbacks, identity=("directory", "a.1", "another digest")) == {}
    assert recall(rollbacks, identity=("directory", "a.1.r1", "digest")) == {}
    assert recall(rollbacks, identity=("elsewhere", "a.1", "digest")) == {}
    assert rollbacks.recall("b", IDENTITY, ["x"]) == {}


def test_an_epoch_that_is_recorded_drops_what_is_older_and_nothing_newer(rollbacks):
    for moment in "123":
        keep(rollbacks, {"x": int(moment)}, moment, moment)
    rollbacks.settle("2")
    kept = [recall(rollbacks, identity=moment) for moment in "123"]
    assert kept == [{}, {"x": 2}, {"x": 3}]
    rollbacks.settle("of another directory")
    assert len(rollbacks) == 0


def test_tensors_are_copied_and_ties_between_them_kept(rollbacks):
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.zeros(3))
    blobs = {"x": OrderedDict(a=weight, b=weight.detach(), c=torch.ones(2))}
    blobs["x"]["b"].requires_grad_()
    keep(rollbacks, blobs)
    with torch.no_grad():
        weight += 1
    kept = recall(rollbacks)["x"]
    assert type(kept["a"]) is torch.nn.Parameter
    assert kept["a"].tolist() == [0, 0, 0]
    assert kept["b"] is kept["a"]
    kept["c"] += 1
    assert recall(rollbacks)["x"]["c"].tolist() == [1, 1]
    halves = torch.zeros(4)
    keep(rollbacks, {"x": [halves[:3], halves[1:]]}, "2", "2")
    assert recall(rollbacks, identity="2") == {}


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
def test_whatever_is_kept_comes_back_as_it_was(value, is_changing):
    expected = repr(value)
    rollbacks = Rollbacks(1 << 20)
    rollbacks.changing["a"] = {"x"} if is_changing else set()
    blobs = {"x": view(value)}
    blobs["x"] = own_all(blobs["x"])
    del value
    keep(rollbacks, blobs)
    for _ in range(2):
        spoil(own(blobs, "x"))
        blobs = recall(rollbacks)
        assert repr(blobs["x"]) == expected


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


def test_saves_that_nobody_records_do_not_pile_up(rollbacks):
    array = np.zeros(1000)
    keep(rollbacks, {"x": array.copy()}, "recorded", IDENTITY)
    rollbacks.settle("recorded")
    for attempt in range(20):
        blobs = {"x": np.full(1000, attempt)}
        keep(rollbacks, blobs, f"failed {attempt}", (*IDENTITY, attempt))
    assert rollbacks.nbytes <= 3 * array.nbytes
    assert recall(rollbacks)["x"].tolist() == array.tolist()
    assert recall(rollbacks, identity=(*IDENTITY, 19))["x"].tolist() == [19] * 1000


def test_the_memory_of_states_whose_shape_changes_does_not_pile_up(rollbacks):
    rollbacks.budget_bytes = 1 << 30
    for epoch in range(20):
        blobs = {"x": np.zeros(LEAST_BYTES + epoch)}
        keep(rollbacks, blobs, str(epoch), (*IDENTITY, epoch))
        rollbacks.settle(str(epoch))
        own(blobs, "x", rollbacks.spares.copy)
    assert rollbacks.spares.nbytes <= 2 * 8 * (LEAST_BYTES + 20)
