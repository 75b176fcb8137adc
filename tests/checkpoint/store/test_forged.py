"""Forged manifests: their digest is right, but jobrunner would not write them.

A digest finds damage, not forgery: an attacker who can write to a directory can write its log too.
Reading such a directory raises an error; it touches no file elsewhere and runs no code.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c

from jobrunner import CheckpointCorruptError, MultiNodeCheckpointManager
from jobrunner.checkpoint import Epochs, copy_epoch, inspect_directory
from jobrunner.checkpoint.log.handler import encode_entry, read_content
from jobrunner.checkpoint.log.state import entry_to_json, make_entry
from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.checkpoint.store.layout import MANIFEST
from jobrunner.checkpoint.store.reader import StoreReader
from jobrunner.checkpoint.store.stacks import LEAST_ALIKE
from jobrunner.define.array_options import ArrayOptions
from jobrunner.errors import JobRunnerError
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.workspace import Workspace

ZSTD = ArrayOptions(({"name": "zstd", "configuration": {"level": 1}},), (7, 9), (14, 18))
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
    save = manager.commits.begin(0, array_options={"a": {"z": ZSTD}})
    manager.commits.commit(save, save.write({"a": workspace}), {})
    manager.run.end()
    return path


@pytest.fixture
def forge(saved: Path) -> Iterator[Callable[[Callable[[dict[str, Any]], object]], Path]]:
    """Edits the manifest, and its digest in the log; restores the directory afterwards."""
    manifest = saved / "a.0" / MANIFEST
    (commit,) = (
        path
        for path in (saved / "_log").iterdir()
        if (read_content(path.read_bytes()) or {})["kind"] == "commit"
    )
    before = {path: path.read_bytes() for path in saved.glob("**/*") if path.is_file()}

    def change(edit: Callable[[dict[str, Any]], object]) -> Path:
        document = json.loads(before[manifest])
        edit(document["attributes"])
        content = json.dumps(document).encode()
        manifest.write_bytes(content)
        entry = copy.deepcopy(dict(read_content(before[commit]) or {}))
        entry["stores"]["a"]["manifest"] = hashlib.sha256(content).hexdigest()
        commit.write_bytes(encode_entry(entry))
        return saved

    yield change
    for path, content in before.items():
        path.write_bytes(content)


def reader_of(path: Path) -> StoreReader:
    content = (path / "a.0" / MANIFEST).read_bytes()
    return StoreReader(PosixFiles(), str(path), "a.0", hashlib.sha256(content).hexdigest())


def reads(path: Path) -> Iterator[Callable[[], object]]:
    reader = reader_of(path)
    yield reader.load
    yield reader.verify
    yield lambda: reader.load_slice("z", 1, 3, 20)
    yield lambda: reader.load_slice("row3", 0, 1, 2)
    yield lambda: reader.load(["w", "row3"])
    yield lambda: [
        reader.peek(reader.read_manifest(), name, outline=True) for name in ("w", "t", "row3")
    ]
    yield lambda: [reader.peek(reader.read_manifest(), name) for name in ("w", "t", "row3")]


class _Runs:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("what a checkpoint says was run",))


def test_no_compressor_that_a_manifest_names_runs_code(
    forge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Later versions of numcodecs refuse it themselves, unless told otherwise.
    import numcodecs.pickles

    monkeypatch.setattr(numcodecs.pickles, "ALLOW_UNSAFE_PICKLE_DECODE", True, raising=False)
    content = pickle.dumps(_Runs())

    def edit(manifest: dict[str, Any]) -> None:
        (array,) = manifest["blobs"]["w"]["arrays"]
        array["compressors"] = [{"name": "pickle", "configuration": {}}]
        array["files"] = [[len(content), crc32c(content)]]

    path = forge(edit)
    (path / "a.0" / "w" / "c.0.0").write_bytes(content)
    manager = MultiNodeCheckpointManager(path)
    for read in (reader_of(path).load, lambda: manager.open(0)["a"].load("w")):
        with pytest.raises(
            CheckpointCorruptError, match=r"Invalid value 'pickle' - at .*compressors\[0\].name"
        ):
            read()


def test_a_copy_writes_nothing_outside_of_its_store(forge: Any, tmp_path: Path) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        manifest["documents"]["../../elsewhere/zarr.json"] = [0, 0]

    directory = Epochs(forge(edit), files=PosixFiles())
    with pytest.raises(CheckpointCorruptError, match="leads out of the store"):
        copy_epoch(directory, 0, str(tmp_path / "one" / "two"))
    assert not (tmp_path / "one" / "elsewhere").exists()
    (damaged,) = (f for f in inspect_directory(directory) if f.path == "a.0")
    assert damaged.status == "damaged"
    assert "leads out of the store" in damaged.explanation


@pytest.mark.parametrize("place", [[0, -1], [-1, 0], [0, LEAST_ALIKE], [9, 0], [0], 3, "x"])
def test_a_row_outside_of_its_stack_is_an_error(forge: Any, place: Any) -> None:
    path = forge(lambda manifest: manifest["blobs"].update(row3=place))
    for read in reads(path):
        with pytest.raises(CheckpointCorruptError, match=MANIFEST):
            read()


def _array(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    entry: dict[str, Any] = manifest["blobs"][name]["arrays"][0]
    return entry


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda m: _array(m, "w").update(chunk_shape=[-3, 4]), r"`int` >= 1.*chunk_shape\[0\]"),
        (lambda m: _array(m, "w").update(chunk_shape=[2, 4]), "expected 2 files, found 1"),
        (lambda m: _array(m, "w").update(chunk_shape=[12]), "`chunk_shape` has 1 axes"),
        (lambda m: _array(m, "w").update(path=""), r"length >= 1.*path"),
        (lambda m: _array(m, "w").update(path="../w"), "leads out of the store"),
        (lambda m: _array(m, "w").update(order=[0, 0]), "does not permute 2 axes"),
        (lambda m: _array(m, "w").update(shape=[3, 5], chunk_shape=[3, 5]), "size of a file"),
        (lambda m: _array(m, "w").update(shape=["3", 4]), r"`int`, got `str`.*shape\[0\]"),
        (lambda m: _array(m, "w").update(files=[[96, -1]]), r"files\[0\]\[1\]"),
        (lambda m: _array(m, "w").update(more=1), r"unknown field `more`"),
        (lambda m: _array(m, "w").pop("dtype"), r"missing required field `dtype`"),
        (lambda m: _array(m, "w").update(dtype={"string": 1}), r"dtype|string"),
        (lambda m: _array(m, "z").update(piece_shape=[5, 9]), "does not divide `chunk_shape`"),
        (lambda m: _array(m, "z")["pieces"][0].pop(), "expected .* pieces, found"),
        (lambda m: m["stacks"][0]["rows"].pop(), "stack 0: `rows`"),
        (lambda m: m["blobs"]["t"]["value"]["a"].append({"$": "array", "at": 9}), "kind 'array'"),
        (lambda m: m["blobs"]["t"]["value"]["a"].append({"$": "same", "as": 99}), "kind 'same'"),
        (lambda m: m["blobs"]["t"]["value"]["a"].append({"$": "int"}), "field `hex`"),
        (lambda m: m["documents"].pop("w/zarr.json"), "`documents` lacks 'w/zarr.json'"),
        (lambda m: m.update(epoch=-1), r"`int` >= 0 - at `\$\.attributes\.epoch`"),
    ],
)
def test_a_field_that_does_not_fit_is_named(forge: Any, edit: Any, told: str) -> None:
    reader = reader_of(forge(edit))
    with pytest.raises(CheckpointCorruptError, match=told) as caught:
        reader.load()
    assert str(caught.value).startswith(f"{reader.root}/{MANIFEST} ")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"epoch": 0', '"epoch": 0, "epoch": 0', "the key 'epoch' appears twice"),
        ('"epoch": 0', '"epoch": NaN', "NaN is not a JSON number"),
    ],
)
def test_a_manifest_is_strict_json(saved: Path, forge: Any, old: str, new: str, told: str) -> None:
    manifest = forge(lambda _: None) / "a.0" / MANIFEST
    text = manifest.read_text()
    assert text.count(old) == 1
    manifest.write_text(text.replace(old, new))
    with pytest.raises(CheckpointCorruptError, match=told):
        reader_of(saved).load()


def _places(value: Any, trail: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if trail:
        yield trail
    items: Any = ()
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if not (isinstance(key, str) and key.startswith("row") and key not in ("row3", "rows")):
            yield from _places(item, (*trail, key))


def test_any_edit_of_a_manifest_is_read_or_an_error_of_ours(saved: Path, forge: Any) -> None:
    whole = json.loads((saved / "a.0" / MANIFEST).read_bytes())["attributes"]
    seen: set[tuple[Any, ...]] = set()
    for trail in _places(whole):
        kind = tuple("#" if isinstance(key, int) and key > 1 else key for key in trail)
        if kind in seen:
            continue
        seen.add(kind)
        for value in (None, -1, "../x", {}, ...):

            def edit(manifest: dict[str, Any], trail: Any = trail, value: Any = value) -> None:
                *holders, key = trail
                for holder in holders:
                    manifest = manifest[holder]
                if value is ...:
                    del manifest[key]
                else:
                    manifest[key] = value

            for read in itertools.islice(reads(forge(edit)), 3):
                found: Exception | None = None
                try:
                    read()
                except Exception as error:
                    found = error
                assert isinstance(found, JobRunnerError | None), (trail, value)
                assert found is None or str(saved / "a.0") in str(found), (trail, value)
    assert len(seen) > 50


@pytest.mark.parametrize("retry", ["/../../victim", "1", 1.5, None])
def test_a_claim_cannot_name_a_directory_elsewhere(tmp_path: Path, retry: Any) -> None:
    """A run deletes the stores that the log has given up, by their names."""
    path = tmp_path / "k"
    manager = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
    manager.run.start(["a"], {})
    manager.commits.begin(0)
    manager.run.end()
    (path / "a.0.r").mkdir()
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "zarr.json").write_bytes(b"mine")
    state = manager.recorded.log.refresh()
    forged = {**state.to_json(), "chores": [[0, retry, "delete", 0]], "is_ended": True}
    body = {"state": state.to_json(), "commits": []}
    whole = entry_to_json(make_entry(state.number + 1, "repair", "r", body))
    entry = {**whole, "state": forged}
    (path / "_log" / f"{entry['number']:010d}.json").write_bytes(encode_entry(entry))
    again = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
    with pytest.raises(CheckpointCorruptError, match=r"0000000003.json.*state.chores\[0\]\[1\]"):
        again.run.start(["a"], {})
    assert (victim / "zarr.json").read_bytes() == b"mine"
