"""What the pages tell a reader to type into a shell, and the blocks that are no Python."""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
import yaml
from distributed.cli import dask_scheduler, dask_worker

from jobrunner.cli import main
from tests.pages import PAGES, ROOT, Block, blocks

_BLOCKS = [block for page in PAGES for block in blocks(page)]
_SHELL = [block for block in _BLOCKS if block.language == "console"]
_EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
_DASK = {"scheduler": dask_scheduler.main, "worker": dask_worker.main}
_SHELL_WORDS = {"cd", "sleep", "kill", "chgrp", "chmod", "umask", "until", "grep", "do", "done"}
_NOT_OURS = _SHELL_WORDS | {".ci/run"}


def test_every_block_runs_or_says_why_it_does_not():
    """Python and commands run, or are checked, as they are; other blocks name what runs them."""
    for block in _BLOCKS:
        assert block.language, f"{block}: say in which language this is"
        if block.language[0] == "{" or block.language in ("python", "console", "text"):
            continue
        kind, _, value = block.comment.partition(": ")
        assert kind in ("test", "needs", "not run"), (
            f"{block}: put <!-- test: FILE::NAME --> or <!-- not run: REASON --> above it"
        )
        if kind == "test":
            path, _, name = value.partition("::")
            assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{block}: {value}"
        if kind == "needs":
            assert block.page.name == "callbacks.md"  # tests/callbacks/test_trackers.py runs these


@pytest.mark.parametrize("block", [it for it in _BLOCKS if it.language == "py"], ids=str)
def test_python_that_needs_more_is_python_and_imports_what_exists(block):
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jobrunner"):
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, name.name) for name in node.names)


def _calls(command):
    """The words of each call in a command line, without what comes before a call."""
    words = shlex.shlex(command, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    call = []
    for word in [*words, ";"]:
        if set(word) <= set("&|;"):
            yield call
            call = []
        elif call or not re.match(r"\w+=", word):
            call.append(word)


@pytest.mark.parametrize("block", _SHELL, ids=str)
def test_every_command_is_understood(block):
    for command in block.commands:
        for call in filter(None, _calls(command)):
            name, *words = call[0].removeprefix(".venv/bin/"), *call[1:]
            if name == "jobrunner":
                if words[0] != "--version":
                    main.commands[words[0]].make_context(words[0], words[1:])
            elif name == "dask":
                if words[0] != "cuda":  # of dask-cuda, which needs a GPU
                    _DASK[words[0]].make_context(words[0], words[1:])
            elif name == "pip":
                extras = re.findall(r"\[(\w+)\]", command)
                assert words[0] == "install"
                assert set(extras) <= set(_EXTRAS)
            elif name == "export":
                keys = yaml.safe_load((ROOT / "jobrunner" / "jobrunner.yaml").read_text())
                for part in re.findall(r"DASK_(\w+)=", command)[:1]:
                    for key in part.lower().split("__"):
                        keys = keys[key.replace("_", "-")]
            elif name == "sphinx-build":
                assert (ROOT / words[-2] / "conf.py").exists()
            elif name.startswith("python"):
                if words[:1] == ["-c"]:
                    compile(words[1], str(block), "exec")
                elif words[0] == "-m":
                    assert words[1] in ("pytest", "venv")
                else:
                    text = (ROOT / words[0]).read_text() + (
                        ROOT / "benchmarks/harness.py"
                    ).read_text()
                    assert all(f'"{word}"' in text for word in words if word.startswith("--"))
            else:
                assert name in _NOT_OURS, f"{block}: nothing checks {command!r}"


_PAGES = {ROOT / "README.md", *(block.page for block in _BLOCKS if block.file)} & {
    block.page for block in _SHELL
}
_JOB = """\
from jobrunner import Job, Task, current_task, epoch_limiter


def add(n):
    current_task().report(loss=1 / (n + 1))
    return n + 1


with Job("train") as job:
    with job.init_group:
        Task(int, outputs="n", node="a")
    Task(add, outputs="n", node="a")
epoch_limiter(job, 4)
"""


_SAID = {
    "README.md": [r"^heat: done at epoch 1000, resumed from epoch \d+"],
    "extending.md": [r"^\d+ passed"],
    "tutorial.md": [r"^from epoch \d+: it is the last epoch", r"^4 blobs are equal, 0 differ.$"],
}
"""Among what the commands of a page say."""


def _await_epochs(command):
    """The command with a wait for some epochs in the place of some seconds."""
    found = re.search(r"--checkpoint (\S+) .* sleep \d+; kill", command)
    if not found:
        return command
    wait = f"until [ $(ls {found[1]} 2>&1 | wc -l) -gt 20 ]; do sleep 0.1; done"
    return re.sub(r"sleep \d+", wait, command)


@pytest.mark.nightly
@pytest.mark.parametrize("page", sorted(_PAGES), ids=lambda it: it.name)
def test_the_commands_of_a_page_run_on_its_files(page, tmp_path):
    """As a reader types them, with a file that the page leaves to the reader."""
    (tmp_path / "train.py").write_text(_JOB)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    bin_directory = os.path.dirname(sys.executable)
    environment = {
        **os.environ,
        "PATH": f"{bin_directory}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    said = ""
    begin = "$ jobrunner run train.py --checkpoint runs/train --epochs 2"
    for block in [Block(page, 0, "console", begin, ""), *blocks(page)]:
        if block.file:
            (tmp_path / block.file).write_text(block.code)
        commands = []
        if block.language == "console":
            commands = block.commands
        elif block.comment.endswith("::test_the_commands_of_a_page_run_on_its_files"):
            commands = [f"python - <<'END'\n{block.code}END"]
        for command in commands:
            if "venv .venv" in command:
                continue  # .ci/run does it
            done = subprocess.run(
                ["bash", "-c", _await_epochs(command.replace(".venv/bin/", ""))],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            said += f"$ {command}\n{done.stdout}{done.stderr}"
            killed = "kill -9" in command
            assert killed or done.returncode == 0, said
            assert "leaked" not in done.stderr
    for pattern in _SAID.get(page.name, ()):
        assert re.search(pattern, said, re.M), said
