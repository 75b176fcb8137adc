"""A save records the blobs as they were when it began, whatever tasks do to them later."""

from __future__ import annotations

import copy
import errno
import os
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobrunner import CheckpointWriteError, MultiNodeCheckpointManager
from jobrunner.checkpoint.worker_save import Save
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.kept_states import KeptStates
from jobrunner.workspace.values import own, settle
from jobrunner.workspace.workspace import Workspace
from tests.sampling import examples

LENGTH = 17 << 10  # 136 KiB: arrays that can be linked, and whose memory is used again
NAMES = ("x", "box")


class Act(NamedTuple):
    """What user code does.

    Attributes
    ----------
    what : {"replace", "update", "change"}
        A task returns a blob, or is given it to update; or what earlier ones kept is changed.
    name : str
    at : int
        Where an array is changed.
    keeps : bool
        Whether the code has what it returned, was given, or has changed, from then on.
    """

    what: str
    name: str
    at: int
    keeps: bool


acts = st.lists(
    st.builds(
        Act,
        st.sampled_from(["replace", "update", "change", "change"]),
        st.sampled_from(NAMES),
        st.sampled_from([0, LENGTH - 1]),  # within what is compared first, and beyond it
        st.booleans(),
    ),
    max_size=2,
)
rounds = st.lists(
    st.tuples(
        acts,
        st.sampled_from(["save", "save", "in background", "is full", "is not recorded", "go back"]),
        acts,
        st.sampled_from([None, 0, 300_000]),
    ),
    min_size=2,
    max_size=7,
)


class FullFiles(FaultyFiles):
    """A disk that is full once everything is written."""

    is_full = False

    def before(self, operation: str, path: str) -> None:
        if self.is_full and operation == "syncfs":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


class Rig:
    def __init__(self, path: str, rollback_bytes: int) -> None:
        self.files = FullFiles(sync=False)
        self.manager = MultiNodeCheckpointManager(path, files=self.files)
        self.workspace = Workspace("a", kept_states=KeptStates(rollback_bytes))
        self.all = {"a": self.workspace}
        self.epoch = 0
        self.kept: list[Any] = []  # by user code, where nobody sees it
        self.seen: list[Any] = []  # and as it was when the code saw it last
        self.fill = 1.0
        for name in NAMES:
            self.act(Act("replace", name, 0, False))

    # --- what user code does

    def act(self, act: Act) -> None:
        self.fill += 1
        if act.what == "change":
            for value in self.kept:
                self.change(value, act.at)
            if not act.keeps:
                self.kept.clear()
            self.seen = copy.deepcopy(self.kept)
            return
        if act.what == "update":
            self.workspace.updated.add(act.name)
            value = own(
                self.workspace.globals, act.name, self.workspace.kept_states.array_pool.copy
            )
            self.change(value, act.at)
        else:
            value = np.ones(LENGTH)
            if act.name == "box":
                value = {"w": value, "rest": [np.ones(LENGTH), 5]}
            self.change(value, act.at)
        if act.keeps:
            self.kept.append(value)
        if act.what == "replace":
            box = [value]
            del value
            settle(box, 0, tuple)
            self.workspace.globals[act.name] = box[0]
        for value, seen in zip(self.kept, self.seen, strict=False):
            # A container is the node's own, and its tasks share it.
            assert isinstance(value, dict) or np.array_equal(value, seen)
        self.seen = copy.deepcopy(self.kept)

    def change(self, value: Any, at: int) -> None:
        for array in (value["w"], value["rest"][0]) if isinstance(value, dict) else (value,):
            array[at] = self.fill

    # --- saves

    def save(self, how: str, meanwhile: Sequence[Act], budget: int | None) -> None:
        if how == "go back":
            self.go_back()
            return
        self.epoch += 1
        save = self.manager.commits.begin(self.epoch)
        expected = copy.deepcopy(self.workspace.globals)
        if how == "is full":
            self.files.is_full = True
            with pytest.raises(CheckpointWriteError):
                save.write(self.all)
            self.files.is_full = False
            self.manager.commits.abandon(save)
        elif how == "is not recorded":
            save.write(self.all)
            self.manager.commits.abandon(save)
        elif how == "in background":
            save.copy(self.all, budget)
            for act in meanwhile:
                self.act(act)
            self.record(save, save.write(self.all, is_copied=True), expected)
        else:
            self.record(save, save.write(self.all), expected)

    def record(self, save: Save, receipts: Any, expected: dict[str, Any]) -> None:
        self.manager.commits.commit(save, receipts, {})
        self.workspace.kept_states.drop_before(save.memory_key)
        reader = self.manager.open(save.epoch)["a"]
        assert_same({name: reader.load(name) for name in NAMES}, expected)
        kept = self.recall()
        assert kept == {} or kept.keys() == expected.keys()
        assert_same(kept, {name: expected[name] for name in kept})
        assert self.workspace.kept_states.array_pool.nbytes <= 3 * 3 * 8 * LENGTH

    def recall(self) -> dict[str, Any]:
        about = self.manager.record(self.epoch)["stores"]["a"]
        identity = (self.manager.path, about["store"], about["manifest"])
        return self.workspace.kept_states.recall("a", identity, NAMES)

    def go_back(self) -> None:
        if self.manager.latest() == self.epoch > 0:
            self.workspace.globals.update(self.recall())


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same(found[name], expected[name])
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert np.array_equal(found, expected)


@settings(max_examples=examples(60, nightly=1200))
@given(steps=rounds, rollback_bytes=st.sampled_from([0, 1 << 30]))
def test_a_save_records_the_blobs_as_they_were_when_it_began(
    steps: Any, rollback_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        rig = Rig(directory + "/k", rollback_bytes)
        rig.manager.run.start(["a"], {})
        try:
            for before, how, meanwhile, budget in steps:
                for act in before:
                    rig.act(act)
                rig.save(how, meanwhile, budget)
        finally:
            rig.manager.run.end()
