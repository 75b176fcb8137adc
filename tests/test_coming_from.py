"""The blocks that need a library which tests do not require, and a program of Caffe2 beside ours.

Where Caffe2 is installed, the program of the page and its like in Caffe2 run in a process of their own, and must come to
the same values.
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

    def make(text: str, imports: str) -> ModuleType:
        name = "block_of_the_page"
        code = block("coming-from.md", text).code
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
    whole, resumed = ([np.asarray(it) for it in state.values()] for state in states)
    assert len(whole) > 1
    assert all(map(np.array_equal, whole, resumed))
    return [row["metrics"]["loss"] for row in manager.history() if row["epoch"]]


def test_a_module_of_pytorch_is_trained_as_the_page_says(
    module: Any, inproc_session: Session, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    imports = "import torch\nfrom torch.nn import functional as F\nfrom jobrunner import Mean, current_task"
    page = module("def make_optimizer", imports)

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
    names: dict[str, Any] = {
        "nn": torch.nn,
        "manager": MultiNodeCheckpointManager(tmp_path / "resumed"),
    }
    exec(block("values.md", "net = nn.Linear").code, names)
    loss = torch.nn.functional.mse_loss(names["net"](data["x"]), data["y"]).item()
    assert loss < losses[0]


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


# ---- Caffe2's program beside ours


def _run(program: str, directory: Path, python: str = sys.executable) -> Any:
    """What a program prints last, as JSON; it runs in a directory, in a process of its own."""
    (directory / "program.py").write_text(program)
    done = subprocess.run(
        [python, "program.py"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _ours() -> str:
    """Our program of the page, then a new directory."""
    code = "".join(each.code for each in blocks("coming-from.md", "python"))
    return f"import json, os\n{code}\nos.mkdir('theirs')\nos.chdir('theirs')\n"


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


def build_trainer(i):
    with Node("trainer_%d" % i):
        with Job.current().init_group, Task():
            numbers = ConstRecord(ops, Struct(("value", np.arange(10))))
            reader = Dataset(numbers, name="numbers:%d" % i).reader(ops)
            total = ops.Const([100])

        def add(record):
            ops.Add([total, record.value()], [total])

        limited = ReaderWithLimit(reader, num_iter=3)
        pipe(limited, processor=add)
        Job.current().add_stop_condition(limited.data_finished())


with Job() as job:
    for i in range(2):
        build_trainer(i)
session = LocalSession(workspace.C.Workspace())
job.compile(LocalSession)
JobRunner(job, MultiNodeCheckpointManager("runs", "minidb")).train(session)
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
    theirs = _CAFFE2 + _CAFFE2_TOTALS
    _run(_ours() + "print(0)", tmp_path)
    found = _run(theirs, tmp_path / "theirs", python)
    assert found["trainer_1.4"] == [145]
    manager = MultiNodeCheckpointManager(tmp_path / "runs" / "sums")
    assert found == {
        f"{node}.{epoch}": manager.open(epoch)[node].load("total").tolist()
        for node in ("trainer_0", "trainer_1")
        for epoch in manager.epochs()
    }
