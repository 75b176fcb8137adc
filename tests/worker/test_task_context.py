"""What `current_task` tells a task."""

import numpy as np
import pytest

from jobrunner.errors import ExecutionError
from jobrunner.worker.task_context import CurrentTask, current_task
from jobrunner.workspace.workspace import Workspace, WorkspaceView

KEY = {"group": "epoch", "_seed": 7, "epoch": 3, "step": 1, "name": "t", "instance": 0}


def make(record=lambda metrics: None, node="a", attempt=2, **changes):
    details = {"job": "job", "attempt": attempt, "node": node, "_record": record}
    return CurrentTask(**KEY | details | changes, workspace=WorkspaceView(Workspace(node)))


def test_outside_a_task_current_task_raises():
    with pytest.raises(ExecutionError, match="outside a task"):
        current_task()


def test_random_numbers_depend_on_every_part_of_the_key_alone():
    # Written down: they must be the same in every process, on every machine, in every release.
    words = [1397495191318599402, 14010476249486949198]
    assert list(make(attempt=9).rng.bit_generator.random_raw(2)) == words
    changes = [{"_seed": 8}, {"group": "init"}, {"node": "b"}, {"name": "u"}, {"instance": 1}]
    changes += [{"epoch": 4}, {"epoch": None}, {"step": 2}]
    assert len({make(**change).rng.random() for change in [{}, *changes]}) == 9


def test_numbers_bools_texts_and_numpy_scalars_are_reported_as_python_values():
    found = {}
    make(found.update).report(
        loss=np.float32(0.5), n=np.int64(2**40), ok=np.bool_(True), text="x", nan=float("nan")
    )
    assert {key: type(value) for key, value in found.items()} == {
        "loss": float,
        "n": int,
        "ok": bool,
        "text": str,
        "nan": float,
    }
    assert (found["loss"], found["n"], found["ok"]) == (0.5, 2**40, True)


@pytest.mark.parametrize("value", [np.array(1j), [1], None, 1j, {"a": 1}, b"x"], ids=repr)
def test_a_metric_of_another_type_is_an_error_that_names_it(value):
    with pytest.raises(TypeError, match=rf"a/t reports 'loss' as {type(value).__qualname__}"):
        make().report(loss=value)


@pytest.mark.parametrize("value", [10**1000, -(10**5000)], ids=["1001 digits", "5001 digits"])
def test_an_int_that_no_record_could_hold_is_not_a_metric(value):
    with pytest.raises(ValueError, match="a/t reports 'n' as an int of more than 1,000 digits"):
        make().report(n=value)
    make().report(n=10**1000 - 1)
