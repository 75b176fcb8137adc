"""Which methods of a callback a run calls, in which order, and what their failures do."""

import logging

import pytest

from jobrunner import (
    Callback,
    DefinitionError,
    JobRunner,
    MultiNodeCheckpointManager,
    RunStoppedError,
    SaveEvery,
    current_task,
)
from jobrunner.run.callbacks import EVENTS
from tests.jobs import counter


@pytest.fixture
def session(inproc_session):
    return inproc_session


FLAKY, RAN = [], []  # tasks run in this process


def count_or_fail(n):
    if n == 1 and FLAKY:
        raise FLAKY.pop()
    return n + 1


def note_and_count(n):
    RAN.append(current_task().epoch)
    return n + 1


class Hears(Callback):
    """Notes each event with what tells it from others."""

    def __init__(self, *events):
        self.heard = []
        for event in events or EVENTS:
            setattr(self, event, self.note(event))

    def note(self, event):
        def handle(*args):
            shown = tuple(arg for arg in args if isinstance(arg, int | str))
            self.heard.append((event.removeprefix("on_"), *shown))

        return handle


class Fails(Callback):
    def __init__(self, *, is_essential=False):
        self.is_essential = is_essential

    def on_epoch(self, epoch, seconds, metrics):
        raise ZeroDivisionError(f"epoch {epoch}.")


def test_every_event_of_a_run_comes_in_order(session, manager):
    hears = Hears()
    JobRunner(counter(1, steps_per_epoch=2), manager, callbacks=[hears]).run(session)
    assert hears.heard == [
        ("setup",),
        ("placement",),
        ("start", 1),
        ("group", "init", 0),
        ("save_start", 0, 0),
        ("save",),
        ("epoch_start", 1),
        ("step_start", 1, 1),
        ("step", 1, 1),
        ("step_start", 1, 2),
        ("step", 1, 2),
        ("epoch", 1),
        ("save_start", 1, 0),
        ("save",),
        ("group", "download", 1),
        ("group", "exit", 1),
        ("finish",),
    ]


def test_a_run_that_resumes_within_an_epoch_says_so(session, tmp_path):
    def stop(epoch, step, *args):
        if (epoch, step) == (2, 1):
            runner.stop("by hand")

    manager = MultiNodeCheckpointManager(tmp_path / "ckpt", save=SaveEvery(steps=1))
    stops = Callback()
    stops.on_step = stop
    job = counter(2, steps_per_epoch=2)
    hears = Hears("on_error", "on_finish")
    runner = JobRunner(job, manager, callbacks=[stops, hears])
    with pytest.raises(RunStoppedError):
        runner.run(session)
    assert hears.heard == [("error",)]
    hears = Hears("on_load", "on_epoch_start", "on_step_start", "on_epoch", "on_group")
    JobRunner(job, manager, callbacks=[hears]).run(session)
    assert hears.heard == [
        ("load", 1, 1),
        ("epoch_start", 2),
        ("step_start", 2, 2),
        ("epoch", 2),
        ("group", "download", 2),
        ("group", "exit", 2),
    ]


def test_a_loss_and_the_recovery_from_it_are_told(session, manager):
    FLAKY.append(OSError("by hand"))
    hears = Hears("on_loss", "on_load", "on_recovery", "on_epoch")
    JobRunner(counter(2, count_or_fail, transient_errors=OSError), manager, callbacks=[hears]).run(
        session
    )
    assert hears.heard == [
        ("epoch", 1),
        ("loss",),
        ("load", 1, 0),
        ("recovery", 1, 0),
        ("epoch", 2),
    ]


def test_a_failing_callback_is_a_warning_for_the_others(session, caplog):
    first, last = Hears("on_warning", "on_epoch"), Hears("on_warning", "on_epoch")
    fails, of_itself = Fails(), []
    fails.on_warning = of_itself.append
    with caplog.at_level(logging.WARNING):
        result = JobRunner(counter(3), callbacks=[first, fails, last]).run(session)
    assert result.epoch == 3
    assert of_itself == []
    [warning, *epochs] = sorted(first.heard, reverse=True)
    assert epochs == [("epoch", 3), ("epoch", 2), ("epoch", 1)]
    assert sorted(last.heard) == sorted(first.heard)
    for part in ("Fails", "on_epoch", "ZeroDivisionError: epoch 1. The", "is_essential = True"):
        assert part in warning[1]
    told = [record.getMessage() for record in caplog.records]
    assert told == [warning[1]]
    assert "Traceback" in caplog.text


def test_an_essential_callback_that_fails_ends_the_run(session, manager):
    hears = Hears("on_error", "on_finish")
    with pytest.raises(ZeroDivisionError):
        JobRunner(counter(3), manager, callbacks=[Fails(is_essential=True), hears]).run(session)
    assert hears.heard == [("error",)]
    assert JobRunner(counter(3), manager).run(session).resumed_from == 0  # the lock is free


def test_the_workers_run_batches_unless_a_callback_must_be_asked(session):
    def run_in_batches(callback):
        """Whether epochs ran before the callback heard of the one before."""
        ahead = []
        watch = Callback()
        watch.is_passive = True
        watch.on_epoch = lambda epoch, *args: ahead.append(RAN[-1] > epoch)
        JobRunner(counter(200, note_and_count), callbacks=[callback, watch]).run(session)
        return any(ahead)

    passive = Hears("on_epoch_start", "on_epoch")
    passive.is_passive = True
    assert run_in_batches(passive)
    starts_and_ends = [(event, n) for n in range(1, 201) for event in ("epoch_start", "epoch")]
    assert passive.heard == starts_and_ends
    assert run_in_batches(Callback())  # it has no method of its own
    active = Hears("on_epoch")
    assert not run_in_batches(active)
    steps = Hears("on_step")
    steps.is_passive = True
    assert not run_in_batches(steps)
    assert steps.heard == [("step", n, 1) for n in range(1, 201)]


class Adds(Callback):
    """Adds up a number for each epoch, over all runs."""

    def __init__(self, number, ends_by=""):
        self.number, self.total, self.ends_by = number, 0, ends_by

    @property
    def ends_job(self):
        return self.total >= 4

    def on_epoch(self, epoch, seconds, metrics):
        self.total += self.number

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state.get("total", 0)


def test_the_state_of_each_callback_goes_on_from_the_loaded_epoch(session, manager):
    adds = [Adds(1), Adds(10)]
    JobRunner(counter(2), manager, callbacks=adds).run(session)
    assert [it.total for it in adds] == [2, 20]
    JobRunner(counter(3), manager, callbacks=adds).run(session)  # of the same objects too
    assert [it.total for it in adds] == [3, 30]
    adds = [Adds(1), Adds(10)]
    JobRunner(counter(3), manager, 1, callbacks=adds).run(session)
    assert [it.total for it in adds] == [3, 30]
    JobRunner(counter(2), manager, None, callbacks=adds).run(session)
    assert [it.total for it in adds] == [2, 20]
    assert manager.record(2).details.callbacks == {
        "Adds": {"total": 2},
        "Adds 2": {"total": 20},
    }


def test_a_state_that_no_record_can_hold_is_a_warning(session, manager, caplog):
    callback = Adds(1)
    callback.state_dict = lambda: {"total": [1]}
    assert JobRunner(counter(1), manager, callbacks=[callback]).run(session).epoch == 1
    assert "state_dict()['total'] must be a bool, an int, a float, a str or None" in caplog.text
    assert not manager.record(1).details.callbacks


def test_a_callback_ends_a_job_that_nothing_else_ends(session, manager):
    result = JobRunner(counter(), manager, callbacks=[Adds(2, "the sum")]).run(session)
    assert (result.epoch, result.stopped_by) == (2, "the sum")
    assert JobRunner(counter(), manager, callbacks=[Adds(2, "the sum")]).plan_resume().is_finished
    # Without it, or under another name, the job has not ended.
    assert not JobRunner(counter(3), manager).plan_resume().is_finished
    assert JobRunner(counter(3), manager, callbacks=[Adds(0)]).run(session).epoch == 3
    with pytest.raises(DefinitionError, match="would never end"):
        JobRunner(counter(), manager, callbacks=[Adds(2)]).plan_resume()


class Typo(Callback):
    def on_epochs(self, epoch, seconds, metrics):
        pass


class TooFew:
    def on_epoch(self, epoch):
        pass


class Wider(Callback):
    def on_epoch(self, *everything, more=None):
        self.onward = everything


@pytest.mark.parametrize(
    ("callback", "says"),
    [
        (Typo(), r"a run never calls on_epochs of Typo\..*on_epoch,"),
        (TooFew(), r"on_epoch of TooFew: on_epoch\(epoch\) cannot be called with 3 arguments"),
    ],
)
def test_a_method_that_no_run_can_call_is_refused_before_anything_runs(callback, says):
    with pytest.raises(DefinitionError, match=says):
        JobRunner(counter(3), callbacks=[Wider(), callback]).plan_resume()
