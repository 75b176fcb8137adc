"""Read the arrays of a store by readers that are not ours."""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore
import xarray
import zarr

from tests.readers.kinds import ARRAYS, expected, numbers

HERE = Path(__file__).parent


class MissingReaderError(Exception):
    """A reader is not installed; the message says what it needs."""


def by_zarr(store: Path, paths: Collection[str]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the data type of texts is young
        group = zarr.open_group(store, mode="r")
        return {path: _plain(group[path][...]) for path in paths}


def by_xarray(store: Path, paths: Collection[str]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = xarray.open_zarr(store, chunks=None)
        tree = xarray.open_datatree(store, engine="zarr", chunks=None)
        found = {path: (tree if "/" in path else alone)[path].values for path in paths}
    for path, array in found.items():
        if array.dtype.kind in "mM":  # with another unit
            document = json.loads((store / path / "zarr.json").read_text())
            found[path] = array.astype(document["attributes"]["/jobrunner"]["dtype"])
    return {path: _plain(array) for path, array in found.items()}


def by_tensorstore(store: Path, paths: Collection[str]) -> dict[str, Any]:
    def read(path: str) -> Any:
        about = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{store}/{path}/"}}
        return _plain(tensorstore.open(about, read=True).result().read().result())

    return {path: _refusing(read, path) for path in paths}


def by_zarrs(store: Path, paths: Collection[str]) -> dict[str, Any]:
    if importlib.util.find_spec("zarrs") is None:
        raise MissingReaderError("pip install zarrs")
    # It would give what it cannot read to Zarr-Python.
    options: Any = {
        "codec_pipeline.path": "zarrs.ZarrsCodecPipeline",
        "codec_pipeline.strict": True,
    }
    with zarr.config.set(options):
        return {
            path: _refusing(lambda at: _plain(zarr.open_array(store / at, mode="r")[...]), path)
            for path in paths
        }


def by_zarrita(store: Path, paths: Collection[str]) -> dict[str, Any]:
    directory = os.environ.get("ZARRITA", "")
    if not shutil.which("node") or not Path(directory, "node_modules", "zarrita").is_dir():
        raise MissingReaderError("npm install zarrita, and name the directory by ZARRITA")
    command = ["node", "--input-type=module", "-", str(store), *paths]
    return _run(command, directory, (HERE / "zarrita.mjs").read_text())


def by_gdal(store: Path, paths: Collection[str]) -> dict[str, Any]:
    library = os.environ.get("LIBGDAL")
    found = importlib.util.find_spec("pyogrio")
    if library is None and found is not None and found.origin is not None:
        library = next(iter(glob.glob(f"{Path(found.origin).parent}.libs/libgdal*")), None)
    if library is None:
        raise MissingReaderError("pip install pyogrio, or name libgdal.so by LIBGDAL")
    return _run([sys.executable, str(HERE / "gdal.py"), library, str(store), *paths], HERE)


READERS: Mapping[str, Callable[[Path, Collection[str]], dict[str, Any]]] = {
    "Zarr-Python": by_zarr,
    "xarray": by_xarray,
    "TensorStore": by_tensorstore,
    "zarrs": by_zarrs,
    "zarrita.js": by_zarrita,
    "GDAL": by_gdal,
}


def _run(command: list[str], directory: str | Path, script: str = "") -> dict[str, Any]:
    done = subprocess.run(
        command, input=script, cwd=directory, capture_output=True, text=True, timeout=100
    )
    if done.returncode:
        raise AssertionError(done.stderr)
    found: dict[str, Any] = json.loads(
        done.stdout, object_hook=lambda it: int(it["int"]) if "int" in it else it
    )
    return found


def _refusing(read: Callable[[str], Any], path: str) -> Any:
    try:
        return read(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _plain(array: Any) -> Any:
    return numbers(np.asarray(array))


def compare(reader: str, store: Path) -> dict[str, str]:
    """Read the whole store; return what is wrong with which arrays."""
    wanted = expected(store)
    found = READERS[reader](store, list(wanted))
    wrong: dict[str, str] = {}
    for path, value in wanted.items():
        if isinstance(found[path], str):
            wrong[path] = found[path]
        elif found[path] != value:
            wrong[path] = f"misreads: {found[path]}"
    return wrong


def cell(kind: str, wrong: Mapping[str, str]) -> str:
    """Return the cell of the table for a kind of array and a reader."""
    read = [name for name in ARRAYS[kind] if name not in wrong]
    if len(read) == len(ARRAYS[kind]):
        return "yes"
    if any(wrong.get(name, "").startswith("misreads") for name in ARRAYS[kind]):
        return "not all"
    return f"only {', '.join(read)}" if read else "no"
