"""Take the picture of the report: ``python docs/images/report.py [DIRECTORY]``.

The job below really runs: two of its workers are killed, then the whole run is killed and resumed.
DIRECTORY keeps its checkpoints and the page. Needs ``pip install -e '.[browser]'`` and Chromium.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from jobrunner import MultiNodeCheckpointManager

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KILLED_AT = 19  # epoch

JOB = """
import time

import numpy as np

from jobrunner import Job, Mean, Node, Task, current_task, epoch_limiter
from jobrunner.testing import Struck

TRAINERS = [Node(f"trainer:{i}") for i in range(3)]
SERVER = Node("server")


def make_data():
    rng = current_task().rng
    x = rng.normal(size=(20_000, 50))
    return x, x @ np.arange(50.0) + rng.normal(size=len(x))


def gradient(data, weights):
    x, y = data
    error = x @ weights - y
    current_task().report(loss=Mean(float(error @ error), len(y)))
    time.sleep(0.3 + 0.2 * current_task().rng.random())
    return x.T @ error / len(y)


def step(weights, *gradients):
    time.sleep(0.05)
    return weights - 0.1 * np.mean(gradients, axis=0)


with Job("regression") as job:
    with job.init_group:
        Task(lambda: np.zeros(50), outputs="weights", node=SERVER, name="make_weights")
        for trainer in TRAINERS:
            Task(make_data, outputs="data", node=trainer)
    for i, trainer in enumerate(TRAINERS):
        fn = Struck(gradient, epoch=(11, 28, 0)[i], flag=f"struck.{i}")
        Task(fn, inputs=["data", SERVER["weights"]], outputs="gradient", node=trainer)
    Task(step, inputs=["weights", *(it["gradient"] for it in TRAINERS)], outputs="weights", node=SERVER)
epoch_limiter(job, 40)
"""


def make_page(directory: Path) -> Path:
    """Run the job, kill it, and resume it; return the page of what happened."""
    (directory / "regression.py").write_text(JOB)
    words = "run regression.py --checkpoint runs/regression --workers 4"
    command = [sys.executable, "-m", "jobrunner", *words.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=directory, env=environment, start_new_session=True) as run:
        for epoch in MultiNodeCheckpointManager(directory / "runs/regression").watch(
            timeout_seconds=60
        ):
            if epoch >= KILLED_AT:
                os.killpg(run.pid, signal.SIGKILL)
                break
    subprocess.run(command, cwd=directory, env=environment, check=True)
    write = [*command[:3], "report", "runs/regression"]
    subprocess.run(write, cwd=directory, env=environment, check=True)
    return directory / "report.html"


def take_picture(page: Path) -> None:
    """Write the picture beside this file."""
    chromium = shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1180, "height": 1500}, color_scheme="light")
        tab.goto(page.as_uri())
        taken = Image.open(io.BytesIO(tab.screenshot()))
        taken.convert("RGB").quantize(192).save(HERE / "report.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(sys.argv[1] if len(sys.argv) > 1 else scratch).resolve()
        kept.mkdir(parents=True, exist_ok=True)
        take_picture(make_page(kept))
