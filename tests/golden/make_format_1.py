"""Made ``format_1/``, which every later version must read. Not to be run again: make format_2.

python -m tests.golden.make_format_1 tests/golden/format_1
"""

from __future__ import annotations

import collections
import sys
from typing import Any

import numpy as np

from jobrunner import KeepLast, MultiNodeCheckpointManager
from jobrunner.workspace.workspace import Workspace
from tests.golden.making import anonymize

NODES = ("server", "trainer_0")


def blobs(node: str, epoch: int) -> dict[str, Any]:
    """What node had at the end of an epoch."""
    if node != "server":
        return {"w": np.full((2, 2), epoch, "<f4"), "lr": 0.1}
    shared = np.arange(3, dtype="<i4")
    return {
        "w": np.arange(12, dtype="<f4").reshape(3, 4) + epoch,
        "fortran": np.asfortranarray(np.arange(6, dtype="<f8").reshape(2, 3)),
        "transposed": np.arange(24, dtype="<i2").reshape(2, 3, 4).transpose(1, 2, 0),
        "big_endian": np.array([1.5, -0.0, np.nan], ">f8"),
        "no_axes": np.array(7, "u1"),
        "empty": np.empty((0, 3), "<c8"),
        "flags": np.array([True, False]),
        "when": np.array(["2020-02-29T12:00", "NaT"], "<M8[s]"),
        "words": np.array(["é", "", "日本"], np.dtypes.StringDType()),
        "fixed_words": np.array(["é", "ab"], "<U4"),
        "objects": np.array(["x", "y\0"], object),
        "gaps": np.array(["x", None], np.dtypes.StringDType(na_object=None)),
        "record": np.array([(1, 2.5)], [("a", "<i4"), ("b", "<f8")]),
        "odd_record": np.array([(1, 2.5)], [("a", ">i4"), ("b", "<f8")]),
        "scalars": [np.float32(0.1), np.datetime64(5, "D"), np.str_("s"), np.bytes_(b"b")],
        "plain": [None, True, -1, 2**70, 0.1, -0.0, float("inf"), 1 + 2j, "text", "\ud800", b"\0"],
        "long": {
            "text": "é" * 5000,
            "bytes": bytes(2000),
            "numbers": [0.5] * 300,
            "b": bytearray(3),
        },
        "nested": {"layers": [{"w": shared, "same": shared}, (np.ones(2, "<f8"), 1)], 3: "three"},
        "ordered": collections.OrderedDict(z=1, a=2),
        "name of a blob: any ü": node,
    }


def main(path: str) -> None:
    """Save epochs 0 to 3, keep two, go back to 2, save 3 again."""
    manager = MultiNodeCheckpointManager(path, keep=KeepLast(2))
    manager.run.start(NODES, {"plan": {"job": "golden"}})
    for epoch in (0, 1, 2, 3, 3):
        if manager.latest() == 3:
            manager.run.rewind(2, "to have a rewind in it")
        save = manager.commits.begin(epoch)
        workspaces = {node: Workspace(node) for node in NODES}
        for node in NODES:
            workspaces[node].globals.update(blobs(node, epoch))
        details = {"metrics": {"loss": float("nan"), "epoch": epoch}, "stopped_by": []}
        manager.commits.commit(save, save.write(workspaces), details)
    manager.run.finish(3)
    manager.run.end()
    anonymize(path)


if __name__ == "__main__":
    main(sys.argv[1])
