"""The group ``jobrunner``, what each of its commands is, and how output and errors are printed.

Commands import heavy modules when they run, so that help is quick.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

import click

from jobrunner import errors
from jobrunner._version import __version__
from jobrunner.json_output import to_json
from jobrunner.signals import TerminatedError
from jobrunner.texts import printable, shorten

EXIT_CODES: Mapping[type[BaseException], int] = {
    # The most derived class decides.
    errors.DefinitionError: 2,
    errors.EndOfData: 3,
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
    KeyboardInterrupt: 130,
    TerminatedError: 143,
}
DIFFERENT = 11
SAVES_FAILED = 12

EPILOG = """\b
Exit codes:
    0  done
    1  a bug in jobrunner; please report it with its traceback
    2  wrong usage, or an invalid job
    3  a task raised, or a blob is missing
    4  a worker was lost
    5  no suitable workers, or no scheduler
    6  no such checkpoint
    7  a checkpoint is damaged
    8  a checkpoint cannot be read or written
    9  another run uses the checkpoint directory
   10  the checkpoint does not fit the job
   11  the checkpoints differ, or the replayed epoch differs
   12  the job has ended, but some epochs could not be saved
   75  stopped by SIGTERM or --stop-before; run the same command again to resume
  130  interrupted (143: terminated before the run began)
"""

_EPILOG = "`jobrunner --help` lists the exit codes."

ARGUMENTS = "jobrunner.arguments"
"""Where a command finds its arguments as they were written."""
STDOUT = "jobrunner.stdout"
"""Where a command finds what was stdout, which belongs to JSON alone if that is asked for."""


@dataclass(frozen=True)
class CommandOutput:
    """What a command prints: `data` with ``--json``, else `lines`.

    Each of the `lines` is printed as one line. Line breaks and control characters in it, which come
    from a stranger's directory, are shown escaped.
    """

    data: Mapping[str, Any]
    lines: Sequence[str]
    exit_code: int = 0

    @property
    def text(self) -> str:
        """What is printed without ``--json``."""
        return "\n".join(printable(line, kept="\t") for line in self.lines)


class Command(click.Command):
    """A command with ``--json``: prints the `CommandOutput` that its function returns, or its error.

    The docstring of the function, which is its help, ends with examples.
    """

    def __init__(self, name: str, help: str, **attributes: Any) -> None:
        # After "\b", click leaves line breaks as they are.
        help = inspect.cleandoc(help).replace("For example:", "\b\nFor example:")
        super().__init__(name, help=help, epilog=_EPILOG, **attributes)
        json_help = "Print one JSON object on stdout."
        json_option = click.Option(["--json"], is_flag=True, expose_value=False, help=json_help)
        self.params.append(json_option)

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Read the arguments."""
        with _wrong_usage_told(args):
            ctx = super().make_context(info_name, [*args], parent, **extra)
        ctx.meta[ARGUMENTS] = args
        return ctx

    def invoke(self, ctx: click.Context) -> NoReturn:
        """Run the command, print its output or its error, and exit."""
        args = ctx.meta[ARGUMENTS]
        is_text = not _asks_for_json(args)
        is_error = False
        redirected: contextlib.AbstractContextManager[TextIO] = _stdout_to_stderr()
        if is_text:
            redirected = contextlib.nullcontext(sys.stdout)
        try:
            with _wrong_usage_told(args), redirected as ctx.meta[STDOUT]:
                output: CommandOutput = super().invoke(ctx)
        except (errors.JobRunnerError, OSError, KeyboardInterrupt) as error:
            output, is_error = _describe_error(error), True
        if not is_text:
            _print_json(output.data, output.exit_code, args)
        if is_error or is_text:
            _print(output.text, err=is_error)
        sys.exit(output.exit_code)


@click.group(
    "jobrunner",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="jobrunner")
def main() -> None:
    """Run stateful jobs on Dask, epoch by epoch, and resume them."""


main.command_class = Command


def exit_code_of(error: BaseException | None) -> int:
    """The exit code for an error; 0 for None."""
    if error is None:
        return 0
    if isinstance(error, errors.RunStoppedError) and error.reason == "SIGINT":
        return EXIT_CODES[KeyboardInterrupt]
    for kind in type(error).__mro__:
        if kind in EXIT_CODES:
            return EXIT_CODES[kind]
    return 1


def _describe_error(error: BaseException) -> CommandOutput:
    kind, message = type(error).__name__, str(error)
    text = f"Error: {message}"
    if isinstance(error, errors.RunStoppedError):  # as requested: it has not failed
        text = message
    elif isinstance(error, KeyboardInterrupt):
        kind = "Interrupted"
        if isinstance(error, TerminatedError):
            kind = "Terminated"
        message = message or "Nothing was left incomplete."
        text = f"{kind}. {message}"
    description: dict[str, Any] = {"type": kind, "message": message}
    for name, value in vars(error).items():
        if not name.startswith("_") and isinstance(value, str | int | list | tuple):
            description[name] = value
    notes = [shorten(note.rstrip()) for note in getattr(error, "__notes__", ())]
    if notes:
        description["notes"] = notes
    exit_code = exit_code_of(error)
    # Messages of errors have lines of their own, and escape themselves what is a stranger's.
    lines = "\n\n".join([text, *notes]).split("\n")
    return CommandOutput({"error": description, "exit_code": exit_code}, lines, exit_code)


@contextlib.contextmanager
def _wrong_usage_told(args: Sequence[str]) -> Iterator[None]:
    """Print wrong usage as JSON, if that is asked for; click itself prints it on stderr."""
    try:
        yield
    except click.UsageError as error:
        error.message = printable(error.message, kept="")  # type: ignore[misc]  # click reads it
        if _asks_for_json(args):
            description = {"type": "UsageError", "message": error.format_message()}
            _print_json({"error": description, "exit_code": error.exit_code}, error.exit_code, args)
        raise


def _asks_for_json(args: Sequence[str]) -> bool:
    return "--json" in args or _asks_for_lines(args)


def _asks_for_lines(args: Sequence[str]) -> bool:
    pairs = itertools.pairwise(args)
    return "--log-format=json" in args or ("--log-format", "json") in pairs


def _print_json(data: Mapping[str, Any], exit_code: int, args: Sequence[str]) -> None:
    if _asks_for_lines(args):
        line = {"event": "end", "exit_code": exit_code, **data}
        _print(json.dumps(to_json(line), allow_nan=False))
    else:
        _print(json.dumps(to_json(data), indent=2, allow_nan=False))


def _print(text: str, *, err: bool = False) -> None:
    try:
        click.echo(text, err=err)
    except BrokenPipeError:  # the reader, for example `head`, has ended
        # Otherwise, Python flushes again at exit and reports the error.
        stream = sys.stderr if err else sys.stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[TextIO]:
    """Send all output to stderr, also that of worker processes and C libraries.

    Yields what was stdout.
    """
    stdout: TextIO = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        if stdout is None or stdout is not sys.__stdout__:  # somebody has replaced it
            yield stdout
            return
        stdout.flush()
        original = os.dup(1)
        try:
            os.dup2(2, 1)
            with os.fdopen(original, "w", encoding="utf-8", closefd=False) as stream:
                yield stream
        finally:
            sys.stderr.flush()
            os.dup2(original, 1)
            os.close(original)
