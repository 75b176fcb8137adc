"""What shows checkpoints and runs: ``ls``, ``info``, ``top``, ``compare``, ``stats`` and ``report``."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import click

from jobrunner.cli.command import DIFFERENT, CommandOutput, main
from jobrunner.cli.disk import measure
from jobrunner.cli.options import (
    COUNT,
    PATH,
    NamedEpoch,
    directory_argument,
    epoch_argument,
    nothing_recorded,
    open_directory,
    resolve,
)
from jobrunner.cli.run import read_keep_best
from jobrunner.cli.tables import Column, draw_table
from jobrunner.errors import CheckpointCorruptError, DefinitionError
from jobrunner.json_output import to_json
from jobrunner.names import HISTORIES
from jobrunner.outputs import check_output
from jobrunner.positions import Position, describe_position, format_ranges
from jobrunner.texts import (
    clip,
    counted,
    format_bytes,
    format_metrics,
    format_seconds,
    format_time,
    format_value,
    listed,
    show,
    whole_metrics,
)

if TYPE_CHECKING:
    from jobrunner.checkpoint import (
        Directory,
        EpochRecord,
        KeepBest,
        NodeCheckpoint,
        State,
    )
    from jobrunner.story import Ledger, RunSearch, RunSummary, Story

_LONGEST_VALUE = 48
_MOST_MEASURED = 1000  # stores of which `ls` looks at every file
_MOST_DIFFERENCES = 10
_MOST_UNREADABLE = 10
_LOOK_SECONDS = 1.0


def name_metrics(metrics: Mapping[str, Any]) -> str:
    """The first metrics, for a table."""
    return " ".join(format_metrics(metrics))


def name_parameters(parameters: Mapping[str, Any]) -> str:
    """Parameters and the like, as ``name=value``, in one line."""
    words = [f"{name}={clip(show(value), _LONGEST_VALUE)}" for name, value in parameters.items()]
    return clip(" ".join(words), 1000)


EPOCH_COLUMNS = (
    Column("EPOCH", "epoch"),
    Column("SAVED", "time", format_time),
    Column("NODES", "nodes", lambda nodes: str(len(nodes))),
    Column("SIZE", "nbytes", format_bytes),
    Column("TIME", "seconds", format_seconds),
    Column("PINNED", "pins", ", ".join),
    Column("METRICS", "metrics", name_metrics),
)
BLOB_COLUMNS = (
    Column("  BLOB", "name", "  {}".format),
    Column("TYPE", "type"),
    Column("DTYPE", "dtype"),
    Column("SHAPE", "shape", lambda shape: " x ".join(map(str, shape))),
    Column("VALUE", "value", lambda value: clip(value, _LONGEST_VALUE)),
)
RUN_COLUMNS = (
    Column("RUN", "name"),
    Column("JOB", "job"),
    Column("STATE", "state"),
    Column("EPOCH", "epoch"),
    Column("OF", "total_epochs"),
    Column("PACE", "pace_seconds", format_seconds),
    Column("LEFT", "eta_seconds", format_seconds),
    Column("SEEN", "last_seen", format_time),
    Column("BEST", "best", format_value),
    Column("AT", "best_epoch"),
    Column("METRICS", "metrics", name_metrics),
    Column("PARAMETERS", "parameters", name_parameters),
)
STATS_COLUMNS = (
    Column("RUN", "number"),
    Column("STATE", "state"),
    Column("LOSSES", "losses"),
    Column("WALL", "wall", format_seconds),
    Column("COMPUTE", "compute", format_seconds),
    Column("START", "start", format_seconds),
    Column("SAVE WAIT", "save_wait", format_seconds),
    Column("REDONE", "redone", format_seconds),
    Column("RECOVERY", "recovery", format_seconds),
    Column("IDLE", "idle", format_seconds),
    Column("GOODPUT", "goodput", "{:.1%}".format),
)
METRIC_COLUMNS = (
    Column("METRIC", "name"),
    Column("A", "a", format_value),
    Column("B", "b", format_value),
)


@main.command("ls")
@directory_argument
@click.option(
    "--last",
    type=COUNT,
    metavar="N",
    help="List only the newest N epochs; of runs, the N that were seen last, or with --best the N best.",
)
@click.option(
    "--best",
    type=read_keep_best,
    metavar="METRIC[:min|max]",
    help="Of the runs below DIR, show the best value of a metric, and sort by it. [default: min]",
)
def ls_command(*, directory: str, last: int | None, best: KeepBest | None) -> CommandOutput:
    """List the recorded epochs of DIR, or the runs below it.

    For example:
        jobrunner ls runs/kmeans --last 5
        jobrunner ls runs
        jobrunner ls runs --best accuracy:max
    """
    from jobrunner.story import find_runs

    opened = open_directory(directory)
    search = find_runs(opened.files, opened.path)
    if search.unreadable or search.names not in ([], ["."]):
        return list_runs(opened, search, best, last)
    if best is not None:
        raise DefinitionError(f"{opened.path} has no runs below it that --best could compare.")
    return list_epochs(opened, last)


def list_epochs(directory: Directory, last: int | None = None) -> CommandOutput:
    """List the recorded epochs, or only the newest `last`."""
    from jobrunner.story import summarize_run

    snapshot = directory.snapshot()
    listed = snapshot.epochs
    if last is not None:
        listed = listed[-last:]
    data = _gather_epochs(directory, snapshot, listed)
    lines = draw_table(EPOCH_COLUMNS, [_without_nodes(row) for row in data["epochs"]])
    if len(listed) < len(snapshot.epochs):
        lines.append(f"The newest {len(listed)} of {len(snapshot.epochs)} epochs.")
    lines += _tell_faults(data)
    if not data["epochs"]:
        lines.append(f"No epoch is recorded in {directory.path}.")
        return CommandOutput(data, lines)
    return CommandOutput(data, [*lines, *_tell_state(data, summarize_run(directory, "."))])


def _gather_epochs(
    directory: Directory, snapshot: State, listed: Sequence[Position]
) -> dict[str, Any]:
    """What ``--json`` has of these epochs, with what is damaged and what they take on the disk."""
    rows: list[dict[str, Any]] = []
    stores: list[str] = []
    histories: set[str] = set()
    damaged: dict[str, str] = {}
    parameters_of = cache(partial(_parameters_of, directory))
    for at, record in directory.records(listed, snapshot):
        if isinstance(record, CheckpointCorruptError):
            damaged[str(at)] = str(record)
            continue
        row = _describe_epoch(record, parameters_of(record.run_number))
        rows.append({**row, "pins": snapshot.pins.get(at, ())})
        stores += [store.name for store in record.stores.values()]
        if record.histories:
            histories.add(f"{HISTORIES}/{record.histories}")
    disk_nbytes = None
    if len(stores) <= _MOST_MEASURED:
        space = measure(directory, [*stores, *histories])
        disk_nbytes = space and space.used
    return {
        "path": directory.path,
        "is_done": snapshot.is_done,
        "epochs": rows,
        "damaged": damaged,
        "unclaimed": [at.public for at in directory.unclaimed()],
        "disk_nbytes": disk_nbytes,
        "runs": [],  # below it
    }


def _tell_faults(data: Mapping[str, Any]) -> list[str]:
    lines = [f"Epoch {epoch} is damaged: {reason}" for epoch, reason in data["damaged"].items()]
    if data["unclaimed"]:
        lines.append(
            f"The log does not mention stores of epochs {format_ranges(data['unclaimed'])}. "
            f"`jobrunner fsck {data['path']}` explains them."
        )
    return lines


def _tell_state(data: Mapping[str, Any], run: RunSummary) -> list[str]:
    from jobrunner.story import OUTCOMES

    lines = []
    parameters = data["epochs"][-1]["parameters"]
    if parameters:
        lines.append(f"Parameters: {name_parameters(parameters)}")
    if data["disk_nbytes"] is None:
        lines.append("Sizes are logical: what epochs share counts in each of them.")
    else:
        size = format_bytes(data["disk_nbytes"])
        lines.append(f"These epochs take {size} on the disk; what they share is counted once.")
    if data["is_done"]:
        lines.append("The job has finished.")
    else:
        lines.append("The job has not finished.")
    if run.state in OUTCOMES and run.state != "finished":
        lines.append(f"The last run {OUTCOMES[run.state]}.")
    return lines


def list_runs(
    directory: Directory, search: RunSearch, best: KeepBest | None, last: int | None
) -> CommandOutput:
    """List the runs that were found below a directory, or those `last` that come first."""
    from jobrunner.story import best_of, open_run, summarize_run

    path = directory.path
    rows = []
    for name in search.names:
        opened = open_run(directory.files, path, name)
        row = describe_run(summarize_run(opened, name))
        row["best"] = row["best_epoch"] = None
        if best is not None and "error" not in row:
            row["best"], row["best_epoch"] = best_of(opened, best) or (None, None)
        rows.append(row)
    rows.sort(key=lambda row: row["last_seen"] or "", reverse=True)
    if best is not None:
        ranked = [row for row in rows if row["best"] is not None]
        unranked = [row for row in rows if row["best"] is None]
        ranked.sort(key=itemgetter("best"), reverse=best.mode == "max")
        rows = [*ranked, *unranked]
    rows = rows[:last]
    lines = draw_runs(rows)
    if len(rows) < len(search.names):
        lines.append(f"{len(rows)} of {counted(len(search.names), 'run')} are shown.")
    if not search.is_whole:
        lines.append(f"{path} has too many directories: some were not looked into.")
    if search.unreadable:
        names = listed(search.unreadable, _MOST_UNREADABLE)
        lines.append(f"Not looked into, because this user may not read them: {names}.")
    lines += [f"{row['name']} is damaged: {row['error']}" for row in rows if "error" in row]
    if rows:
        first = os.path.join(path, rows[0]["name"])
        lines.append(f"To list the epochs of one: jobrunner ls {first}")
    else:
        lines.append(f"No run was found below {path}.")
    data = {
        "path": path,
        "is_done": False,
        "epochs": [],
        "damaged": {},
        "unclaimed": [],  # as of one run
        "runs": rows,
        "is_whole": search.is_whole,
        "unreadable": search.unreadable,
    }
    return CommandOutput(data, lines)


def describe_run(run: RunSummary) -> dict[str, Any]:
    """A run, for ``--json``."""
    row: dict[str, Any] = to_json(run)
    del row["num_epochs"], row["error"]
    row["epochs"] = run.num_epochs
    row["is_done"] = run.state == "finished"
    row["saved"], row["last_seen"] = _to_iso(run.saved), _to_iso(run.last_seen)
    if run.error:
        row |= {"epochs": None, "is_done": None, "error": run.error}
    return row


def _to_iso(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (ValueError, OverflowError):  # a stranger's
        return None
    return moment.isoformat(timespec="milliseconds")


def draw_runs(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of runs, with the parameters in which they differ."""
    values: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row["parameters"].items():
            values.setdefault(name, set()).add(show(value))
    shown = []
    for row in rows:
        differing = {}
        for name, value in row["parameters"].items():
            if len(values[name]) > 1 or len(rows) == 1:
                differing[name] = value
        shown.append({**_without_nodes(row), "parameters": differing})
    return draw_table(RUN_COLUMNS, shown)


def _without_nodes(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without the metrics of single nodes."""
    return {**row, "metrics": whole_metrics(row["metrics"], row["nodes"])}


@main.command("top")
@click.argument("root", metavar="[ROOT]", default=".", type=PATH)
def top_command(*, root: str) -> CommandOutput:
    """Follow the runs below ROOT that are alive, until Ctrl-C.

    A run is alive while its heartbeat changes. They are shown once if stdout is no terminal. ROOT is a
    directory, the current one by default, or a URL.

    For example:
        jobrunner top runs
    """
    from jobrunner.story import LiveRuns

    directory = open_directory(root)
    runs = LiveRuns(directory.files, directory.path)

    def look() -> CommandOutput:
        now = time.time()
        rows = []
        for run in runs.look():
            times = {"eta_seconds": run.eta_seconds, "beat_seconds": now - (run.last_seen or now)}
            rows.append({**describe_run(run), **times})
        lines = draw_runs(rows) or [f"No run is alive below {directory.path}."]
        return CommandOutput({"path": directory.path, "runs": rows}, lines)

    output = look()
    with contextlib.suppress(KeyboardInterrupt):
        while sys.stdout.isatty():
            click.clear()
            click.echo(output.text)
            time.sleep(_LOOK_SECONDS)
            output = look()
    click.clear()  # does nothing where it is no terminal
    return output


@main.command("info")
@directory_argument
@epoch_argument
def info_command(*, directory: str, epoch: NamedEpoch) -> CommandOutput:
    """Show an epoch and the blobs of its nodes.

    EPOCH is a number, a position such as 4.s200, 'latest', or 'best:METRIC' for the lowest value of a
    metric, 'best:METRIC:max' for the highest.

    For example:
        jobrunner info runs/kmeans latest
        jobrunner info runs/kmeans 4.s200
    """
    opened = open_directory(directory)
    return describe_checkpoint(opened, resolve(epoch, opened))


def describe_checkpoint(directory: Directory, epoch: Position) -> CommandOutput:
    """Describe an epoch: its record, and the blobs of each node."""
    from jobrunner.checkpoint import open_record

    with directory.reading(epoch):
        record = directory.record(epoch)
        checkpoint = open_record(directory, record)
        checkpoint.read_ahead(checkpoint.nodes)
        nodes: dict[str, dict[str, Any]] = {}
        for node, blobs in checkpoint.items():
            store = record.stores[node]
            nodes[node] = {
                "store": store.name,
                "nbytes": store.nbytes,
                "blobs": {name: _describe_blob(blobs, name) for name in blobs},
            }
    row = _describe_epoch(record, _parameters_of(directory, record.run_number))
    data = {"path": directory.path, **row, "run": record.run, "nodes": nodes}
    size, duration = format_bytes(record.nbytes), format_seconds(record.seconds)
    lines = [
        f"{record.name} of {directory.path}",
        f"saved {format_time(record.time)}, {size} in {duration}",
    ]
    for name in ("parameters", "metrics", "metadata"):
        if row[name]:
            lines.append(f"{name} {name_parameters(row[name])}")
    if row["stopped_by"]:
        lines.append(f"stopped by {', '.join(row['stopped_by'])}")
    for node, content in nodes.items():
        lines += ["", f"{node}  ({content['store']}, {format_bytes(content['nbytes'])})"]
        blobs_shown = [{"name": name, **blob} for name, blob in content["blobs"].items()]
        lines += draw_table(BLOB_COLUMNS, blobs_shown)
    return CommandOutput(data, lines)


def _describe_epoch(record: EpochRecord, parameters: Mapping[str, Any]) -> dict[str, Any]:
    details = record.details
    return {
        **describe_position(record.at, details.steps_per_epoch),
        "time": record.time,
        "nodes": list(record.stores),
        "nbytes": record.nbytes,
        "seconds": record.seconds,
        "metrics": details.metrics,
        "metadata": details.metadata,
        "stopped_by": details.stopped_by,
        "parameters": parameters,
    }


def _parameters_of(directory: Directory, run_number: int | None) -> Mapping[str, Any]:
    """What the function that made the job of a run was called with."""
    parameters: Mapping[str, Any] = (directory.plan_of(run_number) or {}).get("parameters", {})
    return parameters


def _describe_blob(node: NodeCheckpoint, name: str) -> dict[str, Any]:
    from jobrunner.checkpoint import ArrayOutline, Unmade

    try:
        outline = node.outline(name)
    except DefinitionError as error:  # saved by a later version
        return {"type": "unreadable", "value": str(error)}
    if isinstance(outline, ArrayOutline):
        array = {"type": "array", "shape": list(outline.shape), "dtype": outline.dtype}
        if not outline.shape:
            array["value"] = show(node.load(name).item())
        return array
    if isinstance(outline, Unmade):
        return {"type": outline.kind, "value": show(outline.parts)}
    return {"type": type(outline).__name__, "value": show(outline)}


@main.command("compare")
@click.argument("a", metavar="A", type=PATH)
@click.argument("b", metavar="B", type=PATH)
def compare_command(*, a: str, b: str) -> CommandOutput:
    """Tell where two runs part.

    A and B are checkpoint directories. It shows how their jobs and metrics differ, and the first
    epoch whose blobs differ. Epochs that only one of them has are not compared.

    For example:
        jobrunner compare runs/seed-0 runs/seed-1
    """
    return compare(open_directory(a), open_directory(b))


def compare(first: Directory, second: Directory) -> CommandOutput:
    """Say how two runs differ; see `compare_runs`."""
    from jobrunner.run import compare_runs

    data, difference = compare_runs(first, second)
    count, epoch = data["num_compared"], data["differ_at"]
    lines = [f"A: {first.path}", f"B: {second.path}"]
    if data["changes"] is None:
        lines.append("What their jobs were is not recorded.")
    else:
        lines += [f"From A to B, {change}" for change in data["changes"]]
    row = data["metrics"]
    if row is not None:
        a, b = row["a"], row["b"]
        lines.append(f"The metrics first differ at epoch {row['epoch']}:")
        lines += draw_table(METRIC_COLUMNS, _differing_metrics(a, b))
    if epoch is not None:
        lines.append(f"The first blobs that differ are those of epoch {epoch}:")
        *differences, summary = difference.splitlines()
        lines += [*differences[:_MOST_DIFFERENCES], summary]
        lines.append(f"All of them: jobrunner diff {first.path}@{epoch} {second.path}@{epoch}")
    elif count:
        lines.append(f"The blobs of {counted(count, 'common epoch')} are equal.")
    else:
        lines.append("No epoch is recorded in both now, so no blobs are compared.")
    is_equal = bool(count) and epoch is None
    data = {"a": first.path, "b": second.path, "is_equal": is_equal, **data}
    exit_code = 0 if is_equal else DIFFERENT
    return CommandOutput(data, lines, exit_code)


def _differing_metrics(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The metrics that differ; those of single nodes only where the metric of all does not."""
    rows: dict[str, dict[str, Any]] = {}
    for name in {**a, **b}:
        row = {"name": name, "a": a.get(name), "b": b.get(name)}
        is_equal = show(row["a"]) == show(row["b"])  # NaN is, too
        if not is_equal and name.partition("/")[2] not in rows:
            rows[name] = row
    return list(rows.values())


@main.command("report")
@directory_argument
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    default="report.html",
    show_default=True,
    type=PATH,
    help="The file to write, outside of checkpoint directories; it is replaced.",
)
def report_command(*, directory: str, output: str) -> CommandOutput:
    """Write what the runs of DIR did as one HTML page.

    It shows how to resume, where time went, metrics, checkpoints, losses and runs. It is
    made from the records alone, so also during a run and after a crash. The page needs no network.

    For example:
        jobrunner report runs/kmeans -o report.html
    """
    from jobrunner.story import write_report

    check_output(output)
    story = _read(directory)
    path = os.path.abspath(output)
    try:
        write_report(story, path)
    except OSError as error:
        raise DefinitionError(
            f"Cannot write {path}: {error.strerror}. Name a file that this user may write, on a disk "
            f"that has room."
        ) from error
    ledger = _describe_ledger(story.ledger)
    return CommandOutput({"path": story.path, "report": path, "ledger": ledger}, [f"Wrote {path}"])


@main.command("stats")
@directory_argument
def stats_command(*, directory: str) -> CommandOutput:
    """Show where the time of the runs of DIR went.

    GOODPUT is the share of COMPUTE: time in epochs that did not have to run again.

    For example:
        jobrunner stats runs/kmeans
    """
    story = _read(directory)
    runs: list[dict[str, Any]] = []
    for run in story.runs:
        runs.append(
            {
                "number": run.number,
                "name": run.name,
                "job": run.job,
                "state": run.state,
                "began": run.began,
                "last_seen": run.last_seen,
                "resumed_from": run.resumed_from,
                "losses": len(run.losses),
                "ledger": _describe_ledger(run.ledger),
            }
        )
    ledger = _describe_ledger(story.ledger)
    rows = [{**run, **run["ledger"]} for run in runs]
    lines = draw_table(STATS_COLUMNS, [*rows, {"number": "all", **ledger}])
    gap = story.gap_seconds
    return CommandOutput(
        {"path": story.path, "ledger": ledger, "gap_seconds": gap, "runs": runs}, lines
    )


def _read(directory: str) -> Story:
    """What the runs of a directory did; an error if there is none."""
    from jobrunner.story import read_story

    opened = open_directory(directory)
    story = read_story(opened)
    if not story.runs:
        raise nothing_recorded(opened, "No run has begun")
    return story


def _describe_ledger(ledger: Ledger) -> dict[str, float]:
    return {"wall": ledger.wall, **asdict(ledger), "goodput": ledger.goodput}
