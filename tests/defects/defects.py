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
`lists/commands.toml` names commands that break the package by themselves; they run without PATH.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
LISTS = Path(__file__).parent / "lists"
TEST_SECONDS = 60
DEFECT_SECONDS = 240
COMMAND_SECONDS = 3600
NOTHING_TO_RUN = 5
EVERYDAY, NIGHTLY = "not nightly and not browser", "nightly"


@dataclass(frozen=True)
class Defect:
    """One line that breaks one rule."""

    rule: str
    file: str
    line: str
    broken: str
    tests: tuple[str, ...] = ()

    def is_below(self, paths: Sequence[str]) -> bool:
        """Whether it is in one of these files and directories."""
        return not paths or any(Path(self.file).is_relative_to(path) for path in paths)

    def break_line(self, text: str) -> str | None:
        """Put the broken line in the place of the right one; None if the defect is stale."""
        starts = [match.start() for match in re.finditer(re.escape(self.line), text)]
        whole = [start for start in starts if is_whole_line(text, start, len(self.line))]
        if len(whole) != 1:
            return None
        return text[: whole[0]] + self.broken + text[whole[0] + len(self.line) :]


@dataclass
class Finding:
    """What became of one defect or command."""

    verdict: str
    rule: str
    place: str
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0


def is_whole_line(text: str, start: int, length: int) -> bool:
    """Whether nothing but spaces stands beside these characters on their line."""
    before = text[text.rfind("\n", 0, start) + 1 : start]
    return not before.strip() and text[start + length : start + length + 1] in ("\n", "")


def read_defects(paths: Sequence[str] = ()) -> list[Defect]:
    """Read the entries of all lists."""
    defects = []
    for file in sorted(LISTS.glob("*.toml")):
        for entry in tomllib.loads(file.read_text()).get("defect", ()):
            entry["tests"] = tuple(entry.get("tests", ()))
            defects.append(Defect(**entry))
    return [defect for defect in defects if defect.is_below(paths)]


def read_commands() -> list[dict[str, str]]:
    """Read the commands that break the package by themselves."""
    commands: list[dict[str, str]] = tomllib.loads((LISTS / "commands.toml").read_text())["command"]
    return commands


class Copy:
    """A copy of the checkout, in which one line at a time is broken."""

    def __init__(self, directory: Path) -> None:
        self.root = directory
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                target = directory / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)

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

    def run(self, command: Sequence[str], seconds: float) -> tuple[int | None, str]:
        """Run a command; its exit code, None after the deadline, and what it printed."""
        environment = {**os.environ, "PYTHONPATH": str(self.root)}
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment,
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
            return code, output.read()

    def run_tests(
        self, tests: Sequence[str], most: int, seconds: float, which: str
    ) -> tuple[bool, list[str]]:
        """Run tests of some marks until `most` have failed; whether one failed, and which."""
        options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore::SyntaxWarning"]
        options += ["-m", which, f"--maxfail={most}", f"--timeout={TEST_SECONDS}"]
        options += ["-rfE", "--tb=no"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        code, output = self.run(command, seconds)
        names = re.findall(r"^(?:FAILED|ERROR) (tests/\S+)", output, re.M)
        failed = list(dict.fromkeys(name.partition("[")[0] for name in names))
        if code is None and which == NIGHTLY:
            return bool(failed), failed  # a long sweep has found nothing yet
        if code is None and not failed:
            failed = ["(the deadline)"]
        return code not in (0, NOTHING_TO_RUN), failed


def existing(tests: Iterable[str]) -> list[str]:
    """Those of these tests whose function, or whose class, is in its file."""
    found = []
    for test in tests:
        file, _, name = test.partition("::")
        path = ROOT / file
        text = path.read_text() if path.is_file() else ""
        owner, _, function = name.rpartition("::")
        wanted = f"class {owner}" if owner else f"def {function}("
        if wanted in text:
            found.append(test)
    return found


@dataclass
class Examiner:
    """Runs defects in as many copies as there are processes."""

    copies: SimpleQueue[Copy]
    tests: Sequence[str]
    red: frozenset[str] = frozenset()

    def examine(self, defect: Defect) -> Finding:
        """Break one line and run its tests."""
        started = time.monotonic()
        finding = Finding("stale", defect.rule, defect.file)
        copy = self.copies.get()
        try:
            with copy.broken(defect) as is_broken:
                if is_broken:
                    self._try(copy, defect, finding)
        finally:
            self.copies.put(copy)
        finding.seconds = round(time.monotonic() - started, 1)
        return finding

    def _try(self, copy: Copy, defect: Defect, finding: Finding) -> None:
        tests = [test for test in existing(defect.tests) if test not in self.red]
        tests = list(self.tests) or tests
        if not tests:
            finding.verdict = "without tests"
            return
        has_failed, finding.failed = copy.run_tests(tests, 1, DEFECT_SECONDS, EVERYDAY)
        if not has_failed and all("::" in test for test in tests):
            # A test that is named may be a nightly one.
            has_failed, finding.failed = copy.run_tests(tests, 1, DEFECT_SECONDS, NIGHTLY)
        finding.verdict = "noticed" if has_failed else "NOT NOTICED"

    def find_red(self, tests: Sequence[str]) -> frozenset[str]:
        """Those of the tests that fail though nothing is broken."""
        copy = self.copies.get()
        try:
            _, failed = copy.run_tests(tests, len(tests), COMMAND_SECONDS, EVERYDAY)
        finally:
            self.copies.put(copy)
        return frozenset(failed)

    def command(self, entry: dict[str, str]) -> Finding:
        """Run a command that breaks the package by itself and fails if that is not noticed."""
        started = time.monotonic()
        copy = self.copies.get()
        try:
            words = shlex.split(entry["command"])
            code, _ = copy.run([sys.executable, *words[1:]], COMMAND_SECONDS)
        finally:
            self.copies.put(copy)
        verdict = "noticed" if code == 0 else "NOT NOTICED"
        seconds = round(time.monotonic() - started, 1)
        return Finding(verdict, entry["rule"], entry["command"], seconds=seconds)


def examine_all(arguments: argparse.Namespace) -> list[Finding]:
    """Run what the command line asks for, and print each finding when it is known."""
    defects = read_defects(arguments.paths)
    findings: list[Finding] = []
    copies: SimpleQueue[Copy] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="jobrunner-defects-") as directory:
        for number in range(arguments.processes):
            copies.put(Copy(Path(directory) / str(number)))
        examiner = Examiner(copies, arguments.tests)
        named = existing(dict.fromkeys(test for defect in defects for test in defect.tests))
        if named and not arguments.tests:
            examiner.red = examiner.find_red(named)
            for test in sorted(examiner.red):
                print(f"{test} fails though nothing is broken", flush=True)
        with ThreadPoolExecutor(arguments.processes) as pool:
            running = [pool.submit(examiner.examine, defect) for defect in defects]
            if not arguments.paths and not arguments.tests:
                running += [pool.submit(examiner.command, entry) for entry in read_commands()]
            for done in as_completed(running):
                finding = done.result()
                findings.append(finding)
                failed = ", ".join(finding.failed)
                print(
                    f"{finding.verdict:<13} {finding.seconds:6.1f} s  {finding.place}: "
                    f"{finding.rule}  {failed}",
                    flush=True,
                )
    return findings


def main() -> int:
    """Print the findings and their numbers; 1 if a defect was not noticed."""
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("paths", nargs="*", help="files and directories of the package")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--tests", nargs="+", default=[], help="run these instead of those listed")
    arguments = parser.parse_args()
    findings = examine_all(arguments)
    counts = dict.fromkeys(("noticed", "NOT NOTICED", "stale", "without tests"), 0)
    for finding in findings:
        counts[finding.verdict] += 1
    print("; ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 1 if counts["NOT NOTICED"] else 0


if __name__ == "__main__":
    sys.exit(main())
