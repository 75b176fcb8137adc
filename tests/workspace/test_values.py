"""Values at rest never change: what is kept, copied and shared."""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import enum
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest

from jobrunner.testing.identity import assert_identical
from jobrunner.workspace import (
    NotPicklableError,
    Pickled,
    Workspace,
    capture,
    received,
    settle,
    to_frames,
    view,
)


class Pair(NamedTuple):
    one: Any
    two: Any


class Phase(enum.Enum):
    COLD = 1


class Model:
    """An object of another class."""


def address(array):
    return int(array.__array_interface__["data"][0])


def blob(value):
    """A workspace with blob "x", a settled copy of the value."""
    workspace = Workspace("a")
    workspace.put("x", settle([value]))
    return workspace


def put_back(workspace):
    workspace.put("x", settle(workspace.globals["x"].box))


# ---- arrays


WRAPS = [lambda array: array, lambda array: array[:], lambda array: {"w": array, "n": [1]}]


def array_in(value):
    return value["w"] if isinstance(value, dict) else value


@pytest.mark.parametrize("wrap", WRAPS, ids=["array", "its only view", "dict"])
def test_an_array_is_taken_over_updated_in_place_and_taken_over_again(wrap):
    box = [wrap(np.zeros(3))]
    place = address(array_in(box[0]))
    workspace = Workspace("a")
    workspace.put("x", settle(box))
    del box
    for _ in range(3):
        taken = workspace.take("x")
        assert address(array_in(taken)) == place
        array_in(taken)[:] += 1
        del taken
        put_back(workspace)
    assert list(array_in(workspace.lookup("x"))) == [3, 3, 3]


@pytest.mark.parametrize(
    "keep",
    [
        lambda array: array,
        lambda array: array[1:],
        lambda array: [array],
        lambda array: memoryview(array),
        lambda array: array.reshape(3, 1)[:, 0],
    ],
)
def test_an_array_that_something_else_can_reach_is_copied(keep):
    box = [np.zeros(3)]
    kept = keep(box[0])
    stored = settle(box)
    np.asarray(kept[0] if isinstance(kept, list) else kept)[-1] = 7
    assert list(stored) == [0, 0, 0]


@pytest.mark.parametrize(
    "keep",
    [
        lambda workspace: workspace.lookup("x"),
        lambda workspace: workspace.lookup("x")[1:],
        lambda workspace: {"in": [workspace.lookup("x")]},
        lambda workspace: workspace.globals["x"],
        lambda workspace: capture(workspace.globals["x"]),
        lambda workspace: to_frames(capture(workspace.globals["x"])),
    ],
)
def test_what_refers_to_an_array_keeps_it_as_it_is(keep):
    workspace = blob(np.arange(100.0))
    kept = keep(workspace)
    place = address(workspace.globals["x"])
    taken = workspace.take("x")
    assert address(taken) != place
    taken[...] = 9
    del taken, kept
    put_back(workspace)
    place = address(workspace.globals["x"])
    assert address(workspace.take("x")) == place  # nothing refers to it any more


@pytest.mark.parametrize("dtype", ["<f8", ">f4", "<i2", "<c16"])
def test_an_array_that_is_not_aligned_to_its_item_is_copied(dtype):
    size = np.dtype(dtype).itemsize
    for buffer in (bytes(9 * size + 1), bytearray(9 * size + 1)):
        array = np.frombuffer(buffer, np.uint8)[1:].view(dtype)
        assert not array.flags.aligned
        for value in (array, [array], {"k": (array,)}):
            stored = blob(value).lookup("x")
            while not isinstance(stored, np.ndarray):
                stored = stored["k"] if isinstance(stored, dict) else stored[0]
            assert stored.flags.aligned
            assert stored.dtype == dtype


def test_two_blobs_that_map_one_file_come_apart(tmp_path):
    mapped = np.memmap(tmp_path / "map", "u1", "w+", shape=(4,))
    workspace = Workspace("a")
    for name in "xy":
        workspace.put(name, settle([mapped]))
    workspace.take("x")[:] = 7
    assert list(workspace.lookup("y")) == [0, 0, 0, 0]


def test_a_read_only_map_and_bytes_are_not_read_in(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(4096))
    for array in (np.asarray(np.memmap(path, mode="r")), np.frombuffer(path.read_bytes())):
        workspace = blob(array)
        assert address(workspace.globals["x"]) == address(array)
        workspace.take("x")[0] = 1
        assert array[0] == 0
        first, second, same = blob([array, array[...], array]).lookup("x")
        assert first is same
        assert not np.shares_memory(first, second)  # a save takes what lies at one place for one


# ---- containers

CONTAINERS = [
    [1, [2, "a"]],
    {"a": 1, "b": [1, 2]},
    (1, [2]),
    Pair(1, [2]),
    {1, 2},
    frozenset({1, (2, 3)}),
    bytearray(b"ab"),
    collections.deque([1, [2]], 5),
    collections.OrderedDict(a=[1]),
    collections.defaultdict(list, {1: [2]}),
    collections.Counter("aab"),
    np.array([1, [2], None], object),
    np.array([(1, [2])], [("a", "i4"), ("b", object)]),
    np.zeros(1, [("a", "i4")])[0],
    [np.float32(1), np.str_("x"), np.datetime64(1, "s"), ..., range(3)],
    [dt.datetime(2020, 1, 1, tzinfo=dt.UTC), Phase.COLD, int, np.dtype(">f8"), len],
    {"w": np.arange(3), "deep": [{"v": np.ones((2, 2), ">i2")}]},
]


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: np.array([[1], None], object), lambda seen: seen[0].append(2)),
        (lambda: np.array([np.ones(3), 1], object), lambda seen: seen[0].fill(2)),
        (lambda: collections.deque([[1]]), lambda seen: seen[0].append(2)),
        (lambda: collections.deque([[1]], maxlen=3), lambda seen: seen.append(2)),
        (lambda: collections.defaultdict(list, a=[1]), lambda seen: seen["a"].append(2)),
        (lambda: collections.defaultdict(list), lambda seen: seen["a"]),
        (lambda: collections.OrderedDict(a=[1]), lambda seen: seen["a"].append(2)),
        (lambda: collections.OrderedDict(a=np.ones(3)), lambda seen: seen["a"].fill(2)),
        (lambda: collections.Counter("aab"), lambda seen: seen.update("a")),
        (lambda: Pair("a", [1]), lambda seen: seen.two.append(2)),
        (lambda: Pair("a", np.ones(3)), lambda seen: seen.two.fill(2)),
        (lambda: [bytearray(b"abc")], lambda seen: seen[0].extend(b"d")),
        (lambda: ({1, 2},), lambda seen: seen[0].add(3)),
    ],
)
def test_a_reader_cannot_change_what_a_container_holds(make, change):
    workspace = blob(make())
    with contextlib.suppress(ValueError):  # of an array: it is read-only
        change(workspace.lookup("x"))
    assert_identical(make(), workspace.lookup("x"), "")


def test_only_the_array_that_somebody_refers_to_is_copied():
    workspace = blob([np.zeros(3), np.zeros(3)])
    kept = workspace.lookup("x")[0]
    places = [address(part) for part in workspace.globals["x"].parts]
    taken = workspace.take("x")
    assert [address(array) == place for array, place in zip(taken, places, strict=True)] == [
        False,
        True,
    ]
    taken[0][0] = 1
    assert kept[0] == 0


@pytest.mark.parametrize("wrap", WRAPS, ids=["array", "its only view", "dict"])
def test_a_blob_that_a_task_has_left_unfinished_can_still_be_read_and_taken(wrap):
    workspace = blob(wrap(np.zeros(2)))
    array_in(workspace.take("x"))[0] = 1
    seen = array_in(workspace.lookup("x"))
    assert list(seen) == [1, 0]
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 2
    del seen
    array_in(workspace.take("x"))[1] = 1  # of another task, later
    put_back(workspace)
    assert list(array_in(workspace.lookup("x"))) == [1, 1]


# ---- captures


ARRAYS = [
    *(np.zeros((2, 3), dtype) for dtype in (">i4", ">M8[s]", ">c16", "<f8")),
    *(np.asfortranarray(np.ones((2, 3), ">f4")), np.ones((2, 4), ">f4")[:, ::2]),
    np.array(["a", "bb"], np.dtypes.StringDType()),
    np.zeros(2, [("a", "i4"), ("b", ">f8", (2,))]),
    *(np.array(5), np.empty((0, 3)), np.zeros((), ">i4")),
]


@pytest.mark.parametrize("value", [*CONTAINERS, *ARRAYS, 5, "text"], ids=repr)
def test_a_value_is_kept_read_and_captured_as_it_is_and_crosses_as_it_is(value):
    workspace = blob(value)
    first, second = workspace.lookup("x"), workspace.lookup("x")
    assert_identical(value, first, "")
    assert_identical(value, second, "")
    if not isinstance(value, frozenset | int | str):
        assert first is not value
        assert first is not second
    captured = capture(workspace.globals["x"])
    frames = [bytes(frame) for frame in to_frames(captured)]
    taken = workspace.take("x")
    if isinstance(taken, dict):
        taken.clear()
    for seen in (view(captured), view(received(frames)), view(received(frames))):
        assert_identical(value, seen, "")


def test_objects_are_captured_by_a_pickle():
    model = collections.UserDict(n=[1])
    captured = capture(settle([{"m": model}]))
    assert isinstance(captured, Pickled)
    first, second = view(captured), view(captured)
    model["n"].append(2)
    first["m"]["n"].append(3)
    assert second["m"]["n"] == [1]


def test_what_arrives_is_read_only_since_its_readers_share_it():
    def make():
        return np.zeros(6)[::2]  # travels inside the pickle, as it is not contiguous

    for stored in (settle([np.zeros(3)]), settle([[np.zeros(3)]]), settle([make()])):
        frames = [bytearray(frame) for frame in to_frames(stored)]
        arrived = received(frames)
        for seen in (view(arrived), view(arrived)):
            array = seen[0] if isinstance(seen, list) else seen
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1


@pytest.mark.parametrize("value", [lambda: 1, memoryview(b"abc")])
def test_what_cannot_be_pickled_is_an_error_that_says_what_to_do(value):
    if callable(value):
        value = (item for item in ())
    with pytest.raises(NotPicklableError, match="Store it in a blob"):
        capture(settle([[value]]))


def test_no_value_imports_torch():
    code = "import sys, jobrunner.workspace as w; w.settle([[1, [2]]]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- versions


def test_versions_count_what_sets_or_updates_a_blob():
    workspace = blob(1)
    before = workspace.versions["x"]
    workspace.lookup("x")
    assert workspace.versions["x"] == before
    workspace.put("x", 2)
    after_put = workspace.versions["x"]
    workspace.take("x")
    assert before < after_put < workspace.versions["x"]


def test_an_equal_version_proves_only_what_holds_no_object():
    for value in (*CONTAINERS[:-2], 5, np.zeros(2), {"w": np.zeros(2)}, [Phase.COLD, int]):
        assert blob(value).is_provable("x"), value
    for value in (Model(), [Model()], {"w": np.zeros(2), "m": Model()}):
        assert not blob(value).is_provable("x")
