"""The blocks that need a library which tests do not require, and the peers' programs beside ours.

Each of the pages "Coming from" shows a program of a peer and ours. Where the peer is installed,
both run in a process of their own, on the same data, and must come to the same values.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from jobrunner import Job, JobRunner, MultiNodeCheckpointManager, Session, Task, epoch_limiter
from jobrunner.data import from_iterable, from_records
from tests.pages import ROOT, block, blocks

X = np.random.default_rng(0).random((64, 3), dtype="float32")
Y = (X @ [1.0, 2.0, 3.0]).astype("float32")[:, None]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Makes a module of the block of a page that has a text."""

    def make(page: str, text: str, imports: str) -> ModuleType:
        name = f"block_of_{page}"
        code = block(f"coming-from/{page}.md", text).code
        (tmp_path / f"{name}.py").write_text(f"{imports}\n{code}")
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module(name)

    return make


def _resumes_alike(
    made: dict[str, Callable[..., Any]], step: Callable[..., Any], session: Session, path: Path
) -> list[float]:
    """Run whole, and interrupted after each epoch; expect the same weights; return the losses."""

    def fit(epochs: int) -> Job:
        with Job("fit", steps_per_epoch=4) as job:
            with job.init_group:
                for name, make in made.items():
                    Task(make, outputs=name, name=name, node="trainer")
            Task(step, updates=[*made], name="step", node="trainer")
        epoch_limiter(job, epochs)
        return job

    first = next(iter(made))
    for name, stops in (("whole", [3]), ("resumed", [1, 2, 3])):
        for epochs in stops:
            manager = MultiNodeCheckpointManager(path / name)
            JobRunner(fit(epochs), manager).run(session)
    states = [
        MultiNodeCheckpointManager(path / name).open(3)["trainer"].load(first)
        for name in ("whole", "resumed")
    ]
    whole, resumed = (
        [np.asarray(it) for it in (state.get("variables") or state.values())] for state in states
    )
    assert len(whole) > 1
    assert all(map(np.array_equal, whole, resumed))
    return [row["metrics"]["loss"] for row in manager.history() if row["epoch"]]


@pytest.mark.filterwarnings("ignore")  # of Keras, in how it converts arrays
def test_a_keras_model_is_a_blob_as_its_page_says(
    module: Any, inproc_session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    pytest.importorskip("keras", reason="keras is not installed")
    imports = "import keras\nimport numpy as np\nfrom jobrunner import current_task"
    page = module("keras", "class Trained", imports)
    made = {
        "trained": page.Trained,
        "reader": lambda: from_records({"x": X, "y": Y}).shuffled(seed=1).batched(16),
    }
    _resumes_alike(made, page.train, inproc_session, tmp_path)


def test_a_module_of_pytorch_is_trained_as_the_page_of_lightning_says(
    module: Any, inproc_session: Session, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    imports = "import torch\nfrom torch.nn import functional as F\nfrom jobrunner import Mean, current_task"
    page = module("lightning", "def make_optimizer", imports)

    def make_net() -> Any:
        torch.manual_seed(0)
        return torch.nn.Linear(3, 1)

    data = {"x": torch.from_numpy(X), "y": torch.from_numpy(Y)}
    made = {
        "net": make_net,
        "optimizer": lambda net: page.make_optimizer(net, 0.1),
        "reader": lambda: from_records(data).shuffled(seed=1).batched(16),
    }
    losses = _resumes_alike(made, page.training_step, inproc_session, tmp_path)
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore")  # of its pickler
def test_a_shuffled_stream_of_hugging_face_loses_no_record_if_it_is_read_again() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    data = datasets.Dataset.from_dict({"n": list(range(200))})
    dataset = data.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=50)
    code = block("data.md", "def stream").code

    def make_reader() -> Any:
        names: dict[str, Any] = {"dataset": dataset, "from_iterable": from_iterable}
        exec(code, names)
        return names["reader"]

    def numbers(reader: Any) -> list[int]:
        return [int(row["n"]) for batch in reader for row in batch]

    whole, saved, resumed = make_reader(), make_reader(), make_reader()
    passes = [numbers(whole) for _ in range(3)]
    assert all(sorted(each) == list(range(200)) for each in passes)
    assert passes[0] != passes[1]
    assert numbers(saved) == passes[0]
    next(iter(saved))
    resumed.load_state_dict(saved.state_dict())
    assert numbers(resumed) == numbers(saved) == passes[1][64:]
    assert numbers(resumed) == passes[2]


# ---- The peers' programs beside ours


def _run(program: str, directory: Path, python: str = sys.executable) -> Any:
    """What a program prints last, as JSON; it runs in a directory, in a process of its own."""
    (directory / "program.py").write_text(program)
    done = subprocess.run(
        [python, "program.py"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _ours(page: str) -> str:
    """Our programs of a page, then a new directory."""
    code = "".join(each.code for each in blocks(f"coming-from/{page}.md", "python"))
    return f"import json, os\n{code}\nos.mkdir('theirs')\nos.chdir('theirs')\n"


def _requires(*libraries: str) -> None:
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")


_CAFFE2 = """\
import json, os
import numpy as np
from caffe2.python import core, workspace
from caffe2.python.checkpoint import Job, JobRunner, MultiNodeCheckpointManager
from caffe2.python.dataio import ReaderWithLimit
from caffe2.python.dataset import Dataset
from caffe2.python.net_builder import ops
from caffe2.python.pipeline import pipe
from caffe2.python.schema import ConstRecord, Struct
from caffe2.python.session import LocalSession
from caffe2.python.task import Node, Task
os.mkdir("runs")
"""
_CAFFE2_TOTALS = """
totals = {}
for name in os.listdir("runs"):
    workspace.ResetWorkspace()
    workspace.RunOperatorOnce(core.CreateOperator(
        "Load", [], [], db="runs/" + name, db_type="minidb", load_all=1, absolute_path=1
    ))
    blob = "%s/task/GivenTensorInt64Fill:0" % name.split(".")[0]
    totals[name] = workspace.FetchBlob(blob).tolist()
print(json.dumps(totals))
"""


@pytest.mark.nightly
def test_the_job_of_caffe2_and_ours_have_the_same_totals_after_each_epoch(tmp_path: Path) -> None:
    python = os.environ.get("JOBRUNNER_TEST_CAFFE2_PYTHON")
    if not python:
        pytest.skip("JOBRUNNER_TEST_CAFFE2_PYTHON names no Python that has Caffe2")
    theirs = _CAFFE2 + block("coming-from/caffe2.md", "ConstRecord").code + _CAFFE2_TOTALS
    _run(_ours("caffe2") + "print(0)", tmp_path)
    found = _run(theirs, tmp_path / "theirs", python)
    assert found["trainer_1.4"] == [145]
    manager = MultiNodeCheckpointManager(tmp_path / "runs" / "sums")
    assert found == {
        f"{node}.{epoch}": manager.open(epoch)[node].load("total").tolist()
        for node in ("trainer_0", "trainer_1")
        for epoch in manager.epochs()
    }


_KERAS = """
import keras, torch
reader = make_reader()
passes = [list(reader) for _ in range(10)]
class Passes(torch.utils.data.IterableDataset):
    number = 0
    def __iter__(self):
        yield from ((it["x"], it["y"][:, None]) for it in passes[self.number])
        self.number += 1
dataset = torch.utils.data.DataLoader(Passes(), batch_size=None)
validation = X[512:], Y[512:, None]
layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
model = keras.Sequential([keras.layers.Input((3,)), layer])
model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")  # its gradient is twice ours
os.mkdir("runs")
"""
_KERAS_FOUND = """
import csv
def logged(path):
    with open(path) as file:
        return [[float(row[name]) for name in ("loss", "val_loss")] for row in csv.DictReader(file)]
best = keras.saving.load_model("runs/best.keras").get_weights()[0][:, 0]
print(json.dumps([logged("runs/log.csv"), best.tolist(), logged("../runs/fit.csv"), w.tolist()]))
"""


@pytest.mark.nightly
def test_keras_and_our_job_have_the_same_losses_and_the_same_best_weights(tmp_path: Path) -> None:
    _requires("keras", "torch", "pandas")
    theirs = _KERAS + block("coming-from/keras.md", "model.fit(").code + _KERAS_FOUND
    losses, best, our_losses, our_best = _run(_ours("keras") + theirs, tmp_path)
    assert len(losses) == 10
    assert our_losses == [pytest.approx(row, rel=1e-4) for row in losses]
    assert our_best == pytest.approx(best, rel=1e-5)


_LIGHTNING = """
import lightning as L, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from jobrunner import Mean
data = {"x": torch.from_numpy(X).float(), "y": torch.from_numpy(Y).float()[:, None]}
def make_reader():
    return from_records(data).shuffled(seed=1).batched(16)
def fit_net(epochs):
    with Job("net", steps_per_epoch=4) as made, Node("trainer"):
        add_tasks(made)
    epoch_limiter(made, epochs)
    return made
"""
_LIGHTNING_FOUND = """
policies = {"save": SaveEvery(epochs=2), "keep": KeepBest("loss", 3) | KeepLast(1)}
manager = MultiNodeCheckpointManager("runs/net", **policies)
kept = []
with Session.local(workers=1, processes=False) as session:
    for epochs in (10, 12):
        torch.manual_seed(0)
        JobRunner(fit_net(epochs), manager).run(session)
        kept.append(manager.epochs())
weights = {
    epoch: [value.tolist() for value in manager.open(epoch)["trainer"].load("net").values()]
    for epoch in manager.epochs()
}
reader = make_reader()
class Loader:
    def __len__(self):
        return 4
    def __iter__(self):
        yield from ((it["x"], it["y"]) for it in reader)
"""


def _lightning(epochs: int) -> str:
    """The page's program, for so many epochs; then it lists what it has kept."""
    code = block("coming-from/lightning.md", "class LitModel").code
    changed = code.replace("max_epochs=10", f"max_epochs={epochs}")
    return f"""
torch.manual_seed(0)
{changed}
found = {{}}
for path in checkpoint.best_k_models:
    state = torch.load(path, weights_only=False)
    found[state["epoch"] + 1] = [it.tolist() for it in state["state_dict"].values()]
theirs.append(found)
"""


@pytest.mark.nightly
def test_lightning_and_our_job_keep_the_same_epochs_with_the_same_weights(tmp_path: Path) -> None:
    _requires("lightning", "torch")
    steps = block("coming-from/lightning.md", "def make_optimizer").code
    runs = "loader, theirs = Loader(), []" + _lightning(10) + _lightning(12)
    end = "print(json.dumps([kept, weights, theirs]))"
    program = _ours("lightning") + _LIGHTNING + steps + _LIGHTNING_FOUND + runs + end
    kept, weights, theirs = _run(program, tmp_path)
    assert kept == [sorted(map(int, found)) for found in theirs] == [[6, 8, 10], [8, 10, 12]]
    assert weights == theirs[-1]


_RAY = """
import tempfile
import ray, ray.data, torch, torch.distributed
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
ours = [MultiNodeCheckpointManager("../runs/fit").open(epoch)["trainer:0"].load("w").tolist()
        for epoch in (10, 12)]
data = [np.concatenate([X, Y[:, None]], axis=1)] * 2  # one block for each worker
step = train
def train(w, batch, lr):
    rows, reported = batch["data"], []
    errors = rows[:, :3] @ w - rows[:, 3]
    return w - lr * rows[:, :3].T @ errors / len(errors), (errors**2).mean()
def average(w):
    w = torch.from_numpy(w)
    torch.distributed.all_reduce(w)
    return w.numpy() / 2
def save(directory, w, epoch):
    np.savez(directory + "/state.npz", w=w, epoch=epoch)
def load(directory):
    with np.load(directory + "/state.npz") as state:
        return state["w"], int(state["epoch"])
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
theirs = []
"""


@pytest.mark.nightly
def test_ray_and_our_job_have_the_same_weights_also_after_a_resume(tmp_path: Path) -> None:
    _requires("ray", "torch", "pydantic")
    whole = ".shuffled(seed=1).sharded(i, n)"  # so that Ray's workers read the same
    ours = _ours("ray")
    assert whole in ours
    code = block("coming-from/ray.md", "def train_func").code
    assert "s3://bucket" in code
    code = code.replace("s3://bucket", str(tmp_path / "ray"))
    read = "w, epoch = load(result.checkpoint.path)\ntheirs.append([w.tolist(), epoch])\n"
    runs = code + read + code.replace('"epochs": 10', '"epochs": 12') + read
    end = "print(json.dumps([ours, theirs, len(result.best_checkpoints)]))"
    program = ours.replace(whole, "") + _RAY + runs + end
    (w10, w12), theirs, kept = _run(program, tmp_path)
    assert theirs == [[pytest.approx(w10), 10], [pytest.approx(w12), 12]]
    assert kept == 2
