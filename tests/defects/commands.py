"""What the reading commands say of checkpoint directories of every kind, in two versions.

    python tests/defects/commands.py [--json FILE]
    python tests/defects/commands.py --against OTHER_CHECKOUT [--python ITS_PYTHON]

Makes one directory of each kind with the package of this checkout, through its public API, runs the
commands with `--json` and normalises what differs from run to run: times, ids, sizes, paths. With
`--against`, does the same in the other checkout and prints the difference; the exit code is 1 if
there is one. The other checkout makes its own directories: formats may differ, answers may not.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

THIS = Path(__file__).resolve()
JOB_SECONDS = 300
KILLED_AFTER = 3

VOLATILE = re.compile(
    r"seconds|nbytes|time|seen|began|ended|host|pid|pace|process|version|ledger|gap"
)
"""Numbers and texts below such a key differ from run to run, or from format to format."""

MASKS = (
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[0-9.:+Z]*"), "TIME"),
    (re.compile(r"process \d+ on \S+"), "PROCESS"),
    (re.compile(r"\b[0-9a-f]{64}\b"), "DIGEST"),
    (re.compile(r"\b[0-9a-f]{32}\b"), "ID"),
    (re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{8}\b"), "ID"),
    (re.compile(r"\b\d+(\.\d+)? (bytes|KiB|MiB|B|s|ms)\b"), "AMOUNT"),
)


# ---- jobs


def train(
    path: Path,
    epochs: int,
    *,
    nodes: Sequence[str] = ("a", "b"),
    fails_at: tuple[int, int] = (0, 0),
    errors: tuple[type[Exception], ...] = (),
    seed: int = 0,
    steps: int = 1,
    make: Callable[[], Any] | None = None,
    blob: str = "w",
    manager_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Run or resume a job that adds random numbers to an array on each node."""
    import numpy as np

    import jobrunner as jr

    def start() -> Any:
        return np.zeros(6)

    def add(value: Any) -> Any:
        task = jr.current_task()
        if (task.epoch, task.step) == fails_at and not (errors and task.attempt):
            raise ZeroDivisionError(f"in epoch {task.epoch}")
        task.report(loss=1.0 / (1 + (task.epoch or 0)))
        return value + task.rng.random(6)

    def count(value: Any) -> Any:
        return value

    with jr.Job("train", seed=seed, steps_per_epoch=steps) as job:
        for name in nodes:
            with jr.Node(name):
                with job.init_group:
                    jr.Task(start, outputs=blob, name="start")
                    if make is not None:
                        jr.Task(make, outputs="others", name="make")
                jr.Task(add, inputs=blob, outputs=blob, name="add", transient_errors=errors)
                if make is not None:
                    jr.Task(count, inputs="others", outputs="others", name="count")
        jr.epoch_limiter(job, epochs)
    manager = jr.MultiNodeCheckpointManager(path, **(manager_options or {}))
    run(job, manager, **options)


def run(job: Any, manager: Any, **options: Any) -> None:
    """Run a job on a cluster of one worker in this process."""
    from distributed import Client, LocalCluster

    import jobrunner as jr

    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
        jr.Session(client) as session,
        contextlib.suppress(jr.TaskFailedError),
    ):
        jr.JobRunner(job, manager, **options).run(session)


class Kill:
    """A callback that kills the process when an epoch has been recorded."""

    is_passive = False

    def on_save(self, report: Any) -> None:
        """Kill this process."""
        if report.epoch == KILLED_AFTER:
            os.kill(os.getpid(), 9)


def values() -> Any:
    """Everything that a blob often is."""
    import numpy as np

    return {
        "text": "some text",
        "numbers": [1, 2.5, None, True],
        "nested": {"pair": (1, "two"), "deep": {"array": np.arange(3)}},
        "empty": [],
        "bytes": b"\0\1",
    }


# ---- directories of each kind


def finished(path: Path) -> None:
    train(path, 5)


def killed(path: Path) -> None:
    words = [sys.executable, str(THIS), "--kill", str(path)]
    subprocess.run(words, check=False, timeout=JOB_SECONDS)


def damaged(path: Path) -> None:
    train(path, 4)
    stored = [file for file in (path / "a.2").rglob("*") if file.is_file()]
    largest = max(stored, key=lambda file: (file.stat().st_size, str(file)))
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    largest.write_bytes(data)


def entry_lost(path: Path) -> None:
    train(path, 4)
    entries = sorted((path / "_log").glob("*.json"))
    entries[3].write_bytes(b"")


def pinned(path: Path) -> None:
    import jobrunner as jr

    train(path, 4)
    manager = jr.MultiNodeCheckpointManager(path)
    manager.pin(1, "paper")
    manager.pin(1, "talk")
    manager.pin(3)
    manager.unpin(3)
    manager.pin(2)


def rewound(path: Path) -> None:
    train(path, 5)
    train(path, 4, resume_from_epoch=2)


def several_runs(path: Path) -> None:
    for epochs in (1, 3, 5):
        train(path, epochs)


def failed(path: Path) -> None:
    train(path, 5, fails_at=(3, 0))


def tried_again(path: Path) -> None:
    train(path, 5, fails_at=(3, 0), errors=(ZeroDivisionError,))


def objects(path: Path) -> None:
    train(path, 2, make=values)


def within_epochs(path: Path) -> None:
    import jobrunner as jr

    policies = {"save": jr.SaveEvery(steps=2), "keep": jr.KeepAll(partial=True)}
    train(path, 4, steps=3, fails_at=(3, 2), manager_options=policies)


def retained(path: Path) -> None:
    import jobrunner as jr

    keep = jr.KeepEvery(3) | jr.KeepLast(2) | jr.KeepBest("loss")
    train(path, 8, manager_options={"keep": keep, "metadata": {"note": "kept"}})


def renamed(path: Path) -> None:
    train(path, 2)
    train(path, 4, nodes=("server", "b"), rename={"a": "server"})


def other_seed(path: Path) -> None:
    train(path, 5, seed=1)


def shared(path: Path) -> None:
    import numpy as np

    import jobrunner as jr

    def part(number: int) -> Any:
        return np.arange(3.0) + 10 * number

    def same() -> Any:
        return np.ones(4)

    def keep(value: Any) -> Any:
        return value

    with jr.Job("shared") as job:
        for number, name in enumerate("ab"):
            with jr.Node(name):
                with job.init_group:
                    rows = jr.Blob("rows", partition=0)
                    jr.Task(part, outputs=rows, kwargs={"number": number}, name="part")
                    jr.Task(same, outputs=jr.Blob("copy", replicated=True), name="same")
                jr.Task(keep, inputs="rows", outputs="rows", name="keep")
        jr.epoch_limiter(job, 2)
    run(job, jr.MultiNodeCheckpointManager(path))


def strayed(path: Path) -> None:
    import shutil

    train(path, 2)
    shutil.copytree(path / "a.1", path / "a.7")
    (path / "notes.txt").write_text("mine")


KINDS: tuple[Callable[[Path], None], ...] = (
    finished,
    killed,
    damaged,
    entry_lost,
    pinned,
    rewound,
    several_runs,
    failed,
    tried_again,
    objects,
    within_epochs,
    retained,
    renamed,
    other_seed,
    shared,
    strayed,
)


# ---- commands


def commands_for(root: Path, name: str) -> Iterator[tuple[str, ...]]:
    """The commands to run on one directory."""
    path = str(root / name)
    yield "ls", path
    yield "ls", path, "--last", "2"
    for epoch in ("0", "1", "2", "latest", "99"):
        yield "info", path, epoch
    yield "verify", path, "--deep"
    yield "diff", f"{path}@0", "@1"
    yield "diff", path, f"{root}/finished"
    yield "compare", path, f"{root}/finished"
    yield "fsck", path
    yield "prune", path, "--keep-last", "1", "--dry-run"
    yield "prune", path, "--keep-best", "loss", "--dry-run"


def commands_for_all(root: Path) -> Iterator[tuple[str, ...]]:
    """The commands that show all directories at once."""
    yield "ls", str(root)
    yield "ls", str(root), "--best", "loss"
    yield "top", str(root)


def ask(words: Sequence[str]) -> dict[str, Any]:
    """The exit code of a command, and its JSON."""
    from jobrunner.cli import main

    stdout, stderr = io.StringIO(), io.StringIO()
    code: object = 0
    arguments = sys.argv
    sys.argv = ["jobrunner", *words, "--json"]
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = arguments
    text = stdout.getvalue()
    try:
        told = json.loads(text) if text else None
    except ValueError:
        told = text
    return {"exit code": code or 0, "json": told}


def normalise(value: Any, root: str, *, is_volatile: bool = False) -> Any:
    """A value without what differs from run to run."""
    if isinstance(value, dict):
        return {
            name: normalise(item, root, is_volatile=is_volatile or bool(VOLATILE.search(name)))
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [normalise(item, root, is_volatile=is_volatile) for item in value]
    if isinstance(value, str) and not is_volatile:
        text = value.replace(root, "ROOT")
        for pattern, mask in MASKS:
            text = pattern.sub(mask, text)
        return text
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_volatile and (is_number or isinstance(value, str)):
        return "a number" if is_number else "a text"
    return value


def without_format(told: dict[str, Any]) -> dict[str, Any]:
    """An answer of fsck without the files that a whole checkpoint has: each format has others."""
    answer = told["json"]
    if not isinstance(answer, dict) or "objects" not in answer:
        return told
    others = [each for each in answer["objects"] if each["status"] != "live"]
    counts = {status: count for status, count in answer["counts"].items() if status != "live"}
    return {**told, "json": {**answer, "objects": others, "counts": counts}}


def record() -> dict[str, Any]:
    """Make all directories and run all commands."""
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="jobrunner-commands-") as directory:
        root = Path(directory).resolve()
        for make in KINDS:
            make(root / make.__name__)
        commands = [words for make in KINDS for words in commands_for(root, make.__name__)]
        for words in (*commands, *commands_for_all(root)):
            title = " ".join(words).replace(str(root), "ROOT")
            told[title] = normalise(without_format(ask(words)), str(root))
    return told


def lines_of(told: Mapping[str, Any]) -> list[str]:
    """What was told, one fact a line, so that a difference shows its command and place."""
    lines: list[str] = []

    def add(place: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, item in value.items():
                add(f"{place}.{name}", item)
        elif isinstance(value, list) and value:
            for number, item in enumerate(value):
                add(f"{place}[{number}]", item)
        else:
            lines.append(f"{place} = {json.dumps(value)}")

    for title, answer in told.items():
        add(title, answer)
    return lines


def record_in(checkout: Path, python: str) -> dict[str, Any]:
    """Record with the package of a checkout, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="jobrunner-told-") as directory:
        file = Path(directory) / "told.json"
        environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONWARNINGS": "ignore"}
        words = [python, str(THIS), "--record", str(file)]
        done = subprocess.run(
            words, check=False, cwd=directory, env=environment, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise SystemExit(f"{checkout}: {done.stdout}{done.stderr}")
        told: dict[str, Any] = json.loads(file.read_text())
        return told


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write what was told to this file")
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument(
        "--python", default=sys.executable, help="the interpreter for the other one"
    )
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kill", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.kill is not None:
        train(arguments.kill, 5, callbacks=[Kill()])
        return 1
    if arguments.record is not None:
        arguments.record.write_text(json.dumps(record()))
        return 0
    ours = record_in(THIS.parents[2], sys.executable)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(ours, indent=1) + "\n")
    if arguments.against is None:
        print(f"{len(ours)} commands on {len(KINDS)} directories")
        return 0
    theirs = record_in(arguments.against.resolve(), arguments.python)
    difference = difflib.unified_diff(
        lines_of(theirs), lines_of(ours), str(arguments.against), "this checkout", lineterm="", n=0
    )
    shown = [line for line in difference if not line.startswith("@@")]
    print("\n".join(shown) or f"{len(ours)} commands say the same in both")
    return 1 if shown else 0


if __name__ == "__main__":
    sys.exit(main())
