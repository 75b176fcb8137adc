"""The Python blocks of the guides run, one after another as a reader would type them."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from jobrunner import errors
from jobrunner.cli import main
from jobrunner.cli.command import exit_code_of

_ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(
    r"^(?:<!-- file: (?P<file>[\w.]+) -->\n)?```python\n(?P<code>.*?)^```$", re.M | re.S
)
_DOCUMENTS = sorted(
    path
    for path in [
        _ROOT / "README.md",
        *(_ROOT / "docs").rglob("*.md"),
    ]
    if path.exists() and _BLOCK.search(path.read_text())
)


@pytest.fixture
def main_module() -> Iterator[types.ModuleType]:
    """A fresh ``__main__``: what a script defines there goes to workers by value."""
    before = sys.modules["__main__"]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    yield module
    sys.modules["__main__"] = before


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda path: path.name)
def test_the_python_blocks_run(
    document: Path,
    main_module: types.ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = document.read_text()
    for block in _BLOCK.finditer(text):
        if block["file"]:
            (tmp_path / block["file"]).write_text(block["code"])
        # Padded with newlines, so that a traceback names the line of the document.
        lines_before = text.count("\n", 0, block.start("code"))
        source = "\n" * lines_before + block["code"]
        exec(compile(source, str(document), "exec"), vars(main_module))


@pytest.mark.nightly
def test_the_parts_of_ones_own_pass_the_suites_as_the_guide_runs_them(tmp_path: Path) -> None:
    for block in _BLOCK.finditer((_ROOT / "docs" / "extending.md").read_text()):
        if block["file"]:
            (tmp_path / block["file"]).write_text(block["code"])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_parts.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^2\d passed", done.stdout, re.M), done.stdout


def test_links_between_documents_lead_somewhere() -> None:
    top = [_ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    paths = [*top, *(_ROOT / "docs").rglob("*.md")]
    broken = [
        f"{path.relative_to(_ROOT)}: {link}"
        for path in paths
        if path.exists()
        for link in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", path.read_text())
        if not (path.parent / link).exists()
    ]
    assert not broken


def test_the_map_names_every_package_and_module_of_the_top_level() -> None:
    top = _ROOT / "jobrunner"
    text = (_ROOT / "docs" / "design" / "README.md").read_text()
    tree = text.partition("```text\n")[2].partition("```")[0]
    rooms = {path.stem for path in top.iterdir() if path.suffix == ".py" or path.is_dir()}
    missing = {room for room in rooms if not room.startswith("_")} - set(re.findall(r"\w+", tree))
    assert not missing, f"Put {sorted(missing)} on the map."


def _defined(file: Path) -> set[str]:
    """Names of a module's functions and classes, and of their methods as ``Class.method``."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{item.name}"
                for item in node.body
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


def test_every_file_and_function_on_the_design_map_exists() -> None:
    package = _ROOT / "jobrunner"
    text = (_ROOT / "docs" / "design" / "README.md").read_text()
    ways = re.findall(r"`([\w/]+\.py): ([\w.]+)`", text)
    assert len(ways) > 40
    missing = [f"{path}: {name}" for path, name in ways if name not in _defined(package / path)]
    assert not missing
    mentioned = set(re.findall(r"`((?:\w+/)*(?:\w+\.py|\w+/))`", text))
    assert not {path for path in mentioned if not (package / path).exists()}


def _exported(module: types.ModuleType) -> set[str]:
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if isinstance(value, type | types.FunctionType) and not name.startswith("_")
    ]
    return {name for name in names if not name.startswith("__")}


@pytest.mark.parametrize(
    "name", ["jobrunner", "jobrunner.callbacks", "jobrunner.data", "jobrunner.testing"]
)
def test_the_reference_has_every_public_name(name: str) -> None:
    documented = set[str]()
    for page in (_ROOT / "docs" / "api").glob("*.md"):
        module = ""
        for kind, value in re.findall(r"^\.\. (\w+):: (\S+)$", page.read_text(), re.M):
            if kind == "currentmodule":
                module = value
            elif module == name:
                documented.add(value)
    assert documented == _exported(importlib.import_module(name))


def test_the_index_of_errors_has_every_error_and_its_exit_code() -> None:
    text = (_ROOT / "docs" / "errors.md").read_text()
    named = set(re.findall(r"^## (\w+)$", text, re.M))
    bases = {errors.JobRunnerError, errors.ExecutionError, errors.CheckpointError}
    for name, found in vars(errors).items():
        if isinstance(found, type) and issubclass(found, errors.JobRunnerError) - (found in bases):
            assert name in named, f"Describe {name} in docs/errors.md."
            (row,) = re.findall(rf"^\| \[`{name}`\].*\| (\d+)[^|]* \|[^|]*\|$", text, re.M)
            assert int(row) == exit_code_of(found(""))


def test_the_page_on_the_command_line_has_every_command_its_options_and_its_json() -> None:
    text = (_ROOT / "docs" / "command-line.md").read_text()
    keys = re.findall(r"^\| `(\w+)` \|", text.partition("## What `--json` holds")[2], re.M)
    assert set(keys) == set(main.commands)
    for name, command in main.commands.items():
        assert f"`jobrunner {name} " in text or f"`jobrunner {name}`" in text, name
        for param in command.params:
            if isinstance(param, click.Option):
                assert any(option in text for option in param.opts), f"{name} {param.opts}"


def test_the_page_on_installing_has_every_extra() -> None:
    about = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    for_developers = {"test", "dev", "docs", "browser", "bench"}
    rows = re.findall(r"^\| (`.*`) \|", (_ROOT / "docs" / "install.md").read_text(), re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.partition("|")[0])}
    assert named == set(about["optional-dependencies"]) - for_developers


@pytest.mark.nightly
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx_book_theme")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "docs", str(tmp_path)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").exists()
