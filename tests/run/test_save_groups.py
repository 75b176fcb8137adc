"""Saves that are under way: in order, in groups, and how they end."""

import threading

import pytest

from jobrunner.positions import Position
from jobrunner.run.save_groups import Save, SaveGroups


class Recorder:
    """Records groups, once it is let to."""

    def __init__(self):
        self.groups = []
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.most = 100
        self.fails_at = -1

    def record(self, group):
        self.begun.set()
        assert self.gate.wait(20)
        taken = group[: self.most]
        self.groups.append([save.at.epoch for save in taken])
        for save in taken:
            if save.at.epoch == self.fails_at:
                save.error = ValueError("by hand")
        return len(taken), all(save.error is None for save in taken)


def saves(*epochs):
    return [Save(Position(epoch), {}) for epoch in epochs]


def ended(groups):
    epochs = []
    while (save := groups.take_ended()) is not None:
        epochs.append(save.at.epoch)
    return epochs


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def groups(recorder):
    groups = SaveGroups(recorder.record)
    groups.add(saves(0))
    assert recorder.begun.wait(20)
    return groups


def test_all_that_comes_during_a_group_is_the_next_one_as_far_as_it_takes_it(recorder, groups):
    recorder.most = 3
    groups.add(saves(1, 2))
    groups.add(saves(3, 4))
    groups.wait(until=lambda: len(groups.pending) == 5)  # does not wait for all to end
    assert [save.at.epoch for save in groups.pending] == [0, 1, 2, 3, 4]
    recorder.gate.set()
    groups.wait()
    assert recorder.groups == [[0], [1, 2, 3], [4]]
    assert ended(groups) == [0, 1, 2, 3, 4]
    assert groups.pending == []


def test_after_a_failure_that_ends_the_run_nothing_is_recorded(recorder, groups):
    recorder.fails_at = 0
    groups.add(saves(1))
    recorder.gate.set()
    groups.wait()
    groups.add(saves(2))
    groups.wait()
    assert recorder.groups == [[0]]
    assert ended(groups) == [0]
    groups.forget()
    groups.add(saves(3))
    groups.wait()
    assert recorder.groups == [[0], [3]]


def test_giving_up_leaves_the_group_under_way_alone(recorder, groups):
    groups.add(saves(1))
    threading.Timer(0.05, recorder.gate.set).start()
    groups.give_up()
    assert recorder.groups == [[0]]
    assert ended(groups) == [0]


def test_an_error_in_recording_ends_the_saves_of_the_group_and_nobody_waits_for_ever():
    def record(group):
        raise ValueError("by hand")

    groups = SaveGroups(record)
    groups.add(saves(0, 1))
    groups.wait()
    ended_saves = [groups.take_ended(), groups.take_ended()]
    assert [str(save.error) for save in ended_saves if save is not None] == ["by hand"] * 2
