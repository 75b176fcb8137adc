"""Write what runs did as a trace, which Perfetto and Chrome show."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import Any

from dask.utils import natural_sort_key

from jobrunner.define import PATH, checked
from jobrunner.outputs import check_output, write_output
from jobrunner.positions import Position
from jobrunner.report.reader import TOLD, Source, story_of
from jobrunner.report.story import RunStory, Span, Story
from jobrunner.texts import printable

_EPOCHS, _SAVES, _LOSSES, _NODES = range(1, 5)
"""Threads of a run; each node has one or more, from the last on."""

Event = dict[str, Any]


@checked(source=TOLD, path=PATH)
def write_trace(source: Source | Story, path: str | os.PathLike[str]) -> int:
    """Write what the runs of a checkpoint directory did in the format of Chrome's traces.

    Parameters
    ----------
    source : MultiNodeCheckpointManager, str, os.PathLike or Story
        The directory, its manager, or what `read_story` returned for it.
    path : str or os.PathLike
        The file to write; it is replaced. It cannot be in a checkpoint directory.

    Returns
    -------
    int
        The number of events.

    Raises
    ------
    CheckpointError
        The log cannot be read.
    DefinitionError
        `path` is in a checkpoint directory or in none that exists, or is something else than a file.
    OSError
        The file cannot be written.

    Notes
    -----
    Runs on any machine that can read the directory. https://ui.perfetto.dev opens the file. Each
    run is a process with threads for its epochs, saves and losses, and for the sampled tasks of
    each node. *Safe to retry*: yes.
    """
    check_output(path)
    trace = to_trace(story_of(source))
    write_output(path, json.dumps(trace, allow_nan=False))
    return len(trace["traceEvents"])


def to_trace(story: Story) -> dict[str, Any]:
    """The trace as JSON; its times begin with the first run."""
    zero = min((run.began for run in story.runs), default=0.0)
    # No thread has the number of a run: Perfetto would take it for the main one.
    before = max((run.number for run in story.runs), default=0)
    events = [event for run in story.runs for event in _run_events(run, zero, before)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _run_events(run: RunStory, zero: float, before: int) -> Iterator[Event]:
    pid = run.number

    def event(ph: str, tid: int, name: str, began: float, **others: Any) -> Event:
        ts = round(max(0.0, began - zero) * 1e6)
        about = {"name": printable(name), "ts": ts, **others}
        return {"ph": ph, "pid": pid, "tid": before + tid, **about}

    def lasting(tid: int, name: str, cat: str, began: float, seconds: float, **args: Any) -> Event:
        dur = round(max(0.0, seconds) * 1e6)
        return event("X", tid, name, began, cat=cat, dur=dur, args=args)

    def names(tid: int, name: str) -> Event:
        args = {"name": printable(name)}
        return {"ph": "M", "pid": pid, "tid": before + tid, "name": "thread_name", "args": args}

    title = f"run {run.number} of {run.job or 'a job'}, {run.state}"
    yield {**names(_EPOCHS, title), "name": "process_name"}
    yield names(_EPOCHS, "recorded epochs")
    yield from (names(_SAVES, "saves"), names(_LOSSES, "losses and moves"))
    for epoch in run.epochs:
        name, began = f"epoch {epoch.number}", epoch.ended - epoch.seconds
        aside = {"is_set_aside": epoch.is_set_aside}
        yield lasting(_EPOCHS, name, "epoch", began, epoch.seconds, **aside)
    for save in run.saves:
        name, began = f"save of epoch {save.epoch}", save.ended - save.seconds
        sizes = {"nbytes": save.nbytes, "wait_seconds": save.wait_seconds}
        yield lasting(_SAVES, name, "save", began, save.seconds, **sizes)
    for loss in run.losses:
        args = {"text": printable(loss.text)}
        yield event("i", _LOSSES, "loss", loss.time, cat="loss", s="t", args=args)
        if loss.resumed is not None:
            at = None if loss.resumed_from is None else Position.of(loss.resumed_from).to_json()
            seconds = loss.resumed - loss.time
            yield lasting(_LOSSES, "recovery", "loss", loss.time, seconds, resumed_from=at)
    for began, ended in run.moves:
        yield lasting(_LOSSES, "move to other workers", "move", began, ended - began)
    tid = _NODES
    by_node: dict[str, list[Span]] = {}
    for span in run.spans:
        by_node.setdefault(span.node, []).append(span)
    for node, spans in sorted(by_node.items(), key=lambda item: natural_sort_key(item[0])):
        for i, lane in enumerate(_lanes(spans)):
            yield names(tid, f"node {node}" if i == 0 else f"node {node}, thread {i + 1}")
            for span in lane:
                yield lasting(
                    tid, span.task, "task", span.began, span.seconds, node=node, epoch=span.epoch
                )
            tid += 1


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans in rows, in none of which two overlap."""
    lanes: list[list[Span]] = []
    free: list[tuple[float, int]] = []  # when each lane is free again, the first one first
    for span in sorted(spans, key=lambda span: span.began):
        if free and free[0][0] <= span.began:
            lane = heappop(free)[1]
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(span)
        heappush(free, (span.began + span.seconds, lane))
    return lanes
