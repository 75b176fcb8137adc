"""pandas objects come back as they were, without pickle."""

from __future__ import annotations

import datetime as dt
import importlib.util
import zoneinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from jobrunner import CheckpointError, DefinitionError
from jobrunner.checkpoint import encode_blobs
from jobrunner.run.diff import compare_values
from jobrunner.testing import assert_identical
from tests.sampling import examples
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


TEXTS = st.text(max_size=5)
MOMENTS = st.integers(-(10**9), 10**9) | st.just(np.iinfo(np.int64).min)


@st.composite
def columns(draw: Any, length: int) -> Any:
    def many(items: Any) -> list[Any]:
        return draw(st.lists(items, min_size=length, max_size=length))

    kind = draw(st.sampled_from(KINDS))
    if kind == "numpy":
        dtype = draw(st.sampled_from(["f8", "f4", "i8", "u2", "?", "c16"]))
        return np.array(many(st.integers(0, 1)), dtype)
    if kind == "nullable":
        name = draw(st.sampled_from(["Int8", "UInt32", "Float64", "boolean"]))
        return pd.array(many(st.none() | st.integers(0, 1)), dtype=name)
    if kind == "text":
        storage = draw(st.sampled_from(["python", "pyarrow"] if HAS_ARROW else ["python"]))
        return pd.array(many(st.none() | TEXTS), dtype=pd.StringDtype(storage))
    if kind == "object":
        gaps = st.none() | st.just(float("nan")) | st.just(pd.NA) | st.just(pd.NaT)
        mixed = draw(st.sampled_from([TEXTS, TEXTS | gaps, TEXTS | st.integers() | st.booleans()]))
        array = np.empty(length, object)
        array[:] = many(mixed)
        return array
    if kind == "category":
        categories = draw(st.lists(TEXTS | st.integers(), unique=True, min_size=1, max_size=4))
        codes = many(st.integers(-1, len(categories) - 1))
        return pd.Categorical.from_codes(
            codes, categories=pd.Index(categories, dtype=object), ordered=draw(st.booleans())
        )
    unit = draw(st.sampled_from(["s", "ms", "us", "ns"]))
    if kind == "moment":
        moments = pd.DatetimeIndex(np.array(many(MOMENTS), "i8").view(f"M8[{unit}]"))
        zone = draw(st.sampled_from(ZONES))
        return (moments if zone is None else moments.tz_localize("UTC").tz_convert(zone)).array
    return pd.TimedeltaIndex(np.array(many(MOMENTS), "i8").view(f"m8[{unit}]")).array


KINDS = ["numpy", "numpy", "nullable", "text", "object", "category", "moment", "duration"]
HAS_ARROW = importlib.util.find_spec("pyarrow") is not None
NAMES = st.none() | TEXTS | st.integers() | st.tuples(TEXTS, st.integers())


@st.composite
def indexes(draw: Any, length: int) -> Any:
    name = draw(NAMES)
    kind = draw(st.sampled_from(["range", "plain", "dates", "multi"]))
    if kind == "range":
        start, step = draw(st.integers(-5, 5)), draw(st.sampled_from([1, -3, 2]))
        return pd.RangeIndex(start, start + step * length, step, name=name)
    if kind == "dates":
        freq = draw(st.sampled_from(["D", "h", "ME", "W-WED", "2min"]))
        zone = draw(st.sampled_from(ZONES))
        return pd.date_range("2024-03-28", periods=length, freq=freq, tz=zone, name=name)
    if kind == "multi":
        arrays = [draw(indexes(length).filter(lambda it: it.nlevels == 1)) for _ in range(2)]
        return pd.MultiIndex.from_arrays(arrays, names=[draw(NAMES), draw(NAMES)])
    return pd.Index(draw(columns(length)), name=name)


@st.composite
def frames(draw: Any) -> Any:
    length, width = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    values = [draw(columns(length)) for _ in range(width)]
    index = draw(indexes(length))
    frame = pd.DataFrame(dict(enumerate(values)), index=index)
    if draw(st.booleans()):
        frame = frame.copy()  # consolidates
    frame.columns = draw(indexes(width))
    if draw(st.booleans()) and index.is_unique and frame.columns.is_unique:
        frame.flags.allows_duplicate_labels = False
    if draw(st.booleans()):
        frame.attrs = {"unit": "m", "more": [1, {"x": 2.5}]}
    return frame


@given(frames())
@settings(max_examples=examples(25))
def test_any_frame_comes_back_as_it_was(frame: Any) -> None:
    assert_same(frame, written_and_read(frame))


@settings(max_examples=examples(25))
@given(st.integers(0, 4).flatmap(lambda n: st.tuples(columns(n), indexes(n), NAMES)))
def test_any_series_comes_back_as_it_was(parts: Any) -> None:
    values, index, name = parts
    dtype = object if values.dtype == object else None
    series = pd.Series(values, index=index, name=name, dtype=dtype)
    found = written_and_read({"series": series, "index": index, "values": series._values})
    assert_same(series, found["series"])
    assert_same(index, found["index"])
    assert_same(series._values, found["values"])


def test_a_frame_is_stored_in_its_blocks_which_other_readers_see(tmp_path: Path) -> None:
    frame = pd.DataFrame(np.arange(12.0).reshape(4, 3), columns=list("abc"))
    frame["n"] = np.arange(4)
    write_store(tmp_path, encode_blobs("n", {"x": frame}))
    group = zarr.open_group(tmp_path / "n.0", mode="r")
    assert group["x/blocks/0/values"][:].tolist() == frame[["a", "b", "c"]].to_numpy().T.tolist()
    assert group["x/blocks/1/values"][:].tolist() == [[0, 1, 2, 3]]


SCALARS = [
    pd.Timestamp("2024-10-27 02:30").tz_localize("UTC").tz_convert(PARIS), pd.Timestamp(5, unit="s"),
    pd.Timestamp("2024-01-01", tz=dt.UTC), pd.Timedelta(3, "ns"), pd.Timedelta("1D").as_unit("s"),
    pd.NA, pd.NaT,
]  # fmt: skip


@pytest.mark.parametrize("value", SCALARS)
def test_scalars_come_back_as_they_were(value: Any) -> None:
    (found,) = written_and_read([value])
    assert (type(found), repr(found)) == (type(value), repr(value))
    assert found is value or found == value
    for name in ("unit", "tz"):
        assert_identical(getattr(found, name, None), getattr(value, name, None))


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
