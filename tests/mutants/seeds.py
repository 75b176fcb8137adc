"""Whole checkpoint directories of all kinds, made small, from which the mutants are made."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np

from jobrunner import Blob, Job, KeepLast, MultiNodeCheckpointManager, Node, Task, epoch_limiter
from jobrunner.checkpoint import repair_log
from jobrunner.compile.fingerprint import describe
from jobrunner.define.array_options import ArrayOptions
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.workspace import Workspace
from tests.checkpoint.encoding.kinds_of_values import PLAIN_VALUES, VALUES
from tests.mutants.trees import Tree, dump, frame_entry, read_tree, split_entry
from tests.saves import Save, save_epoch

GOLDEN = Path(__file__).parents[1] / "golden"
NODES = ("a", "b")
Blobs = Mapping[str, Mapping[str, Any]]


class Model:
    """Has a state."""

    def __init__(self) -> None:
        self.w = np.arange(3.0)

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w, "steps": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.w[...] = state["w"]


@dataclass
class Seed:
    """A directory, and a job that could have written it."""

    name: str
    tree: Tree
    nodes: Mapping[str, list[str]]
    shared: Mapping[str, Any] = field(default_factory=dict)

    def job(self) -> Job:
        """A job that resumes from it; it never runs."""
        return job_of(self.nodes, self.shared)


def job_of(nodes: Mapping[str, list[str]], shared: Mapping[str, Any]) -> Job:
    with Job("mutants", steps_per_epoch=2) as job:
        for name, blobs in nodes.items():
            node = Node(name)
            outputs = [Blob(blob, **shared.get(blob, {})) for blob in blobs]
            with job.init_group:
                Task(lambda: None, outputs=outputs, node=node, name="make")
            Task(lambda x: x, inputs=blobs[0], outputs=blobs[0], node=node, name="step")
        epoch_limiter(job, 9)
    return job


class Life:
    """The runs that make a directory."""

    def __init__(self, path: Path, nodes: Blobs, **options: Any) -> None:
        self.path = path
        self.options = options
        self.names = {node: list(blobs) for node, blobs in nodes.items()}
        self.manager = self.open()

    def open(self) -> MultiNodeCheckpointManager:
        return MultiNodeCheckpointManager(self.path, files=FaultyFiles(sync=False), **self.options)

    def start(self, shared: Mapping[str, Any] | None = None) -> None:
        job = job_of(self.names, shared or {})
        self.manager.run.start(list(self.names), {"plan": describe(job.compile())})

    def save(self, epoch: int, blobs: Blobs, details: Any = None, **options: Any) -> None:
        workspaces = {node: Workspace(node) for node in blobs}
        for node, values in blobs.items():
            workspaces[node].globals.update(values)
        details = {"metrics": {"loss": 0.5 * epoch}, "stopped_by": [], **(details or {})}
        save_epoch(self.manager, Position.of(epoch), workspaces, details, **options)


def two_runs(path: Path) -> tuple[Mapping[str, list[str]], Mapping[str, Any]]:
    """Shared blobs, a step within an epoch, a pin, an epoch saved by two runs, a store set aside."""
    shared = {"s": {"replicated": True}, "x": {"partition": 0}}

    def blobs(epoch: int) -> Blobs:
        common = {"s": np.full(3, epoch)}
        return {
            "a": {"w": np.arange(6.0).reshape(2, 3) + epoch, "x": np.arange(4), **common},
            "b": {"n": epoch, "x": np.arange(3) + epoch, **common},
        }

    life = Life(path, blobs(0))
    axes = {"partitions": {"x": {"axis": 0, "nodes": list(NODES)}}}
    for epochs in ((0, 1, 2), (2, 3)):
        life.start(shared)
        for epoch in epochs:
            if epoch == 2 and 2 in life.manager.epochs():
                life.manager.run.rewind(Position(1), "to have a rewind in it")
            step = {"step": 1, "steps_per_epoch": 2} if epoch == 3 else {"stopped_by": ["stop"]}
            life.save(epoch, blobs(epoch), {**axes, **step}, replicated={"s": NODES})
        life.manager.run.end()
        life.manager = life.open()
        life.manager.pin(1, "paper")
    return life.names, shared


def values(path: Path) -> Any:
    """Values of all kinds, compressed and cut arrays, pickles, a state."""
    names = [name for name in VALUES if any(it in name for it in ("<f4", "U2 C", "M8[us]", "tied"))]
    some = {f"v{i}": VALUES[name]() for i, name in enumerate(names)}
    made = [VALUES[name]() for name in VALUES if name[:4] in ("gene", "data", "lega")]
    blobs = {
        "a": {
            "packed": np.zeros((8, 8)),
            "cut": np.arange(40.0).reshape(8, 5),
            "texts": np.array(["a", "", "long " * 20], np.dtypes.StringDType()),
            "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            "model": Model(),
            "pickle": {"f": Model.state_dict},
            "plain": PLAIN_VALUES,
            "made": made,
            **some,
        }
    }
    zstd = ({"name": "zstd", "configuration": {"level": 1, "checksum": False}},)
    options = {
        "packed": ArrayOptions(zstd),
        "cut": ArrayOptions(zstd, (4, 5)),
        "f": ArrayOptions((), (1, 3)),
    }
    life = Life(path, blobs, allow_pickle=True)
    life.start()
    life.save(0, blobs, options={"a": options}, initial={"a": ["model"]})
    life.manager.run.end()
    return life.names, {}


def stacks(path: Path) -> Any:
    """Alike rows, and arrays that are linked."""
    rows = {f"row{i}": np.arange(3.0) + i for i in range(64)}
    life = Life(path, {"a": {"big": 0, **rows}})
    life.start()
    for epoch in (0, 1):
        life.save(epoch, {"a": {"big": np.arange(9000.0), **rows, "row0": np.ones(3) * epoch}})
    life.manager.run.end()
    return life.names, {}


def long_log(path: Path) -> Any:
    """More than one full state."""
    life = Life(path, {"a": {"n": 0}}, keep=KeepLast(2))
    life.start()
    for epoch in range(50):
        life.save(epoch, {"a": {"n": epoch}})
    life.manager.run.finish(Position(49))
    life.manager.run.end()
    return life.names, {}


def repaired(path: Path) -> Any:
    """A log that has lost entries, and its repair."""
    names, shared = two_runs(path)
    for number in (4, 5, 6):
        (path / "_log" / f"{number:010d}.json").unlink()
    repair_log(Life(path, {}).manager.directory)
    return names, shared


def killed(path: Path) -> Any:
    """A run that ended in the middle of a save."""
    blobs = {"a": {"n": 1, "w": np.ones(2)}}
    life = Life(path, blobs)
    life.start()
    life.save(0, blobs)
    life.save(1, blobs)
    life.manager.run.set_aside(Position(0), "to have it")
    save = Save(life.manager, Position(2))
    workspace = Workspace("a")
    workspace.globals.update(blobs["a"])
    save.write({"a": workspace})
    keep = read_tree(path)
    life.manager.run.end()
    for name, content in keep.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    last = max((path / "_log").glob("*.json"))
    last.unlink()
    run = path / "_log" / "0000000000.json"
    entry = split_entry(run.read_bytes())
    entry["process"] |= {"pid": 1 << 21, "started": "0"}  # no system has such a process
    run.write_bytes(frame_entry(dump(entry)))
    heartbeat = path / "_runs" / entry["run"] / "heartbeat"
    heartbeat.parent.mkdir(parents=True, exist_ok=True)
    heartbeat.write_bytes(b"%020d\n" % 1 + dump(entry["process"]))
    return life.names, {}


def libraries(path: Path) -> Any:
    """Values of other libraries, as far as they are installed."""
    blobs: dict[str, Any] = {"n": 1}
    for library, make in LIBRARIES.items():
        if importlib.util.find_spec(library):
            blobs[library] = make()
    life = Life(path, {"a": blobs})
    life.start()
    life.save(0, {"a": blobs})
    life.manager.run.end()
    return life.names, {}


def pandas_values() -> list[Any]:
    import pandas as pd

    days = pd.date_range("2024-03-30", periods=3, freq="D", tz=ZoneInfo("Europe/Paris"), unit="ns")
    columns = {
        "x": [0.5, np.nan, -0.0],
        "text": pd.Series(["a", "é", ""], days, object),
        "kind": pd.Categorical.from_codes([0, 1, -1], pd.Index([10, 20]), ordered=True),
        "gaps": pd.array([1, None, 3], "Int16"),
    }
    return [
        pd.DataFrame(columns, index=days),
        pd.MultiIndex.from_arrays([[1, 1, 2], [0.5, 1.5, 0.5]], names=["i", "j"]),
        pd.Timestamp("2024-10-27 00:30", tz=ZoneInfo("Europe/Paris")),
        pd.Timedelta(-5, "s"),
        pd.NA,
    ]


def scipy_values() -> list[Any]:
    from scipy import sparse

    dense = np.array([[0, 1.5, 0], [-2, 0, 0]])
    return [sparse.coo_array(dense).asformat(form) for form in ("csr", "coo", "dia")]


def xarray_values() -> Any:
    import xarray as xr

    heat = xr.DataArray(
        np.arange(6, dtype="f4").reshape(2, 3), {"height": 2.0}, ["y", "x"], name="heat"
    )
    return heat.to_dataset().assign(count=("x", np.arange(3, dtype="i2")))


LIBRARIES = {"pandas": pandas_values, "scipy": scipy_values, "xarray": xarray_values}

MADE: tuple[Callable[[Path], Any], ...] = (
    *(two_runs, values, stacks, long_log, repaired, killed, libraries),
)
GOLDENS = ("format_1", "log_1")
NAMES = (*(make.__name__ for make in MADE), *GOLDENS)


def make_seeds(names: Collection[str] = NAMES) -> list[Seed]:
    """Those of these names."""
    seeds = []
    with tempfile.TemporaryDirectory() as directory:
        for make in (it for it in MADE if it.__name__ in names):
            path = Path(directory, make.__name__)
            nodes, shared = make(path)
            seeds.append(Seed(make.__name__, read_tree(path), nodes, shared))
    goldens = [name for name in GOLDENS if name in names]
    return seeds + [Seed(name, read_tree(GOLDEN / name), {"a": ["w"]}) for name in goldens]
