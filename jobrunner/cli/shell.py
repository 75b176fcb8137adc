"""For the shell: ``completion``, ``man``, ``explain``, and ``new``, which writes a first job."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from inspect import cleandoc
from io import StringIO
from pathlib import Path

import click

from jobrunner._version import __version__
from jobrunner.cli.command import EPILOG, EXPLAINED, Command, Output, main
from jobrunner.errors import DefinitionError
from jobrunner.names import check_name
from jobrunner.outputs import refuse_within_checkpoint

_OF_ALL = "All commands take --help, and --json, which prints one JSON object on stdout."
_TEMPLATES = ("kmeans", "training", "simulation")


@main.command(
    "completion",
    examples=[
        'eval "$(jobrunner completion bash)"  # in ~/.bashrc; zsh likewise',
        "jobrunner completion fish > ~/.config/fish/completions/jobrunner.fish",
    ],
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(*, shell: str) -> Output:
    """Print a script that completes what you type in SHELL.

    It completes commands, options, files, directories and epochs. As `dask jobrunner completion SHELL`, the script completes all commands of dask.
    """
    from click.shell_completion import get_completion_class

    root = click.get_current_context().find_root()
    name = "jobrunner" if root.command is main else str(root.info_name)
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(root.command, {}, name, f"_{name.upper()}_COMPLETE").source()
    return Output({"shell": shell, "script": script}, script.strip("\n"))


@main.command(
    "man",
    examples=[
        "jobrunner man | man -l -",
        "jobrunner man > ~/.local/share/man/man1/jobrunner.1",
    ],
)
def man_command() -> Output:
    """Print the manual page, with all commands and options."""
    page = "\n".join(_write_page())
    return Output({"page": page}, page)


def _write_page() -> Iterator[str]:
    """The lines of the manual page, in the language of man."""
    yield ".nr HY 0"  # names of commands and errors stay whole
    yield f'.TH JOBRUNNER 1 "" "jobrunner {__version__}"'
    yield ".SH NAME"
    yield rf"jobrunner \- {_as_roff(str(main.help))}"
    yield ".SH SYNOPSIS"
    yield r".B jobrunner\fR COMMAND [OPTIONS] [ARGUMENTS]"
    yield ".SH DESCRIPTION"
    yield _as_roff(_OF_ALL)
    yield ".SH COMMANDS"
    for name, command in sorted(main.commands.items()):
        ctx = click.Context(command, info_name=f"jobrunner {name}")
        yield f".SS {_as_roff(' '.join([ctx.command_path, *command.collect_usage_pieces(ctx)]))}"
        for paragraph in cleandoc(str(command.help)).split("\n\n"):
            yield from (".PP", _as_roff(paragraph))
        for param in command.params:
            record = param.get_help_record(ctx)
            if isinstance(param, click.Option) and param.name != "as_json" and record is not None:
                yield from (".TP", rf"\fB{_as_roff(record[0])}\fR", _as_roff(record[1]))
        if isinstance(command, Command) and command.examples:
            yield from (".PP", "Examples:", ".EX", *map(_as_roff, command.examples), ".EE")
    yield ".SH EXIT STATUS"
    yield from (".EX", *(_as_roff(line) for line in EPILOG.splitlines()[2:]), ".EE")


def _as_roff(text: str) -> str:
    text = text.replace("\b\n", "").replace("\\", r"\e").replace("-", r"\-")
    return re.sub(r"(?m)^(?=[.'])", r"\\&", text)


@main.command("explain", examples=["jobrunner explain CheckpointCorruptError"])
@click.argument("error", metavar="ERROR", type=click.Choice([kind.__name__ for kind in EXPLAINED]))
def explain_command(*, error: str) -> Output:
    """Tell what ERROR means, what usually causes it, and what to do.

    ERROR is one of BlobNotFoundError, CheckpointCorruptError, CheckpointError,
    CheckpointNotFoundError, CheckpointWriteError, CommitConflictError, DefinitionError, EndOfData,
    ExecutionError, NodeLostError, PlacementError, PlanMismatchError, RunStoppedError,
    SchedulerLostError and TaskFailedError.
    """
    from rich.console import Console
    from rich.markdown import Markdown

    page = (Path(__file__).parent / "templates" / "errors.md").read_text()
    section = page.partition(f"\n## {error}\n")[2].partition("\n## ")[0].strip()
    section = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", section)  # links lead to other pages
    drawn = StringIO()
    Console(file=drawn, width=min(100, Console().width)).print(Markdown(section))
    lines = [line.rstrip() for line in drawn.getvalue().strip("\n").splitlines()]
    return Output({"error": error, "text": section}, "\n".join(lines))


@main.command("new", examples=["jobrunner new heat --template simulation"])
@click.argument("name", metavar="NAME")
@click.option(
    "--template",
    type=click.Choice(_TEMPLATES),
    default="kmeans",
    show_default=True,
    help="What the job does.",
)
def new_command(*, name: str, template: str) -> Output:
    """Make a directory NAME with a job that runs, and how to run it.

    Nothing is overwritten.
    """
    refuse_within_checkpoint(name)
    directory = Path(name)
    job = check_name(directory.absolute().name, "job")
    source = Path(__file__).parent / "templates"
    texts = {
        "job.py": (source / f"{template}.py.txt").read_text(),
        "README.md": (source / "README.md.txt").read_text(),
    }
    paths = [directory / file for file in texts]
    for path in paths:
        if os.path.lexists(path):
            raise DefinitionError(f"{path} exists already. Choose another name.")
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, texts.values(), strict=True):
        with path.open("x") as file:  # fails if it was made meanwhile
            file.write(text.replace("$name", job))
    where = f"cd {directory} && " if name != "." else ""
    run = f"{where}jobrunner run job.py --checkpoint runs/first --workers 2"
    wrote = " and ".join(map(str, paths))
    return Output(
        {"name": job, "paths": [*map(str, paths)]}, f"Wrote {wrote}. To run the job:\n    {run}"
    )
