"""What `jobrunner run --log-format json` prints."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.directories import invoke

GUIDE = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
SCRIPT = """
from jobrunner import Job, Node, Task, current_task, epoch_limiter, job


def step(n, fail):
    print("printed by a task")
    current_task().report(loss=float("nan"), n=n)
    return n + 1 // (n != fail)


@job
def make(fail: int = -1) -> Job:
    with Job("count") as made:
        with made.init_group:
            Task(int, outputs="n", node=Node("a"))
        Task(step, outputs="n", node=Node("a"), kwargs={"fail": fail})
    epoch_limiter(made, 3)
    return made
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    return path


def documented(section):
    """The keys in the rows of a table; of those with a choice, only what stands outside of it."""
    found = {}
    for row in re.findall(r"^\| (`.*) \|$", GUIDE.partition(section)[2].partition("\n\n")[2], re.M):
        first, *_, keys = row.split(" | ")
        for name in re.findall(r"`(\w+)`", first):
            found[name] = set(re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", keys)))
    return found


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_each_line_is_an_object_with_the_keys_that_the_guide_names(process_cluster, script):
    options = ["--scheduler", process_cluster.scheduler_address, "--log-format", "json"]
    result = invoke("run", f"{script}:make", "--checkpoint", script.parent / "runs", *options)
    events = lines(result.stdout)
    keys = documented("## JSON lines")
    kinds = {event["event"] for event in events}
    assert kinds == {"placement", "start", "group", "save", "state", "end"}
    for event in events:
        if event["event"] not in ("state", "end"):
            assert set(event) == {"event", "time"} | keys[event["event"]]
    [*_, state, end] = events
    assert set(state) - {"event", "time"} == set(documented("A `state` has these keys"))
    assert (state["phase"], state["epoch"]) == ("finished", 3)
    assert state["metrics"] == {"loss": None, "n": 2}
    assert (end["event"], end["exit_code"], end["epoch"]) == ("end", 0, 3)
    assert result.exit_code == 0


def test_an_error_and_wrong_usage_are_the_last_line(process_cluster, script):
    run = ["run", f"{script}:make", "--checkpoint", script.parent / "runs", "--log-format=json"]
    address = process_cluster.scheduler_address
    result = invoke(*run, "--scheduler", address, "--param", "fail=1")
    [*_, state, end] = lines(result.stdout)
    assert (state["phase"], "Task 'step'" in state["error"]) == ("failed", True)
    assert (end["error"]["type"], end["exit_code"]) == ("TaskFailedError", 3)
    [end] = lines(invoke(*run, "--nope").stdout)
    assert (end["event"], end["error"]["type"], end["exit_code"]) == ("end", "UsageError", 2)
    [end] = lines(invoke(*run, "--dry-run").stdout)
    assert end["plan"]["reason"].startswith("it is the last epoch recorded")
