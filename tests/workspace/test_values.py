"""Blobs are values: inputs of tasks, return values, values for other nodes."""

import collections
import copy
import datetime
import enum
import pickletools
import sys
import threading
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobrunner.workspace import contents
from jobrunner.workspace.pickles import (
    Snapshot,
    crossing_frames,
    dumps_definitions,
    from_frames,
    open_frames,
    to_frames,
)
from jobrunner.workspace.values import freeze, is_own, own, settle, view
from tests.sampling import examples

RECORD = np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])


def adopt(box, arguments):
    """A task's return value, the one item of `box`, as its node's own."""
    if not is_own(box, 0):
        settle(box, 0, lambda: arguments)
    return box[0]


class Model:
    def __init__(self, weights):
        self.weights = weights


# ---- own


def test_an_array_that_only_its_blob_refers_to_is_updated_in_place():
    blobs = {
        "x": np.zeros(3),
        "cut": np.zeros(6)[::2],
        "all": {"w": np.zeros(2)},
        "t": (1, np.ones(1)),
    }
    before = {name: id(value) for name, value in blobs.items() if name != "t"}
    before["w"], before["t"] = id(blobs["all"]["w"]), id(blobs["t"][1])
    after = {name: id(own(blobs, name)) for name in ("x", "cut", "all")}
    after["w"], after["t"] = id(blobs["all"]["w"]), id(own(blobs, "t")[1])
    assert after == before


@pytest.mark.parametrize("keep", [lambda x: [x], Model, lambda x: x[1:], lambda x: memoryview(x)])
def test_an_input_that_something_kept_stays_as_it_was_when_its_blob_is_updated(keep):
    for blobs, name, find in (
        ({"x": np.zeros(3)}, "x", lambda x: x),
        ({"x": np.zeros(6)[::2]}, "x", lambda x: x),
        ({"x": {"w": [np.zeros(3)]}}, "x", lambda x: x["w"][0]),
        ({"x": (np.zeros(3), 1)}, "x", lambda x: x[0]),
    ):
        kept = keep(find(view(blobs[name])))
        seen = own(blobs, name)
        find(seen)[...] = 7
        assert find(blobs[name])[0] == 7
        (old,) = kept if isinstance(kept, list) else (getattr(kept, "weights", kept),)
        assert not np.any(np.asarray(old))


# ---- view


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2.5,
        1j,
        "text",
        b"bytes",
        range(3),
        np.float32(1),
        np.datetime64("2020-01-01"),
    ],
)
def test_an_immutable_value_is_passed_as_it_is(value):
    assert view(value) is value


def test_an_array_arrives_as_a_read_only_view_of_the_same_memory():
    blob = np.arange(4.0)
    seen = view(blob)
    assert np.shares_memory(seen, blob)
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 1
    assert blob.flags.writeable


def test_arrays_inside_containers_are_read_only_and_the_containers_are_rebuilt():
    blob = {"a": [np.zeros(2), {"b": (np.ones(2), 1)}], "s": {1, 2}}
    seen = view(blob)
    seen["a"].append("more")
    seen["a"][1]["c"] = "more"
    seen["s"].add(3)
    with pytest.raises(ValueError, match="read-only"):
        seen["a"][1]["b"][0][0] = 9
    assert len(blob["a"]) == 2
    assert set(blob["a"][1]) == {"b"}
    assert blob["s"] == {1, 2}


def test_a_tuple_of_immutable_values_is_not_copied():
    blob = (1, ("two", 3.0))
    assert view(blob) is blob


def test_a_record_taken_out_of_an_array_is_a_copy():
    blob = RECORD.copy()
    view(blob[0])["a"] = 9
    assert blob["a"][0] == 1


def test_a_subclass_of_array_keeps_its_type_and_becomes_read_only():
    blob = np.ma.masked_array([1.0, 2.0], mask=[False, True])
    seen = view(blob)
    assert type(seen) is np.ma.MaskedArray
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 5


def test_an_object_of_another_class_is_passed_itself():
    blob = Model([1])
    assert view(blob) is blob


# ---- adopt


def test_a_fresh_array_is_kept_without_a_copy():
    box = [np.arange(3)]
    address = box[0].ctypes.data
    assert adopt(box, ()).ctypes.data == address


def test_a_fresh_array_seen_through_its_only_view_is_kept_without_a_copy():
    box = [np.arange(6).reshape(2, 3)]
    address = box[0].ctypes.data
    assert adopt(box, ()).ctypes.data == address


@pytest.mark.parametrize("cut", [lambda a: a, lambda a: a[1:], lambda a: a.T, lambda a: view(a)])
def test_an_array_that_shares_memory_with_an_argument_is_copied(cut):
    argument = np.arange(6.0).reshape(2, 3)
    adopted = adopt([cut(argument)], [argument])
    np.testing.assert_array_equal(adopted, cut(argument))
    assert not np.shares_memory(adopted, argument)
    assert adopted.flags.writeable


def test_an_array_in_a_cache_or_a_global_is_copied():
    cache = {"points": np.arange(10.0)}
    whole, part = adopt([cache["points"]], ()), adopt([cache["points"][2:4]], ())
    assert not np.shares_memory(whole, cache["points"])
    assert not np.shares_memory(part, cache["points"])


def test_two_parts_of_a_value_never_share_memory():
    def fn():
        whole = np.arange(10.0)
        return whole, whole[:5]

    whole, part = adopt([fn()], ())
    assert not np.shares_memory(whole, part)


def test_arrays_in_fresh_containers_are_kept_and_those_in_shared_ones_are_copied():
    fresh = [{"a": [np.arange(3)], "b": (np.ones(2),)}]
    address = fresh[0]["a"][0].ctypes.data
    adopted = adopt(fresh, ())
    assert adopted["a"][0].ctypes.data == address

    shared = {"a": [np.arange(3)]}
    adopted = adopt([shared], ())
    shared["a"].append(1)
    assert len(adopted["a"]) == 1
    assert not np.shares_memory(adopted["a"][0], shared["a"][0])


def test_a_map_is_not_read_in_but_copied_where_it_shares_with_an_argument(tmp_path):
    mapped = np.memmap(tmp_path / "data", dtype="f8", mode="w+", shape=10)
    assert np.shares_memory(adopt([mapped[2:]], ()), mapped)
    assert np.shares_memory(adopt([np.asarray(mapped)], ()), mapped)
    assert not np.shares_memory(adopt([mapped[2:]], [mapped]), mapped)


@pytest.mark.parametrize(
    ("make", "see"),
    [
        (lambda: np.zeros(8), lambda kept: np.lib.stride_tricks.sliding_window_view(kept, 2)),
        (lambda: bytearray(8), lambda kept: np.frombuffer(kept, np.uint8)),
        (lambda: np.ma.zeros(8), lambda kept: kept),
        (lambda: np.rec.array(RECORD), lambda kept: kept),
    ],
)
def test_memory_that_a_function_keeps_in_another_form_is_copied(make, see):
    kept = make()
    adopted = adopt([see(kept)], ())
    assert not np.shares_memory(adopted, see(kept))
    assert type(adopted) is type(see(kept))


def test_an_array_of_a_subclass_that_was_kept_stays_as_it_was_when_its_blob_is_updated():
    blobs = {"x": np.ma.zeros(3)}
    kept = view(blobs["x"])
    own(blobs, "x")[0] = 5
    assert kept[0] == 0
    assert blobs["x"][0] == 5


def test_an_object_array_and_a_record_are_adopted_like_others():
    items = np.array([None, 1, "x"], dtype=object)
    assert not np.shares_memory(adopt([items], ()), items)
    record = RECORD[0]
    adopted = adopt([record], ())
    record["a"] = 7
    assert adopted["a"] == 1


@pytest.mark.parametrize("wrap", [lambda it: it, lambda it: [it, 1], lambda it: {"r": (it,)}])
@pytest.mark.parametrize("array", [RECORD, RECORD.view(np.recarray)], ids=["void", "record"])
def test_an_item_of_a_structured_array_becomes_a_copy_of_its_own(array, wrap):
    rows = array.copy()
    blobs = {"x": adopt([wrap(rows[0])], ()), "y": wrap(rows[0])}
    own(blobs, "y")
    rows["a"] = 9
    assert portrait(blobs["x"], {}) == portrait(blobs["y"], {}) == portrait(wrap(array[0]), {})
    again = id(blobs["x"])
    assert id(own(blobs, "x")) == again


# ---- containers of all kinds

LEAVES = [
    *(None, True, 3, 10**30, -0.0, 2.5, 1j, "text", "x" * 300, b"b", np.float64(1), np.int8(2)),
    *(datetime.date(2020, 1, 1), (1, "two"), (1, np.float64(2)), frozenset({1}), Model([1])),
]
leaves = st.sampled_from(LEAVES)
made = st.sampled_from(
    [
        *(lambda: np.arange(3), lambda: {1, 2}, lambda: bytearray(b"x"), list, dict),
        lambda: RECORD[0].copy(),
    ]
)


def objects(items):
    array = np.empty(len(items), object)
    for i, item in enumerate(items):
        array[i] = item
    return array


@st.composite
def values(draw):
    """Containers of all kinds, some of them at several places."""
    parts = [draw(leaves), *(make() for make in draw(st.lists(made, min_size=1, max_size=4)))]
    for _ in range(draw(st.integers(1, 6))):
        items = draw(st.lists(st.sampled_from(parts), max_size=4))
        named = dict(zip(draw(st.sampled_from(["abcd", [1, (2, 3), None, 4.0]])), items))  # noqa: B905
        kind = draw(
            st.sampled_from(
                [list, tuple, collections.deque, dict, collections.OrderedDict, objects]
            )
        )
        parts.append(kind(named) if kind in (dict, collections.OrderedDict) else kind(items))
    if type(parts[-1]) is list and draw(st.booleans()):
        parts[-1].append(parts[-1])
    return parts[-1]


def portrait(value, seen):
    """Types, values and ties; immutable objects are tied to nothing."""
    kind = type(value)
    if not isinstance(
        value, list | tuple | collections.deque | dict | np.ndarray | np.void | set | bytearray
    ):
        return (kind, value.weights if kind is Model else repr(value))
    if kind is not tuple:
        if id(value) in seen:
            return ("same", seen[id(value)])
        seen[id(value)] = len(seen)
    if isinstance(value, dict):
        return (kind, *((name, portrait(item, seen)) for name, item in value.items()))
    if isinstance(value, list | tuple | collections.deque) or is_of_objects(value):
        return (kind, *(portrait(item, seen) for item in value))
    return (kind, repr(value))


def is_of_objects(value):
    return isinstance(value, np.ndarray) and value.dtype.hasobject


def mutables(value, found):
    is_container = isinstance(value, list | tuple | collections.deque | dict)
    if (is_container or is_of_objects(value)) and id(value) not in found:
        found[id(value)] = value
        for item in value.values() if isinstance(value, dict) else value:
            mutables(item, found)
    elif isinstance(value, np.ndarray | np.void | set | bytearray):
        found[id(value)] = value
    return found


def is_shared(one, other):
    here = mutables(one, {})
    return any(
        any(np.shares_memory(part, it) for it in here.values() if isinstance(it, np.ndarray))
        if isinstance(part, np.ndarray)
        else key in here and type(part) is not tuple
        for key, part in mutables(other, {}).items()
    )


@pytest.mark.parametrize("many", [contents.MANY, 17])
@given(value=values())
@settings(max_examples=examples(everyday=60))
def test_copies_keep_types_and_ties_and_share_nothing_that_can_change(many, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents, "MANY", many)  # as if there were so many parts
        patch.setattr(contents, "AT_ONCE", 2 if many == 17 else contents.AT_ONCE)
        check_copies(value if many > 17 else [value, [value] * 40])


def check_copies(value):
    was = portrait(value, {})
    seen = view(value)
    assert portrait(seen, {}) == was
    adopted = adopt([value], ())  # this function has it too
    assert portrait(adopted, {}) == was
    assert not is_shared(adopted, value)
    assert portrait(view(freeze(value, copy=True)), {}) == was
    box = [adopted]
    del adopted
    known = settle(box, 0, tuple)
    assert portrait(view(box[0], known), {}) == was
    again = adopt([adopt([view(box[0])], [seen])], ())
    assert portrait(again, {}) == was
    assert not is_shared(again, seen)


class Phase(enum.Enum):
    COLD = 1
    HOT = 2


@pytest.mark.parametrize(
    ("value", "row"),
    [
        ([[i, Phase.HOT] for i in range(40)], list),
        (collections.deque(({i} for i in range(40)), 50), set),
        (collections.defaultdict(list, {i: {"at": (i, None)} for i in range(40)}), dict),
        (tuple(collections.deque([i], 3) for i in range(40)), collections.deque),
        (collections.OrderedDict((i, bytearray(i)) for i in range(40)), bytearray),
        ([[], [[]]], None),
        ([[1], 2], None),
        ([[1], np.zeros(2)], None),
        ([[1], (2, [3])], None),
        ([[1], ([2],), 3], None),
        ([((1, 2), (3,)), ((4,), 5)], None),
        ([{1}, ((1, 2), 3)], None),
        ([collections.Counter(a=i) for i in range(40)], None),
        ([[[1]] * 2] * 20, None),
        ([Phase.COLD, Phase.HOT] * 20, None),
    ],
)
def test_rows_are_copied_by_their_own_copy_and_others_as_they_need(value, row):
    box = [copy.deepcopy(value)]
    was = portrait(value, {})
    known = settle(box, 0, tuple)
    assert known.row is row
    frozen = freeze(box[0], copy=True, known=known)
    assert portrait(frozen, {}) == portrait(box[0], {}) == was
    assert not is_shared(frozen, box[0])


def test_members_of_an_enumeration_are_immutable():
    box = [[Phase.COLD, Phase.HOT] * 20]
    assert settle(box, 0, tuple).form is contents.Form.FLAT
    assert type(freeze(box[0], copy=True)) is list


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: type(leaf).__name__)
def test_a_copy_of_nested_containers_keeps_the_types_in_it(leaf):
    items = [leaf]
    value = [[leaf, 1], {"a": [leaf], 2: (leaf, items)}, items, ([], leaf)]
    assert portrait(view(value), {}) == portrait(value, {})


def test_a_value_that_nothing_else_refers_to_is_not_copied_however_it_is_tied():
    items, array = [1], np.zeros(2)
    box = [{"a": items, "b": [items, array], "c": (array, items), "d": [[1]] * 2}]
    del items, array
    before = [id(box[0]), id(box[0]["a"]), id(box[0]["c"][0])]
    adopted = adopt(box, ())
    assert [id(adopted), id(adopted["a"]), id(adopted["c"][0])] == before


@pytest.mark.parametrize("make", [list, tuple, collections.deque, dict])
def test_a_few_objects_again_and_again_keep_their_ties_when_they_are_known(make):
    few = [[1], {"at": [2]}, np.zeros(2)]
    items = [few[i % 3] for i in range(400)]
    box = [make(enumerate(items) if make is dict else items)]
    was = portrait(box[0], {})
    known = settle(box, 0, tuple)
    assert known.numbers.tolist() == [0, 1, 2] * 133 + [0]
    seen = view(box[0], known)
    assert portrait(seen, {}) == portrait(box[0], {}) == was
    frozen = freeze(box[0], copy=True, known=known)
    assert portrait(frozen, {}) == was
    assert not is_shared(frozen, box[0])


def test_a_list_that_is_in_itself_again_and_again_is_copied_as_one():
    value = []
    value += [value] * 400
    box = [value]
    del value
    known = settle(box, 0, tuple)
    seen = view(box[0], known)
    assert seen[0] is seen is seen[-1] is not box[0]


class Key:
    """Hashable, though it can change."""


@pytest.mark.parametrize(
    "odd",
    [bytearray(b""), Key(), [], b"NTFNT", np.True_, np.zeros(1)],
    ids=lambda odd: str(type(odd)),
)
@pytest.mark.parametrize("many", [[True, None], [None], [True], [None, 1.5], [1, 1.5], ["a"]])
def test_one_odd_item_of_many_is_found_wherever_it_is(many, odd):
    for place in (0, 300, 600):
        items = many * 300
        items.insert(place, odd)
        assert contents.survey(items).kinds == {type(odd), *map(type, many)}
        rows = [many * 10 for _ in range(300)]
        rows[place // 3 - 1].append(odd)
        assert contents.survey(rows).kinds == {list, type(odd), *map(type, many)}


def test_what_dicts_hold_is_found_whatever_their_keys_and_owners_are():
    class Owner:
        def __init__(self):
            self.items = [1]

    owners = [Owner() for _ in range(3)]
    rows = [{"a": [1]}, {(1, Key()): 2.5}, {3: {"b": b""}}, *map(vars, owners)]
    kinds = contents.survey({"rows": rows}).kinds
    assert kinds == {list, dict, tuple, str, int, float, bytes, Key}
    assert contents.survey([{"a": i} for i in range(3)]).kinds == {dict, int}
    box = [[*map(vars, owners)]]
    assert not is_shared(adopt(box, ()), [*map(vars, owners)])


def test_references_to_few_lists_keep_their_ties_and_nobody_copies_them_in_vain():
    lists = [[i] for i in range(3)]
    box = [[*(lists[i % 3] for i in range(400)), ([5], lists)]]
    was, ids = portrait(box[0], {}), list(map(id, lists))
    assert portrait(view(box[0]), {}) == was
    assert not is_shared(view(box[0]), box[0])
    adopted = adopt([box[0]], ())
    assert not is_shared(adopted, box[0])
    assert portrait(adopted, {}) == was
    del lists
    assert list(map(id, adopt(box, ())[:3])) == ids


def test_long_containers_keep_ties_and_objects_that_occur_at_several_depths():
    shared, array = [1], objects([{"a": 1}])
    value = [([i], {"at": i, "of": shared}, {i}) for i in range(50)]
    value += [array, array[0], (shared, [(shared, array)]), collections.deque([value[0]], 3)]
    assert portrait(view(value), {}) == portrait(value, {})
    assert portrait(adopt([value], ()), {}) == portrait(value, {})


def test_what_is_deeply_nested_is_copied_too():
    value = []
    for _ in range(400):
        value = [value, 1]
    assert portrait(view(value), {}) == portrait(value, {})


def test_a_read_only_array_becomes_a_copy_when_its_blob_is_updated():
    blobs = {"x": np.broadcast_to(np.zeros(3), (2, 3)), "d": {"y": np.frombuffer(b"abc", "u1")}}
    own(blobs, "x")[0] += 1
    own(blobs, "d")["y"][0] = 1
    assert blobs["x"].tolist() == [[1] * 3, [0] * 3]
    assert blobs["d"]["y"].tolist() == [1, 98, 99]


# ---- freeze


def test_a_frozen_array_is_a_read_only_view_or_a_copy_as_asked_for():
    blob = np.arange(3.0)
    seen, kept = freeze(blob, copy=False), freeze(blob, copy=True)
    blob[0] = 9
    assert seen[0] == 9
    assert kept[0] == 0
    assert not seen.flags.writeable
    assert not kept.flags.writeable


def test_frozen_containers_do_not_see_later_changes():
    blob = {"a": [1, 2], "b": (3, [4]), "c": {5}, "d": collections.OrderedDict(e=[6])}
    frozen = freeze(blob, copy=False)
    was = copy.deepcopy(blob)
    blob["a"].append(3)
    blob["b"][1].append(5)
    blob["c"].add(6)
    blob["d"]["e"].append(7)
    assert view(frozen) == was
    assert type(view(frozen)["d"]) is collections.OrderedDict


def test_each_reader_of_a_frozen_object_gets_a_copy_of_its_own():
    blob = Model(np.arange(3.0))
    frozen = freeze(blob, copy=False)
    assert isinstance(frozen, Snapshot)
    blob.weights[0] = 9
    one, other = view(frozen), view(frozen)
    one.weights[1] = 8
    assert list(other.weights) == [0, 1, 2]


def test_a_value_with_one_reader_on_its_node_is_moved_and_not_copied():
    holder = Model(np.arange(3.0))
    assert freeze(holder, copy=False, move=True) is holder


@pytest.mark.parametrize(
    "value",
    [
        [Model(1)],
        {Model(1): 2},
        np.array([Model(1)], dtype=object),
        types.SimpleNamespace(a=[1]),
        collections.OrderedDict(a=Model(1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_with_objects_is_copied_whole(value):
    frozen = freeze(value, copy=False)
    assert isinstance(frozen, Snapshot)
    assert type(view(frozen)) is type(value)
    assert view(frozen) is not value


def test_a_value_that_cannot_be_pickled_is_an_error_that_says_what_to_do():
    with pytest.raises(TypeError, match=r"lock.*cannot be pickled.*by name.*its own node"):
        freeze(threading.Lock(), copy=False)


def test_an_object_of_a_class_in_a_script_is_frozen_by_value():
    module = types.ModuleType("not_to_be_found")
    exec("class Local:\n    x = 1", module.__dict__)
    module.Local.__module__ = "__main__"
    assert view(freeze(module.Local(), copy=False)).x == 1


# ---- frames


@pytest.mark.parametrize(
    "value",
    [
        *(1, "x", np.arange(10), {"a": np.ones((2, 3), order="F")}, np.arange(10)[::2]),
        *([np.zeros(0)], np.zeros(6, ">f8")[::2], np.zeros(2, ">M8[D]"), np.zeros(2, ">U2")),
        *((np.zeros(2), 1), {"a": np.zeros(6, ">f8")[::2]}, np.array(["x", None], object)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("pickled", [to_frames, crossing_frames])
def test_a_value_survives_the_wire(value, pickled):
    frames = [bytes(frame) for frame in pickled(value)]
    found = from_frames(frames)
    np.testing.assert_equal(found, value)
    assert getattr(found, "dtype", None) == getattr(value, "dtype", None)
    if isinstance(value, dict):
        assert found["a"].dtype == value["a"].dtype


@pytest.mark.parametrize("arrays", [1, 2, 40])
@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_what_crosses_is_read_only_and_shares_inside_what_it_shared(kind, arrays):
    items = [np.zeros(3) for _ in range(arrays)]
    value = dict(enumerate([*items, items[0]])) if kind is dict else kind([*items, items[0]])
    found = open_frames([bytes(frame) for frame in crossing_frames(freeze(value, copy=False))])
    found = list(found.values()) if kind is dict else found
    assert np.shares_memory(found[0], found[-1])
    assert not any(array.flags.writeable for array in found)


def test_what_is_in_an_array_of_objects_crosses_as_it_does_alone():
    for items in ([lambda: 1, None], np.array([lambda: 1, None], object)):
        assert from_frames(crossing_frames(items))[0]() == 1
    with pytest.raises(TypeError, match="would arrive as bytes"):
        crossing_frames(np.array([memoryview(b"a"), None], object))


@pytest.mark.parametrize("arrays", [1, 40])
@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_a_container_is_its_own_unless_something_else_has_it_or_its_arrays(kind, arrays):
    def make():
        items = [np.zeros(3) for _ in range(arrays)]
        return dict(enumerate(items)) if kind is dict else kind(items)

    def own_again(others=(), must_write=True):
        if not is_own(box, 0, must_write=must_write):
            settle(box, 0, lambda: others, must_write=must_write)
        return id(box[0][0]) != before

    box = [make()]
    before = id(box[0][0])
    assert not own_again()
    held = box[0][0]
    assert own_again()
    assert box[0][0] is not held
    box, held = [make()], None
    before, held = id(box[0][0]), box[0][0][1:]
    assert own_again()
    held[:] = 1
    assert box[0][0].tolist() == [0, 0, 0]
    box, held = [make()], None
    before, held = id(box[0][0]), box[0]
    assert own_again()
    assert box[0] is not held
    box, held = [make()], None
    before = id(box[0][0])
    box[0][0].flags.writeable = False
    assert not own_again(must_write=False)
    assert own_again()
    assert box[0][0].flags.writeable


@pytest.mark.parametrize("name", ["<f8", ">f8", "<M8[s]", ">M8[s]", ">U2", [("a", ">i4")]])
def test_notes_on_a_dtype_cross_with_the_array(name):
    array = np.zeros((4, 2), np.dtype(name, metadata={"unit": "m"}))
    for value in (array, array[::2], array.T, np.ma.MaskedArray(array[::2])):
        for found in (
            from_frames([bytes(frame) for frame in crossing_frames(value)]),
            view(freeze([value], copy=True))[0],
            view(adopt([value], ())),
        ):
            assert found.dtype == value.dtype
            assert found.dtype.metadata == {"unit": "m"}


def test_large_arrays_travel_as_their_own_memory():
    array = np.arange(1000.0)
    frames = to_frames({"a": array})
    assert len(frames) == 2
    assert np.shares_memory(np.frombuffer(frames[1]), array)


def test_dates_and_the_like_are_immutable():
    value = [datetime.datetime(2020, 1, 1), datetime.timedelta(1)]
    assert view(tuple(value))[0] is value[0]


class Outer:
    class Inner:
        pass


def test_a_class_that_is_sent_by_value_keeps_its_place_inside_another(monkeypatch):
    monkeypatch.setattr(Outer.Inner, "__module__", "__main__")
    texts = [text for _, text, _ in pickletools.genops(dumps_definitions(Outer.Inner))]
    assert texts[texts.index("__qualname__") + 2] == "Outer.Inner"


def test_no_value_imports_torch():
    assert "torch" not in sys.modules or sys.modules["torch"] is not None
    freeze(Model(1), copy=True)
    adopt([Model(1)], ())


def test_a_tensor_is_copied_where_it_shares_memory_and_frozen_by_a_clone():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    weights = torch.arange(4.0)
    assert adopt([weights[1:]], [weights]).data_ptr() != weights[1:].data_ptr()
    fresh = torch.ones(3)
    assert adopt([fresh], [weights]).data_ptr() == fresh.data_ptr()
    frozen = freeze(weights, copy=False)
    weights += 1
    assert view(frozen).tolist() == [0, 1, 2, 3]
    view(frozen).zero_()
    assert view(frozen).tolist() == [0, 1, 2, 3]
    assert from_frames(to_frames(frozen)).open().tolist() == [0, 1, 2, 3]


def test_a_container_of_tensors_is_copied_for_a_task_and_its_tensors_are_not():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    weights, sparse = torch.ones(2), torch.eye(2).to_sparse()
    state = {"w": weights, "all": [weights, sparse]}
    found = view(state)
    assert found is not state
    assert found["all"] is not state["all"]
    assert found["w"] is found["all"][0] is weights
    assert found["all"][1] is sparse


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("layout", ["sparse", "sparse_csr", "sparse_csc", "mkldnn"])
def test_a_tensor_without_memory_of_its_own_is_copied_where_its_parts_are_shared(layout):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensor = getattr(torch.eye(2), f"to_{layout}")()
    assert adopt([tensor], ()) is tensor
    if layout != "mkldnn":  # whose parts cannot be reached
        values = tensor._values() if layout == "sparse" else tensor.values()
        assert adopt([tensor], [values]) is not tensor
        assert adopt([values], [[tensor]]) is not values
        assert adopt([torch.ones(2)], [tensor]).tolist() == [1, 1]


def test_a_tensor_of_a_dtype_that_torch_cannot_clone_is_copied():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    nibbles = torch.tensor([1, 2], dtype=torch.uint8).view(torch.uint4)
    copied = adopt([nibbles], [nibbles])
    assert copied is not nibbles
    assert copied.dtype == torch.uint4
    assert copied.view(torch.uint8).tolist() == [1, 2]


def test_an_update_can_write_an_array_of_objects_that_was_read_only():
    array = np.array(["text", None], object)
    array[1] = [1]
    array.flags.writeable = False
    blobs = {"x": array}
    del array
    own(blobs, "x")[0] = 17
    assert blobs["x"].tolist() == [17, [1]]
