"""Values are compared to the bit in all that a save records, but not in array padding."""

import numpy as np
import pytest

from jobrunner.run.diff import compare_values

ALIGNED = np.dtype([("a", "i1"), ("b", "f8")], align=True)
NESTED = np.dtype([("c", "i1"), ("d", ALIGNED, 2)], align=True)


def garbled(array, byte):
    """The same values, with other bytes in the padding."""
    memory = np.full(array.nbytes, byte, np.uint8)
    garbled = memory.view(array.dtype).reshape(array.shape)
    fill(garbled, array)
    return garbled


def fill(target, source):
    if source.dtype.names is not None:
        for name in source.dtype.names:
            fill(target[name], source[name])
    elif source.dtype.char == "G":
        fill(target.real, source.real)
        fill(target.imag, source.imag)
    elif source.dtype.char == "g" and np.finfo(source.dtype).nmant == 63:
        significant = np.dtype({"names": ["v"], "formats": ["V10"], "itemsize": source.itemsize})
        target.view(significant)["v"] = source.view(significant)["v"]
    else:
        target[...] = source


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(5, ALIGNED),
        np.ones((2, 3), NESTED),
        np.arange(5, dtype=np.longdouble),
        np.full(3, complex(-0.0, np.nan), np.clongdouble),
        np.ones(4, [("x", np.longdouble), ("y", "i2")]),
    ],
    ids=["fields", "nested", "longdouble", "clongdouble", "longdouble field"],
)
def test_array_padding_makes_no_difference(array):
    one, other = garbled(array, 0x11), garbled(array, 0x77)
    assert one.tobytes() != other.tobytes() or np.finfo(np.longdouble).nmant != 63
    assert list(compare_values(one, other)) == []
    assert list(compare_values({"w": [one]}, {"w": [other]})) == []


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1, 1.0, "type: int and float"),
        (np.zeros(2), np.zeros(3), "shape: (2,) and (3,)"),
        (np.zeros(2), np.zeros(2, np.float32), "dtype: float64 and float32"),
        ("a", "b", "value: 'a' and 'b'"),
        ([1], [1, 2], "length: 1 and 2"),
        ({"x": 1}, {"y": 1}, "only in A"),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}, "order of keys"),
        (0.0, -0.0, "value: 0.0 and -0.0"),
        (0.5, float("nan"), "value: 0.5 and nan"),
        (np.array([0.0]), np.array([-0.0]), "elements"),
        (np.array([np.nan]), -np.array([np.nan]), "elements"),
        (np.longdouble(0.0), np.longdouble(-0.0), "value"),
        (np.ones(2, ALIGNED), np.zeros(2, ALIGNED), "elements"),
        (np.zeros((2, 3)), np.zeros((2, 3), order="F"), "order"),
        ([(1, 2)], [(1, 2, 3)], "length: 2 and 3"),
        ([(1, 2)], [[1, 2]], "type: tuple and list"),
        (np.array(["a", "b"]), np.array(["a", "c"]), "elements"),
        (10**400, 10**400 + 1, "value: 1000000000000000000000000000000000000... and"),
    ],
)
def test_every_kind_of_difference_is_named(one, other, expected):
    assert expected in "; ".join(found["what"] for found in compare_values(one, other))
    assert list(compare_values(one, one)) == []
