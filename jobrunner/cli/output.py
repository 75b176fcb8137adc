"""What every command answers with, and how that is printed.

Every command returns an `Answer`; one decorator prints it, as text or as one JSON object, and turns
errors into messages and exit codes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import click

from jobrunner import errors
from jobrunner.signals import TerminatedError

EXIT_CODES: Mapping[type[BaseException], int] = {
    # The most derived class that an error is an instance of decides; see `exit_code_of`.
    errors.DefinitionError: 2,
    errors.ExecutionError: 3,
    errors.NodeLostError: 4,
    errors.SchedulerLostError: 5,
    errors.RunStoppedError: 75,
    errors.PlacementError: 5,
    errors.CheckpointNotFoundError: 6,
    errors.CheckpointCorruptError: 7,
    errors.CheckpointError: 8,
    errors.CheckpointWriteError: 8,
    errors.CommitConflictError: 9,
    errors.PlanMismatchError: 10,
    OSError: 8,
}
DIFFERENT = 11
SAVES_FAILED = 12
INTERRUPTED, TERMINATED = 130, 143

EPILOG = """\b
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
   11  two checkpoints differ, or an epoch that was run again
   12  the job has ended, and not all of its epochs could be saved
   75  told to stop by SIGTERM; run the same command again to go on
  130  interrupted (143: terminated before the run began)
"""


@dataclass(frozen=True)
class Answer:
    """What a command found out: for programs, and for people."""

    data: Mapping[str, Any]
    text: str
    exit_code: int = 0
    is_error: bool = False


_AS_JSON = "jobrunner.json"


class Commands(click.Group):
    """Commands that tell wrong usage as JSON, too, where they are asked for JSON."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take note of ``--json``, which an error may keep from being read later."""
        ctx.meta[_AS_JSON] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; click writes the usage and the message to stderr."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            if ctx.meta[_AS_JSON]:
                told = _failure("UsageError", error.format_message(), "", error.exit_code, {})
                _print(json.dumps(told.data, indent=2))
            raise


def answers(command: Callable[..., Answer]) -> Callable[..., None]:
    """Print what `command` returns or raises, and exit with the code for it."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
    @functools.wraps(command)
    def call(*, as_json: bool, **arguments: Any) -> None:
        with _stdout_to_stderr() if as_json else contextlib.nullcontext():
            answer = _attempt(command, arguments)
        if as_json:
            _print(json.dumps(_plain(answer.data), indent=2, allow_nan=False))
        if answer.is_error or not as_json:
            _print(answer.text, err=answer.is_error)
        sys.exit(answer.exit_code)

    return call


def _print(text: str, *, err: bool = False) -> None:
    try:
        click.echo(text, err=err)
    except BrokenPipeError:  # whoever read it, as `head` does, has read enough
        # Or Python would try once more at its end, and complain.
        stream = sys.stderr if err else sys.stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _attempt(command: Callable[..., Answer], arguments: Mapping[str, Any]) -> Answer:
    try:
        return command(**arguments)
    except (errors.JobRunnerError, OSError) as error:
        # That it does what it was told is no error.
        text = str(error) if isinstance(error, errors.RunStoppedError) else f"Error: {error}"
        trace = getattr(error, "remote_traceback", "")
        if trace and trace not in text:
            text = f"{text}\n\n{trace.rstrip()}"
        details = {
            name: value
            for name, value in vars(error).items()
            if not name.startswith("_") and isinstance(value, str | int | list | tuple)
        }
        return _failure(type(error).__name__, str(error), text, exit_code_of(error), details)
    except KeyboardInterrupt as interrupt:
        is_terminated = isinstance(interrupt, TerminatedError)
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


def exit_code_of(error: BaseException) -> int:
    """The exit code for an error: that of the most derived class that has one."""
    if isinstance(error, errors.RunStoppedError) and error.reason == "SIGINT":
        return INTERRUPTED
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
