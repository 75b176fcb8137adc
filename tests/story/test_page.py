"""The HTML page of what runs did."""

import math
import re
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from jobrunner import (
    DefinitionError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Task,
    TaskFailedError,
    epoch_limiter,
)
from jobrunner.story import Story, to_page, write_report
from tests.story.stories import make_story

ODD = '"></title><script>alert(1)</script><img src="http://x/y" onload=f()>\x1b[31m\u202e&amp;'


def parse(page):
    """The page's elements: it is XML too, so what a text would break, breaks the parser."""
    start, _, rest = page.partition("\n")
    assert start == "<!doctype html>"
    return ET.fromstring(rest)


def text_of(page):
    return " ".join("".join(parse(page).find("body").itertext()).split())


def step(w):
    if w == 3 and not Path("mended").exists():
        raise ValueError("broken on purpose")
    return w + 1


def test_a_page_tells_what_the_runs_did(inproc_session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Job("count <b>") as job, Node("a&b"):
        with job.init_group:
            Task(int, outputs="w", name="zero")
        Task(step, inputs="w", outputs="w")
    epoch_limiter(job, 5)
    with pytest.raises(TaskFailedError):
        JobRunner(job, MultiNodeCheckpointManager("c")).run(inproc_session)
    Path("mended").touch()
    JobRunner(job, MultiNodeCheckpointManager("c")).run(inproc_session)
    write_report("c", "r.html")
    text = text_of(Path("r.html").read_text())
    for part in (
        "count <b>",
        "finished",
        "last epoch5",
        "epoch 3",  # where the second run began
        "Where time went",
        "jobrunner ls",
        "numpy",
    ):
        assert part in text, part


def test_no_text_of_a_record_is_more_than_text():
    page = to_page(make_story(60, nodes=[ODD, "b"], metrics=[ODD], text=ODD))
    root = parse(page)
    assert not {it.tag for it in root.iter()} & {"script", "iframe", "object", "link", "a"}
    assert not [name for it in root.iter() for name in it.attrib if name.startswith("on")]
    assert all(it.get("src", "data:").startswith("data:") for it in root.iter())
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", page)
    assert "alert(1)" in text_of(page)


def test_a_page_of_many_epochs_is_small_and_quick():
    story = make_story(10_000, nodes=["a"], metrics=["loss"], num_runs=3)
    before = time.process_time()
    page = to_page(story)
    assert time.process_time() - before < 4
    assert len(page) < 2_000_000


def test_many_of_everything_stay_bounded_and_the_page_says_so():
    nodes, metrics = [f"n{i}" for i in range(100)], [f"m{i}" for i in range(100)]
    page = to_page(make_story(120, nodes=nodes, metrics=metrics, num_runs=60, text="x" * 3000))
    assert len(page) < 5_000_000
    assert page.count("<figure>") == 24
    text = text_of(page)
    assert "The newest 20 of 60 runs" in text
    assert "The first 24 of 100 metrics" in text


def page_of_run(*epochs, **changes):
    """The page of a run that finished after ten epochs; it and each of them are changed."""
    story = make_story(10, num_runs=1, nodes=["a"])
    [run] = story.runs
    if epochs:
        pairs = zip(run.epochs, epochs, strict=True)
        changes["epochs"] = [replace(epoch, **change) for epoch, change in pairs]
    return to_page(replace(story, runs=(replace(run, **changes),)))


def test_values_that_no_chart_can_draw_do_no_harm():
    values = [math.nan, math.inf, 1e308, -1e308, 5e-324, 10**400, True, None, "x", 1.0]
    metrics = [{"a/b": value, "b": value, "never": math.nan} for value in values]
    page = page_of_run(*({"metrics": each} for each in metrics))
    assert "nan" not in "".join(it.get("d", "") for it in parse(page).iter())
    texts = {"a/mood": "well", "mood": "well", "gone": math.nan}
    page = page_of_run(*[{"metrics": texts}] * 10)
    assert "mood='well', gone=nan" in text_of(page)
    assert "<figure>" not in page


def test_a_report_is_of_a_directory_its_manager_or_its_story(tmp_path):
    with pytest.raises(DefinitionError, match="checkpoint directory, its manager or its Story"):
        write_report(5, tmp_path / "r.html")
    write_report(Story("/nowhere", ()), tmp_path / "r.html")
    assert "No run has begun" in (tmp_path / "r.html").read_text()


def test_the_checkpoints_that_can_be_loaded_and_lost_runs_are_told():
    page = page_of_run(*({"is_kept": epoch in (3, 8)} for epoch in range(1, 11)), state="lost")
    rows = parse(page).findall(".//div[@aria-label='Checkpoints']//tbody/tr")
    assert ["".join(row[0].itertext()) for row in rows] == ["8", "3"]
    assert "lost runs" in text_of(page)
    assert "lost runs" not in text_of(page_of_run())
