"""Names of axes and coordinates, as users declare them and other readers see them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray

from jobrunner import (
    Blob,
    DefinitionError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Session,
    Task,
    epoch_limiter,
)

WORDS = np.array(["n", "mid", "s"])
BLOBS = {
    "wind": (np.asfortranarray(np.arange(6.0).reshape(2, 3)), {"dims": ("time", "y"), "coords": ("lat", "place")}),
    "time": (np.array(["2020-01-01", "2020-01-02"], "M8[D]"), {"dims": "time"}),
    "lat": (np.array([50.0, 51.0, 52.0]), {"dims": ["y"], "chunks": 2}),
    "place": (WORDS, {"dims": ("y",)}),
    "level": (np.array(850.0), {"dims": ()}),
    "other": (np.arange(4), {}),
}  # fmt: skip


def run(path: Path, blobs: dict[str, Any]) -> Path:
    with Job("dims") as job, job.init_group:
        for name, (value, options) in blobs.items():
            Task(
                lambda value=value: value,
                outputs=Blob(name, **options),
                node="n",
                name=f"of {name}",
            )
    epoch_limiter(job, 1)
    with Session.local(workers=1, processes=False) as session:
        JobRunner(job, MultiNodeCheckpointManager(path)).run(session)
    return path / "n.1"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("dims") / "k", BLOBS)


def test_axes_have_the_names_that_were_given_and_else_their_lengths(store: Path) -> None:
    found = {
        name: json.loads((store / name / "zarr.json").read_text())["dimension_names"]
        for name in BLOBS
    }
    assert found == {
        "wind": ["time", "y"],
        "time": ["time"],
        "lat": ["y"],
        "place": ["y", "_dim_3"],
        "level": [],
        "other": ["_dim_4"],
    }


def test_xarray_finds_dimensions_and_coordinates(store: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = xarray.open_zarr(store, chunks=None)
    assert found["wind"].dims == ("time", "y")
    assert set(found.coords) == {"time", "lat", "place"}
    # The characters of places are one axis more.
    assert set(found["wind"].coords) == {"time", "lat"}
    assert found["wind"].sel(time="2020-01-02").values.tolist() == [3, 4, 5]
    assert (found["wind"] * found["lat"]).dims == ("time", "y")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": ("x", 3)}, "must be a str"),
        ({"dims": ("x", "x")}, "different names"),
        ({"dims": ("_dim_3",)}, "begin with '_'"),
        ({"dims": ("x/y",)}, "contains a '/'"),
        ({"coords": "lat"}, "requires dims"),
        ({"dims": "x", "coords": "a b"}, "no space"),
        ({"dims": "x", "chunks": (2, 2)}, "have 2 axes, dims=.* 1"),
        ({"dims": "x", "transient": True}, "omit .*dims"),
    ],
)
def test_what_cannot_be_names_of_axes_is_refused_where_it_is_written(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DefinitionError, match=message):
        Blob("w", **options)


@pytest.mark.parametrize("lat", [{}, {"dims": "z"}], ids=["no dims", "other dims"])
def test_coordinates_must_lie_along_the_axes_that_they_locate(lat: dict[str, Any]) -> None:
    with Job("dims") as job, job.init_group:
        Task(np.ones, outputs=Blob("w", dims="x", coords="lat"), kwargs={"shape": 3}, node="n")
        Task(np.ones, outputs=Blob("lat", **lat), kwargs={"shape": 3}, node="n", name="lat")
    with pytest.raises(DefinitionError, match="'w' of node 'n' has coords='lat'"):
        job.compile()


@pytest.mark.parametrize(
    ("blobs", "message"),
    [
        ({"w": (np.ones((2, 2)), {"dims": "x"})}, r"dims=\('x',\) expect an array of 1 axes.*2 axes"),
        ({"w": (7, {"dims": ()})}, "of 0 axes, but the blob is made of 0 arrays"),
        ({"w": ([np.ones(2)], {"dims": "x"})}, "inside a container"),
        (
            {"w": (np.ones((2, 3)).T, {"dims": ("x", "y")}), "v": (np.ones(2), {"dims": "x"})},
            "'x' has 3 items in the blob 'w' and 2 in 'v'",
        ),
    ],
)  # fmt: skip
def test_values_that_do_not_have_these_axes_are_refused_before_anything_is_written(
    tmp_path: Path, blobs: dict[str, Any], message: str
) -> None:
    with pytest.raises(DefinitionError, match=message):
        run(tmp_path / "k", blobs)
    assert not list(tmp_path.glob("k/n.*"))


def test_many_alike_arrays_with_names_are_not_stacked(tmp_path: Path) -> None:
    store = run(tmp_path / "k", {f"w{i}": (np.ones(3), {"dims": "x"}) for i in range(70)})
    assert not (store / "_stacks").exists()
    assert len(list(store.glob("w*/zarr.json"))) == 70
