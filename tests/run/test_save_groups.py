"""Saves that are under way, when recording one of them fails."""

from jobrunner.positions import Position
from jobrunner.run.save_groups import Save, SaveGroups


def saves(*epochs):
    return [Save(Position(epoch), {}) for epoch in epochs]


def test_after_a_failure_that_ends_the_run_nothing_is_recorded():
    recorded = []

    def record(group):
        recorded.append([save.at.epoch for save in group])
        return len(group), False

    groups = SaveGroups(record)
    for epoch in (0, 1):
        groups.add(saves(epoch))
        groups.wait()
    assert recorded == [[0]]
    groups.forget()
    groups.add(saves(2))
    groups.wait()
    assert recorded == [[0], [2]]


def test_an_error_in_recording_ends_the_saves_of_the_group_and_nobody_waits_for_ever():
    def record(group):
        raise ValueError("by hand")

    groups = SaveGroups(record)
    groups.add(saves(0, 1))
    groups.wait()
    ended_saves = [groups.take_ended(), groups.take_ended()]
    assert [str(save.error) for save in ended_saves if save is not None] == ["by hand"] * 2
