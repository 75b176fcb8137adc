"""A save records the blobs as they were when it began, whatever tasks do to them later."""

from __future__ import annotations

import copy
import errno
import os
import tempfile
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobrunner import CheckpointWriteError, MultiNodeCheckpointManager
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles
from jobrunner.workspace import Workspace, settle
from tests.sampling import examples
from tests.saves import Save

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
        st.sampled_from(["save", "save", "in background", "is full", "is not recorded"]),
        acts,
    ),
    min_size=2,
    max_size=7,
)


class FullFiles(FaultyFiles):
    """A disk that is full once everything is written."""

    is_full = False

    def before(self, operation, path):
        if self.is_full and operation == "syncfs":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


class Rig:
    def __init__(self, path):
        self.files = FullFiles(sync=False)
        self.manager = MultiNodeCheckpointManager(path, files=self.files)
        self.workspace = Workspace("a")
        self.all = {"a": self.workspace}
        self.epoch = 0
        self.kept = []  # by user code, where nobody sees it
        self.seen = []  # and as it was when the code saw it last
        self.fill = 1.0
        for name in NAMES:
            self.act(Act("replace", name, 0, False))

    # --- what user code does

    def act(self, act):
        self.fill += 1
        if act.what == "change":
            for value in self.kept:
                self.change(value, act.at)
            if not act.keeps:
                self.kept.clear()
            self.seen = copy.deepcopy(self.kept)
            return
        if act.what == "update":
            value = self.workspace.take(act.name)
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
        else:
            box = self.workspace.globals[act.name].box
        del value
        self.workspace.put(act.name, settle(box))
        for kept, seen in zip(self.kept, self.seen, strict=False):
            assert_same(kept, seen)
        self.seen = copy.deepcopy(self.kept)

    def change(self, value, at):
        for array in (value["w"], value["rest"][0]) if isinstance(value, dict) else (value,):
            array[at] = self.fill

    # --- saves

    def save(self, how, meanwhile):
        self.epoch += 1
        save = Save(self.manager, Position.of(self.epoch))
        expected = {name: copy.deepcopy(self.workspace.lookup(name)) for name in NAMES}
        if how == "is full":
            self.files.is_full = True
            with pytest.raises(CheckpointWriteError):
                save.write(self.all)
            self.files.is_full = False
            save.abandon()
        elif how == "is not recorded":
            save.write(self.all)
            save.abandon()
        elif how == "in background":
            save.capture(self.all)
            for act in meanwhile:
                self.act(act)
            self.record(save, save.write_captured(self.all), expected)
        else:
            self.record(save, save.write(self.all), expected)

    def record(self, save, receipts, expected):
        save.commit(receipts)
        reader = self.manager.open(save.at)["a"]
        assert_same({name: reader.load(name) for name in NAMES}, expected)


def assert_same(found, expected):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same(found[name], expected[name])
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert np.array_equal(found, expected)


@settings(max_examples=examples(30, nightly=1200))
@given(steps=rounds)
def test_a_save_records_the_blobs_as_they_were_when_it_began(steps):
    with tempfile.TemporaryDirectory() as directory:
        rig = Rig(directory + "/k")
        rig.manager.run.start(["a"], {})
        try:
            for before, how, meanwhile in steps:
                for act in before:
                    rig.act(act)
                rig.save(how, meanwhile)
        finally:
            rig.manager.run.end()
