"""The kinds of value that format 4 brought are read by every later version."""

from __future__ import annotations

from pathlib import Path

from jobrunner import MultiNodeCheckpointManager
from jobrunner.workspace.workspace import Workspace
from tests.checkpoint.encoding.kinds_of_values import describe
from tests.checkpoint.test_manager import run_group
from tests.golden.make_format_4_values import blobs

GOLDEN = Path(__file__).with_name("format_4_values")


def test_every_value_is_what_it_was() -> None:
    manager = MultiNodeCheckpointManager(GOLDEN, allow_pickle=True)
    manager.verify(0)
    workspaces = {"a": Workspace("a")}
    run_group(manager.load(0), workspaces)
    found = workspaces["a"].globals
    assert list(found) == list(blobs())
    for name, value in blobs().items():
        if name != "pickled":
            assert describe(found[name]) == describe(value), name
    assert found["pickled"].args == blobs()["pickled"].args
    opened = manager.open(0)["a"]
    assert opened.load("own")[0] is found["own"][0]
