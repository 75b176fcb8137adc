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
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETS = ("lowest", "middle", "newest")
SHOWN = ("dask==", "zarr==", "numpy==")
MIDDLE = ["dask==2026.1.2", "distributed==2026.1.2", "zarr==3.1.5", "numpy==2.3.5"]


def requirements(name: str) -> list[str]:
    """What pip installs beside the package, to have the versions of a set."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = [line.replace(">=", "==", 1) for line in project["dependencies"]]
    return {"lowest": lowest, "middle": MIDDLE, "newest": ["--upgrade"]}[name]


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def make(python: str, name: str) -> str:
    """An environment with the package and its tests' dependencies; returns its interpreter."""
    version = output_of(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    place = ROOT / ".versions" / f"{version}-{name}"
    interpreter = str(place / "bin" / "python")
    if not place.exists():
        output_of(python, "-m", "venv", str(place))
    install = [interpreter, "-m", "pip", "install", "--quiet", "--editable", f"{ROOT}[test]"]
    output_of(*install, *requirements(name))
    return interpreter


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--set", action="append", choices=SETS, help="by default all three")
    parser.add_argument("--python", action="append", help="by default the one that runs this")
    options, arguments = parser.parse_known_args()
    results = []
    for python in options.python or [sys.executable]:
        for name in options.set or SETS:
            print(f"=== {name} versions with {python}", flush=True)
            interpreter = make(python, name)
            packages = output_of(interpreter, "-m", "pip", "freeze").splitlines()
            shown = [package for package in packages if package.startswith(SHOWN)]
            command = [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            tests = subprocess.run(command, cwd=ROOT, env=environment, check=False)
            results.append((tests.returncode, f"{name} with {python}: {' '.join(shown)}"))
    for code, text in results:
        print("passed" if code == 0 else "FAILED", text)
    return max(code for code, _ in results)


if __name__ == "__main__":
    sys.exit(main())
