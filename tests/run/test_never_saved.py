"""Blobs that cannot be saved are refused before the init group runs, where the job shows it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jobrunner import (
    Blob,
    DefinitionError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Session,
    Task,
    epoch_limiter,
    register_codec,
)

ran: list[str] = []


class Model:
    def __init__(self, size: int = 1) -> None:
        ran.append("init")
        self.size = size


class Module(Model):
    def state_dict(self) -> dict[str, int]:
        return {"size": self.size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.size = state["size"]


@dataclass
class Point:
    x: int = 0


class Base(Model):
    pass


class Coded(Base):
    pass


class Chosen:
    def __new__(cls) -> Any:
        return 5


class Called(type):
    def __call__(cls) -> Any:
        return 5


class Made(metaclass=Called):
    pass


def job_of(*tasks: tuple[Any, str, Any], **options: Any) -> Job:
    with Job("never saved", **options) as job:
        with job.init_group:
            for i, (fn, node, outputs) in enumerate(tasks):
                Task(fn, outputs=outputs, node=node, name=f"t{i}")
        Task(int, node="a")
    epoch_limiter(job, 1)
    return job


def run(job: Job, session: Session, path: Path, **options: Any) -> None:
    ran.clear()
    JobRunner(job, MultiNodeCheckpointManager(path, **options)).run(session)


def test_all_objects_that_init_tasks_make_by_their_class_are_named_at_once(
    inproc_session: Session, tmp_path: Path
) -> None:
    job = job_of(
        (Model, "a", "one"),
        (partial(Model, size=2), "b", "two"),
        (threading.Event, "b", "three"),
        (Model, "a", Blob("kept out", transient=True)),
        (threading.Lock, "a", "lock"),  # a function: what it returns is known when it has run
    )
    with pytest.raises(DefinitionError) as caught:
        run(job, inproc_session, tmp_path)
    assert not ran
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "Node 'a', blob 'one'",
        "Node 'b', blob 'two'",
        "Node 'b', blob 'three'",
    ]
    # What to do is said once.
    assert ["register_codec" in line for line in lines] == [True, False, False]


def test_what_could_be_saved_is_not_refused(inproc_session: Session, tmp_path: Path) -> None:
    register_codec(Base, lambda it: it.size, Coded, subclasses=True, name="tests.Base")
    job = job_of(
        *((Module, "a", "x"), (Point, "a", "y"), (Chosen, "a", "z"), (Made, "a", "v")),
        (Coded, "a", "u"),
        *((Model, "a", "w"), (int, "a", "w")),  # the last task decides
    )
    run(job, inproc_session, tmp_path / "others")
    job = job_of((Model, "b", "x"), (int, "a", "y"), nodes_to_checkpoint=[Node("a")])
    run(job, inproc_session, tmp_path / "another node")
    run(job_of((Model, "a", "x")), inproc_session, tmp_path / "pickled", allow_pickle=True)
    assert ran == ["init"]
