"""The trace: every event as Chrome's format wants it, and no two of a thread that overlap in part."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jobrunner import DefinitionError, read_story, write_trace
from jobrunner.report import Span, Story, to_trace
from jobrunner.report.ledger import Ledger
from jobrunner.report.story import EpochStory, LossStory, RunStory, SaveStory

GOLDEN = Path(__file__).parents[1] / "golden" / "log_1"


def story(*spans: Span, losses: tuple[LossStory, ...] = (), name: str = "job") -> Story:
    run = RunStory(
        number=1, name="r", job=name, host="", pid=None, parameters={}, plan={}, environment={},
        began=1000.0, ended=1010.0, last_seen=1010.0, state="finished", resumed_from=None,
        epochs=(EpochStory(1, 1004.0, 2.0, {}, False),),
        saves=(SaveStory(1, 0, 1005.0, 1.0, 0.5, 80, {"a": 1.0}),),
        losses=losses, moves=((1009.0, 1009.5),), spans=spans, ledger=Ledger(), is_estimated=False,
    )  # fmt: skip
    return Story("/k", (run,))


def check(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """What Perfetto's reader of JSON traces wants of each event."""
    events: list[dict[str, Any]] = json.loads(json.dumps(trace, allow_nan=False))["traceEvents"]
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    named = set()
    for event in events:
        assert type(event["pid"]) is type(event["tid"]) is int
        assert type(event["name"]) is str
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert type(event["args"]["name"]) is str
            named.add((event["pid"], event["tid"]))
            continue
        assert type(event["ts"]) is int
        assert event["ts"] >= 0
        assert type(event["cat"]) is str
        if event["ph"] == "X":
            assert type(event["dur"]) is int
            assert event["dur"] >= 0
            where = (event["pid"], event["tid"])
            threads.setdefault(where, []).append((event["ts"], event["ts"] + event["dur"]))
        else:
            assert (event["ph"], event["s"]) == ("i", "t")
    assert threads.keys() <= named
    for lasting in threads.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(lasting)))
    return events


def test_a_trace_has_epochs_saves_losses_and_tasks_since_the_first_run_began():
    loss = LossStory(1006.0, "worker lost", 1008.0, 1)
    events = check(to_trace(story(Span("a", "step", 1, 1002.5, 0.25), losses=(loss,))))
    found = {(e["ph"], e["name"], e["ts"], e.get("dur")) for e in events if e["ph"] != "M"}
    assert found == {
        ("X", "epoch 1", 2_000_000, 2_000_000),
        ("X", "save of epoch 1", 4_000_000, 1_000_000),
        ("i", "loss", 6_000_000, None),
        ("X", "recovery", 6_000_000, 2_000_000),
        ("X", "move to other workers", 9_000_000, 500_000),
        ("X", "step", 2_500_000, 250_000),
    }


def test_tasks_of_a_node_that_ran_at_once_have_threads_of_their_own():
    spans = [Span("a", f"t{i}", 1, 1002.0 + i / 10, 0.25) for i in range(4)]
    events = check(to_trace(story(*spans, Span("b", "t", 1, 1002.0, 1.0))))
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["tid"] >= 5]
    assert names == ["node a", "node a, thread 2", "node a, thread 3", "node b"]
    assert not {e["pid"] for e in events} & {
        e["tid"] for e in events
    }  # that would be a main thread


def test_very_many_tasks_at_once_take_no_square_of_time():
    spans = [Span("a", "t", 1, 1002.0 + i / 1e6, 100.0) for i in range(5_000)]
    before = time.process_time()
    assert len(to_trace(story(*spans))["traceEvents"]) > 5_000
    assert time.process_time() - before < 1


def test_a_name_from_a_strangers_directory_is_printable():
    span = Span("a\x1b[2J", "step\u202e", 1, 1002.0, 0.25)
    for event in check(to_trace(story(span, name="j\x07"))):
        texts = (event["name"], event.get("args", {}).get("name", ""))
        assert all(text.isprintable() for text in texts)


def test_the_trace_of_a_directory_is_written(tmp_path):
    path = tmp_path / "trace.json"
    count = write_trace(GOLDEN, path)
    events = check(json.loads(path.read_text()))
    assert count == len(events)
    assert sum(e.get("cat") == "task" for e in events) == len(read_story(GOLDEN).runs[0].spans) == 2


def test_a_directory_without_runs_gives_an_empty_trace(tmp_path):
    assert write_trace(tmp_path / "none", tmp_path / "trace.json") == 0
    with pytest.raises(DefinitionError, match="no directory .*missing"):
        write_trace(tmp_path / "none", tmp_path / "missing" / "trace.json")
