"""The blocks of pages that need a library which tests do not require."""

import importlib

import numpy as np
import pytest

from jobrunner import Job, JobRunner, MultiNodeCheckpointManager, Task, epoch_limiter
from jobrunner.data import from_iterable, from_records
from tests.pages import block

X = np.random.default_rng(0).random((64, 3), dtype="float32")
Y = (X @ [1.0, 2.0, 3.0]).astype("float32")[:, None]


def _resumes_alike(made, step, session, path):
    """Run whole, and interrupted after each epoch; expect the same weights; return the losses."""
    for name, stops in (("whole", [3]), ("resumed", [1, 2, 3])):
        for epochs in stops:
            with Job("fit", steps_per_epoch=4) as job:
                with job.init_group:
                    for blob, make in made.items():
                        Task(make, outputs=blob, name=blob, node="trainer")
                Task(step, updates=[*made], name="step", node="trainer")
            epoch_limiter(job, epochs)
            manager = MultiNodeCheckpointManager(path / name)
            JobRunner(job, manager).run(session)
    whole, resumed = (
        MultiNodeCheckpointManager(path / name).open(3)["trainer"].load("net").values()
        for name in ("whole", "resumed")
    )
    assert len(whole) > 1
    for one, other in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(one, other)
    return [row["metrics"]["loss"] for row in manager.past_epochs() if row["epoch"]]


def test_a_module_of_pytorch_is_trained_as_the_page_says(inproc_session, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    imports = "import torch\nfrom torch.nn import functional as F\nfrom jobrunner import Mean, current_task"
    code = block("coming-from.md", "def make_optimizer").code
    (tmp_path / "block_of_the_page.py").write_text(f"{imports}\n{code}")
    monkeypatch.syspath_prepend(tmp_path)
    page = importlib.import_module("block_of_the_page")

    def make_net():
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
    names = {
        "nn": torch.nn,
        "manager": MultiNodeCheckpointManager(tmp_path / "resumed"),
    }
    exec(block("values.md", "net = nn.Linear").code, names)
    loss = torch.nn.functional.mse_loss(names["net"](data["x"]), data["y"]).item()
    assert loss < losses[0]


@pytest.mark.filterwarnings("ignore")  # of its pickler
def test_a_shuffled_stream_of_hugging_face_loses_no_record_if_it_is_read_again():
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    data = datasets.Dataset.from_dict({"n": list(range(200))})
    dataset = data.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=50)
    code = block("data.md", "def stream").code

    def make_reader():
        names = {"dataset": dataset, "from_iterable": from_iterable}
        exec(code, names)
        return names["reader"]

    def numbers(reader):
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
