"""Whole checkpoint directories of all kinds, made small, from which the mutants are made."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jobrunner import Blob, Job, KeepLast, MultiNodeCheckpointManager, Node, Task, epoch_limiter
from jobrunner.checkpoint import repair_log
from jobrunner.compile.fingerprint import describe
from jobrunner.define.array_options import ArrayOptions
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.workspace import Workspace
from tests.checkpoint.encoding.kinds_of_values import MADE, PLAIN_VALUES, VALUES
from tests.mutants.trees import Tree, dump, frame_entry, read_tree, split_entry
from tests.saves import Save, save_epoch

GOLDEN = Path(__file__).parents[1] / "golden"
NODES = ("a", "b")
SHARED = {"s": {"replicated": True}, "x": {"partition": 0}}
Blobs = Mapping[str, Mapping[str, Any]]


@dataclass
class Seed:
    """A directory, and the blobs of the nodes of a job that could have written it."""

    name: str
    tree: Tree
    nodes: Mapping[str, Collection[str]]
    shared: Mapping[str, Any] = field(default_factory=dict)

    def job(self) -> Job:
        """A job that resumes from it; it never runs."""
        return job_of(self.nodes, self.shared)


def job_of(nodes: Mapping[str, Collection[str]], shared: Mapping[str, Any]) -> Job:
    with Job("mutants", steps_per_epoch=2) as job:
        for name, blobs in nodes.items():
            node = Node(name)
            outputs = [Blob(blob, **shared.get(blob, {})) for blob in blobs]
            with job.init_group:
                Task(lambda: None, outputs=outputs, node=node, name="make")
            first = outputs[0].name
            Task(lambda x: x, inputs=first, outputs=first, node=node, name="step")
        epoch_limiter(job, 9)
    return job


class Life:
    """The runs that make a directory."""

    def __init__(self, path: Path, blobs: Blobs, shared: Any = None, **options: Any) -> None:
        self.path, self.nodes, self.shared = path, blobs, shared or {}
        self.options = options
        self.open()

    def open(self) -> None:
        """Begin a run."""
        files = FaultyFiles(sync=False)
        self.manager = MultiNodeCheckpointManager(self.path, files=files, **self.options)
        plan = describe(job_of(self.nodes, self.shared).compile())
        self.manager.run.start(list(self.nodes), {"plan": plan})

    def save(self, epoch: int, blobs: Blobs, details: Any = None, **options: Any) -> None:
        workspaces = {node: workspace_of(node, values) for node, values in blobs.items()}
        details = {"metrics": {"loss": 0.5 * epoch}, "stopped_by": [], **(details or {})}
        save_epoch(self.manager, Position.of(epoch), workspaces, details, **options)

    def end(self) -> Seed:
        """End the run; the directory as it is then."""
        self.manager.run.end()
        return self.seed()

    def seed(self) -> Seed:
        """The directory as it is now."""
        return Seed(self.path.name, read_tree(self.path), self.nodes, self.shared)


def workspace_of(node: str, values: Mapping[str, Any]) -> Workspace:
    workspace = Workspace(node)
    workspace.globals.update(values)
    return workspace


def two_runs(path: Path) -> Seed:
    """Shared blobs, a step within an epoch, a pin, an epoch saved by two runs, a store set aside."""

    def blobs(epoch: int) -> Blobs:
        common = {"s": np.full(3, epoch)}
        return {
            "a": {"w": np.arange(6.0).reshape(2, 3) + epoch, "x": np.arange(4), **common},
            "b": {"n": epoch, "x": np.arange(3) + epoch, **common},
        }

    life = Life(path, blobs(0), SHARED)
    axes = {"partitions": {"x": {"axis": 0, "nodes": list(NODES)}}}
    for epoch in (0, 1, 2):
        life.save(epoch, blobs(epoch), {**axes, "stopped_by": ["stop"]}, replicated={"s": NODES})
    life.end()
    life.open()
    life.manager.pin(1, "paper")
    life.manager.run.rewind(Position(1), "to have a rewind in it")
    for epoch in (2, 3):
        within = {"step": epoch - 2, "steps_per_epoch": 2}
        life.save(epoch, blobs(epoch), {**axes, **within}, replicated={"s": NODES})
    return life.end()


class Model:
    """Has a state."""

    def __init__(self) -> None:
        self.w = np.arange(3.0)

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w, "steps": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.w[...] = state["w"]


def values(path: Path) -> Seed:
    """Values of all kinds, compressed and cut arrays, pickles, a state, library values."""
    names = [name for name in VALUES if any(it in name for it in ("<f4", "U2 C", "M8[us]"))]
    blobs = {
        "packed": np.zeros((8, 8)),
        "cut": np.arange(40.0).reshape(8, 5),
        "texts": np.array(["a", "", "long " * 20], np.dtypes.StringDType()),
        "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "model": Model(),
        "plain": PLAIN_VALUES,
        "made": [make() for name, make in MADE.items() if "deep" not in name],
        **{f"v{i}": VALUES[name]() for i, name in enumerate(names)},
        **values_of_libraries(),
        "pickle": {"f": Model.state_dict},  # last, as loading it is refused
    }
    zstd = ({"name": "zstd", "configuration": {"level": 1, "checksum": False}},)
    options = {
        "packed": ArrayOptions(zstd),
        "cut": ArrayOptions(zstd, (4, 5)),
        "f": ArrayOptions((), (1, 3)),
    }
    life = Life(path, {"a": blobs}, allow_pickle=True)
    life.save(0, {"a": blobs}, options={"a": options}, initial={"a": ["model"]})
    return life.end()


def values_of_libraries() -> dict[str, Any]:
    """Those of the libraries that are installed."""
    blobs: dict[str, Any] = {}
    with suppress(ImportError):
        import pandas as pd

        days = pd.date_range("2024-03-30", periods=3, tz="Europe/Paris")
        kinds = pd.Categorical.from_codes([0, 1, -1], pd.Index([10, 20]), ordered=True)
        columns = {"text": ["a", "é", ""], "kind": kinds, "gaps": pd.array([1, None, 3], "Int16")}
        index = pd.MultiIndex.from_arrays([[1, 1, 2], [0.5, 1.5, 0.5]], names=["i", "j"])
        blobs["pandas"] = [pd.DataFrame(columns, index=days), index, days[0], pd.NA]
    with suppress(ImportError):
        from scipy import sparse

        dense = sparse.coo_array(np.array([[0, 1.5, 0], [-2, 0, 0]]))
        blobs["scipy"] = [dense.asformat(form) for form in ("csr", "coo", "dia")]
    with suppress(ImportError):
        import xarray as xr

        heat = xr.DataArray(np.ones((2, 3)), {"height": 2.0}, ["y", "x"], name="heat")
        blobs["xarray"] = heat.to_dataset().assign(count=("x", np.arange(3, dtype="i2")))
    return blobs


def stacks(path: Path) -> Seed:
    """Alike rows, and arrays that are linked."""
    rows = {f"row{i}": np.arange(3.0) + i for i in range(64)}
    life = Life(path, {"a": {"big": 0, **rows}})
    for epoch in (0, 1):
        life.save(epoch, {"a": {"big": np.arange(9000.0), **rows, "row0": np.ones(3) * epoch}})
    return life.end()


def repaired(path: Path) -> Seed:
    """A log of more than one full state that has lost entries, and its repair."""
    life = Life(path, {"a": {"n": 0}}, keep=KeepLast(2))
    for epoch in range(50):
        life.save(epoch, {"a": {"n": epoch}})
    life.manager.run.finish(Position(49))
    life.manager.run.end()
    for number in (44, 45, 46):
        (path / "_log" / f"{number:010d}.json").unlink()
    repair_log(life.manager.directory)
    return life.seed()


def killed(path: Path) -> Seed:
    """A run that ended in the middle of a save."""
    blobs = {"a": {"n": 1, "w": np.ones(2)}}
    life = Life(path, blobs)
    life.save(0, blobs)
    life.save(1, blobs)
    life.manager.run.set_aside(Position(0), "to have it")
    save = Save(life.manager, Position(2))
    save.write({"a": workspace_of("a", blobs["a"])})
    seed = life.seed()
    life.manager.run.end()
    first = "_log/0000000000.json"
    entry = split_entry(seed.tree[first])
    entry["process"] |= {"pid": 1 << 21, "started": "0"}  # no system has such a process
    seed.tree[first] = frame_entry(dump(entry))
    seed.tree[f"_runs/{entry['run']}/heartbeat"] = b"%020d\n" % 1 + dump(entry["process"])
    return seed


MADE_HERE: tuple[Callable[[Path], Seed], ...] = (two_runs, values, stacks, repaired, killed)
GOLDENS = ("format_1", "log_1")
NAMES = (*(make.__name__ for make in MADE_HERE), *GOLDENS)


def make_seeds(names: Collection[str] = NAMES) -> dict[str, Seed]:
    """Those of these names."""
    seeds = {}
    with tempfile.TemporaryDirectory() as directory:
        for make in MADE_HERE:
            if make.__name__ in names:
                seeds[make.__name__] = make(Path(directory, make.__name__))
    for name in GOLDENS:
        if name in names:
            seeds[name] = Seed(name, read_tree(GOLDEN / name), {"a": ["w"]})
    return seeds
