"""Values of other libraries, of each module that saves them."""

from __future__ import annotations

import datetime as dt
import zoneinfo
from typing import Any

import numpy as np

PARIS = zoneinfo.ZoneInfo("Europe/Paris")


def pandas_values() -> list[Any]:
    """A table, a series, indexes, an array and scalars."""
    import pandas as pd

    days = pd.date_range("2024-03-30", periods=3, freq="D", tz=PARIS, unit="ns")
    columns = {
        "n": np.array([1, 2, 3], "i4"),
        "x": [0.5, np.nan, -0.0],
        "text": pd.Series(["a", "é", ""], days, object),
        "kind": pd.Categorical.from_codes([0, 1, -1], pd.Index([10, 20]), ordered=True),
        "gaps": pd.array([1, None, 3], "Int16"),
    }
    frame = pd.DataFrame(columns, index=days)
    frame.columns = pd.Index(list(columns), dtype=object, name="of")
    frame.attrs["unit"] = "m"
    return [
        frame,
        pd.Series([True, False], pd.RangeIndex(2), name="flags"),
        pd.MultiIndex.from_arrays([[1, 1, 2], [0.5, 1.5, 0.5]], names=["i", "j"]),
        pd.array([True, None], "boolean"),
        pd.Timestamp("2024-10-27 00:30", tz=dt.UTC).tz_convert(PARIS),
        pd.Timedelta(-5, "s"),
        pd.NA,
        pd.NaT,
    ]


def scipy_values() -> list[Any]:
    """Sparse arrays of all kinds of parts, a matrix, and the first of them again."""
    from scipy import sparse

    dense = np.array([[0, 1.5, 0], [-2, 0, 0]])
    made = [sparse.coo_array(dense).asformat(it) for it in ("csr", "coo", "dia")]
    return [*made, sparse.csc_matrix(dense), made[0]]


def xarray_values() -> list[Any]:
    """A dataset and an array."""
    import pandas as pd
    import xarray as xr

    days = pd.date_range("2024-01-01", periods=2, freq="D", unit="ns")
    heat = xr.DataArray(
        np.arange(6, dtype="f4").reshape(2, 3),
        {"day": days, "height": 2.0},
        ["day", "x"],
        name="heat",
        attrs={"unit": "K"},
    )
    data = heat.copy().to_dataset().assign(count=("x", np.arange(3, dtype="i2")))
    return [data, heat]


VALUES = {
    "pandas": pandas_values,
    "scipy.sparse": scipy_values,
    "xarray": xarray_values,
}
