"""What is drawn on a terminal fits it, and is whole."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import termios

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from jobrunner.cluster import UnderWay
from jobrunner.run.result import NodeSave, ResumePlan, SaveReport
from jobrunner.story import RunState, render
from jobrunner.story.render import draw_lines
from tests.sampling import examples
from tests.story.test_live import Clock, Runner

NAMES = st.text(st.sampled_from("abcxyz_/:[]é漢 "), min_size=1, max_size=60)


def state(metrics, nodes, job="walk", seconds=5.0):
    """A run in its fifth epoch, with a save in flight, a loss and two saves that failed."""
    clock = Clock()
    found = RunState(clock=clock)
    running = tuple(f"{node}/train" for node in nodes[::2])
    runner = Runner(UnderWay("epoch", 5, seconds, running), job)
    found.on_setup(runner)
    found.on_placement({node: f"tcp://{i % 3}" for i, node in enumerate(nodes)})
    found.on_start(ResumePlan(None, "nothing is recorded"), 1000)
    found.on_group("init", 0, 0.1)
    found.on_loss(RuntimeError("lost"))
    found.on_recovery(0, 0, 1.0)
    clock.now = 40.0
    found.on_epoch(4, 10.0, metrics)
    stores = {node: NodeSave(0.2, 123_456) for node in nodes}
    found.on_save(SaveReport(2, 0.2, 0.1, 123_456_789, stores, "the disk is full"))
    found.on_save(SaveReport(3, 0.2, 0.1, 123_456_789, stores))
    found.on_save_start(4, 0)
    clock.now = 43.0
    return found


def drawn(known, width, height=1000):
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, height=height, force_terminal=True, color_system=None
    )
    console.print(draw_lines(known, width, height))
    return stream.getvalue().splitlines()


@settings(max_examples=examples(30), deadline=None)
@given(
    st.dictionaries(NAMES, st.floats(-1e9, 1e9), max_size=12),
    st.lists(NAMES.map(lambda it: it.replace("/", "")).filter(bool), max_size=10, unique=True),
    NAMES,
    st.integers(20, 200),
)
def test_no_metric_and_no_save_is_cut_at_any_width(metrics, nodes, job, width):
    known = state(metrics, nodes, job).now()
    lines = drawn(known, width)
    assert max(map(cell_len, lines)) <= width
    shown = "".join(lines).replace(" ", "")
    for texts in (
        render.metrics(known, len(known.metrics)),
        render.activity(known),
        render.troubles(known),
        render.times(known),
        [render.position(known), job],
    ):
        for text in texts:
            assert text.replace(" ", "") in shown


@pytest.mark.parametrize("height", [8, 24, 50])
def test_metrics_that_half_a_screen_does_not_hold_are_counted(height):
    metrics = {f"a_metric_of_some_length_{i}": i / 7 for i in range(200)}
    lines = drawn(state(metrics, ["trainer"]).now(), 80, height)
    assert len(lines) <= max(6, height // 2)  # what is printed needs room
    shown = "\n".join(lines)
    left_out = int(re.search(r"and (\d+) more metrics", shown)[1])
    assert shown.count("a_metric_of_some_length_") + left_out == 200
    assert "saved epoch 3 (117.74 MiB)" in shown
    assert "saving epoch 4 for" in shown


SCRIPT = """
from jobrunner import Job, JobRunner, Node, Session, Task, current_task, epoch_limiter


def step(n):
    print("said by", current_task().epoch)
    current_task().report(**{f"a_metric_with_a_long_name_{i}": i / 3 for i in range(12)})
    return n + 1


if __name__ == "__main__":
    with Job("count") as job:
        with job.init_group:
            Task(int, outputs="n", node=Node("a"))
        Task(step, outputs="n", node=Node("a"))
    epoch_limiter(job, 3)
    with Session.local(workers=1) as session:
        JobRunner(job).run(session)
"""


@pytest.mark.nightly
def test_a_script_on_a_real_terminal_shows_its_run_and_its_prints_once(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 80))
    environment = {k: v for k, v in os.environ.items() if "PYTEST" not in k} | {"TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(ours, 1 << 16):
                shown += data
        os.close(ours)
    text = shown.decode()
    assert process.returncode == 0, text
    assert "a_metric_with_a_long_name_11=3.667" in text.rpartition("epoch 3/3")[2]
    for epoch in (1, 2, 3):
        assert text.count(f"a/step: said by {epoch}") == text.count(f"said by {epoch}") == 1
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "\n").split("\n")
    assert max(map(cell_len, lines)) <= 80
