"""A job ends when its metric no longer improves, at the same epoch however often it was stopped."""

import pytest

from jobrunner import (
    JobRunner,
    KeepBest,
    KeepLast,
    MultiNodeCheckpointManager,
    SaveEvery,
)
from jobrunner.callbacks import EarlyStopping
from jobrunner.story import read_story
from tests.callbacks.jobs import DiesAfter, build

NAN = float("nan")


@pytest.mark.parametrize(
    ("options", "values", "end"),
    [
        ({"patience": 2}, [3, 2, 2, 1, 1, 1, 0], 6),
        ({"patience": 2, "mode": "max"}, [1, 2, 1, 3, 2, 2], 6),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.4, 2.2, 1.8, 1.7, 1.6], 6),
        ({"patience": 2}, [NAN, 3, NAN, NAN], 4),
        ({"patience": 2}, [3, None, 3, None, 3], 5),
        ({"patience": 2}, [3, 2, 1, 0], None),
    ],
)
def test_the_epoch_after_which_it_ends(options, values, end):
    stopping = EarlyStopping("m", **options)
    ends = []
    for epoch, value in enumerate(values, start=1):
        stopping.on_epoch(epoch, 0.1, {} if value is None else {"m": value})
        if stopping.ends_job:
            ends.append(epoch)
    assert ends[:1] == ([] if end is None else [end])


@pytest.mark.parametrize(("kept", "is_told"), [("loss", False), ("accuracy", True)])
def test_a_hint_says_that_the_best_epoch_may_not_be_kept(kept, is_told, tmp_path, caplog):
    manager = MultiNodeCheckpointManager(tmp_path, keep=KeepLast(1) | KeepBest(kept))
    EarlyStopping("loss").on_setup(JobRunner(build(), manager))
    assert ("the best epochs by accuracy" in caplog.text) == is_told


def test_a_job_that_stops_early_has_finished(inproc_session, tmp_path):
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt")

    def runner(**options):
        return JobRunner(build(None), manager, callbacks=[EarlyStopping("loss", **options)])

    first = runner(patience=2)
    assert "until EarlyStopping('loss', patience=2" in str(first.plan_resume())
    result = first.run(inproc_session)
    assert (result.epoch, result.stopped_by) == (5, first.callbacks[0].ends_by)
    assert (first.callbacks[0].best, first.callbacks[0].best_epoch) == (0.4, 3)
    # The same command again runs nothing.
    result = runner(patience=2).run(inproc_session)
    assert (result.epoch, result.resumed_from) == (5, 5)
    ended_by = (first.callbacks[0].ends_by,)
    assert [run.stopped_by for run in read_story(manager).runs] == [ended_by, ended_by]
    # With more patience it goes on as if it had always had that.
    result = runner(patience=4).run(inproc_session)
    assert (result.epoch, result.resumed_from) == (7, 5)


@pytest.mark.parametrize(("dies_after", "every"), [(1, 1), (5, 2), (6, 3)])
def test_an_interrupted_job_ends_after_the_same_epoch(inproc_session, tmp_path, dies_after, every):
    """Whatever is saved, and although older records are gone."""
    save = SaveEvery(epochs=every)
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt", save=save, keep=KeepLast(1))
    callbacks = [EarlyStopping("loss", patience=3), DiesAfter(dies_after)]
    with pytest.raises(InterruptedError):
        JobRunner(build(), manager, callbacks=callbacks).run(inproc_session)
    stopping = EarlyStopping("loss", patience=3)
    result = JobRunner(build(), manager, callbacks=[stopping]).run(inproc_session)
    assert (result.epoch, stopping.best_epoch, stopping.waited) == (6, 3, 3)


def test_a_stop_after_the_last_epoch_but_before_the_end_runs_the_last_groups_only(
    inproc_session, tmp_path
):
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt")

    class Dies(DiesAfter):
        def on_epoch(self, *args):
            pass

        def on_group(self, group, epoch, seconds):
            if group == "download":
                raise InterruptedError("by hand")

    callbacks = [EarlyStopping("loss", patience=2)]
    with pytest.raises(InterruptedError):
        JobRunner(build(), manager, callbacks=[*callbacks, Dies(0)]).run(inproc_session)
    runner = JobRunner(build(), manager, callbacks=callbacks)
    assert not any("epochs from" in step for step in runner.plan_resume().steps)
    assert runner.run(inproc_session).epoch == 5


def test_a_state_of_another_metric_or_a_forged_one_is_not_used():
    stopping = EarlyStopping("m", patience=2)
    stopping.on_epoch(1, 0.1, {"m": 1.0})
    state = stopping.state_dict()
    again = EarlyStopping("m", patience=2)
    again.load_state_dict(state)
    assert (again.best, again.best_epoch, again.waited) == (1.0, 1, 0)
    for other in (EarlyStopping("n"), EarlyStopping("m", mode="max")):
        other.load_state_dict(state)
        assert other.best is None
    for name, value in [("best", "low"), ("waited", -1), ("waited", True), ("best_epoch", None)]:
        with pytest.raises(ValueError, match=rf"Expected .*\$\.{name}"):
            again.load_state_dict({**state, name: value})
        assert (again.best, again.waited, again.ends_job) == (None, 0, False)


def test_a_metric_that_nobody_reports_is_a_warning(caplog):
    stopping = EarlyStopping("accuracy")
    for epoch in (1, 2):
        stopping.on_epoch(epoch, 0.1, {"loss": 1.0})
    [record] = caplog.records
    assert record.getMessage() == "EarlyStopping waits for 'accuracy'; epoch 1 reports loss."
