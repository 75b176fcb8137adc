"""7 show: the command line, ``jobrunner`` and ``dask jobrunner``.

Every command returns an `Answer`; one decorator prints it, as text or as one JSON object, and turns
errors into messages and exit codes. Heavy imports wait until a command needs them, so that
``--help`` is quick.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from jobrunner import errors
from jobrunner._version import __version__

if TYPE_CHECKING:
    from types import FrameType

    from jobrunner.checkpoint import MultiNodeCheckpointManager
    from jobrunner.result import RunResult
    from jobrunner.runner import JobRunner, ResumeFrom
    from jobrunner.session import Session

EXIT_CODES: Mapping[type[BaseException], int] = {
    # The most derived class that an error is an instance of decides; see `_exit_code`.
    errors.DefinitionError: 2,
    errors.ExecutionError: 3,
    errors.NodeLostError: 4,
    errors.PlacementError: 5,
    errors.CheckpointNotFoundError: 6,
    errors.CheckpointCorruptError: 7,
    errors.CheckpointError: 8,
    errors.CheckpointWriteError: 8,
    errors.CommitConflictError: 9,
    errors.PlanMismatchError: 10,
    OSError: 8,
}
INTERRUPTED, TERMINATED = 130, 143

_EPILOG = """\b
Exit codes:
    0  done
    1  a bug in jobrunner; please report it with its traceback
    2  wrong usage, or a job that cannot be what it says
    3  a task raised, or a blob is missing
    4  a worker was lost
    5  no workers to run on, or no scheduler
    6  no such checkpoint
    7  a checkpoint is damaged
    8  a checkpoint cannot be read or written
    9  another run holds the checkpoint directory
   10  the checkpoint does not fit the job
  130  interrupted (143: terminated)
"""


@dataclass(frozen=True)
class Answer:
    """What a command found out: for programs, and for people."""

    data: Mapping[str, Any]
    text: str
    exit_code: int = 0
    is_error: bool = False


class _Terminated(KeyboardInterrupt):
    """SIGTERM: ends a run in the same orderly way as Ctrl-C."""


def _read_resume(ctx: click.Context, option: click.Parameter, text: str) -> ResumeFrom:
    if text == "latest":
        return "latest"
    if text == "none":
        return None
    if text.isdecimal():
        return int(text)
    raise click.BadParameter(
        f"{text!r} is not 'latest', 'none' or the number of an epoch.", ctx, option
    )


def _answers(command: Callable[..., Answer]) -> Callable[..., None]:
    """Print what `command` returns or raises, and exit with the code for it."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
    @functools.wraps(command)
    def call(*, as_json: bool, **arguments: Any) -> None:
        with _stdout_to_stderr() if as_json else contextlib.nullcontext():
            answer = _attempt(command, arguments)
        if as_json:
            click.echo(json.dumps(_plain(answer.data), indent=2, allow_nan=False))
        if answer.is_error or not as_json:
            click.echo(answer.text, err=answer.is_error)
        sys.exit(answer.exit_code)

    return call


def _attempt(command: Callable[..., Answer], arguments: Mapping[str, Any]) -> Answer:
    try:
        return command(**arguments)
    except (errors.JobRunnerError, OSError) as error:
        text = f"Error: {error}"
        trace = getattr(error, "remote_traceback", "")
        if trace and trace not in text:
            text = f"{text}\n\n{trace.rstrip()}"
        details = {
            name: value
            for name, value in vars(error).items()
            if not name.startswith("_") and isinstance(value, str | int | list | tuple)
        }
        return _failure(type(error).__name__, str(error), text, _exit_code(error), details)
    except KeyboardInterrupt as interrupt:
        is_terminated = isinstance(interrupt, _Terminated)
        word = "Terminated" if is_terminated else "Interrupted"
        message = str(interrupt) or "Nothing was left half done."
        text = f"{word}. {message}"
        return _failure(word, message, text, TERMINATED if is_terminated else INTERRUPTED, {})


def _plain(value: Any) -> Any:
    """Make JSON of it: NaN and infinities, which JSON lacks, become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    unpacked = value.item() if hasattr(value, "item") and getattr(value, "size", 0) == 1 else value
    return str(value) if unpacked is value else _plain(unpacked)


def _failure(
    kind: str, message: str, text: str, exit_code: int, details: Mapping[str, Any]
) -> Answer:
    error = {"type": kind, "message": message, **details}
    return Answer({"error": error, "exit_code": exit_code}, text, exit_code, is_error=True)


def _exit_code(error: BaseException) -> int:
    for kind in type(error).__mro__:
        if kind in EXIT_CODES:
            return EXIT_CODES[kind]
    return 1


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send all output to stderr, that of worker processes and of C libraries too."""
    stdout = sys.stdout
    try:
        is_descriptor_1 = stdout.fileno() == 1
    except (AttributeError, OSError):  # replaced by something that is no file
        is_descriptor_1 = False
    with contextlib.redirect_stdout(sys.stderr):
        if not is_descriptor_1:
            yield
            return
        stdout.flush()
        kept = os.dup(1)
        try:
            os.dup2(2, 1)
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 1)
            os.close(kept)


@click.group(
    "jobrunner",
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="jobrunner")
def main() -> None:
    """Run stateful jobs on Dask, epoch by epoch, and go on where they stopped."""


@main.command(epilog=_EPILOG)
@click.argument("target", metavar="FILE_OR_MODULE[:JOB]")
@click.option(
    "--checkpoint",
    required=True,
    metavar="DIR",
    help="Directory of the checkpoints; workers must see it under the same path.",
)
@click.option(
    "--resume",
    callback=_read_resume,
    metavar="latest|none|N",
    default="latest",
    show_default=True,
    help="The epoch to go on from. 'latest': the last one recorded, or start if there is none. "
    "'none': start afresh and set recorded epochs aside.",
)
@click.option(
    "--epochs", type=click.IntRange(min=1), metavar="N", help="Stop after N epochs in all."
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Worker processes to start on this machine.",
)
@click.option(
    "--threads", type=click.IntRange(min=1), metavar="N", help="Threads of each such worker."
)
@click.option(
    "--scheduler", metavar="ADDR", help="Run on the Dask cluster whose scheduler is at ADDR."
)
@click.option(
    "--dry-run", is_flag=True, help="Say what would run, from where and why; run nothing."
)
@click.option(
    "--take-over", is_flag=True, help="Take the directory over from a run that may still be alive."
)
@_answers
def run(
    *,
    target: str,
    checkpoint: str,
    resume: ResumeFrom,
    epochs: int | None,
    workers: int | None,
    threads: int | None,
    scheduler: str | None,
    dry_run: bool,
    take_over: bool,
) -> Answer:
    """Run a job, or go on with it.

    FILE_OR_MODULE is a Python file or an importable module. JOB is a variable that holds a Job or a
    function without arguments that returns one; it may be left out where the module holds one Job.
    """
    if scheduler is not None and (workers is not None or threads is not None):
        raise click.UsageError(
            "--workers and --threads start workers on this machine; the cluster at --scheduler "
            "has its own. Give either."
        )
    from jobrunner.checkpoint import MultiNodeCheckpointManager
    from jobrunner.progress import show_progress
    from jobrunner.runner import JobRunner
    from jobrunner.script import load_job

    job = load_job(target)
    manager = MultiNodeCheckpointManager(checkpoint, take_over=take_over)
    about = {"job": job.name, "checkpoint": manager.path}
    if dry_run:
        plan = JobRunner(job, manager, resume_from_epoch=resume, num_epochs=epochs).plan_resume()
        return Answer({**about, "plan": plan.to_dict()}, str(plan))

    options = {"--epochs": epochs, "--workers": workers, "--threads": threads}
    again = _command_again(target, checkpoint, {**options, "--scheduler": scheduler})
    with _terminated_as_interrupt(), show_progress(sys.stdout) as progress:
        runner = JobRunner(
            job, manager, resume_from_epoch=resume, num_epochs=epochs, callbacks=[progress]
        )
        runner.plan_resume()  # a mistake is told before a cluster starts for it
        try:
            with (
                _open_session(scheduler, workers, threads) as session,
                _usr1_saves(runner),
            ):
                result = runner.run(session)
        except KeyboardInterrupt as interrupt:
            raise type(interrupt)(_where_to_go_on(manager, again)) from interrupt
        except errors.NodeLostError as error:
            if again not in str(error):
                error.args = (f"{error}\n{_where_to_go_on(manager, again)}",)
            raise
    return Answer({**about, **result.to_dict()}, _summarize(job.name, result, manager.path))


def _open_session(scheduler: str | None, workers: int | None, threads: int | None) -> Session:
    from jobrunner.session import Session

    if scheduler is None:
        return Session.local(workers=workers, threads_per_worker=threads)
    try:
        return Session.connect(scheduler)
    except (errors.ExecutionError, ValueError) as error:
        raise errors.PlacementError(
            f"{error} The address of a scheduler looks like tcp://host:8786."
        ) from error


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread, so not ours to handle
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _usr1_saves(runner: JobRunner) -> Iterator[None]:
    """SIGUSR1 asks the run for a save."""
    try:
        before = signal.signal(signal.SIGUSR1, lambda number, frame: runner.save_now())
    except (AttributeError, ValueError):  # no such signal here, or not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _command_again(target: str, checkpoint: str, options: Mapping[str, Any]) -> str:
    words = [*click.get_current_context().command_path.split(), target, "--checkpoint", checkpoint]
    for option, value in options.items():
        if value is not None:
            words += [option, str(value)]
    return shlex.join(words)


def _where_to_go_on(manager: MultiNodeCheckpointManager, again: str) -> str:
    try:
        epoch = manager.latest()
    except (errors.JobRunnerError, OSError) as error:
        return f"What is recorded cannot be read now: {error}"
    if epoch is None:
        return f"No epoch is recorded yet. To start again: {again}"
    return f"The last recorded epoch is {epoch}. To go on from there: {again}"


def _summarize(job: str, result: RunResult, path: str) -> str:
    began = "" if result.resumed_from is None else f", resumed from {result.resumed_from}"
    lines = [
        f"{job}: done at epoch {result.epoch}{began}, stopped by {result.stopped_by}",
        f"saved {len(result.saves)} checkpoints in {path}",
    ]
    if result.restarts:
        lines.append(f"restarts after a lost worker: {result.restarts}")
    if result.failed_saves:
        last = result.failed_saves[-1]
        lines.append(
            f"warning: {len(result.failed_saves)} epochs were not saved; the last of them, "
            f"{last.epoch}: {last.error}"
        )
    return "\n".join(lines)


@main.command("ls", epilog=_EPILOG)
@click.argument("directory", metavar="DIR")
@_answers
def list_command(*, directory: str) -> Answer:
    """List the recorded epochs of DIR."""
    from jobrunner.listing import list_epochs, open_directory

    return Answer(*list_epochs(open_directory(directory)))


@main.command("info", epilog=_EPILOG)
@click.argument("directory", metavar="DIR")
@click.argument("epoch", metavar="EPOCH")
@_answers
def info_command(*, directory: str, epoch: str) -> Answer:
    """Show an epoch of DIR and the blobs of its nodes.

    EPOCH is a number, or 'latest'.
    """
    from jobrunner.listing import describe_checkpoint, open_directory, read_epoch

    manager = open_directory(directory)
    return Answer(*describe_checkpoint(manager, read_epoch(epoch, manager)))


@main.command("verify", epilog=_EPILOG)
@click.argument("directory", metavar="DIR")
@click.argument("epoch", metavar="[EPOCH]", required=False)
@_answers
def verify_command(*, directory: str, epoch: str | None) -> Answer:
    """Compare every byte of an epoch of DIR with its record.

    EPOCH is a number, or 'latest'; without it all recorded epochs are verified.
    """
    from jobrunner.listing import open_directory, read_epoch, verify_epochs

    manager = open_directory(directory)
    epochs = manager.epochs() if epoch is None else [read_epoch(epoch, manager)]
    data, text, error = verify_epochs(manager, epochs)
    return Answer(data, text, 0 if error is None else _exit_code(error))
