"""Packages, files and chains of classes stay small enough to be read."""

import re
from pathlib import Path

import jobrunner

PACKAGE = Path(jobrunner.__file__).parent
MOST_MODULES = 14
MOST_LINES = 400
MOST_AT_THE_TOP = 8


def test_no_package_has_more_modules_than_one_can_keep_in_mind() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    counts = dict.fromkeys((path.parent for path in modules), 0)
    for path in modules:
        counts[path.parent] += 1
    assert {it.name: count for it, count in counts.items() if count > MOST_MODULES} == {}


def test_few_modules_lie_beside_the_packages() -> None:
    found = [path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")]
    assert len(found) <= MOST_AT_THE_TOP, found


def test_no_file_is_longer_than_one_reads_at_a_time() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {it.name: length for it, length in lengths.items() if length > MOST_LINES} == {}


def test_no_class_extends_one_that_extends_another() -> None:
    """A class may extend one of ours, or a library's; errors are a tree."""
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "errors.py")
    found = re.findall(r"^ *class (\w+)(?:\(([^)]*)\))?:", code, re.MULTILINE)
    bases: dict[str, set[str]] = {}
    for name, listed in found:
        bases.setdefault(name, set()).update(re.findall(r"(?<![\w=])\w+(?![\w=])", listed))
    ours = {name: its & bases.keys() - {name} for name, its in bases.items()}
    ours = {name: its for name, its in ours.items() if "Protocol" not in bases[name]}
    chains = {(name, base) for name, its in ours.items() for base in its if ours.get(base)}
    assert chains == set()
