"""Take the picture of a run on Dask's dashboard: ``python docs/images/dashboard.py``.

The job of ``report.py`` runs, and loses a worker. Needs ``pip install -e '.[browser]'`` and Chromium.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

START = """
from regression import job
from jobrunner import JobRunner, MultiNodeCheckpointManager, Session

if __name__ == "__main__":
    with Session.local(workers=4, threads_per_worker=1) as session:
        print(session.client.dashboard_link, flush=True)
        JobRunner(job, MultiNodeCheckpointManager("runs/regression")).run(session)
"""


def main() -> None:
    """Run the job, and take the picture once it has recovered from a loss."""
    from report import JOB

    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "DASK_JOBRUNNER__DASHBOARD": "true",
    }
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        Path(directory, "regression.py").write_text(JOB)
        Path(directory, "start.py").write_text(START)
        command = [sys.executable, "start.py"]
        options = {"cwd": directory, "env": environment, "start_new_session": True}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as run:
            link = run.stdout.readline().strip().removesuffix("/status")
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            page = browser.new_page(viewport={"width": 1100, "height": 520})
            page.goto(f"{link}/jobrunner")
            page.get_by_text("1 loss", exact=True).wait_for()
            page.get_by_text(re.compile(r"^epoch (1[3-9]|2\d)/40$")).wait_for()
            taken = Image.open(io.BytesIO(page.screenshot()))
            taken.convert("RGB").quantize(48).save(HERE / "dashboard.png", optimize=True)
            browser.close()
            os.killpg(run.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
