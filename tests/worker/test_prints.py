"""What tasks print does not cut through a view on the same terminal, and fails no task."""

import io
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from jobrunner.worker import prints
from jobrunner.worker.task_context import FRAME


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Worker:
    """Keeps the lines that are sent to clients."""

    def __init__(self):
        self.lines = []

    def log_event(self, topic, message):
        assert topic == "print"  # which Dask's clients print
        self.lines.append((message["file"], *message["args"]))


@contextmanager
def running(name):
    """A task of node a runs in this thread."""
    step = SimpleNamespace(workspace=SimpleNamespace(node="a"), name=name)
    token = FRAME.set([None, step, 0, None])
    try:
        yield
    finally:
        FRAME.reset(token)


@contextmanager
def streams(stdout):
    """The worker of this process, whose stdout is that."""
    worker = Worker()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", None)
        prints.replace_streams(worker)
        yield worker


def test_lines_of_tasks_are_sent_with_their_names_and_all_else_is_written():
    stdout = Terminal()
    with streams(stdout) as worker:
        with running("fit"):
            print("epoch", 1)
            print("ten %\rtwenty %\r\nno", "end", end="")
        print("of a library")
        with running("fit"):
            print(", but here")
    assert stdout.getvalue() == "of a library\n"
    texts = ["a/fit: epoch 1", "a/fit: twenty %", "a/fit: no end, but here"]
    assert worker.lines == [(1, text) for text in texts]


def test_where_the_output_is_no_terminal_it_is_written_as_it_is():
    stdout = io.StringIO()
    with streams(stdout) as worker, running("fit"):
        print("epoch", 1)
    assert (stdout.getvalue(), worker.lines) == ("epoch 1\n", [])


def test_lines_of_several_threads_are_whole():
    def work(name):
        with running(name):
            for _ in range(20):
                print(name, name)

    with streams(Terminal()) as worker:
        threads = [threading.Thread(target=work, args=(name,)) for name in "xy"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(worker.lines) == [(1, "a/x: x x")] * 20 + [(1, "a/y: y y")] * 20


def test_a_flood_goes_to_the_terminal_itself(monkeypatch):
    monkeypatch.setattr(prints, "time", SimpleNamespace(monotonic=lambda: 5.0))
    stdout = Terminal()
    with streams(stdout) as worker, running("fit"):
        for i in range(10 * prints.MOST_LINES):
            print(i)
    written = stdout.getvalue().splitlines()
    assert len(worker.lines) == prints.MOST_LINES
    assert len(written) == 9 * prints.MOST_LINES
    assert written[-1] == f"a/fit: {10 * prints.MOST_LINES - 1}"


def test_a_bar_that_is_drawn_again_and_again_is_kept_once():
    with streams(Terminal()) as worker, running("fit"):
        for _ in range(100):
            print("\r" + "x" * 100, end="")
        print()
    assert worker.lines == [(1, "a/fit: " + "x" * 100)]
