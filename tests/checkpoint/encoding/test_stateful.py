"""Objects that are saved by their state: what is saved, and into which object it is loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobrunner import (
    CheckpointError,
    DefinitionError,
    MultiNodeCheckpointManager,
    PlanMismatchError,
    TaskGroup,
    register_codec,
)
from jobrunner.checkpoint import (
    load_group,
    load_waiting_states,
    plan_load,
    stateful_blobs,
    with_contents,
)
from jobrunner.checkpoint.load_plan import choose_sources
from jobrunner.positions import Position
from jobrunner.testing import assert_identical
from jobrunner.workspace.workspace import Workspace
from tests.blobs import Blobs
from tests.checkpoint.test_manager import run_group
from tests.saves import Save


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


def stateful_of(manager: MultiNodeCheckpointManager) -> set[tuple[str, str]]:
    return stateful_blobs(with_contents(manager.directory, manager.record(0)))


def load_waiting(
    manager: MultiNodeCheckpointManager, epoch: int, names: dict[str, list[str]] | None
) -> TaskGroup:
    record = with_contents(manager.directory, manager.record(epoch))
    sources = choose_sources(manager.directory, record)
    return load_group(plan_load(manager.directory, record, sources, waiting=names), replaces=True)


class Rig:
    def __init__(self, path: Path, **options: Any) -> None:
        self.manager = MultiNodeCheckpointManager(path / "runs", **options)
        self.manager.run.start(["a"], {})
        self.workspace = Workspace("a")
        self.initial = {"a": {"opt", "all", "w"}}

    def save(self, epoch: int) -> None:
        save = Save(self.manager, Position.of(epoch), initial=self.initial)
        save.send()
        save.commit(save.write({"a": self.workspace}))

    def load(self, epoch: int, made: dict[str, Any], *, anew: bool) -> Workspace:
        workspace = Workspace("a")
        workspaces = {"a": workspace}
        if not anew:
            Blobs(workspace).update(made)
        names = {"a": list(made)} if anew else None
        run_group(load_waiting(self.manager, epoch, names), workspaces)
        if anew:
            assert not workspace.globals.keys() & made.keys()
            Blobs(workspace).update(made)
            load_waiting_states(workspaces)
        return workspace


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.manager.run.end()


@pytest.mark.parametrize("anew", [True, False], ids=["made anew", "there already"])
def test_a_state_is_loaded_into_an_object_that_keeps_its_identity(rig: Rig, anew: bool) -> None:
    opt = Momentum()
    opt.step()
    rig.workspace.globals.update(opt=opt, w=np.arange(4.0))
    rig.save(0)
    opt.step()
    made = Momentum()
    workspace = rig.load(0, {"opt": made}, anew=anew)
    assert workspace.globals["opt"] is made
    assert_identical(made.velocity, np.full(3, 0.1))
    assert (made.steps, workspace.globals["w"].tolist()) == (1, [0, 1, 2, 3])


def test_objects_in_containers_are_found_at_their_places(rig: Rig) -> None:
    shared = Momentum()
    other = Momentum(2)
    Blobs(rig.workspace)["all"] = {"one": shared, "more": [shared, (other, 7)], 3: "text"}
    other.step()
    shared.step()
    shared.step()
    rig.save(0)
    one, two = Momentum(), Momentum(2)
    made = {"one": one, "more": [one, (two, 0)], 3: ""}
    found = rig.load(0, {"all": made}, anew=True).lookup("all")
    assert found["one"] is found["more"][0] is one
    assert found["more"][1] == (two, 7)
    assert (one.steps, two.steps, found[3]) == (2, 1, "text")


def test_a_checkpoint_returns_the_state_without_the_class(rig: Rig) -> None:
    opt = Momentum()
    opt.step()
    rig.workspace.globals["opt"] = opt
    rig.save(0)
    store = rig.manager.open(0)["a"]
    assert_identical(store.load("opt"), opt.state_dict())
    assert store["opt"]["velocity"][1] == 0.1  # lazily
    rig.manager.verify(0)
    assert stateful_of(rig.manager) == {("a", "opt")}


def test_an_object_that_no_init_task_makes_is_named_before_anything_is_written(rig: Rig) -> None:
    rig.workspace.globals["late"] = Momentum()
    with pytest.raises(DefinitionError, match=r"'a', blob 'late'.*no task of the init group"):
        rig.save(0)
    assert rig.manager.epochs() == []


class Unsaveable(Momentum):
    def state_dict(self) -> dict[str, Any]:
        return {"deep": [0, self.lock]}


class Raising(Momentum):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not now")


class Nested(Momentum):
    def state_dict(self) -> dict[str, Any]:
        return {"inner": Momentum()}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Unsaveable(), r"'opt', item deep/1: _thread.lock cannot be saved"),
        (Raising(), r"its state_dict\(\) raised RuntimeError: not now"),
        (Nested(), r"item inner: .*Momentum cannot be saved: it is in the state of another"),
        ({Momentum(): 1}, r"it is in a key"),
    ],
    ids=["item", "raises", "nested", "key"],
)
def test_a_state_that_cannot_be_saved_is_named(rig: Rig, value: Any, message: str) -> None:
    rig.workspace.globals["opt"] = value
    with pytest.raises(DefinitionError, match=message):
        Save(rig.manager, Position(0)).write({"a": rig.workspace})


def test_a_codec_takes_precedence_over_a_state_and_cannot_contain_one(rig: Rig) -> None:
    class Wrapper:
        def __init__(self, opt: Momentum) -> None:
            self.opt = opt

    register_codec(Wrapper, lambda w: w.opt, Wrapper)
    rig.workspace.globals["opt"] = Wrapper(Momentum())
    with pytest.raises(DefinitionError, match=r"it is in the output of its codec .*"):
        Save(rig.manager, Position(0)).write({"a": rig.workspace})
    register_codec(Momentum, lambda m: m.steps, lambda steps: Momentum())
    rig.workspace.globals["opt"] = Momentum()
    rig.save(0)
    assert stateful_of(rig.manager) == set()


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (Nesterov(), PlanMismatchError, r"expected an object of class .*\.Momentum.*\.Nesterov"),
        (17, PlanMismatchError, r"expected an object of class .*Momentum.*found builtins.int"),
        (
            None,
            PlanMismatchError,
            r"found nothing\. Make the object in a task of the job's init group",
        ),
        (Momentum(5), CheckpointError, r"load_state_dict of .*Momentum raised ValueError: expec"),
    ],
    ids=["class", "plain", "nothing", "raises"],
)
def test_an_object_that_does_not_fit_the_state_is_named(
    rig: Rig, made: Any, error: type[Exception], message: str
) -> None:
    rig.workspace.globals["opt"] = Momentum()
    rig.save(0)
    with pytest.raises(error, match=message) as caught:
        rig.load(0, {"opt": made}, anew=True)
    assert "Blob 'opt' in " in str(caught.value)


def test_nothing_is_replaced_if_a_state_finds_no_object(rig: Rig) -> None:
    rig.workspace.globals.update(opt=Momentum(), w=1)
    rig.save(0)
    workspace = Workspace("a")
    workspace.globals["w"] = 2
    with pytest.raises(PlanMismatchError):
        run_group(rig.manager.load(0), {"a": workspace})
    assert workspace.globals == {"w": 2}
