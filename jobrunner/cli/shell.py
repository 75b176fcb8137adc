"""``completion`` for the shell, and ``new``, which writes a first job."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import get_completion_class

from jobrunner.cli.command import CommandOutput, main
from jobrunner.cli.options import PATH
from jobrunner.errors import DefinitionError
from jobrunner.names import check_name
from jobrunner.outputs import refuse_within_checkpoint


@main.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(*, shell: str) -> CommandOutput:
    """Print a script that completes what you type in a shell.

    For example:
        eval "$(jobrunner completion bash)"  # in ~/.bashrc; zsh likewise
        jobrunner completion fish > ~/.config/fish/completions/jobrunner.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(main, {}, "jobrunner", "_JOBRUNNER_COMPLETE").source()
    return CommandOutput({"shell": shell, "script": script}, script.strip("\n").split("\n"))


@main.command("new")
@click.argument("name", metavar="NAME", type=PATH)
def new_command(*, name: str) -> CommandOutput:
    """Make a directory NAME with a job that runs.

    Its file, job.py, says what to try with it.

    For example:
        jobrunner new clusters
    """
    refuse_within_checkpoint(name)
    path = Path(name) / "job.py"
    job = check_name(path.absolute().parent.name, "job")
    text = Path(__file__).with_name("template.py.txt").read_text().replace("$name", job)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:
            file.write(text)
    except FileExistsError as error:
        raise DefinitionError(f"{error.filename} exists already. Choose another name.") from None
    except OSError as error:
        raise DefinitionError(
            f"Cannot write {path}: {error.strerror}: {error.filename}. Name a directory in which "
            f"this user may make files."
        ) from error
    run = f"cd {path.parent} && jobrunner run job.py --checkpoint runs/first --workers 2"
    return CommandOutput(
        {"name": job, "paths": [str(path)]}, [f"Wrote {path}. To run it:", f"    {run}"]
    )
