"""No kind of value that can be saved or sent is changed: it comes back as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Session,
    Task,
    epoch_limiter,
)
from jobrunner.checkpoint import digest_blob, encode_blobs
from jobrunner.positions import Position
from jobrunner.workspace.workspace import Workspace
from tests.checkpoint.encoding.kinds_of_values import VALUES, describe, is_same
from tests.saves import save_epoch

LOAD = """
import sys
import numpy as np
from jobrunner import MultiNodeCheckpointManager
from tests.checkpoint.encoding.test_kinds_of_values import digests, find_changed
node = MultiNodeCheckpointManager(sys.argv[1]).open(0)["a"]
values = {name: node.load(name) for name in node}
arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
read_only = [name for name, array in arrays.items() if not array.flags.writeable]
print(*find_changed(values), *read_only, *digests(), sep="\\n")
"""


def make_all() -> dict[str, Any]:
    return {f"v{i}": make() for i, make in enumerate(VALUES.values())}


def find_changed(found: dict[str, Any]) -> list[str]:
    return [
        f"{list(VALUES)[int(name[1:])]}: expected {describe(expected)!r:.300}, "
        f"found {describe(found[name])!r:.300}"
        for name, expected in make_all().items()
        if name in found and not is_same(expected, found[name])
    ]


def digests() -> list[str]:
    made = encode_blobs("a", make_all())
    return [f"{name} {digest_blob(blob)}" for name, blob in made.items()]


def test_every_kind_comes_back_and_is_encoded_alike_in_another_process(tmp_path: Path) -> None:
    manager = MultiNodeCheckpointManager(tmp_path)
    manager.run.start(["a"], {})
    workspace = Workspace("a")
    workspace.globals.update(make_all())
    save_epoch(manager, Position(0), {"a": workspace})
    manager.run.end()
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    loaded = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (loaded.stdout.splitlines(), loaded.stderr) == (digests(), "")


def test_every_kind_crosses_workers_and_is_an_input(inproc_session: Session) -> None:
    with Job("hops") as job:
        with job.init_group:
            made = Task(make_all, outputs="all", node="a", name="make").output()
            Task(find_changed, inputs="all", outputs="x", node="a", name="here")
            Task(find_changed, inputs=made, outputs="x", node="b", name="there")
        with job.exit_group:
            found = [Task(lambda x: x, inputs="x", node=node).output() for node in ("a", "b")]
        epoch_limiter(job, 1)
    JobRunner(job).run(inproc_session)
    assert [changed for output in found for changed in output.fetch()] == []
