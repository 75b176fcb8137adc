"""pandas objects come back as they were, without pickle."""

from __future__ import annotations

import datetime as dt
import importlib.util
import itertools
import zoneinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobrunner import CheckpointError, DefinitionError
from jobrunner.checkpoint import encode_blobs
from jobrunner.run.diff import compare_values
from jobrunner.testing import assert_identical
from tests.stores import decode_forged, write_store, written_and_read

pd = pytest.importorskip("pandas", "2.2")

PARIS = zoneinfo.ZoneInfo("Europe/Paris")
ZONES = [None, dt.UTC, PARIS, dt.timezone(dt.timedelta(hours=5, minutes=45), "here")]


def describe(value: Any) -> list[Any]:
    """All that must stay the same: types, dtypes, bits, blocks, names, frequencies, flags."""
    about: list[Any] = [type(value), getattr(value, "attrs", None)]
    if isinstance(value, pd.DataFrame):
        places = [block.mgr_locs.as_array for block in value._mgr.blocks]
        blocks = [describe(block.values) for block in value._mgr.blocks]
        flag = value.flags.allows_duplicate_labels
        return [*about, describe(value.index), describe(value.columns), places, blocks, flag]
    if isinstance(value, pd.Series):
        flag = value.flags.allows_duplicate_labels
        return [*about, value.name, describe(value.index), describe(value.array), flag]
    if isinstance(value, pd.MultiIndex):
        levels = [describe(level) for level in value.levels]
        return [*about, list(value.names), levels, [np.asarray(code) for code in value.codes]]
    if isinstance(value, pd.RangeIndex):
        return [*about, value.name, repr(value)]
    if isinstance(value, pd.Index):
        return [*about, value.name, getattr(value, "freq", None), describe(value.array)]
    about += [value.dtype, repr(value.dtype)]
    if isinstance(value, pd.Categorical):
        return [*about, describe(value.categories), value.codes]
    if isinstance(value, np.ndarray) and value.dtype != object:
        return [*about, value]
    if hasattr(value, "asi8"):
        return [*about, value.asi8, type(getattr(value, "tz", None))]
    items = np.asarray(value, object).ravel().tolist()
    return [*about, [type(item) for item in items], repr(items)]


def assert_same(expected: Any, found: Any) -> None:
    assert_identical(describe(expected), describe(found))


MOMENTS = np.array([-(10**9), np.iinfo(np.int64).min, 10**9])  # the middle one is NaT
STORAGES = ["python", "pyarrow"] if importlib.util.find_spec("pyarrow") else ["python"]


def columns() -> list[Any]:
    """An array of each kind, with three items."""
    objects = [["a", "", None], ["b", float("nan"), pd.NA], [pd.NaT, 1, True]]
    categories = pd.Index(["x", 7, "y"], dtype=object)
    times = [pd.DatetimeIndex(MOMENTS.view(f"M8[{unit}]")) for unit in ("s", "ms", "us", "ns")]
    return [
        *(np.array([1, 0, 1], dtype) for dtype in ("f8", "f8", "f4", "i8", "u2", "?", "c16")),
        *(pd.array([1, None, 0], name) for name in ("Int8", "UInt32", "Float64", "boolean")),
        *(pd.array(["é", None, ""], pd.StringDtype(storage)) for storage in STORAGES),
        *(np.array(items, object) for items in objects),
        *(
            pd.Categorical.from_codes([1, -1, 0], categories=categories, ordered=is_ordered)
            for is_ordered in (False, True)
        ),
        *(time.array for time in times),
        *(times[2].tz_localize("UTC").tz_convert(zone).array for zone in ZONES[1:]),
        *(pd.TimedeltaIndex(MOMENTS.view(f"m8[{unit}]")).array for unit in ("s", "ns")),
    ]


def indexes() -> list[Any]:
    """An index of each kind, with three items."""
    dates = [
        pd.date_range("2024-03-28", periods=3, freq=freq, tz=zone, name=("t", 1))
        for freq, zone in zip(["D", "h", "ME", "2min"], ZONES, strict=True)
    ]
    levels = [*dates[:2], pd.Index([1, 1, 2], name=5), pd.Index(["a", None, "b"])]
    return [
        *(pd.RangeIndex(-5, -5 + 3 * step, step, name="n") for step in (1, -3, 2)),
        *dates,
        *(pd.MultiIndex.from_arrays(pair) for pair in itertools.combinations(levels, 2)),
        *(pd.Index(column, column.dtype, name=7) for column in columns()),
    ]


def frames() -> list[Any]:
    """Of columns of all kinds, as they are and in blocks, with different indexes and flags."""
    mixed = pd.DataFrame(index=range(3))
    for i, column in enumerate(columns()):
        mixed[i] = pd.Series(column, dtype=column.dtype)
    mixed.index = indexes()[1]
    mixed.attrs = {"unit": "m", "more": [1, {"x": 2.5}]}
    in_blocks = mixed.copy()
    in_blocks.flags.allows_duplicate_labels = False
    square = pd.DataFrame(np.eye(3), index=indexes()[4])
    square.columns = pd.MultiIndex.from_arrays([list("aab"), [1, 2, 1]])
    return [mixed, in_blocks, square, mixed[:0], mixed[[]], pd.DataFrame()]


def test_frames_series_indexes_and_arrays_come_back_as_they_were() -> None:
    arrays = columns()
    series = [
        pd.Series(array, index, array.dtype, name=("s", 1))
        for array, index in zip(arrays, indexes(), strict=False)
    ]
    saved = [*frames(), *series, *(one[:0] for one in series), *indexes(), *arrays]
    for expected, found in zip(saved, written_and_read(saved), strict=True):
        assert_same(expected, found)


SCALARS = [
    pd.Timestamp("2024-10-27 02:30").tz_localize("UTC").tz_convert(PARIS), pd.Timestamp(5, unit="s"),
    pd.Timestamp("2024-01-01", tz=dt.UTC), pd.Timedelta(3, "ns"), pd.Timedelta("1D").as_unit("s"),
    pd.NA, pd.NaT,
]  # fmt: skip


def test_scalars_come_back_as_they_were() -> None:
    for value, found in zip(SCALARS, written_and_read(SCALARS), strict=True):
        assert (type(found), repr(found)) == (type(value), repr(value))
        assert found is value or found == value
        for name in ("unit", "tz"):
            assert_identical(getattr(value, name, None), getattr(found, name, None))


def test_blobs_may_share_memory_of_frames_which_copy_on_write(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": np.arange(3.0), "b": np.arange(3.0)})
    found = write_store(tmp_path, encode_blobs("n", {"x": [frame, frame["a"]], "y": frame[["b"]]}))
    (whole, column), part = found.load()["x"], found.load()["y"]
    column.iloc[0] = 9
    part.iloc[0, 0] = 9
    assert_same(frame, whole)
    with pytest.raises(DefinitionError, match="contain the same DataFrame object"):
        encode_blobs("n", {"x": frame, "y": [frame]})


class Mine(pd.DataFrame):
    pass


def business() -> Any:
    days = pd.offsets.CustomBusinessDay(holidays=["2024-01-02"])
    return pd.date_range("2024-01-01", periods=2, freq=days)


NOT_EXACT = [
    (business, "its frequency <CustomBusinessDay> would be lost; set index.freq = None"),
    (lambda: Mine({"a": [1]}), "there is no codec for its type"),
    (
        lambda: pd.Series(pd.period_range("2024", periods=2, freq="M")),
        "no codec for its dtype period",
    ),
    (lambda: pd.DataFrame({"a": [object()]}), "item blocks/0/values/1/0: object cannot"),
    (lambda: pd.DataFrame({"a": [1]}, index=[Path]), "item index/values/1/0"),
]


@pytest.mark.parametrize(("make", "why"), NOT_EXACT)
def test_what_is_not_exact_is_refused_by_name(make: Any, why: str) -> None:
    with pytest.raises(DefinitionError, match=why):
        encode_blobs("n", {"x": make()})


def frame_parts(**changes: Any) -> dict[str, Any]:
    axis = pd.RangeIndex(2)
    block = {"columns": [0, 1], "values": np.ones((2, 2))}
    about = {"attrs": {}, "duplicates": True}
    return {"blocks": [block], "index": axis, "columns": axis, **about, **changes}


FORGED = [
    ("DataFrame", frame_parts(blocks=[{"columns": [0, 9], "values": np.ones((2, 2))}])),
    ("DataFrame", frame_parts(blocks=[{"columns": [0, 0], "values": np.ones((2, 2))}])),
    ("DataFrame", frame_parts(blocks=[{"columns": [0], "values": np.ones((1, 2))}])),
    ("DataFrame", frame_parts(blocks=[{"columns": [0, 1], "values": np.ones((2, 3))}])),
    ("DataFrame", frame_parts(blocks=[{"columns": [0, 1], "values": np.ones(2)}])),
    ("DataFrame", frame_parts(index=[0, 1])),
    ("Index", {"levels": [pd.RangeIndex(1)], "codes": [np.array([5])], "names": ["a"]}),
    ("Index", {"values": {"kind": "categorical", "values": np.array([7]), "categories": pd.Index([1]), "ordered": False}, "name": None}),
    ("Index", {"values": {"kind": "time", "values": np.ones(2), "zone": None}, "name": None}),
    ("Index", {"values": {"kind": "time", "values": np.ones(2, "M8[s]"), "zone": "../../etc/passwd"}, "name": None}),
    ("Index", {"values": {"kind": "FloatingArray", "values": np.ones(2), "missing": np.ones(1, bool)}, "name": None}),
    ("Index", {"values": {"kind": "system"}, "name": None}),
    ("Series", {"values": np.ones(3), "index": pd.RangeIndex(2), "name": None, "attrs": {}, "duplicates": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "parts"), FORGED)
def test_forged_parts_are_refused(name: str, parts: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=f"pandas cannot make pandas.{name} of it"):
        decode_forged(f"pandas.{name}", parts)


def test_what_is_hidden_below_missing_values_makes_no_difference() -> None:
    missing = np.array([False, True])
    one, other = (
        pd.Series(pd.arrays.IntegerArray(np.array([1, hidden]), missing)) for hidden in (7, 9)
    )
    assert not list(compare_values(one, other))
    assert_same(one, written_and_read(other))
