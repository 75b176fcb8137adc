"""``completion`` for the shell, and ``new``, which writes a first job."""

from __future__ import annotations

import os
from pathlib import Path

import click

from jobrunner.cli.command import Output, main
from jobrunner.errors import DefinitionError
from jobrunner.names import check_name
from jobrunner.outputs import refuse_within_checkpoint

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
    return Output({"shell": shell, "script": script}, script.strip("\n").split("\n"))


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
    written = [str(path) for path in paths]
    lines = [f"Wrote {' and '.join(written)}. To run the job:", f"    {run}"]
    return Output({"name": job, "paths": written}, lines)
