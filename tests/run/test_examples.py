"""The examples run, resume, and give the same bits however they are run."""

import contextlib
import importlib.util
import os
import sys
from itertools import pairwise
from pathlib import Path

import cloudpickle
import dask
import numpy as np
import pytest

from jobrunner import (
    JobRunner,
    MultiNodeCheckpointManager,
    Position,
    SaveEvery,
    Session,
    TaskFailedError,
    current_task,
)
from tests.processes import own_session

_EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def load():
    """Imports an example; its functions are pickled by value."""
    with contextlib.ExitStack() as undo:

        def load(name):
            spec = importlib.util.spec_from_file_location(
                f"example_{name}", _EXAMPLES / f"{name}.py"
            )
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[module.__name__] = module
            undo.callback(sys.modules.pop, module.__name__)
            spec.loader.exec_module(module)
            cloudpickle.register_pickle_by_value(module)
            undo.callback(cloudpickle.unregister_pickle_by_value, module)
            return module

        yield load


def _run(session, job, directory, num_epochs=None):
    manager = MultiNodeCheckpointManager(directory)
    return JobRunner(job, manager, num_epochs=num_epochs).run(session)


def test_kmeans_agrees_with_a_plain_loop(load, inproc_session, tmp_path, capsys):
    job = load("kmeans").build_job(trainers=3, points=500)
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


def test_heat_flows_as_on_one_plate_on_any_number_of_workers(load, tmp_path):
    heat = load("heat")
    plate = heat.cold_plate_with_hot_square(0, 1, 32)
    for _ in range(20):
        heat.step(plate[-1].copy(), plate[0].copy(), plate)
    for workers in (1, 3):
        output = tmp_path / f"{workers}.npy"
        with Session.local(workers, threads_per_worker=1, processes=False) as session:
            job = heat.build_job(blocks=3, size=32, epochs=20, output=str(output))
            assert _run(session, job, tmp_path / str(workers)).epoch == 20
        np.testing.assert_array_equal(np.load(output), plate)


def _recorded(path):
    """Digests of the newest epoch's blobs, and the rows of all epochs."""
    manager = MultiNodeCheckpointManager(path)
    checkpoint = manager.open("latest")
    recorded = {}
    for node in checkpoint:
        for blob in checkpoint[node]:
            recorded[f"{node}/{blob}"] = checkpoint[node].digest(blob)
            if blob == "draws":
                recorded["rows"] = manager.history_of(blob).compute(scheduler="sync").tobytes()
    return recorded


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kmeans", {"points": 2_000}),
        ("heat", {"size": 32, "epochs": 8}),
        ("sampler", {"chains": 3, "epochs": 8}),
    ],
)
def test_an_example_stopped_and_resumed_ends_with_the_same_bits(
    name, options, load, inproc_session, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    example = load(name)
    whole = _run(inproc_session, example.build_job(**options), tmp_path / "whole")
    for num_epochs in (1, 4, None):
        job = example.build_job(**options)
        last = _run(inproc_session, job, tmp_path / "parts", num_epochs)
    assert (last.resumed_from, last.epoch) == (4, whole.epoch)
    assert _recorded(tmp_path / "parts") == _recorded(tmp_path / "whole")


def test_digits_interrupted_within_an_epoch_end_with_the_same_bits(
    load, inproc_session, tmp_path, monkeypatch
):
    pytest.importorskip("sklearn", reason="the digits example needs scikit-learn")
    digits = load("train_digits")

    def train(path):
        job = digits.build_job(trainers=2, batch=128, epochs=2)  # 6 steps
        manager = MultiNodeCheckpointManager(path, save=SaveEvery(steps=4))
        return JobRunner(job, manager).run(inproc_session)

    compute_gradients = digits.compute_gradients

    def fail_late(network, images, labels):
        if (current_task().epoch, current_task().step) == (2, 5):
            raise RuntimeError("interrupted")
        return compute_gradients(network, images, labels)

    whole = train(tmp_path / "whole")
    monkeypatch.setattr(digits, "compute_gradients", fail_late)
    with pytest.raises(TaskFailedError, match="interrupted"):
        train(tmp_path / "parts")
    monkeypatch.undo()
    parts = train(tmp_path / "parts")
    assert parts.resumed_from == Position(1, 2)
    assert _recorded(tmp_path / "parts") == _recorded(tmp_path / "whole")
    assert parts.metrics[-1] == whole.metrics[-1]
    assert whole.metrics[-1]["accuracy"] > 0.5


def test_a_sampler_is_summarized_in_xarray(load, inproc_session, tmp_path):
    pytest.importorskip("xarray")
    sampler = load("sampler")
    _run(inproc_session, sampler.build_job(), tmp_path)
    with dask.config.set(scheduler="sync"):
        summary = sampler.summarize(MultiNodeCheckpointManager(tmp_path))
    for name, counts in sampler.COUNTS.items():
        exact = (sum(counts) + 1) / (len(counts) + 0.1)  # of the Gamma distribution
        assert abs(float(summary["mean"].sel(rate=name)) - exact) < 0.15
    assert float(summary["r_hat"].max()) < 1.1


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


def test_workers_join_leave_and_die_and_the_bits_stay(load, inproc_session, tmp_path):
    regression = load("regression")
    x, y = regression.make_data(ROWS, 5, blocks=6)
    job = regression.build_from(*inproc_session.client.persist([x, y]), EPOCHS)
    JobRunner(job, MultiNodeCheckpointManager(tmp_path / "whole")).run(inproc_session)
    spread = inproc_session.client.compute(regression.residuals(inproc_session, 6).std()).result()
    assert spread == pytest.approx(0.1, rel=0.1)
    with own_session(2, processes=True) as (cluster, client, session):
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
