"""Mutated checkpoint directories: every command and every load works or raises an error of ours.

A seed draws one of `seeds.NAMES`, changes it (`mutations.mutate`), corrects the digests of most
mutants as an attacker would (`trees.sign`), and does some of `operations`. `watch.Watch` sees what
must not happen.

    python tests/mutants/fuzz.py 5000            seeds 0 to 4999; how many were bad, and how
    python tests/mutants/fuzz.py --seed 1234     one of them
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from jobrunner.errors import JobRunnerError
from tests.mutants.mutations import mutate
from tests.mutants.operations import READING, WRITING, Case, operate
from tests.mutants.seeds import NAMES, Seed, make_seeds
from tests.mutants.trees import Tree, sign, write_tree
from tests.mutants.watch import TimeIsUpError, Watch, limit_memory

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
PATIENCE_SECONDS = 60
_FRUGAL = {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
"""Threads would reserve memory that they do not use."""


@dataclass(frozen=True)
class Bad:
    """Something that must not happen."""

    number: int
    what: str
    told: str
    mutation: str = ""


@dataclass
class Mutant:
    """What a number stands for."""

    seed: Seed
    tree: Tree
    is_signed: bool
    mutation: str
    operations: Sequence[str]


def numbers_of(names: Collection[str], first: int, count: int) -> list[int]:
    """Those numbers of a range whose seeds have these names."""
    numbers = range(first, first + count)
    return [number for number in numbers if NAMES[number % len(NAMES)] in names]


def draw_mutant(number: int, seeds: Mapping[str, Seed]) -> Mutant:
    """The mutant of a number."""
    draw = random.Random(number)
    seed = seeds[NAMES[number % len(NAMES)]]
    tree = dict(seed.tree)
    changes = [mutate(draw, tree) for _ in range(draw.choice((1, 1, 1, 2, 3))) if tree]
    is_signed = draw.random() < 0.65
    if is_signed:
        sign(tree, seed.tree)
    operations = [*draw.sample(READING, 4), *draw.sample(WRITING, draw.choice((1, 1, 2)))]
    told = f"{seed.name}, {'; '.join(changes)}, {'' if is_signed else 'not '}signed"
    return Mutant(seed, tree, is_signed, told, operations)


class Lab:
    """Where mutants are made and tried, in a process of its own."""

    def __init__(self, seeds: Mapping[str, Seed], root: Path, most: int = 99) -> None:
        logging.getLogger("jobrunner").setLevel(logging.CRITICAL)
        self.seeds, self.root, self.most = seeds, str(root), most
        self.expected: dict[str, dict[str, str]] = {}
        first = next(iter(seeds))
        for seed in seeds.values():
            write_tree(seed.tree, f"{root}/whole/{seed.name}")
            # Imports everything, and tells what values there are.
            for name in (*READING, *WRITING) if seed.name == first else ("load",):
                with self.directory(seed, seed.tree) as case:
                    with contextlib.suppress(JobRunnerError):
                        operate(case, name)
                    self.expected.setdefault(seed.name, {}).update(case.loaded)
        self.watch = Watch(root / "canary")
        self.before = set(os.listdir(root))
        limit_memory()

    @contextlib.contextmanager
    def directory(self, seed: Seed, tree: Tree) -> Iterator[Case]:
        """Files for as long as the context lasts; yields what can be done with them."""
        path, copied = f"{self.root}/runs/mutant", f"{self.root}/copied"
        write_tree(tree, path)
        os.mkdir(copied)
        try:
            yield Case(path, f"{copied}/to", f"{self.root}/whole/{seed.name}", seed.job())
        finally:
            shutil.rmtree(path)
            shutil.rmtree(copied)

    def attempt(self, number: int) -> tuple[Counter[str], list[Bad]]:
        """Do some operations with a mutant; how they ended, and what must not happen."""
        mutant = draw_mutant(number, self.seeds)
        count = min(self.most, len(mutant.operations))
        names = random.Random(number).sample(mutant.operations, count)
        ends: Counter[str] = Counter()
        bad = []
        with self.directory(mutant.seed, mutant.tree) as case:
            for name in sorted(names, key=mutant.operations.index):  # at last those that write
                end, wrong = self.watch_operation(case, name, mutant)
                ends[end] += 1
                for what, why in dict.fromkeys(wrong):
                    bad.append(Bad(number, what, f"{name}: {why}", mutant.mutation))
        return ends, bad

    def watch_operation(
        self, case: Case, name: str, mutant: Mutant
    ) -> tuple[str, list[tuple[str, str]]]:
        """Returns the error with which an operation ended, "" if it worked, and what was wrong."""
        error: BaseException | None = None
        roots = (os.path.dirname(case.path), case.copy, case.whole)
        with self.watch.during(*roots) as wrong:
            try:
                operate(case, name)
            except BaseException as caught:
                error = caught
        if isinstance(error, TimeIsUpError | MemoryError):
            wrong.append(("memory" if isinstance(error, MemoryError) else "hang", explain(error)))
        elif isinstance(error, JobRunnerError):
            if not any(root in str(error) for root in roots):
                wrong.append(("nameless", f"{type(error).__name__}: {error}"))
        elif error is not None:
            wrong.append(("exception", explain(error)))
        for key, digest in case.loaded.items():
            if not mutant.is_signed and self.expected[mutant.seed.name].get(key) != digest:
                wrong.append(("wrong data", key))
        case.loaded.clear()
        there = set(os.listdir(self.root)) - {"copied"}
        if there != self.before:
            wrong.append(("write outside", f"files: {there ^ self.before}"))
        return type(error).__name__ if error else "", wrong


def explain(error: BaseException) -> str:
    """An error that should not be, in a line, with the line of the package that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/jobrunner/" in frame.filename] or frames
    where = f"{own[-1].filename.rpartition('/jobrunner/')[2]}:{own[-1].lineno} {own[-1].name}"
    return f"{type(error).__name__} at {where}: {error!s:.150}"


# ---- many

_lab: Callable[[], Lab]


def _start(seeds: Mapping[str, Seed], root: Path, most: int) -> None:
    global _lab
    # Made by the first attempt, which can tell what has failed.
    _lab = functools.cache(lambda: Lab(seeds, Path(tempfile.mkdtemp(dir=root)), most))


def _attempt(number: int) -> tuple[Counter[str], list[Bad]]:
    return _lab().attempt(number)


def run(
    numbers: Sequence[int], names: Collection[str] = NAMES, most: int = 99
) -> tuple[Counter[str], list[Bad]]:
    """Try mutants in another process; returns how operations ended, and what was bad."""
    ends: Counter[str] = Counter()
    bad: list[Bad] = []
    left = list(reversed(numbers))
    seeds = make_seeds(names)
    context = multiprocessing.get_context("spawn")
    while left:
        with (
            tempfile.TemporaryDirectory(dir=MEMORY, ignore_cleanup_errors=True) as root,
            mock.patch.dict(os.environ, _FRUGAL),
            context.Pool(1, _start, (seeds, Path(root), most)) as pool,
            contextlib.suppress(multiprocessing.TimeoutError),
        ):
            while left:
                number = left.pop()
                bad.append(Bad(number, "hang or crash", "of the process"))  # unless it answers
                some_ends, some_bad = pool.apply_async(_attempt, (number,)).get(PATIENCE_SECONDS)
                bad[-1:] = some_bad
                ends += some_ends
    return ends, bad


def tell(bad: Sequence[Bad]) -> str:
    """What was bad."""
    lines = [f"--seed {it.number}: {it.what}, {it.told}\n    {it.mutation:.200}" for it in bad]
    return "\n".join(lines[:40])


def main() -> None:
    """Try seeds and say what was bad."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", nargs="?", type=int, default=2_000)
    parser.add_argument("--seed", type=int)
    asked = parser.parse_args()
    numbers = range(asked.seeds) if asked.seed is None else range(asked.seed, asked.seed + 1)
    ends, bad = run(numbers)
    print(tell(bad))
    print(f"{len(numbers)} mutants; their operations ended by {dict(ends.most_common())}")
    print(f"Bad: {len(bad)}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
