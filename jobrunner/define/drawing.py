"""Draw a job as SVG, for Graphviz, or as an HTML table. The job need not be compiled."""

from __future__ import annotations

import base64
import json
import os
from collections import defaultdict
from collections.abc import Collection
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jobrunner.define.group import TaskGroup
from jobrunner.define.node import Blob, Node
from jobrunner.define.task import Task, TaskOutput
from jobrunner.errors import DefinitionError
from jobrunner.outputs import write_output
from jobrunner.texts import Html, abbreviate, card, counted, counted_names, folded, table, tag

if TYPE_CHECKING:
    from jobrunner.define.jobs import Job

# In pixels: the columns and rows, a task's box, the edge of the drawing, a group's title.
LANE, ROW, WIDTH, HEIGHT, MARGIN, HEAD = 190, 74, 166, 40, 20, 34
_LETTERS = 22  # of a name that are shown


class Edge(NamedTuple):
    """`target` reads `what` from `source`, a task of its group; "after": it only waits for it."""

    source: Task
    target: Task
    what: str


def find_edges(group: TaskGroup) -> list[Edge]:
    """Which task waits for which: a read follows the last write defined before it."""
    edges: list[Edge] = []
    writers: dict[Blob, Task] = {}
    for task in group.tasks():
        for value in (*task.inputs, *task.updates):
            if isinstance(value, TaskOutput):
                if value.task.group is group:
                    what = value.blob.name if value.blob is not None else "return value"
                    edges.append(Edge(value.task, task, what))
            elif (writer := writers.get(value)) is not None:
                edges.append(Edge(writer, task, value.name))
        for other in task.after:
            if isinstance(other, str):
                node, _, name = other.rpartition("/")
                other = group.find(node or task.node.name, name) or task
            if other is not task and other.group is group:
                edges.append(Edge(other, task, "after"))
        for blob in (*task.output_blobs, *task.updates):
            writers[blob] = task
    return list(dict.fromkeys(edges))


def draw(job: Job, path: str | os.PathLike[str]) -> None:
    """See `Job.visualize`."""
    target = Path(path)
    to_text = {".svg": _to_svg, ".dot": _to_dot}.get(target.suffix)
    if to_text is None:
        raise DefinitionError(
            f"Cannot draw job {job.name!r} to {os.fspath(path)!r}: expected a name that ends in .svg "
            f"(for browsers) or .dot (for Graphviz)."
        )
    write_output(target, to_text(job))


# ---- SVG: a lane for each node, a band for each group, each task below those it waits for


def _to_svg(job: Job) -> str:
    lane = {name: i for i, name in enumerate(_drawn_nodes(job))}
    ends = _conditions(job)
    top = MARGIN + HEAD
    width = 2 * MARGIN + max(1, len(lane)) * LANE
    shapes = [
        f'<text class="lane" x="{MARGIN + i * LANE + LANE / 2}" y="{MARGIN + 16}">'
        f"{_text(name)}</text>"
        for name, i in lane.items()
    ]
    for name, group in job.groups.items():
        edges = find_edges(group)
        rows = _rows(group, edges)
        depth = max(rows.values(), default=-1) + 1
        height = HEAD + (depth * ROW - (ROW - HEIGHT) + 14 if depth else 4)
        title = f"{name} group: {counted(len(group.tasks()), 'task')}"
        shapes.append(
            f'<rect class="band" x="{MARGIN / 2}" y="{top}" width="{width - MARGIN}" '
            f'height="{height}" rx="8"/><text class="head" x="{MARGIN}" y="{top + 22}">'
            f"{escape(title + _how_often(job, name))}</text>"
        )
        place = {
            task: (MARGIN + lane[task.node.name] * LANE + (LANE - WIDTH) // 2, top + HEAD + r * ROW)
            for task, r in rows.items()
        }
        shapes += [_arrow(edge, place) for edge in edges]
        shapes += [_box(task, place[task], task in ends) for task in group.tasks()]
        top += height + MARGIN // 2
    height = top + MARGIN
    drawn = "\n".join(shapes)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"
viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">
<title>{escape(f"Job {job.name}")}</title>
{_STYLE}
<rect class="page" width="{width}" height="{height}"/>
{drawn}
<text class="ends" x="{MARGIN}" y="{height - 10}">{escape(_end_of(job))}</text>
</svg>
"""


_STYLE = """<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"
markerHeight="7" orient="auto"><path class="tip" d="M0,0 L8,4 L0,8 z"/></marker></defs>
<style>.page{fill:#fff} .band{fill:#f3f5f8} .head{font-weight:bold;fill:#334} .lane{font-weight:bold;
text-anchor:middle} .task{fill:#fff;stroke:#446} .end{fill:#fdeecf;stroke:#a60} .name{text-anchor:
middle} .blobs{text-anchor:middle;font-size:10px;fill:#557} .edge{fill:none;stroke:#667;
stroke-width:1.2;marker-end:url(#tip)} .tip{fill:#667}
@media (prefers-color-scheme:dark){.page{fill:#16191d} .band{fill:#22262c} .task{fill:#2c323a;
stroke:#9ab} .end{fill:#4a3a17;stroke:#da5} .lane,.name,.ends{fill:#eee} .head{fill:#dde}
.blobs{fill:#aab} .edge{stroke:#aab} .tip{fill:#aab}}</style>"""


def _drawn_nodes(job: Job) -> Collection[str]:
    return dict.fromkeys(t.node.name for g in job.groups.values() for t in g.tasks())


def _rows(group: TaskGroup, edges: list[Edge]) -> dict[Task, int]:
    waits = defaultdict[Task, list[Task]](list)
    for edge in edges:
        waits[edge.target].append(edge.source)
    rows: dict[Task, int] = {}
    free = defaultdict[Node, int](int)  # node -> first free row of its lane
    for task in group.tasks():
        below = [rows[other] + 1 for other in waits[task] if other in rows]
        rows[task] = max([free[task.node], *below])
        free[task.node] = rows[task] + 1
    return rows


def _box(task: Task, corner: tuple[int, int], is_end: bool) -> str:
    x, y = corner
    outputs = ", ".join(blob.name for blob in (*task.output_blobs, *task.updates))
    name = task.name + (f" ×{task.num_instances}" if task.num_instances > 1 else "")
    title, more = task.full_name, ""
    if outputs:
        title = f"{title} → {outputs}"
        more = f'<text class="blobs" x="{x + WIDTH / 2}" y="{y + 32}">→ {_text(outputs)}</text>'
    return (
        f"<g><title>{escape(title)}{' (stop condition)' if is_end else ''}</title>"
        f'<rect class="{"end" if is_end else "task"}" x="{x}" y="{y}" width="{WIDTH}" '
        f'height="{HEIGHT}" rx="5"/>'
        f'<text class="name" x="{x + WIDTH / 2}" y="{y + (17 if outputs else 25)}">'
        f"{_text(name)}</text>{more}</g>"
    )


def _arrow(edge: Edge, place: dict[Task, tuple[int, int]]) -> str:
    (x1, y1), (x2, y2) = place[edge.source], place[edge.target]
    x1, x2 = x1 + WIDTH // 2, x2 + WIDTH // 2
    if y2 > y1:
        y1 += HEIGHT
        bend = max(20, (y2 - y1) // 2)
        course = f"M{x1},{y1} C{x1},{y1 + bend} {x2},{y2 - bend} {x2},{y2}"
    else:  # `after=` may name a task that is defined later
        course = f"M{x1},{y1} C{x1},{y1 - 30} {x2},{y2 + HEIGHT + 30} {x2},{y2 + HEIGHT}"
    what = f"{edge.source.full_name} → {edge.target.full_name}: {edge.what}"
    return f'<path class="edge" d="{course}"><title>{escape(what)}</title></path>'


def _text(name: str) -> str:
    return escape(abbreviate(name, _LETTERS))


# ---- Graphviz


def _to_dot(job: Job) -> str:
    quote = partial(json.dumps, ensure_ascii=False)  # Graphviz reads UTF-8, but not \\u
    lines = [f"digraph {quote(job.name)} {{", "  node [shape=box]"]
    ends = _conditions(job)
    for name, group in job.groups.items():
        number = {task: f"{name}{i}" for i, task in enumerate(group.tasks())}
        title = quote(name + _how_often(job, name))
        lines.append(f"  subgraph cluster_{name} {{\n    label={title}")
        for task, key in number.items():
            style = ", style=filled, fillcolor=moccasin" if task in ends else ""
            lines.append(f"    {key} [label={quote(task.full_name)}{style}]")
        lines += [
            f"    {number[e.source]} -> {number[e.target]} [label={quote(e.what)}]"
            for e in find_edges(group)
        ]
        lines.append("  }")
    return "\n".join([*lines, "}\n"])


# ---- HTML


def to_html(job: Job) -> Html:
    """Draw the job as an HTML table, for notebooks."""
    rows = []
    for name, group in job.groups.items():
        nodes = [node.name for node in group.used_nodes()]
        blobs = dict.fromkeys(b.name for t in group.tasks() for b in (*t.output_blobs, *t.updates))
        rows.append(
            (
                name + _how_often(job, name),
                len(group.tasks()),
                counted_names(nodes),
                counted_names(blobs),
            )
        )
    saved = counted_names([node.name for node in job.nodes_to_checkpoint()])
    return card(
        "Job",
        job.name,
        table(("group", "tasks", "nodes", "writes"), rows, left=(0, 2, 3)),
        tag("div", _end_of(job)),
        tag("div", f"saved nodes: {saved}"),
        folded("Drawing", drawing) if (drawing := to_image(job)) else "",
    )


MOST_DRAWN = 500
"""Tasks of a job that is drawn in a page: others would be a thousand rows."""


def to_image(job: Job) -> Html:
    """The drawing of `Job.visualize`, as an image whose styles and names touch nothing around it.

    Nothing if the job has more than `MOST_DRAWN` tasks.
    """
    num_tasks = sum(len(group.tasks()) for group in job.groups.values())
    if num_tasks > MOST_DRAWN:
        return Html("")
    data = base64.b64encode(_to_svg(job).encode()).decode()
    what = f"Drawing of job {job.name}: {counted(num_tasks, 'task')}"
    least = 0.75 * LANE * len(_drawn_nodes(job))  # in less, it could not be read: it is scrolled
    style = f"max-width: 100%; min-width: {least:.0f}px; height: auto"
    return tag("img", src=Html(f"data:image/svg+xml;base64,{data}"), alt=what, style=style)


def _conditions(job: Job) -> set[Task]:
    ends = (*job.stop_conditions, *job.epoch_end_conditions)
    return {end.task for end in ends if isinstance(end, TaskOutput)}


def _how_often(job: Job, group: str) -> str:
    if group == "epoch_end":
        return " (once an epoch)"
    if group != "epoch":
        return ""
    count = job.steps_per_epoch
    steps = "" if count == 1 else f", {count} times an epoch" if count else ", many times an epoch"
    rare = sorted({task.every for task in job.epoch_group.tasks()} - {1})
    tasks = f"; some tasks every {' or '.join(map(str, rare))} steps" if rare else ""
    return f" (repeated{steps}{tasks})"


def _end_of(job: Job) -> str:
    ends = [
        end.task.full_name if isinstance(end, TaskOutput) else "/".join(end.key)
        for end in job.stop_conditions
    ]
    ends += [] if job.epoch_limit is None else [f"epoch {job.epoch_limit}"]
    return f"until {' or '.join(ends)}" if ends else "no stop condition yet"
