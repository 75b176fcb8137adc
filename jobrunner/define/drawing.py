"""Draw a job for Graphviz, or as an HTML table. The job need not be compiled."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jobrunner.define.group import TaskGroup
from jobrunner.define.node import Blob
from jobrunner.define.task import Task, TaskOutput
from jobrunner.errors import DefinitionError
from jobrunner.outputs import write_output
from jobrunner.texts import Html, card, counted_names, table, tag

if TYPE_CHECKING:
    from jobrunner.define.jobs import Job


class Edge(NamedTuple):
    """`target` reads `value` from `source`, a task of its group; "after": it only waits for it."""

    source: Task
    target: Task
    value: str


def find_edges(group: TaskGroup) -> list[Edge]:
    """Which task waits for which: a read follows the last write defined before it."""
    edges: list[Edge] = []
    writers: dict[Blob, Task] = {}
    for task in group.tasks():
        for value in (*task.inputs, *task.updates):
            if isinstance(value, TaskOutput):
                if value.task.group is group:
                    value_name = value.blob.name if value.blob is not None else "return value"
                    edges.append(Edge(value.task, task, value_name))
            elif value in writers:
                edges.append(Edge(writers[value], task, value.name))
        for named in task.after:
            earlier = group.find_named(named, task) if isinstance(named, str) else named
            if earlier is not None and earlier is not task and earlier.group is group:
                edges.append(Edge(earlier, task, "after"))
        for blob in (*task.output_blobs, *task.updates):
            writers[blob] = task
    return list(dict.fromkeys(edges))


def draw(job: Job, path: str | os.PathLike[str]) -> None:
    """See `Job.visualize`."""
    if Path(path).suffix != ".dot":
        raise DefinitionError(
            f"Cannot draw job {job.name!r} to {os.fspath(path)!r}: expected a name that ends in .dot, "
            f"for Graphviz, which makes an image of it: dot -Tsvg job.dot -o job.svg."
        )
    write_output(path, to_dot(job))


def to_dot(job: Job) -> str:
    """The job in Graphviz' language: a box for each task, in a frame for each group."""
    ends = set()
    for end in (*job.stop_conditions, *job.epoch_end_conditions):
        if isinstance(end, TaskOutput):
            ends.add(end.task)
    lines = [
        f"digraph {_quote(job.name)} {{",
        "  node [shape=box]",
        f"  label={_quote(_end_of(job))}",
    ]
    for name, group in job.groups.items():
        keys = {task: f"{name}{i}" for i, task in enumerate(group.tasks())}
        lines.append(f"  subgraph cluster_{name} {{")
        lines.append(f"    label={_quote(name + _how_often(job, name))}")
        for task, key in keys.items():
            style = ", style=filled, fillcolor=moccasin" if task in ends else ""
            lines.append(f"    {key} [label={_quote(task.full_name)}{style}]")
        for edge in find_edges(group):
            arrow = f"{keys[edge.source]} -> {keys[edge.target]}"
            lines.append(f"    {arrow} [label={_quote(edge.value)}]")
        lines.append("  }")
    lines.append("}\n")
    return "\n".join(lines)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # Graphviz reads UTF-8, but not \u


def to_html(job: Job) -> Html:
    """The job as an HTML table, for notebooks."""
    rows = []
    for name, group in job.groups.items():
        tasks = group.tasks()
        blobs = dict.fromkeys(
            blob.name for task in tasks for blob in (*task.output_blobs, *task.updates)
        )
        nodes = counted_names([node.name for node in group.used_nodes()])
        rows.append((name + _how_often(job, name), len(tasks), nodes, counted_names(blobs)))
    saved = counted_names([node.name for node in job.nodes_to_checkpoint()])
    return card(
        "Job",
        job.name,
        table(("group", "tasks", "nodes", "writes"), rows, left=(0, 2, 3)),
        tag("div", _end_of(job)),
        tag("div", f"saved nodes: {saved}"),
    )


def _how_often(job: Job, group: str) -> str:
    if group == "epoch_end":
        return " (once an epoch)"
    if group != "epoch":
        return ""
    text = "repeated"
    if job.steps_per_epoch is None:
        text += ", many times an epoch"
    elif job.steps_per_epoch > 1:
        text += f", {job.steps_per_epoch} times an epoch"
    intervals = sorted({task.every for task in job.epoch_group.tasks()} - {1})
    if intervals:
        text += f"; some tasks every {' or '.join(map(str, intervals))} steps"
    return f" ({text})"


def _end_of(job: Job) -> str:
    ends = [
        end.task.full_name if isinstance(end, TaskOutput) else "/".join(end.key)
        for end in job.stop_conditions
    ]
    if job.epoch_limit is not None:
        ends.append(f"epoch {job.epoch_limit}")
    return f"until {' or '.join(ends)}" if ends else "no stop condition yet"
