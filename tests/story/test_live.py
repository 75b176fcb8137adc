"""What a run shows while it runs, and when."""

import io
import logging
import os
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest

from jobrunner.cluster import UnderWay
from jobrunner.run.result import NodeSave, ResumePlan, RunResult, SaveReport
from jobrunner.story import RunState, render, show_on
from jobrunner.story.live_view import Live
from jobrunner.story.places import Lines, event_text
from jobrunner.story.render import draw_line
from jobrunner.texts import format_seconds


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make_view():
    """A view that records the calls."""
    return MagicMock(interval_seconds=1.0, repeat_seconds=60.0)


def drawn_epochs(view):
    return [drawn.args[0].epoch for drawn in view.draw.mock_calls]


class Runner:
    """What a state asks a runner."""

    binding = None

    def __init__(self, run=None, job="walk"):
        self.run = run
        self.job = SimpleNamespace(name=job, steps_per_epoch=1)

    def under_way(self):
        return self.run

    def stop(self, reason): ...


def save(epoch, error=None):
    return SaveReport(epoch, 0.1, 0.1, 3 * 2**20, {"a": NodeSave(0.1, 2**20)}, error)


RESULT = RunResult(3, None, "epoch_limiter", 0, [], [], [])
START = ResumePlan(None, "nothing is recorded")


def test_drawing_keeps_its_interval_even_if_epochs_are_short():
    clock, view = Clock(), make_view()
    live = Live(view, clock)
    live.state.on_start(START, 1200)
    for epoch in range(1, 1201):
        clock.now += 2**-9
        live.state.on_epoch(epoch, 2**-9, {})
        live.look()
    assert drawn_epochs(view) == [512, 1024]
    with live:
        live.state.on_finish(RESULT)
    assert drawn_epochs(view) == [512, 1024, 1200]
    assert view.mock_calls[-1] == call.close()


def test_logged_warnings_are_shown_at_once_and_only_during_the_run():
    view = make_view()
    logger = logging.getLogger("jobrunner.somewhere")
    with Live(view, Clock()):
        logger.info("a detail")
        logger.warning("epoch %d is damaged", 3)
    logger.addHandler(logging.NullHandler())
    logger.warning("afterwards")
    about = {"level": "warning", "message": "epoch 3 is damaged"}
    view.tell.assert_called_once_with("warning", about)


def test_a_line_has_epoch_pace_time_left_metrics_and_saves():
    clock = Clock()
    state = RunState(clock=clock)
    state.on_setup(Runner())
    state.on_start(START, 10)
    state.on_group("init", 0, 0.1)
    clock.now = 1.4
    state.on_epoch(4, 0.25, {"loss": 0.5})
    state.on_save(save(4))
    state.on_save_start(5, 0)
    clock.now = 1.9
    assert draw_line(state.now()) == (
        "epoch 4/10  250 ms an epoch + 100 ms a save  1.6 s left  loss=0.5  "
        "saving epoch 5 for 500 ms  saved epoch 4 (3.00 MiB)"
    )


def test_each_node_is_shown_with_its_worker_and_a_task_that_runs():
    runner = Runner(UnderWay("epoch", 5, 1.0, ("a/fit", "a/score")))
    runner.binding = SimpleNamespace(worker_names={"tcp://1": "first"})
    state = RunState()
    state.on_setup(runner)
    state.on_placement({"a": "tcp://1", "b": "tcp://2"})
    state.on_save(save(4))
    nodes = [(it.node, it.worker, it.task, it.saved_bytes) for it in state.now().nodes]
    assert nodes == [("a", "first", "fit", 2**20), ("b", "tcp://2", None, None)]


def test_a_resumed_run_counts_from_there_and_shows_a_loss_until_it_has_recovered():
    clock = Clock()
    told = []
    state = RunState(lambda event, about: told.append((event, about)), clock=clock)
    state.on_start(ResumePlan(2, "it was asked for"), 10)
    clock.now = 100.0
    state.on_load(2, 0, 0.5)
    assert draw_line(state.now()) == "epoch 2/10"
    clock.now = 102.0
    state.on_epoch(3, 1.5, {})
    assert state.now().eta_seconds == 14.0
    state.on_loss(RuntimeError("worker b is lost"))
    assert "1 loss  recovering" in draw_line(state.now())
    state.on_recovery(2, 0, 2.5)
    assert (state.now().phase, state.now().epoch) == ("epochs", 2)
    assert "1 loss  1 recovered" in draw_line(state.now())
    assert event_text(*told[-1]) == "recovered after 2.5 s; continues from epoch 2"


def test_a_long_epoch_is_shown_with_its_tasks_every_minute():
    clock, view = Clock(), make_view()
    tasks = tuple(f"node:{i}/step" for i in range(5))
    live = Live(view, clock)
    live.state.on_setup(Runner(UnderWay("epoch", 5, 99.0, tasks)))
    live.state.on_placement({})
    live.state.on_start(START, None)
    live.state.on_epoch(4, 0.25, {})
    for second in range(1, 130):
        clock.now = float(second)
        live.look()
    assert len(drawn_epochs(view)) == 3
    assert "[epoch 5 for 1 min 39 s: node:0/step, node:1/step, node:2/step and 2 more]" in (
        draw_line(live.state.now())
    )


def test_each_phase_of_a_slow_start_is_told_also_when_piped():
    clock, stream = Clock(), io.StringIO()
    live = Live(Lines(stream), clock)
    for begin in (
        lambda: live.state.begin("imports job.py"),
        lambda: live.state.on_setup(Runner()),
        lambda: live.state.on_placement({"a": "tcp://1"}),
        lambda: live.state.on_start(ResumePlan(3, "it is the last one recorded"), 9),
    ):
        begin()
        clock.now += 2.0
        live.look()
    assert stream.getvalue().splitlines() == [
        "starting for 2.0 s: imports job.py",
        "starting for 4.0 s: places its nodes on workers, which import what tasks need",
        "starting for 6.0 s: takes the checkpoint directory",
        "epoch 3/9  loads a checkpoint",
    ]


def test_a_job_that_ends_early_is_done_and_says_what_ended_it():
    state = RunState()
    state.on_start(START, 100)
    state.on_group("init", 0, 0.1)
    state.on_epoch(73, 0.25, {})
    assert render.share(state.now()) == 0.73
    state.on_finish(RunResult(73, None, "EarlyStopping(loss)", 0, [], [], []))
    run = state.now()
    assert render.share(run) == 1.0
    for drawn in (draw_line(run), render.draw_html(run)):
        assert "epoch 73/100" in drawn
        assert "has finished, ended by EarlyStopping(loss)" in drawn


@pytest.mark.parametrize("broken", ["open", "tell", "draw", "close"])
def test_a_view_that_fails_ends_no_run(broken, caplog):
    view = make_view()
    getattr(view, broken).side_effect = RuntimeError("no display")
    with Live(view) as live:
        live.state.on_start(START, 3)
        live.state.on_epoch(1, 0.1, {})
        live.state.on_finish(RESULT)
    [record] = caplog.records
    assert record.getMessage() == "The run is no longer shown: RuntimeError: no display"
    assert view.mock_calls[-1] == call.close()


def test_a_process_without_streams_can_be_watched(monkeypatch):
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        with show_on(stream) as live:
            live.state.on_start(START, 3)
            live.state.on_epoch(1, 0.1, {})
        assert not live._has_failed


def test_a_stream_without_characters_for_bars_gets_all_others():
    class Ascii(io.TextIOWrapper):
        def isatty(self):
            return True

    written = io.BytesIO()
    stream = Ascii(written, encoding="ascii")
    with show_on(stream) as live:
        live.state.on_start(START, 4)
        live.state.on_epoch(3, 0.5, {"loss": 1.0})
    stream.flush()
    assert b"epoch 3/4" in written.getvalue()


def test_a_signal_is_confirmed_on_stderr_where_lines_go_to_a_file():
    """Ctrl-C also ends a `tee` that reads the output; then the confirmation is lost."""
    reader, writer = os.pipe()
    kept, stream = os.dup(2), io.StringIO()
    os.dup2(writer, 2)
    try:
        for is_read in (True, False):
            with show_on(stream) as live:
                live.state.on_stop_asked("SIGINT", "Ctrl-C again")
            if is_read:
                confirmed = os.read(reader, 1000)
                os.close(reader)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(writer)
    assert b"the run ends once its epoch is recorded" in confirmed
    assert "epoch is recorded" not in stream.getvalue()


def test_durations_read_well():
    for seconds, text in {
        0.00123: "1.23 ms",
        0.9999: "1.0 s",
        59.96: "1 min 0 s",
        3599.7: "1 h 0 min",
        7380: "2 h 3 min",
    }.items():
        assert format_seconds(seconds) == text
