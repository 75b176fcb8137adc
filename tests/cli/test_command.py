"""The command line without a cluster: help, usage, exit codes, and what is imported for it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobrunner.cli.command import DIFFERENT, EXIT_CODES, SAVES_FAILED, main
from tests.cli.directories import invoke

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "args",
    [
        ["run", "job.py", "--checkpoint", "d", "--resume", "last"],
        ["run", "job.py", "--checkpoint", "d", "--scheduler", "tcp://h:1", "--workers", "2"],
        ["run", "job.py", "--checkpoint", "d"],
        ["run", "job.py", "--checkpoint", "d", "--resume", "9" * 5000],
        ["ls"],
        ["run", "job.py", "--nope", "--param", "note=see --log-format json"],
    ],
    ids=lambda args: " ".join(args)[:80],
)
def test_wrong_usage_exits_with_2_and_no_traceback(args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr
    assert "Traceback" not in result.stderr
    told = json.loads(invoke(*args, "--json").stdout)
    assert told["exit_code"] == 2
    assert told["error"]["type"] in ("UsageError", "DefinitionError")
    assert told["error"]["message"].splitlines()[0] in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_exit_codes_are_in_the_help_and_in_the_guide():
    guide = (ROOT / "docs" / "command-line.md").read_text()
    for code in {0, 1, DIFFERENT, SAVES_FAILED, 130, 143, *EXIT_CODES.values()}:
        assert f"| {code} |" in guide
        assert str(code) in invoke("--help").stdout


FEW = "numpy zarr dask distributed rich jobrunner.run jobrunner.compile"


@pytest.mark.parametrize("command", ["run --help", "ls {0}", "diff {0}@1 @2"])
def test_commands_load_only_what_they_need(command, runs):
    heavy = "dask zarr" if "diff" in command else FEW
    code = (
        "import contextlib, sys\n"
        "from jobrunner.__main__ import main\n"
        "with contextlib.suppress(SystemExit):\n"
        f"    main({command.format(runs).split()}, standalone_mode=False)\n"
        f"heavy = set('{heavy} jobrunner.worker jobrunner.cluster'.split()) & set(sys.modules)\n"
        "sys.exit(f'it imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("name", main.commands)
def test_the_help_of_every_command_has_examples_that_it_understands(name):
    text = CliRunner(env={"COLUMNS": "80"}).invoke(main, [name, "--help"]).output
    assert max(map(len, text.splitlines())) <= 80
    examples = re.findall(r'^      (?:eval "\$\()?jobrunner (\w+) ?([^|>)\n]*)', text, re.M)
    assert examples
    for command, words in examples:
        assert command == name
        main.commands[name].make_context(name, words.split())  # raises for what it does not know


def test_a_closed_pipe_is_no_failure(runs):
    command = [sys.executable, "-m", "jobrunner", "ls", str(runs), "--json"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        told = process.stderr.read()
    assert (process.returncode, told) == (0, "")
