"""The examples run, resume, and give the same bits however they are run."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

from jobrunner import (
    JobRunner,
    KeepBest,
    MultiNodeCheckpointManager,
    Position,
    SaveEvery,
    Session,
    TaskFailedError,
    current_task,
)
from jobrunner.run import RunResult

_EXAMPLES = Path(__file__).parents[2] / "examples"


def _load(name: str) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location(f"example_{name}", _EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    yield module
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules[module.__name__]


@pytest.fixture
def kmeans() -> Iterator[Any]:
    yield from _load("kmeans")


@pytest.fixture
def digits() -> Iterator[Any]:
    pytest.importorskip("sklearn", reason="the digits example needs scikit-learn")
    yield from _load("train_digits")


@pytest.fixture
def sampler() -> Iterator[Any]:
    yield from _load("sampler")


@pytest.fixture
def heat() -> Iterator[Any]:
    yield from _load("heat")


@pytest.fixture
def regression() -> Iterator[Any]:
    yield from _load("regression")


def _run(session: Session, job: Any, directory: Path, num_epochs: int | None = None) -> RunResult:
    manager = MultiNodeCheckpointManager(directory)
    return JobRunner(job, manager, num_epochs=num_epochs).run(session)


def test_kmeans_agrees_with_a_plain_loop(
    kmeans: Any, inproc_session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = kmeans.build_job(trainers=3, points=500)
    manager = MultiNodeCheckpointManager(tmp_path)
    result = JobRunner(job, manager).run(inproc_session)
    assert result.stopped_by == "server/stood_still"
    nodes = manager.open(result.epoch)
    points = np.concatenate([nodes[f"trainer:{i}"].load("points") for i in range(3)])
    centroids = nodes["server"].load("centroids")
    assert centroids.shape == (5, 2)
    nearest = ((points[:, None] - centroids) ** 2).sum(axis=2).argmin(axis=1)
    means = [points[nearest == i].mean(axis=0) for i in range(5)]
    np.testing.assert_allclose(centroids, means, rtol=0, atol=1e-9)
    inertias = [metrics["inertia"] for metrics in result.metrics]
    assert all(later <= earlier for earlier, later in pairwise(inertias))
    assert "5 clusters of 1,500 points:" in capsys.readouterr().out


def test_kmeans_stopped_and_resumed_gives_the_same_bits(
    kmeans: Any, inproc_client: Client, tmp_path: Path
) -> None:
    with Session(inproc_client) as session:
        once = _run(session, kmeans.build_job(points=2_000), tmp_path / "a")
        for num_epochs in (1, 4, None):
            job = kmeans.build_job(points=2_000)
            last = _run(session, job, tmp_path / "b", num_epochs)
    assert (last.resumed_from, last.epoch) == (4, once.epoch)
    whole, parts = (
        MultiNodeCheckpointManager(tmp_path / name).open(once.epoch)["server"].load("centroids")
        for name in ("a", "b")
    )
    assert whole.tobytes() == parts.tobytes()


def test_heat_flows_as_on_one_plate_on_any_number_of_workers(heat: Any, tmp_path: Path) -> None:
    plate = heat.cold_plate_with_hot_square(0, 1, 32)
    for _ in range(20):
        heat.step(plate[-1].copy(), plate[0].copy(), plate)
    for workers in (1, 3):
        output = tmp_path / f"{workers}.npy"
        with Session.local(workers, threads_per_worker=1, processes=False) as session:
            job = heat.build_job(blocks=3, size=32, epochs=20, output=str(output))
            assert _run(session, job, tmp_path / str(workers)).epoch == 20
        np.testing.assert_array_equal(np.load(output), plate)


def test_heat_stopped_and_resumed_gives_the_same_bits(
    heat: Any, inproc_client: Client, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole.npy", tmp_path / "parts.npy"
    with Session(inproc_client) as session:
        _run(session, heat.build_job(size=32, epochs=12, output=str(whole)), tmp_path / "a")
        for epochs in (5, 12):
            job = heat.build_job(size=32, epochs=epochs, output=str(parts))
            last = _run(session, job, tmp_path / "b")
    assert (last.resumed_from, last.epoch) == (5, 12)
    assert whole.read_bytes() == parts.read_bytes()


def _plain(value: Any) -> Any:
    """Turn the tensors of a state into arrays."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.numpy() if hasattr(value, "numpy") else value


def test_digits_interrupted_within_an_epoch_end_with_the_same_bits(
    digits: Any, inproc_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(path: Path) -> RunResult:
        job = digits.build_job(trainers=2, batch=128, epochs=2)  # 6 steps
        manager = MultiNodeCheckpointManager(path, save=SaveEvery(steps=4))
        return JobRunner(job, manager).run(session)

    def states(path: Path) -> dict[str, Any]:
        nodes = MultiNodeCheckpointManager(path).open(2)
        return {
            node: {blob: _plain(nodes[node].load(blob)) for blob in nodes[node]} for node in nodes
        }

    compute_gradients = digits.compute_gradients

    def fail_late(network: Any, images: Any, labels: Any) -> Any:
        if (current_task().epoch, current_task().step) == (2, 5):
            raise RuntimeError("interrupted")
        return compute_gradients(network, images, labels)

    with Session(inproc_client) as session:
        whole = train(tmp_path / "whole")
        monkeypatch.setattr(digits, "compute_gradients", fail_late)
        with pytest.raises(TaskFailedError, match="interrupted"):
            train(tmp_path / "parts")
        monkeypatch.undo()
        parts = train(tmp_path / "parts")
    assert parts.resumed_from == Position(1, 2)
    np.testing.assert_equal(states(tmp_path / "parts"), states(tmp_path / "whole"))
    assert parts.metrics[-1] == whole.metrics[-1]
    assert whole.metrics[-1]["accuracy"] > 0.5


def test_digits_interrupted_at_random_end_early_with_the_same_best_weights(
    digits: Any, inproc_client: Client, tmp_path: Path
) -> None:
    def train(path: Path, num_epochs: int | None = None) -> RunResult:
        manager = MultiNodeCheckpointManager(path, keep=KeepBest("accuracy", mode="max"))
        made = digits.build_job(trainers=3, batch=512, epochs=50, lr=2.0)
        runner = JobRunner(made, manager, callbacks=[digits.stop_early()], num_epochs=num_epochs)
        return runner.run(session)

    with Session(inproc_client) as session:
        whole = train(tmp_path / "whole")
        for epoch in sorted(random.Random(5).sample(range(1, whole.epoch), 2)):
            train(tmp_path / "parts", epoch)
        parts = train(tmp_path / "parts")
    assert whole.epoch < 50
    assert (parts.epoch, parts.stopped_by) == (whole.epoch, whole.stopped_by)
    best = [
        MultiNodeCheckpointManager(tmp_path / name).open("best:accuracy:max")
        for name in ("whole", "parts")
    ]
    assert best[0].epoch == best[1].epoch < whole.epoch
    networks = [_plain(checkpoint["trainer:0"].load("network")) for checkpoint in best]
    np.testing.assert_equal(networks[0], networks[1])


def test_a_sampler_interrupted_at_random_has_the_same_draws(
    sampler: Any, inproc_client: Client, tmp_path: Path
) -> None:
    options = {"chains": 3, "epochs": 8}
    with Session(inproc_client) as session:
        _run(session, sampler.build_job(**options), tmp_path / "whole")
        for epoch in [*sorted(random.Random(3).sample(range(1, 8), 2)), None]:
            _run(session, sampler.build_job(**options), tmp_path / "parts", epoch)
    whole, parts = (
        MultiNodeCheckpointManager(tmp_path / name).history_of("draws").compute(scheduler="sync")
        for name in ("whole", "parts")
    )
    assert whole.shape == (3, 8 * sampler.DRAWS, 2)
    assert whole.tobytes() == parts.tobytes()


def test_a_sampler_is_summarized_in_xarray(
    sampler: Any, inproc_session: Session, tmp_path: Path
) -> None:
    pytest.importorskip("xarray")
    _run(inproc_session, sampler.build_job(), tmp_path)
    with dask.config.set(scheduler="sync"):
        summary = sampler.summarize(MultiNodeCheckpointManager(tmp_path))
    for name, counts in sampler.COUNTS.items():
        exact = (sum(counts) + 1) / (len(counts) + 0.1)  # of the Gamma distribution
        assert abs(float(summary["mean"].sel(rate=name)) - exact) < 0.15
    assert float(summary["r_hat"].max()) < 1.1


def _outcome(path: Path, epoch: str) -> dict[str, Any]:
    """What a run has recorded of its newest epoch and of another, and its history."""
    manager = MultiNodeCheckpointManager(path)
    found = {}
    for checkpoint in (manager.open("latest"), manager.open(epoch)):
        for node in checkpoint:
            for blob in checkpoint[node]:
                found[f"{checkpoint.epoch} {node} {blob}"] = checkpoint[node].digest(blob)
                if blob == "draws":
                    found["draws"] = manager.history_of(blob).compute(scheduler="sync").tobytes()
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "epoch", "options"),
    [
        ("sampler", "latest", "chains=6 epochs=300"),
        ("train_digits", "best:accuracy:max", "epochs=60 trainers=3 batch=32"),
    ],
)
def test_killed_at_random_moments_an_example_ends_with_the_same_bits(
    name: str, epoch: str, options: str, tmp_path: Path
) -> None:
    pytest.importorskip("sklearn", reason="the digits example needs scikit-learn")
    chance = random.Random(name)
    command = [sys.executable, "-m", "jobrunner", "run", str(_EXAMPLES / f"{name}.py")]
    command += ["--workers", "2", "--threads", "1", "--keep-last", "2"]
    for option in options.split():
        command += ["--param", option]
    if name == "train_digits":
        command += ["--callback", "stop_early", "--keep-best", "accuracy:max"]
        command += ["--save-every", "2steps"]

    def start(path: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, "--checkpoint", str(path)], start_new_session=True)

    def reached(path: Path) -> int:
        return Position.of(MultiNodeCheckpointManager(path).latest() or 0).epoch

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait(300) == 0
    kills = 0
    for _ in range(100):
        driver = start(killed)
        aim = reached(killed) + chance.randint(1, max(2, reached(whole) // 8))
        deadline = time.monotonic() + 120
        while driver.poll() is None and kills < 8 and time.monotonic() < deadline:
            if reached(killed) >= aim:
                os.killpg(driver.pid, signal.SIGKILL)
                kills += 1
                break
            time.sleep(chance.uniform(0.001, 0.02))  # a random moment, not an order
        if driver.wait(300) == 0:
            break
        assert driver.returncode == -signal.SIGKILL
    assert kills > 2
    assert _outcome(killed, epoch) == _outcome(whole, epoch)


# ---- a regression on a persisted Dask array


EPOCHS, ROWS = 12, 2_000


class Upheavals:
    """Calls functions after epochs, once each."""

    def __init__(self, **calls):
        self.calls = {int(name.removeprefix("after_")): call for name, call in calls.items()}
        self.workers = []

    def on_epoch(self, epoch, seconds, metrics):
        if epoch in self.calls:
            self.calls.pop(epoch)()

    def on_placement(self, placement):
        self.workers.append({*placement.values()})


def weights(path):
    return MultiNodeCheckpointManager(path).open(EPOCHS)["server"].load("w").tobytes()


def test_workers_join_leave_and_die_and_the_bits_stay(regression, inproc_session, tmp_path):
    x, y = regression.make_data(ROWS, 5, blocks=6)
    job = regression.build_from(*inproc_session.client.persist([x, y]), EPOCHS)
    JobRunner(job, MultiNodeCheckpointManager(tmp_path / "whole")).run(inproc_session)
    spread = inproc_session.client.compute(regression.residuals(inproc_session, 6).std()).result()
    assert spread == pytest.approx(0.1, rel=0.1)
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        LocalCluster(**options) as cluster,
        Client(cluster, set_as_default=False) as client,
        Session(client) as session,
    ):
        first, second = client.scheduler_info()["workers"]
        deaths = []

        def kill_second():
            deaths.append(client.submit(os._exit, 1, workers=[second], retries=0))

        upheavals = Upheavals(
            after_2=lambda: client.retire_workers([first]),
            after_4=lambda: cluster.scale(3),
            after_7=kill_second,
        )
        job = regression.build_from(*client.persist([x, y]), EPOCHS)
        manager = MultiNodeCheckpointManager(tmp_path / "parts")
        result = JobRunner(job, manager, callbacks=[upheavals]).run(session)
    assert (result.epoch, result.restarts) == (EPOCHS, 1)
    assert upheavals.workers[0] == {first, second}
    assert first not in upheavals.workers[1]
    assert second not in upheavals.workers[-1]
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
