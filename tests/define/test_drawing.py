"""A job as an HTML table."""

import xml.etree.ElementTree as ET

from jobrunner import Job, Node, Task, epoch_limiter

ODD = 'no<d>e & "co"'


def build():
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


def test_a_job_is_a_table_in_a_notebook_and_may_be_changed_afterwards():
    job = build()
    root = ET.fromstring(job._repr_html_())
    rows = [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]
    assert rows[2] == ["epoch", "4", f"2: a, {ODD}", "2: seen, w"]
    assert rows[3] == ["download", "0", "none", "none"]
    assert "until a/sum or epoch 9" in "".join(root.itertext())
    Task(int, node="a", group=job.epoch_group)
