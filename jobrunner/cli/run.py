"""``jobrunner run``: run a job, or resume it."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from jobrunner import errors
from jobrunner.cli.command import SAVES_FAILED, STDOUT, Output, main
from jobrunner.cli.options import (
    ChosenCluster,
    check_file,
    cluster_options,
    complete_directories,
    complete_epochs,
    complete_files,
    count_option,
    is_epoch,
    param_option,
    read_number,
    read_pairs,
)
from jobrunner.cli.saving import manager_options
from jobrunner.signals import handled, terminated_as_interrupt
from jobrunner.texts import counted, printable, show

if TYPE_CHECKING:
    from jobrunner.checkpoint import MultiNodeCheckpointManager
    from jobrunner.cli.script import Script
    from jobrunner.define import Job
    from jobrunner.run import ResumeFrom, RunResult

_NOT_REPEATED = {"resume_from_epoch", "take_over", "as_json"}


def _read_resume(ctx: click.Context, option: click.Parameter, text: str) -> ResumeFrom:
    if text == "none":
        return None
    number = read_number(text)
    if number is not None:
        return number
    if is_epoch(text):
        return text
    raise click.BadParameter(
        f"{text!r} is neither 'latest' nor 'none' nor 'best:METRIC' nor the number of an epoch, nor a "
        f"position such as 4.s200.",
        ctx,
        option,
    )


@main.command(
    "run",
    examples=[
        "jobrunner run kmeans.py --checkpoint runs/kmeans --workers 2",
        "jobrunner run kmeans.py --checkpoint runs/k8 --param k=8 --keep-last 3",
        "jobrunner run kmeans.py --checkpoint /shared/k --scheduler tcp://host:8786",
        "jobrunner run package.jobs:train --checkpoint s3://bucket/train --dry-run",
    ],
)
@click.argument("target", metavar="FILE_OR_MODULE[:JOB]", shell_complete=complete_files)
@click.option(
    "--checkpoint",
    required=True,
    shell_complete=complete_directories,
    metavar="DIR",
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
    callback=_read_resume,
    shell_complete=complete_epochs,
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
    shell_complete=complete_files,
    metavar="FILE",
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
    callback=check_file,
    shell_complete=complete_files,
    metavar="FILE",
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
    make_manager: Callable[[Script, str], MultiNodeCheckpointManager],
    migrate: str | None,
    logs: tuple[str, ...],
    callbacks: tuple[str, ...],
    report: str | None,
    parameters: Mapping[str, str],
    cluster: ChosenCluster,
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
    manager = make_manager(script, checkpoint)
    about = {"job": job.name, "checkpoint": manager.path}
    if migrate is not None:
        options["migrate"] = script.find(migrate, "--migrate")
    called = list(_make_callbacks(script, logs, callbacks))
    if dry_run:
        plan = JobRunner(job, manager, callbacks=called, **options).plan_resume()
        try:
            workers = cluster.preview(job.compile())
            places = placement_text(workers)
        except errors.PlacementError as error:
            workers, places = {}, str(error)
        known = {**about, "plan": plan.to_dict(), "workers": workers}
        return Output(known, f"{plan}\n{places}")

    again = _command_again(job)
    COMMAND.set(again)
    stdout = click.get_current_context().meta[STDOUT] or sys.stdout
    shown = show_lines(stdout) if log_format == "json" else show_on(sys.stdout)
    with terminated_as_interrupt(), shown as live:
        runner = JobRunner(job, manager, callbacks=[live.state, *called], **options)
        save_on_usr1 = handled("SIGUSR1", lambda number, frame: runner.save_now())
        result = runner.result_if_finished()  # reports mistakes before a cluster starts
        try:
            if result is None:
                live.state.begin("starts or finds its workers")
                with cluster() as session, _reported(manager, report), save_on_usr1:
                    result = runner.run(session, progress=False)
            else:
                with _reported(manager, report):
                    pass
        except KeyboardInterrupt as interrupt:
            raise type(interrupt)(_advise(manager, again)) from interrupt
        except errors.ExecutionError as error:
            # A run that was stopped says itself where the same command resumes.
            is_stopped = isinstance(error, errors.RunStoppedError)
            what = str(error) if is_stopped else error.without_advice()
            hint = "Fix the task. " if isinstance(error, errors.TaskFailedError) else ""
            then = f"    {again}" if is_stopped else f"{hint}{_advise(manager, again)}"
            error.args = (f"{what}\n{then}",)
            raise
    text = _summarize(job.name, result, manager.path)
    code = SAVES_FAILED if result.failed_saves else 0
    return Output({**about, **result.to_dict()}, text, code)


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


def _make_callbacks(script: Script, logs: Sequence[str], names: Sequence[str]) -> Iterator[object]:
    from jobrunner.callbacks import EpochLog

    options = [*(("--log", path) for path in logs), *(("--callback", name) for name in names)]
    writers: dict[str, str] = {}
    for option, text in options:
        callback = script.callback(text) if option == "--callback" else EpochLog(text)
        if isinstance(callback, EpochLog):
            path = os.path.realpath(callback.path)
            if path in writers:
                raise click.UsageError(
                    f"{option} {text}: {writers[path]} writes to the same file, {callback.path}. Give "
                    f"each log a file of its own."
                )
            writers[path] = f"{option} {text}"
        yield callback


def _command_again(job: Job) -> str:
    """The command that resumes this run, with the same options, but no secrets."""
    from jobrunner.define import HIDDEN

    ctx = click.get_current_context()
    words = ctx.command_path.split()
    for param in ctx.command.params:
        name = param.name or ""
        if name in _NOT_REPEATED or ctx.get_parameter_source(name) is ParameterSource.DEFAULT:
            continue
        value = ctx.params[name]
        if isinstance(value, Mapping):
            known = job.parameters if name == "parameters" else {}
            hidden = {key for key, recorded in known.items() if HIDDEN in show(recorded)}
            value = tuple(
                f"{key}={HIDDEN if key in hidden else text}" for key, text in value.items()
            )
        for each in value if isinstance(value, tuple) else (value,):
            words += param.opts[:1] if isinstance(param, click.Option) else []
            words += [] if each is True else [str(each)]
    return shlex.join(words)


def _advise(manager: MultiNodeCheckpointManager, again: str) -> str:

    try:
        epoch = manager.latest()
        if epoch is None:
            return f"No epoch is recorded yet. To start again: {again}"
        last = manager.record(epoch).name.removeprefix("epoch ")
    except (errors.JobRunnerError, OSError) as error:
        return f"Cannot read the recorded epochs: {error}"
    return f"The last recorded epoch is {last}. To resume from it: {again}"


def _summarize(job: str, result: RunResult, path: str) -> str:
    began = "" if result.resumed_from is None else f", resumed from epoch {result.resumed_from}"
    lines = [
        f"{job}: done at epoch {result.epoch}{began}, stopped by {result.stopped_by}",
        f"saved {counted(result.num_saves, 'checkpoint')} in {path}",
    ]
    if result.restarts:
        lines.append(f"restarted {counted(result.restarts, 'time')} after a loss")
    if result.failed_saves:
        last = result.failed_saves[-1]
        lines.append(
            f"not saved: {counted(len(result.failed_saves), 'epoch')}, most recently epoch "
            f"{last.epoch}: {last.error}"
        )
    return "\n".join(lines)
