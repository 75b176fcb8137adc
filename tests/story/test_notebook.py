"""Runs in a notebook: with a real kernel, and with the part of IPython that a view uses."""

import logging
import os
import signal
import sys
import types

import pytest

from jobrunner import JobRunner, MultiNodeCheckpointManager, RunStoppedError
from jobrunner.cluster import UnderWay
from jobrunner.run.result import ResumePlan
from jobrunner.story import show_run
from jobrunner.story.places import KEPT_LINES
from tests.jobs import counter
from tests.story.test_live import Runner, save


class Handle:
    """What `display` returns; `shown` is what the page contains."""

    shown = text = ""

    def update(self, forms, *, raw):
        self.shown, self.text = forms["text/html"], forms["text/plain"]


@pytest.fixture
def page(monkeypatch):
    """The output of the cell that runs."""
    handle = Handle()
    shell = types.SimpleNamespace(kernel="a kernel")
    display = types.SimpleNamespace(display=lambda *args, **options: handle)
    ipython = types.SimpleNamespace(get_ipython=lambda: shell, display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return handle


def test_a_page_shows_the_state_and_the_last_lines_as_text(page, inproc_session):
    with show_run(True, inproc_session) as [state]:
        state.on_setup(Runner(UnderWay("epoch", 4, 2.0, ("a/<b>",)), "<job>"))
        state.on_start(ResumePlan(None, "nothing is recorded"), 8)
        state.on_epoch(3, 2.5, {"<loss>": 0.5})
        state.on_save(save(3, "disk <full>"))
        for i in range(KEPT_LINES + 1):
            logging.getLogger("jobrunner.x").warning("<i>%d", i)
    html = page.shown
    assert "<job>: epoch 3/8" in page.text  # where nothing shows HTML
    for text in ("&lt;job&gt;", "epoch 3/8", "&lt;loss&gt;", "saves failed: 1", "2.5 s an epoch"):
        assert text in html
    assert f"warning: &lt;i&gt;{KEPT_LINES}" in html
    assert "<b>" not in html
    assert "<i>" not in html


def test_why_a_run_stopped_is_said_below_the_view_only(page, inproc_session):
    for error, shown in ((RunStoppedError("it was asked to"), 0), (OSError("disk full"), 1)):
        with show_run(True, inproc_session) as [state]:
            state.on_error(error)
        assert page.shown.count(str(error)) == shown  # IPython shows the error itself


def test_a_run_is_shown_where_somebody_looks_and_not_in_tests(page, inproc_session, monkeypatch):
    with show_run(None, inproc_session) as callbacks:
        assert callbacks == []
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    with show_run(None, inproc_session) as callbacks:
        assert len(callbacks) == 1
    monkeypatch.delitem(sys.modules, "IPython")
    with show_run(None, inproc_session) as callbacks:
        assert callbacks == []  # stderr is no terminal


@pytest.mark.parametrize(("times", "name"), [(1, "RunStoppedError"), (2, "KeyboardInterrupt")])
def test_an_interrupt_has_three_lines_for_ipython(inproc_session, tmp_path, times, name):
    class Interrupt:
        def on_epoch(self, *args):
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    runner = JobRunner(counter(9), MultiNodeCheckpointManager(tmp_path), callbacks=[Interrupt()])
    with pytest.raises((RunStoppedError, KeyboardInterrupt)) as caught:
        runner.run(inproc_session)
    error = caught.value
    lines = "\n".join(error._render_traceback_()).splitlines()
    assert len(lines) <= 3
    assert lines[0].startswith(f"{name}: Job 'counter' ")
    assert f"epoch {2 - times}" in lines[1]


CELL = """
from jobrunner import Job, JobRunner, Node, Session, Task, current_task, epoch_limiter

def step(n):
    current_task().report(loss=1 / (n + 3))
    return n + 1

with Job("<count>") as job:
    with job.init_group:
        Task(int, outputs="n", node=Node("a"))
    Task(step, outputs="n", node=Node("a"))
epoch_limiter(job, 1)
with Session.local(workers=1) as session:
    JobRunner(job).run(session)
"""


@pytest.mark.nightly
def test_a_cell_that_runs_a_job_shows_it(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    environment = {name: text for name, text in os.environ.items() if "PYTEST" not in name}
    environment["PYTHONPATH"] = os.getcwd()
    resources = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(book, timeout=60, resources=resources).execute(env=environment)
    shown = "".join(output.get("data", {}).get("text/html", "") for output in book.cells[0].outputs)
    for text in ("&lt;count&gt;", "epoch 1/1", "0.3333"):
        assert text in shown
