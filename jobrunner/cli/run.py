"""``jobrunner run``: run a job, or resume it."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from jobrunner import errors
from jobrunner.cli.command import SAVES_FAILED, STDOUT, WORDS, Output, main
from jobrunner.cli.options import (
    Cluster,
    cluster_options,
    count_option,
    param_option,
    read_pairs,
)
from jobrunner.cli.parameter_types import (
    ANY_DIRECTORY,
    INPUT,
    OUTPUT,
    TARGET,
    EpochName,
    NamedEpoch,
)
from jobrunner.cli.saving import ManagerOptions, manager_options
from jobrunner.signals import handled, terminated_as_interrupt
from jobrunner.texts import counted, printable, show

if TYPE_CHECKING:
    from jobrunner.checkpoint import MultiNodeCheckpointManager
    from jobrunner.cli.script import Script
    from jobrunner.define import Job
    from jobrunner.run import RunResult

_NOT_REPEATED = {"resume_from_epoch", "take_over", "as_json"}


@main.command(
    "run",
    examples=[
        "jobrunner run kmeans.py --checkpoint runs/kmeans --workers 2",
        "jobrunner run kmeans.py --checkpoint runs/k8 --param k=8 --keep-last 3",
        "jobrunner run kmeans.py --checkpoint /shared/k --scheduler tcp://host:8786",
        "jobrunner run package.jobs:train --checkpoint s3://bucket/train --dry-run",
    ],
)
@click.argument("target", metavar="FILE_OR_MODULE[:JOB]", type=TARGET)
@click.option(
    "--checkpoint",
    required=True,
    type=ANY_DIRECTORY,
    help="The checkpoint directory, at the same path on all workers; or its URL, s3://...",
)
@click.option(
    "--on-save-error",
    type=click.Choice(["refuse", "warn", "raise"]),
    default="refuse",
    show_default=True,
    help="What to do when a save fails. 'warn': continue and try again at the next save. 'refuse': "
    "the same, but do not start if DIR is not writable. 'raise': end the run.",
)
@manager_options
@click.option(
    "--resume",
    "resume_from_epoch",
    type=EpochName("none"),
    metavar="latest|none|best:METRIC|N|N.sSTEP",
    default="latest",
    show_default=True,
    help="The epoch to resume from. 'latest': the last recorded one; if there is none, start. "
    "'best:loss': that with the lowest loss; 'best:accuracy:max': that with the highest accuracy. "
    "'none': start from the beginning and set recorded epochs aside.",
)
@click.option(
    "--rename",
    callback=read_pairs,
    multiple=True,
    metavar="OLD=NEW",
    help="A node that the checkpoint has as OLD is NEW in the job; or a blob, NODE/OLD=NODE/NEW, "
    "'*/OLD=*/NEW' on every node. May be repeated.",
)
@click.option(
    "--missing",
    type=click.Choice(["error", "init"]),
    default="error",
    show_default=True,
    help="What to do about nodes and blobs that the checkpoint lacks. 'init': run the init tasks "
    "that make them.",
)
@click.option(
    "--migrate",
    metavar="NAME",
    help="A function of FILE_OR_MODULE that makes blobs of the job from those of the checkpoint.",
)
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=INPUT,
    help="Write the metrics of each epoch to FILE.csv or FILE.jsonl. May be repeated.",
)
@click.option(
    "--callback",
    "callbacks",
    multiple=True,
    metavar="NAME",
    help="A callback of FILE_OR_MODULE, or a function or class that makes it without arguments. May be "
    "repeated.",
)
@click.option(
    "--report",
    type=OUTPUT,
    help="Write an HTML page of what the runs of DIR did at the end, also if the run fails.",
)
@count_option("--epochs", "num_epochs", help="Stop after N epochs in all, counted across resumes.")
@param_option
@cluster_options
@click.option(
    "--grace",
    "grace_seconds",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="How long after SIGTERM the run may take to end and record its epoch. [default: no limit]",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    help="What to print while the job runs. 'json': one JSON object a line, and nothing else on "
    "stdout.",
)
@click.option(
    "--dry-run", is_flag=True, help="Show what would run, from which epoch and why; run nothing."
)
def run(
    *,
    target: str,
    checkpoint: str,
    manager_options: ManagerOptions,
    resume_from_epoch: NamedEpoch,
    migrate: str | None,
    logs: Sequence[str],
    callbacks: Sequence[str],
    report: str | None,
    parameters: Mapping[str, str],
    cluster: Cluster,
    log_format: str,
    dry_run: bool,
    **options: Any,  # of `JobRunner`
) -> Output:
    """Run a job, or resume it.

    FILE_OR_MODULE is a Python file or an importable module. JOB names a variable of type Job, or a
    function that returns one. Omit JOB if there is only one such variable or function with the
    decorator @job.
    """
    from jobrunner.cli.script import Script
    from jobrunner.cluster import COMMAND
    from jobrunner.run import JobRunner
    from jobrunner.story import placement_text, show_lines, show_on, told_if_slow

    with told_if_slow(f"importing {target}"):
        script = Script(target)
        job = script.job(parameters)
    manager = manager_options.make(script, checkpoint)
    data: dict[str, Any] = {"job": job.name, "checkpoint": manager.path}
    options["resume_from_epoch"] = None if resume_from_epoch == "none" else resume_from_epoch
    if migrate is not None:
        options["migrate"] = script.find(migrate, "--migrate")
    callback_objects = _make_callbacks(script, logs, callbacks)
    if dry_run:
        plan = JobRunner(job, manager, callbacks=callback_objects, **options).plan_resume()
        try:
            workers = cluster.preview(job.compile())
            places = placement_text(workers)
        except errors.PlacementError as error:
            workers, places = {}, str(error)
        data |= {"plan": plan.to_dict(), "workers": workers}
        return Output(data, f"{plan}\n{places}".split("\n"))

    command = _command_again(job)
    COMMAND.set(command)
    stdout = click.get_current_context().meta[STDOUT] or sys.stdout
    view = show_lines(stdout) if log_format == "json" else show_on(sys.stdout)
    with terminated_as_interrupt(), view as live:
        runner = JobRunner(job, manager, callbacks=[live.state, *callback_objects], **options)
        save_on_usr1 = handled("SIGUSR1", lambda number, frame: runner.save_now())
        result = runner.result_if_finished()  # reports mistakes before a cluster starts
        try:
            if result is None:
                live.state.begin("starts or finds its workers")
                with cluster.open() as session, _reported(manager, report), save_on_usr1:
                    result = runner.run(session, progress=False)
            else:
                with _reported(manager, report):
                    pass
        except KeyboardInterrupt as interrupt:
            raise type(interrupt)(_advise(manager, command)) from interrupt
        except errors.ExecutionError as error:
            error.args = (_explain_failure(error, manager, command),)
            raise
    lines = _summarize(job.name, result, manager)
    exit_code = SAVES_FAILED if result.failed_saves else 0
    return Output({**data, **result.to_dict()}, lines, exit_code)


@contextlib.contextmanager
def _reported(manager: MultiNodeCheckpointManager, path: str | None) -> Iterator[None]:
    """Write the report when the run has ended, or failed."""
    from jobrunner.story import write_report

    try:
        yield
    finally:
        if path is not None:
            try:
                write_report(manager, path)
            except Exception as error:  # the run's own end matters more
                click.echo(printable(f"warning: no report in {path}: {error}"), err=True)


def _make_callbacks(script: Script, logs: Sequence[str], names: Sequence[str]) -> list[object]:
    """The callbacks of the job's file, and those that write logs."""
    from jobrunner.callbacks import EpochLog

    callbacks: list[tuple[str, object]] = []
    callbacks += [(f"--log {path}", EpochLog(path)) for path in logs]
    callbacks += [(f"--callback {name}", script.callback(name)) for name in names]
    writers: dict[str, str] = {}
    for option, callback in callbacks:
        if not isinstance(callback, EpochLog):
            continue
        path = os.path.realpath(callback.path)
        if path in writers:
            raise click.UsageError(
                f"{option}: {writers[path]} writes to the same file, {callback.path}. Give each log "
                f"a file of its own."
            )
        writers[path] = option
    return [callback for _, callback in callbacks]


def _command_again(job: Job) -> str:
    """The command that resumes this run, with the same options, but no secrets."""
    ctx = click.get_current_context()
    words = ctx.command_path.split()
    for param in ctx.command.params:
        if param.name in _NOT_REPEATED or param.name not in ctx.meta[WORDS]:
            continue
        values = ctx.meta[WORDS][param.name]
        for value in values if isinstance(values, list) else [values]:
            if isinstance(param, click.Option):
                words.append(param.opts[0])
            if value is not True:
                words.append(_hide(value, job) if param.name == "parameters" else str(value))
    return shlex.join(words)


def _hide(pair: str, job: Job) -> str:
    """``NAME=VALUE`` for a command, without the value if it is a secret."""
    from jobrunner.define import HIDDEN

    name, _, _ = pair.partition("=")
    return f"{name}={HIDDEN}" if HIDDEN in show(job.parameters.get(name)) else pair


def _explain_failure(
    error: errors.ExecutionError, manager: MultiNodeCheckpointManager, command: str
) -> str:
    """What has happened, and what to do."""
    if isinstance(error, errors.RunStoppedError):  # it says where the same command resumes
        return f"{error}\n    {command}"
    hint = "Fix the task. " if isinstance(error, errors.TaskFailedError) else ""
    return f"{error.without_advice()}\n{hint}{_advise(manager, command)}"


def _advise(manager: MultiNodeCheckpointManager, command: str) -> str:
    try:
        epoch = manager.latest()
        if epoch is None:
            return f"No epoch is recorded yet. To start again: {command}"
        last = manager.record(epoch).name.removeprefix("epoch ")
    except (errors.JobRunnerError, OSError) as error:
        return f"Cannot read the recorded epochs: {error}"
    return f"The last recorded epoch is {last}. To resume from it: {command}"


def _summarize(job: str, result: RunResult, manager: MultiNodeCheckpointManager) -> list[str]:
    began = "" if result.resumed_from is None else f", resumed from epoch {result.resumed_from}"
    saved = f"saved {counted(result.num_saves, 'checkpoint')} in {manager.path}"
    with contextlib.suppress(errors.JobRunnerError, OSError):
        num_kept = len(manager.positions())
        if num_kept < result.num_saves:
            saved += f", which keeps {num_kept} of all"
    lines = [f"{job}: done at epoch {result.epoch}{began}, stopped by {result.stopped_by}", saved]
    if result.restarts:
        lines.append(f"restarted {counted(result.restarts, 'time')} after a loss")
    if result.failed_saves:
        last = result.failed_saves[-1]
        lines.append(
            f"not saved: {counted(len(result.failed_saves), 'epoch')}, most recently epoch "
            f"{last.epoch}: {last.error}"
        )
    return lines
