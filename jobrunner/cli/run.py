"""``jobrunner run``: run a job, or resume it."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import click

from jobrunner import errors
from jobrunner.cli.command import ARGUMENTS, SAVES_FAILED, STDOUT, CommandOutput, main
from jobrunner.cli.options import (
    COUNT,
    PATH,
    Function,
    cluster_options,
    open_session,
    param_option,
    read_epoch_name,
    read_pairs,
    take_over_option,
)
from jobrunner.cli.progress import told_while_slow
from jobrunner.signals import handled, terminated_as_interrupt
from jobrunner.texts import counted, show

if TYPE_CHECKING:
    from jobrunner.checkpoint import (
        KeepAny,
        KeepBest,
        MultiNodeCheckpointManager,
        SaveEvery,
    )
    from jobrunner.define import Job
    from jobrunner.run import JobRunner, RunResult

_MANAGER_OPTIONS = ("save", "asynchronous", "allow_pickle")
_INTERVAL = re.compile(r"(?P<count>[1-9]\d{0,17})(?P<unit>steps|s|)")
_BEST = re.compile(r"(?P<metric>(.+/)?[^:]+)(:(?P<mode>min|max))?(:(?P<count>[1-9]\d{0,17}))?")


def read_save_every(text: str) -> SaveEvery:
    """Read when to save."""
    from jobrunner.checkpoint import SaveEvery

    interval = _INTERVAL.fullmatch(text)
    if interval is None:
        raise click.BadParameter(
            f"{text}: expected a number of epochs, steps or seconds, for example 5, 100steps or "
            f"600s."
        )
    unit = {"": "epochs", "steps": "steps", "s": "seconds"}[interval["unit"]]
    options: dict[str, Any] = {unit: int(interval["count"])}
    return SaveEvery(**options)


def read_keep_best(text: str) -> KeepBest:
    """Read by which metric the best epochs are kept."""
    from jobrunner.checkpoint import KeepBest

    best = _BEST.fullmatch(text)
    if best is None:
        raise click.BadParameter(
            f"{text}: expected METRIC[:min|max][:N], for example loss:min:3 or accuracy:max."
        )
    mode: Literal["min", "max"] = "min"
    if best["mode"] == "max":
        mode = "max"
    return KeepBest(best["metric"], int(best["count"] or 1), mode)


def keep_options(function: Function) -> Function:
    """Add the options of `keep_policy`."""
    for option in (
        click.option(
            "--keep-best",
            multiple=True,
            type=read_keep_best,
            metavar="METRIC[:min|max][:N]",
            help="Keep the N (1) epochs with the lowest value of a metric, or the highest.",
        ),
        click.option(
            "--keep-every", type=COUNT, metavar="N", help="Keep epochs that are multiples of N."
        ),
        click.option("--keep-last", type=COUNT, metavar="N", help="Keep the newest N epochs."),
    ):
        function = option(function)
    return function


def keep_policy(
    keep_last: int | None, keep_every: int | None, keep_best: Sequence[KeepBest]
) -> KeepAny | None:
    """The policy that keeps an epoch if one of the options does; None without options."""
    from jobrunner.checkpoint import KeepAny, KeepEvery, KeepLast

    policies: list[Any] = [*keep_best]
    if keep_last is not None:
        policies.append(KeepLast(keep_last))
    if keep_every is not None:
        policies.append(KeepEvery(keep_every))
    if not policies:
        return None
    return KeepAny(tuple(policies))


@main.command("run")
@click.argument("target", metavar="FILE_OR_MODULE[:JOB]", type=PATH)
@click.option(
    "--checkpoint",
    metavar="DIR",
    required=True,
    type=PATH,
    help="The checkpoint directory, on all workers the same path; or its URL, s3://...",
)
@param_option
@cluster_options
@click.option(
    "--epochs",
    "num_epochs",
    type=COUNT,
    metavar="N",
    help="Stop after N epochs in all, with resumes.",
)
@click.option(
    "--resume",
    "resume_from_epoch",
    metavar="EPOCH",
    default="latest",
    help="From where: 7, 4.s200, 'best:loss', 'best:accuracy:max', or 'latest', the default. "
    "'none': start afresh, and set all epochs aside.",
    type=lambda text: None if text == "none" else read_epoch_name(text),
)
@click.option(
    "--save-every",
    "save",
    type=read_save_every,
    metavar="N|Nsteps|Ns",
    help="Save every N epochs, steps or seconds. [default: 1]",
)
@keep_options
@click.option(
    "--sync",
    "asynchronous",
    flag_value=False,
    default=None,
    help="Wait for each save before the next epoch.",
)
@click.option(
    "--allow-pickle",
    is_flag=True,
    default=None,
    help="Also save and load pickles. Only if you trust everyone who can write to DIR.",
)
@click.option(
    "--manager",
    "manager_name",
    metavar="NAME",
    help="A function of the file that makes the manager, with all that Python can set. It gets "
    "DIR and the options above.",
)
@click.option(
    "--on-save-error",
    type=click.Choice(["refuse", "warn", "raise"]),
    metavar="HOW",
    default="refuse",
    show_default=True,
    help="'warn': go on, and try again. 'raise': end the run. 'refuse': go on, but do not start "
    "if DIR is not writable.",
)
@click.option(
    "--rename",
    callback=read_pairs,
    multiple=True,
    metavar="OLD=NEW",
    help="Node OLD of the checkpoint is NEW now; of blobs, NODE/OLD=NODE/NEW, or on every node "
    "'*/OLD=*/NEW'. May be repeated.",
)
@click.option(
    "--missing",
    type=click.Choice(["error", "init"]),
    default="error",
    show_default=True,
    help="'init': run the init tasks of what the checkpoint lacks.",
)
@click.option(
    "--callback",
    "callbacks",
    multiple=True,
    metavar="NAME",
    help="A callback of the file, or what makes it. May be repeated.",
)
@click.option(
    "--log",
    "logs",
    metavar="FILE",
    multiple=True,
    type=PATH,
    help="Write each epoch's metrics to FILE.csv or FILE.jsonl. May be repeated.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    help="'json': print one JSON object a line.",
)
@click.option(
    "--grace",
    "grace_seconds",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="How long after SIGTERM the epoch may take to end. [default: no limit]",
)
@click.option(
    "--stop-before",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="In a Slurm job: stop so long before its time limit, the epoch recorded.",
)
@click.option("--dry-run", is_flag=True, help="Say what would run, and why; run nothing.")
@take_over_option
def run(
    *,
    target: str,
    checkpoint: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: Sequence[KeepBest],
    manager_name: str | None,
    take_over: bool,
    logs: Sequence[str],
    callbacks: Sequence[str],
    parameters: Mapping[str, str],
    workers: int | None,
    threads: int | None,
    scheduler: str | None,
    log_format: str,
    stop_before: float | None,
    dry_run: bool,
    **options: Any,  # of `JobRunner`
) -> CommandOutput:
    """Run a job, or resume it.

    FILE_OR_MODULE is a Python file or an importable module. JOB names a Job in it, or a function
    that returns one. Omit JOB if there is only one Job, or one function with the decorator @job.

    For example:
        jobrunner run kmeans.py --checkpoint runs/kmeans --workers 2
        jobrunner run kmeans.py --checkpoint runs/k8 --param k=8 --keep-last 3
        jobrunner run kmeans.py --checkpoint /shared/k --scheduler tcp://host:8786
        jobrunner run package.jobs:train --checkpoint s3://bucket/train --dry-run
    """
    from jobrunner.callbacks import EpochLog
    from jobrunner.checkpoint import MultiNodeCheckpointManager
    from jobrunner.cli.script import Script
    from jobrunner.cluster import COMMAND
    from jobrunner.run import JobRunner
    from jobrunner.story import show_lines, show_on

    with told_while_slow(lambda: f"importing {target}"):
        script = Script(target)
        job = script.job(parameters)
    saving = {name: options.pop(name) for name in _MANAGER_OPTIONS}
    saving["keep"] = keep_policy(keep_last, keep_every, keep_best)
    saving = {name: value for name, value in saving.items() if value is not None}
    if take_over:
        saving["take_over"] = True
    if manager_name is not None:
        manager = script.manager(manager_name, checkpoint, saving)
    else:
        manager = MultiNodeCheckpointManager(checkpoint, **saving)
    callback_objects: list[object] = [EpochLog(path) for path in logs]
    callback_objects += [script.callback(name) for name in callbacks]
    if stop_before is not None:
        callback_objects.append(_StopsInTime(stop_before))
    data: dict[str, Any] = {"job": job.name, "checkpoint": manager.path}
    if dry_run:
        plan = JobRunner(job, manager, callbacks=callback_objects, **options).plan_resume()
        return CommandOutput({**data, "plan": plan.to_dict()}, str(plan).split("\n"))
    COMMAND.set(_command_again(job))
    stdout = click.get_current_context().meta[STDOUT]
    if log_format == "json":
        view = show_lines(stdout)
    else:
        view = show_on(sys.stdout)
    with terminated_as_interrupt(), view as live, _advised(manager):
        runner = JobRunner(job, manager, callbacks=[live.state, *callback_objects], **options)
        result = runner.result_if_finished()  # reports mistakes before a cluster starts
        if result is None:
            live.state.begin("starts or finds its workers")
            save_now = handled("SIGUSR1", lambda number, frame: runner.save_now())
            with open_session(workers, threads, scheduler) as session, save_now:
                result = runner.run(session, progress=False)
    exit_code = SAVES_FAILED if result.failed_saves else 0
    return CommandOutput(
        {**data, **result.to_dict()}, _summarize(job.name, result, manager), exit_code
    )


class _StopsInTime:
    """Asks a run to stop, its epoch recorded, so many seconds before its Slurm job ends."""

    is_passive = True

    def __init__(self, seconds: float) -> None:
        from jobrunner.checkpoint import SaveBefore

        deadline = SaveBefore("slurm").deadline
        assert isinstance(deadline, float)
        self._time = deadline - seconds

    def on_setup(self, runner: JobRunner) -> None:
        """Wait for that time, beside the run."""
        reason = ["the limit of the Slurm job is near"]
        timer = threading.Timer(self._time - time.time(), runner.stop, reason)
        timer.daemon = True
        timer.start()


def _command_again(job: Job) -> str:
    """The command that resumes this run, with the same options, but no secrets."""
    from jobrunner.define import HIDDEN

    ctx = click.get_current_context()
    secrets = [name for name, value in job.parameters.items() if HIDDEN in show(value)]
    words = ctx.command_path.split()
    arguments = iter(ctx.meta[ARGUMENTS])
    for word in arguments:
        if word == "--resume":
            next(arguments)
        elif word not in ("--take-over", "--json") and not word.startswith("--resume="):
            for name in secrets:
                word = re.sub(rf"^(--param=)?{name}=.*", rf"\1{name}={HIDDEN}", word, flags=re.S)
            words.append(word)
    return shlex.join(words)


@contextlib.contextmanager
def _advised(manager: MultiNodeCheckpointManager) -> Iterator[None]:
    """Add to an error of the run how to resume it."""
    from jobrunner.cluster import COMMAND

    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise type(interrupt)(_advise(manager)) from interrupt
    except errors.RunStoppedError as error:  # it says where the same command resumes
        error.args = (f"{error}\n    {COMMAND.get()}",)
        raise
    except errors.ExecutionError as error:
        error.args = (f"{error.without_advice()}\n{_advise(manager)}",)
        raise


def _advise(manager: MultiNodeCheckpointManager) -> str:
    from jobrunner.cluster import COMMAND

    try:
        epoch = manager.latest()
        if epoch is None:
            return f"No epoch is recorded yet. To start again: {COMMAND.get()}"
        last = manager.record(epoch).name.removeprefix("epoch ")
    except (errors.JobRunnerError, OSError) as error:
        return f"Cannot read the recorded epochs: {error}"
    return f"The last recorded epoch is {last}. To resume from it: {COMMAND.get()}"


def _summarize(job: str, result: RunResult, manager: MultiNodeCheckpointManager) -> list[str]:
    began = ""
    if result.resumed_from is not None:
        began = f", resumed from epoch {result.resumed_from}"
    saved = f"saved {counted(result.num_saves, 'checkpoint')} in {manager.path}"
    with contextlib.suppress(errors.JobRunnerError, OSError):
        num_kept = len(manager.positions())
        if num_kept < result.num_saves:
            saved += f", where {num_kept} are kept"
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
