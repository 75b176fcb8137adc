"""`jobrunner run` on a real cluster: its output, its checkpoints and its exit codes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from jobrunner import MultiNodeCheckpointManager
from tests.cli.directories import invoke
from tests.processes import await_true, kill

_COUNT = """
import time
from jobrunner import Job, Task, current_task, epoch_limiter

def step(n):
    print("step", n, flush=True)
    current_task().report(n=n + 1)
    return n + 1

with Job("count") as job:
    with job.init_group:
        Task(lambda: 0, outputs="n", node="a")
    Task({step}, inputs="n", outputs="n", node="a", name="step")
    with job.exit_group:
        Task(lambda n: print("total", n), inputs="n", node="a", name="show")
epoch_limiter(job, {limit})
"""

_MADE = """
from jobrunner import (
    Job, KeepEvery, MultiNodeCheckpointManager, SaveEvery, Task, current_task, epoch_limiter, job
)
from jobrunner.callbacks import EarlyStopping, EpochLog
from jobrunner.checkpoint.storage.posix import PosixFiles

def make_stopping():
    return EarlyStopping("loss", patience=1, min_delta=0.1)

def manage(path, **options):
    options = {"save": SaveEvery(epochs=2), "metadata": {"data": "digits"}, **options}
    return MultiNodeCheckpointManager(path, **options)

class Full(PosixFiles):
    def before(self, operation, path):
        if operation == "create" and "/a.8/" in path:
            raise OSError(28, "No space left on device", path)

def full(path):
    return MultiNodeCheckpointManager(path, files=Full())

def elsewhere(path):
    return MultiNodeCheckpointManager("elsewhere")

settings, log = {"lr": 1}, EpochLog("own.csv")

def step(w, rate, fail_at):
    if current_task().epoch == fail_at:
        raise ValueError("as asked")
    current_task().report(loss=w)
    return w * rate

@job
def make(rate: float = 0.5, fail_at: int | None = None):
    with Job("made") as made:
        with made.init_group:
            Task(lambda: 1.0, outputs="w", node="a")
        Task(step, outputs="w", node="a", kwargs={"rate": rate, "fail_at": fail_at})
    epoch_limiter(made, 8)
    return made
"""


@pytest.fixture
def script(tmp_path):
    """A job that counts to four, by one in each epoch."""
    return _write(tmp_path)


@pytest.fixture
def made(tmp_path):
    """A job with parameters, and much else that options name."""
    path = tmp_path / "made.py"
    path.write_text(_MADE)
    return path


def _write(directory, *, step="step", limit=4):
    path = directory / "count.py"
    path.write_text(_COUNT.format(step=step, limit=limit))
    return path


@pytest.fixture
def run(process_cluster):
    """Run a script on a cluster, into a directory beside it."""
    address = process_cluster.scheduler_address

    def run(script, *args):
        runs = script.parent / "runs"
        return invoke("run", script, "--checkpoint", runs, "--scheduler", address, *args)

    return run


def _json(result):
    return json.loads(result.stdout)


def test_a_run_says_what_it_does_and_goes_on_where_it_stopped(run, script):
    first = _json(run(script, "--json", "--epochs", 2))
    assert (first["job"], first["epoch"], first["resumed_from"]) == ("count", 2, None)
    assert first["stopped_by"] == "epoch_limiter"
    assert [save["epoch"] for save in first["saves"]] == [0, 1, 2]
    second = run(script)
    assert second.exit_code == 0, second.output
    assert "from epoch 2: it is the last epoch recorded" in second.stdout
    assert "count: done at epoch 4, resumed from epoch 2, stopped by epoch_limiter" in second.stdout
    third = _json(run(script, "--json", "--resume", 1))
    assert (third["resumed_from"], [metrics["n"] for metrics in third["metrics"]]) == (1, [2, 3, 4])
    assert _json(run(script, "--json", "--resume", "none"))["epoch"] == 4
    missing = run(script, "--resume", 9)
    assert missing.exit_code == 6
    assert "recorded epochs: 0 to 4" in missing.stderr


def test_a_job_with_other_names_is_resumed_and_the_advice_repeats_them(run, tmp_path):
    assert run(_write(tmp_path), "--epochs", 1).exit_code == 0
    script = _write(tmp_path, step="lambda n: 1 // 0")
    made = 'Task(lambda: 5, outputs="five", node="c")\n        Task(lambda: 0'
    script.write_text(script.read_text().replace('"a"', '"b"').replace("Task(lambda: 0", made))
    failed = run(script, "--rename", "a=b", "--missing", "init")
    assert failed.exit_code == 3
    assert "--rename a=b --missing init" in failed.stderr
    assert MultiNodeCheckpointManager(tmp_path / "runs").open(1).nodes == ("c", "b")


def test_a_failing_task_shows_the_workers_traceback_and_no_other(run, tmp_path):
    script = _write(tmp_path, step="lambda n: n + 1 if n < 2 else 1 // 0")
    result = run(script)
    assert result.exit_code == 3
    assert "ZeroDivisionError" in result.stderr
    assert result.stderr.count("Traceback (most recent call last)") == 1
    assert "The last recorded epoch is 2. To resume from it: " in result.stderr
    error = _json(run(script, "--json"))["error"]
    assert (error["type"], error["node"], error["task"]) == ("TaskFailedError", "a", "step")
    assert f'  File "{script}", line ' in error["remote_traceback"]
    assert "    Task(lambda n: n + 1 if n < 2 else 1 // 0," in error["remote_traceback"]


@pytest.mark.parametrize(
    ("number", "exit_code", "told"),
    [
        (signal.SIGINT, 130, "Interrupted. The last recorded epoch is 2. To resume from it: "),
        pytest.param(
            signal.SIGTERM, 75, "again to resume from epoch 2.\n", marks=pytest.mark.nightly
        ),
    ],
)
def test_an_interrupted_run_keeps_its_epochs_and_says_how_to_resume(
    tmp_path, run, number, exit_code, told
):
    # The first epochs are quick; the third does not end.
    script = _write(tmp_path, step="lambda n: n + 1 if n != 2 else time.sleep(1e6)", limit=5)
    started = time.monotonic()
    with _start(script, "--workers", "1", "--sync", "--grace", "1") as process:
        manager = MultiNodeCheckpointManager(tmp_path / "runs")
        await_true(lambda: manager.latest() == 2, "epoch 2", process)
        start_seconds = time.monotonic() - started
        # To the whole group, as a terminal does it.
        os.killpg(process.pid, number)
        if number == signal.SIGINT:  # SIGTERM gives the epoch a second, as --grace says
            assert any("the run ends once its epoch" in line for line in process.stderr)
            os.killpg(process.pid, number)
        asked = time.monotonic()
        _, stderr = process.communicate()
    assert process.returncode == exit_code, stderr
    # Not as long as Dask would wait for that task. A busy machine, slow to start, is slow to end.
    assert time.monotonic() - asked < max(5, start_seconds), stderr
    assert told in stderr
    assert f"jobrunner run {script} --checkpoint runs --workers 1 --sync --grace 1" in stderr
    assert "Traceback" not in stderr
    _write(tmp_path, limit=5)
    resumed = _json(run(script, "--json"))
    assert (resumed["resumed_from"], resumed["epoch"]) == (2, 5)


def test_a_run_in_a_slurm_job_ends_before_the_limit_and_can_be_continued(
    tmp_path, run, monkeypatch
):
    script = _write(tmp_path, step="lambda n: time.sleep(0.02) or n + 1", limit=10**6)
    refused = run(script, "--stop-before", "60")
    assert refused.exit_code == 2
    assert "SLURM_JOB_END_TIME" in refused.stderr
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 61))
    ended = run(script, "--save-every", 10**6, "--stop-before", "60")
    assert ended.exit_code == 75, ended.output
    epoch = MultiNodeCheckpointManager(tmp_path / "runs").latest()
    assert f"again to resume from epoch {epoch}.\n" in ended.stderr
    assert _json(run(script, "--epochs", epoch + 1, "--json"))["resumed_from"] == epoch


def test_sigusr1_asks_a_real_process_for_a_save_and_json_is_alone_on_stdout(tmp_path):
    gate = tmp_path / "gate"
    script = _write(tmp_path, step="wait", limit=6)
    wait = f"""
def wait(n):
    while n == 2 and not os.path.exists({str(gate)!r}):
        time.sleep(0.01)
    return step(n)
"""
    script.write_text(f"import os\n{wait}{script.read_text()}")
    options = ["--workers", "1", "--save-every", "100", "--json"]
    with _start(script, *options, DASK_JOBRUNNER__BATCH_SECONDS="0") as process:
        manager = MultiNodeCheckpointManager(tmp_path / "runs")
        await_true(lambda: manager.latest() == 0, "epoch 0", process)
        process.send_signal(signal.SIGUSR1)
        gate.touch()  # epoch 3 has waited for it
        stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["epoch"] == 6
    assert "total 6" in stderr
    first, asked, last = manager.epochs()
    assert (first, asked <= 3, last) == (0, True, 6)


def test_ctrl_c_while_workers_start_is_one_line(tmp_path):
    script = _write(tmp_path)
    with _start(script) as process:
        parent = psutil.Process(process.pid)
        # One child is Python's resource tracker.
        await_true(lambda: len(parent.children()) >= 2, "the first worker", process)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate()
    assert process.returncode == 130
    again = f"jobrunner run {script} --checkpoint runs"
    assert stderr == f"Interrupted. No epoch is recorded yet. To start again: {again}\n"


def test_parameters_and_all_options_of_a_manager_reach_the_run(
    process_cluster, run, made, tmp_path
):
    options = ["--save-every", "2", "--sync", "--keep-best", "loss:max:1", "--keep-last", "1"]
    given = ["--param", "rate=0.25", "--param", "fail_at=7"]
    failed = run(made, *options, *given)
    assert failed.exit_code == 3
    again = next(line for line in failed.stderr.splitlines() if "To resume from it:" in line)
    assert all(option in again for option in (*options, *given))
    manager = MultiNodeCheckpointManager(tmp_path / "runs")
    assert manager.epochs() == [2, 6]
    plan = invoke("run", made, "--checkpoint", manager.path, "--param", "rate=0.5", "--dry-run")
    assert "parameter 'rate' was 0.25 and is 0.5" in plan.stdout
    assert "Parameters: rate=0.25 fail_at=7" in invoke("ls", manager.path).stdout
    assert "parameters rate=0.25 fail_at=7" in invoke("info", manager.path, 6).stdout
    replay = ["verify", manager.path, "--replay", "6", "--job", made, *given[:2]]
    replayed = invoke(*replay, "--scheduler", process_cluster.scheduler_address)
    assert "parameter 'fail_at' was 7 and is None" in replayed.stdout
    result = run(made, *options, *given[:2], "--manager", "manage")
    assert result.exit_code == 0, result.output
    assert manager.epochs() == [2, 6, 8]
    assert manager.past_epochs()[-1]["metadata"] == {"data": "digits"}


def test_saves_that_failed_set_the_exit_code(run, made):
    tried = run(made, "--manager", "full")
    assert tried.exit_code == 12, tried.output
    assert "done at epoch 8" in tried.stdout
    assert "not saved: " in tried.stdout


def test_a_finished_job_needs_no_cluster(run, script):
    first = run(script)
    assert first.exit_code == 0, first.output
    runs = script.parent / "runs"
    before = sorted(runs.rglob("*"))
    again = invoke("run", script, "--checkpoint", runs, "--scheduler", "tcp://127.0.0.1:9")
    assert again.exit_code == 0, again.output
    assert "done at epoch 4, resumed from epoch 4, stopped by epoch_limiter" in again.stdout
    assert sorted(runs.rglob("*")) == before


def test_callbacks_and_logs_are_named_as_options(run, made, tmp_path):
    options = ["--log", str(tmp_path / "log.csv"), "--callback", "log"]
    options += ["--callback", "make_stopping", "--keep-best", "a:0/loss", "--keep-best", "loss:2"]
    with contextlib.chdir(tmp_path):
        result = run(made, *options)
        again = run(made, *options, "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    # The losses are 1, 1/2, 1/4, 1/8, 1/16: the last improves by less than 0.1.
    assert "done at epoch 5, stopped by EarlyStopping" in result.stdout
    for name in ("log.csv", "own.csv"):
        assert (tmp_path / name).read_text().count("\n") == 6
    assert MultiNodeCheckpointManager(tmp_path / "runs").epochs() == [4, 5]
    assert _json(again)["plan"]["is_finished"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--callback", "tell"], "made.py has no 'tell'"),
        (["--manager", "elsewhere"], "expected a MultiNodeCheckpointManager of runs"),
        (["--callback", "settings"], "a callback must have a method of Callback, such as on_epoch"),
        (["--scheduler", "nonsense://x"], "'nonsense://x' is not the address of a Dask scheduler"),
        (["--save-every", "often"], "'--save-every': often: expected a number of epochs"),
        (
            ["--param", "rate=1", "--param", "rate=2"],
            "'rate=2' is not NAME=VALUE, with each name once",
        ),
    ],
)
def test_wrong_options_exit_with_2(made, tmp_path, options, says):
    with contextlib.chdir(tmp_path):
        result = invoke("run", made, "--checkpoint", "runs", *options)
    assert (result.exit_code, (tmp_path / "runs").exists()) == (2, False)
    assert says in result.stderr


@contextlib.contextmanager
def _start(script, *options, **settings):
    """Start ``jobrunner run`` in its own process group, as a terminal does; kill it at the end."""
    with subprocess.Popen(
        [sys.executable, "-m", "jobrunner", "run", str(script), "--checkpoint", "runs", *options],
        cwd=script.parent,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            kill(process)


def test_the_command_that_resumes_a_run_has_no_secrets(run, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        """
from jobrunner import Job, Node, Task, epoch_limiter, job

@job
def build(token: str = "", db: str = "", rate: float = 1.0):
    with Job("j") as made, Node("a"):
        Task(float, outputs="x")
    epoch_limiter(made, 1)
    return made
"""
    )
    values = ("token=cAnArY", "db=postgres://u:cAnArY@h/x", "rate=0.5")
    page, runs = tmp_path / "page.html", tmp_path / "runs"
    told = run(script, *[word for value in values for word in ("--param", value)]).output
    for command in (("report", runs, "-o", page), ("ls", runs), ("info", runs, 1)):
        told += invoke(*command).output
    files = [path.read_text("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    assert "cAnArY" not in told.join(files)
    assert "--param rate=0.5" in page.read_text()
    assert "token=&#39;…&#39;" in page.read_text()


@pytest.mark.nightly
def test_a_run_goes_on_when_nobody_reads_its_output_any_more(tmp_path):
    script = _write(tmp_path, limit=4)
    command = f"'{sys.executable}' -m jobrunner run {script} --checkpoint runs --workers 1"
    subprocess.run(["bash", "-c", f"{command} | head -1"], cwd=tmp_path, check=True)
    assert MultiNodeCheckpointManager(tmp_path / "runs").latest() == 4
