"""The driver's whole process group dies at random moments; the job comes to the same end."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jobrunner import CheckpointCorruptError, JobRunner, MultiNodeCheckpointManager, Session

sys.path.insert(0, str(Path(__file__).parent))
import drift_job

SCRIPT = Path(__file__).with_name("drift_job.py")


def final_state(path):
    manager = MultiNodeCheckpointManager(path)
    checkpoint = manager.open(drift_job.EPOCHS)
    samples = manager.history_of("samples").compute()
    assert samples.shape == (drift_job.NODES, 3 * drift_job.EPOCHS, 2)
    return samples.tobytes(), {
        node: (np.asarray(checkpoint[node]["x"]).tobytes(), checkpoint[node]["history"])
        for node in checkpoint
    }


@pytest.fixture(scope="module")
def uninterrupted(inproc_cluster, tmp_path_factory):
    from distributed import Client

    path = tmp_path_factory.mktemp("uninterrupted") / "ckpt"
    with Client(inproc_cluster, set_as_default=False) as client, Session(client) as session:
        JobRunner(drift_job.build(has_samples=True), MultiNodeCheckpointManager(path)).run(session)
    return path


def start_driver(path):
    command = [sys.executable, "-m", "jobrunner", "run", str(SCRIPT), "--checkpoint", str(path)]
    return subprocess.Popen(
        [*command, "--workers", "2", "--threads", "1"],
        env={**os.environ, "DRIFT_SAMPLES": "1"},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def latest(path):
    found = MultiNodeCheckpointManager(path).latest()
    return -1 if found is None else found


@pytest.mark.nightly
def test_killed_at_random_moments_the_job_ends_with_the_same_bits(tmp_path, uninterrupted):
    kills = 20
    path = tmp_path / "ckpt"
    chance = random.Random(20)
    reached = -1
    for kill in range(1000):
        driver = start_driver(path)
        if kill < kills:
            # Aim at the epochs rather than at the start-up: wait for one more than last time.
            aim = reached + chance.randint(1, max(2, drift_job.EPOCHS // (kills + 1)))
            deadline = time.monotonic() + 60
            while driver.poll() is None and latest(path) < aim and time.monotonic() < deadline:
                time.sleep(chance.uniform(0.001, 0.02))  # a random moment, not an order
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(driver.pid, signal.SIGKILL)
        output = driver.communicate(timeout=120)[0].decode()
        assert latest(path) >= reached, "the last recorded epoch went back"
        reached = latest(path)
        if driver.returncode == 0:
            break
        assert driver.returncode == -signal.SIGKILL, output
    assert reached == drift_job.EPOCHS
    assert kill >= min(kills, 2), "the driver was never killed in time"
    assert final_state(path) == final_state(uninterrupted)


def damage(store, how):
    """Spoil the largest file of a store that holds data."""
    target = max((p for p in store.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(target.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
        target.write_bytes(data)
    elif how == "cut":
        target.write_bytes(data[:-1])
    else:
        target.unlink()


@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a_damaged_newest_epoch_is_never_resumed_from_in_silence(
    inproc_client, tmp_path, uninterrupted, how
):
    path = tmp_path / "ckpt"
    manager = MultiNodeCheckpointManager(path)
    with Session(inproc_client) as session:
        JobRunner(drift_job.build(has_samples=True), manager, num_epochs=10).run(session)
    damage(Path(manager.get_ckpt_db_name("part:1", 10)), how)
    damage(Path(manager.get_ckpt_db_name("part:2", 9)), how)

    with Session(inproc_client) as session, pytest.raises(CheckpointCorruptError, match="part:1"):
        JobRunner(drift_job.build(has_samples=True), manager, 10).run(session)

    warnings = []

    class Listener:
        def on_warning(self, message):
            warnings.append(message)

    with Session(inproc_client) as session:
        result = JobRunner(drift_job.build(has_samples=True), manager, callbacks=[Listener()]).run(
            session
        )
    assert result.resumed_from == 8
    assert ["Epoch 10" in warnings[0], "Epoch 9" in warnings[1]] == [True, True]
    assert final_state(path) == final_state(uninterrupted)
