"""A job drawn for Graphviz and as an HTML table."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from jobrunner import DefinitionError, Job, Node, Task, epoch_limiter
from jobrunner.define.drawing import find_edges

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
        (edge.source.full_name, edge.target.full_name, edge.value)
        for edge in find_edges(build().epoch_group)
    ]
    assert found == [
        ("a/read", "a/sum", "seen"),  # as a blob, and as what it returned
        (f"{ODD}/write", f"{ODD}/look", "w"),
        ("a/sum", f"{ODD}/look", "after"),
    ]


def test_a_graph_for_graphviz_quotes_its_names(tmp_path: Path) -> None:
    build().visualize(tmp_path / "job.dot")
    text = (tmp_path / "job.dot").read_text()
    assert 'label="no<d>e & \\"co\\"/write"' in text
    assert "epoch0 -> epoch2" in text
    assert 'label="a/sum", style=filled' in text  # a stop condition
    assert text.count("{") == text.count("}") == 5


def test_a_job_that_cannot_be_compiled_yet_can_be_drawn(tmp_path: Path) -> None:
    with Job() as job, Node("größe"):
        with job.init_group:
            first = Task(int, outputs="w", name="null")
        Task(lambda w: w, inputs="w", name="schön", after=[first, "nobody"])
    job.visualize(tmp_path / "job.dot")
    assert "größe" in (tmp_path / "job.dot").read_text(encoding="utf-8")


def test_a_job_is_a_table_in_a_notebook_and_may_be_changed_afterwards() -> None:
    job = build()
    root = ET.fromstring(job._repr_html_())
    rows = [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]
    assert rows[2] == ["epoch (repeated)", "4", f"2: a, {ODD}", "2: seen, w"]
    assert rows[3] == ["download", "0", "none", "none"]
    assert "until a/sum or epoch 9" in "".join(root.itertext())
    Task(int, node="a", group=job.epoch_group)


def test_an_empty_job_can_be_drawn(tmp_path: Path) -> None:
    Job().visualize(tmp_path / "job.dot")
    assert "no stop condition yet" in (tmp_path / "job.dot").read_text()


@pytest.mark.parametrize("name", ["job", "job.png", "job.svg"])
def test_another_file_type_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DefinitionError, match=r"ends in \.dot"):
        build().visualize(tmp_path / name)
    assert not list(tmp_path.iterdir())
