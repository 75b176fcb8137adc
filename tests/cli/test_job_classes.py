"""Classes of the job's own file: a resume binds saved values to those of the running job."""

import os
import subprocess
import sys
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

class Point(typing.NamedTuple):
    x: int

class Outer:
    @dataclasses.dataclass
    class Inner:
        point: Point

class Model:  # only pickle saves it
    def __init__(self):
        self.point = Point(2)

def begin():
    return Point(1), [Outer.Inner(Point(2)), Model()]

def find_wrong(point, values):
    inner, model = values
    found = [point, inner, inner.point, model, model.point]
    expected = [Point, Outer.Inner, Point, Model, Point]
    return [i for i in range(5) if type(found[i]) is not expected[i]]

with Job("phases") as job:
    with job.init_group:
        Task(begin, outputs=["point", "values"], node="a")
        for node in "ab":
            Task(list, outputs="wrong", node=node, name="nothing")
    names = ["point", "values"]
    Task(find_wrong, inputs=names, outputs="wrong", node="a")
    sent = [Task(lambda it: it, inputs=name, node="a", name=name).output() for name in names]
    Task(find_wrong, inputs=sent, outputs="wrong", node="b")
    epoch_limiter(job, int(os.environ["EPOCHS"]))

if __name__ == "__main__":
    with Session.local(workers=2) as session:
        manager = MultiNodeCheckpointManager("runs", allow_pickle=True)
        JobRunner(job, manager).run(session)
"""


def run_here(file, epochs, monkeypatch):
    """Load the job's file again, as another process would, and run the job."""
    monkeypatch.setenv("EPOCHS", str(epochs))
    job = Script(str(file)).job()
    manager = MultiNodeCheckpointManager(file.parent / "runs", allow_pickle=True)
    with Session.local(workers=2, processes=False) as session:
        JobRunner(job, manager).run(session)
    del sys.modules[f"jobrunner_script_{file.stem}"]


def assert_right(directory, epoch):
    """Expect that both nodes have found all classes in that epoch."""
    checkpoint = MultiNodeCheckpointManager(directory / "runs").open(epoch)
    assert [checkpoint[node]["wrong"] for node in "ab"] == [[], []]


def test_a_job_in_a_file_of_another_name_finds_its_classes(tmp_path, monkeypatch):
    before = tmp_path / "job.py"
    before.write_text(JOB)
    for epochs, file in enumerate(("my_job.py", "my-job.py"), 1):
        before = before.rename(tmp_path / file)
        run_here(before, epochs, monkeypatch)
        assert_right(tmp_path, epochs)
    value = str(MultiNodeCheckpointManager(tmp_path / "runs").open(2)["a"]["point"])
    assert "my-job.py:Point" in printable(value)


@pytest.mark.nightly
def test_a_run_by_the_command_resumes_one_of_a_script_and_the_other_way_round(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    options = ["--checkpoint", "runs", "--workers", "2", "--allow-pickle"]
    script, command = ["job.py"], ["-m", "jobrunner", "run", "job.py", *options]
    made = ["__main__:Point({'x': 1})", "job.py:Point({'x': 1})"]
    for epochs, arguments in enumerate((script, command, command, script), 1):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "EPOCHS": str(epochs), "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert_right(tmp_path, epochs)
        point = MultiNodeCheckpointManager(tmp_path / "runs").open(epochs)["a"]["point"]
        assert isinstance(point, Unmade)
        assert repr(point) == made[arguments is command]


REFUSED = """
import dataclasses
from jobrunner import Job, Task, epoch_limiter

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

with Job("refused") as job:
    with job.init_group:
        Task(lambda: VALUE, outputs="value", node="a")
    epoch_limiter(job, 1)
"""


@pytest.mark.parametrize(
    ("value", "why", "error"),
    [
        ("make_lost()", "contains values of nowhere:Lost", PlanMismatchError),
        ("[make_first(), Twice(2)]", "two classes with the name __main__:Twice", DefinitionError),
    ],
)
def test_a_class_that_is_not_found_by_its_name_is_refused_before_epoch_0(
    value, why, error, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "__main__", (main := ModuleType("__main__")))
    exec(REFUSED.replace("VALUE", value), vars(main))  # workers do not have the file
    manager = MultiNodeCheckpointManager(tmp_path / "runs")
    with (
        Session.local(workers=2, processes=False) as session,
        pytest.raises(error, match=why),
    ):
        JobRunner(vars(main)["job"], manager).run(session)
    assert manager.epochs() == []


def test_a_class_that_is_gone_is_named_before_anything_runs(tmp_path, monkeypatch):
    job = tmp_path / "job.py"
    job.write_text(JOB)
    run_here(job, 1, monkeypatch)
    job.write_text(JOB.replace("Point", "Place"))
    with pytest.raises(
        PlanMismatchError, match="values of job.py:Point, which this program does not have"
    ):
        run_here(job, 2, monkeypatch)
    assert MultiNodeCheckpointManager(tmp_path / "runs").epochs() == [0, 1]
