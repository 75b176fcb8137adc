"""Run the tests on the lowest, a middle and the newest version of what jobrunner depends on.

    python tests/versions.py [--set lowest] [--python python3.12] [PYTEST ARGUMENT ...]

Makes an environment for each set and each Python, runs pytest in each, by default all everyday
tests, and prints a table. The lowest versions are those that pyproject.toml declares. Environments
are kept in .versions/ and used again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETS = ("lowest", "middle", "newest")
SHOWN = ("dask", "zarr", "numpy")
MIDDLE = ["dask==2026.1.2", "distributed==2026.1.2", "zarr==3.1.5", "numpy==2.3.5"]


def requirements(name: str) -> list[str]:
    """What pip installs beside the package, to have the versions of a set."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = [line.replace(">=", "==", 1) for line in project["dependencies"]]
    return {"lowest": lowest, "middle": MIDDLE, "newest": ["--upgrade"]}[name]


def answer(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def make(python: str, name: str) -> str:
    """An environment with the package and its tests' dependencies; returns its interpreter."""
    version = answer(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    place = ROOT / ".versions" / f"{version}-{name}"
    interpreter = str(place / "bin" / "python")
    if not place.exists():
        answer(python, "-m", "venv", str(place))
    install = [interpreter, "-m", "pip", "install", "--quiet", "--editable", f"{ROOT}[test]"]
    answer(*install, *requirements(name))
    return interpreter


def versions(interpreter: str) -> list[str]:
    code = f"""
import importlib.metadata, platform
print(platform.python_version(), *map(importlib.metadata.version, {SHOWN}))
"""
    return answer(interpreter, "-c", code).split()


def run(interpreter: str, arguments: list[str]) -> tuple[str, int]:
    """Run pytest, and show what it says; returns its last line and exit status."""
    last = ""
    with subprocess.Popen(
        [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
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
    parser.add_argument("--set", action="append", choices=SETS, help="by default all three")
    parser.add_argument("--python", action="append", help="by default the one that runs this")
    options, arguments = parser.parse_known_args()
    rows = [("set", "python", *SHOWN, "result", "seconds")]
    failed = 0
    for python in options.python or [sys.executable]:
        for name in options.set or SETS:
            print(f"=== {name} versions with {python}", flush=True)
            started = time.monotonic()
            try:
                interpreter = make(python, name)
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
