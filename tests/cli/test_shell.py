"""What the shell is given: completion, and a first job."""

from pathlib import Path

from click.shell_completion import BashComplete

from jobrunner import JobRunner, MultiNodeCheckpointManager
from jobrunner.cli.command import main
from jobrunner.cli.script import Script
from tests.cli.directories import ask, invoke


def complete(*words):
    *before, incomplete = map(str, words)
    found = BashComplete(main, {}, "jobrunner", "_JOBRUNNER_COMPLETE").get_completions(
        before, incomplete
    )
    return [item.type if item.type != "plain" else item.value for item in found]


def test_the_shell_completes_commands_options_and_files():
    assert complete("pr") == ["prune"]
    assert complete("run", "--on-save-error", "r") == ["refuse", "raise"]
    for words in (["run"], ["run", "job.py", "--checkpoint"], ["pin"], ["report", "-o"]):
        assert complete(*words, "") == ["file"]
    assert "_JOBRUNNER_COMPLETE=zsh_complete" in invoke("completion", "zsh").stdout


def test_a_new_job_runs_and_overwrites_nothing(tmp_path, inproc_session):
    told = ask("new", tmp_path / "some clusters")
    [path] = map(Path, told["paths"])
    job = Script(str(path)).job({"epochs": "2"})
    assert job.name == told["name"] == "some clusters"
    manager = MultiNodeCheckpointManager(tmp_path / "runs")
    result = JobRunner(job, manager).run(inproc_session)
    assert (result.epoch, bool(result.metrics[-1])) == (2, True)
    path.write_text("mine")
    again = invoke("new", tmp_path / "some clusters")
    assert (again.exit_code, "job.py exists already" in again.output) == (2, True)
    assert path.read_text() == "mine"
