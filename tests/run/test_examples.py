"""The examples run, resume, and give the same bits however they are run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest
from distributed import Client

from jobrunner import JobRunner, MultiNodeCheckpointManager, RunResult, Session

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
    pytest.importorskip("sklearn", reason="the k-means example needs scikit-learn")
    yield from _load("kmeans")


@pytest.fixture
def heat() -> Iterator[Any]:
    yield from _load("heat")


def _run(session: Session, job: Any, directory: Path, num_epochs: int | None = None) -> RunResult:
    manager = MultiNodeCheckpointManager(directory)
    return JobRunner(job, manager, num_epochs=num_epochs).run(session)


def test_kmeans_agrees_with_a_plain_loop(
    kmeans: Any, process_client: Client, tmp_path: Path
) -> None:
    output = tmp_path / "centroids.npy"
    with Session(process_client) as session:
        result = _run(session, kmeans.build_job(trainers=3, output=str(output)), tmp_path / "runs")
    assert result.stopped_by == "server/stands still"
    centroids = np.load(output)
    assert centroids.shape == (10, 64)
    points = np.concatenate([kmeans.load_shard(i, 3) for i in range(3)])
    assert len(points) == 1797
    nearest = ((points[:, None, :] - centroids) ** 2).sum(axis=2).argmin(axis=1)
    means = [points[nearest == i].mean(axis=0) for i in range(10)]
    np.testing.assert_allclose(centroids, means, atol=1e-5)
    inertias = [metrics["inertia"] for metrics in result.metrics]
    assert all(later <= earlier for earlier, later in pairwise(inertias))


def test_kmeans_stopped_and_resumed_gives_the_same_bits(
    kmeans: Any, inproc_client: Client, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole.npy", tmp_path / "parts.npy"
    with Session(inproc_client) as session:
        once = _run(session, kmeans.build_job(output=str(whole)), tmp_path / "a")
        for num_epochs in (1, 4, None):
            job = kmeans.build_job(output=str(parts))
            last = _run(session, job, tmp_path / "b", num_epochs)
    assert (last.resumed_from, last.epoch) == (4, once.epoch)
    assert whole.read_bytes() == parts.read_bytes()


def test_heat_flows_as_on_one_plate(heat: Any, session: Session, tmp_path: Path) -> None:
    output = tmp_path / "plate.npy"
    job = heat.build_job(blocks=3, size=32, epochs=20, output=str(output))
    assert _run(session, job, tmp_path / "runs").epoch == 20
    plate = heat.cold_plate_with_hot_square(0, 1, 32)
    for _ in range(20):
        heat.step(plate[-1].copy(), plate[0].copy(), plate)
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


def test_heat_has_the_same_bits_on_1_2_and_4_workers(heat: Any, tmp_path: Path) -> None:
    plates = set()
    for workers in (1, 2, 4):
        output = tmp_path / f"{workers}.npy"
        with Session.local(workers, threads_per_worker=1, processes=False) as session:
            job = heat.build_job(blocks=4, size=64, epochs=10, output=str(output))
            _run(session, job, tmp_path / str(workers))
        plates.add(output.read_bytes())
    assert len(plates) == 1
