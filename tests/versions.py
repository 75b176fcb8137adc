"""Run the tests on the lowest, a middle and the newest version of what jobrunner depends on.

    python tests/versions.py [--set lowest] [--python python3.12] [PYTEST ARGUMENT ...]

Makes an environment for each set and each Python that it finds, with uv if that is installed, runs
pytest in each, by default all everyday tests, and prints a table. The lowest versions are those
that pyproject.toml declares. A set may also be a version of Dask, such as ``--set 2025.12.0``, with
the newest of all else. Environments are kept in .versions/ and used again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETS = ("lowest", "middle", "newest")
SHOWN = ("dask", "zarr", "numpy")
PYTHONS = [f"python3.{minor}" for minor in range(11, 20)]

MIDDLE = ["dask==2026.1.2", "distributed==2026.1.2", "zarr==3.1.5", "numpy==2.3.5"]


def requirements(name: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sets = {"lowest": floors(project["dependencies"]), "middle": MIDDLE, "newest": []}
    return sets[name] if name in sets else [f"{part}=={name}" for part in ("dask", "distributed")]


def set_name(text: str) -> str:
    if text in SETS or re.fullmatch(r"20\d\d(\.\d+)+", text):
        return text
    raise argparse.ArgumentTypeError(f"must be one of {', '.join(SETS)}, or a version of Dask")


def floors(dependencies: list[str]) -> list[str]:
    """Pin each dependency to the lowest version that it allows."""
    return [line.replace(">=", "==", 1) for line in dependencies]


def find_pythons() -> list[str]:
    """This interpreter, and those on the PATH, of pyenv and of uv: one of each version."""
    found: dict[str, str] = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    names = [sys.executable, *PYTHONS, *map(str, pyenv.glob("versions/*/bin/python3"))]
    if shutil.which("uv"):
        listed = said("uv", "python", "list", "--only-installed")
        names += [line.split()[1] for line in listed.splitlines() if line.startswith("cpython")]
    for name in filter(None, map(shutil.which, names)):
        with contextlib.suppress(subprocess.CalledProcessError):  # pyenv's name of none that it has
            version = version_of(name)
            if tuple(map(int, version.split("."))) >= (3, 11):
                found.setdefault(version, name)
    return list(found.values())


def version_of(python: str) -> str:
    return said(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()


def said(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def make(python: str, name: str, pins: list[str]) -> Path:
    """An environment with the package and its tests' dependencies; returns its interpreter."""
    place = ROOT / ".versions" / f"{version_of(python)}-{name}"
    interpreter = place / "bin" / "python"
    wanted = ["--editable", f"{ROOT}[test]", *pins]
    if uv := shutil.which("uv"):
        if not interpreter.exists():
            said(uv, "venv", "--quiet", "--python", python, str(place))
        install = [uv, "pip", "install", "--quiet", "--python", str(interpreter)]
    else:
        if not interpreter.exists():
            said(python, "-m", "venv", str(place))
        install = [str(interpreter), "-m", "pip", "install", "--quiet"]
    said(*install, *(["--upgrade"] if name not in ("lowest", "middle") else []), *wanted)
    return interpreter


def versions(interpreter: Path) -> list[str]:
    code = f"""
import importlib.metadata, platform
print(platform.python_version(), *map(importlib.metadata.version, {SHOWN}))
"""
    return said(str(interpreter), "-c", code).split()


def run(interpreter: Path, arguments: list[str]) -> tuple[str, int]:
    """Run pytest, and show what it says; returns its last line and exit status."""
    last = ""
    with subprocess.Popen(
        [str(interpreter), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return last, tests.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    helped = "lowest, middle, newest or a version of Dask; by default the first three"
    parser.add_argument("--set", action="append", type=set_name, help=helped)
    parser.add_argument("--python", action="append", help="by default all that are found")
    options, arguments = parser.parse_known_args()
    rows = [("set", "python", *SHOWN, "result", "seconds")]
    failed = 0
    for python in options.python or find_pythons():
        for name in options.set or SETS:
            print(f"=== {name} versions with {python}", flush=True)
            started = time.monotonic()
            try:
                interpreter = make(python, name, requirements(name))
                found = versions(interpreter)
                result, status = run(interpreter, arguments)
            except subprocess.CalledProcessError as error:
                print(error.stderr, flush=True)
                found, result, status = [python, *"---"], "cannot be installed", error.returncode
            rows.append((name, *found, result, f"{time.monotonic() - started:.0f}"))
            failed += status != 0
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
