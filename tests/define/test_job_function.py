"""Jobs as functions of parameters, which are checked, recorded and compared."""

from __future__ import annotations

import enum
import math
import pickle
from typing import Any, Literal

import numpy as np
import pytest

from jobrunner import (
    DefinitionError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Session,
    Task,
    epoch_limiter,
    job,
)
from jobrunner.define import read_parameters


class Kind(enum.Enum):
    FAST = "fast"
    EXACT = "exact"


@job
def train(
    lr: float = 0.1,
    epochs=1,
    kind: Kind = Kind.FAST,
    optimizer: Literal["sgd", "adam"] = "sgd",
    sizes: list[int] | None = None,
    *,
    name: str = "x",
    other: Kind | None = Kind.EXACT,
) -> Job:
    with Job("train") as made:
        with made.init_group:
            Task(lambda: 1.0, outputs="w", node="a")
        Task(lambda w, lr: w * (1 - lr), outputs="w", node="a", kwargs={"lr": lr})
    epoch_limiter(made, epochs)
    assert isinstance(kind, Kind)
    assert isinstance(other, Kind)
    return made


def test_a_job_has_the_parameters_it_was_made_with_defaults_too():
    assert train().parameters == {
        "lr": 0.1,
        "epochs": 1,
        "kind": "fast",
        "optimizer": "sgd",
        "sizes": None,
        "name": "x",
        "other": "exact",
    }
    made = train(1, kind=Kind.EXACT, sizes=(1, 2), epochs=np.int64(3)).parameters
    assert (made["lr"], type(made["lr"]), made["kind"]) == (1.0, float, "exact")
    assert (made["sizes"], made["epochs"], type(made["epochs"])) == ([1, 2], 3, int)
    assert Job().parameters == {}
    assert pickle.loads(pickle.dumps(train)) is train


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"lr": "abc"}, "train: lr cannot be 'abc'; expected float"),
        ({"epochs": True}, "train: epochs cannot be True; expected int"),
        ({"optimizer": "adagrad"}, "cannot be 'adagrad'; expected Literal['sgd', 'adam']"),
        ({"kind": "slow"}, "train: kind cannot be 'slow'; expected Kind ('fast' or 'exact')"),
        ({"sizes": [1, "b"]}, "train: sizes cannot be [1, 'b']"),
        ({"ls": 1}, "cannot be called: got an unexpected keyword argument 'ls'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, says):
    with pytest.raises(DefinitionError) as caught:
        train(**arguments)
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["None", "null"])
def test_none_is_written_where_a_parameter_may_be_none(text):
    @job
    def make(tag: str | None = "a", rate: float | None = 1.0, word: str = "b") -> Job: ...

    found = read_parameters(make, dict.fromkeys(("tag", "rate", "word"), text))
    assert found == {"tag": None, "rate": None, "word": text}


def _untyped(rate) -> Job: ...
def _of_arrays(rate: np.ndarray[Any, Any]) -> Job: ...
def _of_many(*rate: float) -> Job: ...
def _of_default(rate: int = "a") -> Job: ...
def _of_nothing(rate: Missing) -> Job: ...  # noqa: F821


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (_untyped, "'rate' of _untyped needs a type"),
        (_of_arrays, "'rate' of _of_arrays has the type"),
        (_of_many, "must be an ordinary one"),
        (_of_default, "'rate' of _of_default cannot be 'a'; expected int"),
        (_of_nothing, "annotation cannot be read"),
        (3, "job takes a function"),
    ],
)
def test_parameters_that_cannot_be_recorded_are_refused_where_the_function_is_defined(
    function, says
):
    with pytest.raises(DefinitionError) as caught:
        job(function)
    assert says in str(caught.value)


def test_a_function_that_returns_no_job_is_refused():
    @job
    def nothing() -> Job:
        return None

    with pytest.raises(DefinitionError, match=r"nothing\(\) returned None; expected a Job"):
        nothing()


def test_parameters_are_recorded_and_compared_at_a_resume(tmp_path, inproc_session: Session):
    manager = MultiNodeCheckpointManager(tmp_path / "runs")
    JobRunner(train(lr=0.5), manager).run(inproc_session)
    assert manager.directory.plan_of(manager.record(1).run_number)["parameters"]["lr"] == 0.5
    assert JobRunner(train(lr=0.5), manager).plan_resume().changes == ()
    changed = train(lr=math.inf, epochs=2, sizes=[3] * 200)
    changes = JobRunner(changed, manager).plan_resume().changes
    assert "parameter 'lr' was 0.5 and is 'inf'" in changes
    assert "parameter 'epochs' was 1 and is 2" in changes
    assert max(map(len, changes)) < 250
    JobRunner(changed, manager).run(inproc_session)
    assert JobRunner(changed, manager).plan_resume().changes == ()
    plain = Job("train")
    with plain.init_group:
        Task(lambda: 1.0, outputs="w", node="a")
    epoch_limiter(plain, 3)
    changes = JobRunner(plain, manager).plan_resume().changes
    assert "parameter 'epochs' was 2 and is not given" in changes
