"""What `jobrunner run` shows while the job runs."""

from __future__ import annotations

import errno
import io
import logging
import os
from typing import Any

import numpy as np
import pytest

from jobrunner.cli.formatting import format_metrics
from jobrunner.cli.progress import Progress, show_progress
from jobrunner.run.result import ResumePlan, RunResult, SaveReport
from jobrunner.texts import format_seconds
from jobrunner.worker.epoch_batch import UnderWay


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class _Recorder:
    """A display that records the calls."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def open(self) -> None:
        self.events.append("open")

    def say(self, text: str) -> None:
        self.events.append(("say", text))

    def draw(self, epoch: int, total_epochs: int | None, text: str) -> None:
        self.events.append(("draw", epoch, total_epochs))

    def close(self) -> None:
        self.events.append("close")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _save(epoch: int, error: str | None = None) -> SaveReport:
    return SaveReport(epoch, 0.1, 0.1, 3 * 2**20, {}, error)


_RESULT = RunResult(3, None, "epoch_limiter", 0, [], [], [])


def test_drawing_keeps_its_interval_even_if_epochs_are_short() -> None:
    clock, display = _Clock(), _Recorder()
    progress = Progress(display, interval_seconds=1.0, clock=clock)
    with progress:
        progress.on_start(ResumePlan(None, "nothing is recorded"), 1200)
        for epoch in range(1, 1201):
            clock.now += 2**-9
            progress.on_epoch(epoch, 2**-9, {})
        progress.on_finish(_RESULT)
    drawn = [event for event in display.events if event[0] == "draw"]
    assert drawn == [("draw", 512, 1200), ("draw", 1024, 1200), ("draw", 1200, 1200)]
    assert display.events[0] == "open"
    assert display.events[-1] == "close"


def test_the_last_epoch_is_shown_when_the_run_fails() -> None:
    display = _Recorder()

    def run() -> None:
        with Progress(display, interval_seconds=1.0, clock=_Clock()) as progress:
            progress.on_epoch(1, 0.1, {})
            raise RuntimeError("the run")

    with pytest.raises(RuntimeError, match="the run"):
        run()
    assert display.events == ["open", ("draw", 1, None), "close"]


def test_logged_warnings_are_shown_at_once_and_only_during_the_run() -> None:
    display = _Recorder()
    logger = logging.getLogger("jobrunner.somewhere")
    with Progress(display, interval_seconds=1.0, clock=_Clock()):
        logger.info("a detail")
        logger.warning("epoch %d is damaged", 3)
    logger.addHandler(logging.NullHandler())
    logger.warning("afterwards")
    assert display.events == ["open", ("say", "warning: epoch 3 is damaged"), "close"]


def test_failed_saves_are_counted() -> None:
    progress = Progress(_Recorder(), interval_seconds=1.0, clock=_Clock())
    progress.on_save(_save(4, "the disk is full"))
    assert "saves failed: 1" in progress.describe()


def test_a_line_has_epoch_pace_metrics_and_the_last_save() -> None:
    progress = Progress(_Recorder(), interval_seconds=1.0)
    progress.on_start(ResumePlan(None, "nothing is recorded"), 10)
    progress.on_epoch(4, 0.25, {"epoch": 4, "loss": np.float32(0.5)})
    progress.on_save(_save(4))
    assert progress.describe() == (
        "epoch 4/10  250 ms each + 100 ms a save  loss=0.5  saved 4 (3.00 MiB)"
    )


def test_a_resumed_run_shows_where_it_continues() -> None:
    progress = Progress(_Recorder(), interval_seconds=1.0)
    progress.on_start(ResumePlan(2, "it was asked for"), 10)
    progress.on_load(2, 0, 0.5)
    assert progress.describe() == "epoch 2/10"


def _running(seconds: float, *, group: str = "epoch") -> UnderWay:
    tasks = tuple(f"node:{i}/step" for i in range(5))
    return UnderWay(group, 0 if group == "init" else 5, seconds, tasks)


def test_a_long_epoch_is_shown_with_its_tasks_and_ever_less_often() -> None:
    clock, display = _Clock(), _Recorder()
    progress = Progress(display, interval_seconds=1.0, patience_seconds=10.0, clock=clock)
    progress.on_epoch(4, 0.25, {})
    drawn = []
    for second in range(1, 100):
        clock.now = float(second)
        progress.under_way = lambda: _running(clock.now)
        progress.look()
        if len(display.events) > len(drawn):
            drawn.append(second)
    assert drawn == [10, 30, 70]
    assert "[epoch 5 for 1 min 39 s: node:0/step, node:1/step, node:2/step and 2 more]" in (
        progress.describe()
    )
    clock.now += 1
    progress.on_epoch(5, 99.0, {})
    assert len(display.events) == 4


def test_a_long_init_group_is_shown_and_a_short_one_is_not() -> None:
    display = _Recorder()
    progress = Progress(display, interval_seconds=0.0, clock=_Clock())
    progress.under_way = lambda: _running(0.5, group="init")
    progress.look()
    assert display.events == []
    progress.under_way = lambda: _running(2.0, group="init")
    progress.look()
    assert display.events == [("draw", 0, None)]
    assert progress.describe().startswith("epoch 0  [init group for 2.0 s: node:0/step, ")


def test_a_refused_run_leaves_no_bar() -> None:
    stream = _Terminal()
    with show_progress(stream):
        pass
    assert "starting" not in stream.getvalue().rpartition("\x1b[2K")[2]


def test_a_file_gets_plain_lines() -> None:
    stream = io.StringIO()
    with show_progress(stream) as progress:
        progress.on_start(ResumePlan(3, "it is the last one recorded"), None)
        progress.on_epoch(4, 2.0, {})
    assert stream.getvalue() == "from epoch 3: it is the last one recorded\nepoch 4  2.0 s each\n"


def test_a_closed_pipe_does_not_end_the_run() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with show_progress(Broken()) as progress:
        progress.on_start(ResumePlan(3, "it is the last one recorded"), None)
        progress.on_epoch(4, 2.0, {})


def test_a_closed_terminal_does_not_end_the_run() -> None:
    class Gone(_Terminal):
        is_gone = False

        def write(self, text: str) -> int:
            if self.is_gone:
                raise OSError(errno.EIO, "Input/output error")
            return super().write(text)

    stream = Gone()
    with show_progress(stream) as progress:
        progress.on_start(ResumePlan(3, "it is the last one recorded"), None)
        stream.is_gone = True
        progress.on_start(ResumePlan(3, "it is the last one recorded"), None)
        progress.on_epoch(4, 2.0, {})
        logging.getLogger("jobrunner").warning("odd")
    assert stream.closed is False


def test_a_signal_is_confirmed_even_if_stderr_is_closed() -> None:
    """Ctrl-C also ends a `tee` that reads the output."""
    reader, writer = os.pipe()
    os.close(reader)
    kept = os.dup(2)
    try:
        os.dup2(writer, 2)
        Progress(_Recorder(), interval_seconds=1.0).on_stop_asked("SIGINT", "Ctrl-C again")
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(writer)


def test_a_terminal_gets_a_bar_without_markup_in_names() -> None:
    stream = _Terminal()
    with show_progress(stream) as progress:
        progress.on_start(ResumePlan(None, "a [bold] reason"), 4)
        progress.on_epoch(3, 0.5, {"[red]loss": 1.0})
        logging.getLogger("jobrunner").warning("[x] is odd")
    text = stream.getvalue()
    assert "a [bold] reason" in text
    assert "epoch 3/4" in text
    assert "[red]loss=1" in text
    assert "warning: [x] is odd" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00123, "1.23 ms"),
        (0.25, "250 ms"),
        (12.34, "12.3 s"),
        (60, "1 min 0 s"),
        (3599.7, "1 h 0 min"),
        (7380, "2 h 3 min"),
    ],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_only_the_first_few_numbers_among_the_metrics_are_shown() -> None:
    metrics = {"text": "x", "list": [1, 2], **dict.fromkeys("abcdef", 1.0)}
    assert format_metrics(metrics) == ["a=1", "b=1", "c=1", "d=1"]
