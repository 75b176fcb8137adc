"""The driver's whole process group dies; the job comes to the same end, bit for bit."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from jobrunner import CheckpointCorruptError, JobRunner, MultiNodeCheckpointManager, Session
from tests.faults import drift_job
from tests.jobs import Listener
from tests.object_servers import Request, S3Server

SCRIPT = Path(drift_job.__file__)


def final_state(path, epochs=drift_job.EPOCHS):
    manager = MultiNodeCheckpointManager(path)
    manager.verify(epochs)
    checkpoint = manager.open(epochs)
    samples = manager.history_of("samples").compute()
    assert samples.shape == (drift_job.NODES, 3 * epochs, 2)
    return samples.tobytes(), {
        node: (np.asarray(checkpoint[node]["x"]).tobytes(), checkpoint[node]["history"])
        for node in checkpoint
    }


def run(client, path, *epochs, **options):
    """Run the job in this process, to its end or up to an epoch."""
    manager = MultiNodeCheckpointManager(path)
    with Session(client) as session:
        return JobRunner(drift_job.build(), manager, *epochs, **options).run(session)


def start_driver(path, *options):
    command = [sys.executable, "-m", "jobrunner", "run", str(SCRIPT), "--checkpoint", str(path)]
    return subprocess.Popen(
        [*command, "--workers", "2", "--threads", "1", *options],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def latest(path):
    found = MultiNodeCheckpointManager(path).latest()
    return -1 if found is None else found


@pytest.mark.nightly
def test_killed_at_random_moments_the_job_ends_with_the_same_bits(tmp_path, inproc_client):
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
        output, _ = driver.communicate(timeout=120)
        assert latest(path) >= reached, "the last recorded epoch went back"
        reached = latest(path)
        if driver.returncode == 0:
            break
        assert driver.returncode == -signal.SIGKILL, output
    assert reached == drift_job.EPOCHS
    assert kill >= min(kills, 2), "the driver was never killed in time"
    run(inproc_client, tmp_path / "uninterrupted")
    assert final_state(path) == final_state(tmp_path / "uninterrupted")


def flip_a_bit(store):
    """Spoil the largest file of a store."""
    files = [path for path in store.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def test_a_damaged_newest_epoch_is_never_resumed_from_in_silence(inproc_client, tmp_path):
    path = tmp_path / "ckpt"
    run(inproc_client, path, num_epochs=10)
    flip_a_bit(path / "part:1.10")
    flip_a_bit(path / "part:2.9")
    with pytest.raises(CheckpointCorruptError, match="part:1"):
        run(inproc_client, path, 10)
    listener = Listener()
    result = run(inproc_client, path, num_epochs=15, callbacks=[listener])
    assert result.resumed_from == 8
    assert ["Epoch 10" in listener.warnings[0], "Epoch 9" in listener.warnings[1]] == [True, True]
    run(inproc_client, tmp_path / "undamaged", num_epochs=15)
    assert final_state(path, 15) == final_state(tmp_path / "undamaged", 15)


# --- killed at a request to S3, before it counts or after

How = Literal["refused", "unheard"]
"""``refused``: the request changes nothing. ``unheard``: it is carried out, and nobody hears of it."""
Aim = Callable[[Request], object]


class Killer:
    """Kills a process, and all of its group, at the first request that is aimed at.

    It does so from the server's side, so at a request that has really been made.
    """

    def __init__(self, server: S3Server) -> None:
        self._lock = threading.Lock()
        self._aim: Aim | None = None
        server.watch = self

    def start(self, aim: Aim, how: How, *command: str) -> subprocess.Popen[str]:
        with self._lock:
            self._aim, self._how = aim, how
            self.process = start_driver(*command)
        return self.process

    def __call__(self, request: Request) -> bool | Callable[[], None]:
        with self._lock:
            if self._aim is None or not self._aim(request):
                return False
            self._aim = None
            if self._how == "unheard":
                return self._kill
            self._kill()
            return True

    def _kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)


def of_store(method: str, part: str) -> Aim:
    """At a request for a path that has such a part; a store of a later save has another name."""
    return lambda request: request.method == method and re.search(part, request.path)


def is_kind(kind: bytes, epoch: int) -> Aim:
    return lambda request: request.is_entry(kind, epoch)


def deletes(part: bytes) -> Aim:
    return lambda request: request.query == "delete" and re.search(part, request.body)


# Where it is killed, how, and which is then the newest recorded epoch: at least, at most. One entry
# may record several.
STRIKES: list[tuple[Aim, How, int, int]] = [
    (of_store("PUT", r"/part:1\.2/x/c"), "refused", 0, 1),
    (is_kind(b"commit", 3), "refused", 0, 2),
    (is_kind(b"commit", 4), "unheard", 4, 7),
    (of_store("PUT", r"/part:2\.5(\.r\d+)?/zarr\.json"), "unheard", 4, 4),
    (of_store("PUT", r"/samples/part:1/c\.0"), "unheard", 4, 7),
    (deletes(rb"/part:0\.5(\.r\d+)?/"), "unheard", 4, 7),
]


@pytest.mark.nightly
def test_killed_in_mid_save_and_mid_commit_the_job_goes_on_from_what_is_recorded(
    s3: S3Server, inproc_client, tmp_path
) -> None:
    url = f"{s3.url}/drift"
    command = (url, "--keep-last", "2", "--epochs", "7")
    killer = Killer(s3)
    for aim, how, least, most in STRIKES:
        process = killer.start(aim, how, *command)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL, output
        assert least <= latest(url) <= most
    process = start_driver(*command)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    run(inproc_client, tmp_path / "uninterrupted", num_epochs=7)
    assert final_state(url, 7) == final_state(tmp_path / "uninterrupted", 7)
