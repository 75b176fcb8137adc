"""A program that does everything with logs that a stranger made as costly as an entry may be.

``python -m tests.checkpoint.log.shapes [NAME...]`` prints for each shape what each operation took:
an operation is several commands, of which the longest counts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from operator import sub
from pathlib import Path
from typing import Any

import numpy as np

from jobrunner import Job, MultiNodeCheckpointManager, Task
from jobrunner.checkpoint.log.entries import MOST_REBUILT, frame
from jobrunner.checkpoint.log.handler import decode_entry
from jobrunner.errors import JobRunnerError
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.workspace import Workspace
from tests.mutants.operations import READING, WRITING, Case, operate

MOST_SECONDS = 30
SPARE_BYTES = 4 << 30
MOST = MOST_REBUILT
CHARS = 15_000_000
RECORDS = 12_000  # an entry has room for 19,000 with a store: 3 s

Log = dict[int, dict[str, Any]]
"""The entries to write, by number."""


def summary(**fields: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {"recorded": [], "retries": [], "claims": [], "chores": []}
    return {"run": None, "is_ended": True, **empty, "done": None, **fields}


WHOLE: dict[str, Any] = {
    "recorded": [[0, 1, 2, 2, 2]],
    "retries": [[0, 1, 2, 0, 0]],
    "claims": [[0, 1, 2, 1, 0]],
}
RUN = {"kind": "run", "run": "r2", "nodes": ["a"], "info": {}}


def repair(commits: Any = (), **state: Any) -> dict[str, Any]:
    return {"kind": "repair", "state": summary(**state), "commits": list(commits)}


def rows(count: int, value: int) -> list[list[int]]:
    return [[0, 1, 1, value, 0, step + 1] for step in range(count)]


def recorded(count: int, number: int) -> dict[str, Any]:
    """So many epochs in a few bytes."""
    about = {"recorded": number, "retries": 0, "claims": 1}
    return {key: [[0, 1, count, value, 0, 7]] for key, value in about.items()}


def rebuilt(epoch: Any, **stores: Any) -> dict[str, Any]:
    head = {"epoch": epoch, "retry": 0, "run": "r", "run_number": None, "time": ""}
    return {**head, "stores": stores, "details": {}}


def store(name: str) -> dict[str, Any]:
    return {"store": name, "manifest": "0" * 64, "nbytes": 1, "seconds": 0.5}


def details(**about: Any) -> Log:
    return {4: {"details": about}}


def chores(count: int = MOST, *more: Any) -> dict[str, Any]:
    return {**WHOLE, "chores": [[f"{n}.s1", 0, "delete", 0] for n in range(5, count)]}


def settled() -> list[Any]:
    return [[f"{n}.s1", 0] for n in range(5, MOST)]


def numbered(*entries: dict[str, Any]) -> Log:
    return dict(enumerate(entries, 5))


SHAPES: dict[str, Callable[[], Log]] = {
    "epochs in few bytes": lambda: numbered(repair(**recorded(MOST, 5))),
    "epochs of a commit": lambda: numbered(repair(**recorded(MOST, 4))),
    "steps": lambda: numbered(repair(recorded=rows(MOST, 4), retries=rows(MOST, 0))),
    "claims": lambda: numbered(repair(**{**WHOLE, "claims": rows(MOST, 1)})),
    "chores": lambda: numbered(repair(**chores())),
    "chores of many nodes": lambda: {
        0: {"nodes": ["a", *map(str, range(200_000))]},
        5: repair(**chores(3000)),
    },
    "chores, settled": lambda: numbered(repair(**chores()), {**RUN, "settled": settled()}),
    "retired": lambda: numbered(
        repair(**recorded(MOST, 5)),
        RUN,
        {"kind": "retire", "run": "r2", "epochs": [f"{n}.s7" for n in range(MOST)]},
    ),
    "set aside": lambda: numbered(
        repair(**recorded(MOST, 5)),
        RUN,
        *({"kind": "rewind", "run": "r2", "after": f"{MOST - n}.s7"} for n in range(2, 200)),
    ),
    "steps set aside": lambda: numbered(
        repair(recorded=rows(MOST, 4), retries=rows(MOST, 0)),
        RUN,
        *({"kind": "rewind", "run": "r2", "after": f"0.s{MOST - n}"} for n in range(120)),
    ),
    "reason": lambda: numbered({"kind": "rewind", "after": 0, "reason": "\x1b" * (CHARS // 6)}),
    "reason of addresses": lambda: numbered(
        {"kind": "rewind", "after": 0, "reason": "://@" * (CHARS // 4)}
    ),
    "records": lambda: numbered(repair([rebuilt(n) for n in range(RECORDS)])),
    "records of steps": lambda: numbered(repair([rebuilt(f"{n}.s3") for n in range(RECORDS)])),
    "records of stores": lambda: numbered(
        repair([rebuilt(n, a=store(f"a.{n}")) for n in range(RECORDS)])
    ),
    "stores": lambda: {4: {"stores": {f"n{n}": store(f"n{n}.1") for n in range(30_000)}}},
    "nodes": lambda: {0: {"nodes": [f"n{n}" for n in range(300_000)]}},
    "states": lambda: {4: {"stores": {"a": {**store("a.1"), "states": ["x"] * 300_000}}}},
    "metrics": lambda: details(metrics={f"m{n}": n for n in range(200_000)}),
    "metric of a long name": lambda: details(metrics={"\x1b" * (CHARS // 6): 1}),
    "metadata": lambda: details(metadata={"x": list(range(900_000))}),
    "metadata of dicts": lambda: details(metadata={"x": [{"a": 1}] * 180_000}),
    "metadata of long integers": lambda: details(metadata={"x": [10**4200] * 3500}),
    "replicated": lambda: details(replicated={f"m{n}": ["a"] for n in range(120_000)}),
    "partitions": lambda: details(
        partitions={f"m{n}": {"axis": 0, "nodes": ["a"]} for n in range(60_000)}
    ),
    "plan": lambda: {
        0: {"info": {"plan": {"nodes": {f"t{n}": ["x"] for n in range(120_000)}}}},
    },
    "code": lambda: {
        0: {"info": {"plan": {"nodes": {"a": ["w"]}, "code": {"t": "x\n" * (CHARS // 3)}}}}
    },
    "lost": lambda: numbered({**repair(**WHOLE), "lost": list(range(900_000))}),
    "label": lambda: numbered({"kind": "pin", "epoch": 1, "label": "\x1b" * (CHARS // 6)}),
    "number": lambda: {2_060: repair(**recorded(MOST, 2_000))},
}


def write(path: Path, log: Log) -> None:
    """Change or append entries, with right digests."""
    last = path / "_log" / f"{5:010d}.json"
    ended = decode_entry(last.read_bytes(), 5, "")
    del ended["kind"]
    for number, fields in log.items():
        file = path / "_log" / f"{number:010d}.json"
        old = ended if number > 4 else decode_entry(file.read_bytes(), number, "")
        text = json.dumps({**old, "number": number, **fields}, separators=(",", ":")).encode()
        file.write_bytes(frame(text, hashlib.sha256(text).hexdigest()))


def save(path: Path) -> None:
    manager = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
    manager.run.start(["a"], {"plan": {"nodes": {"a": ["w"]}}})
    for epoch in (0, 1):
        workspace = Workspace("a")
        workspace.globals["w"] = np.arange(3) + epoch
        begun = manager.commits.begin(Position.of(epoch))
        manager.commits.commit(begun, begun.write({"a": workspace}), {"metrics": {"loss": 0.5}})
    manager.run.end()


def make_job() -> Job:
    with Job("j") as job:
        with job.init_group:
            Task(lambda: 1, outputs="w", node="a")
        Task(lambda w: w, inputs="w", outputs="w", node="a")
    return job


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


Begin = Callable[[], None]


def in_child(act: Callable[[Begin], object]) -> dict[str, Any]:
    """Do something in a process of its own, which says when each part begins.

    Returns how much processor time the longest part took, and how much memory all together.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(4 * MOST_SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (SPARE_BYTES, SPARE_BYTES))
        times, peak, bad = [time.process_time()], _peak_bytes(), ""
        try:
            act(lambda: times.append(time.process_time()))
        except JobRunnerError:
            pass
        except BaseException as error:
            bad = f"{type(error).__name__}: {error}"[:300]
        times.append(time.process_time())
        found = {
            "seconds": round(max(map(sub, times[1:], times)), 2),
            "bytes": _peak_bytes() - peak,
            "bad": bad,
        }
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        told = file.read()
    os.waitpid(pid, 0)
    return dict(json.loads(told)) if told else {"seconds": 1e9, "bytes": 0, "bad": "it died"}


def run(names: list[str], operations: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each operation took, by shape."""
    logging.disable(logging.CRITICAL)
    whole, made, path = (Path(it).absolute() for it in ("whole", "made", "k"))
    save(whole)

    def do(name: str, begin: Begin) -> None:
        copied = str(path.parent / "copied")
        operate(Case(str(path), copied, make_job(), lambda *_: None, begin), name)

    for name in operations:  # imports everything
        shutil.copytree(whole, path)
        with suppress(JobRunnerError):
            do(name, lambda: None)
        for it in (path, path.parent / "copied"):
            shutil.rmtree(it, ignore_errors=True)
    for shape in names:
        shutil.copytree(whole, made)
        in_child(lambda _, shape=shape: write(made, SHAPES[shape]()))  # type: ignore[misc]
        found = {}
        for name in operations:
            shutil.copytree(made, path)
            found[name] = in_child(partial(do, name))
            for it in (path, path.parent / "copied"):
                shutil.rmtree(it, ignore_errors=True)
        shutil.rmtree(made)
        yield shape, found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        for shape, found in run(sys.argv[1:] or list(SHAPES), [*READING, *WRITING]):
            print(json.dumps({shape: found}), flush=True)
