"""What the shell is given: examples in the help, completion, and a first job."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from jobrunner import JobRunner, MultiNodeCheckpointManager, Session
from jobrunner.cli.command import Command, main
from jobrunner.cli.script import Script
from tests.cli.directories import ask, invoke

COMMANDS = [command for command in main.commands.values() if isinstance(command, Command)]
TEMPLATES = ["kmeans", "training", "simulation"]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_help_of_every_command_has_examples_that_it_understands(command: Command) -> None:
    assert command.examples
    for example in command.examples:
        words = re.search(r"jobrunner ([^|>)]*)", example)
        assert words is not None
        name, *arguments = shlex.split(words[1])
        assert name == command.name
        command.make_context(name, arguments)  # raises for what it does not understand
    text = CliRunner(env={"COLUMNS": "80"}).invoke(main, [str(command.name), "--help"]).output
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"\n      {example}\n" in text for example in command.examples)


def test_the_help_of_run_fits_two_screens() -> None:
    text = CliRunner(env={"COLUMNS": "100"}).invoke(main, ["run", "--help"]).output
    assert len(text.splitlines()) <= 96


def complete(*words: object) -> list[str]:
    *before, incomplete = map(str, words)
    found = BashComplete(main, {}, "jobrunner", "_JOBRUNNER_COMPLETE").get_completions(
        before, incomplete
    )
    return [item.type if item.type != "plain" else item.value for item in found]


def test_the_shell_completes_commands_options_epochs_and_directories(runs: Path) -> None:
    assert complete("pr") == ["prune"]
    assert complete("run", "--on-save-error", "r") == ["refuse", "raise"]
    assert complete("run", "") == ["file"]
    assert complete("run", "job.py", "--checkpoint", "") == ["dir"]
    assert complete("pin", "") == complete("diff", "") == ["dir"]
    assert complete("pin", runs, "") == ["latest", "0", "1", "2", "3"]
    assert complete("verify", runs, "3") == ["3"]
    assert complete("verify", runs, "--replay", "") == ["latest", "0", "1", "2", "3"]
    resume = ["run", "job.py", "--checkpoint", runs, "--resume"]
    assert complete(*resume, "") == ["latest", "none", "0", "1", "2", "3"]
    for words in (("run", "--log"), ("run", "--report"), ("report", "-o")):
        assert complete(*words, "") == ["file"]
    assert complete("info", runs / "nothing", "") == complete("info", "s3://bucket/x", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_calls_the_command_that_printed_it(shell: str) -> None:
    script = invoke("completion", shell).stdout
    assert f"_JOBRUNNER_COMPLETE={shell}_complete" in script
    dask = click.Group("dask")
    dask.add_command(main)
    script = CliRunner().invoke(dask, ["jobrunner", "completion", shell], prog_name="dask").stdout
    assert f"_DASK_COMPLETE={shell}_complete" in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_takes_the_script() -> None:
    script = invoke("completion", "bash").stdout
    told = subprocess.run(
        ["bash", "-c", f"{script}\ncomplete -p jobrunner"], capture_output=True, text=True
    )
    assert "-F _jobrunner_completion" in told.stdout, told.stderr


def test_a_new_job_overwrites_nothing(tmp_path: Path) -> None:
    assert invoke("new", tmp_path / "heat").exit_code == 0
    (tmp_path / "heat" / "job.py").write_text("mine")
    again = invoke("new", tmp_path / "heat")
    assert again.exit_code == 2
    assert "heat/job.py exists already" in again.output
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "README.md").symlink_to("nowhere")
    assert invoke("new", tmp_path / "other").exit_code == 2
    assert os.listdir(tmp_path / "other") == ["README.md"]
    assert invoke("new", tmp_path / "con").exit_code in (0, 2)
    assert (tmp_path / "heat" / "job.py").read_text() == "mine"


def test_new_jobs_run(tmp_path: Path, inproc_session: Session) -> None:
    for template in TEMPLATES:
        found = ask("new", tmp_path / f"a {template}", "--template", template)
        path, readme = map(Path, found["paths"])
        job = Script(str(path)).job({"epochs": "2"})
        assert job.name == found["name"] == f"a {template}"
        manager = MultiNodeCheckpointManager(tmp_path / "runs" / template)
        result = JobRunner(job, manager).run(inproc_session)
        assert (result.epoch, bool(result.metrics[-1])) == (2, True)
        for line in re.findall(r"^    jobrunner (.*?)(?: #.*)?$", readme.read_text(), re.M):
            name, *arguments = shlex.split(line)
            main.commands[name].make_context(name, arguments)


@pytest.mark.nightly
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_new_job_that_is_killed_resumes_to_the_same_bits(template: str, tmp_path: Path) -> None:
    invoke("new", tmp_path / "job", "--template", template)
    command = [sys.executable, "-m", "jobrunner", "run", "job.py", "--workers", "2"]
    command += ["--param", "epochs=40", "--checkpoint"]
    where = {"cwd": tmp_path / "job", "stdout": subprocess.DEVNULL}
    killed = subprocess.Popen([*command, "killed"], start_new_session=True, **where)  # type: ignore[call-overload]
    manager = MultiNodeCheckpointManager(tmp_path / "job" / "killed")
    for epoch in manager.watch(timeout_seconds=60):
        if epoch == 10:
            os.killpg(killed.pid, signal.SIGKILL)
            break
    assert killed.wait() == -signal.SIGKILL
    assert (manager.latest() or 0) < 40
    for name in ("killed", "whole"):
        subprocess.run([*command, name], check=True, **where)  # type: ignore[call-overload]
    result = invoke("compare", tmp_path / "job" / "killed", tmp_path / "job" / "whole")
    assert result.exit_code == 0, result.output
