"""What the page on clusters shows, as a reader would use it: scripts, configurations and clusters."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest
import yaml

from jobrunner import MultiNodeCheckpointManager
from tests.pages import blocks
from tests.processes import await_file, await_true, dask_process, kill

_JOB = """\
import time

from jobrunner import Job, Node, Task, epoch_limiter


def add(n):
    time.sleep(0.05)
    return n + 1


with Job("train") as job, Node("a"):
    with job.init_group:
        Task(int, outputs="n")
    Task(add, inputs="n", outputs="n")
epoch_limiter(job, 60)
"""


def codes(language, about=""):
    """The blocks of the page in a language that contain a text."""
    return [block.code for block in blocks("clusters.md", language) if about in block.code]


# ---- TLS


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_with_the_certificates_of_the_page_a_job_runs_over_tls(tmp_path):
    (script,), (config,) = codes("sh"), codes("yaml", "ca-file")
    keys = tmp_path / "keys"
    keys.mkdir()
    subprocess.run(["bash", "-ec", script], cwd=keys, check=True, capture_output=True)
    assert all(path.stat().st_mode & 0o077 == 0 for path in keys.glob("*.pem"))
    (tmp_path / "dask").mkdir()
    (tmp_path / "dask" / "distributed.yaml").write_text(config.replace("/etc/dask", str(keys)))
    (tmp_path / "train.py").write_text(_JOB)
    where = tmp_path / "scheduler.json"
    own = ["env", f"DASK_CONFIG={tmp_path / 'dask'}"]
    local = ["--host", "127.0.0.1", "--no-dashboard"]
    with dask_process(
        *("scheduler", "--port", "0", "--scheduler-file", where), *local, cwd=tmp_path, prefix=own
    ):
        address = yaml.safe_load(await_file(where))["address"]
        assert address.startswith("tls://")
        with dask_process(
            *("worker", address, "--nworkers", "1", *local), cwd=tmp_path, prefix=own
        ):
            await_true(lambda: "Registered" in (tmp_path / "dask.log").read_text(), "a worker")
            command = ["run", "train.py", "--checkpoint", "runs/train", "--scheduler", address]
            command += ["--json", "--epochs"]
            done = run_command([*command, "2"], tmp_path, {"DASK_CONFIG": str(tmp_path / "dask")})
            assert done.returncode == 0, done.stderr
            assert yaml.safe_load(done.stdout)["epoch"] == 2
            refused = run_command(
                [*command, "3"], tmp_path, {"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "2s"}
            )
            assert refused.returncode == 5, refused.stderr


def run_command(command, directory, environment):
    return subprocess.run(
        [sys.executable, "-m", "jobrunner", *command],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


# ---- Slurm

_SCRIPTS = codes("bash")
_REQUEUED = "requeue 7\n"


class Slurm:
    """Runs batch scripts as Slurm would on one machine; its commands are scripts on the `PATH`."""

    def __init__(self, directory):
        self.directory, self.runs = directory, directory / "scratch" / "runs" / "train"
        self.requeued = directory / "scontrol.log"
        self._bin = directory / "bin"
        self._bin.mkdir()
        (directory / "train.py").write_text(_JOB)
        self.add("srun", f'echo $$ > {directory}/srun.pid; exec "$@"')
        self.add("scontrol", f'echo "$@" >> {self.requeued}')
        self.add("jobrunner", f'exec {sys.executable} -m jobrunner "$@"')
        self.add("dask", f'exec {sys.executable} -m dask "$@"')
        self.add("python", f'exec {sys.executable} "$@"')
        self.path = f"{self._bin}:{os.environ['PATH']}"

    def add(self, name, text):
        """Put a command on the `PATH`."""
        path = self._bin / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    @contextmanager
    def batch(self, script):
        """The script, for a block; whatever it has started ends with it, as in Slurm."""
        environment = {
            **os.environ,
            "PATH": self.path,
            "PYTHONPATH": os.getcwd(),
            "SCRATCH": str(self.directory / "scratch"),
            "TMPDIR": str(self.directory),
            "SLURM_JOB_ID": "7",
            "SLURM_CPUS_PER_TASK": "1",
            "SLURM_JOB_END_TIME": "4000000000",
        }
        process = subprocess.Popen(
            ["bash", "-c", script], cwd=self.directory, env=environment, start_new_session=True
        )
        try:
            yield process
        finally:
            kill(process)

    def await_epochs(self, more):
        """Wait until so many more epochs are recorded."""
        before = self.epochs()
        await_true(lambda: self.epochs() >= before + more, "more epochs")

    def epochs(self):
        return len(MultiNodeCheckpointManager(self.runs).epochs())


def small(script, **numbers):
    """The script with other numbers of what a machine has."""
    for option, number in numbers.items():
        name = option.replace("_", "-")
        script, count = re.subn(rf"(--{name}) \d+", rf"\1 {number}", script)
        assert count == 1, option
    return script


@pytest.mark.nightly
def test_a_job_of_slurm_is_requeued_and_ends(tmp_path):
    slurm = Slurm(tmp_path)
    script = small(_SCRIPTS[0], workers=1, threads=1)
    with slurm.batch(script) as process:
        slurm.await_epochs(3)
        # The time limit comes near: `--signal=TERM@300` is for what `srun` has started.
        os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGTERM)
        assert process.wait(60) == 75
    assert slurm.requeued.read_text() == _REQUEUED
    with slurm.batch(script):
        slurm.await_epochs(3)  # then the machine is lost, and Slurm requeues by itself
    with slurm.batch(script) as process:
        assert process.wait(60) == 0
    assert slurm.epochs() == 61
    assert slurm.requeued.read_text() == _REQUEUED


@pytest.mark.nightly
def test_a_job_of_slurm_on_several_machines_is_requeued_and_ends(tmp_path):
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    script = _SCRIPTS[1].replace("8786", str(port))
    script = script.replace("wait_for_workers(16", "wait_for_workers(1")
    script = small(script, nworkers=1, nthreads=1)
    slurm = Slurm(tmp_path)
    with slurm.batch(script) as process:
        slurm.await_epochs(3)
        process.send_signal(signal.SIGTERM)  # B: only the script
        assert process.wait(60) == 75
    assert slurm.requeued.read_text() == _REQUEUED
    with slurm.batch(script) as process:
        assert process.wait(60) == 0
    assert slurm.epochs() == 61


@pytest.mark.nightly
def test_workers_that_dask_jobqueue_submits_run_a_job(tmp_path, monkeypatch):
    pytest.importorskip("dask_jobqueue")
    slurm = Slurm(tmp_path)
    begin = 'setsid bash "$copy" > worker.log 2>&1 & echo Submitted batch job $!'
    slurm.add("sbatch", f'copy=$(mktemp -p {tmp_path}); cp "$1" "$copy"; {begin}')
    slurm.add("scancel", 'kill -KILL -- "-$1"')
    (code,) = codes("py")
    code = code.replace("/scratch/runs", str(tmp_path / "runs"))
    code = code.replace("cores=32", "cores=1").replace('"128GB"', '"1GB"')
    monkeypatch.setenv("PATH", slurm.path)
    monkeypatch.chdir(tmp_path)
    module = {"__name__": "__main__"}
    exec(compile(_JOB.replace("60", "3"), "train.py", "exec"), module)
    try:
        exec(compile(code, "slurm.md", "exec"), module)
        text = module["cluster"].job_script()
        assert "#SBATCH -t 04:00:00" in text
        assert "--lifetime 230m" in text
    finally:
        module["cluster"].close()
    assert MultiNodeCheckpointManager(tmp_path / "runs" / "train").epochs() == [0, 1, 2, 3]


# ---- Kubernetes

_MANIFESTS = {it["kind"]: it for it in map(yaml.safe_load, codes("yaml", "kind: "))}


def test_the_manifests_for_kubernetes_fit_each_other():
    cluster, run = _MANIFESTS["DaskCluster"], _MANIFESTS["Job"]
    (client,) = run["spec"]["template"]["spec"]["containers"]
    options = dict(zip(client["command"][3::2], client["command"][4::2], strict=True))
    assert options["--scheduler"] == f"tcp://{cluster['metadata']['name']}-scheduler:8786"
    assert (
        int(options["--grace"]) < run["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    )
    images = {
        part["spec"]["containers"][0]["image"]
        for part in (cluster["spec"]["worker"], cluster["spec"]["scheduler"])
    }
    assert images == {client["image"]}
