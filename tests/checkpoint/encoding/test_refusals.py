"""What cannot be saved is refused at the first save, by node and blob, whatever Python makes of it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobrunner import DefinitionError
from jobrunner.checkpoint import Decoder, digest_blob, encode_blobs
from jobrunner.run.diff import compare_values
from jobrunner.testing import assert_identical
from tests.saves import NodeRun
from tests.stores import write_store


@dataclasses.dataclass
class Link:
    next: Any = None


def test_a_chain_of_500_dataclasses_is_refused_by_the_blobs_name() -> None:
    chain = None
    for _ in range(500):
        chain = Link(chain)
    with pytest.raises(DefinitionError, match="Node 'n', blob 'x'.*nested"):
        encode_blobs("n", {"x": chain})


def test_the_deepest_value_that_is_saved_is_also_loaded() -> None:
    values: dict[str, Any] = {"lists": [], "dicts": {}, "tuples": (), "links": Link()}
    for _ in range(149):
        values["lists"] = [values["lists"]]
        values["dicts"] = {"a": values["dicts"]}
        values["tuples"] = (values["tuples"],)
    for _ in range(74):
        values["links"] = Link(values["links"])
    for name, blob in encode_blobs("n", values).items():
        loaded = Decoder(pytest.fail, classes=blob.classes).decode(blob.tree)
        assert repr(loaded) == repr(values[name])


@pytest.mark.parametrize(
    "value", [[1, 2], np.array(1.0), np.array([1, "a"], object)], ids=["list", "no axes", "objects"]
)
def test_a_part_that_no_other_number_of_nodes_could_load_is_refused(
    value: Any, node_run: NodeRun
) -> None:
    with pytest.raises(DefinitionError, match=r"Node 'a', blob 'p': partition=0 expects an array"):
        node_run.save(0, {"p": value}, partitions={"p": (0, ["a", "b"])})
    assert node_run.manager.epochs() == []


ENCODE = """
import datetime as dt
from tests.checkpoint.encoding.kinds_of_values import VALUES
from jobrunner.checkpoint import digest_blob, encode_blobs
blobs = {name: make() for name, make in VALUES.items()}
blobs["words"] = {str(i) for i in range(2000)} | {dt.date(2020, 1, i) for i in range(1, 20)}
blobs["sets"] = {frozenset(map(str, range(i))) for i in range(9)}
for name, value in blobs.items():
    print(name, digest_blob(encode_blobs("n", {"x": value})["x"]))
"""


def test_equal_values_are_encoded_alike_in_every_process() -> None:
    printed = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", ENCODE]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        printed.append(done.stdout.splitlines())
    assert len(printed[0]) > 300
    assert printed[0] == printed[1]


def test_a_digest_depends_on_the_fields_of_records_and_not_on_what_lies_between() -> None:
    dtype = np.dtype({"names": ["a"], "formats": ["<i4"], "offsets": [3], "itemsize": 11})
    digests = set()
    for value in (1, 2):
        for byte in (0, 255):
            records = np.full(2 * dtype.itemsize, byte, np.uint8).view(dtype)
            records["a"] = value
            digests.add((value, digest_blob(encode_blobs("n", {"x": records})["x"])))
    assert len(digests) == len({digest for _, digest in digests}) == 2


def test_a_long_tree_lies_in_a_file_of_its_own(tmp_path: Path) -> None:
    words = [f"word {i}" for i in range(20_000)]
    shared = {"step": 1, "losses": [i / 2 for i in range(1000)]}
    values = {
        "words": words,
        "rows": [(i, i / 2, str(i), None) for i in range(5000)],
        "records": [shared, *({"step": i, "notes": [i]} for i in range(5000)), shared],
        "few": {"a": [1, {"b": 2}]},
    }
    reader = write_store(tmp_path, encode_blobs("n", values))
    reader.verify()
    loaded = reader.load()
    assert_identical(values, loaded)
    assert loaded["records"][0] is loaded["records"][-1]
    document = (tmp_path / "n.0" / "zarr.json").read_bytes()
    assert len(document) < 20_000
    assert (tmp_path / "n.0" / "words" / "_tree" / "c.0").stat().st_size > 200_000
    assert reader.peek(reader.read_document(), "words") == words
    changed = {**values, "words": [*words[:-1], "other"]}
    differences = compare_values(values, changed)
    assert [it["where"] for it in differences] == ["['words'][19999]"]
