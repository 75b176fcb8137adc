"""The blocks of the pages "Coming from" that need Keras or PyTorch, in a run and a resumed one."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from jobrunner import Job, JobRunner, MultiNodeCheckpointManager, Session, Task, epoch_limiter
from jobrunner.data import from_records

PAGES = Path(__file__).parents[1] / "docs" / "coming-from"
X = np.random.default_rng(0).random((64, 3), dtype="float32")
Y = (X @ [1.0, 2.0, 3.0]).astype("float32")[:, None]


@pytest.fixture
def block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], ModuleType]:
    """Makes a module of the block of a page that has a text."""

    def make(page: str, text: str, imports: str) -> ModuleType:
        blocks = re.findall(r"^```py\n(.*?)^```$", (PAGES / page).read_text(), re.M | re.S)
        [code] = [each for each in blocks if text in each]
        name = f"block_of_{page.removesuffix('.md')}"
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
    block: Any, inproc_session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    pytest.importorskip("keras", reason="keras is not installed")
    imports = "import keras\nimport numpy as np\nfrom jobrunner import current_task"
    page = block("keras.md", "class Trained", imports)
    made = {
        "trained": page.Trained,
        "reader": lambda: from_records({"x": X, "y": Y}).shuffled(seed=1).batched(16),
    }
    _resumes_alike(made, page.train, inproc_session, tmp_path)


def test_a_module_of_pytorch_is_trained_as_the_page_of_lightning_says(
    block: Any, inproc_session: Session, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    imports = "import torch\nfrom torch.nn import functional as F\nfrom jobrunner import Mean, current_task"
    page = block("lightning.md", "def make_optimizer", imports)

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
