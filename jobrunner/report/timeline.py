"""What ran where: a timeline of each run. Pure: no I/O."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence

from jobrunner.report.charts import Block, Mark, Range, lanes, merge
from jobrunner.report.parts import (
    MOST_MARKS,
    MOST_ROWS,
    PARTS,
    first,
    legend,
    name_run,
    newest,
    note,
    scrolled,
    section,
)
from jobrunner.report.story import EpochStory, RunStory, SaveStory, Span, Story
from jobrunner.texts import Html, folded, format_seconds, join, table, tag

MOST_LANES = 40
MOST_BLOCKS = 2000  # of a kind, in the newest timeline; others have a quarter
MOST_TIMELINES = 5


def timeline_section(story: Story) -> Html:
    """A timeline for each of the newest runs, and one of the newest epoch whose tasks are known."""
    runs = [run for run in story.runs if run.last_seen > run.began]
    drawn = [
        tag("details", tag("summary", name_run(run)), _timeline(run, MOST_BLOCKS), open="open")
        for run in runs[-1:]
    ]
    drawn += [
        folded(name_run(run), _timeline(run, MOST_BLOCKS // 4))
        for run in reversed(runs[-MOST_TIMELINES:-1])
    ]
    if not drawn:
        return Html("")
    shown = ("start", "compute", "save_wait", "redone", "recovery", "idle", "loss", "task")
    titles = {
        "recovery": "Recovery, move",
        "save_wait": "Save",
        "loss": "Loss",
        "task": "Tasks, of sampled epochs",
    }
    kinds = {kind: titles.get(kind) or PARTS[kind][0] for kind in shown}
    return section(
        "What ran where",
        legend(kinds),
        *drawn,
        newest(runs, MOST_TIMELINES, "run"),
        _last_epoch(runs),
    )


def _timeline(run: RunStory, most_blocks: int) -> Html:
    saved = (node for save in run.saves for node in save.nodes)
    nodes = list(dict.fromkeys([*saved, *(span.node for span in run.spans)]))
    shown = nodes[:MOST_LANES]
    length = run.last_seen - run.began
    grain = length * (len(shown) + 1) / most_blocks
    rows = [("run", _phases(run, grain))]
    kinds = _colours(run.spans)
    tasks: dict[str, list[Span]] = {}
    for span in run.spans:
        tasks.setdefault(span.node, []).append(span)
    for node in shown:
        blocks = merge(_saves(run, node), grain) + merge(_tasks(tasks.get(node, ()), kinds), grain)
        rows.append((node, blocks))
    marks = [Mark(loss.time, "loss", f"lost: {loss.text}") for loss in run.losses[-MOST_MARKS:]]
    return join(
        [lanes(rows, Range(run.began, run.last_seen), marks), first(nodes, MOST_LANES, "node")]
    )


def _phases(run: RunStory, grain: float) -> list[Block]:
    """What the run as a whole did; later blocks are drawn over earlier ones."""
    epochs = sorted(run.epochs, key=lambda epoch: epoch.ended)
    saves = sorted(run.saves, key=lambda save: save.ended)
    firsts = [it.ended - it.seconds for it in epochs[:1]]
    firsts += [it.ended - it.seconds for it in saves[:1]]
    start = max(run.began, min(firsts, default=run.last_seen))
    ran, number, until, seen = [], None, start, 0
    for epoch in epochs:
        seconds = epoch.seconds * (1 if number is None else max(1, epoch.number - number))
        while seen < len(saves) and saves[seen].ended <= epoch.ended:
            seconds += saves[seen].wait_seconds if saves[seen].ended > until else 0.0
            seen += 1
        kind = "redone" if epoch.is_set_aside else "compute"
        began = max(until, epoch.ended - seconds)
        ran.append(Block(began, max(began, epoch.ended), kind, _name_epoch(epoch)))
        number, until = epoch.number, epoch.ended
    waits = [
        Block(it.ended - it.wait_seconds, it.ended, "save_wait", _name_save(it, it.wait_seconds))
        for it in saves
        if it.wait_seconds > 0
    ]
    recoveries = [
        Block(it.time, it.resumed, "recovery", f"recovery, {format_seconds(it.resumed - it.time)}")
        for it in run.losses
        if it.resumed is not None
    ]
    recoveries += [
        Block(began, ended, "recovery", f"move to other workers, {format_seconds(ended - began)}")
        for began, ended in run.moves
    ]
    recoveries.sort()
    # What was not recorded when a worker, or the run, was lost.
    known = sorted([start, *(block.ended for block in (*ran, *waits, *recoveries))])
    ends = [loss.time for loss in run.losses]
    ends += [run.last_seen] if run.state in ("lost", "failed") else []
    vain = [Block(known[max(0, bisect(known, it) - 1)], it, "redone", "lost") for it in ends]
    shown = [
        Block(run.began, run.last_seen, "idle", "idle"),
        Block(run.began, start, "start", "start"),
    ]
    for blocks in (ran, vain, waits, recoveries):
        shown += merge(blocks, grain)
    return shown


def _saves(run: RunStory, node: str) -> list[Block]:
    saves = []
    for it in run.saves:
        if (seconds := it.nodes.get(node)) is not None:
            began = it.ended - it.seconds
            saves.append(Block(began, began + seconds, "save_wait", _name_save(it, seconds)))
    return saves


def _colours(spans: Sequence[Span]) -> dict[str, str]:
    """The kind of each task's blocks."""
    return {name: f"task{i % 4}" for i, name in enumerate(dict.fromkeys(it.task for it in spans))}


def _tasks(spans: Sequence[Span], kinds: Mapping[str, str]) -> list[Block]:
    return [
        Block(
            it.began,
            it.began + it.seconds,
            kinds[it.task],
            f"{it.task}, epoch {it.epoch}: {format_seconds(it.seconds)}",
        )
        for it in sorted(spans, key=lambda span: span.began)
    ]


def _last_epoch(runs: Sequence[RunStory]) -> Html:
    """The tasks of the newest epoch of which any are known."""
    spans = next((run.spans for run in reversed(runs) if run.spans), ())
    if not spans:
        return note("No task was sampled in these runs.")
    last = max(spans, key=lambda span: span.began).epoch
    found = [span for span in spans if span.epoch == last]
    began, ended = min(it.began for it in found), max(it.began + it.seconds for it in found)
    nodes = sorted({it.node for it in found})
    grain = (ended - began) * (len(nodes) + 1) / MOST_BLOCKS
    kinds = _colours(found)
    rows = [
        (node, merge(_tasks([it for it in found if it.node == node], kinds), grain))
        for node in nodes[:MOST_LANES]
    ]
    drawn = lanes(rows, Range(began, ended), ()) if ended > began else ""
    times: dict[tuple[str, str], list[float]] = {}
    for span in spans:
        times.setdefault((span.node, span.task), []).append(span.seconds)
    slowest = sorted(times.items(), key=lambda it: -max(it[1]))
    head = ("node", "task", "samples", "mean", "longest")
    cells = [
        (node, task, len(it), format_seconds(sum(it) / len(it)), format_seconds(max(it)))
        for (node, task), it in slowest[:MOST_ROWS]
    ]
    return join(
        [
            tag("h3", f"Epoch {last} in detail"),
            legend({kind: name for name, kind in kinds.items()}) if len(kinds) <= 4 else "",
            drawn,
            first(nodes, MOST_LANES, "node"),
            folded(
                "Sampled tasks",
                scrolled("Sampled tasks", table(head, cells, left=(0, 1))),
                first(slowest, MOST_ROWS, "task"),
            ),
        ]
    )


def _name_epoch(epoch: EpochStory) -> str:
    aside = ", set aside" if epoch.is_set_aside else ""
    return f"epoch {epoch.number}, {format_seconds(epoch.seconds)}{aside}"


def _name_save(save: SaveStory, seconds: float) -> str:
    return f"save of epoch {save.epoch}, {format_seconds(seconds)}"
