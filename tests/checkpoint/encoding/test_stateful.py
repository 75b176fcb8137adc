"""Objects that are saved by their state: what is saved, and into which object it is loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jobrunner import CheckpointError, DefinitionError, PlanMismatchError, register_codec
from jobrunner.testing import assert_identical
from jobrunner.workspace.workspace import Workspace
from tests.blobs import Blobs
from tests.saves import NodeRun, run_group


class Momentum:
    """Has what an optimizer has: live arrays, counters, and options."""

    def __init__(self, size: int = 3) -> None:
        self.velocity = np.zeros(size)
        self.steps = 0
        self.lock = threading.Lock()  # cannot be copied, pickled or saved

    def step(self) -> None:
        self.velocity += 0.1 * (self.steps + 1)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"velocity": self.velocity, "steps": self.steps, "betas": (0.9, np.float32(0.1))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["velocity"].shape != self.velocity.shape:
            raise ValueError(f"expected {self.velocity.shape}, found {state['velocity'].shape}")
        self.velocity[...] = state["velocity"]
        self.steps = state["steps"]


class Nesterov(Momentum):
    pass


class Saying(Momentum):
    """Its state is what a function returns."""

    def __init__(self, say: Callable[[], object]) -> None:
        self.state_dict = say


def save(run: NodeRun, **blobs: Any) -> None:
    """Save epoch 0, as of a job whose init group makes these blobs."""
    run.save(0, blobs, initial={"a": set(blobs)})


def load(run: NodeRun, made: dict[str, Any]) -> Blobs:
    """Load epoch 0 into objects that are there."""
    blobs = Blobs(Workspace("a"))
    blobs.update(made)
    run_group(run.manager.load(0), {"a": blobs.workspace})
    return blobs


def test_states_are_loaded_into_the_objects_at_their_places(node_run: NodeRun) -> None:
    shared, other = Momentum(), Momentum(2)
    other.step()
    shared.step()
    shared.step()
    save(node_run, all={"one": shared, "more": [shared, (other, 7)], 3: "text"}, w=np.arange(4.0))
    shared.step()
    one, two = Momentum(), Momentum(2)
    loaded = load(node_run, {"all": {"one": one, "more": [one, (two, 0)], 3: ""}})
    found = loaded["all"]
    assert found["one"] is found["more"][0] is one
    assert found["more"][1] == (two, 7)
    assert (one.steps, two.steps, found[3]) == (2, 1, "text")
    assert_identical(two.velocity, np.full(2, 0.1))
    assert loaded["w"].tolist() == [0, 1, 2, 3]


def test_a_checkpoint_returns_the_state_without_the_class(node_run: NodeRun) -> None:
    opt = Momentum()
    opt.step()
    save(node_run, opt=opt)
    store = node_run.manager.open(0)["a"]
    assert_identical(store.load("opt"), opt.state_dict())
    assert store["opt"]["velocity"][1] == 0.1  # lazily
    node_run.manager.verify(0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            Saying(lambda: {"deep": [0, threading.Lock()]}),
            r"'opt', item deep/1: _thread.lock cannot be saved",
        ),
        (Saying(lambda: 1 // 0), r"its state_dict\(\) raised ZeroDivisionError"),
        (
            Saying(lambda: {"inner": Momentum()}),
            r"item inner: .*Momentum cannot be saved: it is in the state of another",
        ),
        ({Momentum(): 1}, r"it is in a key"),
    ],
    ids=["item", "raises", "nested", "key"],
)
def test_a_state_that_cannot_be_saved_is_named(node_run: NodeRun, value: Any, message: str) -> None:
    with pytest.raises(DefinitionError, match=message):
        save(node_run, opt=value)


def test_a_codec_takes_precedence_over_a_state_and_cannot_contain_one(node_run: NodeRun) -> None:
    class Wrapper:
        def __init__(self, opt: Momentum) -> None:
            self.opt = opt

    register_codec(Wrapper, lambda w: w.opt, Wrapper)
    with pytest.raises(DefinitionError, match=r"it is in the output of its codec .*"):
        save(node_run, opt=Wrapper(Momentum()))
    register_codec(Momentum, lambda m: m.steps, lambda steps: Momentum())
    save(node_run, opt=Momentum())
    assert type(node_run.manager.open(0)["a"].load("opt")) is Momentum


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (Nesterov(), PlanMismatchError, r"expected an object of class .*\.Momentum.*\.Nesterov"),
        (17, PlanMismatchError, r"expected an object of class .*Momentum.*found builtins.int"),
        (Momentum(5), CheckpointError, r"load_state_dict of .*Momentum raised ValueError: expec"),
    ],
    ids=["class", "plain", "raises"],
)
def test_an_object_that_does_not_fit_the_state_is_named(
    node_run: NodeRun, made: Any, error: type[Exception], message: str
) -> None:
    save(node_run, opt=Momentum())
    with pytest.raises(error, match=rf"Blob 'opt' in .*{message}"):
        load(node_run, {"opt": made})


def test_nothing_is_replaced_if_a_state_finds_no_object(node_run: NodeRun) -> None:
    save(node_run, opt=Momentum(), w=1)
    workspace = Workspace("a")
    workspace.globals["w"] = 2
    with pytest.raises(PlanMismatchError):
        run_group(node_run.manager.load(0), {"a": workspace})
    assert workspace.globals == {"w": 2}
