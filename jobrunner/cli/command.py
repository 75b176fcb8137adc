"""``jobrunner``: the group that all commands join, and what prints their output or error.

Commands import heavy modules when they run, so that help is quick.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

import click

from jobrunner import errors
from jobrunner._version import __version__
from jobrunner.cli.parameter_types import has_credentials
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
}
DIFFERENT = 11
SAVES_FAILED = 12
INTERRUPTED = 130
TERMINATED = 143

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
   75  stopped by SIGTERM; run the same command again to resume
  130  interrupted (143: terminated before the run began)
"""

AS_JSON = "jobrunner.json"
"""Where a command finds whether stdout is for JSON, one object or lines."""
_AS_LINES = "jobrunner.lines"
STDOUT = "jobrunner.stdout"
"""Where a command with JSON on stdout finds it: what it prints as usual goes to stderr."""
WORDS = "jobrunner.words"
"""Where a command finds its arguments and options as they were written, by name; only those given."""


@dataclass(frozen=True)
class Output:
    """What a command prints: `data` with ``--json``, else `lines`.

    Each of the `lines` is printed as one line. Line breaks and control characters in it, which come
    from a stranger's directory, are shown escaped.
    """

    data: Mapping[str, Any]
    lines: Sequence[str]
    exit_code: int = 0
    is_error: bool = False

    @property
    def text(self) -> str:
        """What is printed without ``--json``."""
        return "\n".join(printable(line, kept="\t") for line in self.lines)


class Command(click.Command):
    """A command with ``--json``: prints the `Output` that its function returns, or its error.

    Its help shows the `examples`, which are command lines.
    """

    def __init__(self, name: str, examples: Sequence[str] = (), **attributes: Any) -> None:
        lines = ["\b\nExamples:"]
        lines += [f"    {example}" for example in examples]
        lines += ["\n`jobrunner --help` lists the exit codes."]
        super().__init__(name, epilog="\n".join(lines), **attributes)
        self.examples = examples
        help = "Print one JSON object on stdout."
        self.params.append(click.Option(["--json", "as_json"], is_flag=True, help=help))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; notes them as they were written."""
        words, _, _ = self.make_parser(ctx).parse_args(list(args))
        ctx.meta[WORDS] = words
        if not ctx.resilient_parsing:
            self._refuse_credentials(ctx, words)
        return super().parse_args(ctx, args)

    def _refuse_credentials(self, ctx: click.Context, words: Mapping[str, Any]) -> None:
        """Raise UsageError if a name of a directory, a file or an epoch is a URL with credentials.

        Nothing has read it yet, so no error repeats it.
        """
        for param in self.params:
            values = words.get(param.name or "", ())
            for value in values if isinstance(values, list | tuple) else (values,):
                if has_credentials(param, value):
                    raise click.UsageError(
                        f"{param.human_readable_name} is a URL that may contain credentials, so it "
                        f"is not repeated here. Pass credentials in the environment.",
                        ctx,
                    )

    def invoke(self, ctx: click.Context) -> NoReturn:
        """Run the command and exit."""
        as_json = ctx.params.pop("as_json")
        as_lines = ctx.params.get("log_format") == "json"
        if as_json and as_lines:
            raise click.UsageError("Give either --json or --log-format json.", ctx)
        is_text = not (as_json or as_lines)
        with contextlib.nullcontext() if is_text else _stdout_to_stderr() as ctx.meta[STDOUT]:
            output = self._attempt(ctx)
        if not is_text:
            _print(_dump(output, as_lines))
        if output.is_error or is_text:
            _print(output.text, err=output.is_error)
        sys.exit(output.exit_code)

    def _attempt(self, ctx: click.Context) -> Output:
        try:
            output: Output = super().invoke(ctx)
            return output
        except (errors.JobRunnerError, OSError) as error:
            return _describe_error(error)
        except KeyboardInterrupt as interrupt:
            return _describe_interrupt(interrupt)


class Commands(click.Group):
    """A group that reports wrong usage as JSON with ``--json`` and ``--log-format json``."""

    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Look for ``--json`` first: wrong usage may stop click before it reads the option."""
        words = " ".join(args).replace("=", " ")
        ctx.meta[_AS_LINES] = "--log-format json" in words
        ctx.meta[AS_JSON] = "--json" in args or ctx.meta[_AS_LINES]
        with _wrong_usage(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; click itself prints wrong usage on stderr."""
        with _wrong_usage(ctx):
            return super().invoke(ctx)


@contextlib.contextmanager
def _wrong_usage(ctx: click.Context) -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        if not isinstance(error, click.exceptions.NoArgsIsHelpError):  # whose message is the help
            error.message = printable(error.message, kept="")  # type: ignore[misc]  # click reads it
        if ctx.meta[AS_JSON]:
            failure = _failure("UsageError", error.format_message(), "", error.exit_code)
            _print(_dump(failure, ctx.meta[_AS_LINES]))
        raise


@click.group(
    "jobrunner",
    cls=Commands,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="jobrunner")
def main() -> None:
    """Run stateful jobs on Dask, epoch by epoch, and resume them."""


def exit_code_of(error: BaseException | None) -> int:
    """The exit code for an error; 0 for None."""
    if error is None:
        return 0
    if isinstance(error, errors.RunStoppedError) and error.reason == "SIGINT":
        return INTERRUPTED
    for kind in type(error).__mro__:
        if kind in EXIT_CODES:
            return EXIT_CODES[kind]
    return 1


def _describe_error(error: errors.JobRunnerError | OSError) -> Output:
    # A run that stopped as requested has not failed.
    text = str(error) if isinstance(error, errors.RunStoppedError) else f"Error: {error}"
    notes = [shorten(note.rstrip()) for note in getattr(error, "__notes__", ())]
    details = {}
    for name, value in vars(error).items():
        if not name.startswith("_") and isinstance(value, str | int | list | tuple):
            details[name] = value
    if notes:
        details["notes"] = notes
    text = "\n\n".join([text, *notes])
    return _failure(type(error).__name__, str(error), text, exit_code_of(error), details)


def _describe_interrupt(interrupt: KeyboardInterrupt) -> Output:
    message = str(interrupt) or "Nothing was left incomplete."
    kind, exit_code = "Interrupted", INTERRUPTED
    if isinstance(interrupt, TerminatedError):
        kind, exit_code = "Terminated", TERMINATED
    return _failure(kind, message, f"{kind}. {message}", exit_code)


def _failure(
    kind: str, message: str, text: str, exit_code: int, details: Mapping[str, Any] | None = None
) -> Output:
    error = {"type": kind, "message": message, **(details or {})}
    data = {"error": error, "exit_code": exit_code}
    # Messages of errors have lines of their own, and escape themselves what is a stranger's.
    return Output(data, text.split("\n"), exit_code, is_error=True)


def _dump(output: Output, as_lines: bool) -> str:
    if not as_lines:
        return json.dumps(to_json(output.data), indent=2, allow_nan=False)
    event = {"event": "end", "exit_code": output.exit_code, **output.data}
    return json.dumps(to_json(event), allow_nan=False)


def _print(text: str, *, err: bool = False) -> None:
    try:
        click.echo(text, err=err)
    except BrokenPipeError:  # the reader, for example `head`, has ended
        # Otherwise, Python flushes again at exit and reports the error.
        stream = sys.stderr if err else sys.stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[TextIO]:
    """Send all output to stderr, including that of worker processes and C libraries.

    Yields what was stdout.
    """
    stdout = sys.stdout
    try:
        is_descriptor_1 = stdout.fileno() == 1
    except (AttributeError, OSError):  # replaced by an object that is not a file
        is_descriptor_1 = False
    with contextlib.redirect_stdout(sys.stderr):
        if not is_descriptor_1:
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
