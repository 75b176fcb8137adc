"""What writes to S3 is killed at a request, before it counts or after: the next run goes on.

A process is killed from the server's side, so at a request that has really been made. ``refused``: the
request changes nothing. ``unheard``: it is carried out, and nobody hears of it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from jobrunner import JobRunner, MultiNodeCheckpointManager, Session

sys.path.insert(0, str(Path(__file__).parent))
import drift_job

from tests.object_servers import Request, S3Server

pytestmark = pytest.mark.nightly

HERE = Path(__file__).parent
EPOCHS = 7

How = Literal["refused", "unheard"]
Aim = Callable[[Request], object]


class Killer:
    """Kills a process, and all of its group, at the first request that is aimed at."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._aim: Aim | None = None

    def start(self, command: list[str], aim: Aim | None, how: How) -> subprocess.Popen[bytes]:
        """Start what is to be killed; with no aim, it is let live."""
        with self._lock:
            self._aim, self._how = aim, how
            self.process = subprocess.Popen(
                [sys.executable, *command],
                start_new_session=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
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


@pytest.fixture
def killer(s3: S3Server) -> Killer:
    s3.watch = killer = Killer()
    return killer


def of_store(method: str, part: str) -> Aim:
    """At a request for a path that has such a part; a store of a later attempt has a label."""
    return lambda request: request.method == method and re.search(part, request.path)


def is_kind(kind: bytes, epoch: int) -> Aim:
    return lambda request: request.is_entry(kind, epoch)


def deletes(part: bytes) -> Aim:
    return lambda request: request.query == "delete" and re.search(part, request.body)


def final_state(path: str | Path) -> tuple[bytes, dict[str, object]]:
    manager = MultiNodeCheckpointManager(path)
    manager.verify(EPOCHS)
    checkpoint = manager.open(EPOCHS)
    samples = manager.history_of("samples").compute()
    assert samples.shape == (drift_job.NODES, 3 * EPOCHS, 2)
    return samples.tobytes(), {
        node: (np.asarray(checkpoint[node]["x"]).tobytes(), checkpoint[node]["history"])
        for node in checkpoint
    }


# Where it is killed, how, and which is then the newest recorded epoch: at least, at most. One entry
# may record several.
STRIKES: list[tuple[Aim, How, int, int]] = [
    (of_store("PUT", r"/part:1\.2/x/c"), "refused", 0, 1),
    (is_kind(b"commit", 3), "refused", 0, 2),
    (is_kind(b"commit", 4), "unheard", 4, EPOCHS),
    (of_store("PUT", r"/part:2\.5(\.r\d+)?/zarr\.json"), "unheard", 4, 4),
    (of_store("PUT", r"/samples/part:1/c\.0"), "unheard", 4, EPOCHS),
    (deletes(rb"/part:0\.5(\.r\d+)?/"), "unheard", 4, EPOCHS),
]


def test_killed_in_mid_save_and_mid_commit_the_job_goes_on_from_what_is_recorded(
    s3: S3Server, killer: Killer, inproc_client, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("DRIFT_SAMPLES", "1")
    url = f"{s3.url}/drift"
    command = ["-m", "jobrunner", "run", str(HERE / "drift_job.py"), "--checkpoint", url]
    command += ["--workers", "2", "--threads", "1", "--keep-last", "2", "--epochs", str(EPOCHS)]
    for aim, how, least, most in STRIKES:
        process = killer.start(command, aim, how)
        output = process.communicate(timeout=120)[0].decode()
        assert process.returncode == -signal.SIGKILL, output
        latest = MultiNodeCheckpointManager(url).latest()
        assert latest is not None
        assert least <= latest <= most
    process = killer.start(command, None, "refused")
    assert process.wait(timeout=120) == 0, process.stdout.read().decode()
    process.stdout.close()
    with Session(inproc_client) as session:
        manager = MultiNodeCheckpointManager(tmp_path)
        JobRunner(drift_job.build(has_samples=True), manager, num_epochs=EPOCHS).run(session)
    assert final_state(url) == final_state(tmp_path)
