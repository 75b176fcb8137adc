"""Classes of the job's own file: a resume binds saved values to those of the running job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from jobrunner import (
    DefinitionError,
    JobRunner,
    MultiNodeCheckpointManager,
    PlanMismatchError,
    Session,
)
from jobrunner.checkpoint import Unmade
from jobrunner.cli.script import Script
from jobrunner.texts import printable

JOB = """
import dataclasses, os, typing
from jobrunner import (
    Job, JobRunner, MultiNodeCheckpointManager, Node, Session, Task, epoch_limiter,
)

T = typing.TypeVar("T")

class Point(typing.NamedTuple):
    x: int

@dataclasses.dataclass
class State:
    point: Point
    seen: list

class Outer:
    @dataclasses.dataclass
    class Inner:
        x: int

class Model:  # only pickle saves it
    def __init__(self):
        self.point = Point(2)

{more}

def begin():
    return Point(1), State(Point(2), [Point(3)]), {value}

def find_wrong(point, state, extra):
    checks = (
        type(point) is Point,
        type(state) is State and type(state.point) is Point,
        type(state.seen[0]) is Point,
        {check},
    )
    return [i for i, check in enumerate(checks) if not check]

with Job("phases") as job:
    with job.init_group:
        begun = Task(begin, outputs=["point", "state", "extra"], node="a")
        for node in "ab":
            Task(list, outputs="wrong", node=node, name="nothing")
    names = ["point", "state", "extra"]
    Task(find_wrong, inputs=names, outputs="wrong", node="a")
    taken = [Task(lambda it: it, inputs=name, node="a", name=name).output() for name in names]
    Task(find_wrong, inputs=taken, outputs="wrong", node="b")
    epoch_limiter(job, int(os.environ["EPOCHS"]))

if __name__ == "__main__":
    with Session.local(workers=2) as session:
        manager = MultiNodeCheckpointManager("runs", allow_pickle=True)
        JobRunner(job, manager).run(session)
"""


def run(directory: Path, epochs: int, *, as_script: bool) -> subprocess.CompletedProcess[str]:
    command = ["job.py"]
    if not as_script:
        command = ["-m", "jobrunner", "run", "job.py", "--checkpoint", "runs", "--workers", "2"]
        command.append("--allow-pickle")
    environment = {**os.environ, "EPOCHS": str(epochs), "PYTHONPATH": os.getcwd()}
    return subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def write(directory: Path, value: str, check: str, more: str = "") -> None:
    text = JOB
    for name, part in {"value": value, "check": check, "more": more}.items():
        text = text.replace("{" + name + "}", part)
    (directory / "job.py").write_text(text)


def run_here(
    directory: Path, epochs: int, monkeypatch: pytest.MonkeyPatch, file: str = "job.py"
) -> None:
    """Load the job's file again, as another process would, and run the job."""
    monkeypatch.setenv("EPOCHS", str(epochs))
    job = Script(str(directory / file)).job()
    manager = MultiNodeCheckpointManager(directory / "runs", allow_pickle=True)
    with Session.local(workers=2, processes=False) as session:
        JobRunner(job, manager).run(session)


def test_a_job_in_a_file_of_another_name_finds_its_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "[Model()]", "type(extra[0]) is Model and type(extra[0].point) is Point")
    before = tmp_path / "job.py"
    for epochs, file in enumerate(("my_job.py", "my-job.py", "my job.py"), 1):
        before = before.rename(tmp_path / file)
        run_here(tmp_path, epochs, monkeypatch, file)
        for name in [name for name in sys.modules if name.startswith("jobrunner_script_")]:
            del sys.modules[name]  # as in another process
        checkpoint = MultiNodeCheckpointManager(tmp_path / "runs").open(epochs)
        assert [checkpoint[node]["wrong"] for node in "ab"] == [[], []]
    value = str(MultiNodeCheckpointManager(tmp_path / "runs").open(2)["a"]["point"])
    assert "my-job.py:Point" in printable(value)


@pytest.mark.nightly
@pytest.mark.parametrize("as_script", [False, True], ids=["by the command", "as a script"])
def test_a_resume_has_the_running_jobs_classes(tmp_path: Path, as_script: bool) -> None:
    check = (
        "type(extra[0]) is Model and type(extra[0].point) is Point and extra[1] == Outer.Inner(1)"
    )
    write(tmp_path, "[Model(), Outer.Inner(1)]", check)
    for epochs in (1, 2):
        done = run(tmp_path, epochs, as_script=as_script)
        assert done.returncode == 0, done.stderr
    checkpoint = MultiNodeCheckpointManager(tmp_path / "runs").open(2)
    assert [checkpoint[node]["wrong"] for node in "ab"] == [[], []]
    unmade = checkpoint["a"]["point"]
    assert isinstance(unmade, Unmade)
    assert repr(unmade) == ("__main__:Point({'x': 1})" if as_script else "job.py:Point({'x': 1})")
    other = run(tmp_path, 3, as_script=not as_script)
    assert other.returncode == 0, other.stderr
    assert MultiNodeCheckpointManager(tmp_path / "runs").open(3)["b"]["wrong"] == []


SHADOWED = """
@dataclasses.dataclass
class Twice:
    x: int

def make_first(cls=Twice):
    return cls(1)

@dataclasses.dataclass
class Twice:
    x: int

@dataclasses.dataclass
class Lost:
    x: int

def make_lost(cls=Lost):
    return cls(1)

Lost.__module__ = "nowhere"
del Lost
"""


@pytest.mark.parametrize(
    ("value", "why", "error"),
    [
        ("make_lost()", "contains values of nowhere:Lost", PlanMismatchError),
        ("[make_first(), Twice(2)]", "two classes with the name __main__:Twice", DefinitionError),
    ],
)
def test_a_class_that_is_not_found_by_its_name_is_refused_before_epoch_0(
    value: str,
    why: str,
    error: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path, value, "True", SHADOWED)
    # Workers do not have the file.
    monkeypatch.setitem(sys.modules, "__main__", (main := ModuleType("__main__")))
    text = (tmp_path / "job.py").read_text().replace("if __name__", "if not __name__")
    monkeypatch.setenv("EPOCHS", "1")
    exec(text, vars(main))
    manager = MultiNodeCheckpointManager(tmp_path / "runs")
    with (
        Session.local(workers=2, processes=False) as session,
        pytest.raises(error, match=why),
    ):
        JobRunner(vars(main)["job"], manager).run(session)
    assert manager.epochs() == []


def test_a_class_that_is_gone_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "Model()", "True")
    run_here(tmp_path, 1, monkeypatch)
    job = tmp_path / "job.py"
    job.write_text(job.read_text().replace("Point", "Place"))
    with pytest.raises(
        PlanMismatchError, match="values of job.py:Point, which this program does not have"
    ):
        run_here(tmp_path, 2, monkeypatch)
    assert MultiNodeCheckpointManager(tmp_path / "runs").epochs() == [0, 1]
