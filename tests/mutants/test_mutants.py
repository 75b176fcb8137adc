"""Whatever lies in a checkpoint directory, commands and loads work or raise errors of ours."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from jobrunner import JobRunner, JobRunnerError, Session
from jobrunner.errors import CheckpointError
from tests.mutants import fuzz
from tests.mutants.operations import open_manager
from tests.mutants.seeds import NAMES, make_seeds
from tests.mutants.trees import write_tree
from tests.sampling import sampled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches files by inotify")

QUICK = ("two_runs", "killed", "stacks", "format_1")


@sampled("count, names, most", sample=(400, QUICK, 1), nightly=(100_000, NAMES, 99))
def test_mutants_give_values_or_errors_of_ours(
    count: int, names: tuple[str, ...], most: int
) -> None:
    first = random.SystemRandom().randrange(1 << 30) if count > 10_000 else 0
    ends, bad = fuzz.run(fuzz.numbers_of(names, first, count), names, most)
    if bad:
        again = f"Repeat one: python tests/mutants/fuzz.py --seed {bad[0].number}"
        pytest.fail(f"{fuzz.tell(bad)}\n{again}", pytrace=False)
    assert ends[""] > ends.total() / 20
    assert ends["CheckpointCorruptError"] > ends.total() / 20


@sampled("count", sample=56, nightly=7_000)
def test_a_run_resumes_from_a_mutant_or_says_why(
    inproc_session: Session, tmp_path: Path, count: int
) -> None:
    seeds = make_seeds(QUICK[:3])
    first = random.SystemRandom().randrange(1 << 30) if count > 100 else 0
    ends: Counter[str] = Counter()
    for number in fuzz.numbers_of(seeds, first, count):
        mutant = fuzz.draw_mutant(number, seeds)
        path = str(tmp_path / "mutant")
        write_tree(mutant.tree, path)
        manager = open_manager(path)
        error = None
        try:
            epochs = manager.epochs()
            epoch = epochs[-1] if number % 2 and epochs else "latest"
            runner = JobRunner(
                mutant.seed.job(), manager, num_epochs=4, resume_from_epoch=epoch, max_restarts=0
            )
            runner.run(inproc_session)
        except JobRunnerError as caught:
            error = caught
        except Exception as caught:
            pytest.fail(f"seed {number}: {fuzz.explain(caught)}: {mutant.mutation}")
        ends[type(error).__name__] += 1
        shutil.rmtree(path)
    assert ends["NoneType"] > ends.total() / 10
    assert ends["CheckpointCorruptError"] > ends.total() / 10


def nameless(case: fuzz.Case) -> None:
    raise CheckpointError("something is wrong")


def make_and_remove_outside(case: fuzz.Case) -> None:
    os.mkdir(f"{case.path}/../../new")
    os.rmdir(f"{case.path}/../../new")


def never_end(case: fuzz.Case) -> None:
    while True:
        pass


FAULTS = (
    ("exception", lambda case: 1 / 0),
    ("code", lambda case: eval("1")),
    ("code", lambda case: __import__("this")),
    ("read outside", lambda case: open(f"{case.path}/../../canary/file").close()),
    ("read outside", lambda case: os.listdir("/")),
    ("write outside", lambda case: os.truncate(f"{case.path}/../../canary/file", 1)),
    ("write outside", make_and_remove_outside),
    ("hang", lambda case: time.sleep(99)),
    ("hang", never_end),
    ("memory", lambda case: bytearray(1 << 33)),
    ("nameless", nameless),
    ("wrong data", lambda case: case.loaded.update({"0/a/n": "1"})),
)


def watch_faults(directory: str) -> None:
    lab = fuzz.Lab(make_seeds(["killed"]), Path(directory))
    mutants = [fuzz.draw_mutant(i, lab.seeds) for i in fuzz.numbers_of(["killed"], 0, 99)]
    mutant = next(mutant for mutant in mutants if not mutant.is_signed)
    for what, fault in FAULTS:
        fuzz.operate = lambda case, name, fault=fault: fault(case)
        with lab.directory(mutant.seed, mutant.seed.tree) as case:
            _, wrong = lab.watch_operation(case, "", mutant)
        assert {found for found, _ in wrong} == {what}, (what, wrong)


@pytest.mark.nightly
def test_what_must_not_happen_is_noticed(tmp_path: Path) -> None:
    """In a process of its own, because what watches it cannot be taken back."""
    process = multiprocessing.get_context("spawn").Process(
        target=watch_faults, args=[str(tmp_path)]
    )
    process.start()
    process.join()
    assert process.exitcode == 0
