"""Values of other libraries that format 4 wrote are read by every later version."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobrunner import MultiNodeCheckpointManager
from jobrunner.testing import assert_identical
from tests.golden.make_format_4_libraries import VALUES

GOLDEN = Path(__file__).with_name("format_4_libraries")


def assert_same(expected: Any, found: Any) -> None:
    assert type(found) is type(expected)
    library = type(expected).__module__.partition(".")[0]
    if library == "xarray":
        import xarray as xr

        xr.testing.assert_identical(expected, found)
        assert getattr(found, "encoding", None) == getattr(expected, "encoding", None)
    elif library == "scipy":
        assert found.dtype == expected.dtype
        assert_identical(expected.toarray(), found.toarray())
    elif library == "pyarrow":
        # Of an Arrow type, `equals` has no such option.
        is_data = hasattr(expected, "validate")
        if is_data:
            found.validate(full=True)
        has_metadata = hasattr(expected, "metadata") or hasattr(expected, "schema")
        options = {"check_metadata": True} if has_metadata else {}
        assert expected.equals(found, **options)
    else:
        assert_same_of_pandas(expected, found)


def assert_same_of_pandas(expected: Any, found: Any) -> None:
    import pandas as pd

    if isinstance(expected, pd.DataFrame):
        pd.testing.assert_frame_equal(expected, found, check_exact=True, check_flags=True)
        assert found.attrs == expected.attrs
    elif isinstance(expected, pd.Series):
        pd.testing.assert_series_equal(expected, found, check_exact=True)
    elif isinstance(expected, pd.Index):
        pd.testing.assert_index_equal(expected, found, exact=True)
    elif isinstance(expected, pd.api.extensions.ExtensionArray):
        pd.testing.assert_extension_array_equal(expected, found, check_exact=True)
    elif expected is pd.NA or expected is pd.NaT:
        assert found is expected
    else:
        assert found == expected
        assert repr(found) == repr(expected)


@pytest.mark.parametrize("library", VALUES)
def test_every_value_is_what_it_was(library: str) -> None:
    pytest.importorskip(library)
    if library == "xarray":
        pytest.importorskip("pandas")
    found = MultiNodeCheckpointManager(GOLDEN).open(0)["a"].load(f"of {library}")
    expected = VALUES[library]()
    assert len(found) == len(expected)
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)
    if library == "scipy.sparse":
        assert found[0] is found[-1]


def test_the_files_are_whole_and_their_parts_are_read_without_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = MultiNodeCheckpointManager(GOLDEN)
    manager.verify(0)
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    data = manager.open(0)["a"]["of scipy.sparse"][0].parts["data"]
    assert_identical(np.array([1.5, -2]), data)
