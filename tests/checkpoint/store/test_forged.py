"""Forged documents: their digest is right, but jobrunner would not write them.

A digest finds damage, not forgery: an attacker who can write to a directory can write its log too.
Reading such a directory raises an error; it touches no file elsewhere and runs no code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobrunner import CheckpointCorruptError, MultiNodeCheckpointManager
from jobrunner.checkpoint import Directory, copy_epoch
from jobrunner.checkpoint.log.handler import decode_entry, encode_entry
from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.checkpoint.store.document import ROOT_DOCUMENT
from jobrunner.checkpoint.store.layout import LEAST_ALIKE
from jobrunner.checkpoint.store.store_reader import StoreReader
from jobrunner.define.array_options import ArrayOptions
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.workspace import Workspace
from tests.saves import save_epoch

ZSTD = ArrayOptions(({"name": "zstd", "configuration": {"level": 1, "checksum": False}},), (14, 18))
BLOBS = {
    "w": np.arange(12.0).reshape(3, 4),
    "z": np.zeros((40, 40)),
    "t": {"a": [1, (2, np.arange(5))], "b": bytes(2000)},
    **{f"row{i}": np.arange(4.0) + i for i in range(LEAST_ALIKE)},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("forged") / "k"
    manager = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
    manager.run.start(["a"], {})
    workspace = Workspace("a")
    workspace.globals.update(BLOBS)
    save_epoch(manager, Position(0), {"a": workspace}, options={"a": {"z": ZSTD}})
    manager.run.end()
    return path


@pytest.fixture
def forge(saved: Path) -> Iterator[Callable[[Callable[[dict[str, Any]], object]], Path]]:
    """Edits the document, and its digest in the log; restores the directory afterwards."""
    root = saved / "a.0" / ROOT_DOCUMENT
    commit = saved / "_log" / "0000000002.json"
    before = {path: path.read_bytes() for path in saved.glob("**/*") if path.is_file()}

    def change(edit: Callable[[dict[str, Any]], object]) -> Path:
        document = json.loads(before[root])
        edit(document)
        content = json.dumps(document, separators=(",", ":")).encode()
        root.write_bytes(content)
        entry = decode_entry(before[commit], 2, str(commit))
        entry["records"][0]["stores"]["a"]["sha256"] = hashlib.sha256(content).hexdigest()
        commit.write_bytes(encode_entry(entry))
        return saved

    yield change
    for path, content in before.items():
        path.write_bytes(content)


def own(document: dict[str, Any]) -> dict[str, Any]:
    """What jobrunner adds."""
    entry: dict[str, Any] = document["attributes"]["/jobrunner"]
    return entry


def described(document: dict[str, Any], path: str) -> dict[str, Any]:
    """The description of an array."""
    array: dict[str, Any] = document["consolidated_metadata"]["metadata"][path]
    return array


def reader_of(path: Path) -> StoreReader:
    content = (path / "a.0" / ROOT_DOCUMENT).read_bytes()
    return StoreReader(PosixFiles(), str(path), "a.0", hashlib.sha256(content).hexdigest())


def reads(path: Path) -> Iterator[Callable[[], object]]:
    reader = reader_of(path)
    yield reader.load
    yield reader.verify
    yield lambda: reader.load_slice("z", 1, 3, 20)
    yield lambda: reader.load_slice("row3", 0, 1, 2)
    yield lambda: reader.load(["w", "row3"])
    yield lambda: [
        reader.peek(reader.read_document(), name, outline=True) for name in ("w", "t", "row3")
    ]
    yield lambda: [reader.peek(reader.read_document(), name) for name in ("w", "t", "row3")]


def test_a_copy_writes_nothing_outside_of_its_store(forge: Any, tmp_path: Path) -> None:
    def edit(document: dict[str, Any]) -> None:
        metadata = document["consolidated_metadata"]["metadata"]
        metadata["../../elsewhere"] = {"node_type": "group", "zarr_format": 3, "attributes": {}}

    directory = Directory(forge(edit), files=PosixFiles())
    with pytest.raises(CheckpointCorruptError, match="leads out of the store"):
        copy_epoch(directory, Position(0), str(tmp_path / "one" / "two"))
    assert not (tmp_path / "one" / "elsewhere").exists()


@pytest.mark.parametrize("place", [[0, -1], [-1, 0], [0, LEAST_ALIKE], [9, 0], [0], 3, "x"])
def test_a_row_outside_of_its_stack_is_an_error(forge: Any, place: Any) -> None:
    path = forge(lambda document: own(document)["blobs"]["row3"].update(arrays=[place]))
    for read in reads(path):
        with pytest.raises(CheckpointCorruptError, match=ROOT_DOCUMENT):
            read()


def _files(document: dict[str, Any], name: str) -> dict[str, Any]:
    entry: dict[str, Any] = own(document)["blobs"][name]["arrays"][0]
    return entry


def _chunks(document: dict[str, Any], path: str) -> dict[str, Any]:
    configuration: dict[str, Any] = described(document, path)["chunk_grid"]["configuration"]
    return configuration


def _value(document: dict[str, Any]) -> list[Any]:
    items: list[Any] = own(document)["blobs"]["t"]["tree"]["a"]
    return items


def _turn(document: dict[str, Any], order: list[int]) -> None:
    turn = {"name": "transpose", "configuration": {"order": order}}
    described(document, "w")["codecs"].insert(0, turn)


def _widen(document: dict[str, Any], shape: list[int]) -> None:
    described(document, "w").update(shape=shape)
    _chunks(document, "w").update(chunk_shape=shape)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda d: _chunks(d, "w").update(chunk_shape=[-3, 4]), r"`int` >= 1.*chunk_shape\[0\]"),
        (lambda d: _chunks(d, "w").update(chunk_shape=[2, 4]), "expected 2 files, found 1"),
        (lambda d: _chunks(d, "w").update(chunk_shape=[12]), "`chunk_shape` has 1 axes"),
        (lambda d: _files(d, "w").update(path=""), r"length >= 1.*path"),
        (lambda d: _files(d, "w").update(path="../w"), "no document describes an array '../w'"),
        (lambda d: _turn(d, [0, 0]), "does not permute 2 axes"),
        (lambda d: described(d, "w").update(shape=[3, 5]), "expected 2 files, found 1"),
        (lambda d: described(d, "w").update(shape=[2]), "`chunk_shape` has 2 axes"),
        (lambda d: described(d, "w").update(shape=["3", 4]), r"`int`, got `str`.*shape\[0\]"),
        (lambda d: _files(d, "w").update(files=[[96, "x"]]), r"files\[0\]\[1\]"),
        (lambda d: _files(d, "w").update(files=[[97, "0" * 32]]), "a file has 97 bytes"),
        (lambda d: _files(d, "z").update(files=[[0, "0" * 32]] * 9), "a file has 0 bytes"),
        (lambda d: own(d)["blobs"]["z"].update(arrays=[_files(d, "w")]), "is there twice"),
        (lambda d: _widen(d, [1 << 40, 1 << 40]), "does not fit into memory"),
        (lambda d: _files(d, "w").update(more=1), r"unknown field `more`"),
        (lambda d: described(d, "w")["attributes"]["/jobrunner"].pop("dtype"), "field `dtype`"),
        (lambda d: described(d, "w")["attributes"].pop("/jobrunner"), "array 'w'"),
        (lambda d: own(d)["stacks"][0]["files"].pop(), "expected 1 files, found 0"),
        (lambda d: _value(d).append({"$": "array", "of": 9}), "array"),
        (lambda d: _value(d).append({"$": "same", "of": 99}), "same"),
        (lambda d: _value(d).append({"$": "int"}), "int"),
        (lambda d: d["consolidated_metadata"]["metadata"].pop("w"), "no document describes"),
        (lambda d: own(d).update(epoch=-1), "epoch|position|-1"),
    ],
)
def test_a_field_that_does_not_fit_is_named(forge: Any, edit: Any, told: str) -> None:
    reader = reader_of(forge(edit))
    with pytest.raises(CheckpointCorruptError, match=told) as caught:
        reader.load()
    assert str(caught.value).startswith(f"{reader.root}/{ROOT_DOCUMENT} ")


@pytest.mark.parametrize("name", ["a.0/../../victim", "../victim", "a.0.r01", "a.1", ""])
def test_a_record_cannot_name_a_directory_elsewhere(tmp_path: Path, name: str) -> None:
    """A run deletes the stores of records that the log has given up, by their names."""
    path = tmp_path / "k"
    manager = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
    manager.run.start(["a"], {})
    save_epoch(manager, Position(0), {"a": Workspace("a")})
    manager.run.end()
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "zarr.json").write_bytes(b"mine")
    file = path / "_log" / "0000000002.json"
    entry = decode_entry(file.read_bytes(), 2, str(file))
    entry["records"][0]["stores"]["a"]["name"] = name
    entry["retires"] = [0]
    file.write_bytes(encode_entry(entry))
    again = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
    with pytest.raises(CheckpointCorruptError, match=r"0000000002.json.*(name of a store|name`)"):
        again.run.start(["a"], {})
    assert (victim / "zarr.json").read_bytes() == b"mine"
