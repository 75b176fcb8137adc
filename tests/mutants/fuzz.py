"""Mutated checkpoint directories: every command and every load works or raises an error of ours.

A seed draws one of `seeds.MADE` or a golden checkpoint, changes it (`mutations.mutate`), corrects
the digests of most mutants as an attacker would (`trees.sign`), and does some of
`operations`. `watch.Watch` sees what must not happen.

    python tests/mutants/fuzz.py 5000            seeds 0 to 4999; how many were bad, and how
    python tests/mutants/fuzz.py --seed 1234     one of them, with every error that it gives
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import pickle
import random
import select
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from jobrunner.checkpoint import digest_blob, encode_blobs
from jobrunner.errors import JobRunnerError
from tests.mutants.mutations import mutate
from tests.mutants.operations import READING, WRITING, Case, operate
from tests.mutants.seeds import NAMES, Seed, make_seeds
from tests.mutants.trees import Tree, sign, write_tree
from tests.mutants.watch import TimeIsUpError, Watch, limit_memory

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
PATIENCE_SECONDS = 30
_FRUGAL = {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
"""Threads would reserve memory that they do not use."""


@dataclass(frozen=True)
class Bad:
    """Something that must not happen."""

    number: int
    what: str
    operation: str
    told: str
    mutation: str


@dataclass
class Mutant:
    """What a number stands for."""

    seed: Seed
    tree: Tree
    is_signed: bool
    mutation: str
    operations: Sequence[str]


def draw_mutant(number: int, seeds: Mapping[str, Seed]) -> Mutant | None:
    """The mutant of a number; None if its seed is not among `seeds`."""
    draw = random.Random(number)
    seed = seeds.get(draw.choice(NAMES))
    if seed is None:
        return None
    tree = dict(seed.tree)
    changed: set[str] = set()
    told = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if tree:
            paths, what = mutate(draw, tree)
            changed |= paths
            told.append(what)
    is_signed = draw.random() < 0.65
    if is_signed:
        sign(tree, changed)
    chosen = [*draw.sample(READING, 4), *draw.sample(WRITING, draw.choice((1, 1, 2)))]
    signed = "signed" if is_signed else "not signed"
    return Mutant(seed, tree, is_signed, f"{seed.name}, {'; '.join(told)}, {signed}", chosen)


@dataclass
class Lab:
    """Where mutants are made and tried."""

    seeds: Sequence[Seed]
    root: Path
    most: int = 99
    """Operations on a mutant."""
    errors: Counter[str] = field(default_factory=Counter)
    """Those that are ours, by class; "" for operations that worked."""
    _expected: dict[tuple[str, str], str] = field(default_factory=dict)

    def prepare(self) -> None:
        """Make the whole seeds, and the directory that nobody may touch."""
        logging.getLogger("jobrunner").setLevel(logging.CRITICAL)
        for seed in self.seeds:
            whole = str(self.root / "whole" / seed.name)
            os.makedirs(os.path.dirname(whole), exist_ok=True)
            write_tree(seed.tree, whole)
            every = (*READING, *WRITING)  # imports everything
            for name in every if seed is self.seeds[0] else ("load",):
                if name in WRITING:
                    copy = str(self.root / "warm")
                    write_tree(seed.tree, copy)
                    self._warm_up(seed, copy, name)
                    shutil.rmtree(copy)
                else:
                    self._warm_up(seed, whole, name)
        self.watch = Watch(self.root / "canary")
        self.before = sorted(os.listdir(self.root))

    @property
    def by_name(self) -> dict[str, Seed]:
        return {seed.name: seed for seed in self.seeds}

    def _warm_up(self, seed: Seed, path: str, name: str) -> None:
        def keep(digest: str, blob: str, value: Any) -> None:
            self._expected[digest, blob] = digest_value(value)

        with contextlib.suppress(JobRunnerError):
            operate(Case(path, str(self.root / "copied"), seed.job(), keep), name)
        shutil.rmtree(self.root / "copied", ignore_errors=True)

    def try_number(self, number: int, *, tells: bool = False) -> list[Bad]:
        mutant = draw_mutant(number, self.by_name)
        if mutant is None:
            return []
        path, copy = str(self.root / "mutant"), str(self.root / "copied")
        whole = str(self.root / "whole" / mutant.seed.name)
        found: list[Bad] = []
        write_tree(mutant.tree, path)
        job = mutant.seed.job()

        def check(digest: str, blob: str, value: Any) -> None:
            if not mutant.is_signed and self._expected.get((digest, blob)) != digest_value(value):
                wrong.append(f"blob {blob!r}")

        count = min(self.most, len(mutant.operations))
        places = random.Random(number).sample(range(len(mutant.operations)), count)
        for name in [mutant.operations[i] for i in sorted(places)]:
            wrong: list[str] = []
            error: BaseException | None = None
            is_over = False
            with self.watch.during(f"{path}/", path, copy, whole) as seen:
                try:
                    operate(Case(path, copy, job, check, whole=whole), name)
                except BaseException as caught:
                    error = caught
                    if is_over := isinstance(caught, TimeIsUpError | MemoryError):
                        raise
            self.errors[type(error).__name__ if error else ""] += 1
            seen += [("wrong data", it) for it in wrong]
            if is_over:
                seen[:] = [(what, f"{why} {explain(error)}") for what, why in seen]
            elif isinstance(error, JobRunnerError):
                if path not in str(error) and copy not in str(error):
                    seen.append(("nameless", f"{type(error).__name__}: {error}"))
            elif error is not None:
                seen.append(("exception", explain(error)))
            if tells:
                print(mutant.mutation)
                print(f"{name}: {error if isinstance(error, JobRunnerError) else seen}")
                if error is not None and not isinstance(error, JobRunnerError):
                    traceback.print_exception(error)
            found += [
                Bad(number, what, name, why, mutant.mutation) for what, why in dict.fromkeys(seen)
            ]
            error = None
            if sorted(set(os.listdir(self.root)) - {"mutant", "copied"}) != self.before:
                found.append(Bad(number, "write outside", name, "a new file", mutant.mutation))
        shutil.rmtree(path)
        shutil.rmtree(copy, ignore_errors=True)
        return found


def explain(error: BaseException | None) -> str:
    """An error that should not be, in a line, with the line of the package that raised it."""
    assert error is not None
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/jobrunner/" in f.filename]
    at = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    where = f"{at.filename.rpartition('/jobrunner/')[2]}:{at.lineno} {at.name}"
    return f"{type(error).__name__} at {where}: {error!s:.150}"


# ---- many


def work(seeds: Sequence[Seed], first: int, stop: int, most: int) -> None:
    """In a process of its own: try numbers, and print a line of JSON before and after each."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        lab = Lab(seeds, Path(directory), most)
        lab.prepare()
        limit_memory()
        for number in range(first, stop):
            print(json.dumps([number]), flush=True)
            lab.errors.clear()
            bad = [vars(it) for it in lab.try_number(number)]
            print(json.dumps([number, lab.errors, bad]), flush=True)


def run(
    first: int, count: int, names: Collection[str] = NAMES, most: int = 99
) -> tuple[Counter[str], list[Bad]]:
    """Try mutants in another process; returns how operations ended, and what was bad."""
    ends: Counter[str] = Counter()
    bad: list[Bad] = []
    with tempfile.TemporaryDirectory() as directory:
        stored = Path(directory, "seeds")
        stored.write_bytes(pickle.dumps(make_seeds(names)))
        stop = first + count
        while first < stop:
            numbers = map(str, (first, stop, most))
            command = [sys.executable, __file__, "--work", str(stored), *numbers]
            with (
                open(Path(directory, "errors"), "w+b") as stderr,
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=stderr, env={**os.environ, **_FRUGAL}
                ) as child,
            ):
                last = first
                for line in _lines(child):
                    last, *told = json.loads(line)
                    if told:
                        ends.update(told[0])
                        bad += (Bad(**it) for it in told[1])
                        last += 1
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(1)
                is_hung = child.poll() is None
                child.kill()
                stderr.seek(0)
                errors = stderr.read().decode(errors="replace")
            if last < stop:
                if "tests/mutants" in errors:
                    raise RuntimeError(f"seed {last}: {errors}")
                what = "hang" if is_hung else "crash"
                bad.append(Bad(last, what, "?", f"the process: {errors[-500:]}", ""))
                last += 1
            first = last
    return ends, bad


def _lines(child: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """Lines of a process, until it ends or is silent for too long."""
    assert child.stdout is not None
    descriptor = child.stdout.fileno()
    rest = b""
    while select.select([descriptor], [], [], PATIENCE_SECONDS)[0]:
        data = os.read(descriptor, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def tell(bad: Sequence[Bad], most: int = 60) -> str:
    """What was bad, alike things together."""
    alike: dict[tuple[str, str], list[Bad]] = {}
    for one in bad:
        alike.setdefault((one.what, one.told[:60]), []).append(one)
    lines = []
    for same in sorted(alike.values(), key=len, reverse=True):
        one = same[0]
        lines.append(f"{len(same):5} {one.what}, {one.operation}: {one.told}")
        lines.append(f"      --seed {one.number}: {one.mutation:.200}")
    return "\n".join(lines[:most])


def main() -> None:
    """Try seeds and say what was bad; or one, with what it does."""
    if sys.argv[1:2] == ["--work"]:
        work(pickle.loads(Path(sys.argv[2]).read_bytes()), *map(int, sys.argv[3:]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", nargs="?", type=int, default=2_000)
    parser.add_argument("--seed", type=int)
    asked = parser.parse_args()
    if asked.seed is not None:
        with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
            lab = Lab(make_seeds(), Path(directory))
            lab.prepare()
            print(tell(lab.try_number(asked.seed, tells=True)) or "nothing is bad")
        return
    ends, bad = run(0, asked.seeds)
    print(tell(bad))
    print(f"{asked.seeds} mutants, {ends.total()} operations, of which worked {ends.pop('', 0)};")
    print(f"others ended by {dict(ends.most_common())}. Bad: {len(bad)}")
    sys.exit(bool(bad))


def digest_value(value: Any) -> str:
    """Digest of all that a save records of a value."""
    return digest_blob(encode_blobs("", {"": value}, (), allow_pickle=True)[""])


if __name__ == "__main__":
    main()
