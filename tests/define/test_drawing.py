"""A job drawn as SVG, for Graphviz and as an HTML table."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from jobrunner import DefinitionError, Job, Node, Task, epoch_limiter
from jobrunner.define.drawing import find_edges

SVG = "{http://www.w3.org/2000/svg}"
ODD = 'no<d>e & "co"'


def build() -> Job:
    with Job("a <b>&job") as job:
        with job.init_group:
            for name in ("a", ODD):
                Task(int, outputs="w", name="zero", node=name)
        reads = Task(lambda w: w, inputs=Node(ODD)["w"], outputs="seen", name="read", node="a")
        Task(lambda w: w, inputs="w", outputs="w", name="write", node=ODD)
        sums = Task(lambda *v: 0, inputs=["seen", reads.output()], name="sum", node="a")
        Task(lambda w: w, inputs="w", name="look", node=ODD, after=sums, num_instances=3)
        job.add_stop_condition(sums)
    epoch_limiter(job, 9)
    return job


def test_edges_lead_to_a_task_from_those_of_its_group_that_it_waits_for() -> None:
    found = [
        (edge.source.full_name, edge.target.full_name, edge.what)
        for edge in find_edges(build().epoch_group)
    ]
    assert found == [
        ("a/read", "a/sum", "seen"),  # as a blob, and as what it returned
        (f"{ODD}/write", f"{ODD}/look", "w"),
        ("a/sum", f"{ODD}/look", "after"),
    ]


def test_the_drawing_shows_every_task_in_its_lane_below_those_it_waits_for(tmp_path: Path) -> None:
    build().visualize(tmp_path / "job.svg")
    root = ET.parse(tmp_path / "job.svg").getroot()
    boxes = {
        group.find(f"{SVG}title").text: group.find(f"{SVG}rect").attrib  # type: ignore[union-attr]
        for group in root.iter(f"{SVG}g")
    }
    assert list(boxes) == [
        "a/zero → w",
        f"{ODD}/zero → w",
        "a/read → seen",
        f"{ODD}/write → w",
        "a/sum (stop condition)",
        f"{ODD}/look",
    ]
    left = {title: float(box["x"]) for title, box in boxes.items()}
    upper = {title: float(box["y"]) for title, box in boxes.items()}
    assert left["a/zero → w"] == left["a/read → seen"] < left[f"{ODD}/look"]
    assert upper["a/read → seen"] < upper["a/sum (stop condition)"] < upper[f"{ODD}/look"]
    corners = [(box["x"], box["y"]) for box in boxes.values()]
    assert len(set(corners)) == len(corners)
    text = "".join(root.itertext())
    assert "look ×3" in text
    assert "until a/sum or epoch 9" in text


def test_a_graph_for_graphviz_quotes_its_names(tmp_path: Path) -> None:
    build().visualize(tmp_path / "job.dot")
    text = (tmp_path / "job.dot").read_text()
    assert 'label="no<d>e & \\"co\\"/write"' in text
    assert "epoch0 -> epoch2" in text
    assert text.count("{") == text.count("}") == 5


def test_a_job_that_cannot_be_compiled_yet_can_be_drawn(tmp_path: Path) -> None:
    with Job() as job, Node("größe"):
        with job.init_group:
            first = Task(int, outputs="w", name="null")
        Task(lambda w: w, inputs="w", name="schön", after=[first, "nobody"])
    for name in ("job.svg", "job.dot"):
        job.visualize(tmp_path / name)
        assert "größe" in (tmp_path / name).read_text(encoding="utf-8")


def test_a_job_is_a_table_in_a_notebook_and_may_be_changed_afterwards() -> None:
    job = build()
    root = ET.fromstring(job._repr_html_())
    rows = [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]
    assert rows[2] == ["epoch (repeated)", "4", f"2: a, {ODD}", "2: seen, w"]
    assert rows[3] == ["download", "0", "none", "none"]
    assert "until a/sum or epoch 9" in "".join(root.itertext())
    Task(int, node="a", group=job.epoch_group)


def test_an_empty_job_can_be_drawn(tmp_path: Path) -> None:
    Job().visualize(tmp_path / "job.svg")
    assert "no stop condition yet" in (tmp_path / "job.svg").read_text()


@pytest.mark.parametrize("name", ["job", "job.png", "job.pdf"])
def test_another_file_type_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DefinitionError, match=r"ends in \.svg"):
        build().visualize(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_job_of_very_many_tasks_is_a_table_without_a_drawing() -> None:
    with Job() as job:
        for i in range(501):
            Task(int, name=f"t{i}", node="a")
    assert "<img" not in job._repr_html_()
    assert "<td" in job._repr_html_()
