"""Who notices what: breaks one line of the package at a time, and runs the tests that must fail.

    python tests/defects/defects.py [PATH ...] [--processes 2]
    python tests/defects/defects.py jobrunner/checkpoint --tests tests/checkpoint

Each entry of `lists/*.toml` states a rule, the one line of a file that holds it, the line that
breaks it, and tests that fail then. PATH limits the run to entries of these files and directories.
The defects are made in copies of the checkout, never in the checkout. One process runs one defect
at a time. A defect is

- *noticed* if one of its tests fails;
- *NOT NOTICED* if all pass: the rule has lost its guard;
- *stale* if its line is gone or occurs twice. The rule probably still holds somewhere: state it
  anew, with the line that holds it now, or delete the entry together with the rule;
- *without tests* if none of its tests exists any more: name others. `--tests` says which
  fails first, of the files and directories given.

The tests first run in a copy that nothing is broken in; those that fail there count for nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
LISTS = Path(__file__).parent / "lists"
TEST_SECONDS = 60
DEFECT_SECONDS = 240
NOTHING_TO_RUN = 5
EVERYDAY, NIGHTLY = "not nightly and not browser", "nightly"
OPTIONS = (
    *("-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore::SyntaxWarning"),
    *(f"--timeout={TEST_SECONDS}", "-rfE", "--tb=no"),
)


@dataclass(frozen=True)
class Defect:
    """One line that breaks one rule."""

    rule: str
    file: str
    line: str
    broken: str
    tests: Sequence[str] = ()

    def break_line(self, text: str) -> str | None:
        """Put the broken line in the place of the right one; None if the defect is stale."""
        line = re.compile(rf"^( *){re.escape(self.line)}$", re.M)
        if len(line.findall(text)) != 1:
            return None
        return line.sub(lambda match: match[1] + self.broken, text)


def read_defects(paths: Sequence[str] = ()) -> list[Defect]:
    """Read the entries of all lists, or those of some files and directories."""
    defects = []
    for file in sorted(LISTS.glob("*.toml")):
        defects += [Defect(**entry) for entry in tomllib.loads(file.read_text())["defect"]]
    if not paths:
        return defects
    return [it for it in defects if any(Path(it.file).is_relative_to(path) for path in paths)]


class Copy:
    """A copy of the checkout, in which one line at a time is broken."""

    def __init__(self, directory: Path) -> None:
        self.root = directory
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.check_output(command, cwd=ROOT, text=True)
        for name in listed.split("\0"):
            if (ROOT / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, directory / name)

    @contextlib.contextmanager
    def broken(self, defect: Defect) -> Iterator[bool]:
        """Break a line for as long as the context lasts; False if the defect is stale."""
        path = self.root / defect.file
        text = path.read_text() if path.is_file() else ""
        broken = defect.break_line(text)
        if broken is None:
            yield False
            return
        self._write(path, broken)
        try:
            yield True
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # Compiled code is told from older code by its time in seconds, and both files may have been
        # written in the same one.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def run_tests(
        self, tests: Collection[str], most: int, seconds: float, marks: str
    ) -> tuple[bool, list[str]]:
        """Run tests of some marks until `most` have failed; whether one failed, and which."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            *OPTIONS,
            "-m",
            marks,
            f"--maxfail={most}",
            *tests,
        ]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env={**os.environ, "PYTHONPATH": str(self.root)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            code = process.poll()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.seek(0)
            names = re.findall(r"^(?:FAILED|ERROR) (tests/[^\s[]+)", output.read(), re.M)
        failed = list(dict.fromkeys(names))
        if code is None and marks == NIGHTLY:
            return bool(failed), failed  # a long sweep has found nothing yet
        if code is None and not failed:
            failed = ["(the deadline)"]
        return code not in (0, NOTHING_TO_RUN), failed


def existing(tests: Iterable[str]) -> list[str]:
    """Those of these tests whose function, or whose class, is in its file."""
    found = []
    for test in tests:
        file, *_, name = test.split("::")
        path = ROOT / file
        if path.is_file() and re.search(
            rf"^ *(async def|def|class) {name}\b", path.read_text(), re.M
        ):
            found.append(test)
    return found


def examine(defect: Defect, copies: SimpleQueue[Copy], tests: Sequence[str]) -> str:
    """Break one line, run tests, and print the verdict and which failed; returns the verdict."""
    started = time.monotonic()
    verdict, failed = "stale", []
    copy = copies.get()
    try:
        with copy.broken(defect) as is_broken:
            if is_broken and not tests:
                verdict = "without tests"
            elif is_broken:
                has_failed, failed = copy.run_tests(tests, 1, DEFECT_SECONDS, EVERYDAY)
                if not has_failed and all("::" in test for test in tests):
                    # A test that is named may be a nightly one.
                    has_failed, failed = copy.run_tests(tests, 1, DEFECT_SECONDS, NIGHTLY)
                verdict = "noticed" if has_failed else "NOT NOTICED"
    finally:
        copies.put(copy)
    seconds = time.monotonic() - started
    told = f"{verdict:<13} {seconds:6.1f} s  {defect.file}: {defect.rule}  {', '.join(failed)}"
    print(told, flush=True)
    return verdict


def main() -> int:
    """Print what became of each defect, and their numbers; 1 if one was not noticed."""
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("paths", nargs="*", help="files and directories of the package")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--tests", nargs="+", default=[], help="run these instead of those listed")
    arguments = parser.parse_args()
    defects = read_defects(arguments.paths)
    named = existing(dict.fromkeys(test for defect in defects for test in defect.tests))
    counts: Counter[str] = Counter()
    copies: SimpleQueue[Copy] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="jobrunner-defects-") as directory:
        for number in range(arguments.processes):
            copies.put(Copy(Path(directory) / str(number)))
        red: list[str] = []
        if named and not arguments.tests:
            whole = Copy(Path(directory) / "whole")
            _, red = whole.run_tests(named, len(named), 3600, EVERYDAY)
            for test in red:
                print(f"{test} fails though nothing is broken", flush=True)
        with ThreadPoolExecutor(arguments.processes) as pool:
            running = []
            for defect in defects:
                tests = [test for test in existing(defect.tests) if test not in red]
                running.append(pool.submit(examine, defect, copies, arguments.tests or tests))
            for done in as_completed(running):
                counts[done.result()] += 1
    verdicts = ("noticed", "NOT NOTICED", "stale", "without tests")
    print("; ".join(f"{counts[verdict]} {verdict}" for verdict in verdicts))
    return 1 if counts["NOT NOTICED"] else 0


if __name__ == "__main__":
    sys.exit(main())
