"""A directory that holds no epochs itself, a bucket that is missing, and a job that fails to import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jobrunner import (
    CheckpointError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Session,
    Task,
    epoch_limiter,
)
from jobrunner.positions import Position
from jobrunner.run import ResumePlan
from tests.cli.directories import ask, invoke
from tests.saves import save_epoch

if TYPE_CHECKING:
    from object_servers import S3Server


@pytest.mark.parametrize("command", ["info", "verify", "pin", "diff", "copy"])
def test_other_commands_name_the_run_directories_too(
    command: str, runs: Path, tmp_path: Path
) -> None:
    more = {"diff": [runs], "copy": ["latest", tmp_path / "copy"], "verify": ["latest"]}
    result = invoke(command, tmp_path, *more.get(command, ["latest"]))
    assert result.exit_code == 6
    assert "No epoch is recorded in" in result.output
    assert "contains checkpoint directories: runs" in result.output


def test_a_directory_without_any_says_so(tmp_path: Path) -> None:
    assert "No epoch is recorded" in invoke("ls", tmp_path).stdout
    assert ask("ls", tmp_path)["runs"] == []


def test_a_missing_bucket_is_named(s3: S3Server, inproc_session: Session) -> None:
    with Job("j") as job, job.init_group:
        Task(int, outputs="x", node="a")
    epoch_limiter(job, 1)
    manager = MultiNodeCheckpointManager("s3://there-is-none/runs/x")
    for call in (manager.epochs, lambda: JobRunner(job, manager).run(inproc_session)):
        with pytest.raises(CheckpointError, match=r"no bucket 'there-is-none'.*Create it"):
            call()
    result = invoke("ls", "s3://there-is-none/runs/x")
    assert result.exit_code == 8
    assert "no bucket 'there-is-none'" in result.output


# ---- the job's file


def test_an_import_error_shows_the_traceback_of_the_users_code(tmp_path: Path) -> None:
    (tmp_path / "helpers_of_mine.py").write_text("def deep(x):\n    return x.nothing\n")
    script = tmp_path / "job.py"
    script.write_text("from helpers_of_mine import deep\n\ndef make():\n    deep(3)\n\nmake()\n")
    result = invoke("run", script, "--checkpoint", tmp_path / "runs")
    assert result.exit_code == 2
    text = result.output
    assert "job.py, line 4" in text
    assert "AttributeError: 'int' object has no attribute 'nothing'" in text
    for place in (f'"{script}", line 6, in <module>', 'helpers_of_mine.py", line 2, in deep'):
        assert place in text
    assert "jobrunner/cli" not in text
    notes = ask("run", script, "--checkpoint", tmp_path / "runs")["error"]["notes"]
    assert "in deep" in notes[0]


def test_a_syntax_error_shows_the_line(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("x = 1\ny = (2 +\n")
    text = invoke("run", script, "--checkpoint", tmp_path / "runs").output
    assert "line 2" in text
    assert "y = (2 +" in text


# ---- a job that has lost a node


def make_job(*nodes: str, saved: list[str] | None = None) -> Job:
    with Job("j", nodes_to_checkpoint=saved) as job, job.init_group:
        for node in nodes:
            Task(int, outputs="x", node=node)
    epoch_limiter(job, 1)
    return job


def test_nodes_that_a_job_has_dropped_are_not_said_to_be_only_unsaved(
    inproc_session: Session, tmp_path: Path
) -> None:
    manager = MultiNodeCheckpointManager(tmp_path)
    JobRunner(make_job("a", "b", "c"), manager).run(inproc_session)
    plan: ResumePlan = JobRunner(make_job("a", "c", saved=["a"]), manager).plan_resume()
    assert "node 'b' is gone; its recorded blobs are not loaded" in plan.changes
    assert "node 'c' is no longer checkpointed" in plan.changes


def test_runs_in_a_bucket_are_listed_and_followed(s3: S3Server) -> None:
    for name in ("a/x", "b"):
        manager = MultiNodeCheckpointManager(f"{s3.url}/runs/{name}")
        manager.run.start([], {"plan": {"job": "j"}})
        save_epoch(manager, Position(0), details={"metrics": {"loss": 1.0}})
        if name == "b":
            assert [run["name"] for run in ask("top", s3.url)["runs"]] == ["runs/b"]
        manager.run.end()
    assert {run["name"] for run in ask("ls", f"{s3.url}/runs", "--best", "loss")["runs"]} == {
        "a/x",
        "b",
    }
