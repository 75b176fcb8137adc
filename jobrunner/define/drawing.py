"""Show a job as an HTML table. The job need not be compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobrunner.define.task import TaskOutput
from jobrunner.texts import Html, card, counted_names, table, tag

if TYPE_CHECKING:
    from jobrunner.define.jobs import Job


def to_html(job: Job) -> Html:
    """The job as an HTML table, for notebooks."""
    rows = []
    for name, group in job.groups.items():
        tasks = group.tasks()
        blobs = dict.fromkeys(
            blob.name for task in tasks for blob in (*task.output_blobs, *task.updates)
        )
        nodes = counted_names([node.name for node in group.used_nodes()])
        rows.append((name, len(tasks), nodes, counted_names(blobs)))
    ends = [
        end.task.full_name if isinstance(end, TaskOutput) else "/".join(end.key)
        for end in job.stop_conditions
    ]
    if job.epoch_limit is not None:
        ends.append(f"epoch {job.epoch_limit}")
    saved = counted_names([node.name for node in job.nodes_to_checkpoint()])
    return card(
        "Job",
        job.name,
        table(("group", "tasks", "nodes", "writes"), rows, left=(0, 2, 3)),
        tag("div", f"until {' or '.join(ends)}" if ends else "no stop condition yet"),
        tag("div", f"saved nodes: {saved}"),
    )
