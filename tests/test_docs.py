"""The Python blocks of the guides run, one after another as a reader would type them."""

import ast
import configparser
import doctest
import importlib
import re
import sys
import tomllib
import types

import click
import dask
import numpy as np
import pytest

import jobrunner
from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Task,
    epoch_limiter,
    errors,
)
from jobrunner.cli import main
from jobrunner.cli.command import exit_code_of
from tests.pages import PAGES, ROOT, blocks

_DOCUMENTS = [page for page in PAGES if blocks(page, "python")]


@pytest.fixture
def main_module():
    """A fresh ``__main__``: what a script defines there goes to workers by value."""
    before = sys.modules["__main__"]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    yield module
    sys.modules["__main__"] = before


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda path: path.name)
def test_the_python_blocks_run(document, main_module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(dask.config.config, "scheduler", "synchronous")  # its pool never ends
    for block in blocks(document, "python"):
        if block.file:
            (tmp_path / block.file).write_text(block.code)
        # Padded with newlines, so that a traceback names the line of the document.
        source = "\n" * (block.line - 1) + block.code
        exec(compile(source, str(document), "exec"), vars(main_module))


_EXAMPLES = [path for path in (ROOT / "jobrunner").rglob("*.py") if ">>> " in path.read_text()]


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_of_docstrings_run(path, main_module, inproc_session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    public = {name: getattr(jobrunner, name) for name in jobrunner.__all__}
    names = {**public, **vars(module), "np": np}
    for test in doctest.DocTestFinder().find(module, globs=names):
        source = "".join(example.source for example in test.examples)
        if "manager" in source:
            test.globs |= _make_kmeans(inproc_session if "manager.open" in source else None)
        told = []
        failed = doctest.DocTestRunner().run(test, out=told.append).failed
        if failed and "pip install 'dask-jobrunner[" in "".join(told):
            pytest.skip("a library of a callback is not installed")
        assert not failed, "".join(told)


def _make_kmeans(session):
    """What examples take for granted: a job, and a manager; with a session, it has run."""
    with Job("kmeans") as job, Node("server"):
        with job.init_group:
            Task(np.zeros, kwargs={"shape": 3}, outputs="centroids")
        Task(lambda centroids: centroids, outputs="centroids")
    epoch_limiter(job, 5)
    manager = MultiNodeCheckpointManager("runs/kmeans")
    if session:
        JobRunner(job, manager).run(session)
    return {"job": job, "manager": manager}


def test_the_readme_shows_a_part_of_its_main_job():
    [shown] = blocks(ROOT / "README.md", "py")
    [command] = [it for it in blocks(ROOT / "README.md", "console")[0].commands if "run" in it]
    assert "examples/kmeans.py" in command
    assert shown.code in (ROOT / "examples" / "kmeans.py").read_text()


def test_links_between_documents_lead_somewhere():
    broken = [
        f"{path.relative_to(ROOT)}: {link}"
        for path in PAGES
        for link in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", path.read_text())
        if not (path.parent / link).exists()
    ]
    assert not broken


def test_the_tests_that_pages_name_exist():
    missing = set()
    for path in PAGES:
        for file, name in re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", path.read_text()):
            there = (ROOT / file).exists()
            if not there or (name and f"def {name}(" not in (ROOT / file).read_text()):
                missing.add(f"{path.name}: {file} {name}")
    assert not missing


def test_the_map_names_every_package_and_module_of_the_top_level():
    top = ROOT / "jobrunner"
    text = (ROOT / "docs" / "design" / "README.md").read_text()
    tree = text.partition("```text\n")[2].partition("```")[0]
    rooms = {path.stem for path in top.iterdir() if path.suffix == ".py" or path.is_dir()}
    missing = {room for room in rooms if not room.startswith("_")} - set(re.findall(r"\w+", tree))
    assert not missing, f"Put {sorted(missing)} on the map."


def test_the_map_lists_packages_in_the_order_of_their_layers_and_who_imports_distributed():
    top = ROOT / "jobrunner"
    text = (ROOT / "docs" / "design" / "README.md").read_text()
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    layers = contracts["importlinter:contract:layers"]["layers"].split("\n")
    height = {}
    for number, layer in enumerate(reversed(layers)):
        height |= dict.fromkeys(layer.split(" : "), number)
    heights = [height[name] for name in re.findall(r"^  (\w+)/ ", text, re.M)]
    assert heights == sorted(heights)
    allowed = re.search(r"Only (.*?) import `distributed`", text, re.S)
    assert allowed
    importers = [
        path.relative_to(top).as_posix()
        for path in top.rglob("*.py")
        if re.search(r"^\s*(?:import|from) distributed\b", path.read_text(), re.M)
    ]
    assert importers
    assert all(path.startswith(tuple(re.findall(r"`([^`]+)`", allowed[1]))) for path in importers)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _defined(file):
    """Names of a module's functions and classes, and of their methods as ``Class.method``."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            functions = [each for each in node.body if isinstance(each, _FUNCTIONS)]
            names |= {f"{node.name}.{function.name}" for function in functions}
    return names


def test_every_file_and_function_on_the_design_map_exists():
    package = ROOT / "jobrunner"
    text = (ROOT / "docs" / "design" / "README.md").read_text()
    ways = re.findall(r"`([\w/]+\.py): ([\w.]+)`", text)
    story = ast.get_docstring(ast.parse((package / "checkpoint/__init__.py").read_text())) or ""
    steps = re.findall(r"`([\w/]+\.py):\s+([\w.]+)`", story)
    assert min(len(ways), len(steps)) > 20
    for path, name in steps:
        is_near = (package / "checkpoint" / path).exists()
        ways.append((f"checkpoint/{path}" if is_near else path, name))
    missing = [f"{path}: {name}" for path, name in ways if name not in _defined(package / path)]
    assert not missing
    mentioned = set(re.findall(r"`((?:\w+/)*(?:\w+\.py|\w+/))`", text))
    assert not {path for path in mentioned if not (package / path).exists()}


def _exported(module):
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if isinstance(value, type | types.FunctionType) and not name.startswith("_")
    ]
    return {name for name in names if not name.startswith("__")}


@pytest.mark.parametrize(
    "name", ["jobrunner", "jobrunner.callbacks", "jobrunner.data", "jobrunner.testing"]
)
def test_the_reference_has_every_public_name(name):
    documented = set[str]()
    for page in (ROOT / "docs" / "api").glob("*.md"):
        module = ""
        for kind, value in re.findall(r"^\.\. (\w+):: (\S+)$", page.read_text(), re.M):
            if kind == "currentmodule":
                module = value
            elif module == name:
                documented.add(value.removesuffix("()"))
    assert documented == _exported(importlib.import_module(name))


def test_the_index_of_errors_has_every_error_and_its_exit_code():
    text = (ROOT / "docs" / "errors.md").read_text()
    named = set(re.findall(r"^## (\w+)$", text, re.M))
    bases = {errors.JobRunnerError, errors.ExecutionError, errors.CheckpointError}
    for name, found in vars(errors).items():
        if isinstance(found, type) and issubclass(found, errors.JobRunnerError) - (found in bases):
            assert name in named, f"Describe {name} in docs/errors.md."
            (row,) = re.findall(rf"^\| \[`{name}`\].*\| (\d+)[^|]* \|[^|]*\|$", text, re.M)
            assert int(row) == exit_code_of(found("")) > 1


def test_the_page_on_the_command_line_has_every_command_its_options_and_its_json():
    text = (ROOT / "docs" / "command-line.md").read_text()
    keys = re.findall(r"^\| `(\w+)` \|", text.partition("## What `--json` holds")[2], re.M)
    assert set(keys) == set(main.commands)
    for name, command in main.commands.items():
        assert f"`jobrunner {name} " in text or f"`jobrunner {name}`" in text, name
        for param in command.params:
            if isinstance(param, click.Option):
                assert any(option in text for option in param.opts), f"{name} {param.opts}"


def test_the_page_on_installing_has_every_extra():
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for_developers = {"test", "dev", "docs", "browser", "bench"}
    rows = re.findall(r"^\| (`.*`) \|", (ROOT / "docs" / "index.md").read_text(), re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.partition("|")[0])}
    assert named == set(about["optional-dependencies"]) - for_developers
